"""Two estimates of the compute-optimal model size that need no fitted law (Hoffmann et al. 2022, section 3).

- *iso-FLOP*: for each budget, the minimum of a parabola fitted to loss over log N;
- *envelope*: the runs that no cheaper run beats.

Each gives points (C, N), to which the power law N = k C^a is fitted. The fitted law implies a = beta / (alpha + beta).
Only final losses count: an intermediate loss is higher than that of a shorter run with a decayed learning rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import linregress

from shardwise.laws.runs import Runs

SAME_BUDGET_RATIO = 1.2  # runs whose FLOPs are within this factor share a budget
MIN_PARABOLA_RUNS = 4  # minimum number of different sizes for a parabola
MAX_LOSS_RATIO = 1.08  # ignore runs above this multiple of the lowest loss: too far from the parabola's minimum


@dataclass(frozen=True)
class ComputeOptimalEstimate:
    method: str
    points: tuple[tuple[float, float], ...]  # pairs of budget and optimal number of parameters
    exponent: float
    coefficient: float

    def parameters(self, flops: float) -> float:
        return float(self.coefficient * flops**self.exponent)

    def as_dict(self) -> dict[str, object]:
        points = [list(point) for point in self.points]
        return {"exponent": self.exponent, "coefficient": self.coefficient, "points": points}


def estimate_compute_optimal(runs: Runs) -> list[ComputeOptimalEstimate]:
    """Returns the estimates for which there are enough runs."""
    estimates = []
    for method, points in (("iso-FLOP", tuple(_isoflop_minima(runs))), ("envelope", tuple(_envelope(runs)))):
        if len(points) > 1 and max(points)[0] >= SAME_BUDGET_RATIO * min(points)[0]:
            line = linregress(*np.log(np.array(points)).T)
            slope, coefficient = float(line.slope), float(np.exp(line.intercept))
            estimates.append(ComputeOptimalEstimate(method, points, slope, coefficient))
    return estimates


def group_by_budget(runs: Runs) -> list[NDArray[np.intp]]:
    """Groups the indices of runs by budget, lowest budget first."""
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
        near_best = group[runs.loss[group] <= MAX_LOSS_RATIO * runs.loss[group].min()]
        size = np.log(runs.parameters[near_best])
        if len(np.unique(size)) < MIN_PARABOLA_RUNS:
            continue
        curvature, slope, _ = np.polyfit(size, np.log(runs.loss[near_best]), 2)
        minimum = -slope / (2 * curvature) if curvature > 0 else np.inf
        if size.min() <= minimum <= size.max():
            yield float(np.exp(np.log(runs.flops[near_best]).mean())), float(np.exp(minimum))


def _envelope(runs: Runs) -> Iterator[tuple[float, float]]:
    lowest_loss = np.inf
    for index in np.lexsort((runs.loss, runs.flops)):
        if runs.loss[index] < lowest_loss:
            lowest_loss = runs.loss[index]
            yield float(runs.flops[index]), float(runs.parameters[index])
