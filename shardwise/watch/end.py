"""What is said and written when a run has ended: where its time went, in a table, and the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwise.watch.goodput import goodput
from shardwise.watch.page import write_report
from shardwise.watch.read import PARTS, Run
from shardwise.watch.state import label, per_rank, words

RANKS = 8  # that a table shows; of more, those that stand out


def at_end(folder: Path, say: Callable[[str], None]) -> None:
    """Never raises: a run that is finished is finished, whatever becomes of its report."""
    try:
        run = Run(folder)
        for line in [*table(run), *words(run, goodput(run))]:
            say(line)
        say(f"report: {write_report(folder)}")
    except Exception as error:  # noqa: BLE001
        say(f"no report could be made ({type(error).__name__}: {error}); try: shardwise report {folder}")


def table(run: Run) -> list[str]:
    """Milliseconds of a step by rank and by what they went to."""
    times = 1e3 * per_rank(run)
    if not times.size:
        return []
    shown = [place for place in range(len(PARTS)) if times[place].max() >= 0.005 * times.sum(0).max()]
    heads = ["rank", *(label(*PARTS[place]) for place in shown), "GiB"]
    memory = run.memory.get("peak", [])
    rows = [
        [name, *(f"{value:.1f}" for value in column), f"{memory[rank]:.2f}" if rank < len(memory) else ""]
        for name, rank, column in _ranks(times[shown])
    ]
    wide = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, wide, strict=True)) for row in [heads, *rows]]
    return ["where a step's time went, in ms:", *(f"  {line}" for line in lines)]


def _ranks(times: np.ndarray) -> list[tuple[str, int, np.ndarray]]:
    """All of few ranks; of many those whose first part, computing, took least, middling and longest."""
    count = times.shape[1]
    if count <= RANKS:
        return [(str(rank), rank, times[:, rank]) for rank in range(count)]
    order = np.argsort(times[0], kind="stable").tolist()
    picked = [order[0], order[count // 2], *order[-3:]]
    return [(str(rank), rank, times[:, rank]) for rank in dict.fromkeys(picked)]
