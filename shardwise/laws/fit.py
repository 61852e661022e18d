"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta, fitted to runs, with confidence intervals and outliers.

The law is the loss of N parameters trained on D tokens; its form is that of Hoffmann et al. 2022 (arXiv 2203.15556),
where training costs C = 6 N D FLOPs. As in their section 3.3, L-BFGS minimizes the Huber loss (delta 0.001) of the
log-loss residuals from many starting points. Two things differ. The search centers the runs, with a = log A - alpha x
mean log N and b likewise: without centering, A and alpha (B and beta) are almost perfectly correlated and the search
converges slowly. And it minimizes the sum, not the mean: with the mean, the original paper's search stopped before
convergence (Besiroglu et al. 2024, arXiv 2404.10102). Confidence intervals are percentiles of a weighted bootstrap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import huber
from scipy.stats import linregress, median_abs_deviation
from threadpoolctl import threadpool_limits

from shardwise.console import pluralize
from shardwise.errors import DataError
from shardwise.laws.runs import Runs

FloatOrArray = Any  # a float or an array of floats
CONSTANTS = ("E", "A", "B", "alpha", "beta")
MAX_FLOPS = 1e32  # of a budget: a million times the largest runs

# Decay constants, in repetitions, of the value of repeated tokens and excess parameters: Muennighoff et al. 2023 (arXiv
# 2305.16264), section 5 and appendix A, fitted to runs of up to 9 billion parameters and 900 billion tokens.
REPEATED_TOKEN_DECAY = 15.387756
EXCESS_PARAMETER_DECAY = 5.309743


@dataclass(frozen=True)
class ScalingLaw:
    E: FloatOrArray  # irreducible loss
    A: FloatOrArray
    B: FloatOrArray
    alpha: FloatOrArray
    beta: FloatOrArray

    def loss(self, N: FloatOrArray, D: FloatOrArray) -> FloatOrArray:
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def compute_optimal(self, flops: FloatOrArray) -> tuple[FloatOrArray, FloatOrArray]:
        """Returns the N and D with the lowest loss for 6 N D = `flops`."""
        exponent_sum = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponent_sum)
        return ratio * (flops / 6) ** (self.beta / exponent_sum), (flops / 6) ** (self.alpha / exponent_sum) / ratio

    def tokens_to_reach(self, N: FloatOrArray, loss: FloatOrArray) -> FloatOrArray:
        """Returns the D at which N parameters reach a loss; infinite if they never do."""
        reducible = np.asarray(loss - self.E - self.A / N**self.alpha, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(reducible > 0, (self.B / reducible) ** (1 / self.beta), np.inf)[()]

    def optimal_parameters(self, D: FloatOrArray) -> FloatOrArray:
        """Returns the N for which D tokens are compute-optimal."""
        exponent_sum = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponent_sum)
        return ratio * (D * ratio) ** (self.beta / self.alpha)

    def effective_parameters_and_tokens(
        self, N: FloatOrArray, D: FloatOrArray, unique_tokens: float
    ) -> tuple[FloatOrArray, FloatOrArray]:
        """Returns the N and D that would reach the same loss if all tokens were unique: repeated tokens are worth less,
        and so are parameters beyond those that are compute-optimal for the unique tokens."""
        distinct_tokens = np.minimum(D, unique_tokens)
        useful_parameters = np.minimum(N, self.optimal_parameters(distinct_tokens))
        parameters = _effective_amount(useful_parameters, N / useful_parameters - 1, EXCESS_PARAMETER_DECAY)
        return parameters, _effective_amount(distinct_tokens, D / distinct_tokens - 1, REPEATED_TOKEN_DECAY)

    def data_constrained_loss(self, N: FloatOrArray, D: FloatOrArray, unique_tokens: float) -> FloatOrArray:
        """Returns the loss if only `unique_tokens` of the D tokens are unique."""
        return self.loss(*self.effective_parameters_and_tokens(N, D, unique_tokens))

    def as_array(self) -> NDArray[np.float64]:
        return np.array([self.E, self.A, self.B, self.alpha, self.beta])


def _effective_amount(amount: FloatOrArray, repetitions: FloatOrArray, decay: float) -> FloatOrArray:
    return amount + amount * decay * (1 - np.exp(-repetitions / decay))


Array = NDArray[np.float64]
HUBER_DELTA = 1e-3
BOOTSTRAP_SAMPLES = 400
CONFIDENCE = 0.95
MIN_RUNS = 6  # one more than the number of constants
MIN_DISTINCT_SIZES = 3  # of parameters and of tokens: a power law with an offset has three unknowns
# An outlier's residual exceeds both this many robust standard deviations and this fraction of the loss.
OUTLIER_DEVIATIONS, OUTLIER_MIN_RESIDUAL = 11.0, 0.02
RUNS_PER_OUTLIER = 20  # at most one run in this many is dropped as an outlier
COARSE_STEPS, NUM_REFINED = 25, 8  # search steps from every start; how many of the best results run to convergence
BOUNDS = [(-12.0, 6.0), (-16.0, 6.0), (-16.0, 6.0), (1e-4, 4.0), (1e-4, 4.0)]


@dataclass(frozen=True)
class ScalingLawFit:
    law: ScalingLaw
    bootstrap_samples: ScalingLaw  # the constants of the bootstrap fits, as arrays
    runs: Runs  # runs that the law was fitted to
    dropped: Runs  # runs that were dropped
    objective: float

    @property
    def residuals(self) -> Array:
        """log(measured loss / predicted loss) of each run."""
        return residuals(self.law, self.runs)

    @property
    def residual_std(self) -> float:
        """Robust standard deviation of the residuals."""
        return _robust_std(self.residuals)

    def constants(self) -> dict[str, dict[str, float]]:
        """Returns value, 95% interval and standard error of each constant."""
        result = {}
        for name in CONSTANTS:
            samples = getattr(self.bootstrap_samples, name)
            low, high = interval(samples)
            result[name] = {"value": float(getattr(self.law, name)), "low": low, "high": high,
                            "standard_error": float(np.std(samples))}  # fmt: skip
        return result


def interval(values: Any) -> tuple[float, float]:
    """Returns the central 95% interval of samples."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def residuals(law: ScalingLaw, runs: Runs) -> Array:
    return np.asarray(np.log(runs.loss) - np.log(law.loss(runs.parameters, runs.tokens)))


@threadpool_limits.wrap(limits=1)  # matrices have 5 rows: with threads the search takes 15 times as long
def fit_scaling_law(
    runs: Runs, drop_highest: int | None = None, bootstrap_samples: int = BOOTSTRAP_SAMPLES, seed: int = 0
) -> ScalingLawFit:
    """Fits a law to runs after dropping the `drop_highest` runs with the highest loss; None drops outliers instead."""
    best = None
    if drop_highest is None:
        check_runs(runs)
        best = best_fit(runs)
        kept = _drop_outliers(runs, best)
    elif 0 <= drop_highest < len(runs):
        kept = np.argsort(runs.loss, kind="stable")[: len(runs) - drop_highest]
        check_runs(runs.select(kept))
    else:
        raise DataError(f"--drop-highest {drop_highest}: there are only {pluralize(len(runs), 'run')}; drop fewer.")
    is_kept = np.isin(np.arange(len(runs)), kept)
    kept_runs = runs.select(is_kept)
    law, objective, point = best if best is not None and is_kept.all() else best_fit(kept_runs)
    if point[3] < 1e-3 or point[4] < 1e-3:
        quantity = "parameters" if point[3] < point[4] else "tokens"
        raise DataError(f"the loss of these runs does not fall with their {quantity}, so no law can be fitted; "
                        f"add runs with a wider range of {quantity}.")  # fmt: skip
    samples = bootstrap(kept_runs, point, bootstrap_samples, seed)
    return ScalingLawFit(law, samples, kept_runs, runs.select(~is_kept), objective)


def check_runs(runs: Runs) -> None:
    """Raises DataError if there are too few runs, or too few different sizes, to fit five constants."""
    if len(runs) < MIN_RUNS:
        raise DataError(f"{pluralize(len(runs), 'run')}: a law has five constants; give at least {MIN_RUNS} runs.")
    for quantity in ("parameters", "tokens"):
        # Values within about 0.1% of each other count once.
        num_distinct = len(np.unique(np.round(np.log(getattr(runs, quantity)), 3)))
        if num_distinct < MIN_DISTINCT_SIZES:
            raise DataError(
                f"these {pluralize(len(runs), 'run')} have {pluralize(num_distinct, 'different value')} of {quantity}; "
                f"a law needs at least {MIN_DISTINCT_SIZES}."
            )


def best_fit(runs: Runs) -> tuple[ScalingLaw, float, Array]:
    """Searches from many starting points; returns the best law, its objective and its search coordinates."""
    log_runs = _LogRuns.from_runs(runs)
    results = [_minimize(log_runs, start, steps=COARSE_STEPS) for start in _starting_points(runs)]
    results.sort(key=lambda result: float(result.fun))
    refined = [_minimize(log_runs, result.x) for result in results[:NUM_REFINED]]
    best = min(refined, key=lambda result: float(result.fun))
    return log_runs.law(best.x), float(best.fun) * HUBER_DELTA, best.x


def bootstrap(runs: Runs, point: Array, bootstrap_samples: int, seed: int) -> ScalingLaw:
    """Returns the constants of fits to randomly weighted runs; each search starts at the best fit.

    The weights are exponential (Bayesian bootstrap, Rubin 1981). Drawing runs with replacement omits a third of them
    each time, which makes intervals a fifth too wide with a few dozen runs."""
    rng, log_runs = np.random.default_rng(seed), _LogRuns.from_runs(runs)
    constants = []
    for _ in range(bootstrap_samples):
        weights = rng.standard_exponential(len(runs))
        constants.append(log_runs.law(_minimize(log_runs, point, weights / weights.mean()).x).as_array())
    return ScalingLaw(*np.array(constants).reshape(-1, len(CONSTANTS)).T)


@dataclass(frozen=True)
class _LogRuns:
    """Runs as the search uses them: logarithms, with sizes centered at 0."""

    n: Array
    d: Array
    loss: Array
    center: tuple[float, float]

    @classmethod
    def from_runs(cls, runs: Runs) -> "_LogRuns":
        n, d = np.log(runs.parameters), np.log(runs.tokens)
        return cls(n - n.mean(), d - d.mean(), np.log(runs.loss), (float(n.mean()), float(d.mean())))

    def law(self, point: Array) -> ScalingLaw:
        e, a, b, alpha, beta = map(float, point)
        n, d = self.center
        return ScalingLaw(float(np.exp(e)), float(np.exp(a + alpha * n)), float(np.exp(b + beta * d)), alpha, beta)

    def objective(self, point: Array, weights: Array) -> tuple[float, Array]:
        """Returns the Huber loss and its gradient, divided by `HUBER_DELTA` to suit the search's tolerances."""
        e, a, b, alpha, beta = point
        terms = np.stack([np.full_like(self.n, e), a - alpha * self.n, b - beta * self.d])
        total = np.logaddexp.reduce(terms, axis=0)
        error = total - self.loss
        slope = weights * np.clip(error / HUBER_DELTA, -1.0, 1.0) * np.exp(terms - total)
        gradient = np.array([*slope.sum(axis=1), -(slope[1] * self.n).sum(), -(slope[2] * self.d).sum()])
        return float((weights * huber(HUBER_DELTA, error)).sum() / HUBER_DELTA), gradient


def _minimize(log_runs: _LogRuns, start: Any, weights: Any = 1.0, steps: int = 1000) -> Any:
    options = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8, "maxcor": 20}
    return minimize(log_runs.objective, start, (weights,), jac=True, method="L-BFGS-B", bounds=BOUNDS, options=options)


def _starting_points(runs: Runs) -> Iterator[tuple[float, ...]]:
    """Yields 81 starts: splits of the mean loss into E and the two terms, times pairs of exponents."""
    center, lowest_loss = float(np.exp(np.log(runs.loss).mean())), float(runs.loss.min())
    grid = product((0.3, 0.6, 0.9), (0.2, 0.5, 0.8), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0))
    for irreducible_share, parameter_share, alpha, beta in grid:
        irreducible = irreducible_share * lowest_loss
        parameter_term = parameter_share * (center - irreducible)
        token_term = (1 - parameter_share) * (center - irreducible)
        yield np.log(irreducible), np.log(parameter_term), np.log(token_term), alpha, beta


def find_outliers(law: ScalingLaw, runs: Runs) -> NDArray[np.intp]:
    """Returns the indices of outliers, largest residual first."""
    abs_residuals = np.abs(residuals(law, runs))
    threshold = max(OUTLIER_DEVIATIONS * _robust_std(residuals(law, runs)), OUTLIER_MIN_RESIDUAL)
    outlier_indices = np.flatnonzero(abs_residuals > threshold)
    return outlier_indices[np.argsort(-abs_residuals[outlier_indices])]


def _drop_outliers(runs: Runs, best: tuple[ScalingLaw, float, Array]) -> NDArray[np.intp]:
    """Returns the indices of runs without outliers. Drops one at a time, since each outlier distorts the law."""
    kept, (law, _, point) = np.arange(len(runs)), best
    for _ in range(len(runs) // RUNS_PER_OUTLIER):
        outlier_indices = find_outliers(law, runs.select(kept))
        if not len(outlier_indices):
            break
        kept = np.delete(kept, outlier_indices[0])
        log_runs = _LogRuns.from_runs(runs.select(kept))
        law = log_runs.law(_minimize(log_runs, point).x)
    return kept


def _robust_std(values: Array) -> float:
    return float(median_abs_deviation(values, scale="normal"))


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
        return {"exponent": self.exponent, "coefficient": self.coefficient, "points": self.points}


def estimate_compute_optimal(runs: Runs) -> list[ComputeOptimalEstimate]:
    """Returns the estimates of the compute-optimal size that need no fitted law (Hoffmann et al. 2022, section 3), if
    there are enough runs for them: *iso-FLOP*, for each budget the minimum of a parabola fitted to loss over log N, and
    *envelope*, the runs that no cheaper run beats.

    Each gives points (C, N), to which the power law N = k C^a is fitted. The fitted law implies a = beta / (alpha +
    beta). Only final losses count: an intermediate loss is higher than that of a shorter run with a decayed learning
    rate."""
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
