"""Terminal output: printing lines and formatting counts, times, signals and ranks."""

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

CLEAR = "\x1b[K"  # a terminal clears the rest of the line


class Answer(NamedTuple):
    """What a command found: `data` is printed with --json, `text` without. `result` is printed with --quiet, if the
    text is more than that, or has been printed line by line. If not `ok`, the command exits with `exit_code`."""

    data: Any
    text: str = ""
    ok: bool = True
    result: str = ""
    exit_code: int = 1


def print_line(text: str) -> None:
    """Prints a line of progress, unless the command is to be quiet."""
    if "SHARDWISE_QUIET" not in os.environ:
        print_answer(text)


def print_answer(text: str) -> None:
    """Prints a line and flushes it. After a broken pipe (`| head`), this and all later lines are dropped."""
    try:
        print(CLEAR + text if sys.stdout.isatty() else text, flush=True)
    except OSError:
        # Replaces the file descriptor, because the buffered output would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def quietly() -> Iterator[None]:
    """Drops the lines of progress, those of workers too."""
    os.environ["SHARDWISE_QUIET"] = "1"
    try:
        yield
    finally:
        del os.environ["SHARDWISE_QUIET"]


@contextmanager
def elapsed_shown(name: str) -> Iterator[None]:
    """On a terminal, shows from two seconds on how long a command has been at work."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        yield
        return
    begin = time.monotonic()
    # By a signal, not a thread: commands fork. The cursor stays at the line's begin, so that the next line replaces it.
    show = lambda *_: os.write(2, f"{CLEAR}{name}: {time.monotonic() - begin:.0f} s\r".encode())  # noqa: E731
    previous = signal.signal(signal.SIGALRM, show)
    signal.setitimer(signal.ITIMER_REAL, 2.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        os.write(2, CLEAR.encode())


def name_process(name: str) -> None:
    """Names this process in `ps` and `top`, where launcher, fork server and ranks would look alike."""
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(name)


def pluralize(count: int, noun: str) -> str:
    """Returns `1 process`, `2 processes`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def format_count(number: float) -> str:
    """Returns three significant digits and a unit: `2.31M`, `70B`."""
    for size, unit in ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_number(number: float) -> str:
    """Returns three significant digits, or all before the point: `0.123`, `49.9`, `3,033`."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """Returns `12.3 ms`, `4.56 s`, `7:08 min`, `1:02:03 h` or `9.5 days`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{seconds / 86400:,.1f} days"
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def format_step(seconds: float) -> str:
    """Returns the time of a step, which is compared with others': up to 10 minutes in seconds."""
    return f"{seconds:.1f} s" if 60 <= seconds < 600 else format_seconds(seconds)


def signal_name(number: int) -> str:
    name = signal.Signals(number).name
    return f"Ctrl-C ({name})" if number == signal.SIGINT else name


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 3` or `ranks 0, 1 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def make_table(title: str, columns: Sequence[str], numbers: bool = False) -> Any:
    """Returns a table of rich that cuts nothing off; on a narrow terminal without lines, which take much of its width.
    `numbers`: aligned at the right, below headers that may be shortened."""
    from rich import box, console, table  # only a few commands need it

    is_narrow = (width := console.Console().width) < 80
    made = table.Table(title=title, collapse_padding=width < 100, box=None if is_narrow else box.HEAVY_HEAD)
    for column in columns:
        words = [word[:5] + "." if is_narrow and numbers and len(word) > 8 else word for word in column.split(" ")]
        made.add_column(" ".join(words), justify="right" if numbers else "left", overflow="fold")
    return made


def fit_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Returns the rows of a table as lines. If the terminal is too narrow, rows become columns, as many as fit."""
    lines, width = align_columns(rows, left), shutil.get_terminal_size((0, 0)).columns - 2  # for an indent
    if width < 0 or max(map(len, lines)) <= width:
        return lines
    for count in range(len(rows) - 1, 0, -1):
        parts = [rows[first : first + count] for first in range(1, len(rows), count)]
        lines = [line for part in parts for line in align_columns([*zip(rows[0], *part, strict=True)], left=(0,))]
        if max(map(len, lines)) <= width:
            break
    return lines


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Returns the rows of a table as lines; the columns `left` are left-aligned."""
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if index in left else cell.rjust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def fill_in(template: Path, values: dict[str, Any]) -> str:
    """Returns the text of a Jinja template."""
    import jinja2  # only a few commands need it

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"count": format_count, "number": format_number, "seconds": format_seconds}
    environment.filters["plural"] = lambda noun, number: pluralize(number, noun)
    return environment.from_string(template.read_text(encoding="utf-8")).render(values).rstrip("\n")
