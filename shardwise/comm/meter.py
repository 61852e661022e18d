"""Where the time of this rank's steps goes: by phase, and by the axis of others that it waits for; and what it was told
of bytes that it sent.

A moment belongs to one part only: a wait is taken out of the phase that it lies in, and a wait within a wait is none of
its own. On a CPU the clock is the host's. On a GPU phases of the device and waits are spans between events in the
stream that computes, read once it has done them, so that nothing waits for a measurement.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ON_DEVICE = ("compute", "optimizer")  # phases that a GPU goes through; others are the host's
WHOLE = ("data", "checkpoint", "validation")  # phases whose waits are not told apart
Moment = Any  # seconds, or an event of a GPU; None while a graph is recorded


class Meter:
    def __init__(self) -> None:
        self.on = True
        self.device = torch.device("cpu")
        self.axes: dict[str, str] = {}
        """By name of a process group, the axis that it is of."""
        self.sent: Counter[str] = Counter()
        """Bytes, by axis."""
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Seconds, by axis."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        """Seconds, by phase, without waits."""
        self._open: list[tuple[str, str, Moment, Moment]] = []
        self._phase, self._since = "", time.perf_counter()
        self._mark: Moment = None
        self._actions: list[tuple[str, int, int, Moment, Moment]] | None = None
        self._deep = 0
        self._thread: int | None = None

    def begin(self) -> None:
        """A step begins, in the thread that it is measured in."""
        self.phase("")
        self._thread = threading.get_ident()
        self._read()
        self.waited.clear()
        self.spent.clear()

    def phase(self, name: str) -> None:
        """The phase under way ends, another begins; "": none."""
        if self._phase and self.on:
            on_device = self._phase in ON_DEVICE
            self._add("", self._phase, self._since, self._now() if on_device else time.perf_counter())
        self._phase = name
        self._since = self._now() if name in ON_DEVICE else time.perf_counter()

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
        elsewhere = device.type == "cpu" and self._thread not in (None, threading.get_ident())
        if not self.on or self._deep or elsewhere or self._phase in WHOLE:
            yield
            return
        self._deep += 1
        begin = self._now(device)
        try:
            yield
        finally:
            self._deep -= 1
            self._add(axis, self._phase, begin, self._now(device))

    def mark(self) -> None:
        """From here on, until `since`, this rank has nothing to do but to wait."""
        self._mark = self._now() if self.on else None

    def since(self, axis: str) -> None:
        if self._mark is not None:
            self._add(axis, self._phase, self._mark, self._now())
            self._mark = None

    # Actions of a pipeline, in steps in which somebody wants to know them

    def record(self) -> None:
        """Actions are written down until they are asked for."""
        self._actions, self._base = [], (self._now(), time.time())

    @contextmanager
    def action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        if self._actions is None:
            yield
            return
        begin = self._now()
        yield
        self._actions.append((kind, stage, micro_batch, begin, self._now()))

    def recorded(self) -> list[tuple[str, int, int, float, float]]:
        """Kind, stage, micro-batch, begin and end in seconds since 1970; of a GPU that has done them."""
        found, self._actions = self._actions, None
        if not found:
            return []
        begin, clock = self._base

        def when(moment: Moment) -> float:
            return float(clock + (moment - begin if isinstance(begin, float) else begin.elapsed_time(moment) / 1e3))

        return [(*what, when(start), when(end)) for *what, start, end in found]  # type: ignore[misc]

    def _now(self, device: torch.device | None = None) -> Moment:
        if (device or self.device).type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, axis: str, phase: str, begin: Moment, end: Moment) -> None:
        if isinstance(begin, float) and isinstance(end, float):
            self._count(axis, phase, end - begin)
        elif begin is not None and end is not None:
            self._open.append((axis, phase, begin, end))

    def _count(self, axis: str, phase: str, seconds: float) -> None:
        if axis:
            self.waited[axis] += seconds
        if phase:
            self.spent[phase] += -seconds if axis else seconds

    def _read(self) -> None:
        """Takes in the spans that a GPU has gone through by now; the others are later ones."""
        later = []
        for axis, phase, begin, end in self._open:
            if end.query():
                self._count(axis, phase, begin.elapsed_time(end) / 1e3)
            else:
                later.append((axis, phase, begin, end))
        self._open = later

    def so_far(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by phase and by axis since the step began, of phases that have ended."""
        self._read()
        return dict(self.spent), dict(self.waited)

    def read(self) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes and seconds by axis; both begin anew."""
        self._read()
        found = dict(self.sent), dict(self.waited)
        self.sent.clear()
        self.waited.clear()
        return found


METER = Meter()
