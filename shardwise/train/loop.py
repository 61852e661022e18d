"""The training loop of one rank: samples in, steps, metrics, checkpoints out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.meter import METER
from shardwise.data.bad import Bad
from shardwise.data.loader import Loader
from shardwise.data.make import make_sources
from shardwise.data.objectives import objective_of
from shardwise.data.stream import Samples, Stream
from shardwise.errors import RunError
from shardwise.guard.judge import GoBack, Judge
from shardwise.guard.witness import Witness
from shardwise.job import Job
from shardwise.layout import MADE, Layout
from shardwise.optim import learning_rate, set_learning_rate
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.pipeline import Order
from shardwise.parallel.recommender import Recommender, optimizer_of
from shardwise.planner.plan import order_of
from shardwise.step import Outcome, Recorded, taker
from shardwise.train.checkpoint import Checkpoints
from shardwise.train.folder import RunFolder
from shardwise.train.here import cluster_here
from shardwise.train.measure import Measure, StopFlag, flops_of, plain
from shardwise.train.progress import Progress
from shardwise.train.validate import validate
from shardwise.words import counted, signal_name

# By what a rank is doing, what its time counts for.
PHASES = {"data": "data", "computing": "compute", "validating": "validation", "saving": "checkpoint"}


def make_engine(job: Job, layout: Layout, device: torch.device) -> Engine:
    """Of a schedule that is made, with the first rank's order, so that all have the same however machines differ."""
    told: list[Order | None] = [None]
    if layout.pipeline > 1 and layout.schedule in MADE:
        if dist.get_rank() == 0:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world))
            told = [order_of(job, layout, cluster_here(job, here)[0])]
        dist.broadcast_object_list(told, device=device)
    return parallelize(job, layout, device, order=told[0])


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
    built: Engine | None = None
    """The engine, where it was made before."""
    memory: str = ""
    """The folder of snapshots; empty: nothing that would outlive this process."""

    def __post_init__(self) -> None:
        self.engine = self.built or make_engine(self.job, self.layout, self.device)
        self.optimizer = optimizer_of(self.job, self.engine)
        self.step = self._taker()
        watched = not isinstance(self.engine, Recommender) and not isinstance(self.step, Recorded)
        flops = watched * 3 * flops_of(self.job) * self.job.samples / self.layout.world
        self.witness = Witness(self.job, self.engine, self.optimizer, self.folder.path, flops, self._event)
        self.main = self.engine.mesh.rank == 0
        keep, asynchronous = self.job.checkpoint.keep, self.job.checkpoint.asynchronous
        fast = self.job.checkpoint.snapshot and not isinstance(self.engine, Recommender)  # tables are too large
        memory = Path(self.memory) if self.memory and fast else None
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep, asynchronous, memory, str(self.layout))
        self.progress = Progress(self.job.total_steps, self.main, self.job.model.unit)
        # What is found while sources are opened every rank finds; what is found in the stream, one.
        self.bad = Bad(self.job.data.bad == "skip", self.folder.bad if self.main else None)
        self.training, self.held_out, self.tokenizer = make_sources(self.job, bad=self.bad)
        self.bad.log = self.folder.bad
        self.measure = Measure(
            self.job, self.engine, self.optimizer, self.folder, self.progress, self.witness, self.stop
        )
        self.judge = Judge(self.job, self.engine, self._traceable(), lambda: len(self.folder.skips()), self._event)

    def _taker(self) -> Callable[[Samples], Outcome]:
        compiled = self.job.compiles(self.device.type, self.layout)
        return taker(self.engine, self.optimizer, self.job.optimizer.clip, compiled, observe=self._observe)

    def _observe(self, outcome: Outcome) -> None:
        self.witness.before()

    def run(self) -> None:
        first = self._restore()
        try:
            while True:
                try:
                    self.witness.forget()
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
        if isinstance(self.engine, Recommender):
            self.engine.keep(stream, self.job.embedding.cache)
            if self.device.type == "cuda" if ahead == "auto" else ahead:
                batches = self.engine.coming(loader, last - first)
        self.measure.ranks.start()
        try:
            for number in range(first, last):
                self.measure.ranks.begin(number)
                begin, waited = time.perf_counter(), loader.wait_seconds
                self._mark("data", number + 1)
                samples = next(batches)[1].to(self.device)
                self._mark("computing", number + 1)
                rate = learning_rate(self.job.optimizer, number, last)
                set_learning_rate(self.optimizer, rate)
                self.engine.data.plain = number < self.job.gradient.plain_steps(last)
                self.witness.ahead(number + 1, samples)
                outcome = self.step(samples)
                done = number + 1
                if self.engine.meeting is not None:
                    self.engine.meeting.after(done, last)
                self.witness.after()
                told = self.measure.take(done, outcome, rate, begin, loader.wait_seconds - waited)
                self.witness.judge(done, told.wrong)
                self.judge.judge(done, told, samples)
                if _due(done, self.job.validation.every) and done < last:
                    self._validate(done)
                if _due(done, self.job.checkpoint.every) or done == last or told.signal:
                    self._save(done)
                memory = self.checkpoints.memory
                if memory is not None and memory.due(done, self.job.checkpoint.snapshot) and done < last:
                    self._snapshot(done)
                if told.signal and done < last:
                    reason = f"told to stop by {signal_name(told.signal)}"
                    self._event("stopped", f"{reason}: saved step {done} and ended.", step=done)
                    break
            else:
                self._validate(last)
                self._mark("saving", last)
                self.checkpoints.finish()
                if words := self.bad.words():
                    self._event("bad records", words, step=last)
                self._event("finished", "all steps are done.", step=last)
            self.checkpoints.finish()
            self.measure.ranks.finish()
        finally:
            loader.close()

    def _restore(self) -> int:
        """The step to go on from."""
        if not self.resume:
            self._event("started", f"training in layout '{self.layout}'.", layout=str(self.layout), step=0)
            return 0
        self._mark("loading", 0)
        state = self.checkpoints.load(self.engine, self.optimizer)
        for sentence in self.checkpoints.damaged:
            self._event("damaged checkpoint", sentence)
        first = 0 if state is None else int(state["step"])
        if self.main:
            self.folder.forget_after(first)
        message = f"going on from step {first} in layout '{self.layout}'."
        source = self.checkpoints.source
        self._event("resumed", message, layout=str(self.layout), step=first, source=source)
        return first

    def _snapshot(self, done: int) -> None:
        self._mark("saving", done)
        if problem := self.checkpoints.snapshot(done, self.engine, self.optimizer, self._state(done)):
            self._event("no snapshots", problem, step=done)
        self.witness.confirm(done)

    def _state(self, done: int) -> dict[str, Any]:
        return {"step": done, "samples": done * self.job.samples, "layout": str(self.layout), "seed": self.job.seed}

    def _save(self, done: int) -> None:
        begin = time.perf_counter()
        self._mark("saving", done)
        try:
            self.checkpoints.finish()
        except RunError as error:  # of the save before this one
            self._event("no checkpoint", f"{error} The run goes on.", step=done)
        try:
            self.checkpoints.save(done, self.engine, self.optimizer, self._state(done))
        except RunError as error:
            if done == self.job.total_steps:
                raise
            self._event("no checkpoint", f"{error} The run goes on.", step=done)
            return
        self.witness.confirm(done)
        stall = round(time.perf_counter() - begin, 4)
        self._event("checkpoint", f"saving step {done}.", step=done, stall_seconds=stall)

    def _validate(self, done: int) -> None:
        self._mark("validating", done)
        begin = time.perf_counter()
        result = validate(self.engine, self.job, self.held_out, self.tokenizer)
        if result is not None:
            bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
            right = f", {100 * result['accuracy']:.1f}% right" if "accuracy" in result else ""
            told = f"loss {result['loss']:.4f}{bits}{right} after step {done}."
            took = round(time.perf_counter() - begin, 4)
            found = {key: plain(value) for key, value in result.items()}
            self._event("validation", told, step=done, seconds=took, **found)

    def _traceable(self) -> bool:
        """Whether a step can be taken again without a trace of its own: no tables, no debts, no compiled blocks."""
        compiled = self.job.compiles(self.device.type, self.layout)
        return not (compiled or isinstance(self.engine, Recommender) or self.job.gradient.compress)

    def _go_back(self, reason: GoBack) -> int:
        """Loads the last checkpoint. Returns the step to go on from."""
        if reason.sure:
            self.checkpoints.rewind(reason.done - 1)
        state = None if isinstance(self.engine, Recommender) else self.checkpoints.load(self.engine, self.optimizer)
        if state is None and reason.sure:
            raise RuntimeError(f"{reason}, and there is no checkpoint to go back to")  # all begin again
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
        return first

    def _mark(self, phase: str, step: int) -> None:
        self.mark(phase, step)
        METER.phase(PHASES.get(phase, ""))

    def _event(self, kind: str, message: str, **facts: Any) -> None:
        if self.main:
            self.folder.event(kind, message, **facts)
            self.progress.say(kind, message)


def _due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0
