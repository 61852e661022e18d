"""Prints the step time breakdown at the end of a run and writes its report."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwise.watch.goodput import goodput
from shardwise.watch.page_data import category_label, seconds_by_rank, summary_sentences
from shardwise.watch.report_page import write_report
from shardwise.watch.run_data import TIME_CATEGORIES, RunData

MAX_RANKS = 8  # with more ranks, the table shows the fastest, the median and the three slowest


def print_end_of_run(folder: Path, say: Callable[[str], None]) -> None:
    """Prints the time table and the summary, and writes report.html. Never raises: the run itself has ended."""
    try:
        run = RunData(folder)
        for line in [*time_table(run), *summary_sentences(run, goodput(run))]:
            say(line)
        say(f"report: {write_report(folder)}")
    except Exception as error:  # noqa: BLE001
        say(f"could not write the report ({type(error).__name__}: {error}); try: shardwise report {folder}")


def time_table(run: RunData) -> list[str]:
    """Returns the lines of a table with milliseconds per step, by rank and time category."""
    times = 1e3 * seconds_by_rank(run)
    if not times.size:
        return []
    shown = [index for index in range(len(TIME_CATEGORIES)) if times[index].max() >= 0.005 * times.sum(0).max()]
    headers = ["rank", *(category_label(*TIME_CATEGORIES[index]) for index in shown), "GiB"]
    memory = run.memory.get("peak", [])
    rows = [
        [
            str(rank),
            *(f"{value:.1f}" for value in times[shown, rank]),
            f"{memory[rank]:.2f}" if rank < len(memory) else "",
        ]
        for rank in _select_ranks(times[shown[0]])
    ]
    widths = [max(len(row[index]) for row in [headers, *rows]) for index in range(len(headers))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]]
    return ["step time breakdown, ms:", *(f"  {line}" for line in lines)]


def _select_ranks(times: np.ndarray) -> list[int]:
    """Returns the ranks to show, chosen by their times in the first category, compute."""
    order = np.argsort(times, kind="stable").tolist()
    return [order[0], order[len(order) // 2], *order[-3:]] if len(order) > MAX_RANKS else sorted(order)
