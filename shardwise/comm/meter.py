"""What this rank sent over an axis and how long it waited for it, since it was last asked."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Meter:
    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes, by axis."""
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Seconds, by axis."""
        self.open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def over(self, axis: str, sent: int, device: torch.device) -> Iterator[None]:
        """To be entered around what sends `sent` bytes to other ranks."""
        self.sent[axis] += sent
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

    def read(self, axis: str) -> tuple[int, float]:
        """Bytes and seconds; of a GPU, the seconds of what it has done by now: the rest comes with the next."""
        later = []
        for name, begin, end in self.open:
            if end.query():
                self.waited[name] += begin.elapsed_time(end) / 1e3
            else:
                later.append((name, begin, end))
        self.open = later
        return self.sent.pop(axis, 0), self.waited.pop(axis, 0.0)


METER = Meter()
