"""Compares runs: job differences, loss over samples and over time, throughput."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from shardwise.console import format_seconds
from shardwise.errors import JobError
from shardwise.metrics.trackers import flatten
from shardwise.watch.page_data import recent_median
from shardwise.watch.run_data import RunData, bin_means, bin_starts, goodput, to_json_list

MAX_POINTS = 400
HEADERS = (
    "run", "status", "layout", "steps", "samples", "loss", "validation loss", "step time", "throughput", "goodput",
)  # fmt: skip


def compare(paths: list[Path]) -> dict[str, Any]:
    """Returns the comparison as one JSON value, for the page and the terminal."""
    if len(paths) < 2:
        raise JobError("compare needs at least two run folders.")
    runs = [RunData(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    rows = [[name, *_row(run)] for name, run in zip(names, runs, strict=True)]
    curves = [{"name": name, **_curves(run)} for name, run in zip(names, runs, strict=True)]
    return {"runs": curves, "headers": list(HEADERS), "rows": rows, "differences": differences(runs)}


def _row(run: RunData) -> list[str]:
    loss, validations = recent_median(run.column("loss"), 10), run.events_of_kind("validation")
    validation_loss = validations[-1].get("loss") if validations else None
    speed = recent_median(run.column("tokens_per_s"))
    return [
        run.status, str(run.plan.get("layout", "")), str(len(run.steps)), str(run.last_record.get("samples", 0)),
        _format_number(loss, ".4f"), _format_number(validation_loss, ".4f"),
        format_seconds(recent_median(run.column("seconds"))) if run.steps else "",
        f"{_format_number(speed, ',.0f')} {run.unit}/s" if run.steps else "",
        f"{100 * goodput(run).share:.0f}%",
    ]  # fmt: skip


def _format_number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) and np.isfinite(value) else ""


def _curves(run: RunData) -> dict[str, Any]:
    starts = bin_starts(len(run.steps), MAX_POINTS)
    time = run.column("time")
    return {
        "samples": to_json_list(run.column("samples")[starts], 9),
        "hours": to_json_list((time[starts] - time[:1]) / 3600, 7),
        "loss": to_json_list(bin_means(run.column("loss"), starts)),
        "tokens_per_s": to_json_list(bin_means(run.column("tokens_per_s"), starts)),
    }


def differences(runs: list[RunData]) -> list[list[str]]:
    """Returns a row per job key that differs: the key, then its value in each run."""
    values = [flatten(run.job.model_dump()) for run in runs]
    keys = sorted({key for job in values for key in job} - {"run.folder"})
    rows = [[key, *(str(job.get(key, "")) for job in values)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def tables(comparison: dict[str, Any]) -> list[Table]:
    names = [escape(run["name"]) for run in comparison["runs"]]
    overview = Table("", *names, title="runs compared")
    for index, header in enumerate(HEADERS[1:], start=1):
        overview.add_row(header, *(escape(row[index]) for row in comparison["rows"]))
    jobs = Table("key", *names, title="job differences")
    for row in comparison["differences"]:
        jobs.add_row(*map(escape, row))
    curves = Table("samples", *names, title="loss over samples")
    sample_counts = sorted({count for run in comparison["runs"] for count in run["samples"] if count is not None})
    for count in [sample_counts[n] for n in bin_starts(len(sample_counts), 10)]:
        values = (dict(zip(run["samples"], run["loss"])).get(count) for run in comparison["runs"])
        curves.add_row(f"{count:,.0f}", *(_format_number(value, ".4f") for value in values))
    return [overview, *([jobs] if comparison["differences"] else []), *([curves] if sample_counts else [])]
