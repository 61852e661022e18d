"""What a law says of a budget: the size, the tokens, the loss, and what other choices would cost.

With devices and a cluster the planner (`shardwise plan`) adds the layout, the days and the device-hours, and turns days
into a budget: the one whose best model it predicts to train in that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from shardwise.cluster import find_cluster
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.laws.fit import interval
from shardwise.laws.fitted_law import FittedLaw
from shardwise.laws.isoflop_grid import SIZE_FIELDS, batch_size_for_budget, learning_rate_for_budget, model_of_size
from shardwise.laws.runs import count_parameters
from shardwise.laws.scaling_law import ScalingLaw
from shardwise.planner.plan import Plan, make_plan

EXTRAPOLATION_FACTOR = 100.0  # times the fitted range, from where on a prediction is flagged
NEAR_OPTIMAL_TOLERANCE = 0.005  # share of the loss within which sizes count as equally good
MAX_LOG_RATIO = 30.0  # logarithm of the factor up to which sizes are looked at
OVERTRAINING_FACTORS = (2, 4, 8)  # how many times smaller the models are whose over-training is priced
SECONDS_PER_DAY = 86_400.0
DAYS_TOLERANCE = 0.02  # how near the planned days must come to those asked for
MAX_ITERATIONS = 6
DEFAULT_SETTINGS = ("precision=bf16", "model.vocab=50304", "model.sequence=4096", "model.tied=false")


@dataclass(frozen=True)
class OvertrainedModel:
    """A smaller model trained for longer to the same loss."""

    parameters: float
    tokens: float
    flops: float
    break_even: float
    """Tokens that must be read or written in use until its cheaper use, 2 FLOPs for each parameter, has paid for it."""


@dataclass(frozen=True)
class DataConstrainedBudget:
    """The same budget where only some tokens differ."""

    unique_tokens: float
    loss: float
    """Of the best choice for endless data, its tokens repeated."""
    parameters: float
    tokens: float
    best_loss: float
    """Of the best choice when this is known: these parameters and tokens."""


@dataclass(frozen=True)
class Recommendation:
    fitted_law: FittedLaw
    flops: float
    parameters: float
    tokens: float
    loss: float
    loss_interval: tuple[float, float]
    parameters_interval: tuple[float, float]
    near_optimal_parameters: tuple[float, float]
    """The sizes between which the loss at the same budget is at most 0.5% above the lowest."""
    overtrained: tuple[OvertrainedModel, ...]
    data_constrained: DataConstrainedBudget | None
    warnings: tuple[str, ...]
    plan: Plan | None = None

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "law": self.fitted_law.source,
            "counts": self.fitted_law.parameter_count,
            "flops": self.flops,
            "parameters": self.parameters,
            "parameters_interval": list(self.parameters_interval),
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens / self.parameters,
            "loss": self.loss,
            "loss_interval": list(self.loss_interval),
            "flat_within": NEAR_OPTIMAL_TOLERANCE,
            "flat_parameters": list(self.near_optimal_parameters),
            "over_training": [vars(model_) for model_ in self.overtrained],
            "warnings": list(self.warnings),
        }
        if self.data_constrained is not None:
            values["repeated"] = vars(self.data_constrained)
        if self.plan is not None:
            plan, model = self.plan, self.plan.job.require_decoder()
            values["plan"] = {
                "cluster": plan.cluster.device.name, "devices": plan.devices, "layout": str(plan.best.layout),
                "fits": plan.fits(plan.best), "days": plan.training_seconds / SECONDS_PER_DAY,
                "device_hours": plan.training_seconds / 3600 * plan.devices, "mfu": plan.mfu(plan.best),
                "planner_flops": plan.shape.flops(plan.job.samples) * plan.job.total_steps,
                "batch_samples": plan.job.samples, "lr": plan.job.optimizer.lr,
                "parameters": count_parameters(model, self.fitted_law.parameter_count),
                "model": {key: getattr(model, key) for key in (*SIZE_FIELDS, "init_std", "vocab", "sequence")},
            }  # fmt: skip
        return values


def recommend(fitted_law: FittedLaw, flops: float, unique_tokens: float | None = None) -> Recommendation:
    law = fitted_law.law
    N, D = law.compute_optimal(flops)
    loss = law.loss(N, D)
    overtrained = tuple(_overtrained_model(law, N, N / factor, loss) for factor in OVERTRAINING_FACTORS)
    return Recommendation(
        fitted_law,
        flops,
        N,
        D,
        loss,
        prediction_interval(fitted_law, N, D),
        interval(fitted_law.bootstrap_samples.compute_optimal(flops)[0]),
        (_near_optimal_bound(law, flops, N, loss, -1), _near_optimal_bound(law, flops, N, loss, 1)),
        tuple(candidate for candidate in overtrained if math.isfinite(candidate.tokens)),
        None
        if unique_tokens is None or unique_tokens >= D
        else _data_constrained_budget(law, flops, N, D, unique_tokens),
        extrapolation_warnings(fitted_law, N, D),
    )


def prediction_interval(fitted_law: FittedLaw, N: float, D: float) -> tuple[float, float]:
    """Where the loss of one run will lie: what the law does not know, and how far runs lie from it."""
    losses = np.asarray(fitted_law.bootstrap_samples.loss(N, D))
    residuals = np.random.default_rng(0).normal(0.0, fitted_law.residual_std, (25, len(losses)))
    return interval(losses * np.exp(residuals))


def extrapolation_warnings(fitted_law: FittedLaw, N: float, D: float) -> tuple[str, ...]:
    """A sentence for each quantity that lies far outside of what the law was fitted to."""
    found = []
    for quantity, value in (("parameters", N), ("tokens", D), ("flops", 6 * N * D)):
        low, high = fitted_law.fitted_ranges[quantity]
        ratio = max(value / high, low / value)
        if ratio > EXTRAPOLATION_FACTOR:
            found.append(
                f"extrapolation: {value:.3g} {'FLOPs' if quantity == 'flops' else quantity} is {ratio:,.0f} times "
                f"beyond the fitted range ({low:.3g} to {high:.3g}); trust no digit of it."
            )
    return tuple(found)


def _overtrained_model(law: ScalingLaw, best: float, N: float, loss: float) -> OvertrainedModel:
    tokens = float(law.tokens_to_reach(N, loss))
    flops = 6 * N * tokens
    extra_flops = flops - 6 * best * float(law.tokens_to_reach(best, loss))
    return OvertrainedModel(N, tokens, flops, extra_flops / (2 * (best - N)))


def _near_optimal_bound(law: ScalingLaw, flops: float, best: float, loss: float, direction: int) -> float:
    """The size below or above the best at which the loss of the same budget is 0.5% higher."""

    def excess_loss(log_ratio: float) -> float:
        N = best * math.exp(direction * log_ratio)
        return float(law.loss(N, flops / 6 / N) - (1 + NEAR_OPTIMAL_TOLERANCE) * loss)

    log_ratio = brentq(excess_loss, 0.0, MAX_LOG_RATIO) if excess_loss(MAX_LOG_RATIO) > 0 else MAX_LOG_RATIO
    return float(best * math.exp(direction * log_ratio))


def _data_constrained_budget(
    law: ScalingLaw, flops: float, N: float, D: float, unique_tokens: float
) -> DataConstrainedBudget:
    def loss(size: float) -> float:
        return float(law.data_constrained_loss(math.exp(size), flops / 6 / math.exp(size), unique_tokens))

    middle = math.log(N)
    found = minimize_scalar(loss, bounds=(middle - 7, middle + 7), method="bounded", options={"xatol": 1e-6})
    size = math.exp(found.x)
    return DataConstrainedBudget(
        unique_tokens, float(law.data_constrained_loss(N, D, unique_tokens)), size, flops / 6 / size, float(found.fun)
    )


# Through the planner


def recommend_with_plan(
    fitted_law: FittedLaw, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    unique_tokens: float | None, settings: Sequence[str],
) -> Recommendation:  # fmt: skip
    """A recommendation for FLOPs, or for days on devices; planned where there are devices."""
    if (flops is None) == (days is None):
        raise JobError("give a budget as --flops, or as --days with --devices and --cluster.")
    if days is not None and (devices is None or cluster is None):
        raise JobError("--days needs --devices and --cluster: 30 days of what?")
    if (devices is None) != (cluster is None):
        raise JobError("--devices and --cluster go together.")
    for name, value in (("--flops", flops), ("--days", days), ("--unique-tokens", unique_tokens)):
        if value is not None and not 0 < value < math.inf:
            raise JobError(f"{name} {value:g}: it must be above 0.")
    if devices is None or cluster is None:
        assert flops is not None
        return recommend(fitted_law, flops, unique_tokens)
    resolved_cluster = find_cluster(cluster)
    if flops is not None:
        found = recommend(fitted_law, flops, unique_tokens)
        return replace(found, plan=make_plan(recommended_job(found, devices, settings), resolved_cluster, devices))
    assert days is not None
    flops = 0.4 * resolved_cluster.device.peak_flops("bf16") * devices * days * SECONDS_PER_DAY
    for _ in range(MAX_ITERATIONS):
        found = recommend(fitted_law, flops, unique_tokens)
        plan = make_plan(recommended_job(found, devices, settings), resolved_cluster, devices)
        days_ratio = plan.training_seconds / (days * SECONDS_PER_DAY)
        if abs(days_ratio - 1) < DAYS_TOLERANCE:
            break
        flops /= days_ratio
    return replace(found, plan=plan)


def recommended_job(found: Recommendation, devices: int, settings: Sequence[str]) -> Job:
    """The recommended model as a job."""
    template = load_job(None, [*DEFAULT_SETTINGS, *settings])
    if conflicting := sorted(set(SIZE_FIELDS) & template.require_decoder().model_fields_set):
        raise JobError(f"--set model.{conflicting[0]}: the law chooses the size; set anything else.")
    model = model_of_size(template, found.parameters, found.fitted_law.parameter_count)
    samples = template.samples
    if "batch" not in template.model_fields_set:
        samples = batch_size_for_budget(found.flops, found.tokens, model.sequence, devices)
    batch = template.batch.model_copy(update={"samples": samples, "tokens": None})
    values: dict[str, Any] = {"model": model, "batch": batch, "tokens": round(found.tokens), "steps": None}
    if "lr" not in template.optimizer.model_fields_set:
        rate = learning_rate_for_budget(found.flops, samples * model.sequence)
        values["optimizer"] = template.optimizer.model_copy(update={"lr": rate})
    return template.model_copy(update=values)
