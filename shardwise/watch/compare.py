"""Runs side by side: what their jobs differ in, loss over samples and over time, throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from shardwise.errors import JobError
from shardwise.watch.goodput import goodput
from shardwise.watch.read import Run, listed, means, thin, unit_of
from shardwise.watch.state import recent, seconds_text

POINTS = 400
HEADS = ("run", "status", "layout", "steps", "samples", "loss", "validation", "step time", "per second", "goodput")


def compare(paths: list[Path]) -> dict[str, Any]:
    """For the page and the terminal."""
    if len(paths) < 2:
        raise JobError("there is nothing to compare one run with; name two run folders or more.")
    runs = [Run(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    rows = [[name, *_row(run)] for name, run in zip(names, runs, strict=True)]
    curves = [{"name": name, **_curves(run)} for name, run in zip(names, runs, strict=True)]
    return {"runs": curves, "heads": list(HEADS), "rows": rows, "differences": differences(runs)}


def _row(run: Run) -> list[str]:
    loss, held = recent(run.column("loss"), 10), run.of_kind("validation")
    checked = held[-1].get("loss") if held else None
    speed = recent(run.column("tokens_per_s"))
    return [
        run.status, str(run.plan.get("layout", "")), str(len(run.steps)), str(run.last.get("samples", 0)),
        _number(loss, ".4f"), _number(checked, ".4f"), seconds_text(recent(run.column("seconds"))) if run.steps else "",
        f"{_number(speed, ',.0f')} {unit_of(run.job)}" if run.steps else "", f"{100 * goodput(run).share:.0f}%",
    ]  # fmt: skip


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) and np.isfinite(value) else ""


def _curves(run: Run) -> dict[str, Any]:
    begins = thin(len(run.steps), POINTS)
    if not len(begins):
        return {"samples": [], "hours": [], "loss": [], "tokens_per_s": []}
    time = run.column("time")
    return {
        "samples": listed(run.column("samples")[begins], 9), "hours": listed((time[begins] - time[0]) / 3600, 7),
        "loss": listed(means(run.column("loss"), begins)),
        "tokens_per_s": listed(means(run.column("tokens_per_s"), begins)),
    }  # fmt: skip


def differences(runs: list[Run]) -> list[list[str]]:
    """Keys of the jobs that are not alike, with the value of each."""
    values = [_flat(run.job.model_dump()) for run in runs]
    keys = sorted({key for one in values for key in one} - {"run.folder"})
    rows = [[key, *(str(one.get(key, "")) for one in values)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    """For a terminal: a column for each run."""
    names = [escape(run["name"]) for run in found["runs"]]
    whole = Table("", *names, title="runs side by side")
    for place, head in enumerate(HEADS[1:], start=1):
        whole.add_row(head, *(escape(row[place]) for row in found["rows"]))
    jobs = Table("key", *names, title="what the jobs differ in")
    for row in found["differences"]:
        jobs.add_row(*map(escape, row))
    curves = Table("samples", *names, title="loss over samples")
    places = sorted({place for run in found["runs"] for place in run["samples"] if place is not None})
    for place in [places[n] for n in thin(len(places), 10)]:
        values = (dict(zip(run["samples"], run["loss"])).get(place) for run in found["runs"])
        curves.add_row(f"{place:,.0f}", *(_number(value, ".4f") for value in values))
    return [whole, *([jobs] if found["differences"] else []), *([curves] if places else [])]
