"""What each rank tells the others of its steps: the row of the last one, in one small collective."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import all_gather
from shardwise.comm.meter import METER
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.watch.rows import Row, Rows, clock_offset, held, slowest

SAMPLES = 50  # steps of a run whose pipeline is recorded


class Ranks:
    """Of one rank. `tell`: who is told of slow ranks, in words."""

    def __init__(
        self, job: Job, engine: Engine, optimizer: torch.optim.Optimizer, run: Path, tell: Callable[[str, str], None]
    ):
        mesh, world = engine.mesh, engine.mesh.layout.world
        self.job, self.engine, self.optimizer, self.run, self.tell = job, engine, optimizer, run, tell
        self.device, self.rank, self.world, self.main = mesh.device, mesh.rank, world, mesh.rank == 0
        self.before, self.row = 0, Row()
        """The last step that was taken, 0 for none that counts; the row of the last that is over."""
        self.held: dict[str, float] = {}
        self._asked, self._most = -1.0, 0.0
        self._hook = optimizer.register_step_pre_hook(self._hold)
        stage = world // mesh.layout.pipeline
        self.rows = Rows(
            run / "ranks.jsonl", job.total_steps, [range(rank, rank + stage) for rank in range(0, world, stage)]
        )
        self.offset = clock_offset(all_gather, self.device, world, self.rank) if world > 1 else 0.0
        self.sampled = max(10, job.total_steps // SAMPLES)
        first = all(mesh[axis].index == 0 for axis in ("reads", "context", "tensor"))
        self.timeline = engine.pipeline is not None and first

    def start(self) -> None:
        """Steps begin, or begin again: what is known of one that came before is of no step that counts."""
        METER.begin()
        self.before = 0

    def begin(self, done: int) -> None:
        """A step begins, after `done` others; the one before is over."""
        if self.before:
            self._close()
        METER.begin()
        self._start, self._clock = time.time() - self.offset, time.perf_counter()
        if self.timeline and done % self.sampled == 2:
            METER.record()

    def _close(self) -> None:
        METER.phase("")
        spent, waited = METER.so_far()
        if "weights" not in self.held:
            self._hook.remove()
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            states = [value for value in states if isinstance(value, Tensor)]
            self.held |= held({"weights": self._weights(), "optimizer": states})
        seconds = time.perf_counter() - self._clock
        self.row = Row(self._start, seconds, spent, waited, self.memory(), self.held)
        if actions := METER.recorded():
            moved = [[*what, round(a - self.offset, 6), round(b - self.offset, 6)] for *what, a, b in actions]
            path = self.run / "timeline" / f"rank-{self.rank}.jsonl"
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps({"step": self.before, "actions": moved}) + "\n")

    def memory(self) -> float:
        """The most bytes held so far; of a CPU as of the last second, because asking the system takes its time."""
        if self.device.type == "cuda" or time.monotonic() - self._asked >= 1.0:
            self._asked, self._most = time.monotonic(), peak_memory(self.device)
        return self._most

    def _hold(self, *_: Any) -> None:
        """Before the first update, when there are gradients."""
        self.held = self.held or held({"gradients": [w.grad for w in self._weights() if w.grad is not None]})

    def _weights(self) -> list[Tensor]:
        inside = [w for chain in self.engine.chains for w in (*chain.parameters(), *chain.buffers())]
        return inside + [holding.tensor for holding in self.engine.holdings]

    def exchange(self) -> Tensor:
        """The row of each rank for the step before, still on the device."""
        mine = torch.tensor(self.row.numbers(), dtype=torch.float64, device=self.device)
        every = mine.unsqueeze(0)
        if self.world > 1:
            every = mine.new_empty(self.world, mine.numel())
            all_gather(every.view(-1), mine)
        return every

    def keep(self, rows: Tensor, done: int) -> dict[str, Any]:
        """After a step: the first rank writes down the rows of the one before. Returns who was slowest in that."""
        step, self.before = self.before, done
        if not step or not self.main:
            return {}
        found = rows.cpu().numpy()
        for words in self.rows.add(step, found):
            self.tell("slow", words)
        return {"step": step, **slowest(found)} if self.world > 1 else {}

    def finish(self) -> None:
        """After the last step, on all ranks: what is left is written down."""
        if not self.before:
            return
        self._asked = -1.0
        self._close()
        rows = self.exchange()
        if self.main:
            self.rows.add(self.before, rows.cpu().numpy())
            self.rows.flush(self.before)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on the device, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
