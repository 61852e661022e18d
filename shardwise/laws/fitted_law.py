"""A fit as JSON, read again for recommendations; and the law that is there without one.

The built-in law is the re-analysis of Hoffmann et al.'s runs by Besiroglu et al. 2024 (arXiv 2404.10102): its published
constants and standard errors. Errors of the five constants hang together, which the paper does not give; how they do
was found by resampling the same 240 runs with `shardwise laws fit`, around the runs' middle, where it can be written
with few digits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError
from shardwise.laws.compute_optimal import estimate_compute_optimal
from shardwise.laws.fit import BOOTSTRAP_SAMPLES, ScalingLawFit, find_outliers
from shardwise.laws.runs import PARAMETER_COUNTS
from shardwise.laws.scaling_law import CONSTANTS, ScalingLaw


@dataclass(frozen=True)
class FittedLaw:
    """What a recommendation needs of a fit."""

    law: ScalingLaw
    bootstrap_samples: ScalingLaw
    residual_std: float
    """Robust standard deviation of the logarithm of runs' losses around the law."""
    fitted_ranges: dict[str, tuple[float, float]]
    """Lowest and highest `parameters`, `tokens` and `flops` that it was fitted to."""
    parameter_count: str
    source: str


def fit_as_dict(fit: ScalingLawFit) -> dict[str, Any]:
    """All that is known of a fit; `read_fitted_law` reads it back."""
    runs, law = fit.runs, fit.law
    exponent = law.beta / (law.alpha + law.beta)
    ranges = {quantity: [float(getattr(runs, quantity).min()), float(getattr(runs, quantity).max())]
              for quantity in ("parameters", "tokens", "flops")}  # fmt: skip
    outlier_indices = set(find_outliers(law, runs).tolist())
    return {
        **fit.constants(),
        "counts": runs.parameter_count,
        "runs": len(runs),
        "dropped": list(fit.dropped.names),
        "objective": fit.objective,
        "scatter": fit.residual_std,
        "ranges": ranges,
        "optimum": {"parameters_power": exponent, "tokens_power": 1 - exponent},
        **{estimate.method.replace("-", "").lower(): estimate.as_dict() for estimate in estimate_compute_optimal(runs)},
        "residuals": [
            {
                "run": name,
                "parameters": N,
                "tokens": D,
                "loss": loss,
                "residual": residual,
                "outlier": index in outlier_indices,
            }
            for index, (name, N, D, loss, residual) in enumerate(
                zip(
                    runs.names,
                    runs.parameters.tolist(),
                    runs.tokens.tolist(),
                    runs.loss.tolist(),
                    fit.residuals.tolist(),
                )
            )
        ],
        "draws": [[float(f"{value:.9g}") for value in row] for row in fit.bootstrap_samples.as_array().T.tolist()],
    }


def to_fitted_law(fit: ScalingLawFit, source: str) -> FittedLaw:
    return _parse_fitted_law(fit_as_dict(fit), source)


def read_fitted_law(path: Path) -> FittedLaw:
    """A fit that `shardwise laws fit` wrote."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is no JSON file: {error}.") from None
    try:
        found = _parse_fitted_law(values, str(path))
        if not np.isfinite(found.bootstrap_samples.as_array()).all() or min(found.law.as_array()) <= 0:
            raise ValueError("a constant is not above 0 and finite")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is no saved fit ({error}); write one with `shardwise laws fit RUNS -o FILE`."
        ) from None


def _parse_fitted_law(values: Any, source: str) -> FittedLaw:
    law = ScalingLaw(*(float(values[name]["value"]) for name in CONSTANTS))
    bootstrap_samples = ScalingLaw(*np.array(values["draws"], dtype=float).reshape(-1, len(CONSTANTS)).T)
    ranges = {quantity: (float(low), float(high)) for quantity, (low, high) in values["ranges"].items()}
    if (
        values["counts"] not in PARAMETER_COUNTS
        or set(ranges) != {"parameters", "tokens", "flops"}
        or not len(bootstrap_samples.E)
    ):
        raise ValueError("counts, ranges or draws are not those of a fit")
    return FittedLaw(law, bootstrap_samples, float(values["scatter"]), ranges, values["counts"], source)


# The law of Hoffmann et al.'s runs

PUBLISHED_CONSTANTS = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
PUBLISHED_STANDARD_ERRORS = {"E": 0.026, "A": 124.0, "B": 1293.0, "alpha": 0.015, "beta": 0.021}
"""Published standard errors."""
PIVOT = 2e7, 7.5e8
"""Parameters and tokens at which the two terms are known best; log E, the logarithms of the two terms there, alpha and
beta vary as below, in 1000 fits of resampled runs."""
DEVIATIONS = (0.0144, 0.0091, 0.0107, 0.0146, 0.0208)
CORRELATIONS = (
    (1.000, 0.133, 0.092, 0.573, 0.654),
    (0.133, 1.000, -0.500, -0.109, 0.326),
    (0.092, -0.500, 1.000, 0.265, -0.014),
    (0.573, -0.109, 0.265, 1.000, -0.221),
    (0.654, 0.326, -0.014, -0.221, 1.000),
)


def published_law() -> FittedLaw:
    """The built-in law."""
    law, (n, d) = PUBLISHED_CONSTANTS, np.log(PIVOT)
    mean = [np.log(law.E), np.log(law.A) - law.alpha * n, np.log(law.B) - law.beta * d, law.alpha, law.beta]
    covariance = np.outer(DEVIATIONS, DEVIATIONS) * np.array(CORRELATIONS)
    e, a, b, alpha, beta = np.random.default_rng(0).multivariate_normal(mean, covariance, BOOTSTRAP_SAMPLES).T
    bootstrap_samples = ScalingLaw(np.exp(e), np.exp(a + alpha * n), np.exp(b + beta * d), alpha, beta)
    ranges = {"parameters": (5.7e7, 1.62e10), "tokens": (2.5e8, 3.18e11), "flops": (1.4e18, 1.3e22)}
    return FittedLaw(law, bootstrap_samples, 0.0049, ranges, "all", "Besiroglu et al. 2024 (built in)")
