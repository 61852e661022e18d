"""Recommends model size and tokens for a compute budget, with the expected loss and the cost of alternatives.

Given devices and a cluster, the planner (`shardwise plan`) adds layout, days and device-hours. Given days, it finds the
budget whose compute-optimal model trains in that time.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq

from shardwise.cluster import find_cluster
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.laws.fit import MAX_FLOPS, FittedLaw, ScalingLaw, interval
from shardwise.laws.isoflop_grid import SIZE_FIELDS, job_for_budget, model_of_size
from shardwise.laws.runs import count_parameters
from shardwise.planner.plan import make_plan

EXTRAPOLATION_FACTOR = 100.0  # warn beyond this factor outside the fitted range
NEAR_OPTIMAL_TOLERANCE = 0.005  # relative loss difference that counts as equally good
MAX_LOG_RATIO = 30.0  # log of the largest size ratio searched for near-optimal models
OVERTRAINING_FACTORS = (2, 4, 8)  # how many times smaller than optimal the overtrained models are
SECONDS_PER_DAY = 86_400.0
DAYS_TOLERANCE = 0.02  # accepted relative error of the planned days
MAX_ITERATIONS = 6  # of the search for a budget that takes the given days
INITIAL_MFU = 0.4  # from which that search starts
DEFAULT_SETTINGS = ("precision=bf16", "model.vocab=50304", "model.sequence=4096", "model.tied=false")


def recommend(fitted_law: FittedLaw, flops: float) -> dict[str, Any]:
    """Returns the compute-optimal size and tokens for a budget as JSON values, without a plan."""
    law = fitted_law.law
    N, D = law.compute_optimal(flops)
    loss = law.loss(N, D)
    return {
        "law": fitted_law.source, "parameter_scope": fitted_law.parameter_scope,
        "flops": flops, "parameters": N, "tokens": D, "tokens_per_parameter": D / N, "loss": loss,
        "loss_interval": prediction_interval(fitted_law, N, D),
        "parameters_interval": interval(fitted_law.bootstrap_samples.compute_optimal(flops)[0]),
        "near_optimal_parameters": [_near_optimal_bound(law, flops, N, sign) for sign in (-1, 1)],
        "near_optimal_tolerance": NEAR_OPTIMAL_TOLERANCE,
        "overtrained": list(_overtrained_models(law, flops, N, loss)),
        "warnings": list(extrapolation_warnings(fitted_law, N, D)),
    }  # fmt: skip


def prediction_interval(fitted_law: FittedLaw, N: float, D: float) -> tuple[float, float]:
    """Returns the 95% interval of a run's loss: uncertainty of the law plus residuals of runs."""
    losses = np.asarray(fitted_law.bootstrap_samples.loss(N, D))
    residuals = np.random.default_rng(0).normal(0.0, fitted_law.residual_std, (25, len(losses)))  # 25 per sample
    return interval(losses * np.exp(residuals))


def extrapolation_warnings(fitted_law: FittedLaw, N: float, D: float) -> Iterator[str]:
    for unit, value in (("parameters", N), ("tokens", D), ("FLOPs", 6 * N * D)):
        low, high = fitted_law.fitted_ranges[unit.lower()]
        if (ratio := max(value / high, low / value)) > EXTRAPOLATION_FACTOR:
            yield (f"extrapolation: {value:.3g} {unit} is {ratio:,.0f} times outside the fitted range "
                   f"({low:.3g} to {high:.3g}); the recommendation is unreliable.")  # fmt: skip


def _overtrained_models(law: ScalingLaw, flops: float, optimal_N: float, loss: float) -> Iterator[dict[str, float]]:
    """Yields smaller models trained on more tokens to the same loss. After `break_even` tokens of inference, at 2 FLOPs
    per parameter, a smaller model has saved its extra training."""
    for N in (optimal_N / factor for factor in OVERTRAINING_FACTORS):
        tokens = law.tokens_to_reach(N, loss)
        if math.isfinite(tokens):
            break_even = (6 * N * tokens - flops) / (2 * (optimal_N - N))
            yield {"parameters": N, "tokens": tokens, "flops": 6 * N * tokens, "break_even": break_even}


def _near_optimal_bound(law: ScalingLaw, flops: float, optimal_N: float, direction: int) -> float:
    """Returns the size below (-1) or above (1) the optimum at which the loss at the same budget is 0.5% higher."""

    def excess_loss(log_ratio: float) -> float:
        N = optimal_N * math.exp(direction * log_ratio)
        return float(law.loss(N, flops / 6 / N) - (1 + NEAR_OPTIMAL_TOLERANCE) * optimal_loss)

    optimal_loss = law.loss(optimal_N, flops / 6 / optimal_N)
    log_ratio = brentq(excess_loss, 0.0, MAX_LOG_RATIO) if excess_loss(MAX_LOG_RATIO) > 0 else MAX_LOG_RATIO
    return float(optimal_N * math.exp(direction * log_ratio))


def recommend_with_plan(
    fitted_law: FittedLaw, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    settings: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Recommends for a budget of FLOPs, or of days on devices; adds a plan if devices are given."""
    if (flops is None) == (days is None):
        raise JobError("give the budget either as --flops, or as --days with --devices and --cluster.")
    if (devices is None) != (cluster is None) or (flops is None and devices is None):
        raise JobError("--devices and --cluster need each other, and --days needs both; add what is missing.")
    for name, value, limit in (("--flops", flops, MAX_FLOPS), ("--days", days, 1e6)):
        if value is not None and not 0 < value <= limit:
            raise JobError(f"{name} {value:g}: the value must be positive and at most {limit:g}.")
    if devices is None or cluster is None:
        return recommend(fitted_law, flops)  # type: ignore[arg-type]  # without devices, flops is given
    resolved_cluster = find_cluster(cluster)
    seconds = (days or 0.0) * SECONDS_PER_DAY
    flops = flops or INITIAL_MFU * resolved_cluster.device.peak_flops("bf16") * devices * seconds
    for _ in range(MAX_ITERATIONS if seconds else 1):
        result = recommend(fitted_law, flops)
        plan = make_plan(recommended_job(result, devices, settings), resolved_cluster, devices)
        if not seconds or abs(plan.training_seconds / seconds - 1) < DAYS_TOLERANCE:
            break
        flops /= plan.training_seconds / seconds
    job, model = plan.job, plan.job.require_decoder()
    result["plan"] = {
        "cluster": plan.cluster.device.name, "devices": plan.devices, "layout": str(plan.best.layout),
        "fits": plan.fits(plan.best), "days": plan.training_seconds / SECONDS_PER_DAY,
        "device_hours": plan.training_seconds / 3600 * plan.devices, "mfu": plan.mfu(plan.best),
        "planner_flops": plan.shape.flops(job.samples) * job.total_steps, "batch_samples": job.samples,
        "lr": job.optimizer.lr, "parameters": count_parameters(model, fitted_law.parameter_scope),
        "model": {key: getattr(model, key) for key in (*SIZE_FIELDS, "init_std", "vocab", "sequence")},
    }  # fmt: skip
    return result


def recommended_job(result: dict[str, Any], devices: int, settings: Sequence[str]) -> Job:
    template = load_job(None, [*DEFAULT_SETTINGS, *settings])
    if conflicting := sorted(set(SIZE_FIELDS) & template.require_decoder().model_fields_set):
        raise JobError(f"--set model.{conflicting[0]}: the law chooses the model size; remove this setting.")
    model = model_of_size(template, result["parameters"], result["parameter_scope"])
    return job_for_budget(template, model, result["flops"], result["tokens"], devices)
