"""What is said and written when a run has ended: where its time went, in a table, and the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwise.watch.goodput import goodput
from shardwise.watch.page_data import category_label, seconds_by_rank, summary_sentences
from shardwise.watch.report_page import write_report
from shardwise.watch.run_data import TIME_CATEGORIES, RunData

MAX_RANKS = 8  # that a table shows; of more, those that stand out


def print_end_of_run(folder: Path, say: Callable[[str], None]) -> None:
    """Never raises: a run that is finished is finished, whatever becomes of its report."""
    try:
        run = RunData(folder)
        for line in [*time_table(run), *summary_sentences(run, goodput(run))]:
            say(line)
        say(f"report: {write_report(folder)}")
    except Exception as error:  # noqa: BLE001
        say(f"no report could be made ({type(error).__name__}: {error}); try: shardwise report {folder}")


def time_table(run: RunData) -> list[str]:
    """Milliseconds of a step by rank and by what they went to."""
    times = 1e3 * seconds_by_rank(run)
    if not times.size:
        return []
    shown = [index for index in range(len(TIME_CATEGORIES)) if times[index].max() >= 0.005 * times.sum(0).max()]
    headers = ["rank", *(category_label(*TIME_CATEGORIES[index]) for index in shown), "GiB"]
    memory = run.memory.get("peak", [])
    rows = [
        [name, *(f"{value:.1f}" for value in column), f"{memory[rank]:.2f}" if rank < len(memory) else ""]
        for name, rank, column in _select_ranks(times[shown])
    ]
    widths = [max(len(row[index]) for row in [headers, *rows]) for index in range(len(headers))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]]
    return ["step time breakdown, ms:", *(f"  {line}" for line in lines)]


def _select_ranks(times: np.ndarray) -> list[tuple[str, int, np.ndarray]]:
    """All of few ranks; of many those whose first part, computing, took least, middling and longest."""
    count = times.shape[1]
    if count <= MAX_RANKS:
        return [(str(rank), rank, times[:, rank]) for rank in range(count)]
    order = np.argsort(times[0], kind="stable").tolist()
    picked = [order[0], order[count // 2], *order[-3:]]
    return [(str(rank), rank, times[:, rank]) for rank in dict.fromkeys(picked)]
