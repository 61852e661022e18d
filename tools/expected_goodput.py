"""Expected goodput: the fraction of time that a run spends in useful steps when machines fail.

    python tools/expected_goodput.py examples/llama3-70b.toml --cluster h100 --devices 1024    of the best layout

Failures arrive at random with a mean time `mtbf` between them. A run works for `interval` seconds, then a checkpoint
stalls it for `save_stall`; a failure loses the work since the last checkpoint and takes `recovery_seconds` to recover
from. The expected time of an interval is (mtbf + recovery)(e^((interval + stall) / mtbf) - 1). The best interval is
Daly's (2006, equation 37), which for short stalls is sqrt(2 stall mtbf) (Young 1974).

Failure rates: Kokolis et al. 2024 ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters") measured
7.9 hours between failures at 1,024 GPUs and give 1.8 hours at 16,384. Llama 3's training had 466 interruptions in 54
days on 16,384 GPUs, one in 2.8 hours (Grattafiori et al. 2024). Between Kokolis' two points we interpolate by a power
law; outside of them each GPU fails independently.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from shardwise.planner.plan import plan_job

FAILURE_HOURS = ((1024, 7.9), (16384, 1.8))  # devices, hours between failures
HOST_COPY_BANDWIDTH = 5e9  # bytes per second from a rank to host memory; measured on CPU processes, low for a GPU
RECOVERY_SECONDS = 30.0  # on a GPU: assumed, with compilation; CPU processes with standbys take 1 s (docs: faults)


def mtbf_hours(devices: int) -> float:
    """Returns the mean time between failures of a run on `devices` GPUs, in hours."""
    (small_world, small_hours), (large_world, large_hours) = FAILURE_HOURS
    if devices <= small_world:
        return small_hours * small_world / devices
    if devices >= large_world:
        return large_hours * large_world / devices
    exponent = math.log(large_hours / small_hours) / math.log(large_world / small_world)
    return float(small_hours * (devices / small_world) ** exponent)


def goodput_fraction(interval: float, save_stall: float, recovery_seconds: float, mtbf: float) -> float:
    """Returns the fraction of time spent in useful steps. All arguments are in seconds."""
    return interval / ((mtbf + recovery_seconds) * math.expm1((interval + save_stall) / mtbf))


def optimal_checkpoint_interval(save_stall: float, mtbf: float) -> float:
    """Returns the seconds of work between checkpoints that maximise goodput."""
    if save_stall >= 2 * mtbf:
        return mtbf
    correction = math.sqrt(save_stall / (2 * mtbf))
    return max(save_stall, math.sqrt(2 * save_stall * mtbf) * (1 + correction / 3 + correction**2 / 9) - save_stall)


class ExpectedGoodput(NamedTuple):
    """Expected goodput of a plan, in seconds and fractions unless stated otherwise."""

    mtbf_hours: float
    save_stall: float
    recovery_seconds: float
    best_interval: float
    best_goodput: float
    interval: float  # between the job's checkpoints; 0: it saves only at the end
    goodput: float

    def describe(self, step_seconds: float) -> str:
        steps = max(1, round(self.best_interval / step_seconds))
        yours = f"your interval gives {100 * self.goodput:.2f}%" if self.interval else "this job saves only at the end"
        return (
            f"expect a failure every {_time(3600 * self.mtbf_hours)}. With {_time(self.recovery_seconds)} to recover "
            f"and {_time(self.save_stall)} per checkpoint, goodput is best with a checkpoint every {steps:,} steps "
            f"({_time(self.best_interval)}): {100 * self.best_goodput:.2f}%; {yours}."
        )


def expected_goodput(devices: int, step_seconds: float, every: int, bytes_per_rank: float) -> ExpectedGoodput:
    """Returns the goodput of a run that saves `bytes_per_rank` per rank every `every` steps (0: only at the end)."""
    mtbf, save_stall = 3600 * mtbf_hours(devices), bytes_per_rank / HOST_COPY_BANDWIDTH
    best, interval = optimal_checkpoint_interval(save_stall, mtbf), every * step_seconds
    goodput = goodput_fraction(interval, save_stall, RECOVERY_SECONDS, mtbf) if every else 0.0
    best_goodput = goodput_fraction(best, save_stall, RECOVERY_SECONDS, mtbf)
    return ExpectedGoodput(mtbf / 3600, save_stall, RECOVERY_SECONDS, best, best_goodput, interval, goodput)


def _time(seconds: float) -> str:
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"))
    return next((f"{seconds / size:.3g} {unit}" for size, unit in units if seconds >= 2 * size), f"{seconds:.2g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--layout")
    options = parser.parse_args()
    plan = plan_job(options.job, [], options.cluster, options.devices, options.layout)
    saved = max(rank.weights + rank.optimizer for rank in plan.best.memory)
    goodput = expected_goodput(plan.devices, plan.best.seconds, plan.job.checkpoint.every, saved)
    print(f"{plan}: {goodput.describe(plan.best.seconds)}")


if __name__ == "__main__":
    main()
