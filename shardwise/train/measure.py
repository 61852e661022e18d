"""What a step gave: one line of metrics, written by the first rank, and the numbers that every rank decides by. Where
its time went is told by the meter, and by every rank to the first."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.cluster import peak_rate
from shardwise.comm.collectives import all_gather
from shardwise.comm.meter import METER
from shardwise.guard.judge import Told
from shardwise.job import Job
from shardwise.kinds import DLRM, MoE
from shardwise.models import dlrm
from shardwise.models.families import cost_of
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert import Routing, routing
from shardwise.step import Outcome
from shardwise.train.folder import RunFolder
from shardwise.train.progress import Progress
from shardwise.watch.rows import Row, Rows, clock_offset, held, slowest


@dataclass
class StopFlag:
    """The signal that told this rank to stop, 0 for none; the world agrees on it at the end of each step."""

    number: int = 0


@dataclass
class Measure:
    job: Job
    engine: Engine
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    progress: Progress
    stop: StopFlag = field(default_factory=StopFlag)

    def __post_init__(self) -> None:
        mesh = self.engine.mesh
        self.device, self.world = mesh.device, mesh["world"]
        self.step_flops = 3 * flops_of(self.job) * self.job.samples
        self.peak = peak_rate(self.device, self.job.precision)
        self.main, self.ranks, self.before, self.row = mesh.rank == 0, mesh.layout.world, 0, Row()
        self.held: dict[str, float] = {}
        self._hook = self.optimizer.register_step_pre_hook(self._hold)
        stage = self.ranks // mesh.layout.pipeline
        alike = [range(first, first + stage) for first in range(0, self.ranks, stage)]
        self.rows = Rows(self.folder.path / "ranks.jsonl", self.job.total_steps, alike)
        self.offset = clock_offset(all_gather, self.device, self.ranks, mesh.rank) if self.ranks > 1 else 0.0
        self.sampled = max(10, self.job.total_steps // 50)
        first = all(mesh[axis].index == 0 for axis in ("reads", "context", "tensor"))
        self.timeline = self.engine.pipeline is not None and first

    def start(self) -> None:
        """Steps begin, or begin again: what is known of one that came before is of no step that counts."""
        METER.begin()
        self.before = 0

    def begin(self, done: int) -> None:
        """A step begins, after `done` others; the one before is over."""
        if self.before:
            self._close()
        METER.begin()
        self.start_time, self.clock = time.time() - self.offset, time.perf_counter()
        if self.timeline and done % self.sampled == 2:
            METER.record()

    def _close(self) -> None:
        """Makes the row of the step that is over."""
        METER.phase("")
        spent, waited = METER.so_far()
        if "weights" not in self.held:
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            states = [value for value in states if isinstance(value, Tensor)]
            self.held |= held({"weights": self._weights(), "optimizer": states})
        seconds = time.perf_counter() - self.clock
        self.row = Row(self.start_time, seconds, spent, waited, peak_memory(self.device), self.held)
        if actions := METER.recorded():
            moved = [[*what, round(a - self.offset, 6), round(b - self.offset, 6)] for *what, a, b in actions]
            self.folder.timeline(self.engine.mesh.rank, {"step": self.before, "actions": moved})

    def _hold(self, *_: Any) -> None:
        """Before the first update, when there are gradients."""
        self._hook.remove()
        self.held = held({"gradients": [w.grad for w in self._weights() if w.grad is not None]})

    def _weights(self) -> list[Tensor]:
        inside = [w for chain in self.engine.chains for w in (*chain.parameters(), *chain.buffers())]
        return inside + [holding.tensor for holding in self.engine.holdings]

    def finish(self) -> None:
        """After the last step, on all ranks: what is left to tell is written down."""
        if not self.before:
            return
        self._close()
        rows = self._exchange()[1]
        if self.main:
            self.rows.add(self.before, [Row.of(numbers) for numbers in rows.tolist()])
            self.rows.flush(self.before)

    def _exchange(self) -> tuple[Tensor, Tensor]:
        """The highest signal of all ranks, still on the device; and the row of each for the step before."""
        mine = torch.tensor([self.stop.number, *self.row.numbers()], dtype=torch.float64, device=self.device)
        every = mine.new_empty(self.ranks, mine.numel())
        if self.ranks > 1:
            all_gather(every.view(-1), mine)
        else:
            every = mine.unsqueeze(0)
        return every[:, 0].max(), every[:, 1:]

    def _tell(self, rows: Tensor) -> dict[str, Any]:
        """The first rank writes down the rows of the step before. Returns who was slowest in it."""
        if not self.before or not self.main:
            return {}
        found = [Row.of(numbers) for numbers in rows.tolist()]
        for words in self.rows.add(self.before, found):
            self.folder.event("slow", words, step=self.before)
            self.progress.say("slow", words)
        return {"step": self.before, **slowest(found)} if self.ranks > 1 else {}

    def take(self, done: int, outcome: Outcome, rate: float, begin: float, waited: float) -> Told:
        """Writes down what a step gave that began at `begin` and waited so long for data."""
        METER.phase("")
        engine = self.engine
        apart = engine.mesh["apart"]
        if apart.size > 1:
            outcome = outcome.mean_over(apart)
        signal, rows = self._exchange()
        values = [outcome.loss, outcome.grad_norm, outcome.skipped, engine.scale.value, signal]
        model, sent = self.job.model, dict(METER.sent)
        METER.sent.clear()
        if isinstance(model, MoE):
            now = METER.waited if self.device.type == "cpu" else self.row.waited  # a GPU is not there yet
            values.extend(
                routing(model, engine.chains, self.world, self.device, sent.get("expert", 0), now.get("expert", 0.0))
            )
        loss, norm, skipped, scale, told, *more = torch.stack(values).tolist()  # the one wait for the device in a step
        seconds = time.perf_counter() - begin
        behind = self._tell(rows)
        self.before = done
        if self.main:
            spent, waits = METER.so_far()
            record: dict[str, Any] = {
                "step": done, "samples": done * self.job.samples,
                "loss": _plain(loss), "grad_norm": _plain(norm), "lr": rate,
                "tokens_per_s": self.job.samples * self.job.model.sequence / seconds, "seconds": seconds,
                "flops_per_s": self.step_flops / seconds, "data_wait": waited,
                "memory_gib": peak_memory(self.device) / 2**30, "time": round(time.time(), 3),
            }  # fmt: skip
            spent["other"] = seconds - sum(spent.values()) - sum(waits.values())
            record["spent"] = {part: round(value, 6) for part, value in spent.items()}
            if waits:
                record["waited"] = {axis: round(value, 6) for axis, value in sorted(waits.items())}
            if behind:
                record["slowest"] = behind
            if "data" in sent:
                record |= {"gradient_bytes": sent["data"], "gradient_ratio": round(sent["whole"] / sent["data"], 3)}
            if self.peak:
                record["utilisation"] = self.step_flops / seconds / self.ranks / self.peak
            if skipped:
                record["skipped"] = True
            if engine.scale.dynamic:
                record["loss_scale"] = scale
            if more:
                record |= _told(Routing.of(more))
            self.folder.metric(record)
            self.progress.show(record)
        return Told(loss, norm, bool(skipped), int(told))


def _told(routing: Routing) -> dict[str, Any]:
    record: dict[str, Any] = {"expert_imbalance": routing.imbalance, "expert_dropped": routing.dropped}
    if routing.sent:
        record |= {"expert_bytes": int(routing.sent), "expert_seconds": routing.waited}
    return {**record, "expert_load": [round(share, 5) for share in routing.load]}


def flops_of(job: Job) -> float:
    """Floating-point operations of a sample's forward."""
    return dlrm.cost(job.model) if isinstance(job.model, DLRM) else sum(cost_of(job.built()))


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on the device, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
