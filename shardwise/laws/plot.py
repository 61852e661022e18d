"""Plots a fit as SVG: runs and law at each budget, and the residual of each run."""

from collections.abc import Iterator

import numpy as np

from shardwise import draw
from shardwise.laws.compute_optimal import group_by_budget
from shardwise.laws.fit import ScalingLawFit, residuals

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
    dropped_percents = 100 * residuals(fit.law, fit.dropped)
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
