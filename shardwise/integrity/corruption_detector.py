"""Numbers that change by themselves: found in the step in which it happens, with the rank and the tensor.

- What a rank keeps (weights, optimizer states) has the checksums right before an update that it had right after the
  last one. If not, this rank's memory has changed: it is named, whether or not others hold the same.
- What several ranks hold (copies of weights, states and summed gradients) has the same checksums on all of them after
  each update. If not, one of them computed something else: most are right, and of two the one that is wrong shows when
  the step is taken again, which gives what it should have given.
- What a rank computes from its own samples is computed again by others, now and then (`shardwise.integrity.redundant_compute`).

Nothing waits for it: checksums stay on the device, one small row of each rank travels with the signal to stop, and
whether anything is wrong is read with the loss. All ranks come to the same verdict. The run then goes back to the last
checkpoint; a checkpoint is confirmed when it was copied, so none of a changed state stays.

Where reading all tensors twice a step would take more than a hundredth of it, each step looks at a part of them in
turn: copies that differ stay different, so they are found within one round, but what only one rank has is found only
where it is just looked at. After the first find all are looked at in each step. The tensors of a rank are in
`shardwise.integrity.checksums`.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import all_gather
from shardwise.console import format_ranks, pluralize
from shardwise.data.sample_stream import Samples
from shardwise.errors import RunError
from shardwise.files import write_text
from shardwise.integrity.anomaly_policy import Rollback
from shardwise.integrity.checksums import (
    COPY_KINDS,
    StateChecksums,
    TrackedTensor,
    compute_checksums,
    mixing_factors,
    reference_ranks,
)
from shardwise.integrity.redundant_compute import RedundantCompute
from shardwise.job import Job
from shardwise.parallel.engine import Engine

SIGNAL, CHANGED, FIRST_COPY = 0, 1, 2  # places in a rank's row
MAX_OVERHEAD = 0.008  # of a step that checksums may take
FLOPS_PER_BYTE = {"cpu": 1.5, "cuda": 120.0}  # that a device computes while it reads a byte, as measured
MAX_PARTS = 100  # parts
FLOPS_PER_CHECKSUM = {"cpu": 4e5, "cuda": 6e9}  # and while a checksum is begun
MICRO_BATCH = "a micro-batch"
ChecksumLabels = list[tuple[str, frozenset[str]]]
"""What checksums are of, each with its kinds of copies."""


@dataclass(frozen=True)
class Corruption:
    """`ranks`: of whom one is wrong, where there is more than one."""

    step: int
    ranks: list[int]
    label: str
    message: str


class CorruptionDetector:
    def __init__(
        self, job: Job, engine: Engine, optimizer: torch.optim.Optimizer, run: Path, flops: float,
        log_event: Callable[..., None],
    ):  # fmt: skip
        """`flops`: of a step of this rank, 0 where steps are not to be watched. Which ranks were found corrupt is kept
        in `run`."""
        self.job, self.engine, self.flops, self.log_event = job, engine, flops, log_event
        self.state_checksums, self.redundant_compute = StateChecksums(engine, optimizer), RedundantCompute(job, engine)
        self.device, self.world = engine.mesh.device, engine.mesh.layout.world
        self.enabled = bool(job.run.checksum_every and flops)
        self.parts = job.run.checksum_every if isinstance(job.run.checksum_every, int) else 0
        self.current_part = 0
        self.quarantine_file, self.hosts = run / "quarantine.json", [socket.gethostname()]
        self.reference_ranks = reference_ranks(engine.mesh.layout, engine.mesh["local_sgd"].size > 1).to(self.device)
        self.mixing_factors: dict[tuple[int, int], Tensor] = {}
        self.checksum_labels = self.gradient_labels = self.expected_labels = self.changed_labels = ChecksumLabels()
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.checksums = self.gradient_checksums = self.expected_checksums = self.observed_checksums = none
        """Of all that is looked at in a step: gradients, and the state after it (`kept`); that before it."""
        self.changed = none.bool()
        self.unresolved: tuple[Corruption, int] | None = None
        """A find that is to be settled when its step is taken again, and what the checksum was here."""

    def reset(self) -> None:
        """To be called when weights and states were made or loaded."""
        if self.enabled:
            self.parts = self.parts or self._choose_parts()
            self._store_expected(self._current_subset(self._tracked_state()))
            self.observed_checksums = self.expected_checksums

    def before_step(self, step: int, samples: Samples) -> None:
        """To be called before step `done` is taken."""
        if self.enabled:
            self.redundant_compute.before_step(step, samples)

    def before_update(self) -> None:
        """To be called when gradients are summed and nothing is updated yet."""
        if self.enabled:
            gradients = self._current_subset(self.state_checksums.gradients())
            self.observed_checksums = compute_checksums(self._current_subset(self._tracked_state()), self.device)
            self.gradient_checksums = compute_checksums(gradients, self.device)
            self.gradient_labels = [(one.label, one.copy_kinds) for one in gradients]

    def after_step(self) -> None:
        """To be called when all is updated."""
        if self.enabled:
            # States are made in the first step, and come after weights.
            self.changed, self.changed_labels = (
                self.observed_checksums[: len(self.expected_checksums)] != self.expected_checksums,
                self.expected_labels,
            )
            self.current_part = (self.current_part + 1) % self.parts
            self._store_expected(self._current_subset(self._tracked_state()))
            self.checksums, self.checksum_labels = (
                torch.cat((self.gradient_checksums, self.expected_checksums)),
                self.gradient_labels + self.expected_labels,
            )

    def reduce_flags(self, signal: int) -> Tensor:
        """The highest signal that any rank was sent, and whether anything is wrong on any; still on the device."""
        row = torch.zeros(FIRST_COPY + len(COPY_KINDS) + 2, dtype=torch.int64, device=self.device)
        row[SIGNAL] = signal
        if len(self.checksums):
            key = self.current_part, len(self.checksums)
            if key not in self.mixing_factors:
                self.mixing_factors[key] = mixing_factors([kinds for _, kinds in self.checksum_labels]).to(self.device)
            row[CHANGED] = self.changed.any()
            row[FIRST_COPY:-2] = (self.mixing_factors[key] * self.checksums).sum(1)
            row[-2], row[-1] = self.redundant_compute.redundant_result, self.redundant_compute.step_result
        table = row[None]
        if self.world > 1:
            table = row.new_empty(self.world, len(row))
            all_gather(table.view(-1), row, axis=self.engine.mesh.all_ranks)
        copies = table[:, FIRST_COPY:]
        wrong = table[:, CHANGED].any() | (copies != copies.gather(0, self.reference_ranks)).any()
        return torch.stack((table[:, SIGNAL].max(), wrong.long()))

    def evaluate(self, step: int, is_corrupt: bool) -> None:
        """Raises `Rollback` where something is wrong, or `RunError` where a rank was found corrupt too often."""
        if self.unresolved is not None and self.unresolved[0].step == step:
            corruption, before = self.unresolved
            self.unresolved = None
            self._resolve(corruption, before)
        if is_corrupt:
            self._report(self._locate_corruption(step))

    def check_saved_state(self, step: int) -> None:
        """To be called when a checkpoint was copied: raises `Rollback` where the state is not that of its step, or
        differs between ranks that hold the same."""
        if not self.enabled:
            return
        state = self._tracked_state()
        self.changed, self.changed_labels = (
            compute_checksums(self._current_subset(state), self.device) != self.expected_checksums,
            self.expected_labels,
        )
        if self.parts > 1:
            self.checksums, self.checksum_labels = (
                compute_checksums(state, self.device),
                [(one.label, one.copy_kinds) for one in state],
            )
            self.mixing_factors.pop((self.current_part, len(self.checksums)), None)
        if self.reduce_flags(0)[1]:
            self._report(self._locate_corruption(step))

    # Behind the scenes

    def _store_expected(self, state: list[TrackedTensor]) -> None:
        self.expected_checksums, self.expected_labels = (
            compute_checksums(state, self.device),
            [(one.label, one.copy_kinds) for one in state],
        )

    def _tracked_state(self) -> list[TrackedTensor]:
        return self.state_checksums.weights() + self.state_checksums.states()

    def _current_subset(self, tracked: list[TrackedTensor]) -> list[TrackedTensor]:
        """What is looked at in this turn, on all ranks that hold it."""
        if self.parts == 1:
            return tracked
        return [one for one in tracked if crc32(one.label.encode()) % self.parts == self.current_part]

    def _choose_parts(self) -> int:
        """In how many parts it takes no more than its share of a step, on the rank that has most to read."""
        weights, kind = [one.tensor.nbytes for one in self.state_checksums.weights()], self.device.type
        cost_per_pass = FLOPS_PER_BYTE[kind] * sum(weights) + FLOPS_PER_CHECKSUM[kind] * len(weights)
        cost = torch.tensor(7.0 * cost_per_pass, device=self.device)  # weights and two averages, twice; gradients
        if self.world > 1:
            dist.all_reduce(cost, dist.ReduceOp.MAX)
        return min(max(1, math.ceil(float(cost) / (MAX_OVERHEAD * self.flops))), MAX_PARTS)

    def _locate_corruption(self, step: int) -> list[Corruption]:
        """Who has what is wrong, from what all ranks know."""
        report = {
            "host": socket.gethostname(),
            "checksums": self.checksums.tolist(),
            "labels": self.checksum_labels,
            "redundant_compute": (
                int(self.redundant_compute.redundant_result),
                int(self.redundant_compute.step_result),
            ),
            "changed": [label for (label, _), bad in zip(self.changed_labels, self.changed.tolist()) if bad],
        }
        reports = self._all_gather(report)
        self.hosts = [one["host"] for one in reports]
        corruptions = []
        for rank, one in enumerate(reports):
            if one["changed"]:
                others = f", and {len(one['changed']) - 1} more" if len(one["changed"]) > 1 else ""
                words = f"rank {rank}: {one['changed'][0]} has changed since step {step - 1}, without an update{others}"
                corruptions.append(Corruption(step, [rank], one["changed"][0], words))
        return (
            corruptions
            or self._check_redundant_compute(step, [one["redundant_compute"] for one in reports])
            or self._compare_copies(step, reports)
        )

    def _check_redundant_compute(self, step: int, votes: Sequence[tuple[int, int]]) -> list[Corruption]:
        """Who computed a micro-batch otherwise than the others; of a tensor group that is all of it."""
        groups: dict[int, list[int]] = {}
        for rank, first in enumerate(self.reference_ranks[:, -1].tolist()):
            groups.setdefault(first, []).append(rank)
        ranks = sorted(
            {
                g[number]
                for g in groups.values()
                for number in self.redundant_compute.find_outliers([votes[r] for r in g])
            }
        )
        if not ranks:
            return []
        verb = "computes" if len(ranks) == 1 else "compute"
        words = f"{format_ranks(ranks)} {verb} another result for a micro-batch of step {step} than others that took it"
        return [Corruption(step, ranks, MICRO_BATCH, words)]

    def _compare_copies(self, step: int, reports: Sequence[dict[str, Any]]) -> list[Corruption]:
        """The first tensor, gradients before all, of which ranks that should have the same do not."""
        for label in dict.fromkeys(label for one in reports for label, _ in one["labels"]):
            suspects: list[set[int]] = []
            same: set[int] = set()
            for column, kind in enumerate(COPY_KINDS):
                groups: dict[int, dict[int, int]] = {}
                for rank, one in enumerate(reports):
                    here = {
                        what: value for (what, kinds), value in zip(one["labels"], one["checksums"]) if kind in kinds
                    }
                    if label in here:
                        groups.setdefault(int(self.reference_ranks[rank, column]), {})[rank] = here[label]
                for group in groups.values():
                    count = Counter(group.values()).most_common()
                    if len(count) > 1:
                        right = count[0][0] if 2 * count[0][1] > len(group) else None
                        suspects.append({rank for rank, value in group.items() if value != right})
                        same |= group.keys()
            if suspects:
                ranks = sorted(set.intersection(*suspects) or set.union(*suspects))
                if others := sorted(same - set(ranks)):
                    verb = "has" if len(ranks) == 1 else "have"
                    words = f"{format_ranks(ranks)} {verb} another result for {label} in step {step} than "
                    return [Corruption(step, ranks, label, words + format_ranks(others))]
                return [Corruption(step, ranks, label, f"{format_ranks(ranks)} do not agree on {label} in step {step}")]
        raise RunError(f"step {step}: checksums that were mixed differ between ranks, those of single tensors do not.")

    def _report(self, corruptions: list[Corruption]) -> None:
        for corruption in corruptions:
            is_attributed = len(corruption.ranks) == 1
            can_resolve = not is_attributed and self.parts == 1 and corruption.label != MICRO_BATCH
            later = "; which of them is wrong shows when the step is taken again" if can_resolve else ""
            self.log_event(
                "corruption",
                f"{corruption.message}{later}.",
                step=corruption.step,
                ranks=corruption.ranks,
                tensor=corruption.label,
            )
            if is_attributed:
                self._record_quarantine(corruption)
            elif can_resolve:
                self.unresolved = corruption, self._local_checksum(corruption.label)
        self.parts, self.current_part = 1, 0
        words = " and ".join(format_ranks(corruption.ranks) for corruption in corruptions)
        raise Rollback(
            corruptions[0].step,
            f"{words} cannot be trusted with step {corruptions[0].step}",
            skip_batches=False,
            state_is_corrupt=True,
        )

    def _resolve(self, corruption: Corruption, before: int) -> None:
        wrong = [
            rank
            for rank, other in enumerate(self._all_gather(self._local_checksum(corruption.label) != before))
            if other
        ]
        if not wrong:
            return
        words = (
            f"taken again, step {corruption.step} has another result for {corruption.label} on {format_ranks(wrong)}"
        )
        message = f"{words}: what was there before was wrong."
        self.log_event("corruption", message, step=corruption.step, ranks=wrong, tensor=corruption.label, settled=True)
        for rank in wrong:
            self._record_quarantine(Corruption(corruption.step, [rank], corruption.label, words))

    def _local_checksum(self, label: str) -> int:
        """The checksum of a tensor here, if there is one."""
        return next(
            (int(value) for (what, _), value in zip(self.checksum_labels, self.checksums.tolist()) if what == label), 0
        )

    def _record_quarantine(self, corruption: Corruption) -> None:
        """Writes down who was found; too often, and the run ends."""
        rank = corruption.ranks[0]
        quarantined: dict[str, list[Any]] = (
            json.loads(self.quarantine_file.read_text()) if self.quarantine_file.exists() else {}
        )
        if self.world > 1:
            dist.barrier()  # all have read it
        entries, host = quarantined.setdefault(str(rank), []), self.hosts[rank]
        entries.append(
            {"time": round(time.time(), 3), "step": corruption.step, "tensor": corruption.label, "host": host}
        )
        if self.engine.mesh.rank == 0:
            write_text(self.quarantine_file, json.dumps(quarantined, indent=1))
        if len(entries) > self.job.run.max_corruptions:
            raise RunError(
                f"rank {rank} on {host} was found corrupt {pluralize(len(entries), 'time')}, last by this: {corruption.message}. "
                "Take that device out and go on without it by --resume."
            )

    def _all_gather(self, report: Any) -> list[Any]:
        if self.world == 1:
            return [report]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, report)
        return found
