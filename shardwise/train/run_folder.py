"""A run folder: plain files that anything can read, valid after a crash.

What lies in it:

    job.toml         the resolved job          plan.toml      layout, stages and batch arithmetic
    metrics.jsonl    one object per step       events.jsonl   what happened, in words
    checkpoints/     see `checkpoint`          errors/        what a worker said when it failed
    tokenizer.json   where it is not `bytes`   bad-records.txt  what `data.on_bad_record = "skip"` passed over
    heartbeats/      signs of life of ranks    doctor/        what was found when ranks died or hung
    skips.json       batches left out after a spike of the loss
    quarantine.json  ranks whose numbers went wrong by themselves
    ranks.jsonl      each rank's time and memory   timeline/       actions of the pipeline in some steps
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from shardwise.errors import JobError, RunError
from shardwise.files import write_text
from shardwise.job import Job, load_job

DISK_FULL_TIMEOUT = 5.0  # seconds with a full disk: a checkpoint that finds no room is removed again


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.errors = path / "errors"
        self.tokenizer = path / "tokenizer.json"
        self.bad_records_path = path / "bad-records.txt"

    @classmethod
    def create(cls, job: Job) -> RunFolder:
        """A new folder for a job: the one it names, or the next number below `runs`."""
        try:
            folder = cls(Path(job.run.folder) if job.run.folder else _next_folder(Path("runs")))
            if (folder.path / "job.toml").exists():
                raise JobError(
                    f"run.folder = {str(folder.path)!r} holds a run already; go on with `shardwise train --resume "
                    f"{folder.path}` or name another folder."
                )
            folder.path.mkdir(parents=True, exist_ok=True)
            write_text(folder.path / "job.toml", job.to_toml())
        except OSError as error:
            raise JobError(f"the run folder cannot be made: {error}.") from None
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "job.toml").is_file():
            raise JobError(f"{path} is no run folder: it has no job.toml.")
        return cls(path)

    def job(self) -> Job:
        return load_job(self.path / "job.toml")

    def write_plan(self, plan: dict[str, Any]) -> None:
        write_text(self.path / "plan.toml", tomli_w.dumps(plan))

    def log_event(self, kind: str, message: str, **facts: Any) -> None:
        _append_record(
            self.path / "events.jsonl", {"time": round(time.time(), 3), "event": kind, "message": message, **facts}
        )

    def log_metrics(self, record: dict[str, Any]) -> None:
        _append_record(self.path / "metrics.jsonl", record)

    def metrics(self) -> Iterator[dict[str, Any]]:
        return _read_records(self.path / "metrics.jsonl")

    def events(self) -> Iterator[dict[str, Any]]:
        return _read_records(self.path / "events.jsonl")

    def discard_after(self, step: int) -> None:
        """Drops metrics of steps that will be taken again, so that each step stands once; they stand in order."""
        for name in ("metrics.jsonl", "ranks.jsonl"):
            path, kept = self.path / name, 0
            for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
                if (record := _parse_record(line.decode(errors="replace"))) is not None and record.get(
                    "step", 0
                ) > step:
                    os.truncate(path, kept)
                    break
                kept += len(line)

    def skipped_batches(self) -> list[tuple[int, int]]:
        """Batches that the run leaves out: from which step on, and how many."""
        path = self.path / "skips.json"
        return [(step, count) for step, count in json.loads(path.read_text())] if path.exists() else []

    def add_skip(self, step: int, count: int) -> None:
        write_text(self.path / "skips.json", json.dumps([*self.skipped_batches(), (step, count)]))

    def write_error(self, rank: int, record: dict[str, Any]) -> None:
        self.errors.mkdir(parents=True, exist_ok=True)
        write_text(self.errors / f"rank-{rank}.json", json.dumps(record))

    def error_records(self) -> list[dict[str, Any]]:
        records = (record for path in self.errors.glob("rank-*.json") for record in _read_records(path))
        return sorted(records, key=lambda record: record["time_ns"])

    def clear_errors(self) -> None:
        for path in self.errors.glob("rank-*.json"):
            path.unlink()


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    """All whole records; a line that a crash cut short is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if (record := _parse_record(line)) is not None:
            yield record


def _parse_record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _append_record(path: Path, record: dict[str, Any]) -> None:
    deadline = time.monotonic() + DISK_FULL_TIMEOUT
    while True:
        try:
            with open(path, "ab+") as file:
                ends_mid_line = file.tell() > 0 and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n"
                file.write((b"\n" if ends_mid_line else b"") + json.dumps(record).encode() + b"\n")
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise RunError(f"{path} cannot be written: {error}.") from None
            time.sleep(0.05)


def _next_folder(parent: Path) -> Path:
    numbers = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
    return parent / f"{max(numbers, default=0) + 1:04d}"
