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


def published_law() -> FittedLaw:
    """Returns the built-in law."""
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
