"""The training loop of one rank: samples in, steps, metrics, checkpoints out."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.cluster import peak_rate
from shardwise.comm.collectives import all_reduce
from shardwise.comm.meter import METER
from shardwise.data.bad import Bad
from shardwise.data.loader import Loader
from shardwise.data.make import make_sources
from shardwise.data.objectives import objective_of
from shardwise.data.stream import Samples, Stream
from shardwise.errors import RunError
from shardwise.guard.numbers import Spikes, trace
from shardwise.job import Job
from shardwise.kinds import DLRM, MoE
from shardwise.layout import MADE, Layout
from shardwise.models import dlrm
from shardwise.models.families import cost_of
from shardwise.optim import learning_rate, set_learning_rate
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert import Routing, routing
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.pipeline import Order
from shardwise.parallel.recommender import Recommender, optimizer_of
from shardwise.planner.plan import order_of
from shardwise.step import Outcome, taker
from shardwise.train.checkpoint import Checkpoints
from shardwise.train.folder import RunFolder
from shardwise.train.here import cluster_here
from shardwise.train.progress import Progress
from shardwise.train.validate import validate
from shardwise.words import counted, signal_name

PATIENCE = 10  # steps in a row without a finite gradient, after which a run is given up
ROLLBACKS = 5  # spikes of the loss in a run that are left out


@dataclass
class StopFlag:
    """The signal that told this rank to stop, 0 for none; the world agrees on it at the end of each step."""

    number: int = 0

    def agreed(self, engine: Engine) -> Tensor:
        """The highest signal of all ranks, still on the device."""
        flag = torch.full((), float(self.number), device=engine.mesh.device)
        if engine.mesh.layout.world > 1:
            all_reduce(flag, dist.ReduceOp.MAX)
        return flag


@dataclass(frozen=True)
class Told:
    """What the last step gave, read from the device; the same on every rank."""

    loss: float
    norm: float
    skipped: bool


class GoBack(Exception):
    """A step after which this run goes back to the last checkpoint."""

    def __init__(self, done: int, why: str, leave_out: bool):
        super().__init__(why)
        self.done, self.leave_out = done, leave_out


@dataclass
class Trainer:
    """One rank of one run."""

    job: Job
    layout: Layout
    folder: RunFolder
    device: torch.device
    resume: bool = False
    stop: StopFlag = field(default_factory=StopFlag)
    mark: Callable[[str, int], None] = lambda phase, step: None
    """Told where this rank is: a phase, and the step that it belongs to."""

    def __post_init__(self) -> None:
        self.engine = parallelize(self.job, self.layout, self.device, order=self._order())
        self.optimizer = optimizer_of(self.job, self.engine)
        self.step = self._taker()
        self.main = self.engine.mesh.rank == 0
        keep, asynchronous = self.job.checkpoint.keep, self.job.checkpoint.asynchronous
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep, asynchronous)
        self.progress = Progress(self.job.total_steps, self.main, self.job.model.unit)
        # What is found while sources are opened every rank finds; what is found in the stream, one.
        self.bad = Bad(self.job.data.bad == "skip", self.folder.bad if self.main else None)
        self.training, self.held_out, self.tokenizer = make_sources(self.job, bad=self.bad)
        self.bad.log = self.folder.bad
        self.step_flops = 3 * flops_of(self.job) * self.job.samples
        self.peak = peak_rate(self.device, self.job.precision)
        self.skipped_in_a_row = 0
        self.spikes = Spikes(self.job.run.spike)
        self.retried: set[int] = set()
        self.last = Told(math.nan, math.nan, False)

    def _taker(self) -> Callable[[Samples], Outcome]:
        compiled = self.job.compiles(self.device.type, self.layout)
        return taker(self.engine, self.optimizer, self.job.optimizer.clip, compiled)

    def _order(self) -> Order | None:
        """Of a schedule that is made: the first rank's, so that all have the same however their machines differ."""
        told: list[Order | None] = [None]
        if self.layout.pipeline > 1 and self.layout.schedule in MADE:
            if dist.get_rank() == 0:
                here = int(os.environ.get("LOCAL_WORLD_SIZE", self.layout.world))
                told = [order_of(self.job, self.layout, cluster_here(self.job, here)[0])]
            dist.broadcast_object_list(told, device=self.device)
        return told[0]

    def run(self) -> None:
        first = self._restore()
        try:
            while True:
                try:
                    return self._train(first)
                except GoBack as reason:
                    first = self._go_back(reason)
        finally:
            self.progress.close()

    def _train(self, first: int) -> None:
        """Takes all steps from `first` on, or until it is told to stop."""
        last = self.job.total_steps
        stream = Stream(self.training, self.job.seed, objective=objective_of(self.job.model, self.job.seed))
        data = self.engine.mesh["reads"]
        loader = Loader(
            stream, self.job.samples, data.size, data.index, first,
            workers=self.job.data.workers, prefetch=self.job.data.prefetch, device=self.device,
            skips=self.folder.skips(),
        )  # fmt: skip
        batches: Iterator[tuple[int, Samples]] = iter(loader)
        ahead = self.job.embedding.ahead
        if isinstance(self.engine, Recommender) and (self.device.type == "cuda" if ahead == "auto" else ahead):
            batches = self.engine.coming(loader, last - first)
        try:
            for number in range(first, last):
                begin, waited = time.perf_counter(), loader.wait_seconds
                self.mark("data", number + 1)
                samples = next(batches)[1].to(self.device)
                self.mark("computing", number + 1)
                rate = learning_rate(self.job.optimizer, number, last)
                set_learning_rate(self.optimizer, rate)
                self.engine.data.plain = number < self.job.gradient.plain_steps(last)
                outcome = self.step(samples)
                done = number + 1
                if self.engine.meeting is not None:
                    self.engine.meeting.after(done, last)
                told = self._measure(done, outcome, rate, begin, loader.wait_seconds - waited)
                self._watch_over(done, samples)
                if _due(done, self.job.validation.every) and done < last:
                    self._validate(done)
                if _due(done, self.job.checkpoint.every) or done == last or told:
                    self._save(done)
                if told and done < last:
                    reason = f"told to stop by {signal_name(told)}"
                    self._event("stopped", f"{reason}: saved step {done} and ended.", step=done)
                    break
            else:
                self._validate(last)
                self.mark("saving", last)
                self.checkpoints.finish()
                if words := self.bad.words():
                    self._event("bad records", words, step=last)
                self._event("finished", "all steps are done.", step=last)
            self.checkpoints.finish()
        finally:
            loader.close()

    def _restore(self) -> int:
        """The step to go on from."""
        if not self.resume:
            self._event("started", f"training in layout '{self.layout}'.", layout=str(self.layout), step=0)
            return 0
        self.mark("loading", 0)
        state = self.checkpoints.load(self.engine, self.optimizer)
        for sentence in self.checkpoints.damaged:
            self._event("damaged checkpoint", sentence)
        first = 0 if state is None else int(state["step"])
        if self.main:
            self.folder.forget_after(first)
        message = f"going on from step {first} in layout '{self.layout}'."
        self._event("resumed", message, layout=str(self.layout), step=first)
        return first

    def _save(self, done: int) -> None:
        state = {"step": done, "samples": done * self.job.samples, "layout": str(self.layout), "seed": self.job.seed}
        begin = time.perf_counter()
        self.mark("saving", done)
        self.checkpoints.save(done, self.engine, self.optimizer, state)
        stall = round(time.perf_counter() - begin, 4)
        self._event("checkpoint", f"saving step {done}.", step=done, stall_seconds=stall)

    def _validate(self, done: int) -> None:
        self.mark("validating", done)
        result = validate(self.engine, self.job, self.held_out, self.tokenizer)
        if result is not None:
            bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
            right = f", {100 * result['accuracy']:.1f}% right" if "accuracy" in result else ""
            told = f"loss {result['loss']:.4f}{bits}{right} after step {done}."
            self._event("validation", told, step=done, **result)

    def _measure(self, done: int, outcome: Outcome, rate: float, begin: float, waited: float) -> int:
        """Writes down what a step gave. Returns the signal that told any rank to stop, 0 for none."""
        engine = self.engine
        apart = engine.mesh["apart"]
        if apart.size > 1:
            outcome = outcome.mean_over(apart)
        values = [outcome.loss, outcome.grad_norm, outcome.skipped, engine.scale.value, self.stop.agreed(engine)]
        model, (sent, seconds_by_axis) = self.job.model, METER.read()
        if isinstance(model, MoE):
            own = sent.get("expert", 0), seconds_by_axis.get("expert", 0.0)
            values.extend(routing(model, engine.chains, engine.mesh["world"], self.device, *own))
        loss, norm, skipped, scale, told, *more = torch.stack(values).tolist()  # the one wait for the device in a step
        seconds = time.perf_counter() - begin
        self.last = Told(loss, norm, bool(skipped))
        if not self.main:
            return int(told)
        record: dict[str, Any] = {
            "step": done, "samples": done * self.job.samples,
            "loss": _plain(loss), "grad_norm": _plain(norm), "lr": rate,
            "tokens_per_s": self.job.samples * self.job.model.sequence / seconds, "seconds": seconds,
            "flops_per_s": self.step_flops / seconds, "data_wait": waited,
            "memory_gib": peak_memory(self.device) / 2**30,
        }  # fmt: skip
        if seconds_by_axis:
            record["waited"] = {axis: round(value, 6) for axis, value in sorted(seconds_by_axis.items())}
        if "data" in sent:
            record["gradient_bytes"] = sent["data"]
        if self.peak:
            record["utilisation"] = self.step_flops / seconds / self.layout.world / self.peak
        if skipped:
            record["skipped"] = True
        if engine.scale.dynamic:
            record["loss_scale"] = scale
        if more:
            record |= _told(Routing.of(more))
        self.folder.metric(record)
        self.progress.show(record)
        return int(told)

    def _watch_over(self, done: int, samples: Samples) -> None:
        """Judges the last step, on every rank alike."""
        told = self.last
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if told.skipped else 0
        if told.skipped:
            self._judge_skipped(done, told.norm, samples)
        elif spike := self.spikes.judge(told.loss):
            if len(self.folder.skips()) < ROLLBACKS:
                raise GoBack(done, f"step {done} had {spike}", leave_out=True)
            self._event("spike", f"step {done} had {spike}; {ROLLBACKS} were left out already.", step=done)

    def _judge_skipped(self, done: int, norm: float, samples: Samples) -> None:
        message = f"step {done} had a gradient norm of {norm}: nothing was updated"
        policy, moving = self.job.run.on_nan, self.engine.scale.dynamic
        if self.skipped_in_a_row == 1 and not moving and self._traceable():
            message += f"; {trace(self.engine, samples)}"
        if policy == "stop" and not moving:
            raise RunError(f'{message}. The run ends here because of run.on_nan = "stop".')
        if policy == "rollback" and not moving and done not in self.retried:
            self.retried.add(done)
            raise GoBack(done, message, leave_out=False)
        self._event("skipped", f"{message}.", step=done)
        if self.skipped_in_a_row >= PATIENCE:
            raise RunError(
                f"the gradients of {PATIENCE} steps in a row, up to step {done}, were not finite; "
                "lower the learning rate, or use precision bf16 or float32."
            )

    def _traceable(self) -> bool:
        """Whether a step can be taken again without a trace of its own: no tables, no debts, no compiled blocks."""
        compiled = self.job.compiles(self.device.type, self.layout)
        return not (compiled or isinstance(self.engine, Recommender) or self.job.gradient.compress)

    def _go_back(self, reason: GoBack) -> int:
        """Loads the last checkpoint. Returns the step to go on from."""
        state = None if isinstance(self.engine, Recommender) else self.checkpoints.load(self.engine, self.optimizer)
        # Without a checkpoint: a step that updated nothing can be taken again, one that did is left as it is.
        first = int(state["step"]) if state is not None else reason.done - (not reason.leave_out)
        how = (
            f"going back to step {first}" if state is not None else f"without a checkpoint, going on from step {first}"
        )
        if reason.leave_out and state is not None:
            how += f" and leaving out the {counted(reason.done - first, 'batch')} since"
            if self.main:
                self.folder.add_skip(first, reason.done - first)
        if self.main:
            self.folder.forget_after(first)
        if self.engine.mesh["world"].size > 1:
            dist.barrier()  # all read the same list of what is left out
        self._event("rollback", f"{reason}; {how}.", step=reason.done)
        self.step = self._taker()
        self.spikes = Spikes(self.job.run.spike)
        return first

    def _event(self, kind: str, message: str, **facts: Any) -> None:
        if self.main:
            self.folder.event(kind, message, **facts)
            self.progress.say(kind, message)


def _told(routing: Routing) -> dict[str, Any]:
    record: dict[str, Any] = {"expert_imbalance": routing.imbalance, "expert_dropped": routing.dropped}
    if routing.sent:
        record |= {"expert_bytes": int(routing.sent), "expert_seconds": routing.waited}
    return {**record, "expert_load": [round(share, 5) for share in routing.load]}


def flops_of(job: Job) -> float:
    """Floating-point operations of a sample's forward."""
    return dlrm.cost(job.model) if isinstance(job.model, DLRM) else sum(cost_of(job.built()))


def _due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on the device, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
