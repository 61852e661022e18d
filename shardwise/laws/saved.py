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
from shardwise.laws.data import COUNTS
from shardwise.laws.estimates import estimates
from shardwise.laws.fit import DRAWS, Fit, outliers
from shardwise.laws.law import NAMES, Law


@dataclass(frozen=True)
class Known:
    """What a recommendation needs of a fit."""

    law: Law
    draws: Law
    scatter: float
    """Robust standard deviation of the logarithm of runs' losses around the law."""
    ranges: dict[str, tuple[float, float]]
    """Lowest and highest `parameters`, `tokens` and `flops` that it was fitted to."""
    counts: str
    source: str


def as_dict(fit: Fit) -> dict[str, Any]:
    """All that is known of a fit; `read_law` reads it back."""
    runs, law = fit.runs, fit.law
    power = law.beta / (law.alpha + law.beta)
    ranges = {what: [float(getattr(runs, what).min()), float(getattr(runs, what).max())]
              for what in ("parameters", "tokens", "flops")}  # fmt: skip
    far = set(outliers(law, runs).tolist())
    return {
        **fit.constants(), "counts": runs.counts, "runs": len(runs), "dropped": list(fit.dropped.names),
        "objective": fit.objective, "scatter": fit.scatter, "ranges": ranges,
        "optimum": {"parameters_power": power, "tokens_power": 1 - power},
        **{one.way.replace("-", "").lower(): one.as_dict() for one in estimates(runs)},
        "residuals": [
            {"run": name, "parameters": N, "tokens": D, "loss": loss, "residual": off, "outlier": place in far}
            for place, (name, N, D, loss, off) in enumerate(zip(
                runs.names, runs.parameters.tolist(), runs.tokens.tolist(), runs.loss.tolist(), fit.residuals.tolist()
            ))
        ],
        "draws": [[float(f"{value:.9g}") for value in row] for row in fit.draws.as_array().T.tolist()],
    }  # fmt: skip


def known(fit: Fit, source: str) -> Known:
    return _known(as_dict(fit), source)


def read_law(path: Path) -> Known:
    """A fit that `shardwise laws fit` wrote."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is no JSON file: {error}.") from None
    try:
        found = _known(values, str(path))
        if not np.isfinite(found.draws.as_array()).all() or min(found.law.as_array()) <= 0:
            raise ValueError("a constant is not above 0 and finite")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is no saved fit ({error}); write one with `shardwise laws fit RUNS -o FILE`."
        ) from None


def _known(values: Any, source: str) -> Known:
    law = Law(*(float(values[name]["value"]) for name in NAMES))
    draws = Law(*np.array(values["draws"], dtype=float).reshape(-1, len(NAMES)).T)
    ranges = {what: (float(low), float(high)) for what, (low, high) in values["ranges"].items()}
    if values["counts"] not in COUNTS or set(ranges) != {"parameters", "tokens", "flops"} or not len(draws.E):
        raise ValueError("counts, ranges or draws are not those of a fit")
    return Known(law, draws, float(values["scatter"]), ranges, values["counts"], source)


# The law of Hoffmann et al.'s runs

PUBLISHED = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
ERRORS = {"E": 0.026, "A": 124.0, "B": 1293.0, "alpha": 0.015, "beta": 0.021}
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


def published() -> Known:
    """The built-in law."""
    law, (n, d) = PUBLISHED, np.log(PIVOT)
    middle = [np.log(law.E), np.log(law.A) - law.alpha * n, np.log(law.B) - law.beta * d, law.alpha, law.beta]
    spread = np.outer(DEVIATIONS, DEVIATIONS) * np.array(CORRELATIONS)
    e, a, b, alpha, beta = np.random.default_rng(0).multivariate_normal(middle, spread, DRAWS).T
    draws = Law(np.exp(e), np.exp(a + alpha * n), np.exp(b + beta * d), alpha, beta)
    ranges = {"parameters": (5.7e7, 1.62e10), "tokens": (2.5e8, 3.18e11), "flops": (1.4e18, 1.3e22)}
    return Known(law, draws, 0.0049, ranges, "all", "Besiroglu et al. 2024 (built in)")
