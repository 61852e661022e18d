"""Two other ways to the best size of a model for a budget, beside the fitted law (Hoffmann et al. 2022, section 3).

- *iso-FLOP*: among runs of one budget, the minimum of a parabola through their losses over log N;
- *envelope*: the runs that no cheaper run beats.

Each gives points (C, N), and through them the power N = k C^a. The law has its own: a = beta / (alpha + beta). Only
final losses count: the loss in the midst of a run is not that of a shorter one, whose learning rate would have fallen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import linregress

from shardwise.laws.runs import Runs

SAME_BUDGET_RATIO = 1.2  # budgets whose highest is at most so many times their lowest are one
MIN_PARABOLA_RUNS = 4  # runs of different sizes that a parabola is put through at least
MAX_LOSS_RATIO = 1.08  # runs whose loss is above so many times the lowest lie where no parabola holds


@dataclass(frozen=True)
class ComputeOptimalEstimate:
    method: str
    points: tuple[tuple[float, float], ...]
    """Budget, and the best number of parameters for it."""
    exponent: float
    coefficient: float

    def parameters(self, flops: float) -> float:
        return float(self.coefficient * flops**self.exponent)

    def as_dict(self) -> dict[str, object]:
        return {"power": self.exponent, "factor": self.coefficient, "points": [list(point) for point in self.points]}


def estimate_compute_optimal(runs: Runs) -> list[ComputeOptimalEstimate]:
    """Those that the runs allow."""
    found = [_fit_power_law("iso-FLOP", list(_isoflop_minima(runs))), _fit_power_law("envelope", list(_envelope(runs)))]
    return [estimate for estimate in found if estimate is not None]


def _fit_power_law(method: str, points: list[tuple[float, float]]) -> ComputeOptimalEstimate | None:
    if len(points) < 2 or max(flops for flops, _ in points) < SAME_BUDGET_RATIO * min(flops for flops, _ in points):
        return None
    line = linregress(*np.log(np.array(points)).T)
    return ComputeOptimalEstimate(method, tuple(points), float(line.slope), float(np.exp(line.intercept)))


def group_by_budget(runs: Runs) -> list[NDArray[np.intp]]:
    """The places of runs by budget, lowest first."""
    order = np.argsort(runs.flops)
    groups: list[list[int]] = []
    for index in order:
        if groups and runs.flops[index] <= SAME_BUDGET_RATIO * runs.flops[groups[-1][0]]:
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
    return [np.array(group) for group in groups]


def _isoflop_minima(runs: Runs) -> Iterator[tuple[float, float]]:
    for group in group_by_budget(runs):
        kept = group[runs.loss[group] <= MAX_LOSS_RATIO * runs.loss[group].min()]
        size = np.log(runs.parameters[kept])
        if len(np.unique(size)) < MIN_PARABOLA_RUNS:
            continue
        curvature, slope, _ = np.polyfit(size, np.log(runs.loss[kept]), 2)
        minimum = -slope / (2 * curvature) if curvature > 0 else np.inf
        if size.min() <= minimum <= size.max():
            yield float(np.exp(np.log(runs.flops[kept]).mean())), float(np.exp(minimum))


def _envelope(runs: Runs) -> Iterator[tuple[float, float]]:
    lowest_loss = np.inf
    for index in np.lexsort((runs.loss, runs.flops)):
        if runs.loss[index] < lowest_loss:
            lowest_loss = runs.loss[index]
            yield float(runs.flops[index]), float(runs.parameters[index])
