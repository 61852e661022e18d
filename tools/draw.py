"""SVG plots: panels with points and lines, without a plotting library."""

from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, floor, log10

import numpy as np
from numpy.typing import NDArray

from shardwise.console import format_count

PANEL_WIDTH, PANEL_HEIGHT, MARGIN, GAP = 420, 360, 60, 90  # pixels; the gap is between panels
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#e8c547", "#7f7f7f")
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2933 } .grid { stroke: #d5dbe1 } .axis { stroke: #52606d }
.curve { fill: none; stroke-width: 1.5 } .zero { stroke: #52606d; stroke-dasharray: 4 4 } .dropped { fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .grid { stroke: #3b4651 } .axis, .zero { stroke: #a8b3bf }
}"""


class Panel:
    """A panel with a logarithmic x axis and a linear or logarithmic y axis."""

    def __init__(self, left: float, x: NDArray[np.float64], y: NDArray[np.float64], log_y: bool):
        """Fits the axes to the values `x` and `y`."""
        self.left, self.log_y = left, log_y
        self.x0, self.x1 = log10(x.min()) - 0.05, log10(x.max()) + 0.05
        low, high = (log10(value) if log_y else float(value) for value in (y.min(), y.max()))
        padding = 0.04 * (high - low) or 0.01
        self.y0, self.y1 = low - padding, high + padding

    def to_pixels(self, x: float, y: float) -> tuple[float, float]:
        y = log10(y) if self.log_y else y
        return (self.left + PANEL_WIDTH * (log10(x) - self.x0) / (self.x1 - self.x0),
                MARGIN / 2 + PANEL_HEIGHT * (1 - (y - self.y0) / (self.y1 - self.y0)))  # fmt: skip

    def axes(self, x_label: str, y_label: str) -> Iterator[str]:
        bottom = MARGIN / 2 + PANEL_HEIGHT
        for value in _log_ticks(self.x0, self.x1):
            x, _ = self.to_pixels(value, 10**self.y0 if self.log_y else self.y0)
            yield f'<path d="M{x:.1f} {MARGIN / 2:.0f}V{bottom:.0f}" class="grid"/>'
            yield svg_text(x, bottom + 18, format_count(value), "middle")
        for value in _linear_ticks(self.y0, self.y1, self.log_y):
            _, y = self.to_pixels(10**self.x0, value)
            yield f'<path d="M{self.left:.0f} {y:.1f}h{PANEL_WIDTH}" class="grid"/>'
            yield svg_text(self.left - 8, y + 4, f"{value:g}", "end")
        yield f'<path d="M{self.left:.0f} {MARGIN / 2:.0f}v{PANEL_HEIGHT}h{PANEL_WIDTH}" class="axis" fill="none"/>'
        yield svg_text(self.left + PANEL_WIDTH / 2, bottom + 40, x_label, "middle")
        yield svg_text(self.left, MARGIN / 2 - 8, y_label, "start")


def svg_document(lines: Iterable[str], width: float, height: float, title: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
            + "\n".join(lines) + "\n</svg>\n")  # fmt: skip


def _log_ticks(low: float, high: float) -> Iterator[float]:
    factors = (1,) if high - low > 2 else (1, 2, 5)
    for power in range(floor(low), ceil(high) + 1):
        yield from (f * 10.0**power for f in factors if low <= log10(f * 10.0**power) <= high)


def _linear_ticks(low: float, high: float, log: bool) -> list[float]:
    """Returns about six round numbers in the range."""
    if log and high - low > 1:
        return list(_log_ticks(low, high))
    first, last = (10**low, 10**high) if log else (low, high)
    rough = (last - first) / 6
    step = next(f * 10.0 ** floor(log10(rough)) for f in (1, 2, 5, 10) if f * 10.0 ** floor(log10(rough)) >= rough)
    return [round(n * step, 10) for n in range(ceil(first / step), floor(last / step) + 1)]


def svg_line(points: Iterable[tuple[float, float]], color: str) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" stroke="{color}" class="curve"/>'


def svg_circle(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" opacity="0.75"/>'


def svg_text(x: float, y: float, content: str, anchor: str, attributes: str = "") -> str:
    attributes = f" {attributes}" if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(content)}</text>'
