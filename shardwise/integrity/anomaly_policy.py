"""Decides what to do after a step with non-finite gradients or a loss spike; all ranks decide the same."""

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.data.sample_stream import Samples
from shardwise.errors import RunError
from shardwise.integrity.anomalies import LossSpikeDetector, locate_nonfinite
from shardwise.job import Job
from shardwise.parallel.engine import Engine

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
