"""A run folder as numbers, read again and again while the run goes on: each time only what is new.

Whatever a line holds, reading goes on: lines that are cut short, are no JSON or lack a field are passed over.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.watch.rows import AXES, HELD, OWN

SCALARS = (
    "samples", "loss", "grad_norm", "lr", "tokens_per_s", "seconds", "flops_per_s", "memory_gib", "time",
    "utilisation", "loss_scale", "gradient_ratio", "expert_imbalance", "expert_dropped",
)  # fmt: skip
ALIVE = 15.0  # seconds since a rank's last sign of life, after which a run is not taken to be running
Record = dict[str, Any]


class Log:
    """A file of JSON lines that grows. Where it was replaced, or is shorter than it was, it is read anew."""

    def __init__(self, path: Path, reset: Callable[[], None], add: Callable[[Record], None]):
        self.path, self.reset, self.add = path, reset, add
        self.place, self.file = 0, 0

    def read(self) -> None:
        try:
            with self.path.open("rb") as file:
                size, number = file.seek(0, 2), self.path.stat().st_ino
                if number != self.file or size < self.place:
                    self.file, self.place = number, 0
                    self.reset()
                file.seek(self.place)
                text = file.read(size - self.place)
        except OSError:
            return
        whole = text.rfind(b"\n") + 1  # the rest is being written
        self.place += whole
        for line in text[:whole].splitlines():
            try:
                record = json.loads(line, parse_constant=str)
                if isinstance(record, dict):
                    self.add(record)
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
                continue


class Run:
    """What is known of a run."""

    def __init__(self, path: Path):
        if not (path / "job.toml").is_file():
            raise JobError(f"{path} is no run folder: it has no job.toml.")
        self.path, self.made = path, ""
        self._open()
        self._no_metrics()
        self._no_ranks()
        self._no_events()
        self.logs = [
            Log(path / "metrics.jsonl", self._no_metrics, self._metric),
            Log(path / "ranks.jsonl", self._no_ranks, self._rank),
            Log(path / "events.jsonl", self._no_events, self.events_add),
        ]
        self.read()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def _open(self) -> None:
        """Job and plan; read again when the run goes on with others."""
        files = [self.path / name for name in ("job.toml", "plan.toml")]
        made = "-".join(str(file.stat().st_mtime_ns) for file in files if file.is_file())
        if made != self.made:
            self.job, self.plan, self.made = load_job(self.path / "job.toml"), plan_of(self.path), made

    def read(self) -> None:
        self._open()
        for log in self.logs:
            log.read()

    # Steps

    def _no_metrics(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {name: array("d") for name in SCALARS}
        self.last: Record = {}
        self.losses_as_text: list[tuple[int, str]] = []

    def _metric(self, record: Record) -> None:
        step = int(record["step"])
        if self.steps and step <= self.steps[-1]:
            return
        values = {name: number(record.get(name)) for name in SCALARS}
        self.steps.append(step)
        for name, value in values.items():
            self.columns[name].append(value)
        if isinstance(record.get("loss"), str):
            self.losses_as_text.append((step, record["loss"]))
        self.last = record

    def column(self, name: str) -> np.ndarray:
        return np.frombuffer(self.columns[name], dtype=np.float64) if self.steps else np.zeros(0)

    # Ranks

    def _no_ranks(self) -> None:
        self.world = int(self.plan.get("world", 0) or 0)
        self.lines: list[tuple[int, int]] = []
        """Last step, and how many, of each line."""
        self.spent: list[np.ndarray] = []
        """Of each line: seconds of a step by part of `PARTS` and rank."""
        self.starts: list[np.ndarray] = []
        self.memory: Record = {}

    def _rank(self, record: Record) -> None:
        seconds = np.array(record["seconds"], dtype=np.float64)
        steps, parts = int(record["steps"]), np.zeros((len(PARTS), seconds.size))
        if self.spent and seconds.size != self.spent[-1].shape[1]:
            self._no_ranks()  # the run went on in another layout
        self.world = seconds.size
        for place, (kind, name) in enumerate(PARTS[:-1]):
            if name in record[kind]:
                parts[place] = record[kind][name]
        parts[-1] = seconds - parts.sum(0)
        self.lines.append((int(record["step"]), steps))
        self.spent.append(parts / steps)
        self.starts.append(np.array(record["start"], dtype=np.float64))
        peak, held = record["memory_gib"], record["held_gib"]
        self.memory = {"peak": peak, **{name: held[name] for name in HELD if name in held}}

    # Events

    def _no_events(self) -> None:
        self.events: list[Record] = []

    def events_add(self, record: Record) -> None:
        self.events.append({**record, "time": float(record["time"]), "event": str(record["event"])})

    def of_kind(self, *kinds: str) -> list[Record]:
        return [event for event in self.events if event["event"] in kinds]

    @property
    def status(self) -> str:
        """In a word."""
        last = self.events[-1]["event"] if self.events else ""
        if last in ("finished", "stopped"):
            return str(last)
        beats = [file.stat().st_mtime for file in (self.path / "beats").glob("rank-*.json")]
        return "running" if beats and time.time() - max(beats) < ALIVE else "not finished"


PARTS = (*(("spent", name) for name in OWN), *(("waited", axis) for axis in AXES), ("spent", "other"))


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def plan_of(path: Path) -> Record:
    try:
        found = tomllib.loads((path / "plan.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found.get("predicted", {}), dict) else {}


def timelines(path: Path) -> dict[int, dict[int, list[list[Any]]]]:
    """By step, and by rank, the actions that were recorded of its pipeline: kind, stage, micro-batch, begin, end."""
    found: dict[int, dict[int, list[list[Any]]]] = defaultdict(dict)
    for file in sorted((path / "timeline").glob("rank-*.jsonl")):
        rank = file.stem.removeprefix("rank-")
        if rank.isdigit():
            Log(file, lambda: None, lambda r, n=int(rank): found[int(r["step"])].update({n: r["actions"]})).read()  # type: ignore[misc]
    return dict(sorted(found.items()))


def unit_of(job: Job) -> str:
    return job.model.unit


def thin(count: int, most: int) -> np.ndarray:
    """Where each of at most `most` equal pieces of a row begins."""
    return np.unique(np.linspace(0, count, min(count, most), endpoint=False).astype(int))


def even(steps: list[int], most: int) -> np.ndarray:
    """The same of rows whose places are steps, by these."""
    if len(steps) <= most:
        return np.arange(len(steps))
    return np.unique(np.searchsorted(steps, np.linspace(steps[0], steps[-1], most, endpoint=False)))


def means(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Of each piece the mean of what is a number."""
    there = np.isfinite(values)
    sums, counts = np.add.reduceat(np.where(there, values, 0.0), begins), np.add.reduceat(there, begins)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def listed(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """For JSON: so many digits that count; None for what is no number."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
