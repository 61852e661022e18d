"""A rank that computes more slowly than the others, told from those that wait for it.

What is measured is the time that a rank's blocks take forward, less what they wait for other ranks within: all ranks of
a pipeline stage do the same work there, and who waits does so elsewhere. On a CPU only, and not where blocks are
compiled: kernels of a GPU end later than the calls that begin them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from shardwise.comm.meter import METER
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.words import ranks_text

WINDOW, LOOKS = 32, 8  # steps that are looked back on, and between looks
SLOW, WELL = 1.5, 1.2  # times the median of the others: above the first a rank is slow, below the second no longer
OFTEN = 0.75  # of the steps of a window in which a slow rank is slow


class Pace:
    def __init__(self, job: Job, engine: Engine, tell: Callable[..., None]):
        layout, device = engine.mesh.layout, engine.mesh.device.type
        self.tell, self.seconds = tell, 0.0
        self.on = device == "cpu" and layout.world > 1 and not job.compiles(device, layout)
        each = layout.world // layout.pipeline
        self.stages = [range(first, first + each) for first in range(0, layout.world, each)]
        self.recent: deque[list[int]] = deque(maxlen=WINDOW)
        self.told: set[int] = set()
        for block in [block for chain in engine.chains for block in chain.blocks()] * self.on:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, prepend=True)

    def taken(self) -> int:
        """Microseconds since it was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return round(1e6 * seconds)

    def judge(self, done: int, everyones: list[int]) -> None:
        """Given the microseconds of all ranks in a step, tells of those that have become slow."""
        self.recent.append(everyones)
        if len(self.recent) < WINDOW or done % LOOKS:
            return
        for stage in self.stages:
            for rank in stage if len(stage) > 1 else ():
                others = [median(row[other] for other in stage if other != rank) for row in self.recent]
                ratios = [row[rank] / max(other, 1) for row, other in zip(self.recent, others, strict=True)]
                middle = median(ratios)
                if middle < WELL:
                    self.told.discard(rank)
                elif middle > SLOW and sum(one > SLOW for one in ratios) > OFTEN * WINDOW and rank not in self.told:
                    self.told.add(rank)
                    own, theirs = (f"{1e-3 * median(times):.3g}" for times in ([r[rank] for r in self.recent], others))
                    words = f"{ranks_text([rank])} is slow: its blocks took {own} ms forward in the last {WINDOW} steps"
                    message = f"{words}, those of others with the same work {theirs} ms."
                    self.tell("slow", message, step=done, ranks=[rank], times=round(middle, 2))

    def _begin(self, module: Any, given: Any) -> None:
        self.since = time.perf_counter() - sum(METER.waited.values())

    def _end(self, module: Any, given: Any, output: Any) -> None:
        self.seconds += time.perf_counter() - sum(METER.waited.values()) - self.since
