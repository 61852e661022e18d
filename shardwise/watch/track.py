"""The metrics of a run where a team already looks: `track` in the job.

    csv          metrics.csv in the run folder
    prometheus   metrics.prom in the run folder, for the text file collector of a node's exporter; once a second
    tensorboard  the folder tensorboard in the run folder; needs the package tensorboard
    wandb        a run of Weights & Biases; needs the package wandb and an account, or its offline mode

`metrics.jsonl` is there in any case. What goes wrong here ends the tracking, not the run.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.job import Job
from shardwise.watch.read import SCALARS
from shardwise.watch.rows import AXES, OWN

COLUMNS = (
    "step", *SCALARS, "data_wait", *(f"spent.{part}" for part in (*OWN, "other")), *(f"waited.{axis}" for axis in AXES)
)  # fmt: skip
Send = Callable[[dict[str, Any]], None]


def check_tracker(name: str) -> None:
    """Raises where what a tracker needs is not installed: before the run starts."""
    package = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise JobError(
            f'track = "{name}" needs the package {package}, which is not installed; install it (pip install {package}) '
            'or use track = "csv" or "prometheus", which need nothing.'
        )


def flat(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, nested ones with a dot between their names."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict) and key != "slowest":
            found |= {f"{key}.{name}": one for name, one in flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = value
    return found


class Tracker:
    """Sends each record on. `tell`: who is told, once, that it no longer does."""

    def __init__(self, job: Job, folder: Path, tell: Callable[[str, str], None]):
        self.job, self.folder, self.tell = job, folder, tell
        self.send: Send | None = None
        self.broken = not job.track

    def __call__(self, record: dict[str, Any]) -> None:
        if self.broken:
            return
        try:
            if self.send is None:
                make: dict[str, Callable[[Job, Path], Send]] = {
                    "csv": Csv,
                    "prometheus": Prometheus,
                    "tensorboard": _tensorboard,
                    "wandb": _wandb,
                }
                self.send = make[self.job.track](self.job, self.folder)
            self.send(record)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self.broken = True
            self.tell("tracking", f"{self.job.track} gets no more metrics: {type(error).__name__}: {error}")


class Csv:
    def __init__(self, job: Job, folder: Path):
        self.path, self.source, self.last = folder / "metrics.csv", folder / "metrics.jsonl", -1

    def __call__(self, record: dict[str, Any]) -> None:
        if record["step"] != self.last + 1 or not self.path.exists():
            self._anew()  # the first one, or the run went back
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerow(flat(record))
        self.last = record["step"]

    def _anew(self) -> None:
        with self.path.open("w", newline="") as file, self.source.open() as lines:
            out = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            out.writeheader()
            for line in lines:
                if line.endswith("\n"):
                    out.writerow(flat(json.loads(line)))


class Prometheus:
    def __init__(self, job: Job, folder: Path):
        self.path, self.total, self.next = folder / "metrics.prom", job.total_steps, 0.0
        self.run = re.sub(r'["\\\n]', "_", folder.resolve().name)

    def __call__(self, record: dict[str, Any]) -> None:
        if time.monotonic() < self.next and record["step"] < self.total:
            return
        self.next = time.monotonic() + 1.0
        between = self.path.with_suffix(".between")
        between.write_text(self.text(record))
        os.replace(between, self.path)

    def text(self, record: dict[str, Any]) -> str:
        lines: list[str] = []
        for key, value in flat(record).items():
            name, _, part = key.partition(".")
            kind = f"# TYPE shardwise_{name} gauge"
            lines += [] if kind in lines else [kind]
            label = f',part="{part}"' if part else ""
            lines.append(f'shardwise_{name}{{run="{self.run}"{label}}} {value}')
        return "\n".join(lines) + "\n"


def _tensorboard(job: Job, folder: Path) -> Send:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]

    def send(record: dict[str, Any]) -> None:
        for name, value in flat(record).items():
            if name not in ("step", "time"):
                writer.add_scalar(name.replace(".", "/"), value, record["step"])  # type: ignore[no-untyped-call]
        if record["step"] == job.total_steps:
            writer.close()  # type: ignore[no-untyped-call]

    return send


def _wandb(job: Job, folder: Path) -> Send:
    import wandb

    name = folder.resolve().name
    run = wandb.init(project="shardwise", id=name, name=name, dir=str(folder), config=job.model_dump(), resume="allow")

    def send(record: dict[str, Any]) -> None:
        values = {key.replace(".", "/"): value for key, value in flat(record).items() if key != "step"}
        run.log(values, step=record["step"])
        if record["step"] == job.total_steps:
            run.finish()

    return send
