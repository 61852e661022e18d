"""Fitted laws as JSON, and the built-in law.

The built-in law is the re-analysis of Hoffmann et al.'s runs by Besiroglu et al. 2024 (arXiv 2404.10102), with its
published constants. The paper does not publish the correlations between the five constants; they
come from bootstrapping the same 240 runs with `shardwise laws fit`. They are stored for the law's terms at a pivot,
because the constants themselves correlate so closely that their correlations need many digits.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError
from shardwise.files import parse_json
from shardwise.laws import fit as fitting
from shardwise.laws.fit import BOOTSTRAP_SAMPLES, CONSTANTS, ScalingLaw, ScalingLawFit
from shardwise.laws.runs import PARAMETER_SCOPES


@dataclass(frozen=True)
class FittedLaw:
    """A law with the statistics of its fit that a recommendation needs."""

    law: ScalingLaw
    bootstrap_samples: ScalingLaw
    residual_std: float  # robust standard deviation of the log-loss residuals
    # Minimum and maximum of `parameters`, `tokens` and `flops` among the fitted runs.
    fitted_ranges: dict[str, tuple[float, float]]
    parameter_scope: str
    source: str


def fit_as_dict(fit: ScalingLawFit) -> dict[str, Any]:
    """Returns a fit as JSON values; `read_fitted_law` reads them back."""
    runs, law = fit.runs, fit.law
    exponent = law.beta / (law.alpha + law.beta)
    ranges = {quantity: [float(getattr(runs, quantity).min()), float(getattr(runs, quantity).max())]
              for quantity in ("parameters", "tokens", "flops")}  # fmt: skip
    outlier_indices = set(fitting.find_outliers(law, runs).tolist())
    columns = [values.tolist() for values in (runs.parameters, runs.tokens, runs.loss, fit.residuals)]
    return {
        **fit.constants(),
        "parameter_scope": runs.parameter_scope,
        "runs": len(runs),
        "dropped": list(fit.dropped.names),
        "objective": fit.objective,
        "residual_std": fit.residual_std,
        "fitted_ranges": ranges,
        "compute_optimal": {"parameters_exponent": exponent, "tokens_exponent": 1 - exponent},
        **{
            estimate.method.replace("-", "").lower(): estimate.as_dict()
            for estimate in fitting.estimate_compute_optimal(runs)
        },
        "residuals": [
            dict(zip(("run", "parameters", "tokens", "loss", "residual"), row)) | {"outlier": index in outlier_indices}
            for index, row in enumerate(zip(runs.names, *columns))
        ],
        "bootstrap_samples": [
            [float(f"{value:.9g}") for value in row] for row in fit.bootstrap_samples.as_array().T.tolist()
        ],
    }


def read_fitted_law(path: Path) -> FittedLaw:
    """Reads a fit written by `shardwise laws fit`."""
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; write a fit with `shardwise laws fit RUNS -o FILE`.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a JSON file: {error}.") from None
    try:
        fitted_law = parse_fitted_law(values, str(path))
        ranges = [bound for pair in fitted_law.fitted_ranges.values() for bound in pair]
        samples = fitted_law.bootstrap_samples.as_array().ravel()
        numbers = np.concatenate([fitted_law.law.as_array(), samples, ranges])
        if not (numbers.min() > 0 and numbers.max() < 1e100 and 0 <= fitted_law.residual_std <= 100):
            raise ValueError("a constant or range is not positive and finite")
        return fitted_law
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{path} is not a saved fit ({error}); write one with `shardwise laws fit RUNS -o FILE`."
        raise DataError(message) from None


def parse_fitted_law(values: Any, source: str) -> FittedLaw:
    law = ScalingLaw(*(float(values[name]["value"]) for name in CONSTANTS))
    bootstrap_samples = ScalingLaw(*np.array(values["bootstrap_samples"], dtype=float).reshape(-1, len(CONSTANTS)).T)
    ranges = {quantity: (float(low), float(high)) for quantity, (low, high) in values["fitted_ranges"].items()}
    scope, has_ranges = values["parameter_scope"], set(ranges) == {"parameters", "tokens", "flops"}
    if scope not in PARAMETER_SCOPES or not has_ranges or not len(bootstrap_samples.E):
        raise ValueError("invalid parameter_scope, fitted_ranges or bootstrap_samples")
    return FittedLaw(law, bootstrap_samples, float(values["residual_std"]), ranges, scope, source)


# The law of Hoffmann et al.'s runs

PUBLISHED_CONSTANTS = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
PIVOT = 2e7, 7.5e8  # parameters and tokens at which the two terms have the least uncertainty
# Of log E, the logs of the two terms at the pivot, alpha and beta, over 1000 bootstrap fits.
STANDARD_DEVIATIONS = (0.0144, 0.0091, 0.0107, 0.0146, 0.0208)
CORRELATIONS = (
    (1.000, 0.133, 0.092, 0.573, 0.654),
    (0.133, 1.000, -0.500, -0.109, 0.326),
    (0.092, -0.500, 1.000, 0.265, -0.014),
    (0.573, -0.109, 0.265, 1.000, -0.221),
    (0.654, 0.326, -0.014, -0.221, 1.000),
)


def published_law() -> FittedLaw:
    """Returns the built-in law."""
    law, (n, d) = PUBLISHED_CONSTANTS, np.log(PIVOT)
    mean = [np.log(law.E), np.log(law.A) - law.alpha * n, np.log(law.B) - law.beta * d, law.alpha, law.beta]
    covariance = np.outer(STANDARD_DEVIATIONS, STANDARD_DEVIATIONS) * np.array(CORRELATIONS)
    e, a, b, alpha, beta = np.random.default_rng(0).multivariate_normal(mean, covariance, BOOTSTRAP_SAMPLES).T
    bootstrap_samples = ScalingLaw(np.exp(e), np.exp(a + alpha * n), np.exp(b + beta * d), alpha, beta)
    # Ranges of Hoffmann et al.'s runs, and the standard deviation of the residuals of their fit.
    ranges = {"parameters": (5.7e7, 1.62e10), "tokens": (2.5e8, 3.18e11), "flops": (1.4e18, 1.3e22)}
    return FittedLaw(law, bootstrap_samples, 0.0049, ranges, "all", "Besiroglu et al. 2024 (built in)")
