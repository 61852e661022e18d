"""The share of time that is kept under failures: the formula against simulated ones."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from expected_goodput import (  # noqa: E402
    expected_goodput,
    goodput_fraction,
    mtbf_hours,
    optimal_checkpoint_interval,
)


def simulated(interval: float, stall: float, recover: float, between: float, work: float) -> float:
    draw = random.Random(1)
    now, done, fails = 0.0, 0.0, draw.expovariate(1 / between)
    while done < work:
        end = now + interval + stall
        if fails < end:
            now = fails + recover
            fails = now + draw.expovariate(1 / between)
        else:
            now, done = end, done + interval
    return done / now


@pytest.mark.parametrize("interval", [100.0, 1000.0, 5000.0])
def test_the_formula_is_what_failures_leave(interval: float) -> None:
    assert goodput_fraction(interval, 20.0, 60.0, 7200.0) == pytest.approx(
        simulated(interval, 20.0, 60.0, 7200.0, 2e7), rel=0.03
    )


def test_the_best_interval_keeps_most() -> None:
    for stall, between in ((0.1, 1e4), (20.0, 7200.0), (300.0, 3600.0)):
        best = optimal_checkpoint_interval(stall, between)
        kept = goodput_fraction(best, stall, 30.0, between)
        tries = [goodput_fraction(best * factor, stall, 30.0, between) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
        assert kept >= max(tries)


def test_published_times_between_failures() -> None:
    assert mtbf_hours(1024) == pytest.approx(7.9) and mtbf_hours(16384) == pytest.approx(1.8)
    assert mtbf_hours(8) == pytest.approx(7.9 * 128) and mtbf_hours(131072) == pytest.approx(0.225)
    found = expected_goodput(16384, 5.0, 0, 1e10)
    assert 0.9 < found.best_goodput < 1 and "saves only at the end" in found.describe(5.0)
