"""The commands watch, report, compare and trace: parse, call, print."""

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from shardwise.console import print_line
from shardwise.files import malformed_as_data_error, require_parent_folder, write_text

RunArgument = Annotated[Path, Argument(help="Run folder.")]


def watch(
    run: Annotated[Path | None, Argument(help="Run folder; without it, the page lists all runs in runs/.")] = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8080,
    host: Annotated[
        str, Option(help="Address to bind; anything but a loopback address exposes the page to the network.")
    ] = "127.0.0.1",
) -> None:
    """Serves a live page of a run, or of all runs."""
    from shardwise.watch.serve import serve_runs

    serve_runs(run, port, host, print_line)


def report(run: RunArgument) -> None:
    """Writes the report of a run as one self-contained page: report.html in the run folder."""
    from shardwise.watch.report_page import write_report

    with malformed_as_data_error(run):
        print_line(str(write_report(run)))


def compare(
    runs: Annotated[list[Path], Argument(help="Two or more run folders.")],
    html: Annotated[Path | None, Option(help="Also write an HTML page with curves to this file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compares runs: job differences, loss over samples and over time, throughput."""
    from shardwise.watch import compare
    from shardwise.watch.report_page import render_page

    with malformed_as_data_error(*runs):
        comparison = compare.compare(runs)
        if html is not None:
            require_parent_folder(html)
            write_text(html, render_page(comparison, "Runs compared"))
        if as_json:
            print_line(json.dumps(comparison))
        else:
            Console().print(*compare.tables(comparison))


def trace(
    run: RunArgument,
    out: Annotated[
        Path | None, Option("--out", "-o", help="File to write; default: trace.json in the run folder.")
    ] = None,
) -> None:
    """Writes a trace of all ranks for Perfetto or chrome://tracing."""
    from shardwise.watch.report_page import write_trace

    with malformed_as_data_error(run):
        path, events = write_trace(run, out)
    print_line(f"{path}: {events:,} events; open it at ui.perfetto.dev or chrome://tracing")


COMMANDS = (watch, report, compare, trace)
