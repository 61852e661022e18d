"""Starts a training run: resolves job, layout and run folder, supervises the workers, prints the final summary.

Workers are started by our launcher, or are the processes of a world that torchrun or Slurm created. Our launcher does
not use PyTorch's elastic agent, which cannot tell which worker failed first, does not detect suspended or hung workers,
re-imports PyTorch in every worker, and shares a store across restarts, in which new workers find the addresses of dead
ones. A failure is reported once, with the error of the worker that failed first."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardwise.comm.collectives import broadcast_json
from shardwise.console import fill_in, pluralize, print_line
from shardwise.data.input_files import BadRecords, DataRecord
from shardwise.data.make_sources import Sources, make_sources
from shardwise.data.sample_stream import Source
from shardwise.data.tokenizer import HuggingFaceTokenizer
from shardwise.errors import EXIT_UNFINISHED, JobError, LayoutError, RunError, ShardwiseError, StoppedError, UserError
from shardwise.files import write_text
from shardwise.job import Job, RunConfig, load_job
from shardwise.launch.cluster_environment import ClusterEnvironment, detect
from shardwise.launch.worker import init_distributed, run_worker
from shardwise.layout import AUTO_SCHEDULES, Layout
from shardwise.metrics.trackers import check_tracker_installed
from shardwise.object_store import parse_url
from shardwise.parallel.prepare import Prepared, prepare
from shardwise.parallel.tables.table_engine import check_host_memory
from shardwise.train import local_machine
from shardwise.train.base_weights import Base, check_base_of_resume
from shardwise.train.checkpoint_folder import CheckpointGroup
from shardwise.train.generate import Sampling, sample_run
from shardwise.train.run_folder import RunFolder, check_history, check_same_run
from shardwise.train.run_store import RunStore, local_folder
from shardwise.train.run_uploader import RunUploader, agent_folder
from shardwise.train.task_record import check_resumed_task, describe_task, has_own_task, save_record
from shardwise.train.validate import (
    open_validation_sets,
    refresh_copies,
    validation_changes,
    validation_extent,
    validation_set_names,
)
from shardwise.train.warm_start import check_start, name_step
from shardwise.watch.report_page import print_end_of_run
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.nodes import NodeAgent, NodeCoordinator
from shardwise.workers.run_owner import own_run
from shardwise.workers.supervisor import Supervisor, failure_text
from shardwise.workers.worker_pool import WorkerPool

WORKER_ENTRY_POINT = "shardwise.launch.worker:main"
TEMPLATES = Path(__file__).parent / "templates"
STATE_COPIES = 2  # of the parameters that every optimizer keeps in float32: weights and gradients
MAX_EPOCHS, MAX_LEARNING_RATE = 100, 10.0  # beyond these, a warning
OWN_MODELS = ("model.weights=", "model.name=hf:", "model.name=python:")
DEMO, DEMO_WITHOUT_MODEL = Path(__file__).parent.parent / "demo.toml", ("model={}", "data={source='stdlib'}")
Say = Callable[[str], None]
Check = Callable[[Prepared, Say], None]
"""What is checked before a new run begins; raises if it may not (`shardwise.verify.command.prove`)."""


@dataclass(frozen=True)
class StartOptions:
    """How a run is started."""

    resume: Path | None = None
    environment: ClusterEnvironment = field(default_factory=detect)
    check: Check | None = None
    accept_data_change: bool = False
    accept_task_change: bool = False
    strict: bool = False  # whether suspicious settings, which `find_warnings` lists, are errors


def start_training(
    job_file: Path | None, settings: list[str], resume: Path | None, say: Say, resume_if_exists: bool = False,
    **options: Any,
) -> tuple[RunFolder | None, bool]:  # fmt: skip
    """Trains a job file, the job of the run to resume, or the demo. `options`: those of StartOptions. With
    `resume_if_exists`, resumes the run in the job's folder if there is one. Returns the run folder (None on other nodes
    than node 0) and whether all steps were taken."""
    given = StartOptions(resume, **options)
    if resume_if_exists and resume is None and given.environment.reads_job:
        folder = load_job(job_file, settings).run.folder
        if not folder:
            raise JobError("--continue needs the folder of the run; set run.folder.")
        given = replace(given, resume=Path(folder) if RunFolder.exists(folder) else None)

    def load() -> Job:
        if resume is not None or job_file is not None:
            return load_job(job_file or RunFolder.open(Path(resume or "")).path / "job.toml", settings)
        # The demo's settings, such as its learning rate, suit no model that is brought along.
        base = None if any(setting.startswith(OWN_MODELS) for setting in settings) else DEMO
        if given.environment.reads_job:
            say(f"no job file given: {'training the built-in demo' if base else 'keys that are not set have defaults'}")
        is_named = any(setting.startswith("model.name=") for setting in settings)  # then the demo's own gives way
        return load_job(base, [*(DEMO_WITHOUT_MODEL if base and is_named else ()), *settings])

    return _start(load, say, given)


def start_job(job: Job, say: Say, resume: Path | None = None, **options: Any) -> RunFolder:
    """Trains a job and returns its run folder."""
    folder, is_finished = _start(lambda: job, say, StartOptions(resume, **options))
    if folder is None:
        sys.exit(0 if is_finished else EXIT_UNFINISHED)  # an agent; the rest of the script runs on node 0
    return folder


def _start(load: Callable[[], Job], say: Say, options: StartOptions) -> tuple[RunFolder | None, bool]:
    """Returns the run folder (None on other nodes than node 0) and whether the run has taken all its steps."""
    environment, node = options.environment, options.environment.node
    environment.export()
    if environment.world_size is not None:
        job = load()
        if parse_url(options.resume or job.run.folder):
            raise JobError("a run in an object store needs --node instead of torchrun or one task of srun per process.")
        return _start_run(job, say, options, None)
    # Started first, because a process without threads or PyTorch state is safe to fork.
    with closing(ForkServer(WORKER_ENTRY_POINT.partition(":")[0])) as fork_server:
        if node is not None and node.index > 0:
            say(f"waiting for node 0 at {node.endpoint}")
            try:
                run = load().run  # node 0 alone needs the job
            except UserError:
                run = RunConfig()
            with ExitStack() as uploading:
                prepare_folder = agent_folder(f"node {node.index}", uploading)
                return None, NodeAgent(node, fork_server, run.join_timeout, prepare_folder).run()
        return _start_run(load(), say, options, fork_server)


def _start_run(job: Job, say: Say, options: StartOptions, fork_server: ForkServer | None) -> tuple[RunFolder, bool]:
    with ExitStack() as ownership:
        environment, resumed, store = options.environment, None, None
        if options.resume is not None:
            url = parse_url(options.resume)
            resumed = RunFolder(local_folder(url)) if url else RunFolder.open(options.resume)
            store = _own(resumed, say, fork_server, ownership) if environment.is_main else None
            if store is not None:
                store.restore(say)
        job = previous_job = name_step(job, None if resumed is None else resumed.job())
        nodes = environment.node.count if environment.node is not None else 1
        base: Base | None = None
        warning_of_base = ""
        if resumed is not None:
            previous_job = resumed.job()
            check_same_run(previous_job, job)
            check_history(resumed, job)
            if environment.is_main:
                base, warning_of_base = check_base_of_resume(resumed, job)
        layout, record = _plan_layout(job, nodes, environment.world_size)
        check_layout_fits(layout, job, nodes, environment.world_size)
        check_tracker_installed(job.tracker)
        prepared = prepare(job, layout)
        start = check_start(prepared) if resumed is None and environment.is_main else ""
        if resumed is None and environment.is_main:
            base = Base.of_new_run(prepared)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world // nodes))
        local_machine.require_memory(job, 4 * STATE_COPIES, local_ranks, local_ranks / layout.world)
        check_host_memory(prepared, local_machine.host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", layout.world)))
        data_record, sources, events = open_data(prepared, resumed, options)
        if warning_of_base:
            events.insert(0, ("warning", warning_of_base))
        task_record = None
        if environment.is_main and has_own_task(job):
            task_record = describe_task(job, prepared.model)
        if task_record is not None and resumed is not None:
            events += check_resumed_task(
                resumed,
                task_record,
                steps_changed=job.total_steps != previous_job.total_steps,
                accept_task_change=options.accept_task_change,
                accept_data_change=options.accept_data_change,
            )
        if options.check is not None and environment.is_main:
            options.check(prepared, say)
        folder = _open_folder(job, resumed, layout, environment)
        if resumed is None and environment.is_main:
            store = _own(folder, say, fork_server, ownership)
        if environment.is_main:
            write_text(folder.path / "job.toml", job.to_toml())
            if base is not None:
                base.save(folder)
            if task_record is not None:
                save_record(folder, task_record)
            folder.write_plan(record)
            if data_record.is_new:
                folder.write_data(data_record, *sources)
            elif data_record.has_other_sets:
                folder.save_data_record(data_record)
            _print_summary(prepared, say, start)
            say(f"        {record['reason']}")
            if job.total_steps != previous_job.total_steps:
                steps = pluralize(job.total_steps, "step")
                change = f"{steps} instead of {previous_job.total_steps}; the learning rate schedule is adjusted."
                folder.tell_event(say, "steps_changed", change, steps=job.total_steps)
            for kind, message in events:
                folder.tell_event(say, kind, message)
        if environment.world_size is not None:
            init_distributed(layout.world, job)
            broadcast_json(None)  # the others read the job that rank 0 has written
        if store is not None:
            uploader = RunUploader(store, partial(folder.tell_event, say), job.checkpoint.keep)
            ownership.enter_context(uploader.running())
        launch(folder, layout, resume=resumed is not None, fork_server=fork_server, environment=environment)
        is_finished = folder.has_finished
        if environment.is_main:
            print_end_of_run(folder.path, say)
            if is_finished:
                summarize(folder, job, say)
            else:
                say(f"to resume: shardwise train --resume {folder.place}")
    return folder, is_finished


def _own(folder: RunFolder, say: Say, fork_server: ForkServer | None, ownership: ExitStack) -> RunStore | None:
    """Makes this launcher the one that writes the run's folder, and its object store, if it is in one."""
    ownership.enter_context(own_run(folder.path, say, fork_server))
    if (store := RunStore.of(folder.path)) is not None:
        ownership.enter_context(store.claimed(say, on_loss=lambda: os.kill(os.getpid(), signal.SIGTERM)))
    return store


def open_data(
    prepared: Prepared, resumed: RunFolder | None, options: StartOptions
) -> tuple[DataRecord, Sources, list[tuple[str, str]]]:
    """Opens the data before the workers start, to report problems early and to tokenize once. Returns the record of
    what is read, the sources, and events to log."""
    job, record, events = prepared.job, DataRecord(), list[tuple[str, str]]()
    bad_records = BadRecords(job.data.on_bad_record == "skip")
    if resumed is None:
        record.choose_sets(validation_set_names(job))
        sources = make_sources(job, bad_records=bad_records, record=record)
    else:
        record = resumed.data_record()
        record.choose_sets(validation_set_names(job))
        refresh_copies(job)
        validation_change = validation_changes(resumed.job(), job)
        if validation_change:
            message = (
                f"{validation_change}; losses before and after do not compare, so validation.patience and "
                "validation.keep_best take no account of those before."
            )
            events.append(("validation_changed", message))
        if options.accept_data_change:
            changes = "; ".join(record.changes()) or "nothing that the fingerprints show"
            events.append(("data_changed", f"the data as it is now is accepted. Changed: {changes}."))
            record = DataRecord(tokenizer=record.tokenizer)
            record.choose_sets(validation_set_names(job))
        record.check(resumed.path)
        sources = resumed.sources(job, record, bad_records)
        record.check(resumed.path, samples=(len(sources[0]), len(sources[1])))
    if job.validation.sets and options.environment.is_main:
        with TemporaryDirectory() as folder:  # the run's own does not have the tokenizer yet
            if isinstance(sources[2], HuggingFaceTokenizer):
                sources[2].save(Path(folder, "tokenizer.json"))
            open_validation_sets(job, next(Path(folder).iterdir(), None), record)
    if summary := getattr(sources[0], "summary", ""):
        events.append(("data", summary))
    if extent := validation_extent(job, sources[1]):
        events.append(("data", extent))
    warnings = [*find_warnings(prepared, *sources[:2]), *filter(None, [bad_records.skipped_text()])]
    if options.strict and warnings:
        raise JobError(f"--strict: {' '.join(warnings)}")
    return record, sources, [*events, *(("warning", sentence) for sentence in warnings)]


def _plan_layout(job: Job, nodes: int, world_size: int | None) -> tuple[Layout, dict[str, Any]]:
    """Returns the layout to train in, and the record for plan.toml, whose `reason` describes the plan."""
    fixed = None
    if job.layout != "auto":
        given = Layout.parse(job.layout)
        prepare(job, given)  # before the planner, which rejects layouts for other reasons
        fixed = given if given.schedule not in AUTO_SCHEDULES else None
    try:
        local_world = local_machine.local_process_count(job) * nodes if nodes > 1 and job.layout == "auto" else None
        plan, source = local_machine.choose_plan(job, world_size or local_world)
    except LayoutError as error:
        if fixed is None:
            raise
        # The layout runs, but the planner cannot estimate it.
        return fixed, local_machine.layout_record(prepare(job, fixed)) | {"reason": f"no prediction: {error}"}
    local_machine.check_memory(job, plan)
    return fixed or plan.best.layout, local_machine.plan_record(job, plan, source)


def _print_summary(prepared: Prepared, say: Say, start: str = "") -> None:
    job, task = prepared.job, prepared.job.family.task(prepared.job.model)
    source = job.data.source if task is None or task.reads_tokens else type(task.data).__name__
    own, own_rate = (None, None) if task is None else (task.optimizer, task.learning_rate)
    optimizer = getattr(getattr(own, "func", own), "__name__", "your optimizer") if own else job.optimizer.name
    compiled = job.should_compile(local_machine.pick_device(job), prepared.layout)
    values = {"start": start, "source": source, "optimizer": optimizer, "own_rate": own_rate, "compiled": compiled}
    for line in fill_in(TEMPLATES / "summary.txt", {"prepared": prepared, "job": job, **values}).splitlines():
        say(line)


def _open_folder(job: Job, resumed: RunFolder | None, layout: Layout, environment: ClusterEnvironment) -> RunFolder:
    """Creates or reopens the run folder. Under torchrun or Slurm, rank 0 creates it and broadcasts its path."""
    if resumed is not None:
        return resumed
    if environment.world_size is None:
        return RunFolder.create(job)
    init_distributed(layout.world, job)
    return RunFolder(Path(CheckpointGroup.create().on_rank_zero(lambda: str(RunFolder.create(job).path))))


def check_layout_fits(layout: Layout, job: Job, nodes: int = 1, world_size: int | None = None) -> None:
    """Raises LayoutError if this machine and as many others, or this existing world, cannot run the layout."""
    if job.compile is True and local_machine.pick_device(job) == "cpu":
        local_machine.check_compiler()
    if layout.world % nodes:
        raise LayoutError(f"layout '{layout}': {nodes} nodes cannot share {layout.world} processes equally; change it.")
    if world_size is not None and world_size != layout.world:
        problem = f"layout '{layout}' needs {pluralize(layout.world, 'process')}, but this world has {world_size}"
        raise LayoutError(f"{problem}; change the layout or the number of processes that torchrun or Slurm starts.")
    on_gpu, gpus = local_machine.pick_device(job) == "cuda", torch.cuda.device_count()
    if world_size is None and on_gpu and layout.world > max(job.run.processes, gpus) * nodes:
        needs = f"layout '{layout}' needs {pluralize(layout.world, 'process')}, but this machine has"
        remedy = f"start on more machines (--node or torchrun), share a GPU (run.processes = {layout.world})"
        raise LayoutError(f'{needs} {pluralize(gpus, "GPU")}; use a smaller one, {remedy}, or set run.device = "cpu".')


def launch(
    folder: RunFolder, layout: Layout, resume: bool, fork_server: ForkServer | None, entry: str = WORKER_ENTRY_POINT,
    environment: ClusterEnvironment | None = None,
) -> int:  # fmt: skip
    """Runs the training to its end, with restarts; raises the last failure once they are used up. `entry` is the
    function that each worker calls; workers are forked from `fork_server`, if this process is not one of them. Returns
    the signal that asked it to stop, or 0."""
    if fork_server is None:
        _run_in_existing_world(folder, layout, resume)
        return 0
    folder.clear_errors()
    job, log_event = folder.job(), partial(folder.tell_event, print_line)
    worker_pool = WorkerPool(folder.path, fork_server, layout.world)
    if environment is not None and (node := environment.node) is not None:
        slots, timeouts = layout.world // node.count, (job.run.join_timeout, job.run.node_patience)
        worker_pool = NodeCoordinator(folder.path, fork_server, slots, node, log_event, *timeouts)
        worker_pool.url = parse_url(folder.place)
    supervisor = Supervisor(
        folder.path, worker_pool, entry, str(layout), layout.world, job.run.max_restarts, job.run.hang_timeout, folder,
        log_event, replan=partial(replan, folder, job) if job.run.elastic else None,
        rejoin_timeout=job.run.rejoin_timeout, use_standby=job.run.standby and job.run.max_restarts > 0,
    )  # fmt: skip

    forward = lambda number, frame: supervisor.forward_signal(number)  # noqa: E731
    previous_handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        supervisor.supervise(resume)
        worker_pool.is_finished = folder.has_finished
    except StoppedError:  # it wants to be continued, on every node
        raise
    except ShardwiseError as error:
        worker_pool.failure = error.exit_code
        raise
    finally:
        worker_pool.close()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    return supervisor.stop_signal


def replan(folder: RunFolder, job: Job, processes: int) -> tuple[str, int]:
    """Returns the best layout for at most `processes` processes, and its world size, to resume the run in."""
    if not processes:
        raise LayoutError("no processes are left to run on.")
    plan, source = local_machine.choose_plan(job.model_copy(update={"layout": "auto"}), processes, at_most=True)
    folder.write_plan(local_machine.plan_record(job, plan, source))
    return str(plan.best.layout), plan.best.layout.world


def _run_in_existing_world(folder: RunFolder, layout: Layout, resume: bool) -> None:
    """Runs one rank under torchrun or Slurm. If it fails, it prints the error only if it was the first rank to fail."""
    try:
        run_worker(folder, layout, resume)
    except BaseException as error:  # noqa: BLE001 - run_worker has recorded it
        time.sleep(1.0)  # lets other ranks write their error records
        records = folder.error_records()
        if records and records[0]["rank"] == int(os.environ["RANK"]):
            print(f"shardwise: {failure_text(records[0])}", file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_code", 1))  # peers hang in collectives: a regular exit would wait for them


def find_warnings(prepared: Prepared, training: Source, held_out: Source) -> list[str]:
    """Returns one sentence per setting that is possible but hardly meant."""
    job, task = prepared.job, prepared.job.family.task(prepared.job.model)
    overrides = job.optimizer.weight_decay_overrides
    unmatched = [one for one in overrides if not any(fnmatchcase(name, one) for name in prepared.shapes)]
    values = {
        "job": job, "training": len(training), "held_out": len(held_out), "suffixes": Path(job.data.path).suffixes,
        "epochs": job.total_steps * job.samples / max(1, len(training)), "max_epochs": MAX_EPOCHS,
        "slowdown": local_machine.low_precision_slowdown(job), "max_slowdown": local_machine.MAX_SLOWDOWN,
        "has_own_rate": task is not None and task.learning_rate is not None, "max_learning_rate": MAX_LEARNING_RATE,
        "unmatched": unmatched,
    }  # fmt: skip
    return fill_in(TEMPLATES / "warnings.txt", values).splitlines()


def summarize(folder: RunFolder, job: Job, say: Callable[[str], None]) -> None:
    """Prints the summary of a run that has taken all its steps."""
    training, held_out, tokenizer = folder.sources(job)
    tokenizer = None if job.data.source == "chat" else tokenizer  # a part of a chat counts, and no text continues it
    if tokenizer is not None and job.model.is_causal_lm:
        prompt_source = held_out if len(held_out) else training
        words = tokenizer.decode(prompt_source[0]).split()[1:4]  # not the first word, which may be cut off
        prompt = "def " if job.data.source == "stdlib" else " ".join(words)[:40]
        try:
            text = sample_run(folder.path, [prompt], Sampling(160, 0.7, seed=job.seed), "cpu")[0]
        except RunError as error:
            text = str(error)
        say(f"generated text after {prompt!r}:")
        say("\n".join(f"  | {line}" for line in text.splitlines()))
        say(f"for more: shardwise sample {folder.place} --prompt {shlex.quote(prompt)}")
    say(f"run folder: {folder.place}")
