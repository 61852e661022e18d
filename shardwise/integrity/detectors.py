"""Detects loss spikes, non-finite gradients and silent data corruption, and decides what to do. All ranks decide alike.

A replay of a step finds where non-finite values first appear. Corruption is found in its step, with rank and tensor, by
checksums of memory and of copies, and by micro-batches that several ranks compute (docs/explanation/corruption.md). It
adds no synchronization: checksums stay on the device, one small row per rank is all-gathered with the stop flag, and
the result is read with the loss. All ranks roll back to the last checkpoint; none is kept with a corrupt state."""

import json
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.collectives import all_gather, all_gather_json, all_reduce, broadcast_json
from shardwise.console import format_ranks, pluralize
from shardwise.data.sample_stream import Samples
from shardwise.errors import RunError
from shardwise.files import parse_record, write_text
from shardwise.integrity import checksums
from shardwise.integrity.checksums import COPY_KINDS, RedundantCompute, StateChecksums, TrackedTensor, compute_checksums
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.step import backward

WINDOW, MIN_HISTORY = 64, 16  # recent losses to compare with; with fewer than MIN_HISTORY nothing is a spike
MAX_SKIPPED_STEPS = 10  # consecutive steps with non-finite gradients after which the run ends
MAX_SPIKE_ROLLBACKS = 5  # loss spikes per run whose batches are skipped
SIGNAL, CHANGED, FIRST_COPY = 0, 1, 2  # columns of a rank's row
MAX_OVERHEAD = 0.008  # share of a step that checksums may take
FLOPS_PER_BYTE = {"cpu": 1.5, "cuda": 120.0}  # measured: compute forgone per byte that a checksum reads
FLOPS_PER_CHECKSUM = {"cpu": 4e5, "cuda": 6e9}  # measured: compute forgone per checksum launched
MICRO_BATCH = "micro-batch"


class LossSpikeDetector:
    """Detects losses more than `threshold` deviations above the median of recent losses. A deviation is 1.4826 times
    the median absolute deviation, which estimates the standard deviation robustly and is equal to it for a normal
    distribution. It is at least 0.1% of the median."""

    def __init__(self, threshold: float):
        self.threshold, self.history = threshold, deque[float](maxlen=WINDOW)

    def evaluate(self, loss: float) -> str:
        """Returns a description if the loss is a spike; otherwise adds it to the history and returns ""."""
        if self.threshold and len(self.history) >= MIN_HISTORY:
            center = median(self.history)
            spread = max(1.4826 * median(abs(value - center) for value in self.history), 1e-3 * abs(center))
            deviations = (loss - center) / spread
            if deviations > self.threshold:
                return f"a loss of {loss:.4g}, {deviations:.0f} deviations above the recent median of {center:.4g}"
        self.history.append(loss)
        return ""


def locate_nonfinite(engine: Engine, samples: Samples) -> str:
    """Replays a step without its update; returns, on every rank, where non-finite values first appear."""
    findings: list[tuple[str, str]] = []
    with ExitStack() as hooks:
        for name, module in (pair for chain in engine.chains for pair in chain.named_modules()):
            if not list(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(_check_output, name, findings)))
        backward(engine, samples)
    if not findings:
        # The backward pass runs from the loss to the first layer, so it reaches the last parameter first.
        bad = [param_shard.name for param_shard in engine.param_shards if not param_shard.grad.isfinite().all()]
        findings = [("the gradient of", name) for name in bad[-1:]]
    engine.data.sync_weights()
    local = (engine.mesh["pipeline"].index, engine.mesh.rank, findings[0] if findings else None)
    gathered = all_gather_json(local)
    return _describe_origin(sorted(gathered, key=lambda entry: entry[:2]))  # in the order of the forward pass


def _check_output(name: str, findings: list[tuple[str, str]], module: nn.Module, inputs: Any, output: Any) -> None:
    if not findings and not _is_finite(output):
        weights = [key for key, weight in module.named_parameters(recurse=False) if not _is_finite(weight)]
        if weights:
            findings.append(("the weight", f"{name}.{weights[0]}"))
        elif _is_finite(inputs):
            findings.append(("the output of", name))


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    return all(_is_finite(item) for item in value) if isinstance(value, tuple | list) else True


def _describe_origin(findings: list[tuple[int, int, tuple[str, str] | None]]) -> str:
    """`findings`: stage, rank and finding of every rank."""
    found = [(finding, rank) for _, rank, finding in findings if finding]
    if not found:
        return "a replay of the step is finite, so the fault was transient"
    in_forward = [finding for finding, _ in found if finding[0] != "the gradient of"]
    first = in_forward[0] if in_forward else found[-1][0]
    ranks = sorted(rank for finding, rank in found if finding == first)
    return f"non-finite values first appear in {' '.join(first)} on {format_ranks(ranks)}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of the last step, read from the device; the same on every rank."""

    loss: float
    grad_norm: float
    skipped: bool
    stop_signal: int = 0  # the stop signal that any rank received; 0 if none
    is_corrupt: bool = False  # whether checksums show corruption on any rank (see `CorruptionDetector`)


class Rollback(Exception):
    """Raised after a bad step to return to the last checkpoint."""

    def __init__(self, step: int, reason: str, skip_batches: bool, state_is_corrupt: bool = False):
        """`skip_batches`: do not train on the batches since the checkpoint again. `state_is_corrupt`: the state in
        memory is unusable, and so is a checkpoint of this step."""
        super().__init__(reason)
        self.step, self.skip_batches, self.state_is_corrupt = step, skip_batches, state_is_corrupt


class AnomalyPolicy:
    """Applies `run.on_nan` and `run.loss_spike_threshold` after each step."""

    def __init__(self, job: Job, engine: Engine, can_replay: bool, skipped_windows: Callable[[], int],
                 log_event: Callable[..., None]):  # fmt: skip
        """`can_replay`: a step can be replayed. `skipped_windows`: how many spikes had their batches skipped."""
        self.job, self.engine, self.can_replay = job, engine, can_replay
        self.skipped_windows, self.log_event = skipped_windows, log_event
        self.skipped_in_a_row = 0
        self.spike_detector = LossSpikeDetector(job.run.loss_spike_threshold)
        self.retried_steps: set[int] = set()

    def evaluate(self, step: int, verdict: Verdict, samples: Samples) -> None:
        """Raises `Rollback` or `RunError` if the run cannot simply continue."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if verdict.skipped else 0
        if verdict.skipped:
            self._handle_skipped(step, verdict.grad_norm, samples)
        elif spike := self.spike_detector.evaluate(verdict.loss):
            if self.skipped_windows() < MAX_SPIKE_ROLLBACKS:
                self.spike_detector = LossSpikeDetector(self.job.run.loss_spike_threshold)
                raise Rollback(step, f"step {step} had {spike}", skip_batches=True)
            limit = f"{MAX_SPIKE_ROLLBACKS} spikes have been skipped already, so the run continues."
            self.log_event("loss_spike", f"step {step} had {spike}; {limit}", step=step)

    def _handle_skipped(self, step: int, grad_norm: float, samples: Samples) -> None:
        message = f"step {step} had a gradient norm of {grad_norm}, so its update was skipped"
        policy, dynamic_scale = self.job.run.on_nan, self.engine.scale.dynamic
        if self.skipped_in_a_row == 1 and not dynamic_scale and self.can_replay:
            message += f"; {locate_nonfinite(self.engine, samples)}"
        if policy == "stop" and not dynamic_scale:
            raise RunError(f'{message}. The run ends because run.on_nan = "stop".')
        if policy == "rollback" and not dynamic_scale and step not in self.retried_steps:
            self.retried_steps.add(step)
            self.spike_detector = LossSpikeDetector(self.job.run.loss_spike_threshold)
            raise Rollback(step, message, skip_batches=False)
        self.log_event("step_skipped", f"{message}.", step=step)
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            problem = f"{MAX_SKIPPED_STEPS} steps up to step {step} had non-finite gradients"
            raise RunError(f"{problem}; lower optimizer.lr or use bf16.")


@dataclass(frozen=True)
class Corruption:
    """A detected corruption. If `ranks` has several entries, one of them is wrong."""

    step: int
    ranks: list[int]
    label: str
    message: str


class CorruptionDetector:
    """Checks this rank's state around every update. All ranks call the same methods in the same order."""

    def __init__(self, job: Job, engine: Engine, optimizer: torch.optim.Optimizer, run: Path, flops: float,
                 log_event: Callable[..., None]):  # fmt: skip
        """`flops`: FLOPs per step of this rank; 0 disables the detector. `run`: the run folder (`quarantine.json`)."""
        self.job, self.engine, self.flops, self.log_event = job, engine, flops, log_event
        self.state_checksums, self.redundant_compute = StateChecksums(engine, optimizer), RedundantCompute(job, engine)
        self.device, self.world = engine.mesh.device, engine.mesh.layout.world
        self.enabled = bool(job.run.checksum_every and flops)
        self.parts = job.run.checksum_every if isinstance(job.run.checksum_every, int) else 0
        self.current_part = 0
        self.quarantine_file, self.hosts = run / "quarantine.json", [socket.gethostname()]
        references = checksums.reference_ranks(engine.mesh.layout, engine.mesh["local_sgd"].size > 1)
        self.reference_ranks = references.to(self.device)
        self.checksums = self.gradients = self.expected = self.observed = compute_checksums([], self.device)
        """`expected`: the state after the last update; `observed`: the state right before the next one; `checksums`:
        gradients and expected state, for the comparison of copies."""
        self.changed, self.changed_labels = self.checksums.values.bool(), self.checksums.labels
        self.no_flags = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.unresolved: tuple[Corruption, int] | None = None
        """A corruption that a replay of its step will attribute, and this rank's checksum from before the replay."""

    def reset(self) -> None:
        """Call after weights and optimizer states were initialized or loaded."""
        if self.enabled:
            if not self.parts:  # the number that keeps checksums below `MAX_OVERHEAD` on the rank with the most to read
                sizes, kind = [entry.tensor.nbytes for entry in self.state_checksums.weights()], self.device.type
                cost_per_pass = FLOPS_PER_BYTE[kind] * sum(sizes) + FLOPS_PER_CHECKSUM[kind] * len(sizes)
                # Seven passes: weights and two optimizer moments, each before and after the update, and gradients.
                cost = torch.tensor(7.0 * cost_per_pass, device=self.device)
                all_reduce(cost, dist.ReduceOp.MAX, axis=self.engine.mesh.all_ranks)
                parts = math.ceil(float(cost) / (MAX_OVERHEAD * self.flops))
                self.parts = min(max(1, parts), checksums.MAX_PARTS)
            self.expected = self.observed = self._compute(self._tracked_state())

    def before_step(self, step: int, samples: Samples) -> None:
        if self.enabled:
            self.redundant_compute.before_step(step, samples)

    def before_update(self) -> None:
        """Call after gradients are reduced and before the optimizer step."""
        if self.enabled:
            self.observed = self._compute(self._tracked_state())
            self.gradients = self._compute(self.state_checksums.gradients())

    def after_step(self) -> None:
        if self.enabled:
            # The first step creates optimizer states; they come after the weights.
            self.changed = self.observed.values[: len(self.expected.values)] != self.expected.values
            self.changed_labels = self.expected.labels
            self.current_part = (self.current_part + 1) % self.parts
            self.expected = self._compute(self._tracked_state())
            values = torch.cat((self.gradients.values, self.expected.values))
            self.checksums = checksums.Checksums(values, self.gradients.labels + self.expected.labels)

    def reduce_flags(self, signal: int) -> Tensor:
        """Returns the highest stop signal of any rank and whether any rank is corrupt, as a tensor on the device."""
        if self.world == 1 and not self.enabled and not signal:
            return self.no_flags
        row = torch.zeros(FIRST_COPY + len(COPY_KINDS) + 2, dtype=torch.int64, device=self.device)
        row[SIGNAL] = signal
        if self.checksums.labels:
            factors = checksums.mixing_factors(tuple(kinds for _, kinds in self.checksums.labels), self.device)
            row[CHANGED] = self.changed.any()
            row[FIRST_COPY:-2] = (factors * self.checksums.values).sum(1)
            row[-2], row[-1] = self.redundant_compute.redundant_result, self.redundant_compute.step_result
        table = row.new_empty(self.world, len(row))
        all_gather(table.view(-1), row, axis=self.engine.mesh.all_ranks)
        copies = table[:, FIRST_COPY:]
        wrong = table[:, CHANGED].any() | (copies != copies.gather(0, self.reference_ranks)).any()
        return torch.stack((table[:, SIGNAL].max(), wrong.long()))

    def evaluate(self, step: int, is_corrupt: bool) -> None:
        """Raises `Rollback` after corruption, or `RunError` if a rank was corrupt too often."""
        if self.unresolved is not None and self.unresolved[0].step == step:
            corruption, first_checksum = self.unresolved
            self.unresolved = None
            self._resolve(corruption, first_checksum)
        if is_corrupt:
            self._report(self._locate_corruption(step))

    def check_saved_state(self, step: int) -> None:
        """Call after a checkpoint was copied. Raises `Rollback` if the state has changed or copies of it differ."""
        if not self.enabled:
            return
        state = self._tracked_state()
        self.changed = self._compute(state).values != self.expected.values
        self.changed_labels = self.expected.labels
        if self.parts > 1:
            self.checksums = compute_checksums(state, self.device)
        if self.reduce_flags(0)[1]:
            self._report(self._locate_corruption(step))

    def _tracked_state(self) -> list[TrackedTensor]:
        return self.state_checksums.weights() + self.state_checksums.states()

    def _compute(self, tracked: list[TrackedTensor]) -> checksums.Checksums:
        """Returns the checksums of the tensors in the current part, which is the same on all ranks."""
        if self.parts > 1:
            tracked = [entry for entry in tracked if crc32(entry.label.encode()) % self.parts == self.current_part]
        return compute_checksums(tracked, self.device)

    def _locate_corruption(self, step: int) -> list[Corruption]:
        """All-gathers the checksums of every tensor, and returns which ranks and tensors are corrupt."""
        compute = self.redundant_compute
        report: dict[str, Any] = {
            "host": socket.gethostname(), "checksums": self.checksums.values.tolist(),
            "labels": [(label, sorted(kinds)) for label, kinds in self.checksums.labels],
            "redundant_compute": (int(compute.redundant_result), int(compute.step_result)),
            "changed": [label for (label, _), bad in zip(self.changed_labels, self.changed.tolist()) if bad],
        }  # fmt: skip
        reports = all_gather_json(report)
        self.hosts = [report["host"] for report in reports]
        corruptions = []
        for rank, report in enumerate(reports):
            if changed := report["changed"]:
                others = f" (and {pluralize(len(changed) - 1, 'other tensor')})" if len(changed) > 1 else ""
                message = f"rank {rank}: {changed[0]}{others} changed after step {step - 1} without an update"
                corruptions.append(Corruption(step, [rank], changed[0], message))
        votes = [tuple(report["redundant_compute"]) for report in reports]
        return corruptions or self._check_redundant_compute(step, votes) or self._compare_copies(step, reports)

    def _check_redundant_compute(self, step: int, votes: Sequence[tuple[int, int]]) -> list[Corruption]:
        """Returns the ranks with a wrong result for the redundant micro-batch; tensor ranks share one result."""
        references, outliers = self.reference_ranks[:, -1], set[int]()
        for reference in references.unique():
            group = (references == reference).nonzero().flatten().tolist()
            indices = self.redundant_compute.find_outliers([votes[rank] for rank in group])
            outliers |= {group[index] for index in indices}
        if not outliers:
            return []
        ranks = sorted(outliers)
        message = f"{format_ranks(ranks)} computed a different result for a micro-batch of step {step} than other ranks"
        return [Corruption(step, ranks, MICRO_BATCH, message)]

    def _compare_copies(self, step: int, reports: Sequence[dict[str, Any]]) -> list[Corruption]:
        """Returns the first tensor, gradients first, whose copies differ between ranks, and the suspect ranks."""
        copies: dict[str, dict[tuple[str, int], dict[int, int]]] = {}  # checksums by label, group of copies and rank
        for rank, report in enumerate(reports):
            references = dict(zip(COPY_KINDS, self.reference_ranks[rank].tolist()))
            for (label, kinds), value in zip(report["labels"], report["checksums"]):
                for kind in kinds:
                    copies.setdefault(label, {}).setdefault((kind, references[kind]), {})[rank] = value
        for label, groups in copies.items():
            suspects: list[set[int]] = []
            involved: set[int] = set()
            for group in groups.values():
                counts = Counter(group.values()).most_common()
                if len(counts) > 1:
                    majority = counts[0][0] if 2 * counts[0][1] > len(group) else None
                    suspects.append({rank for rank, value in group.items() if value != majority})
                    involved |= group.keys()
            if suspects:
                ranks = sorted(set.intersection(*suspects) or set.union(*suspects))
                message = f"{format_ranks(ranks)} disagree on the value of {label} in step {step}"
                if others := sorted(involved - set(ranks)):
                    verb = "has" if len(ranks) == 1 else "have"
                    difference = f"a different value of {label} in step {step} than {format_ranks(others)}"
                    message = f"{format_ranks(ranks)} {verb} {difference}"
                return [Corruption(step, ranks, label, message)]
        raise RunError(f"step {step}: combined checksums differ between ranks, but no single tensor's checksums do.")

    def _report(self, corruptions: list[Corruption]) -> None:
        """Logs corruptions, records attributed ranks, and raises `Rollback`."""
        for corruption in corruptions:
            is_attributed = len(corruption.ranks) == 1
            can_resolve = not is_attributed and self.parts == 1 and corruption.label != MICRO_BATCH
            message = f"{corruption.message}{'; a replay of the step will show which one is wrong' * can_resolve}."
            ranks, label = corruption.ranks, corruption.label
            self.log_event("corruption", message, step=corruption.step, ranks=ranks, tensor=label)
            if is_attributed:
                self._record_quarantine(corruption)
            elif can_resolve:
                self.unresolved = corruption, self._local_checksum(corruption.label)
        self.parts, self.current_part = 1, 0
        ranks_text = " and ".join(format_ranks(corruption.ranks) for corruption in corruptions)
        step = corruptions[0].step
        reason = f"the results of {ranks_text} in step {step} are not trusted"
        raise Rollback(step, reason, skip_batches=False, state_is_corrupt=True)

    def _resolve(self, corruption: Corruption, first_checksum: int) -> None:
        """Blames the ranks whose result changed in the replay, which is taken to be correct."""
        differs = all_gather_json(self._local_checksum(corruption.label) != first_checksum)
        wrong = [rank for rank, is_different in enumerate(differs) if is_different]
        if not wrong:
            return
        step, label = corruption.step, corruption.label
        finding = f"the replay of step {step} gave a different value of {label} on {format_ranks(wrong)}"
        message = f"{finding}, so the first result was wrong."
        self.log_event("corruption", message, step=step, ranks=wrong, tensor=label, settled=True)
        for rank in wrong:
            self._record_quarantine(Corruption(step, [rank], label, finding))

    def _local_checksum(self, label: str) -> int:
        """Returns this rank's checksum of a tensor, or 0 if it does not have that tensor."""
        entries = zip(self.checksums.labels, self.checksums.values.tolist())
        return next((int(value) for (name, _), value in entries if name == label), 0)

    def _record_quarantine(self, corruption: Corruption) -> None:
        """Adds the rank to `quarantine.json`; raises `RunError` if it was found corrupt too often."""
        rank, found = corruption.ranks[0], dict[str, Any]()
        if self.engine.mesh.rank == 0 and self.quarantine_file.exists():
            found = parse_record(self.quarantine_file.read_bytes()) or {}  # a damaged file counts from 0 again
        quarantined = {key: entries for key, entries in broadcast_json(found).items() if isinstance(entries, list)}
        entries, host = quarantined.setdefault(str(rank), []), self.hosts[rank]
        now = round(time.time(), 3)
        entries.append({"time": now, "step": corruption.step, "tensor": corruption.label, "host": host})
        if self.engine.mesh.rank == 0:
            write_text(self.quarantine_file, json.dumps(quarantined, indent=1))
        if len(entries) > self.job.run.max_corruptions:
            often = f"{pluralize(len(entries), 'time')}, more than run.max_corruptions allows"
            last = f"most recently: {corruption.message}. Remove that device and continue with --resume."
            raise RunError(f"rank {rank} on {host} was corrupt {often}; {last}")
