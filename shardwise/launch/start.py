"""Starts a training run: resolves job, layout and run folder, launches the workers, prints the final summary."""

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardwise.comm.objects import broadcast_json
from shardwise.console import format_count, pluralize
from shardwise.data.make_sources import make_sources
from shardwise.data.tokenizer import HuggingFaceTokenizer
from shardwise.errors import JobError, LayoutError
from shardwise.files import write_text
from shardwise.job import Job, load_job
from shardwise.launch.launch import WORKER_ENTRY_POINT, check_layout_fits, existing_world_size, launch
from shardwise.launch.worker import init_distributed
from shardwise.layout import AUTO_SCHEDULES, Layout
from shardwise.metrics.trackers import check_tracker_installed
from shardwise.parallel.prepare import Prepared, prepare
from shardwise.parallel.tables.table_engine import check_host_memory
from shardwise.train.auto_layout import check_memory, choose_plan, describe_plan, layout_record, plan_record
from shardwise.train.local_machine import host_memory, local_process_count, require_memory
from shardwise.train.run_folder import RunFolder
from shardwise.train.summary import has_finished, summarize
from shardwise.watch.end_of_run import print_end_of_run
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.nodes import Node, NodeAgent

STATE_COPIES = 2  # of the parameters that every optimizer keeps in float32: weights and gradients
DEMO = Path(__file__).parent.parent / "demo.toml"
# Job keys that --resume may change. All others define the run.
RESUMABLE_KEYS = (
    "layout", "steps", "tokens", "compile", "tracker", "data.workers", "data.prefetch", "checkpoint.*", "validation.*",
    "run.device", "run.processes", "run.cluster", "run.max_restarts", "run.hang_timeout", "run.standby",
    "run.elastic", "run.rejoin_timeout", "run.on_nan", "run.loss_spike_threshold", "run.checksum_every",
    "run.redundant_compute_every", "run.max_corruptions",
    "embedding_tables.sharding", "embedding_tables.cached_rows", "embedding_tables.prefetch",
)  # fmt: skip


Say = Callable[[str], None]
Check = Callable[[Prepared, Say], None]
"""What is checked before a new run begins; raises if it may not (`shardwise.verify.proof.prove`)."""


def start_training(
    job_file: Path | None, settings: list[str], resume: Path | None, say: Say,
    node: Node | None = None, check: Check | None = None,
) -> None:  # fmt: skip
    """Trains a job file, the job of the run to resume, or the demo."""

    def load() -> Job:
        if job_file is None and resume is None:
            say("no job file given: training the built-in demo")
        return load_job(job_file or (RunFolder.open(resume).path / "job.toml" if resume else DEMO), settings)

    _start(load, resume, say, node, check)


def start_job(job: Job, say: Say, resume: Path | None = None, check: Check | None = None) -> RunFolder:
    """Trains a job and returns its run folder."""
    folder = _start(lambda: job, resume, say, None, check)
    assert folder is not None
    return folder


def _start(
    load: Callable[[], Job], resume: Path | None, say: Say, node: Node | None, check: Check | None
) -> RunFolder | None:
    if existing_world_size() is not None:
        return _start_run(load(), resume, say, None, None, check)
    # Started first, because a process without threads or PyTorch state is safe to fork.
    fork_server = ForkServer(WORKER_ENTRY_POINT.partition(":")[0])
    try:
        if node is not None and node.index > 0:
            say(f"waiting for node 0 at {node.host}:{node.port}")
            NodeAgent(node, fork_server).run()
            return None
        return _start_run(load(), resume, say, fork_server, node, check)
    finally:
        fork_server.close()


def _start_run(
    job: Job, resume: Path | None, say: Say, fork_server: ForkServer | None, node: Node | None,
    check: Check | None,
) -> RunFolder:  # fmt: skip
    resumed = RunFolder.open(resume) if resume is not None else None
    previous_job = resumed.job() if resumed is not None else job
    _check_same_run(previous_job, job)
    given_layout = None if job.layout == "auto" else Layout.parse(job.layout)
    if given_layout is not None:
        prepare(job, given_layout)  # before the planner, which rejects layouts for other reasons
    nodes = node.count if node is not None else 1
    layout, record, reason_text = _plan_layout(job, nodes)
    check_layout_fits(layout, job, nodes)
    check_tracker_installed(job.tracker)
    prepared = prepare(job, layout)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world // nodes))
    require_memory(job, 4 * STATE_COPIES, local_ranks, local_ranks / layout.world)
    check_host_memory(prepared, host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", layout.world)))
    # Built before the workers start, to report a missing file or a wrong vocabulary early and to tokenize text once.
    _, _, tokenizer = make_sources(job)
    if check is not None and _is_main_process():
        check(prepared, say)
    folder = _open_folder(job, resumed, layout)
    if _is_main_process():
        write_text(folder.path / "job.toml", job.to_toml())
        folder.write_plan(record)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokenizer.save(folder.tokenizer)
        _print_summary(prepared, say)
        say(f"        {reason_text}")
        if job.total_steps != previous_job.total_steps:
            steps = pluralize(job.total_steps, "step")
            change = f"{steps} instead of {previous_job.total_steps}; the learning rate schedule is adjusted."
            folder.log_event("steps_changed", change, steps=job.total_steps)
            say(f"steps_changed: {change}")
    launch(folder, layout, resume=resumed is not None, fork_server=fork_server, node=node)
    if _is_main_process():
        print_end_of_run(folder.path, say)
        if has_finished(folder):
            summarize(folder, job, say)
        else:
            say(f"to resume: shardwise train --resume {folder.path}")
    return folder


def _plan_layout(job: Job, nodes: int) -> tuple[Layout, dict[str, Any], str]:
    """Returns the layout to train in, the record for plan.toml, and a line that describes the plan."""
    given_layout = None if job.layout == "auto" else Layout.parse(job.layout)
    try:
        local_world = local_process_count(job) * nodes if nodes > 1 else None
        plan, source = choose_plan(job, existing_world_size() or local_world)
    except LayoutError as error:
        if given_layout is None or given_layout.schedule in AUTO_SCHEDULES:
            raise
        reason_text = f"no prediction: {error}"  # the layout runs, but the planner cannot estimate it
        return given_layout, {**layout_record(prepare(job, given_layout)), "reason": reason_text}, reason_text
    check_memory(job, plan)
    is_fixed = given_layout is not None and given_layout.schedule not in AUTO_SCHEDULES
    layout = given_layout if given_layout is not None and is_fixed else plan.best.layout
    return layout, plan_record(job, plan, source), describe_plan(plan, source)


def _print_summary(prepared: Prepared, say: Say) -> None:
    job, layout, batch = prepared.job, prepared.layout, prepared.batch
    has_tokens = job.model.throughput_unit == "tokens"
    size = f"{job.samples} x {job.model.length} tokens" if has_tokens else f"{job.samples} samples"
    count = format_count(prepared.parameters)
    task = job.family.task(job.model)
    source = job.data.source if task is None or task.reads_tokens else type(task.data).__name__
    say(f"job:    {job.model.name}, {count} parameters, {job.precision}, on {source}")
    own, own_rate = (None, None) if task is None else (task.optimizer, task.learning_rate)
    optimizer = getattr(getattr(own, "func", own), "__name__", "your optimizer") if own else job.optimizer.name
    rate = "the rate of your function" if own_rate else f"{job.optimizer.lr:g}"
    say(f"        {pluralize(job.total_steps, 'step')} of {size}, {optimizer} at {rate}")
    micro_batches = f"{pluralize(batch.micro_batches, 'micro-batch')} of {batch.micro_batch}"
    say(f"layout: {layout} ({pluralize(layout.world, 'process')}, {micro_batches})")


def _is_main_process() -> bool:
    """Whether this process prints and writes for the run: our launcher, or rank 0 under torchrun or Slurm."""
    return existing_world_size() is None or os.environ["RANK"] == "0"


def _open_folder(job: Job, resumed: RunFolder | None, layout: Layout) -> RunFolder:
    """Creates or reopens the run folder. Under torchrun or Slurm, rank 0 creates it and broadcasts its path."""
    if resumed is not None:
        return resumed
    if existing_world_size() is None:
        return RunFolder.create(job)
    init_distributed(layout.world, job)
    path, problem = "", ""
    if _is_main_process():
        try:
            path = str(RunFolder.create(job).path)
        except JobError as error:
            problem = str(error)
    path, problem = broadcast_json([path, problem])
    if problem:
        raise JobError(problem)
    return RunFolder(Path(path))


def _check_same_run(old: Job, new: Job) -> None:
    """Raises JobError if the jobs differ in a key that --resume may not change."""
    before, after = _flatten(old), _flatten(new)
    different = [key for key in before if before[key] != after[key]]
    changed = [key for key in different if not any(fnmatchcase(key, pattern) for pattern in RESUMABLE_KEYS)]
    if changed:
        raise JobError(
            f"--resume continues the same run, but {', '.join(changed)} would change; it may change only "
            f"{', '.join(RESUMABLE_KEYS)}. Start a new run to change other keys."
        )


def _flatten(job: Job) -> dict[str, object]:
    """Returns the job's values by dotted key."""
    flat: dict[str, object] = {}
    for key, value in job.model_dump().items():
        flat |= {f"{key}.{name}": leaf for name, leaf in value.items()} if isinstance(value, dict) else {key: value}
    return flat
