"""A fit as one drawing: runs and law at each budget, and how far each run lies from the law."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardwise.draw import COLOURS, EDGE, GAP, HIGH, SIDE, Panel, dot, path, svg, text, write_svg
from shardwise.laws.estimates import budgets
from shardwise.laws.fit import Fit, residuals

CURVES = 9


def draw(fit: Fit, title: str) -> str:
    runs, law = fit.runs, fit.law
    groups = [group for group in budgets(runs) if len(group) >= 3]
    shown = [groups[round(place)] for place in np.linspace(0, len(groups) - 1, min(CURVES, len(groups)))]
    sizes = float(runs.parameters.min()), float(runs.parameters.max())
    left = Panel(EDGE, sizes, (float(runs.loss.min()), float(runs.loss.max())), log_y=True)
    lines = [*left.frame("parameters", "loss: runs (dots) and law (lines), by budget")]
    for place, group in enumerate(shown):
        colour, flops = COLOURS[place], float(np.exp(np.log(6 * runs.parameters * runs.tokens)[group].mean()))
        curve = np.geomspace(runs.parameters[group].min() / 1.3, runs.parameters[group].max() * 1.3, 60)
        points = [(N, law.loss(N, flops / 6 / N)) for N in curve if sizes[0] <= N <= sizes[1]]
        drawn = [left.place(N, loss) for N, loss in points if loss <= runs.loss.max()]
        lines.append(f'<path d="{path(drawn)}" stroke="{colour}" class="curve"/>')
        lines += [dot(*left.place(runs.parameters[run], runs.loss[run]), colour) for run in group]
        lines.append(text(EDGE + SIDE - 6, EDGE / 2 + 16 + 17 * place, f"{flops:.2g}", "end", f'style="fill:{colour}"'))
    if shown:
        lines.append(text(EDGE + SIDE - 6, EDGE / 2 + 16 + 17 * len(shown), "FLOPs (6ND)", "end"))
    lines += _residuals(fit)
    wide, high = 2 * EDGE + 2 * SIDE + GAP, HIGH + 2 * EDGE
    lines.append(text(EDGE, high - 12, _sentence(fit), "start"))
    return svg(lines, wide, high, title)


def _residuals(fit: Fit) -> Iterator[str]:
    """Runs that were left out are rings."""
    ratio, off = fit.runs.tokens / fit.runs.parameters, 100 * fit.residuals
    out, far = fit.dropped.tokens / fit.dropped.parameters, 100 * residuals(fit.law, fit.dropped)
    every, both = np.concatenate([off, far]), np.concatenate([ratio, out])
    panel = Panel(EDGE + SIDE + GAP, (both.min(), both.max()), (min(every.min(), 0.0), max(every.max(), 0.0)), False)
    yield from panel.frame("tokens for each parameter", "measured over predicted loss, % (rings: left out)")
    x, y = panel.place(10**panel.x0, 0.0)
    yield f'<path d="M{x:.0f} {y:.1f}h{SIDE}" class="zero"/>'
    yield from (dot(*panel.place(one, value), COLOURS[0]) for one, value in zip(ratio, off))
    for one, value in zip(out, far):
        x, y = panel.place(one, value)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{COLOURS[3]}" class="left"/>'


def write_plot(fit: Fit, path: Path, title: str) -> None:
    write_svg(draw(fit, title), path)


def _sentence(fit: Fit) -> str:
    law = fit.law
    return (f"L = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}; "
            f"{len(fit.runs)} runs, {len(fit.dropped)} left out")  # fmt: skip
