"""Terminal output: printing lines and formatting counts, times, signals and ranks."""

import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def print_line(text: str) -> None:
    """Prints a line and flushes it. After a broken pipe (`| head`), this and all later lines are dropped."""
    try:
        print(text, flush=True)
    except OSError:
        # Replaces the file descriptor, because the buffered output would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def format_seconds(seconds: float) -> str:
    """Returns `12.3 ms`, `4.56 s`, `7:08 min` or `1:02:03`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"


def signal_name(number: int) -> str:
    name = signal.Signals(number).name
    return f"Ctrl-C ({name})" if number == signal.SIGINT else name


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 3` or `ranks 0, 1 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


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
    environment.filters |= {"count": format_count, "plural": lambda noun, number: pluralize(number, noun)}
    return environment.from_string(template.read_text(encoding="utf-8")).render(values).rstrip("\n")
