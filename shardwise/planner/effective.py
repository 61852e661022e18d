"""The share of time that a run keeps in useful steps, when machines fail.

Failures come at random, `between` seconds apart in the mean. Useful work goes on for `interval` seconds, then a save
stalls it for `stall`; a failure loses what was done since, and takes `recover` seconds to come back from. The expected
time for an interval is then (between + recover)(e^((interval + stall) / between) - 1), and the best interval, for small
stalls the square root of 2 stall between (Young 1974), is Daly's (2006, equation 37).

How often: Kokolis et al. 2024 ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters") give 7.9
hours at 1,024 GPUs, measured, and 1.8 at 16,384. Llama 3's training had 466 interruptions in 54 days on 16,384 GPUs,
one in 2.8 hours (Grattafiori et al. 2024). Between the two points of the former we take a power; outside, each GPU for
its own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

HOURS = ((1024, 7.9), (16384, 1.8))  # devices, hours between failures
COPY = 5e9  # bytes a second of a rank's state to host memory; measured on CPU processes, slow for a GPU
RECOVER = 30.0  # seconds on a GPU: assumed, with compilation; CPU processes with stand-bys take 1 (docs: faults)


def hours_between(devices: int) -> float:
    """Mean hours between failures of a world."""
    (few, often), (many, seldom) = HOURS
    if devices <= few:
        return often * few / devices
    if devices >= many:
        return seldom * many / devices
    return float(often * (devices / few) ** (math.log(seldom / often) / math.log(many / few)))


def share(interval: float, stall: float, recover: float, between: float) -> float:
    """Of all time, that of useful steps. All in seconds."""
    return interval / ((between + recover) * math.expm1((interval + stall) / between))


def best_interval(stall: float, between: float) -> float:
    """Seconds between saves that keep most."""
    if stall >= 2 * between:
        return between
    part = math.sqrt(stall / (2 * between))
    return max(stall, math.sqrt(2 * stall * between) * (1 + part / 3 + part**2 / 9) - stall)


@dataclass(frozen=True)
class Effective:
    """What a plan says. Seconds, shares."""

    hours_between: float
    stall: float
    recover: float
    best_interval: float
    best_share: float
    interval: float
    """Between the job's checkpoints; 0: it has none but at the end."""
    share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self, step: float) -> str:
        steps = max(1, round(self.best_interval / step))
        line = (
            f"a failure every {_time(3600 * self.hours_between)} is to be expected; with {_time(self.recover)} to come "
            f"back and {_time(self.stall)} for a save, {100 * self.best_share:.2f}% of the time is kept by a "
            f"checkpoint every {steps:,} steps ({_time(self.best_interval)})"
        )
        return f"{line}, {100 * self.share:.2f}% by yours." if self.interval else f"{line}; this job has none."


def effective(devices: int, step: float, every: int, bytes_a_rank: float, recover: float = RECOVER) -> Effective:
    """For a world with steps of so many seconds, a save every so many of them, and so much state on a rank."""
    between, stall = 3600 * hours_between(devices), bytes_a_rank / COPY
    best, own = best_interval(stall, between), every * step
    kept = share(own, stall, recover, between) if every else 0.0
    return Effective(
        between / 3600, stall, recover, best, share(best, stall, recover, between), own, kept
    )  # fmt: skip


def _time(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
