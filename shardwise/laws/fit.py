"""Runs to fit a law to, and the scaling law L(N, D) = E + A / N^alpha + B / D^beta, fitted with confidence intervals.

Runs are read from run folders of `shardwise train`, or from a CSV file with the columns of `columns.toml`. The law is
the loss of N parameters trained on D tokens; its form is that of Hoffmann et al. 2022 (arXiv 2203.15556), where
training costs C = 6 N D FLOPs. As in their section 3.3, L-BFGS minimizes the Huber loss (delta 0.001) of the log-loss
residuals from many starting points. Two things differ. The search centers the runs, with a = log A - alpha x mean log N
and b likewise: without centering, A and alpha (B and beta) are almost perfectly correlated and the search converges
slowly. And it minimizes the sum, not the mean: with the mean, the original paper's search stopped before convergence
(Besiroglu et al. 2024, arXiv 2404.10102). Confidence intervals are percentiles of a weighted bootstrap."""

import csv
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import huber
from scipy.stats import median_abs_deviation
from threadpoolctl import threadpool_limits

from shardwise.console import fill_in, pluralize
from shardwise.errors import DataError
from shardwise.files import malformed_as_data_error, parse_json
from shardwise.models.gpt_family import DecoderConfig
from shardwise.planner.costs.model_shape import shape_of
from shardwise.train.run_folder import RunFolder

Array = NDArray[np.float64]
RunRow = tuple[str, float, float, float, float]  # name, parameters, tokens, loss, FLOPs
COLUMNS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
QUANTITIES, COLUMN_NAMES = tuple(COLUMNS), {name: quantity for quantity, names in COLUMNS.items() for name in names}
PARAMETER_SCOPES = {"all": "including embeddings and head", "blocks": "without embeddings and head"}
FloatOrArray = Any  # a float or an array of floats
RANGES = ("parameters", "tokens", "flops")
MAX_FLOPS = 1e32  # of a budget: a million times the largest runs
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
FINAL_LOSS_FRACTION = 0.05  # without validation, the final loss is the mean training loss of this last part of a run


@dataclass(frozen=True)
class Runs:
    """Measured runs, one array entry per run."""

    names: tuple[str, ...]
    parameters: Array
    tokens: Array
    loss: Array
    flops: Array
    parameter_scope: str = "all"  # `all`: with embeddings and head (tied weights once), or only the `blocks`

    def __len__(self) -> int:
        return len(self.names)

    def select(self, selection: Any) -> "Runs":
        columns = {quantity: getattr(self, quantity)[selection] for quantity in QUANTITIES}
        return replace(self, names=tuple(np.array(self.names)[selection].tolist()), **columns)


def read_runs(paths: Sequence[Path], parameter_scope: str = "all") -> Runs:
    """Reads runs from one CSV file, or from run folders and folders that contain run folders."""
    if len(paths) == 1 and not paths[0].is_dir():
        return read_csv(paths[0], parameter_scope)
    folders: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise DataError(f"{path} is not a folder; give either one CSV file or run folders.")
        folders += [path] if (path / "job.toml").is_file() else sorted(job.parent for job in path.glob("*/job.toml"))
    if not folders:
        raise DataError(f"{', '.join(map(str, paths))}: no run folder found; a run folder contains a job.toml.")
    return _runs_from_rows([_read_run(folder, parameter_scope) for folder in folders], parameter_scope)


def _runs_from_rows(rows: Sequence[RunRow], parameter_scope: str) -> Runs:
    names, parameters, tokens, loss, flops = zip(*rows)
    return Runs(names, np.array(parameters), np.array(tokens), np.array(loss), np.array(flops), parameter_scope)


def read_csv(path: Path, parameter_scope: str = "all") -> Runs:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *lines = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        raise DataError(f"no file or folder {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from None
    if not any(lines):
        raise DataError(f"{path} contains no runs; it needs a header line and one line per run.")
    columns: dict[str, int] = {}
    for index, column in enumerate(header):
        quantity = COLUMN_NAMES.get(column.strip().lower(), "")
        if quantity in columns:
            first = header[columns[quantity]]
            raise DataError(f"{path}: columns {first!r} and {column!r} both contain {quantity}; keep one.")
        if quantity:
            columns[quantity] = index
    if "loss" not in columns or len(columns) < 3:
        missing = "loss" if "loss" not in columns else "two of parameters, tokens and flops"
        raise DataError(f"{path} has no column for {missing}; its columns are {', '.join(header)}.")
    rows = [_parse_row(path, number, line, columns) for number, line in enumerate(lines, start=2) if line]
    return _runs_from_rows(rows, parameter_scope)


def _parse_row(path: Path, number: int, line: Sequence[str], columns: dict[str, int]) -> RunRow:
    values: dict[str, float] = {}
    for quantity, index in columns.items():
        text = line[index].strip() if index < len(line) else ""
        try:
            values[quantity] = float(text)
        except ValueError:
            reason = f"{text!r} is not a number" if text else "the value is missing"
            raise DataError(f"{path}, line {number}, column {quantity}: {reason}.") from None
        if not 1e-9 <= values[quantity] <= 1e40:
            raise DataError(f"{path}, line {number}, column {quantity}: {text} must be positive and at most 1e40.")
    N = values.get("parameters") or values["flops"] / 6 / values["tokens"]
    D = values.get("tokens") or values["flops"] / 6 / N
    return f"line {number}", N, D, values["loss"], values.get("flops", 6 * N * D)


def _read_run(path: Path, parameter_scope: str) -> RunRow:
    """Reads a finished run; its loss is the final validation loss, else the mean over the last steps."""
    folder = RunFolder.open(path)
    job = folder.job()
    model, last_step = job.require_decoder(), job.total_steps
    with malformed_as_data_error(path):
        records = [record for record in folder.metrics() if isinstance(record.get("loss"), float)]
        done = records[-1].get("step", 0) if records else 0
        if done != last_step:
            remedy = f"continue it with `shardwise train --resume {path}`, or omit it"
            raise DataError(f"{path} is not finished: {done} of {last_step} steps have a finite loss; {remedy}.")
        validations = [event for event in folder.events() if event.get("event") == "validation"]
        measured = [event for event in validations if event.get("step") == last_step][-1:]
        measured = measured or records[-max(1, round(FINAL_LOSS_FRACTION * len(records))) :]
        loss, samples = float(np.mean([record["loss"] for record in measured])), int(records[-1]["samples"])
    parameters, tokens = count_parameters(model, parameter_scope), samples * model.sequence
    return path.name, float(parameters), float(tokens), loss, shape_of(model).flops(1) * samples


def count_parameters(model: DecoderConfig, parameter_scope: str) -> int:
    """Counts parameters as the planner does (without norms and biases), with or without embeddings and head."""
    shape = shape_of(model)
    if parameter_scope == "all":
        return shape.parameters
    return shape.parameters - shape.embedding_weights - (0 if shape.tied else shape.vocab * shape.width)


class ScalingLaw(NamedTuple):
    E: FloatOrArray  # irreducible loss
    A: FloatOrArray
    B: FloatOrArray
    alpha: FloatOrArray
    beta: FloatOrArray

    def loss(self, N: FloatOrArray, D: FloatOrArray) -> FloatOrArray:
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def compute_optimal(self, flops: FloatOrArray) -> tuple[FloatOrArray, FloatOrArray]:
        """Returns the N and D with the lowest loss for 6 N D = `flops`."""
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        N = ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return N, flops / 6 / N

    def tokens_to_reach(self, N: float, loss: float) -> float:
        """Returns the D at which N parameters reach a loss; infinite if they never do."""
        reducible = np.float64(loss - self.E - self.A / N**self.alpha)
        return float((self.B / reducible) ** (1 / self.beta)) if reducible > 0 else np.inf


CONSTANTS = ScalingLaw._fields


@dataclass(frozen=True)
class ScalingLawFit:
    law: ScalingLaw
    bootstrap_samples: ScalingLaw  # the constants of the bootstrap fits, as arrays
    runs: Runs  # runs that the law was fitted to
    dropped: Runs  # runs that were dropped
    objective: float

    @property
    def residual_std(self) -> float:
        return float(median_abs_deviation(residuals(self.law, self.runs), scale="normal"))


def interval(values: Any) -> tuple[float, float]:
    """Returns the central 95% interval of samples."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def residuals(law: ScalingLaw, runs: Runs) -> Array:
    """Returns log(measured loss / predicted loss) of each run."""
    return np.asarray(np.log(runs.loss) - np.log(law.loss(runs.parameters, runs.tokens)))


@threadpool_limits.wrap(limits=1)  # matrices have 5 rows: with threads the search takes 15 times as long
def fit_scaling_law(runs: Runs, drop_highest: int | None = None, bootstrap_samples: int = BOOTSTRAP_SAMPLES,
                    seed: int = 0) -> ScalingLawFit:  # fmt: skip
    """Fits a law to runs after dropping the `drop_highest` runs with the highest loss; None drops outliers instead."""
    if drop_highest is None:
        dropped = _indices_of_dropped_outliers(runs)
    elif drop_highest < len(runs):
        dropped = np.argsort(runs.loss, kind="stable")[len(runs) - drop_highest :]
    else:
        raise DataError(f"--drop-highest {drop_highest}: there are only {pluralize(len(runs), 'run')}; drop fewer.")
    is_dropped = np.isin(np.arange(len(runs)), dropped)
    kept_runs = runs.select(~is_dropped)
    law, objective, point = best_fit(kept_runs)
    if min(law.alpha, law.beta) < 1e-3:
        quantity = "parameters" if law.alpha < law.beta else "tokens"
        raise DataError(f"the loss of these runs does not fall with their {quantity}, so no law can be fitted; "
                        f"add runs with a wider range of {quantity}.")  # fmt: skip
    samples = bootstrap(kept_runs, point, bootstrap_samples, seed)
    return ScalingLawFit(law, samples, kept_runs, runs.select(is_dropped), objective)


def best_fit(runs: Runs) -> tuple[ScalingLaw, float, Array]:
    """Searches from many starting points; returns the best law, its objective and its search coordinates."""
    if len(runs) < MIN_RUNS:
        raise DataError(f"{pluralize(len(runs), 'run')}: a law has five constants; give at least {MIN_RUNS} runs.")
    for quantity in ("parameters", "tokens"):
        num_distinct = len(np.unique(np.round(np.log(getattr(runs, quantity)), 3)))  # to about 0.1%
        if num_distinct < MIN_DISTINCT_SIZES:
            values = f"{pluralize(num_distinct, 'different value')} of {quantity}"
            raise DataError(f"these {len(runs)} runs have {values}; a law needs at least {MIN_DISTINCT_SIZES}.")
    objective = attrgetter("fun")
    coarse = sorted((_minimize(runs, start, steps=COARSE_STEPS) for start in _starting_points(runs)), key=objective)
    best = min((_minimize(runs, result.x) for result in coarse[:NUM_REFINED]), key=objective)
    return _law_at(runs, best.x), best.fun * HUBER_DELTA, best.x


def bootstrap(runs: Runs, point: Array, bootstrap_samples: int, seed: int) -> ScalingLaw:
    """Returns the constants of fits to randomly weighted runs; each search starts at the best fit. The weights are
    exponential (Bayesian bootstrap, Rubin 1981). Drawing runs with replacement omits a third of them each time, which
    makes intervals a fifth too wide with a few dozen runs."""
    weights = np.random.default_rng(seed).standard_exponential((bootstrap_samples, len(runs)))
    laws = [_law_at(runs, _minimize(runs, point, row / row.mean()).x) for row in weights]
    return ScalingLaw(*np.array(laws).T)


def _minimize(runs: Runs, start: Any, weights: Any = 1.0, steps: int = 1000) -> Any:
    """Minimizes the Huber loss, divided by `HUBER_DELTA` to suit the tolerances, in the coordinates of `_law_at`."""
    n, d, log_loss = np.log(runs.parameters), np.log(runs.tokens), np.log(runs.loss)
    n, d = n - n.mean(), d - d.mean()

    def loss_and_gradient(point: Array) -> tuple[float, Array]:
        e, a, b, alpha, beta = point
        terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * d])
        total = np.logaddexp.reduce(terms, axis=0)
        error = total - log_loss
        slope = weights * np.clip(error / HUBER_DELTA, -1.0, 1.0) * np.exp(terms - total)
        gradient = np.array([*slope.sum(axis=1), -(slope[1] * n).sum(), -(slope[2] * d).sum()])
        return float((weights * huber(HUBER_DELTA, error)).sum() / HUBER_DELTA), gradient

    options = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8, "maxcor": 20}
    return minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", bounds=BOUNDS, options=options)


def _law_at(runs: Runs, point: Array) -> ScalingLaw:
    """Returns the law at log E, a, b, alpha and beta; a and b: logs of the terms at the runs' mean log N and log D."""
    e, a, b, alpha, beta = map(float, point)
    n, d = np.log(runs.parameters).mean(), np.log(runs.tokens).mean()
    return ScalingLaw(math.exp(e), math.exp(a + alpha * n), math.exp(b + beta * d), alpha, beta)


def _starting_points(runs: Runs) -> Iterator[tuple[float, ...]]:
    """Yields 81 starts: splits of the mean loss into E and the two terms, times pairs of exponents."""
    center, lowest_loss = float(np.exp(np.log(runs.loss).mean())), float(runs.loss.min())
    grid = product((0.3, 0.6, 0.9), (0.2, 0.5, 0.8), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0))
    for irreducible_share, parameter_share, alpha, beta in grid:
        irreducible = irreducible_share * lowest_loss
        reducible = center - irreducible
        yield (*np.log([irreducible, parameter_share * reducible, (1 - parameter_share) * reducible]), alpha, beta)


def find_outliers(law: ScalingLaw, runs: Runs) -> NDArray[np.intp]:
    """Returns the indices of outliers, largest residual first."""
    errors = residuals(law, runs)
    threshold = max(OUTLIER_DEVIATIONS * median_abs_deviation(errors, scale="normal"), OUTLIER_MIN_RESIDUAL)
    order = np.argsort(-np.abs(errors))
    return order[np.abs(errors[order]) > threshold]


def _indices_of_dropped_outliers(runs: Runs) -> NDArray[np.intp]:
    """Returns the indices of the outliers to drop, found one at a time, since each outlier distorts the law."""
    law, _, point = best_fit(runs)
    kept = np.arange(len(runs))
    for _ in range(len(runs) // RUNS_PER_OUTLIER):
        outliers = find_outliers(law, runs.select(kept))
        if not len(outliers):
            break
        kept = np.delete(kept, outliers[0])
        law = _law_at(runs.select(kept), _minimize(runs.select(kept), point).x)
    return np.setdiff1d(np.arange(len(runs)), kept)


@dataclass(frozen=True)
class FittedLaw:
    """A law with the statistics of its fit that a recommendation needs."""

    law: ScalingLaw
    bootstrap_samples: ScalingLaw
    residual_std: float
    fitted_ranges: dict[str, tuple[float, float]]  # minimum and maximum of each of `RANGES` among the fitted runs
    parameter_scope: str
    source: str


def fit_as_dict(fit: ScalingLawFit) -> dict[str, Any]:
    """Returns a fit as JSON values; `parse_fitted_law` reads them back."""
    runs, law = fit.runs, fit.law
    exponent = law.beta / (law.alpha + law.beta)
    constants: dict[str, Any] = {}
    for name in CONSTANTS:
        samples = getattr(fit.bootstrap_samples, name)
        low, high = interval(samples)
        constants[name] = {"value": getattr(law, name), "low": low, "high": high,
                           "standard_error": float(np.std(samples))}  # fmt: skip
    is_outlier = np.isin(np.arange(len(runs)), find_outliers(law, runs))
    columns = {"run": runs.names, "parameters": runs.parameters, "tokens": runs.tokens, "loss": runs.loss,
               "residual": residuals(law, runs), "outlier": is_outlier}  # fmt: skip
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()))
    return {
        **constants, "parameter_scope": runs.parameter_scope, "runs": len(runs), "dropped": list(fit.dropped.names),
        "objective": fit.objective, "residual_std": fit.residual_std,
        "fitted_ranges": {key: [float(getattr(runs, key).min()), float(getattr(runs, key).max())] for key in RANGES},
        "compute_optimal": {"parameters_exponent": exponent, "tokens_exponent": 1 - exponent},
        "residuals": [dict(zip(columns, row)) for row in rows],
        "bootstrap_samples": [[float(f"{value:.9g}") for value in row] for row in np.array(fit.bootstrap_samples).T],
    }  # fmt: skip


def fit_text(values: dict[str, Any]) -> str:
    """Returns the text of `shardwise laws fit`, made from the values of `fit_as_dict`."""
    flops = values["fitted_ranges"]["flops"][1]
    size, tokens = law_from_dict(values).compute_optimal(flops)
    return fill_in(Path(__file__).with_name("fit.txt"), {
        **values, "scope": PARAMETER_SCOPES[values["parameter_scope"]], "flops": flops, "size": size, "tokens": tokens,
        "constants": {name: values[name] for name in CONSTANTS},
        "worst": sorted(values["residuals"], key=lambda row: -abs(row["residual"]))[:3],
        "outliers": sum(row["outlier"] for row in values["residuals"]),
    })  # fmt: skip


def read_fitted_law(path: Path) -> FittedLaw:
    """Reads a fit written by `shardwise laws fit`."""
    try:
        return parse_fitted_law(parse_json(path.read_bytes()), str(path))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; write a fit with `shardwise laws fit RUNS -o FILE`.") from None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{path} is not a saved fit ({error}); write one with `shardwise laws fit RUNS -o FILE`."
        raise DataError(message) from None


def parse_fitted_law(values: Any, source: str) -> FittedLaw:
    law, residual_std, scope = law_from_dict(values), float(values["residual_std"]), values["parameter_scope"]
    samples = np.array(values["bootstrap_samples"], dtype=float).reshape(-1, len(CONSTANTS))
    ranges = {key: (float(low), float(high)) for key, (low, high) in values["fitted_ranges"].items()}
    if scope not in PARAMETER_SCOPES or set(ranges) != set(RANGES) or not len(samples):
        raise ValueError("invalid parameter_scope, fitted_ranges or bootstrap_samples")
    numbers = np.concatenate([law, samples.ravel(), *ranges.values()])
    if not (numbers.min() > 0 and numbers.max() < 1e100 and 0 <= residual_std <= 100):
        raise ValueError("a constant or range is not positive and finite")
    return FittedLaw(law, ScalingLaw(*samples.T), residual_std, ranges, scope, source)


def law_from_dict(values: Any) -> ScalingLaw:
    return ScalingLaw(*(float(values[name]["value"]) for name in CONSTANTS))


def published_law() -> FittedLaw:
    values = tomllib.loads((Path(__file__).parent / "published_law.toml").read_text(encoding="utf-8"))
    law, uncertainty = ScalingLaw(**values["constants"]), values["bootstrap"]
    n, d = np.log(uncertainty["pivot"])
    mean = [np.log(law.E), np.log(law.A) - law.alpha * n, np.log(law.B) - law.beta * d, law.alpha, law.beta]
    deviations = uncertainty["standard_deviations"]
    covariance = np.outer(deviations, deviations) * np.array(uncertainty["correlations"])
    e, a, b, alpha, beta = np.random.default_rng(0).multivariate_normal(mean, covariance, BOOTSTRAP_SAMPLES).T
    bootstrap_samples = ScalingLaw(np.exp(e), np.exp(a + alpha * n), np.exp(b + beta * d), alpha, beta)
    statistics = (values[key] for key in ("residual_std", "fitted_ranges", "parameter_scope", "source"))
    return FittedLaw(law, bootstrap_samples, *statistics)
