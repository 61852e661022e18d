"""What `shardwise laws` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.console import format_count, pluralize
from shardwise.errors import DataError
from shardwise.files import write_text
from shardwise.laws.compute_optimal import estimate_compute_optimal
from shardwise.laws.fit import ScalingLawFit, find_outliers, fit_scaling_law
from shardwise.laws.fitted_law import fit_as_dict, published_law, read_fitted_law
from shardwise.laws.isoflop_grid import design_grid, parse_budget, write_grid
from shardwise.laws.plot import write_plot
from shardwise.laws.runs import read_runs

if TYPE_CHECKING:  # both bring PyTorch, which a fit does not wait for
    from shardwise.laws.recommend import Recommendation
    from shardwise.planner.plan import Plan

PARAMETER_COUNT_LABELS = {"all": "embeddings and head included", "blocks": "embeddings and head left out"}


def design_text(
    budget: str,
    budgets: int,
    sizes: int,
    spread: float,
    family: str,
    out: Path,
    settings: Sequence[str],
    parameter_count: str,
    as_json: bool,
) -> str:
    """Writes the grid, and says what it is."""
    low, high = parse_budget(budget)
    jobs = design_grid(low, high, budgets, sizes, spread, family, settings, parameter_count, out)
    paths = write_grid(jobs, out)
    rows = []
    for grid_job, path in zip(jobs, paths, strict=True):
        model = grid_job.job.require_decoder()
        rows.append({
            "file": str(path), "flops": grid_job.flops, "parameters": grid_job.parameters, "width": model.width,
            "layers": model.layers, "tokens": grid_job.job.total_steps * grid_job.job.samples * model.sequence,
            "batch": grid_job.job.samples, "steps": grid_job.job.total_steps, "lr": grid_job.job.optimizer.lr,
        })  # fmt: skip
    if as_json:
        return json.dumps(rows)
    header = (
        f"{'file':<34} {'FLOPs':>8} {'parameters':>14} {'width':>6} {'layers':>6} {'tokens':>17} {'batch':>6} {'lr':>9}"
    )
    lines = [f"{row['file']:<34} {row['flops']:8.2g} {row['parameters']:14,} {row['width']:6} {row['layers']:6} "
             f"{row['tokens']:17,} {row['batch']:6} {row['lr']:9.3g}" for row in rows]  # fmt: skip
    next_step = f"train each with `shardwise train FILE`, then: shardwise laws fit {out / 'runs'}"
    return "\n".join([header, *lines, f"{pluralize(len(rows), 'job')}; {next_step}"])


def fit_text(
    paths: Sequence[Path],
    drop_highest: int | None,
    bootstrap_samples: int,
    seed: int,
    parameter_count: str,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> str:
    found = fit_scaling_law(read_runs(paths, parameter_count), drop_highest, bootstrap_samples, seed)
    text = json.dumps(fit_as_dict(found))
    if out is not None:
        try:
            write_text(out, text + "\n")
        except OSError as error:
            raise DataError(f"{out} cannot be written: {error.strerror}.") from None
    if plot is not None:
        write_plot(found, plot, f"Scaling law of {', '.join(path.name for path in paths)}")
    return text if as_json else "\n".join(_fit_lines(found))


def _fit_lines(found: ScalingLawFit) -> Iterator[str]:
    runs, law = found.runs, found.law
    yield f"L(N, D) = E + A / N^alpha + B / D^beta, {pluralize(len(runs), 'run')}; N: {PARAMETER_COUNT_LABELS[runs.parameter_count]}"
    if len(found.dropped):
        yield f"left out: {', '.join(found.dropped.names)}"
    for name, constant in found.constants().items():
        yield (f"  {name:<6}{constant['value']:12.5g}   95%: {constant['low']:.5g} to {constant['high']:.5g}   "
               f"standard error {constant['standard_error']:.3g}")  # fmt: skip
    yield f"scatter of the runs around it: {100 * found.residual_std:.2g}%"
    outlier_indices = find_outliers(law, runs)
    worst = sorted(range(len(runs)), key=lambda place: -abs(found.residuals[place]))[:3]
    residual_list = ", ".join(f"{runs.names[place]} {100 * found.residuals[place]:+.2g}%" for place in worst)
    yield f"farthest from it: {residual_list}; {pluralize(len(outlier_indices), 'outlier')}"
    exponent = law.beta / (law.alpha + law.beta)
    yield f"best size for a budget C: N = k C^{exponent:.3f} by the law"
    max_flops = float(runs.flops.max())
    N, D = law.compute_optimal(max_flops)
    for estimate in estimate_compute_optimal(runs):
        yield (
            f"  {estimate.method}: N = k C^{estimate.exponent:.3f} through {pluralize(len(estimate.points), 'point')}; "
            f"at {max_flops:.2g} FLOPs {format_count(estimate.parameters(max_flops))}, the law {format_count(N)}"
        )
    yield f"tokens for each parameter at {max_flops:.2g} FLOPs: {D / N:.3g}"


def recommend_text(
    law: Path | None, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    unique_tokens: float | None, settings: Sequence[str], as_json: bool,
) -> str:  # fmt: skip
    from shardwise.laws.recommend import recommend_with_plan

    fitted_law = published_law() if law is None else read_fitted_law(law)
    found = recommend_with_plan(fitted_law, flops, days, devices, cluster, unique_tokens, settings)
    return json.dumps(found.as_dict()) if as_json else "\n".join(_recommend_lines(found))


def _recommend_lines(found: Recommendation) -> Iterator[str]:
    from shardwise.laws.recommend import NEAR_OPTIMAL_TOLERANCE

    N, D, law = found.parameters, found.tokens, found.fitted_law.law
    yield from found.warnings
    yield f"law:      {found.fitted_law.source}; N: {PARAMETER_COUNT_LABELS[found.fitted_law.parameter_count]}"
    yield f"budget:   {found.flops:.3g} FLOPs, counted as 6 N D"
    low, high = found.parameters_interval
    sizes = f"{format_count(N)} parameters (95%: {format_count(low)} to {format_count(high)})"
    yield f"best:     {sizes}, {format_count(D)} tokens, {D / N:.3g} for each"
    low, high = found.loss_interval
    yield f"loss:     {found.loss:.4g} (of a run, 95%: {low:.4g} to {high:.4g}); {law.E:.4g} of it stays for ever"
    low, high = found.near_optimal_parameters
    yield f"flat:     from {format_count(low)} to {format_count(high)} parameters the loss is within {100 * NEAR_OPTIMAL_TOLERANCE:g}%"
    for one in found.overtrained:
        what = f"{format_count(one.parameters)} parameters reach the same loss with {format_count(one.tokens)} tokens"
        price = f"{one.flops / found.flops:.3g} times the training, repaid after {format_count(one.break_even)} tokens in use"
        yield f"smaller:  {what}: {price}"
    if (constrained := found.data_constrained) is not None:
        what = f"{format_count(constrained.unique_tokens)} different tokens, {D / constrained.unique_tokens:.3g} times each: loss {constrained.loss:.4g}"
        best = f"{format_count(constrained.parameters)} parameters and {format_count(constrained.tokens)} tokens: {constrained.best_loss:.4g}"
        yield f"repeated: {what}; the best then is {best}"
    if found.plan is not None:
        yield from _plan_lines(found.plan, found.as_dict()["plan"])


def _plan_lines(plan: Plan, plan_dict: dict[str, Any]) -> Iterator[str]:
    model = plan.job.require_decoder()
    shape = f"width {model.width}, {model.layers} layers, {model.heads} heads, vocabulary {model.vocab}"
    yield f"model:    {shape}: {format_count(plan_dict['parameters'])} parameters"
    yield f"batch:    {plan.job.samples} samples of {model.sequence} tokens, learning rate {plan_dict['lr']:g}"
    fits = "" if plan_dict["fits"] else ", which does not fit"
    share = f"{100 * plan_dict['mfu']:.3g}% of the peak"
    yield f"layout:   {plan_dict['layout']} on {plan.devices} x {plan_dict['cluster']}{fits}: {share}"
    flops = f"{plan_dict['planner_flops']:.3g} FLOPs, attention and head included"
    yield f"time:     {plan_dict['days']:.3g} days, {plan_dict['device_hours']:,.0f} device-hours; the planner counts {flops}"


def noise_text(runs: Sequence[Path], batches: int, samples: int, as_json: bool) -> str:
    from shardwise.laws.gradient_noise import measure_noise_scale

    found = [measure_noise_scale(run, batches, samples) for run in runs]
    if as_json:
        return json.dumps([result.as_dict() for result in found])
    size = "{}: critical batch {:.3g} samples, {} tokens"
    return "\n".join(
        size.format(result.run, result.samples, format_count(result.samples * result.sequence)) for result in found
    )
