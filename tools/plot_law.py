"""Plots a scaling law and the runs it is fitted to, as SVG: losses by budget, and the residuals.

python tools/plot_law.py grid/runs law.svg    runs as for `shardwise laws fit`: run folders, or a CSV file
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import draw  # noqa: E402

from shardwise.laws.fit import Runs, ScalingLawFit, fit_scaling_law, read_runs, residuals  # noqa: E402

SAME_BUDGET_RATIO = 1.2  # runs whose FLOPs are within this factor share a budget


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


def group_by_budget(runs: Runs) -> list[NDArray[np.intp]]:
    """Groups the indices of runs by budget, lowest budget first."""
    groups: list[list[int]] = []
    for index in np.argsort(runs.flops):
        if not groups or runs.flops[index] > SAME_BUDGET_RATIO * runs.flops[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return [np.array(group) for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("plot", type=Path)
    options = parser.parse_args()
    fit = fit_scaling_law(read_runs([options.runs]))
    options.plot.write_text(draw_fit(fit, f"Scaling law of {options.runs.name}"))


if __name__ == "__main__":
    main()
