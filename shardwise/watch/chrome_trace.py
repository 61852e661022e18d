"""Writes a run as a trace for Perfetto or chrome://tracing, with all ranks on the clock of rank 0.

Each rank has a row of steps and, below it, a row that breaks each step down by cause. The durations in the breakdown
are measured; their order within a step is not. Steps with a recorded pipeline timeline also show its actions, at the
measured times.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.files import require_parent_folder, write_text
from shardwise.watch.page_data import category_label
from shardwise.watch.run_data import TIME_CATEGORIES, RunData

STEP_ROW, CATEGORY_ROW, ACTION_ROW = 0, 1, 2  # a thread id of the trace each
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward (input)", "W": "backward (weight)"}


def write_trace(folder: Path, out: Path | None) -> tuple[Path, int]:
    """Writes the trace. Returns its path and its number of events."""
    run = RunData(folder)
    path = out or run.path / "trace.json"
    require_parent_folder(path)
    if not run.category_seconds:
        raise JobError(f"{folder} has no per-rank step times to trace: its ranks.jsonl is missing or empty.")
    events = list(_trace_events(run))
    origin = min(float(starts.min()) for starts in run.starts)
    for event in events:
        if "ts" in event:
            event["ts"] = round(1e6 * (event["ts"] - origin), 1)
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path, len(events)


def _trace_events(run: RunData) -> Iterator[dict[str, Any]]:
    for rank in range(run.world):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for row, name in ((STEP_ROW, "steps"), (CATEGORY_ROW, "time breakdown"), (ACTION_ROW, "pipeline")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
    for (last, steps), starts, category_seconds in zip(run.line_steps, run.starts, run.category_seconds, strict=True):
        name = f"step {last}" if steps == 1 else f"steps {last - steps + 1} to {last}"
        for rank, start in enumerate(starts.tolist()):
            seconds = (category_seconds[:, rank] * steps).tolist()
            yield _complete_event(name, rank, STEP_ROW, start, sum(seconds))
            for category, length in zip(TIME_CATEGORIES, seconds, strict=True):
                if length > 0:
                    yield _complete_event(category_label(*category), rank, CATEGORY_ROW, start, length)
                    start += length
    for step, ranks in run.timelines().items():
        for rank, actions in ranks.items():
            for kind, stage, micro_batch, begin, end in actions:
                args = {"stage": stage, "micro_batch": micro_batch, "step": step}
                name = f"{ACTION_NAMES.get(kind, kind)} {micro_batch}"
                yield _complete_event(name, rank, ACTION_ROW, begin, end - begin, **args)


def _complete_event(name: str, rank: int, row: int, start: float, seconds: float, **args: int) -> dict[str, Any]:
    length = round(1e6 * seconds, 1)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": length, "args": args}
