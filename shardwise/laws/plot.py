"""A fit as one drawing: runs and law at each budget, and how far each run lies from the law. Plain SVG, as in
`shardwise.planner.page`: a plotting library would be megabytes for some dots and lines."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from shardwise.errors import DataError
from shardwise.files import write_text
from shardwise.laws.estimates import budgets
from shardwise.laws.fit import Fit, residuals
from shardwise.words import short

SIDE, HIGH, EDGE, GAP = 420, 360, 60, 90  # pixels: width and height of a panel, room around it and between two
CURVES = 9
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#e8c547", "#7f7f7f")
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2933 } .grid { stroke: #d5dbe1 } .axis { stroke: #52606d }
.curve { fill: none; stroke-width: 1.5 } .zero { stroke: #52606d; stroke-dasharray: 4 4 } .left { fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .grid { stroke: #3b4651 } .axis, .zero { stroke: #a8b3bf }
}"""


class Panel:
    """A logarithmic axis to the right, and one upwards that may be."""

    def __init__(self, left: float, x: tuple[float, float], y: tuple[float, float], log_y: bool):
        self.left, self.log_y = left, log_y
        self.x0, self.x1 = log10(x[0]) - 0.05, log10(x[1]) + 0.05
        low, high = (log10(y[0]), log10(y[1])) if log_y else y
        room = 0.04 * (high - low) or 0.01
        self.y0, self.y1 = low - room, high + room

    def place(self, x: float, y: float) -> tuple[float, float]:
        up = log10(y) if self.log_y else y
        return (self.left + SIDE * (log10(x) - self.x0) / (self.x1 - self.x0),
                EDGE / 2 + HIGH * (1 - (up - self.y0) / (self.y1 - self.y0)))  # fmt: skip

    def frame(self, right: str, up: str) -> Iterator[str]:
        bottom = EDGE / 2 + HIGH
        for value in _decades(self.x0, self.x1):
            x, _ = self.place(value, 10**self.y0 if self.log_y else self.y0)
            yield f'<path d="M{x:.1f} {EDGE / 2:.0f}V{bottom:.0f}" class="grid"/>'
            yield _text(x, bottom + 18, short(value), "middle")
        for value in _steps(self.y0, self.y1, self.log_y):
            _, y = self.place(10**self.x0, value)
            yield f'<path d="M{self.left:.0f} {y:.1f}h{SIDE}" class="grid"/>'
            yield _text(self.left - 8, y + 4, f"{value:g}", "end")
        yield f'<path d="M{self.left:.0f} {EDGE / 2:.0f}v{HIGH}h{SIDE}" class="axis" fill="none"/>'
        yield _text(self.left + SIDE / 2, bottom + 40, right, "middle")
        yield _text(self.left, EDGE / 2 - 8, up, "start")


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
        lines.append(f'<path d="{_path(drawn)}" stroke="{colour}" class="curve"/>')
        lines += [_dot(*left.place(runs.parameters[run], runs.loss[run]), colour) for run in group]
        lines.append(
            _text(EDGE + SIDE - 6, EDGE / 2 + 16 + 17 * place, f"{flops:.2g}", "end", f'style="fill:{colour}"')
        )
    if shown:
        lines.append(_text(EDGE + SIDE - 6, EDGE / 2 + 16 + 17 * len(shown), "FLOPs (6ND)", "end"))
    lines += _residuals(fit)
    wide, high = 2 * EDGE + 2 * SIDE + GAP, HIGH + 2 * EDGE
    lines.append(_text(EDGE, high - 12, _sentence(fit), "start"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
            f'aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
            + "\n".join(lines) + "\n</svg>\n")  # fmt: skip


def _residuals(fit: Fit) -> Iterator[str]:
    """Runs that were left out are rings."""
    ratio, off = fit.runs.tokens / fit.runs.parameters, 100 * fit.residuals
    out, far = fit.dropped.tokens / fit.dropped.parameters, 100 * residuals(fit.law, fit.dropped)
    every, both = np.concatenate([off, far]), np.concatenate([ratio, out])
    panel = Panel(EDGE + SIDE + GAP, (both.min(), both.max()), (min(every.min(), 0.0), max(every.max(), 0.0)), False)
    yield from panel.frame("tokens for each parameter", "measured over predicted loss, % (rings: left out)")
    x, y = panel.place(10**panel.x0, 0.0)
    yield f'<path d="M{x:.0f} {y:.1f}h{SIDE}" class="zero"/>'
    yield from (_dot(*panel.place(one, value), COLOURS[0]) for one, value in zip(ratio, off))
    for one, value in zip(out, far):
        x, y = panel.place(one, value)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{COLOURS[3]}" class="left"/>'


def write_plot(fit: Fit, path: Path, title: str) -> None:
    if path.suffix != ".svg":
        raise DataError(f"--plot {path}: the drawing is SVG; name the file *.svg.")
    try:
        write_text(path, draw(fit, title))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}.") from None


def _sentence(fit: Fit) -> str:
    law = fit.law
    return (f"L = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}; "
            f"{len(fit.runs)} runs, {len(fit.dropped)} left out")  # fmt: skip


def _decades(low: float, high: float) -> Iterator[float]:
    factors = (1,) if high - low > 2 else (1, 2, 5)
    for power in range(floor(low), ceil(high) + 1):
        yield from (f * 10.0**power for f in factors if low <= log10(f * 10.0**power) <= high)


def _steps(low: float, high: float, log: bool) -> list[float]:
    """About six round numbers."""
    first, last = (10**low, 10**high) if log else (low, high)
    rough = (last - first) / 6
    step = next(f * 10.0 ** floor(log10(rough)) for f in (1, 2, 5, 10) if f * 10.0 ** floor(log10(rough)) >= rough)
    return [round(n * step, 10) for n in range(ceil(first / step), floor(last / step) + 1)]


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity="0.75"/>'


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'.replace(" >", ">")
