"""The text and JSON that `shardwise laws` prints."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.console import format_count, pluralize
from shardwise.draw import write_svg
from shardwise.errors import DataError
from shardwise.files import malformed_as_data_error, write_text
from shardwise.laws.compute_optimal import estimate_compute_optimal
from shardwise.laws.fit import ScalingLawFit, find_outliers, fit_scaling_law
from shardwise.laws.fitted_law import fit_as_dict, published_law, read_fitted_law
from shardwise.laws.isoflop_grid import design_grid, parse_budget, write_grid
from shardwise.laws.plot import draw_fit
from shardwise.laws.runs import PARAMETER_SCOPES, read_runs

if TYPE_CHECKING:  # both import PyTorch, which a fit does without
    from shardwise.laws.recommend import Recommendation
    from shardwise.planner.plan import Plan


def design_text(
    budget: str, budgets: int, sizes: int, spread: float, family: str, out: Path, settings: Sequence[str],
    parameter_scope: str, as_json: bool,
) -> str:  # fmt: skip
    """Writes the grid of jobs and returns a table of them."""
    low, high = parse_budget(budget)
    jobs = design_grid(low, high, budgets, sizes, spread, family, settings, parameter_scope, out)
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
    head = "file                                  FLOPs     parameters  width layers            tokens  batch        lr"
    lines = [f"{row['file']:<34} {row['flops']:8.2g} {row['parameters']:14,} {row['width']:6} {row['layers']:6} "
             f"{row['tokens']:17,} {row['batch']:6} {row['lr']:9.3g}" for row in rows]  # fmt: skip
    next_step = f"train each with `shardwise train FILE`, then run `shardwise laws fit {out / 'runs'}`"
    return "\n".join([head, *lines, f"{pluralize(len(rows), 'job')}; {next_step}"])


def fit_text(
    paths: Sequence[Path], drop_highest: int | None, bootstrap_samples: int, seed: int, parameter_scope: str,
    out: Path | None, plot: Path | None, as_json: bool,
) -> str:  # fmt: skip
    """Fits a law to runs, writes fit and plot, and returns a summary."""
    fit = fit_scaling_law(read_runs(paths, parameter_scope), drop_highest, bootstrap_samples, seed)
    text = json.dumps(fit_as_dict(fit))
    if out is not None:
        try:
            write_text(out, text + "\n")
        except OSError as error:
            raise DataError(f"{out} cannot be written: {error.strerror}.") from None
    if plot is not None:
        write_svg(draw_fit(fit, f"Scaling law of {', '.join(path.name for path in paths)}"), plot)
    return text if as_json else "\n".join(_fit_lines(fit))


def _fit_lines(fit: ScalingLawFit) -> Iterator[str]:
    runs, law = fit.runs, fit.law
    label = PARAMETER_SCOPES[runs.parameter_scope]
    yield f"L(N, D) = E + A / N^alpha + B / D^beta, {pluralize(len(runs), 'run')}; N: parameters {label}"
    if len(fit.dropped):
        yield f"dropped: {', '.join(fit.dropped.names)}"
    for name, constant in fit.constants().items():
        yield (f"  {name:<6}{constant['value']:12.5g}   95%: {constant['low']:.5g} to {constant['high']:.5g}   "
               f"standard error {constant['standard_error']:.3g}")  # fmt: skip
    yield f"standard deviation of the residuals: {100 * fit.residual_std:.2g}%"
    worst = sorted(range(len(runs)), key=lambda index: -abs(fit.residuals[index]))[:3]
    residual_list = ", ".join(f"{runs.names[index]} {100 * fit.residuals[index]:+.2g}%" for index in worst)
    yield f"largest residuals: {residual_list}; {pluralize(len(find_outliers(law, runs)), 'outlier')}"
    yield f"compute-optimal size for a budget C: N = k C^{law.beta / (law.alpha + law.beta):.3f} by the law"
    max_flops = float(runs.flops.max())
    N, D = law.compute_optimal(max_flops)
    for estimate in estimate_compute_optimal(runs):
        yield (
            f"  {estimate.method}: N = k C^{estimate.exponent:.3f} through {pluralize(len(estimate.points), 'point')}; "
            f"{format_count(estimate.parameters(max_flops))} at {max_flops:.2g} FLOPs, by the law {format_count(N)}"
        )
    yield f"tokens per parameter at {max_flops:.2g} FLOPs: {D / N:.3g}"


def recommend_text(
    law: Path | None, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    unique_tokens: float | None, settings: Sequence[str], as_json: bool,
) -> str:  # fmt: skip
    """Recommends size and tokens for a budget, and returns them as text or JSON."""
    from shardwise.laws.recommend import recommend_with_plan

    fitted_law = published_law() if law is None else read_fitted_law(law)
    with malformed_as_data_error(law or Path("the built-in law")):
        recommendation = recommend_with_plan(fitted_law, flops, days, devices, cluster, unique_tokens, settings)
        return json.dumps(recommendation.as_dict()) if as_json else "\n".join(_recommend_lines(recommendation))


def _recommend_lines(result: "Recommendation") -> Iterator[str]:
    from shardwise.laws.recommend import NEAR_OPTIMAL_TOLERANCE

    N, D, law = result.parameters, result.tokens, result.fitted_law
    yield from result.warnings
    yield f"law:      {law.source}; N: parameters {PARAMETER_SCOPES[law.parameter_scope]}"
    yield f"budget:   {result.flops:.3g} FLOPs, counted as 6 N D"
    low, high = map(format_count, result.parameters_interval)
    sizes = f"{format_count(N)} parameters (95%: {low} to {high})"
    yield f"optimum:  {sizes}, {format_count(D)} tokens, {D / N:.3g} tokens per parameter"
    interval = "{:.4g} to {:.4g}".format(*result.loss_interval)
    yield f"loss:     {result.loss:.4g} (95% of runs: {interval}); {law.law.E:.4g} is irreducible"
    low, high = map(format_count, result.near_optimal_parameters)
    yield f"flat:     the loss is within {100 * NEAR_OPTIMAL_TOLERANCE:g}% of that from {low} to {high} parameters"
    for model in result.overtrained:
        size, tokens = format_count(model.parameters), format_count(model.tokens)
        price = f"{model.flops / result.flops:.3g}x the training FLOPs, repaid after {format_count(model.break_even)}"
        yield f"smaller:  {size} parameters reach the same loss with {tokens} tokens: {price} tokens of inference"
    if (limited := result.data_constrained) is not None:
        unique = f"{format_count(limited.unique_tokens)} unique tokens, {D / limited.unique_tokens:.3g} epochs"
        best = f"{format_count(limited.parameters)} parameters and {format_count(limited.tokens)} tokens"
        yield f"repeated: {unique}: loss {limited.loss:.4g}; best choice {best}: loss {limited.best_loss:.4g}"
    if result.plan is not None:
        yield from _plan_lines(result.plan, result.as_dict()["plan"])


def _plan_lines(plan: "Plan", plan_dict: dict[str, Any]) -> Iterator[str]:
    model = plan.job.require_decoder()
    shape = f"width {model.width}, {model.layers} layers, {model.heads} heads, vocabulary {model.vocab}"
    yield f"model:    {shape}: {format_count(plan_dict['parameters'])} parameters"
    yield f"batch:    {plan.job.samples} samples of {model.sequence} tokens, learning rate {plan_dict['lr']:g}"
    fits = "" if plan_dict["fits"] else ", which does not fit"
    mfu = f"{100 * plan_dict['mfu']:.3g}% MFU"
    yield f"layout:   {plan_dict['layout']} on {plan.devices} x {plan_dict['cluster']}{fits}: {mfu}"
    flops = f"{plan_dict['planner_flops']:.3g} FLOPs including attention and head"
    yield f"time:     {plan_dict['days']:.3g} days, {plan_dict['device_hours']:,.0f} device-hours; {flops}"


def noise_text(runs: Sequence[Path], batches: int, samples: int, as_json: bool) -> str:
    """Measures the critical batch size of runs, and returns it as text or JSON."""
    from shardwise.laws.gradient_noise import measure_noise_scale

    scales = [measure_noise_scale(run, batches, samples) for run in runs]
    if as_json:
        return json.dumps([vars(scale) for scale in scales])
    line = "{}: critical batch size {:.3g} samples, {} tokens"
    return "\n".join(
        line.format(s.run, s.critical_batch_samples, format_count(s.critical_batch_tokens)) for s in scales
    )
