"""The law that fits runs best, how sure it is, and which runs do not follow it.

As in Hoffmann et al. 2022, section 3.3: the Huber loss (delta 0.001) of the errors of the logarithm of the loss is
minimised by L-BFGS from many starts. Two things are ours. Constants are sought around the middle of the runs, with
a = log A - alpha x mean log N and b likewise: around N = 1 the pairs (A, alpha) and (B, beta) are all but one number,
and the search crawls along a narrow valley. And the sum is minimised, not the mean: with the mean the search of the
original paper stopped before its end (Besiroglu et al. 2024, arXiv 2404.10102). Intervals are percentiles over fits of
reweighted runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import huber
from scipy.stats import median_abs_deviation
from threadpoolctl import threadpool_limits

from shardwise.errors import DataError
from shardwise.laws.data import Runs
from shardwise.laws.law import NAMES, Law
from shardwise.words import counted

Array = NDArray[np.float64]
DELTA = 1e-3
DRAWS = 400
LEVEL = 0.95
LEAST = 6  # runs: one more than there are constants
SIZES = 3  # different numbers of parameters, and of tokens: a power with an offset has as many unknowns
FAR = 11.0  # robust standard deviations from the law beyond which a run is an outlier ...
FAR_SHARE = 0.02  # ... if it is also off by this share: where runs lie close to the law, any error is many deviations
FEW = 20  # one outlier at most among so many runs is left out on its own account
ROUGH, KEPT = 25, 8  # steps of the search from every start, and how many of the best are searched to the end
BOUNDS = [(-12.0, 6.0), (-16.0, 6.0), (-16.0, 6.0), (1e-4, 4.0), (1e-4, 4.0)]


@dataclass(frozen=True)
class Fit:
    law: Law
    draws: Law
    """The same constants of fits to reweighted runs, as arrays."""
    runs: Runs
    """Those that the law was fitted to."""
    dropped: Runs
    """Those that were left out."""
    objective: float

    @property
    def residuals(self) -> Array:
        """Logarithm of measured over predicted loss."""
        return residuals(self.law, self.runs)

    @property
    def scatter(self) -> float:
        """A robust standard deviation of the residuals."""
        return _scatter(self.residuals)

    def interval(self, values: Any) -> tuple[float, float]:
        return interval(values)

    def constants(self) -> dict[str, dict[str, float]]:
        found = {}
        for name in NAMES:
            values = getattr(self.draws, name)
            low, high = interval(values)
            found[name] = {"value": float(getattr(self.law, name)), "low": low, "high": high,
                           "standard_error": float(np.std(values))}  # fmt: skip
        return found


def interval(values: Any) -> tuple[float, float]:
    """Between which 95% of the draws lie."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def residuals(law: Law, runs: Runs) -> Array:
    return np.asarray(np.log(runs.loss) - np.log(law.loss(runs.parameters, runs.tokens)))


@threadpool_limits.wrap(limits=1)  # the search's matrices are of 5 numbers: threads for them cost 15 times the search
def fit(runs: Runs, drop: int | None = None, draws: int = DRAWS, seed: int = 0) -> Fit:
    """Fits a law. `drop`: leaves out so many of the highest losses; None: those that no law near the others allows."""
    check(runs if drop is None else _without_highest(runs, drop))
    best = best_fit(runs) if not drop else None
    kept = np.arange(len(runs))
    if best is None:
        kept = np.argsort(runs.loss, kind="stable")[: len(runs) - (drop or 0)]
    elif drop is None:
        kept = _follow(runs, best)
    inside = np.isin(np.arange(len(runs)), kept)
    used = runs.some(inside)
    law, objective, point = best if best is not None and inside.all() else best_fit(used)
    if point[3] < 1e-3 or point[4] < 1e-3:
        what = "parameters" if point[3] < point[4] else "tokens"
        raise DataError(f"the loss of these runs does not fall with their {what}, so no law can be fitted; "
                        f"runs with a wider range of {what} would do.")  # fmt: skip
    return Fit(law, bootstrap(used, point, draws, seed), used, runs.some(~inside), objective)


def check(runs: Runs) -> None:
    """Raises where runs cannot say what the five constants are."""
    if len(runs) < LEAST:
        raise DataError(f"{counted(len(runs), 'run')}: a law has five constants; give at least {LEAST} runs.")
    for what in ("parameters", "tokens"):
        different = _different(getattr(runs, what))
        if different < SIZES:
            raise DataError(
                f"these {counted(len(runs), 'run')} have {counted(different, 'value')} of {what}; a law needs {SIZES} "
                "different ones at least."
            )


def _different(values: Array) -> int:
    """How many values there are that differ by more than a thousandth."""
    return len(np.unique(np.round(np.log(values), 3)))


def best_fit(runs: Runs) -> tuple[Law, float, Array]:
    """The best of many starts: the law, its objective, and the point of the search that it is."""
    seen = _Seen.of(runs)
    found = sorted((_search(seen, start, steps=ROUGH) for start in _starts(runs)), key=lambda result: float(result.fun))
    best = min((_search(seen, rough.x) for rough in found[:KEPT]), key=lambda result: float(result.fun))
    return seen.law(best.x), float(best.fun) * DELTA, best.x


def bootstrap(runs: Runs, point: Array, draws: int, seed: int) -> Law:
    """Constants of fits to runs with random weights, each search started at the best fit of all.

    Weights are exponential (Rubin 1981) rather than counts of runs drawn with replacement: these leave a third of the
    runs out each time, and with some dozens of runs that makes intervals a fifth too wide.
    """
    chance, seen = np.random.default_rng(seed), _Seen.of(runs)
    found = []
    for _ in range(draws):
        weights = chance.standard_exponential(len(runs))
        found.append(seen.law(_search(seen, point, weights / weights.mean()).x).as_array())
    return Law(*np.array(found).reshape(-1, len(NAMES)).T)


@dataclass(frozen=True)
class _Seen:
    """Runs as the search sees them: logarithms, sizes around their middle."""

    n: Array
    d: Array
    loss: Array
    middle: tuple[float, float]

    @classmethod
    def of(cls, runs: Runs) -> _Seen:
        n, d = np.log(runs.parameters), np.log(runs.tokens)
        return cls(n - n.mean(), d - d.mean(), np.log(runs.loss), (float(n.mean()), float(d.mean())))

    def law(self, point: Array) -> Law:
        e, a, b, alpha, beta = map(float, point)
        n, d = self.middle
        return Law(float(np.exp(e)), float(np.exp(a + alpha * n)), float(np.exp(b + beta * d)), alpha, beta)

    def objective(self, point: Array, weights: Array) -> tuple[float, Array]:
        """The Huber loss over `DELTA` (larger numbers suit the search's limits), and its gradient."""
        e, a, b, alpha, beta = point
        terms = np.stack([np.full_like(self.n, e), a - alpha * self.n, b - beta * self.d])
        total = np.logaddexp.reduce(terms, axis=0)
        error = total - self.loss
        slope = weights * np.clip(error / DELTA, -1.0, 1.0) * np.exp(terms - total)
        one, two, three = slope.sum(axis=1)
        gradient = np.array([one, two, three, -(slope[1] * self.n).sum(), -(slope[2] * self.d).sum()])
        return float((weights * huber(DELTA, error)).sum() / DELTA), gradient


def _search(seen: _Seen, start: Any, weights: Any = 1.0, steps: int = 1000) -> Any:
    limits = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8, "maxcor": 20}
    return minimize(seen.objective, start, (weights,), jac=True, method="L-BFGS-B", bounds=BOUNDS, options=limits)


def _starts(runs: Runs) -> list[tuple[float, ...]]:
    """In the middle of the runs the loss is E and two terms: how it is dealt out, and two exponents, 81 ways."""
    found: list[tuple[float, ...]] = []
    middle, least = float(np.exp(np.log(runs.loss).mean())), float(runs.loss.min())
    for part, share, alpha, beta in product((0.3, 0.6, 0.9), (0.2, 0.5, 0.8), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0)):
        rest = middle - part * least
        found.append((np.log(part * least), np.log(share * rest), np.log((1 - share) * rest), alpha, beta))
    return found


# Outliers


def outliers(law: Law, runs: Runs) -> NDArray[np.intp]:
    """The places of runs that lie far from a law, the farthest first."""
    off = np.abs(residuals(law, runs))
    far = np.flatnonzero((off > FAR * _scatter(residuals(law, runs))) & (off > FAR_SHARE))
    return far[np.argsort(-off[far])]


def _follow(runs: Runs, best: tuple[Law, float, Array]) -> NDArray[np.intp]:
    """The places of runs without outliers. One goes at a time, the farthest, since it bends the law for the others."""
    kept, (law, _, point) = np.arange(len(runs)), best
    for _ in range(len(runs) // FEW):
        far = outliers(law, runs.some(kept))
        if not len(far):
            break
        kept = np.delete(kept, far[0])
        seen = _Seen.of(runs.some(kept))
        law = seen.law(_search(seen, point).x)
    return kept


def _scatter(values: Array) -> float:
    return float(median_abs_deviation(values, scale="normal"))


def _without_highest(runs: Runs, drop: int) -> Runs:
    if not 0 <= drop < len(runs):
        raise DataError(f"--drop-highest {drop}: there are {counted(len(runs), 'run')}.")
    return runs.some(np.argsort(runs.loss, kind="stable")[: len(runs) - drop])
