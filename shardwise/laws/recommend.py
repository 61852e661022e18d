"""Recommends model size and tokens for a compute budget, with the expected loss and the cost of alternatives.

Given devices and a cluster, the planner (`shardwise plan`) adds layout, days and device-hours. Given days, it finds the
budget whose compute-optimal model trains in that time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from shardwise.cluster import find_cluster
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.laws.fit import MAX_FLOPS, ScalingLaw, interval
from shardwise.laws.fitted_law import FittedLaw
from shardwise.laws.isoflop_grid import SIZE_FIELDS, batch_size_for_budget, learning_rate_for_budget, model_of_size
from shardwise.laws.runs import count_parameters
from shardwise.planner.plan import Plan, make_plan

EXTRAPOLATION_FACTOR = 100.0  # warn beyond this factor outside the fitted range
NEAR_OPTIMAL_TOLERANCE = 0.005  # relative loss difference that counts as equally good
MAX_LOG_RATIO = 30.0  # log of the largest size ratio searched for near-optimal models
OVERTRAINING_FACTORS = (2, 4, 8)  # how many times smaller than optimal the overtrained models are
SECONDS_PER_DAY = 86_400.0
DAYS_TOLERANCE = 0.02  # accepted relative error of the planned days
MAX_ITERATIONS = 6  # of the search for a budget that takes the given days
INITIAL_MFU = 0.4  # from which that search starts
DEFAULT_SETTINGS = ("precision=bf16", "model.vocab=50304", "model.sequence=4096", "model.tied=false")


@dataclass(frozen=True)
class OvertrainedModel:
    """A smaller model trained on more tokens to the same loss."""

    parameters: float
    tokens: float
    flops: float
    break_even: float  # inference tokens, at 2 FLOPs per parameter, that save its extra training


@dataclass(frozen=True)
class DataConstrainedOptimum:
    """The optimum of the same budget with a limited number of unique tokens."""

    unique_tokens: float
    loss: float  # loss of the model that is optimal for unlimited data, if trained on repeated tokens
    parameters: float
    tokens: float
    best_loss: float  # loss of `parameters` and `tokens`, the optimum for limited data


@dataclass(frozen=True)
class Recommendation:
    fitted_law: FittedLaw
    flops: float
    parameters: float
    tokens: float
    loss: float
    loss_interval: tuple[float, float]
    parameters_interval: tuple[float, float]
    near_optimal_parameters: tuple[float, float]  # sizes whose loss at this budget is within 0.5% of the optimum
    overtrained: tuple[OvertrainedModel, ...]
    data_constrained: DataConstrainedOptimum | None
    warnings: tuple[str, ...]
    plan: Plan | None = None

    def as_dict(self) -> dict[str, Any]:
        values = {"law": self.fitted_law.source, "parameter_scope": self.fitted_law.parameter_scope, **vars(self)}
        del values["fitted_law"], values["data_constrained"], values["plan"]
        values["overtrained"] = [vars(overtrained) for overtrained in self.overtrained]
        values["tokens_per_parameter"] = self.tokens / self.parameters
        values["near_optimal_tolerance"] = NEAR_OPTIMAL_TOLERANCE
        if self.data_constrained is not None:
            values["data_constrained"] = vars(self.data_constrained)
        if self.plan is not None:
            plan, model = self.plan, self.plan.job.require_decoder()
            values["plan"] = {
                "cluster": plan.cluster.device.name, "devices": plan.devices, "layout": str(plan.best.layout),
                "fits": plan.fits(plan.best), "days": plan.training_seconds / SECONDS_PER_DAY,
                "device_hours": plan.training_seconds / 3600 * plan.devices, "mfu": plan.mfu(plan.best),
                "planner_flops": plan.shape.flops(plan.job.samples) * plan.job.total_steps,
                "batch_samples": plan.job.samples, "lr": plan.job.optimizer.lr,
                "parameters": count_parameters(model, self.fitted_law.parameter_scope),
                "model": {key: getattr(model, key) for key in (*SIZE_FIELDS, "init_std", "vocab", "sequence")},
            }  # fmt: skip
        return values


def recommend(fitted_law: FittedLaw, flops: float, unique_tokens: float | None = None) -> Recommendation:
    """Returns the compute-optimal size and tokens for a budget, without a plan."""
    law = fitted_law.law
    N, D = law.compute_optimal(flops)
    loss = law.loss(N, D)
    overtrained = (_overtrained_model(law, N, N / factor, loss) for factor in OVERTRAINING_FACTORS)
    data_constrained = None
    if unique_tokens is not None and unique_tokens < D:
        data_constrained = _limited_optimum(law, flops, N, D, unique_tokens)
    return Recommendation(
        fitted_law, flops, N, D, loss,
        loss_interval=prediction_interval(fitted_law, N, D),
        parameters_interval=interval(fitted_law.bootstrap_samples.compute_optimal(flops)[0]),
        near_optimal_parameters=tuple(_near_optimal_bound(law, flops, N, loss, sign) for sign in (-1, 1)),  # type: ignore
        overtrained=tuple(model for model in overtrained if math.isfinite(model.tokens)),
        data_constrained=data_constrained,
        warnings=extrapolation_warnings(fitted_law, N, D),
    )  # fmt: skip


def prediction_interval(fitted_law: FittedLaw, N: float, D: float) -> tuple[float, float]:
    """Returns the 95% interval of a run's loss: uncertainty of the law plus residuals of runs."""
    losses = np.asarray(fitted_law.bootstrap_samples.loss(N, D))
    residuals = np.random.default_rng(0).normal(0.0, fitted_law.residual_std, (25, len(losses)))  # 25 per sample
    return interval(losses * np.exp(residuals))


def extrapolation_warnings(fitted_law: FittedLaw, N: float, D: float) -> tuple[str, ...]:
    """Returns one warning for each quantity far outside the fitted range."""
    warnings = []
    for quantity, value in (("parameters", N), ("tokens", D), ("flops", 6 * N * D)):
        low, high = fitted_law.fitted_ranges[quantity]
        ratio = max(value / high, low / value)
        if ratio > EXTRAPOLATION_FACTOR:
            unit = "FLOPs" if quantity == "flops" else quantity
            warnings.append(
                f"extrapolation: {value:.3g} {unit} is {ratio:,.0f} times outside the fitted range "
                f"({low:.3g} to {high:.3g}); the recommendation is unreliable."
            )
    return tuple(warnings)


def _overtrained_model(law: ScalingLaw, optimal_N: float, N: float, loss: float) -> OvertrainedModel:
    tokens = float(law.tokens_to_reach(N, loss))
    flops = 6 * N * tokens
    extra_flops = flops - 6 * optimal_N * float(law.tokens_to_reach(optimal_N, loss))
    return OvertrainedModel(N, tokens, flops, extra_flops / (2 * (optimal_N - N)))


def _near_optimal_bound(law: ScalingLaw, flops: float, optimal_N: float, loss: float, direction: int) -> float:
    """Returns the size below (-1) or above (1) the optimum at which the loss at the same budget is 0.5% higher."""

    def excess_loss(log_ratio: float) -> float:
        N = optimal_N * math.exp(direction * log_ratio)
        return float(law.loss(N, flops / 6 / N) - (1 + NEAR_OPTIMAL_TOLERANCE) * loss)

    log_ratio = brentq(excess_loss, 0.0, MAX_LOG_RATIO) if excess_loss(MAX_LOG_RATIO) > 0 else MAX_LOG_RATIO
    return float(optimal_N * math.exp(direction * log_ratio))


def _limited_optimum(law: ScalingLaw, flops: float, N: float, D: float, unique_tokens: float) -> DataConstrainedOptimum:
    def loss(log_size: float) -> float:
        return float(law.data_constrained_loss(math.exp(log_size), flops / 6 / math.exp(log_size), unique_tokens))

    center = math.log(N)  # sizes up to exp(7), about 1100, times smaller or larger are searched
    result = minimize_scalar(loss, bounds=(center - 7, center + 7), method="bounded", options={"xatol": 1e-6})
    size = math.exp(result.x)
    unlimited_loss = float(law.data_constrained_loss(N, D, unique_tokens))
    return DataConstrainedOptimum(unique_tokens, unlimited_loss, size, flops / 6 / size, float(result.fun))


def recommend_with_plan(
    fitted_law: FittedLaw, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    unique_tokens: float | None, settings: Sequence[str],
) -> Recommendation:  # fmt: skip
    """Recommends for a budget of FLOPs, or of days on devices; adds a plan if devices are given."""
    if (flops is None) == (days is None):
        raise JobError("give the budget either as --flops, or as --days with --devices and --cluster.")
    if days is not None and (devices is None or cluster is None):
        raise JobError("--days needs --devices and --cluster; add both, or give the budget as --flops.")
    if (devices is None) != (cluster is None):
        raise JobError("--devices and --cluster need each other; give both or neither.")
    limits = ("--flops", flops, MAX_FLOPS), ("--days", days, 1e6), ("--unique-tokens", unique_tokens, 1e24)
    for name, value, limit in limits:
        if value is not None and not 0 < value <= limit:
            raise JobError(f"{name} {value:g}: the value must be positive and at most {limit:g}.")
    if devices is None or cluster is None:
        assert flops is not None
        return recommend(fitted_law, flops, unique_tokens)
    resolved_cluster = find_cluster(cluster)
    seconds = (days or 0.0) * SECONDS_PER_DAY
    flops = flops or INITIAL_MFU * resolved_cluster.device.peak_flops("bf16") * devices * seconds
    for _ in range(MAX_ITERATIONS if seconds else 1):
        result = recommend(fitted_law, flops, unique_tokens)
        plan = make_plan(recommended_job(result, devices, settings), resolved_cluster, devices)
        if not seconds or abs(plan.training_seconds / seconds - 1) < DAYS_TOLERANCE:
            break
        flops /= plan.training_seconds / seconds
    return replace(result, plan=plan)


def recommended_job(result: Recommendation, devices: int, settings: Sequence[str]) -> Job:
    """Returns a job that trains the recommended model."""
    template = load_job(None, [*DEFAULT_SETTINGS, *settings])
    if conflicting := sorted(set(SIZE_FIELDS) & template.require_decoder().model_fields_set):
        raise JobError(f"--set model.{conflicting[0]}: the law chooses the model size; remove this setting.")
    model = model_of_size(template, result.parameters, result.fitted_law.parameter_scope)
    samples = template.samples
    if "batch" not in template.model_fields_set:
        samples = batch_size_for_budget(result.flops, result.tokens, model.sequence, devices)
    batch = template.batch.model_copy(update={"samples": samples, "tokens": None})
    values: dict[str, Any] = {"model": model, "batch": batch, "tokens": round(result.tokens), "steps": None}
    if "lr" not in template.optimizer.model_fields_set:
        rate = learning_rate_for_budget(result.flops, samples * model.sequence)
        values["optimizer"] = template.optimizer.model_copy(update={"lr": rate})
    return template.model_copy(update=values)
