"""The commands that show runs: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwise.console import print_line
from shardwise.errors import DataError

RunArgument = Annotated[Path, typer.Argument(help="A run folder.")]


@contextmanager
def _file_errors_as_data_errors(*runs: Path) -> Iterator[None]:
    """Files of a run are written by us, but anybody may have changed them since."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        names = ", ".join(map(str, runs))
        raise DataError(f"{names}: a file there holds what no run writes ({type(error).__name__}: {error}).") from None


def watch(
    run: Annotated[Path | None, typer.Argument(help="A run folder; without it, all below runs/.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.")] = 8080,
    host: Annotated[str, typer.Option(help="The address to serve on; any but this machine's own can be reached.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Serves a live page of a run, or of all runs, on this machine."""
    from shardwise.watch.serve import serve_runs as serve

    serve(run, port, host, print_line)


def report(run: RunArgument) -> None:
    """Writes the page of a run as one file, report.html in its folder."""
    from shardwise.watch.report_page import write_report

    with _file_errors_as_data_errors(run):
        print_line(str(write_report(run)))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    html: Annotated[Path | None, typer.Option(help="Writes a page with curves to this file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Lays runs side by side: what their jobs differ in, loss over samples and over time, throughput."""
    from shardwise.watch import compare
    from shardwise.watch.report_page import write_page

    with _file_errors_as_data_errors(*runs):
        comparison = compare.compare(runs)
        if html is not None:
            write_page(comparison, "Runs compared", html)
        if as_json:
            print_line(json.dumps(comparison))
        else:
            Console().print(*compare.tables(comparison))


def trace(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Without it: trace.json in the run folder.")] = None,
) -> None:
    """Writes a trace for Perfetto or chrome://tracing, all ranks on one clock."""
    from shardwise.watch.chrome_trace import write_trace

    with _file_errors_as_data_errors(run):
        path, events = write_trace(run, out)
    print_line(f"{path}: {events:,} events; open it at ui.perfetto.dev or chrome://tracing")


COMMANDS = (watch, report, compare, trace)
