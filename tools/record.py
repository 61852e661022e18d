"""Records `shardwise train` in a terminal and draws the recording as an animated SVG: `docs/demo.svg`.

The commands of `SCENES` run in a pseudo-terminal of 80 columns, in a folder of their own; what they print is kept with
its time, played to a screen of `ROWS` rows, and drawn row by row. Pauses are shortened to `LONGEST_PAUSE`, and `...`
stands for the tables at the end of a run (`CUT`). Whoever prefers reduced motion sees the last screen.
Run: python tools/record.py [RECORDING.json], which is drawn anew if it exists, and kept otherwise; takes two minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "demo.svg"
COLUMNS, ROWS = 80, 20
# A command, and the step after which Ctrl-C is pressed.
SCENES = [("shardwise train", 48), ('shardwise train --resume runs/0001 --set layout="pipeline=2 tensor=2"', None)]
LONGEST_PAUSE, SHORTER_PAUSE, TYPING, AFTER_TYPING, AT_THE_END = 0.6, 0.12, 0.04, 0.6, 6.0  # seconds; between steps
CUT = re.compile(r"step time breakdown.*?(?=to resume:|run folder:)", re.DOTALL)
PROMPT = "\x1b[32m$\x1b[0m "

CELL, LINE, FONT, EDGE, BAR, GAP = 8.43, 19, 14, 18, 34, 8  # pixels
COLOURS = {30: "#7f8c98", 31: "#ff8080", 32: "#7ee0a8", 33: "#f0c674", 34: "#7cb7f5", 35: "#d7a6f0", 36: "#72d5d8"}
ESCAPE = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])")
Cell = tuple[str, str]  # a character and its style
BLANK: Cell = (" ", "")


def record(command: str, stop_at: int | None, folder: Path) -> list[tuple[float, str]]:
    """Returns what a command prints into a terminal, with the seconds since its start."""
    program = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(sys.executable, program, {**environment, "PYTHONPATH": str(ROOT)})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started, printed = time.monotonic(), []
    while True:
        try:
            text = os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the last process has closed it
            break
        printed.append((time.monotonic() - started, text))
        if stop_at is not None and re.search(rf"step +{stop_at}/", text):
            os.kill(child, signal.SIGINT)
            stop_at = None
    os.waitpid(child, 0)
    return printed


class Screen:
    """As much of a terminal as the program uses: new lines, returns, erased lines, colours, wrapping, scrolling."""

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = [[BLANK] * COLUMNS for _ in range(ROWS)]
        self.row, self.column, self.style = 0, 0, ""

    def write(self, text: str) -> None:
        while text:
            if code := ESCAPE.match(text):
                self.control(code[1], code[2])
                text = text[code.end() :]
                continue
            if text[0] == "\n":
                self.down()
            elif text[0] == "\r":
                self.column = 0
            elif text[0] >= " ":
                if self.column == COLUMNS:
                    self.column = 0
                    self.down()
                self.rows[self.row][self.column] = (text[0], self.style)
                self.column += 1
            text = text[1:]

    def down(self) -> None:
        self.row += 1
        if self.row == ROWS:
            self.rows = [*self.rows[1:], [BLANK] * COLUMNS]
            self.row -= 1

    def control(self, numbers: str, letter: str) -> None:
        if letter == "K":
            first = 0 if numbers == "2" else self.column
            self.rows[self.row][first:] = [BLANK] * (COLUMNS - first)
        elif letter == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif letter == "m":
            for number in map(int, (numbers or "0").split(";")):
                if number == 0:
                    self.style = ""
                elif number in (1, 2):
                    self.style += {1: " b", 2: " d"}[number]
                elif number % 60 in COLOURS:
                    self.style = re.sub(r" c\d+", "", self.style) + f" c{number % 60}"

    def shot(self) -> list[str]:
        """The rows as SVG text spans, each a run of characters of one style."""
        shown = []
        for row in self.rows:
            spans, runs = "", re.sub(r"\s+$", "", "".join(cell[0] for cell in row))
            start = 0
            while start < len(runs):
                end = start
                while end < len(runs) and row[end][1] == row[start][1]:
                    end += 1
                words, style = escape(runs[start:end], quote=False), row[start][1].strip()
                spans += f'<tspan class="{style}">{words}</tspan>' if style else words
                start = end
            shown.append(spans)
        return shown


def shorten(printed: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Puts `...` for what `CUT` finds."""
    found = CUT.search("".join(text for _, text in printed))
    if not found:
        return printed
    kept, position = [], 0
    for at, text in printed:
        first, last = (min(max(edge - position, 0), len(text)) for edge in found.span())
        dots = "...\r\n" if 0 <= found.start() - position < len(text) else ""
        kept.append((at, text[:first] + dots + text[last:]))
        position += len(text)
    return [(at, text) for at, text in kept if text]


@dataclass
class Showing:
    row: int
    text: str
    begin: float
    end: float


def play(scenes: list[tuple[str, list[tuple[float, str]]]]) -> tuple[list[Showing], list[str], float]:
    """Plays the scenes to a screen: which row shows what from when to when, the last screen, and the length."""
    screen, now = Screen(), 0.0
    shots: list[tuple[float, list[str]]] = []

    def write(text: str, pause: float) -> None:
        nonlocal now
        screen.write(text)
        shots.append((now, screen.shot()))
        now += pause

    for command, whole in scenes:
        printed = shorten([(at, text) for at, text in whole])
        write(PROMPT, 0.8)
        for letter in command:
            write(letter, TYPING)
        write("\r\n", AFTER_TYPING)
        for (at, text), (following, _) in zip(printed, [*printed[1:], (printed[-1][0] + 1.0, "")]):
            write(text, min(following - at, SHORTER_PAUSE if "step " in text else LONGEST_PAUSE))
    write(PROMPT, AT_THE_END)
    showings: list[Showing] = []
    for number in range(ROWS):
        last = ""
        for begin, rows in shots:
            if rows[number] != last:
                if last:
                    showings[-1].end = begin
                last = rows[number]
                if last:
                    showings.append(Showing(number, last, begin, now))
    return showings, shots[-1][1], now


def draw(showings: list[Showing], last: list[str], length: float, title: str) -> str:
    width, height = round(COLUMNS * CELL + 2 * EDGE), ROWS * LINE + BAR + GAP + EDGE
    colours = " ".join(f".c{number} {{ fill: {colour} }}" for number, colour in COLOURS.items())
    dots = "".join(
        f'<circle cx="{20 + 20 * number}" cy="17" r="6" fill="{fill}"/>'
        for number, fill in enumerate(("#ff6159", "#ffbd2e", "#28c941"))
    )

    def text(row: int, spans: str, inner: str = "") -> str:
        return f'<text x="{EDGE}" y="{BAR + GAP + FONT + row * LINE}">{spans}{inner}</text>'

    film = "\n".join(
        text(one.row, one.text, f'<set attributeName="visibility" to="visible" begin="loop.begin+{one.begin:.2f}s" '
             f'dur="{max(one.end - one.begin, 0.01):.2f}s"/>')
        for one in showings if one.end > one.begin
    )  # fmt: skip
    still = "\n".join(text(row, spans) for row, spans in enumerate(last) if spans)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t">
<title id="t">{escape(title)}</title>
<style>
text {{ font: {FONT}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #dfe6ee; white-space: pre }}
.film text {{ visibility: hidden }} .still {{ display: none }} .b {{ font-weight: 600 }} .d {{ opacity: 0.65 }}
{colours}
@media (prefers-reduced-motion: reduce), print {{ .film {{ display: none }} .still {{ display: inline }} }}
</style>
<rect width="{width}" height="{height}" rx="10" fill="#17202b"/>
<path d="M0 34 V10 A10 10 0 0 1 10 0 H{width - 10} A10 10 0 0 1 {width} 10 V{BAR} z" fill="#243140"/>
{dots}
<g class="film"><rect width="0" height="0"><animate id="loop" attributeName="x" from="0" to="0"
 begin="0s;loop.end" dur="{length:.2f}s"/></rect>
{film}
</g>
<g class="still">
{still}
</g>
</svg>
"""


def main() -> None:
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if kept and kept.exists():
        scenes = json.loads(kept.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="shardwise-record-") as folder:
            scenes = [(command, record(command, stop_at, Path(folder))) for command, stop_at in SCENES]
        if kept:
            kept.write_text(json.dumps(scenes), encoding="utf-8")
    title = "A terminal: a run on two processes is stopped and goes on in another layout on four"
    OUT.write_text(draw(*play(scenes), title), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)} written, {OUT.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
