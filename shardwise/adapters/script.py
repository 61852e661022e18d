"""Scripts as a source of tasks: `python train.py`, `torchrun train.py` and `shardwise run train.py` train the same.

A script makes a `shardwise.Trainer` and calls one of its methods. The process that the user started is the launcher, or
under torchrun a rank. A worker that the launcher starts runs the script again, up to that call, and takes its task.
"""

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from shardwise.adapters.module_family import SCRIPT_TASKS
from shardwise.adapters.task import Task
from shardwise.errors import JobError

PREFIX = "script:"


class TaskReached(BaseException):
    """Ends a script that is run for its task only; not an Exception, so that a script does not catch it."""


class _Collector:
    wanted = ""  # the name of the task for which this process runs a script; empty: it runs for its own sake


def register_task(task: Task) -> tuple[str, list[str]]:
    """Returns the model name and the command-line arguments under which every process of a run finds this task."""
    script = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]
    if not script or not Path(script).is_file():
        raise JobError("a Trainer needs a script file, which every process of the run executes; save this as a file.")
    path = os.path.abspath(script if not _Collector.wanted else _path_of(_Collector.wanted))
    number = sum(name.partition("#")[0] == f"{PREFIX}{path}" for name in SCRIPT_TASKS)
    name = f"{PREFIX}{path}" + (f"#{number + 1}" if number else "")
    SCRIPT_TASKS[name] = task
    return name, sys.argv[1:]


def stop_if_collecting() -> None:
    """Called by whatever would start a run."""
    if _Collector.wanted in SCRIPT_TASKS:
        raise TaskReached


def _path_of(name: str) -> str:
    return name.removeprefix(PREFIX).partition("#")[0]


def load_script_task(name: str, args: dict[str, Any]) -> Task:
    """Runs a script until it has made the task of this name."""
    if name not in SCRIPT_TASKS:
        path = _path_of(name)
        if not Path(path).is_file():
            raise JobError(f"the run was started by the script {path}, which does not exist any more.")
        before, sys.argv = sys.argv, [path, *map(str, args.get("argv", []))]
        sys.path.insert(0, str(Path(path).parent))
        _Collector.wanted = name
        try:
            with redirect_stdout(io.StringIO()):  # the launcher has printed it
                runpy.run_path(path, run_name="__main__")
        except (TaskReached, SystemExit):
            pass
        finally:
            _Collector.wanted, sys.argv = "", before
    if name not in SCRIPT_TASKS:
        raise JobError(f"the script {_path_of(name)} ended without making the shardwise.Trainer of this run.")
    return SCRIPT_TASKS[name]
