"""Detects loss spikes and non-finite gradients, finds where the latter first appear, and decides what to do.

All ranks decide the same."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import all_gather_json
from shardwise.console import format_ranks
from shardwise.data.sample_stream import Samples
from shardwise.errors import RunError
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.step import backward

WINDOW, MIN_HISTORY = 64, 16  # recent losses to compare with; with fewer than MIN_HISTORY nothing is a spike


class LossSpikeDetector:
    """Detects losses more than `threshold` deviations above the median of recent losses.

    A deviation is 1.4826 times the median absolute deviation, which estimates the standard deviation robustly and is
    equal to it for a normal distribution. It is at least 0.1% of the median."""

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


MAX_SKIPPED_STEPS = 10  # consecutive steps with non-finite gradients after which the run ends
MAX_SPIKE_ROLLBACKS = 5  # loss spikes per run whose batches are skipped


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

    def __init__(
        self, job: Job, engine: Engine, can_replay: bool, skipped_windows: Callable[[], int],
        log_event: Callable[..., None],
    ):  # fmt: skip
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
            raise RunError(
                f"{MAX_SKIPPED_STEPS} steps up to step {step} had non-finite gradients; lower optimizer.lr or use bf16."
            )
