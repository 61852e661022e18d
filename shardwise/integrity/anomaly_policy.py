"""What a run does about a step whose numbers went wrong; every rank decides it alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.data.sample_stream import Samples
from shardwise.errors import RunError
from shardwise.integrity.anomalies import LossSpikeDetector, locate_nonfinite
from shardwise.job import Job
from shardwise.parallel.engine import Engine

MAX_SKIPPED_STEPS = 10  # steps in a row without a finite gradient, after which a run is given up
MAX_SPIKE_ROLLBACKS = 5  # spikes of the loss in a run that are left out


@dataclass(frozen=True)
class Verdict:
    """What the last step gave, read from the device; the same on every rank."""

    loss: float
    grad_norm: float
    skipped: bool
    stop_signal: int = 0
    """That told any rank to stop; 0: none did."""
    is_corrupt: bool = False
    """Whether checksums tell of corruption on any rank (`shardwise.integrity.corruption_detector`)."""


class Rollback(Exception):
    """A step after which this run goes back to the last checkpoint."""

    def __init__(self, step: int, reason: str, skip_batches: bool, state_is_corrupt: bool = False):
        """`leave_out`: the batches since then are not taken again. `sure`: what is in memory cannot be gone on with,
        and a checkpoint of the step itself cannot be trusted."""
        super().__init__(reason)
        self.step, self.skip_batches, self.state_is_corrupt = step, skip_batches, state_is_corrupt


class AnomalyPolicy:
    def __init__(
        self,
        job: Job,
        engine: Engine,
        can_replay: bool,
        skipped_windows: Callable[[], int],
        log_event: Callable[..., None],
    ):
        """`traceable`: a step can be taken again without a trace of its own. `left_out`: windows left out already."""
        self.job, self.engine, self.can_replay, self.skipped_windows, self.log_event = (
            job,
            engine,
            can_replay,
            skipped_windows,
            log_event,
        )
        self.skipped_in_a_row = 0
        self.spike_detector = LossSpikeDetector(job.run.loss_spike_threshold)
        self.retried_steps: set[int] = set()

    def evaluate(self, step: int, verdict: Verdict, samples: Samples) -> None:
        """Raises `Rollback` or `RunError` where the run cannot just go on."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if verdict.skipped else 0
        if verdict.skipped:
            self._handle_skipped(step, verdict.grad_norm, samples)
        elif spike := self.spike_detector.evaluate(verdict.loss):
            if self.skipped_windows() < MAX_SPIKE_ROLLBACKS:
                self.spike_detector = LossSpikeDetector(self.job.run.loss_spike_threshold)
                raise Rollback(step, f"step {step} had {spike}", skip_batches=True)
            self.log_event(
                "loss_spike", f"step {step} had {spike}; {MAX_SPIKE_ROLLBACKS} were left out already.", step=step
            )

    def _handle_skipped(self, step: int, grad_norm: float, samples: Samples) -> None:
        message = f"step {step} had a gradient norm of {grad_norm}: nothing was updated"
        policy, dynamic_scale = self.job.run.on_nan, self.engine.scale.dynamic
        if self.skipped_in_a_row == 1 and not dynamic_scale and self.can_replay:
            message += f"; {locate_nonfinite(self.engine, samples)}"
        if policy == "stop" and not dynamic_scale:
            raise RunError(f'{message}. The run ends here because of run.on_nan = "stop".')
        if policy == "rollback" and not dynamic_scale and step not in self.retried_steps:
            self.retried_steps.add(step)
            self.spike_detector = LossSpikeDetector(self.job.run.loss_spike_threshold)
            raise Rollback(step, message, skip_batches=False)
        self.log_event("step_skipped", f"{message}.", step=step)
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise RunError(
                f"the gradients of {MAX_SKIPPED_STEPS} steps in a row, up to step {step}, were not finite; "
                "lower the learning rate, or use precision bf16 or float32."
            )
