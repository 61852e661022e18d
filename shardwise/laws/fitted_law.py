"""Fitted laws as JSON, and the built-in law, which `published_law.toml` documents."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError
from shardwise.files import parse_json
from shardwise.laws import fit as fitting
from shardwise.laws.fit import BOOTSTRAP_SAMPLES, CONSTANTS, ScalingLaw, ScalingLawFit
from shardwise.laws.runs import PARAMETER_SCOPES

RANGES = ("parameters", "tokens", "flops")


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
        low, high = fitting.interval(samples)
        constants[name] = {"value": getattr(law, name), "low": low, "high": high,
                           "standard_error": float(np.std(samples))}  # fmt: skip
    is_outlier = np.isin(np.arange(len(runs)), fitting.find_outliers(law, runs))
    columns = {"run": runs.names, "parameters": runs.parameters, "tokens": runs.tokens, "loss": runs.loss,
               "residual": fitting.residuals(law, runs), "outlier": is_outlier}  # fmt: skip
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()))
    return {
        **constants,
        "parameter_scope": runs.parameter_scope,
        "runs": len(runs),
        "dropped": list(fit.dropped.names),
        "objective": fit.objective,
        "residual_std": fit.residual_std,
        "fitted_ranges": {key: [float(getattr(runs, key).min()), float(getattr(runs, key).max())] for key in RANGES},
        "compute_optimal": {"parameters_exponent": exponent, "tokens_exponent": 1 - exponent},
        "residuals": [dict(zip(columns, row)) for row in rows],
        "bootstrap_samples": [[float(f"{value:.9g}") for value in row] for row in fit.bootstrap_samples.as_array().T],
    }


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
    numbers = np.concatenate([law.as_array(), samples.ravel(), *ranges.values()])
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
