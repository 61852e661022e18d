"""What a run does about a step whose numbers went wrong; every rank decides it alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.data.stream import Samples
from shardwise.errors import RunError
from shardwise.guard.numbers import Spikes, trace
from shardwise.job import Job
from shardwise.parallel.engine import Engine

PATIENCE = 10  # steps in a row without a finite gradient, after which a run is given up
ROLLBACKS = 5  # spikes of the loss in a run that are left out


@dataclass(frozen=True)
class Told:
    """What the last step gave, read from the device; the same on every rank."""

    loss: float
    norm: float
    skipped: bool
    signal: int = 0
    """That told any rank to stop; 0: none did."""
    wrong: bool = False
    """Whether checksums tell of corruption on any rank (`shardwise.guard.witness`)."""


class GoBack(Exception):
    """A step after which this run goes back to the last checkpoint."""

    def __init__(self, done: int, why: str, leave_out: bool, sure: bool = False):
        """`leave_out`: the batches since then are not taken again. `sure`: what is in memory cannot be gone on with,
        and a checkpoint of the step itself cannot be trusted."""
        super().__init__(why)
        self.done, self.leave_out, self.sure = done, leave_out, sure


class Judge:
    def __init__(
        self, job: Job, engine: Engine, traceable: bool, left_out: Callable[[], int], tell: Callable[..., None]
    ):
        """`traceable`: a step can be taken again without a trace of its own. `left_out`: windows left out already."""
        self.job, self.engine, self.traceable, self.left_out, self.tell = job, engine, traceable, left_out, tell
        self.skipped_in_a_row = 0
        self.spikes = Spikes(job.run.spike)
        self.retried: set[int] = set()

    def judge(self, done: int, told: Told, samples: Samples) -> None:
        """Raises `GoBack` or `RunError` where the run cannot just go on."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if told.skipped else 0
        if told.skipped:
            self._judge_skipped(done, told.norm, samples)
        elif spike := self.spikes.judge(told.loss):
            if self.left_out() < ROLLBACKS:
                self.spikes = Spikes(self.job.run.spike)
                raise GoBack(done, f"step {done} had {spike}", leave_out=True)
            self.tell("spike", f"step {done} had {spike}; {ROLLBACKS} were left out already.", step=done)

    def _judge_skipped(self, done: int, norm: float, samples: Samples) -> None:
        message = f"step {done} had a gradient norm of {norm}: nothing was updated"
        policy, moving = self.job.run.on_nan, self.engine.scale.dynamic
        if self.skipped_in_a_row == 1 and not moving and self.traceable:
            message += f"; {trace(self.engine, samples)}"
        if policy == "stop" and not moving:
            raise RunError(f'{message}. The run ends here because of run.on_nan = "stop".')
        if policy == "rollback" and not moving and done not in self.retried:
            self.retried.add(done)
            self.spikes = Spikes(self.job.run.spike)
            raise GoBack(done, message, leave_out=False)
        self.tell("skipped", f"{message}.", step=done)
        if self.skipped_in_a_row >= PATIENCE:
            raise RunError(
                f"the gradients of {PATIENCE} steps in a row, up to step {done}, were not finite; "
                "lower the learning rate, or use precision bf16 or float32."
            )
