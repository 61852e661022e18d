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

FAILURE_HOURS = ((1024, 7.9), (16384, 1.8))  # devices, hours between failures
HOST_COPY_BANDWIDTH = 5e9  # bytes a second of a rank's state to host memory; measured on CPU processes, slow for a GPU
RECOVERY_SECONDS = (
    30.0  # seconds on a GPU: assumed, with compilation; CPU processes with stand-bys take 1 (docs: faults)
)


def mtbf_hours(devices: int) -> float:
    """Mean hours between failures of a world."""
    (small_world, small_hours), (large_world, large_hours) = FAILURE_HOURS
    if devices <= small_world:
        return small_hours * small_world / devices
    if devices >= large_world:
        return large_hours * large_world / devices
    return float(
        small_hours
        * (devices / small_world) ** (math.log(large_hours / small_hours) / math.log(large_world / small_world))
    )


def goodput_fraction(interval: float, save_stall: float, recovery_seconds: float, mtbf: float) -> float:
    """Of all time, that of useful steps. All in seconds."""
    return interval / ((mtbf + recovery_seconds) * math.expm1((interval + save_stall) / mtbf))


def optimal_checkpoint_interval(save_stall: float, mtbf: float) -> float:
    """Seconds between saves that keep most."""
    if save_stall >= 2 * mtbf:
        return mtbf
    correction = math.sqrt(save_stall / (2 * mtbf))
    return max(save_stall, math.sqrt(2 * save_stall * mtbf) * (1 + correction / 3 + correction**2 / 9) - save_stall)


@dataclass(frozen=True)
class ExpectedGoodput:
    """What a plan says. Seconds, shares."""

    mtbf_hours: float
    save_stall: float
    recovery_seconds: float
    best_interval: float
    best_goodput: float
    interval: float
    """Between the job's checkpoints; 0: it has none but at the end."""
    goodput: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self, step_seconds: float) -> str:
        steps = max(1, round(self.best_interval / step_seconds))
        sentence = (
            f"a failure every {_time(3600 * self.mtbf_hours)} is to be expected; with {_time(self.recovery_seconds)} to come "
            f"back and {_time(self.save_stall)} for a save, {100 * self.best_goodput:.2f}% of the time is kept by a "
            f"checkpoint every {steps:,} steps ({_time(self.best_interval)})"
        )
        return (
            f"{sentence}, {100 * self.goodput:.2f}% by yours." if self.interval else f"{sentence}; this job has none."
        )


def expected_goodput(
    devices: int, step_seconds: float, every: int, bytes_per_rank: float, recovery_seconds: float = RECOVERY_SECONDS
) -> ExpectedGoodput:
    """For a world with steps of so many seconds, a save every so many of them, and so much state on a rank."""
    mtbf, save_stall = 3600 * mtbf_hours(devices), bytes_per_rank / HOST_COPY_BANDWIDTH
    best, interval = optimal_checkpoint_interval(save_stall, mtbf), every * step_seconds
    goodput = goodput_fraction(interval, save_stall, recovery_seconds, mtbf) if every else 0.0
    return ExpectedGoodput(
        mtbf / 3600,
        save_stall,
        recovery_seconds,
        best,
        goodput_fraction(best, save_stall, recovery_seconds, mtbf),
        interval,
        goodput,
    )


def _time(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
