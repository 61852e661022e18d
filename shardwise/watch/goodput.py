"""Goodput: the time of steps that counted over the time that a run took, and what the rest went to.

A step counts if it is in the metrics: those that were taken again are there once. What lies between two of them is told
by the events in between: checkpoints and validations by their own seconds, the rest by what happened there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardwise.watch.read import Run

LOST = {
    "rollback": "rolled back", "killed": "restart", "halted": "restart", "stuck": "restart", "failed": "restart",
    "resumed": "restart",
}  # fmt: skip
ENDS = ("finished", "stopped")


@dataclass
class Goodput:
    wall: float = 0.0
    """Seconds from the run's first sign to its last, but for those in which it was not running."""
    counted: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    """Seconds by cause."""

    @property
    def share(self) -> float:
        return self.counted / self.wall if self.wall > 0 else 0.0


def goodput(run: Run) -> Goodput:
    """Losses and counted seconds add up to the wall time."""
    ends, seconds = run.column("time"), run.column("seconds")
    whole = np.isfinite(ends) & np.isfinite(seconds)
    ends, seconds = ends[whole], seconds[whole]
    if not len(ends):
        return Goodput()
    found = Goodput(losses={})

    def lose(cause: str, time: float) -> None:
        if time > 0:
            found.losses[cause] = found.losses.get(cause, 0.0) + time

    # The first step compiles, and makes what all others use.
    middle = float(np.median(seconds))
    extra = max(0.0, float(seconds[0]) - middle) if len(seconds) > 2 else 0.0
    lose("start", extra)
    begin = min([run.events[0]["time"]] if run.events else [], default=float(ends[0] - seconds[0]))
    last = max(float(ends[-1]), run.events[-1]["time"] if run.events else 0.0)
    edges = [begin, *ends.tolist()]
    starts = [*(ends - seconds).tolist(), last]
    place = 0
    # Time between the end of a step (or the start of the run) and the begin of the next (or the end).
    for number, (gap_begin, gap_end) in enumerate(zip(edges, starts, strict=True)):
        first = place
        while place < len(run.events) and run.events[place]["time"] <= gap_end + 1e-3:
            place += 1
        between = run.events[first:place]
        gap = max(0.0, gap_end - gap_begin)
        for before, after in zip(between, between[1:]):
            if before["event"] in ENDS and after["event"] in ("resumed", "changed"):
                gap -= max(0.0, after["time"] - before["time"])  # it was not running
        for event in between:
            for kind, key in (("checkpoint", "stall_seconds"), ("validation", "seconds")):
                if event["event"] == kind and isinstance(event.get(key), int | float):
                    took = min(gap, float(event[key]))
                    lose(kind, took)
                    gap -= took
        causes = [LOST[event["event"]] for event in between if event["event"] in LOST]
        lose("start" if number == 0 else causes[0] if causes else "between steps", gap)
    found.counted = float(seconds.sum()) - extra
    found.wall = found.counted + sum(found.losses.values())
    return found
