"""Launches a training run: starts and supervises workers, or joins the world that torchrun or Slurm created.

It does not use PyTorch's elastic agent, which cannot tell which worker failed first, does not detect suspended or hung
workers, re-imports PyTorch in every worker, and shares a store across restarts, in which new workers find the addresses
of dead ones. A failure is reported once, with the error of the worker that failed first.
"""

import os
import signal
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.console import pluralize, print_line
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.launch.cluster_environment import ClusterEnvironment
from shardwise.launch.worker import run_worker
from shardwise.layout import Layout
from shardwise.object_store import parse_url
from shardwise.train.local_machine import check_compiler, choose_plan, pick_device, plan_record
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.nodes import NodeCoordinator
from shardwise.workers.supervisor import Supervisor, failure_text
from shardwise.workers.worker_pool import WorkerPool

WORKER_ENTRY_POINT = "shardwise.launch.worker:main"


def check_layout_fits(layout: Layout, job: Job, nodes: int = 1, world_size: int | None = None) -> None:
    """Raises LayoutError if this machine and as many others, or this existing world, cannot run the layout."""
    if job.compile is True and pick_device(job) == "cpu":
        check_compiler()
    if layout.world % nodes:
        raise LayoutError(
            f"layout '{layout}' has {pluralize(layout.world, 'process')}, which {nodes} nodes cannot share equally; "
            f"choose a layout whose world size is a multiple of {nodes}."
        )
    if world_size is not None and world_size != layout.world:
        raise LayoutError(
            f"layout '{layout}' needs {pluralize(layout.world, 'process')}, but this world has {world_size}; "
            "change the layout or the number of processes that torchrun or Slurm starts."
        )
    max_processes = max(job.run.processes, torch.cuda.device_count()) if pick_device(job) == "cuda" else layout.world
    if world_size is None and layout.world > max_processes * nodes:
        raise LayoutError(
            f"layout '{layout}' needs {pluralize(layout.world, 'process')}, but this machine has "
            f"{pluralize(torch.cuda.device_count(), 'GPU')}; use a smaller layout, start on more machines (--node or "
            f'torchrun), let processes share a GPU (run.processes = {layout.world}), or set run.device = "cpu".'
        )


def launch(
    folder: RunFolder, layout: Layout, resume: bool, entry: str = WORKER_ENTRY_POINT,
    fork_server: ForkServer | None = None, environment: ClusterEnvironment | None = None,
) -> None:  # fmt: skip
    """Runs the training to its end, with restarts; raises the last failure once they are used up. `entry` is the
    function that each worker calls; `fork_server` is an existing server to fork workers from."""
    if environment is not None and environment.world_size is not None:
        _run_in_existing_world(folder, layout, resume)
        return
    folder.clear_errors()
    job = folder.job()

    def log_event(kind: str, message: str, **facts: Any) -> None:
        folder.log_event(kind, message, **facts)
        print_line(f"{kind}: {message}")

    server = ForkServer(WORKER_ENTRY_POINT.partition(":")[0]) if fork_server is None else fork_server
    worker_pool = WorkerPool(folder.path, server, layout.world)
    if environment is not None and (node := environment.node) is not None:
        slots, timeouts = layout.world // node.count, (job.run.join_timeout, job.run.node_patience)
        worker_pool = NodeCoordinator(folder.path, server, slots, node, log_event, *timeouts)
        worker_pool.url = parse_url(folder.place)
    supervisor = Supervisor(
        folder.path, worker_pool, entry, str(layout), layout.world, job.run.max_restarts, job.run.hang_timeout, folder,
        log_event, replan=partial(replan, folder, job) if job.run.elastic else None,
        rejoin_timeout=job.run.rejoin_timeout, use_standby=job.run.standby and job.run.max_restarts > 0,
    )  # fmt: skip

    def forward_signal(signal_number: int, frame: FrameType | None) -> None:
        supervisor.forward_signal(signal_number)

    previous_handlers = {number: signal.signal(number, forward_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        supervisor.supervise(resume)
        worker_pool.is_finished = has_finished(folder)
    finally:
        worker_pool.close()
        if fork_server is None:
            server.close()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def has_finished(folder: RunFolder) -> bool:
    """Whether the run's last event is `finished`."""
    return next((event["event"] for event in reversed(list(folder.events()))), "") == "finished"


def replan(folder: RunFolder, job: Job, processes: int) -> tuple[str, int]:
    """Returns the best layout for at most `processes` processes, and its world size, to resume the run in."""
    for count in range(processes, 0, -1):
        try:
            plan, source = choose_plan(job.model_copy(update={"layout": "auto"}), count)
        except LayoutError as error:
            last_error = error
            continue
        layout = plan.best.layout
        folder.write_plan(plan_record(job, plan, source))
        return str(layout), layout.world
    raise last_error if processes else LayoutError("no processes are left to run on.")


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
    if dist.is_initialized():
        dist.destroy_process_group()
