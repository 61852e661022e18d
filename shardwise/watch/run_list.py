"""The rows of the page that lists all runs. It reads only what has changed, and of a log only the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.files import parse_record, parse_toml
from shardwise.job import load_job
from shardwise.watch.run_data import JsonObject, is_running

TAIL_BYTES = 1 << 16  # of a log; its last record is shorter


class RunListRow:
    """One row. `read` looks at the times and sizes of the files first."""

    def __init__(self, path: Path):
        self.path, self.is_known = path, False
        self._found: dict[str, Any] = {}  # by file: the job's steps, the plan's layout, the last record of a log
        self._errors: dict[str, str] = {}
        self._versions: dict[str, tuple[int, int]] = {}

    def read(self) -> dict[str, Any]:
        """Returns the columns of the row; an error of one run is its status and does not hide the others."""
        self.is_known = True
        for name, load in LOADERS.items():
            try:
                stat = (self.path / name).stat()
                if self._versions.get(name) != (stat.st_mtime_ns, stat.st_size):
                    self._versions[name] = stat.st_mtime_ns, stat.st_size
                    self._errors.pop(name, None)
                    self._found[name] = load(self.path / name)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, UserError) as error:
                self._errors[name] = str(error)
        metrics, event = self._found.get("metrics.jsonl", {}), self._found.get("events.jsonl", {})
        status = " ".join(self._errors.values()) or event.get("event")
        if not self._errors and status not in ("finished", "stopped"):
            status = "running" if is_running(self.path) else "not finished"
        step = f"{metrics.get('step', 0)} of {self._found.get('job.toml', 0)}"
        loss = metrics.get("loss", "")
        return {"status": status, "layout": self._found.get("plan.toml", ""), "step": step, "loss": loss}


def _read_layout(path: Path) -> str:
    """Parses the part of a plan before its first table, where the layout stands: tables are most of the file."""
    return str(parse_toml(path.read_text(encoding="utf-8").partition("\n[")[0]).get("layout", ""))


def _last_record(path: Path) -> JsonObject:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        records = (parse_record(line, str) for line in reversed(file.read().splitlines()))
        return next((record for record in records if record is not None), {})


LOADERS: dict[str, Callable[[Path], Any]] = {
    "job.toml": lambda path: load_job(path).total_steps, "plan.toml": _read_layout,
    "metrics.jsonl": _last_record, "events.jsonl": _last_record,
}  # fmt: skip
