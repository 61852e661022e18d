"""The text, JSON and plots of `shardwise laws`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise import draw
from shardwise.console import format_count, pluralize
from shardwise.draw import write_svg
from shardwise.errors import DataError
from shardwise.files import malformed_as_data_error, write_text
from shardwise.laws import fit as fitting
from shardwise.laws.fit import ScalingLawFit, estimate_compute_optimal, find_outliers, fit_scaling_law, group_by_budget
from shardwise.laws.fitted_law import fit_as_dict, published_law, read_fitted_law
from shardwise.laws.isoflop_grid import design_grid, parse_budget, write_grid
from shardwise.laws.runs import PARAMETER_SCOPES, read_runs

if TYPE_CHECKING:  # both import PyTorch, which a fit does without
    from shardwise.laws.recommend import Recommendation
    from shardwise.planner.plan import Plan


def design_text(
    budget: str, budgets: int, sizes: int, spread: float, out: Path, settings: Sequence[str], parameter_scope: str,
    as_json: bool,
) -> str:  # fmt: skip
    """Writes the grid of jobs and returns a table of them."""
    low, high = parse_budget(budget)
    jobs = design_grid(low, high, budgets, sizes, spread, settings, parameter_scope, out)
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


MAX_CURVES = 9


def draw_fit(fit: ScalingLawFit, title: str) -> str:
    """Returns the plot as an SVG document."""
    runs, law = fit.runs, fit.law
    groups = [group for group in group_by_budget(runs) if len(group) >= 3]
    shown = [groups[round(index)] for index in np.linspace(0, len(groups) - 1, min(MAX_CURVES, len(groups)))]
    sizes = float(runs.parameters.min()), float(runs.parameters.max())
    left = draw.Panel(draw.MARGIN, sizes, (float(runs.loss.min()), float(runs.loss.max())), log_y=True)
    lines = [*left.axes("parameters", "loss: runs (dots) and law (lines), by budget")]
    right, top = draw.MARGIN + draw.PANEL_WIDTH - 6, draw.MARGIN / 2 + 16
    for index, group in enumerate(shown):
        color, flops = draw.COLORS[index], float(np.exp(np.log(6 * runs.parameters * runs.tokens)[group].mean()))
        curve = np.geomspace(runs.parameters[group].min() / 1.3, runs.parameters[group].max() * 1.3, 60)
        points = [(N, law.loss(N, flops / 6 / N)) for N in curve if sizes[0] <= N <= sizes[1]]
        drawn = [left.to_pixels(N, loss) for N, loss in points if loss <= runs.loss.max()]
        lines.append(f'<path d="{draw.line_path(drawn)}" stroke="{color}" class="curve"/>')
        lines += [draw.svg_circle(*left.to_pixels(runs.parameters[run], runs.loss[run]), color) for run in group]
        lines.append(draw.svg_text(right, top + 17 * index, f"{flops:.2g}", "end", f'style="fill:{color}"'))
    if shown:
        lines.append(draw.svg_text(right, top + 17 * len(shown), "FLOPs (6ND)", "end"))
    lines += _draw_residuals(fit)
    width, height = 2 * draw.MARGIN + 2 * draw.PANEL_WIDTH + draw.GAP, draw.PANEL_HEIGHT + 2 * draw.MARGIN
    caption = (f"L = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}; "
               f"{len(fit.runs)} runs, {len(fit.dropped)} dropped")  # fmt: skip
    lines.append(draw.svg_text(draw.MARGIN, height - 12, caption, "start"))
    return draw.svg_document(lines, width, height, title)


def _draw_residuals(fit: ScalingLawFit) -> Iterator[str]:
    """Plots the residuals; dropped runs are open circles."""
    ratios, percents = fit.runs.tokens / fit.runs.parameters, 100 * fit.residuals
    dropped_ratios = fit.dropped.tokens / fit.dropped.parameters
    dropped_percents = 100 * fitting.residuals(fit.law, fit.dropped)
    all_ratios, all_percents = np.concatenate([ratios, dropped_ratios]), np.concatenate([percents, dropped_percents])
    y_range = min(all_percents.min(), 0.0), max(all_percents.max(), 0.0)
    left = draw.MARGIN + draw.PANEL_WIDTH + draw.GAP
    panel = draw.Panel(left, (all_ratios.min(), all_ratios.max()), y_range, log_y=False)
    yield from panel.axes("tokens per parameter", "measured over predicted loss, % (open circles: dropped)")
    x, y = panel.to_pixels(10**panel.x0, 0.0)
    yield f'<path d="M{x:.0f} {y:.1f}h{draw.PANEL_WIDTH}" class="zero"/>'
    for ratio, percent in zip(ratios, percents):
        yield draw.svg_circle(*panel.to_pixels(ratio, percent), draw.COLORS[0])
    for ratio, percent in zip(dropped_ratios, dropped_percents):
        x, y = panel.to_pixels(ratio, percent)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{draw.COLORS[3]}" class="dropped"/>'
