"""How long this rank waited for others, by axis, and what it was told of bytes that it sent, since it was last asked.

On a CPU a wait is what a collective takes; on a GPU what it takes in the stream that computes. Waits for what goes on
beside other work are not measured here: sums of DDP, gathers of FSDP.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Meter:
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.axes: dict[str, str] = {}
        """By name of a process group, the axis that it is of."""
        self.sent: Counter[str] = Counter()
        """Bytes, by axis."""
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Seconds, by axis."""
        self.open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self, group: Any, device: torch.device) -> Iterator[None]:
        """To be entered around what waits for other ranks of a group."""
        name = "world" if group is None else getattr(group, "group_name", group)
        with self._timed(self.axes.get(name, "world"), device):
            yield

    @contextmanager
    def over(self, axis: str) -> Iterator[None]:
        """To be entered around what waits for other ranks of an axis."""
        with self._timed(axis, self.device):
            yield

    @contextmanager
    def _timed(self, axis: str, device: torch.device) -> Iterator[None]:
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self.open.append((axis, begin, end))
        else:
            start = time.perf_counter()
            yield
            self.waited[axis] += time.perf_counter() - start

    def read(self) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes and seconds by axis; of a GPU, the seconds of what it has done by now: the rest comes with the next."""
        later = []
        for name, begin, end in self.open:
            if end.query():
                self.waited[name] += begin.elapsed_time(end) / 1e3
            else:
                later.append((name, begin, end))
        found = dict(self.sent), dict(self.waited)
        self.open = later
        self.sent.clear()
        self.waited.clear()
        return found


METER = Meter()
