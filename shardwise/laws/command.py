"""The text and plots of `shardwise laws`, made from the values that `--json` prints."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise import draw
from shardwise.console import format_count, pluralize
from shardwise.laws.fit import CONSTANTS, ScalingLawFit, group_by_budget, residuals
from shardwise.laws.fitted_law import law_from_dict
from shardwise.laws.runs import PARAMETER_SCOPES

# Key, alignment with width, and number format of the columns of a design.
DESIGN_COLUMNS = (
    ("file", "<34", ""), ("flops", ">8", ".2g"), ("parameters", ">14", ","), ("width", ">6", ""), ("layers", ">6", ""),
    ("tokens", ">17", ","), ("batch", ">6", ""), ("lr", ">9", ".3g"),
)  # fmt: skip


def design_lines(rows: Sequence[dict[str, Any]], folder: Path) -> Iterator[str]:
    """Yields a table of the jobs of a grid."""
    yield " ".join(f"{key:{width}}" for key, width, _ in DESIGN_COLUMNS)
    for row in rows:
        yield " ".join(f"{format(row[key], number_format):{width}}" for key, width, number_format in DESIGN_COLUMNS)
    next_step = f"train each with `shardwise train FILE`, then run `shardwise laws fit {folder / 'runs'}`"
    yield f"{pluralize(len(rows), 'job')}; {next_step}"


def fit_lines(values: dict[str, Any]) -> Iterator[str]:
    """Yields the summary of a fit."""
    label = PARAMETER_SCOPES[values["parameter_scope"]]
    yield f"L(N, D) = E + A / N^alpha + B / D^beta, {pluralize(values['runs'], 'run')}; N: parameters {label}"
    if values["dropped"]:
        yield f"dropped: {', '.join(values['dropped'])}"
    for name in CONSTANTS:
        numbers = "{value:12.5g}   95%: {low:.5g} to {high:.5g}   standard error {standard_error:.3g}"
        yield f"  {name:<6}" + numbers.format(**values[name])
    yield f"standard deviation of the residuals: {100 * values['residual_std']:.2g}%"
    worst = sorted(values["residuals"], key=lambda row: -abs(row["residual"]))[:3]
    residual_list = ", ".join(f"{row['run']} {100 * row['residual']:+.2g}%" for row in worst)
    outliers = pluralize(sum(row["outlier"] for row in values["residuals"]), "outlier")
    yield f"largest residuals: {residual_list}; {outliers}"
    exponent = values["compute_optimal"]["parameters_exponent"]
    yield f"compute-optimal size for a budget C: N = k C^{exponent:.3f}"
    flops = values["fitted_ranges"]["flops"][1]
    N, D = law_from_dict(values).compute_optimal(flops)
    yield f"at {flops:.2g} FLOPs: {format_count(N)} parameters, {D / N:.3g} tokens per parameter"


def recommend_lines(result: dict[str, Any], irreducible_loss: float) -> Iterator[str]:
    """Yields the text of a recommendation."""
    yield from result["warnings"]
    yield f"law:      {result['law']}; N: parameters {PARAMETER_SCOPES[result['parameter_scope']]}"
    yield f"budget:   {result['flops']:.3g} FLOPs, counted as 6 N D"
    low, high = map(format_count, result["parameters_interval"])
    size = f"{format_count(result['parameters'])} parameters (95%: {low} to {high})"
    tokens = f"{format_count(result['tokens'])} tokens, {result['tokens_per_parameter']:.3g} tokens per parameter"
    yield f"optimum:  {size}, {tokens}"
    losses = "{:.4g} (95% of runs: {:.4g} to {:.4g})".format(result["loss"], *result["loss_interval"])
    yield f"loss:     {losses}; {irreducible_loss:.4g} is irreducible"
    low, high = map(format_count, result["near_optimal_parameters"])
    tolerance = f"within {100 * result['near_optimal_tolerance']:g}% of that"
    yield f"flat:     the loss is {tolerance} from {low} to {high} parameters"
    for model in result["overtrained"]:
        size, tokens, break_even = (format_count(model[key]) for key in ("parameters", "tokens", "break_even"))
        price = f"{model['flops'] / result['flops']:.3g}x the training FLOPs"
        repaid = f"repaid after {break_even} tokens of inference"
        yield f"smaller:  {size} parameters reach the same loss with {tokens} tokens: {price}, {repaid}"
    if limited := result.get("data_constrained"):
        unique, size, tokens = (format_count(limited[key]) for key in ("unique_tokens", "parameters", "tokens"))
        repeated = f"{unique} unique tokens, {result['tokens'] / limited['unique_tokens']:.3g} epochs"
        best = f"best choice {size} parameters and {tokens} tokens: loss {limited['best_loss']:.4g}"
        yield f"repeated: {repeated}: loss {limited['loss']:.4g}; {best}"
    if plan := result.get("plan"):
        shape = "width {width}, {layers} layers, {heads} heads, vocabulary {vocab}".format(**plan["model"])
        yield f"model:    {shape}: {format_count(plan['parameters'])} parameters"
        batch = f"{plan['batch_samples']} samples of {plan['model']['sequence']} tokens"
        yield f"batch:    {batch}, learning rate {plan['lr']:g}"
        fits = "" if plan["fits"] else ", which does not fit"
        devices = f"{plan['devices']} x {plan['cluster']}{fits}"
        yield f"layout:   {plan['layout']} on {devices}: {100 * plan['mfu']:.3g}% MFU"
        time = f"{plan['days']:.3g} days, {plan['device_hours']:,.0f} device-hours"
        yield f"time:     {time}; {plan['planner_flops']:.3g} FLOPs including attention and head"


def noise_line(scale: dict[str, Any]) -> str:
    tokens = format_count(scale["critical_batch_tokens"])
    return f"{scale['run']}: critical batch size {scale['critical_batch_samples']:.3g} samples, {tokens} tokens"


def draw_fit(fit: ScalingLawFit, title: str) -> str:
    """Returns the plot as an SVG document."""
    law, width, height = fit.law, 2 * draw.MARGIN + 2 * draw.PANEL_WIDTH + draw.GAP, draw.PANEL_HEIGHT + 2 * draw.MARGIN
    caption = (f"L = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}; "
               f"{len(fit.runs)} runs, {len(fit.dropped)} dropped")  # fmt: skip
    lines = [*_draw_budgets(fit), *_draw_residuals(fit), draw.svg_text(draw.MARGIN, height - 12, caption, "start")]
    return draw.svg_document(lines, width, height, title)


def _draw_budgets(fit: ScalingLawFit) -> Iterator[str]:
    """Plots loss over size, with one color for each of at most nine budgets."""
    runs = fit.runs
    groups = [group for group in group_by_budget(runs) if len(group) >= 3]
    shown = [groups[round(index)] for index in np.linspace(0, len(groups) - 1, min(len(draw.COLORS), len(groups)))]
    panel = draw.Panel(draw.MARGIN, runs.parameters, runs.loss, log_y=True)
    yield from panel.axes("parameters", "loss: runs (dots) and law (lines), by FLOPs (6ND)")
    for index, (color, group) in enumerate(zip(draw.COLORS, shown)):
        sizes, losses = runs.parameters[group], runs.loss[group]
        flops = 6 * float(np.exp(np.log(sizes * runs.tokens[group]).mean()))
        first, last = np.clip([sizes.min() / 1.3, 1.3 * sizes.max()], runs.parameters.min(), runs.parameters.max())
        predicted = [(N, fit.law.loss(N, flops / 6 / N)) for N in np.geomspace(first, last, 60)]
        yield draw.svg_line([panel.to_pixels(N, loss) for N, loss in predicted if loss <= runs.loss.max()], color)
        yield from (draw.svg_circle(*panel.to_pixels(N, loss), color) for N, loss in zip(sizes, losses))
        x, y = draw.MARGIN + draw.PANEL_WIDTH - 6, draw.MARGIN / 2 + 16 + 17 * index
        yield draw.svg_text(x, y, f"{flops:.2g}", "end", f'style="fill:{color}"')


def _draw_residuals(fit: ScalingLawFit) -> Iterator[str]:
    """Plots the residuals; dropped runs are open circles."""
    (x, y), (dropped_x, dropped_y) = (
        (runs.tokens / runs.parameters, 100 * residuals(fit.law, runs)) for runs in (fit.runs, fit.dropped)
    )
    left = draw.MARGIN + draw.PANEL_WIDTH + draw.GAP
    panel = draw.Panel(left, np.concatenate([x, dropped_x]), np.concatenate([y, dropped_y, [0.0]]), log_y=False)
    yield from panel.axes("tokens per parameter", "measured over predicted loss, % (open circles: dropped)")
    yield f'<path d="M{left} {panel.to_pixels(1.0, 0.0)[1]:.1f}h{draw.PANEL_WIDTH}" class="zero"/>'
    yield from (draw.svg_circle(*panel.to_pixels(*point), draw.COLORS[0]) for point in zip(x, y))
    for cx, cy in map(panel.to_pixels, dropped_x, dropped_y):
        yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" stroke="{draw.COLORS[3]}" class="dropped"/>'
