"""A run as a trace for Perfetto or chrome://tracing: all ranks on the clock of rank 0, a row each.

A rank's step is a box, and below it boxes for what its time went to, one after the other: their lengths are measured,
their order within a step is not. Steps whose pipeline was recorded have its actions too, at the very times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.files import demand_folder, write_text
from shardwise.watch.read import PARTS, Run, timelines
from shardwise.watch.state import label

STEP, PART, ACTION = 0, 1, 2  # rows of a rank
NAMES = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}


def write_trace(folder: Path, out: Path | None) -> tuple[Path, int]:
    """Writes the trace; returns where, and how many boxes it has."""
    run, path = Run(folder), out or folder / "trace.json"
    demand_folder(path)
    if not run.spent:
        raise JobError(f"{folder} has no steps of ranks to draw: its ranks.jsonl is missing or empty.")
    boxes = list(_boxes(run))
    origin = min(float(starts.min()) for starts in run.starts)
    for box in boxes:
        if "ts" in box:
            box["ts"] = round(1e6 * (box["ts"] - origin), 1)
    write_text(path, json.dumps({"traceEvents": boxes, "displayTimeUnit": "ms"}))
    return path, len(boxes)


def _boxes(run: Run) -> Iterator[dict[str, Any]]:
    for rank in range(run.world):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for row, name in ((STEP, "steps"), (PART, "where the time went"), (ACTION, "pipeline")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
    for (last, steps), starts, spent in zip(run.lines, run.starts, run.spent, strict=True):
        name = f"step {last}" if steps == 1 else f"steps {last - steps + 1} to {last}"
        for rank, start in enumerate(starts.tolist()):
            seconds = (spent[:, rank] * steps).tolist()
            yield _box(name, rank, STEP, start, sum(seconds))
            for part, length in zip(PARTS, seconds, strict=True):
                if length > 0:
                    yield _box(label(*part), rank, PART, start, length)
                    start += length
    for step, ranks in timelines(run.path).items():
        for rank, actions in ranks.items():
            for kind, stage, micro_batch, begin, end in actions:
                args = {"stage": stage, "micro_batch": micro_batch, "step": step}
                yield _box(f"{NAMES.get(kind, kind)} {micro_batch}", rank, ACTION, begin, end - begin, args)


def _box(
    name: str, rank: int, row: int, start: float, seconds: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    length = round(1e6 * seconds, 1)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": length, "args": args or {}}
