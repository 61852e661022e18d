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

from shardwise.laws.data import Runs

ALIKE = 1.2  # budgets whose highest is at most so many times their lowest are one
PARABOLA = 4  # runs of different sizes that a parabola is put through at least
NEAR = 1.08  # runs whose loss is above so many times the lowest lie where no parabola holds


@dataclass(frozen=True)
class Estimate:
    way: str
    points: tuple[tuple[float, float], ...]
    """Budget, and the best number of parameters for it."""
    power: float
    factor: float

    def parameters(self, flops: float) -> float:
        return float(self.factor * flops**self.power)

    def as_dict(self) -> dict[str, object]:
        return {"power": self.power, "factor": self.factor, "points": [list(point) for point in self.points]}


def estimates(runs: Runs) -> list[Estimate]:
    """Those that the runs allow."""
    found = [_through("iso-FLOP", list(_minima(runs))), _through("envelope", list(_envelope(runs)))]
    return [one for one in found if one is not None]


def _through(way: str, points: list[tuple[float, float]]) -> Estimate | None:
    if len(points) < 2 or max(flops for flops, _ in points) < ALIKE * min(flops for flops, _ in points):
        return None
    line = linregress(*np.log(np.array(points)).T)
    return Estimate(way, tuple(points), float(line.slope), float(np.exp(line.intercept)))


def budgets(runs: Runs) -> list[NDArray[np.intp]]:
    """The places of runs by budget, lowest first."""
    order = np.argsort(runs.flops)
    groups: list[list[int]] = []
    for place in order:
        if groups and runs.flops[place] <= ALIKE * runs.flops[groups[-1][0]]:
            groups[-1].append(int(place))
        else:
            groups.append([int(place)])
    return [np.array(group) for group in groups]


def _minima(runs: Runs) -> Iterator[tuple[float, float]]:
    for group in budgets(runs):
        near = group[runs.loss[group] <= NEAR * runs.loss[group].min()]
        size = np.log(runs.parameters[near])
        if len(np.unique(size)) < PARABOLA:
            continue
        bend, slope, _ = np.polyfit(size, np.log(runs.loss[near]), 2)
        lowest = -slope / (2 * bend) if bend > 0 else np.inf
        if size.min() <= lowest <= size.max():
            yield float(np.exp(np.log(runs.flops[near]).mean())), float(np.exp(lowest))


def _envelope(runs: Runs) -> Iterator[tuple[float, float]]:
    least = np.inf
    for place in np.lexsort((runs.loss, runs.flops)):
        if runs.loss[place] < least:
            least = runs.loss[place]
            yield float(runs.flops[place]), float(runs.parameters[place])
