"""Experiment trackers, chosen by the job key `tracker`: one or several (docs/how-to/watch-a-run.md). All get the
numbers of `metrics.jsonl`, which is always written. A tracker that fails is disabled; the run continues."""

import csv
import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.files import parse_record, write_text
from shardwise.job import Job
from shardwise.metrics.rank_metrics import PHASES, SCALAR_METRICS, WAIT_AXES

CSV_COLUMNS = ("step", *SCALAR_METRICS, "data_wait_seconds",
               *(f"phase_seconds.{phase}" for phase in (*PHASES, "other")),
               *(f"wait_seconds.{axis}" for axis in WAIT_AXES))  # fmt: skip
LogFn = Callable[[dict[str, Any]], None]


def check_tracker_installed(names: str | tuple[str, ...]) -> None:
    """Raises JobError if a tracker's package is missing. Called before the run starts."""
    for name in (names,) if isinstance(names, str) else names:
        if name in ("tensorboard", "wandb", "mlflow") and importlib.util.find_spec(name) is None:
            raise JobError(f'tracker = "{name}" needs the package {name}: `pip install {name}`; csv needs none.')


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by their keys, joined with dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by flattened key, without `slowest`, which is no time series."""
    values = flatten(record | {"slowest": None}).items()
    return {key: value for key, value in values if isinstance(value, int | float) and not isinstance(value, bool)}


class Tracker:
    """Logs each record to the job's trackers. If one fails, emits a `tracker_failed` event and stops logging to it."""

    def __init__(self, job: Job, folder: Path, emit_event: Callable[[str, str], None]):
        self.job, self.folder, self.emit_event = job, folder, emit_event
        self.log_fns: dict[str, LogFn | None] = dict.fromkeys(job.trackers)

    def __call__(self, record: dict[str, Any]) -> None:
        for name, log_fn in list(self.log_fns.items()):
            try:
                if log_fn is None:
                    log_fn = self.log_fns[name] = LOG_FN_FACTORIES[name](self.job, self.folder)
                log_fn(record)
            except Exception as error:  # noqa: BLE001 - a broken tracker must not end the run
                del self.log_fns[name]
                reason = f"{type(error).__name__}: {error}"
                self.emit_event("tracker_failed", f"{name} is disabled for the rest of this run: {reason}")


class CsvWriter:
    def __init__(self, job: Job, folder: Path):
        self.path, self.metrics_path, self.last_step = folder / "metrics.csv", folder / "metrics.jsonl", -1
        sets = [f".{name}" for name in (*job.validation.sets, "held_out")] if job.validation.sets else []
        metrics = "loss", "bits_per_byte" if job.model.throughput_unit == "tokens" else "accuracy"
        self.columns = (*CSV_COLUMNS, *(f"validation{name}.{metric}" for name in ("", *sets) for metric in metrics))

    def __call__(self, record: dict[str, Any]) -> None:
        if record["step"] != self.last_step + 1 or not self.path.exists():
            self._rewrite()  # the first record, or the run rolled back
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns, extrasaction="ignore").writerow(numbers_of(record))
        self.last_step = record["step"]

    def _rewrite(self) -> None:
        with self.path.open("w", newline="") as file, self.metrics_path.open() as lines:
            out = csv.DictWriter(file, self.columns, extrasaction="ignore")
            out.writeheader()
            for line in lines:
                if line.endswith("\n") and (record := parse_record(line)) is not None:
                    out.writerow(numbers_of(record))


class PrometheusWriter:
    def __init__(self, job: Job, folder: Path):
        self.path, self.total_steps, self.next_write = folder / "metrics.prom", job.total_steps, 0.0
        self.run = re.sub(r'["\\\n]', "_", folder.resolve().name)
        self.validation: dict[str, Any] = {}  # the last one, which most steps have not

    def __call__(self, record: dict[str, Any]) -> None:
        self.validation = record.get("validation", self.validation)
        if time.monotonic() < self.next_write and record["step"] < self.total_steps:
            return
        self.next_write = time.monotonic() + 1.0
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(self.render(record | {"validation": self.validation}))
        os.replace(temporary, self.path)

    def render(self, record: dict[str, Any]) -> str:
        lines: list[str] = []
        for key, value in numbers_of(record).items():
            name, _, part = key.partition(".")
            type_line = f"# TYPE shardwise_{name} gauge"
            lines += [] if type_line in lines else [type_line]
            label = f',part="{part}"' if part else ""
            lines.append(f'shardwise_{name}{{run="{self.run}"{label}}} {value}')
        return "\n".join(lines) + "\n"


def _log_numbers(job: Job, log: Callable[..., object], end: Callable[[], object]) -> LogFn:
    """Returns what passes the numbers of a record to a tracker's `log`, and calls its `end` after the last step."""

    def log_record(record: dict[str, Any]) -> None:
        values = {key.replace(".", "/"): value for key, value in numbers_of(record).items() if key != "step"}
        log(values, step=record["step"])
        if record["step"] == job.total_steps:
            end()

    return log_record


def _tensorboard(job: Job, folder: Path) -> LogFn:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _log_numbers(job, log, writer.close)


def _wandb(job: Job, folder: Path) -> LogFn:
    import wandb

    name = folder.resolve().name
    run = wandb.init(project="shardwise", id=name, name=name, dir=str(folder), config=job.model_dump(), resume="allow")
    return _log_numbers(job, run.log, run.finish)


def _mlflow(job: Job, folder: Path) -> LogFn:
    import mlflow

    saved = folder / "mlflow-run.txt"
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
    run_id = saved.read_text() if saved.exists() else None  # of a run that goes on
    run = mlflow.start_run(run_id=run_id, run_name=folder.resolve().name)
    if run_id is None:
        write_text(saved, run.info.run_id)
        mlflow.log_params({key: str(value)[:500] for key, value in flatten(job.model_dump()).items()})
    return _log_numbers(job, mlflow.log_metrics, mlflow.end_run)


LOG_FN_FACTORIES: dict[str, Callable[[Job, Path], LogFn]] = {"csv": CsvWriter, "prometheus": PrometheusWriter}
LOG_FN_FACTORIES |= {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
