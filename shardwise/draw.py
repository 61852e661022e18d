"""Drawings as plain SVG: panels with dots and lines. A plotting library would be megabytes for some of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, floor, log10
from pathlib import Path

from shardwise.errors import DataError
from shardwise.files import write_text
from shardwise.words import short

SIDE, HIGH, EDGE, GAP = 420, 360, 60, 90  # pixels: width and height of a panel, room around it and between two
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
            yield text(x, bottom + 18, short(value), "middle")
        for value in _steps(self.y0, self.y1, self.log_y):
            _, y = self.place(10**self.x0, value)
            yield f'<path d="M{self.left:.0f} {y:.1f}h{SIDE}" class="grid"/>'
            yield text(self.left - 8, y + 4, f"{value:g}", "end")
        yield f'<path d="M{self.left:.0f} {EDGE / 2:.0f}v{HIGH}h{SIDE}" class="axis" fill="none"/>'
        yield text(self.left + SIDE / 2, bottom + 40, right, "middle")
        yield text(self.left, EDGE / 2 - 8, up, "start")


def svg(lines: Iterable[str], wide: float, high: float, title: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
            f'aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
            + "\n".join(lines) + "\n</svg>\n")  # fmt: skip


def write_svg(drawing: str, path: Path) -> None:
    if path.suffix != ".svg":
        raise DataError(f"--plot {path}: the drawing is SVG; name the file *.svg.")
    try:
        write_text(path, drawing)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}.") from None


def _decades(low: float, high: float) -> Iterator[float]:
    factors = (1,) if high - low > 2 else (1, 2, 5)
    for power in range(floor(low), ceil(high) + 1):
        yield from (f * 10.0**power for f in factors if low <= log10(f * 10.0**power) <= high)


def _steps(low: float, high: float, log: bool) -> list[float]:
    """About six round numbers."""
    if log and high - low > 1:
        return list(_decades(low, high))
    first, last = (10**low, 10**high) if log else (low, high)
    rough = (last - first) / 6
    step = next(f * 10.0 ** floor(log10(rough)) for f in (1, 2, 5, 10) if f * 10.0 ** floor(log10(rough)) >= rough)
    return [round(n * step, 10) for n in range(ceil(first / step), floor(last / step) + 1)]


def path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity="0.75"/>'


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'.replace(" >", ">")
