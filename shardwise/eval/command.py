"""The command `shardwise eval`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.comm.world import run_world
from shardwise.errors import JobError
from shardwise.eval.language_model import LanguageModel, load_eval_job
from shardwise.eval.tasks import EvalTask, file_perplexity, load_tasks, own_metric, run_task
from shardwise.layout import Layout

Results = dict[str, dict[str, float]]


def evaluate(
    path: Path, data: Sequence[str], tasks: Sequence[Path], layout: str = "", step: str = "",
    overrides: Sequence[str] = (), batch: int = 8,
) -> Results:  # fmt: skip
    """Returns the metrics of each data file and of each task. A layout of several processes gets a world of its own,
    on the CPU; under torchrun, it is that of torchrun."""
    if not data and not tasks:
        raise JobError("nothing to evaluate on; give --data FILE or --tasks FILE.")
    found = [(file.parent, task) for file in tasks for task in load_tasks(file)]
    sys.path.insert(0, os.getcwd())  # for metrics of one's own, as `python -m` finds them
    for name in (str(entry.get("metric")) for _, task in found for entry in task.metric_list):
        own_metric(name) if name.startswith("python:") else None
    job = load_eval_job(path, overrides)
    world = Layout.parse(layout).world if layout else 1
    if world > 1 and not job.model.is_causal_lm:
        raise JobError(f"--layout: {path} runs as a module of transformers, in one process; leave out --layout.")
    arguments = path, data, found, layout, step, overrides, batch
    if world == 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _evaluate(*arguments)
    return run_world(_evaluate, world, *arguments, timeout=10.0**6)[0]  # type: ignore[no-any-return]


def _evaluate(
    path: Path, data: Sequence[str], tasks: Sequence[tuple[Path, EvalTask]], layout: str, step: str,
    overrides: Sequence[str], batch: int,
) -> Results:  # fmt: skip
    model = LanguageModel(path, layout, step, batch, overrides)
    results = {name: file_perplexity(model, name, model.job.data.text_field) for name in data}
    return results | {task.task: run_task(model, task, folder) for folder, task in tasks}
