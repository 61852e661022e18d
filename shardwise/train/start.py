"""From a command to a run: which job, which folder, which layout; then the launch and the last words."""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.make import make_sources
from shardwise.data.tokenizer import Subwords
from shardwise.errors import JobError, LayoutError
from shardwise.files import write_text
from shardwise.guard.nodes import Member, Node
from shardwise.guard.nursery import Nursery
from shardwise.job import Job, load_job
from shardwise.kinds import DLRM
from shardwise.layout import MADE, Layout
from shardwise.parallel import recommender
from shardwise.parallel.parallelize import build, check, shapes_of
from shardwise.train.auto import check_memory, choose_plan, cut_record, plan_record, reason
from shardwise.train.folder import RunFolder
from shardwise.train.here import host_memory, local_processes
from shardwise.train.launch import WORKER, check_world, joined_world, launch
from shardwise.train.summary import finished, summarize
from shardwise.train.worker import join
from shardwise.watch.end import at_end
from shardwise.watch.track import check_tracker
from shardwise.words import counted, short

DEMO = Path(__file__).parent.parent / "demo.toml"
# What may change when a run goes on; all other keys are what the run is.
FREE = (
    "layout", "steps", "tokens", "compile", "track", "data.workers", "data.prefetch", "checkpoint.*", "validation.*",
    "run.device", "run.processes", "run.cluster", "run.restarts", "run.patience", "run.standby",
    "run.elastic", "run.rejoin", "run.on_nan", "run.spike", "run.check", "run.rerun", "run.corruptions",
    "embedding.cut", "embedding.cache", "embedding.ahead",
)  # fmt: skip


def start_training(
    job_file: Path | None, settings: list[str], resume: Path | None, say: Callable[[str], None],
    node: Node | None = None,
) -> None:  # fmt: skip
    if joined_world() is not None:
        _start(job_file, settings, resume, say, None, None)
        return
    nursery = Nursery(WORKER.partition(":")[0])  # first of all: it forks best from a process that has done nothing yet
    try:
        if node is not None and node.index > 0:
            say(f"waiting for the first node at {node.host}:{node.port}")
            Member(node, nursery).attend()
        else:
            _start(job_file, settings, resume, say, nursery, node)
    finally:
        nursery.close()


def _start(
    job_file: Path | None, settings: list[str], resume: Path | None, say: Callable[[str], None],
    nursery: Nursery | None, node: Node | None,
) -> None:  # fmt: skip
    old = RunFolder.open(resume) if resume is not None else None
    job = load_job(job_file or (old.path / "job.toml" if old else DEMO), settings)
    before = old.job() if old is not None else job
    _same_run(before, job)
    given = None if job.layout == "auto" else Layout.parse(job.layout)
    if given is not None:
        check(job, given)  # here in its own words: the planner has another list of what it can weigh
    nodes = node.count if node is not None else 1
    layout, record, why = _planned(job, nodes)
    check_world(layout, job, nodes)
    check_tracker(job.track)
    if isinstance(job.model, DLRM):
        here = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world))
        recommender.check_room(job, layout, host_memory() / here)
    # Here, so that a missing file or a wrong vocabulary is told before processes start, and text is encoded once.
    _, _, tokenizer = make_sources(job)
    folder = _folder(job, old, layout)
    if _main():
        write_text(folder.path / "job.toml", job.text())
        folder.write_plan(record)
        if isinstance(tokenizer, Subwords):
            tokenizer.save(folder.tokenizer)
        if job_file is None and old is None:
            say("no job file given: training the built-in demo")
        _introduce(job, layout, say)
        say(f"        {why}")
        if job.total_steps != before.total_steps:
            change = f"{counted(job.total_steps, 'step')} instead of {before.total_steps}; the learning rate follows."
            folder.event("changed", change, steps=job.total_steps)
            say(f"changed: {change}")
    launch(folder, layout, resume=old is not None, nursery=nursery, node=node)
    if not _main():
        return
    at_end(folder.path, say)
    if finished(folder):
        summarize(folder, job, say)
    else:
        say(f"go on with: shardwise train --resume {folder.path}")


def _planned(job: Job, nodes: int) -> tuple[Layout, dict[str, Any], str]:
    """The layout to train in, what is written down of its plan, and a line about it."""
    given = None if job.layout == "auto" else Layout.parse(job.layout)
    try:
        plan, source = choose_plan(job, joined_world() or (local_processes(job) * nodes if nodes > 1 else None))
    except LayoutError as error:
        if given is None or given.schedule in MADE:
            raise
        why = f"no prediction: {error}"  # the layout runs; the planner cannot weigh it
        return given, {**cut_record(job, given), "reason": why}, why
    check_memory(job, plan)
    layout = given if given is not None and given.schedule not in MADE else plan.best.layout
    return layout, plan_record(job, plan, source), reason(plan, source)


def _introduce(job: Job, layout: Layout, say: Callable[[str], None]) -> None:
    if isinstance(job.model, DLRM):
        parameters = recommender.parameters(job.model)
    else:
        parameters = sum(shape.numel() for shape in shapes_of(build(job, torch.float32)).values())
    tokens = f"{job.samples} x {job.model.length} tokens" if job.model.unit == "tokens" else f"{job.samples} samples"
    batch = check(job, layout)
    say(f"job:    {job.model.name}, {short(parameters)} parameters, {job.precision}, on {job.data.source}")
    say(f"        {counted(job.total_steps, 'step')} of {tokens}, {job.optimizer.name} at {job.optimizer.lr:g}")
    parts = f"{counted(batch.micro_batches, 'micro-batch')} of {batch.micro_batch}"
    say(f"layout: {layout} ({counted(layout.world, 'process')}, {parts})")


def _main() -> bool:
    """Whether this process speaks for the run: alone, or rank 0 of a world made by others."""
    return joined_world() is None or os.environ["RANK"] == "0"


def _folder(job: Job, old: RunFolder | None, layout: Layout) -> RunFolder:
    """The run's folder; in a world made by others rank 0 picks it and tells the rest."""
    if old is not None:
        return old
    if joined_world() is None:
        return RunFolder.create(job)
    join(layout.world, job)
    told: list[RunFolder | JobError] = []
    if _main():
        try:
            told = [RunFolder.create(job)]
        except JobError as error:
            told = [error]
    told = told or [JobError("")]
    if layout.world > 1:
        dist.broadcast_object_list(told)
    if isinstance(told[0], JobError):
        raise told[0]
    return told[0]


def _same_run(old: Job, new: Job) -> None:
    before, after = _values(old), _values(new)
    changed = [key for key in before if before[key] != after[key] and not any(fnmatchcase(key, free) for free in FREE)]
    if changed:
        raise JobError(
            f"--resume goes on with the same run, but {', '.join(changed)} would change; only {', '.join(FREE[:-1])} "
            f"and {FREE[-1]} may. Start a new run for the rest."
        )


def _values(job: Job) -> dict[str, object]:
    """By key, with its section before a dot."""
    found: dict[str, object] = {}
    for key, value in job.model_dump().items():
        found |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return found
