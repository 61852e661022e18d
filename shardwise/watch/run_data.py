"""Reads a run folder into arrays, incrementally while the run is in progress; and the goodput of a run.

Lines that are truncated, are not JSON or lack a field are ignored."""

import copy
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import LayoutError, StoreError
from shardwise.files import parse_json, parse_record, parse_toml
from shardwise.job import load_job
from shardwise.layout import Layout
from shardwise.metrics.rank_metrics import GPU_SENSORS, MEMORY_KINDS, PHASES, SCALAR_METRICS, WAIT_AXES
from shardwise.train.run_folder import RunFolder
from shardwise.train.run_store import fetch_run

# Where step time goes: the fields of ranks.jsonl, then the remainder.
_FIELDS = *(("phase_seconds", name) for name in PHASES), *(("wait_seconds", axis) for axis in WAIT_AXES)
TIME_CATEGORIES = *_FIELDS, ("phase_seconds", "other")
HEARTBEAT_TIMEOUT = 15.0  # seconds without a heartbeat of any rank after which a run does not count as running
FETCH_SECONDS = 10.0  # between looks into the object store of a run
RESTARTS = ("killed", "suspended", "hung", "failed", "resumed")
LOST_TIME_CAUSE = {"rollback": "rollback", **dict.fromkeys(RESTARTS, "restart")}
END_EVENTS = ("finished", "stopped")
MAX_SILENCE = 3600.0  # seconds without a record of a run that starts or restarts
MEASURED_SECONDS = {"checkpoint": "stall_seconds", "validation": "seconds"}  # fields of these events
JsonObject = dict[str, Any]
PLAN_TYPES = {"world": int, "layout": str, "micro_batches": int, "stages": list, "order": list, "predicted": dict,
              "rejected": list, "reason": str}  # fmt: skip


class JsonLinesReader:
    """Reads the new lines of a growing JSON Lines file. Starts over if the file was replaced or truncated."""

    def __init__(self, path: Path, on_reset: Callable[[], None], on_record: Callable[[JsonObject], None]):
        self.path, self.on_reset, self.on_record = path, on_reset, on_record
        self.offset, self.version = 0, (0, 0, 0)  # bytes read; inode, size, time: an unchanged file is not opened
        on_reset()

    def read(self) -> None:
        try:
            stat = self.path.stat()
            version = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if version == self.version:
                return
            if stat.st_ino != self.version[0] or stat.st_size < self.offset:
                self.offset = 0
                self.on_reset()
            with self.path.open("rb") as file:
                file.seek(self.offset)
                text, self.version = file.read(), version
        except OSError:
            return
        complete = text.rfind(b"\n") + 1  # the rest is an unfinished line
        self.offset += complete
        for line in text[:complete].splitlines():
            if (record := parse_record(line, str)) is not None:
                with suppress(ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
                    self.on_record(record)


class RunData:
    """The job, plan, metrics, per-rank step times and events of a run. `read` picks up what is new."""

    def __init__(self, path: Path):
        self._given, self._next_fetch = path, time.monotonic() + FETCH_SECONDS
        self.path = path = RunFolder.open(path).path
        self.name = path.resolve().name
        self.config_version, self.plan = "", JsonObject()
        self._load_config()
        self.logs = [JsonLinesReader(path / "metrics.jsonl", self._reset_metrics, self._add_metrics),
                     JsonLinesReader(path / "ranks.jsonl", self._reset_ranks, self._add_rank_line),
                     JsonLinesReader(path / "events.jsonl", self._reset_events, self._add_event)]  # fmt: skip
        self.read()

    @property
    def unit(self) -> str:
        return self.job.model.throughput_unit

    @property
    def layout(self) -> Layout | None:
        """The layout of the plan; None without a valid one."""
        with suppress(LayoutError):
            return Layout.parse(self.plan.get("layout", ""))
        return None

    def _load_config(self) -> None:
        """Loads job, plan and notes, and reloads them when a resume, or the page, has changed the files."""
        files = [self.path / name for name in ("job.toml", "plan.toml", "notes.json")]
        config_version = "-".join(str(file.stat().st_mtime_ns) for file in files if file.is_file())
        if config_version != self.config_version:
            self.job, self.plan, self.config_version = load_job(files[0]), read_plan(files[1]), config_version
            self.notes = parse_notes(files[2].read_bytes() if files[2].is_file() else b"")

    def read(self) -> None:
        if self._given != self.path and time.monotonic() > self._next_fetch:
            with suppress(StoreError):  # shows what it has until the store answers again
                fetch_run(self._given)
            self._next_fetch = time.monotonic() + FETCH_SECONDS
        self._load_config()
        for log in self.logs:
            log.read()

    def _reset_metrics(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {name: array("d") for name in SCALAR_METRICS}
        self.last_record: JsonObject = {}
        self.non_finite_losses: list[tuple[int, str]] = []

    def _add_metrics(self, record: JsonObject) -> None:
        step = record["step"]
        if self.steps and step <= self.steps[-1]:
            return
        values = {name: to_float(record.get(name)) for name in SCALAR_METRICS}
        self.steps.append(step)
        for name, value in values.items():
            self.columns[name].append(value)
        if isinstance(record.get("loss"), str):
            self.non_finite_losses.append((step, record["loss"]))
        self.last_record = record

    def column(self, name: str) -> np.ndarray:
        return np.frombuffer(self.columns[name], dtype=np.float64) if self.steps else np.zeros(0)

    def _reset_ranks(self) -> None:
        self.world = int(self.plan.get("world", 0))
        self.line_steps: list[tuple[int, int]] = []  # last step and number of steps of each line
        self.category_seconds: list[np.ndarray] = []  # by line: seconds per step (`TIME_CATEGORIES`, ranks)
        self.starts: list[np.ndarray] = []
        self.line_memory: list[dict[str, np.ndarray]] = []  # by line, of each rank: GiB, the peak and by kind; sensors

    def _add_rank_line(self, record: JsonObject) -> None:
        seconds = np.array(record["seconds"], dtype=np.float64)
        steps, category_seconds = int(record["steps"]), np.zeros((len(TIME_CATEGORIES), seconds.size))
        self.world = seconds.size
        for index, (kind, name) in enumerate(TIME_CATEGORIES[:-1]):
            if name in record[kind]:
                category_seconds[index] = record[kind][name]
        category_seconds[-1] = seconds - category_seconds.sum(0)
        known = {"peak": record["memory_gib"], **record["memory_by_kind_gib"], **record}
        self.line_steps.append((record["step"], steps))
        self.category_seconds.append(category_seconds / steps)
        self.starts.append(np.array(record["start"], dtype=np.float64))
        names = [name for name in ("peak", *MEMORY_KINDS, *GPU_SENSORS) if name in known]
        self.line_memory.append({name: np.array(known[name]) for name in names})

    @property
    def memory(self) -> dict[str, list[float]]:
        """The last known GiB of each rank, the peak and by kind where it was counted, and the sensors of its GPU."""
        return {name: values.tolist() for name, values in self.line_memory[-1].items()} if self.line_memory else {}

    def segments(self) -> list[tuple[int, str, float]]:
        """Returns the parts of the run between changes of layout: the steps before it, its layout, when it began."""
        parts: list[tuple[int, str, float]] = []
        for event in self.events_of_kind("started", "resumed"):
            before, layout = event.get("step"), event.get("layout")
            if isinstance(before, int) and isinstance(layout, str):
                parts = [part for part in parts if part[0] < before]  # the steps after are taken again
                parts += [] if parts and parts[-1][1] == layout else [(before, layout, event["time"])]
        return parts or [(0, str(self.plan.get("layout", self.job.layout)), 0.0)]

    def segment(self, index: int) -> "RunData":
        """Returns one of `segments` as a run of its own, with its own plan: the ranks of two layouts do not mix."""
        parts, view = self.segments(), copy.copy(self)
        index %= len(parts)
        begin, end = parts[index][0], parts[index + 1][0] if index + 1 < len(parts) else math.inf
        kept = [n for n, (step, _) in enumerate(self.line_steps) if begin < step <= end]
        kept = [n for n in kept if self.starts[n].size == self.starts[kept[-1]].size]
        for name in ("line_steps", "category_seconds", "starts", "line_memory"):
            setattr(view, name, [getattr(self, name)[n] for n in kept])
        if len(parts) > 1:
            low, high = np.searchsorted(self.steps, [begin, end], side="right").tolist()
            view.steps, view.columns = self.steps[low:high], {key: row[low:high] for key, row in self.columns.items()}
        if index + 1 < len(parts):
            plans = [file for file in (self.path / "plans").glob("*.toml") if file.stem <= f"{parts[index][2]:.0f}"]
            view.plan = (read_plan(max(plans)) if plans else {}) or {"layout": parts[index][1]}
        view.world = view.starts[-1].size if kept else int(view.plan.get("world", 0))
        return view

    def line_bins(self, max_bins: int) -> np.ndarray:
        """Returns the first line of each of at most `max_bins` bins that span equal ranges of steps."""
        steps = [step for step, _ in self.line_steps]
        if len(steps) <= max_bins:
            return np.arange(len(steps))
        return np.unique(np.searchsorted(steps, np.linspace(steps[0], steps[-1], max_bins, endpoint=False)))

    def timelines(self) -> dict[int, dict[int, list[list[Any]]]]:
        """Returns the recorded pipeline actions by step and rank: kind, stage, micro-batch, start, end."""
        timelines: dict[int, dict[int, list[list[Any]]]] = defaultdict(dict)

        def add(rank: int, record: JsonObject) -> None:
            timelines[record["step"]][rank] = record["actions"]

        for file in sorted((self.path / "timeline").glob("rank-*.jsonl")):
            rank = file.stem.removeprefix("rank-")
            if rank.isdigit():
                JsonLinesReader(file, lambda: None, partial(add, int(rank))).read()
        return dict(sorted(timelines.items()))

    def _reset_events(self) -> None:
        self.events: list[JsonObject] = []

    def _add_event(self, record: JsonObject) -> None:
        if math.isfinite(at := to_float(record["time"])):
            self.events.append({**record, "time": at, "event": str(record["event"])})

    def events_of_kind(self, *kinds: str) -> list[JsonObject]:
        return [event for event in self.events if event["event"] in kinds]

    @property
    def status(self) -> str:
        return run_status(self.path, self.events[-1]["event"] if self.events else "")


def read_plan(path: Path) -> JsonObject:
    """Returns the values of plan.toml that have the right type; {} without a valid one."""
    with suppress(OSError, ValueError):
        plan = parse_toml(path.read_text(encoding="utf-8")).items()
        return {key: value for key, value in plan if isinstance(value, PLAN_TYPES.get(key, object))}
    return {}


def parse_notes(text: bytes) -> JsonObject:
    """Returns what a person has written about a run; empty where the JSON is not what it should be."""
    with suppress(ValueError, TypeError, LookupError, AttributeError):
        given = parse_json(text)
        return {"tags": [str(tag)[:40] for tag in given["tags"][:20]], "notes": str(given.get("notes", ""))[:20_000]}
    return {"tags": [], "notes": ""}


def run_status(path: Path, last_event: str | None) -> str:
    """Returns `finished`, `stopped`, `running` if some rank has written a heartbeat lately, or else `not finished`."""
    if last_event in END_EVENTS:
        return str(last_event)
    with suppress(OSError):
        heartbeats = (file.stat().st_mtime for file in (path / "heartbeats").glob("rank-*.json"))
        if time.time() - max(heartbeats, default=0.0) < HEARTBEAT_TIMEOUT:
            return "running"
    return "not finished"


def to_float(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def bin_starts(count: int, max_bins: int) -> np.ndarray:
    """Returns the first index of each of at most `max_bins` equal bins of `count` values."""
    return np.unique(np.linspace(0, count, min(count, max_bins), endpoint=False).astype(int))


def bin_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns the mean of the finite values of each bin, NaN for a bin without any."""
    finite = np.isfinite(values)
    sums, counts = np.add.reduceat(np.where(finite, values, 0.0), starts), np.add.reduceat(finite, starts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def to_json_list(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """Rounds to significant digits for JSON. Values that are not finite become None."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


@dataclass
class Goodput:
    wall_seconds: float = 0.0  # from the first event or step to the last, without those between stop and resume
    productive_seconds: float = 0.0
    lost_seconds: dict[str, float] = field(default_factory=dict)  # lost seconds by cause

    @property
    def share(self) -> float:
        return self.productive_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def goodput(run: RunData) -> Goodput:
    """Returns the time of productive steps over the wall time, and the lost time by cause; both add up to wall time.
    docs/explanation/measured.md defines them. Stretches too long for a running run are not wall time."""
    ends, seconds = run.column("time"), run.column("seconds")
    finite = np.isfinite(ends) & np.isfinite(seconds)
    ends, seconds = ends[finite], seconds[finite]
    if not len(ends):
        return Goodput()
    result = Goodput(lost_seconds={})

    def add_lost(cause: str, time: float) -> None:
        if time > 0:
            result.lost_seconds[cause] = result.lost_seconds.get(cause, 0.0) + time

    # The first step compiles and allocates; its time above the median of its layout is startup.
    second_layout = next((before for before, *_ in run.segments()[1:]), None)
    median = float(np.median(seconds[:second_layout] if second_layout else seconds))
    startup_seconds = max(0.0, float(seconds[0]) - median) if len(seconds) > 2 else 0.0
    add_lost("startup", startup_seconds)
    begin = min([run.events[0]["time"]] if run.events else [], default=float(ends[0] - seconds[0]))
    last = max(float(ends[-1]), run.events[-1]["time"] if run.events else 0.0)
    edges, hang_timeout = [begin, *ends.tolist()], run.job.run.hang_timeout
    starts = [*(ends - seconds).tolist(), last]
    event_index = 0
    # Each gap lies between the end of a step (or the start of the run) and the next start (or the end of the run).
    for index, (gap_begin, gap_end) in enumerate(zip(edges, starts, strict=True)):
        first = event_index
        while event_index < len(run.events) and run.events[event_index]["time"] <= gap_end + 1e-3:
            event_index += 1
        gap_events = run.events[first:event_index]
        max_silence = max(2 * hang_timeout, MAX_SILENCE if gap_events or not index else 0.0)
        gap, previous = 0.0, {"time": gap_begin, "event": ""}
        for event in [*gap_events, {"time": gap_end, "event": ""}]:
            silence = event["time"] - previous["time"] - _measured_seconds(event)
            if silence <= max_silence and previous["event"] not in END_EVENTS:  # otherwise the run was not running
                gap += max(0.0, event["time"] - previous["time"])
            previous = event
        gap = min(gap, max(0.0, gap_end - gap_begin))
        for event in gap_events:
            duration = min(gap, _measured_seconds(event))
            add_lost(event["event"], duration)
            gap -= duration
        causes = [LOST_TIME_CAUSE[event["event"]] for event in gap_events if event["event"] in LOST_TIME_CAUSE]
        add_lost("startup" if index == 0 else causes[0] if causes else "between steps", gap)
    # What the ranks measured beyond their events (snapshots, the wait for the last save) also lay between steps.
    for index, (_, cause) in enumerate(TIME_CATEGORIES):
        if cause in MEASURED_SECONDS and "between steps" in result.lost_seconds:
            measured = sum(n * line[index].mean() for (_, n), line in zip(run.line_steps, run.category_seconds))
            unnamed = measured - result.lost_seconds.get(cause, 0.0)
            add_lost(cause, moved := float(min(max(0.0, unnamed), result.lost_seconds["between steps"])))
            result.lost_seconds["between steps"] -= moved
    result.productive_seconds = float(seconds.sum()) - startup_seconds
    result.wall_seconds = result.productive_seconds + sum(result.lost_seconds.values())
    return result


def _measured_seconds(event: JsonObject) -> float:
    """The duration that an event states; 0 if it states none."""
    seconds = to_float(event.get(MEASURED_SECONDS.get(event["event"], "")))
    return seconds if seconds > 0 else 0.0
