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

from shardwise.console import pluralize
from shardwise.errors import DataError
from shardwise.laws.runs import Runs
from shardwise.laws.scaling_law import CONSTANTS, ScalingLaw

Array = NDArray[np.float64]
HUBER_DELTA = 1e-3
BOOTSTRAP_SAMPLES = 400
CONFIDENCE = 0.95
MIN_RUNS = 6  # runs: one more than there are constants
MIN_DISTINCT_SIZES = 3  # different numbers of parameters, and of tokens: a power with an offset has as many unknowns
OUTLIER_DEVIATIONS = 11.0  # robust standard deviations from the law beyond which a run is an outlier ...
OUTLIER_MIN_RESIDUAL = (
    0.02  # ... if it is also off by this share: where runs lie close to the law, any error is many deviations
)
RUNS_PER_OUTLIER = 20  # one outlier at most among so many runs is left out on its own account
COARSE_STEPS, NUM_REFINED = (
    25,
    8,
)  # steps of the search from every start, and how many of the best are searched to the end
BOUNDS = [(-12.0, 6.0), (-16.0, 6.0), (-16.0, 6.0), (1e-4, 4.0), (1e-4, 4.0)]


@dataclass(frozen=True)
class ScalingLawFit:
    law: ScalingLaw
    bootstrap_samples: ScalingLaw
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
    def residual_std(self) -> float:
        """A robust standard deviation of the residuals."""
        return _robust_std(self.residuals)

    def interval(self, values: Any) -> tuple[float, float]:
        return interval(values)

    def constants(self) -> dict[str, dict[str, float]]:
        found = {}
        for name in CONSTANTS:
            values = getattr(self.bootstrap_samples, name)
            low, high = interval(values)
            found[name] = {"value": float(getattr(self.law, name)), "low": low, "high": high,
                           "standard_error": float(np.std(values))}  # fmt: skip
        return found


def interval(values: Any) -> tuple[float, float]:
    """Between which 95% of the draws lie."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def residuals(law: ScalingLaw, runs: Runs) -> Array:
    return np.asarray(np.log(runs.loss) - np.log(law.loss(runs.parameters, runs.tokens)))


@threadpool_limits.wrap(limits=1)  # the search's matrices are of 5 numbers: threads for them cost 15 times the search
def fit_scaling_law(
    runs: Runs, drop_highest: int | None = None, bootstrap_samples: int = BOOTSTRAP_SAMPLES, seed: int = 0
) -> ScalingLawFit:
    """Fits a law. `drop`: leaves out so many of the highest losses; None: those that no law near the others allows."""
    check_runs(runs if drop_highest is None else _without_highest(runs, drop_highest))
    best = best_fit(runs) if not drop_highest else None
    kept = np.arange(len(runs))
    if best is None:
        kept = np.argsort(runs.loss, kind="stable")[: len(runs) - (drop_highest or 0)]
    elif drop_highest is None:
        kept = _drop_outliers(runs, best)
    is_kept = np.isin(np.arange(len(runs)), kept)
    kept_runs = runs.select(is_kept)
    law, objective, point = best if best is not None and is_kept.all() else best_fit(kept_runs)
    if point[3] < 1e-3 or point[4] < 1e-3:
        quantity = "parameters" if point[3] < point[4] else "tokens"
        raise DataError(f"the loss of these runs does not fall with their {quantity}, so no law can be fitted; "
                        f"runs with a wider range of {quantity} would do.")  # fmt: skip
    return ScalingLawFit(
        law, bootstrap(kept_runs, point, bootstrap_samples, seed), kept_runs, runs.select(~is_kept), objective
    )


def check_runs(runs: Runs) -> None:
    """Raises where runs cannot say what the five constants are."""
    if len(runs) < MIN_RUNS:
        raise DataError(f"{pluralize(len(runs), 'run')}: a law has five constants; give at least {MIN_RUNS} runs.")
    for quantity in ("parameters", "tokens"):
        num_distinct = _count_distinct(getattr(runs, quantity))
        if num_distinct < MIN_DISTINCT_SIZES:
            raise DataError(
                f"these {pluralize(len(runs), 'run')} have {pluralize(num_distinct, 'value')} of {quantity}; a law needs {MIN_DISTINCT_SIZES} "
                "different ones at least."
            )


def _count_distinct(values: Array) -> int:
    """How many values there are that differ by more than a thousandth."""
    return len(np.unique(np.round(np.log(values), 3)))


def best_fit(runs: Runs) -> tuple[ScalingLaw, float, Array]:
    """The best of many starts: the law, its objective, and the point of the search that it is."""
    log_runs = _LogRuns.of(runs)
    found = sorted(
        (_minimize(log_runs, start, steps=COARSE_STEPS) for start in _starting_points(runs)),
        key=lambda result: float(result.fun),
    )
    best = min((_minimize(log_runs, coarse.x) for coarse in found[:NUM_REFINED]), key=lambda result: float(result.fun))
    return log_runs.law(best.x), float(best.fun) * HUBER_DELTA, best.x


def bootstrap(runs: Runs, point: Array, bootstrap_samples: int, seed: int) -> ScalingLaw:
    """Constants of fits to runs with random weights, each search started at the best fit of all.

    Weights are exponential (Rubin 1981) rather than counts of runs drawn with replacement: these leave a third of the
    runs out each time, and with some dozens of runs that makes intervals a fifth too wide.
    """
    rng, log_runs = np.random.default_rng(seed), _LogRuns.of(runs)
    found = []
    for _ in range(bootstrap_samples):
        weights = rng.standard_exponential(len(runs))
        found.append(log_runs.law(_minimize(log_runs, point, weights / weights.mean()).x).as_array())
    return ScalingLaw(*np.array(found).reshape(-1, len(CONSTANTS)).T)


@dataclass(frozen=True)
class _LogRuns:
    """Runs as the search sees them: logarithms, sizes around their middle."""

    n: Array
    d: Array
    loss: Array
    center: tuple[float, float]

    @classmethod
    def of(cls, runs: Runs) -> _LogRuns:
        n, d = np.log(runs.parameters), np.log(runs.tokens)
        return cls(n - n.mean(), d - d.mean(), np.log(runs.loss), (float(n.mean()), float(d.mean())))

    def law(self, point: Array) -> ScalingLaw:
        e, a, b, alpha, beta = map(float, point)
        n, d = self.center
        return ScalingLaw(float(np.exp(e)), float(np.exp(a + alpha * n)), float(np.exp(b + beta * d)), alpha, beta)

    def objective(self, point: Array, weights: Array) -> tuple[float, Array]:
        """The Huber loss over `HUBER_DELTA` (larger numbers suit the search's limits), and its gradient."""
        e, a, b, alpha, beta = point
        terms = np.stack([np.full_like(self.n, e), a - alpha * self.n, b - beta * self.d])
        total = np.logaddexp.reduce(terms, axis=0)
        error = total - self.loss
        slope = weights * np.clip(error / HUBER_DELTA, -1.0, 1.0) * np.exp(terms - total)
        one, two, three = slope.sum(axis=1)
        gradient = np.array([one, two, three, -(slope[1] * self.n).sum(), -(slope[2] * self.d).sum()])
        return float((weights * huber(HUBER_DELTA, error)).sum() / HUBER_DELTA), gradient


def _minimize(log_runs: _LogRuns, start: Any, weights: Any = 1.0, steps: int = 1000) -> Any:
    options = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8, "maxcor": 20}
    return minimize(log_runs.objective, start, (weights,), jac=True, method="L-BFGS-B", bounds=BOUNDS, options=options)


def _starting_points(runs: Runs) -> list[tuple[float, ...]]:
    """In the middle of the runs the loss is E and two terms: how it is dealt out, and two exponents, 81 ways."""
    found: list[tuple[float, ...]] = []
    center, lowest_loss = float(np.exp(np.log(runs.loss).mean())), float(runs.loss.min())
    for irreducible_share, parameter_share, alpha, beta in product(
        (0.3, 0.6, 0.9), (0.2, 0.5, 0.8), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0)
    ):
        reducible = center - irreducible_share * lowest_loss
        found.append(
            (
                np.log(irreducible_share * lowest_loss),
                np.log(parameter_share * reducible),
                np.log((1 - parameter_share) * reducible),
                alpha,
                beta,
            )
        )
    return found


# Outliers


def find_outliers(law: ScalingLaw, runs: Runs) -> NDArray[np.intp]:
    """The places of runs that lie far from a law, the farthest first."""
    abs_residuals = np.abs(residuals(law, runs))
    outlier_indices = np.flatnonzero(
        (abs_residuals > OUTLIER_DEVIATIONS * _robust_std(residuals(law, runs)))
        & (abs_residuals > OUTLIER_MIN_RESIDUAL)
    )
    return outlier_indices[np.argsort(-abs_residuals[outlier_indices])]


def _drop_outliers(runs: Runs, best: tuple[ScalingLaw, float, Array]) -> NDArray[np.intp]:
    """The places of runs without outliers. One goes at a time, the farthest, since it bends the law for the others."""
    kept, (law, _, point) = np.arange(len(runs)), best
    for _ in range(len(runs) // RUNS_PER_OUTLIER):
        outlier_indices = find_outliers(law, runs.select(kept))
        if not len(outlier_indices):
            break
        kept = np.delete(kept, outlier_indices[0])
        log_runs = _LogRuns.of(runs.select(kept))
        law = log_runs.law(_minimize(log_runs, point).x)
    return kept


def _robust_std(values: Array) -> float:
    return float(median_abs_deviation(values, scale="normal"))


def _without_highest(runs: Runs, drop_highest: int) -> Runs:
    if not 0 <= drop_highest < len(runs):
        raise DataError(f"--drop-highest {drop_highest}: there are {pluralize(len(runs), 'run')}.")
    return runs.select(np.argsort(runs.loss, kind="stable")[: len(runs) - drop_highest])
