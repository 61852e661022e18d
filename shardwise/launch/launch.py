"""Starting a training world: alone, under our supervisor, or as part of a world that exists already.

PyTorch's elastic agent is not used: it does not know which worker failed first, sees none that is stopped or stuck,
imports PyTorch in each anew, and its restarts share a store, in which workers read the addresses of dead ones.
What went wrong is told once, in the words of the worker that failed first.
"""

from __future__ import annotations

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
from shardwise.launch.worker import run_worker
from shardwise.layout import Layout
from shardwise.train.auto_layout import choose_plan, plan_record
from shardwise.train.local_machine import check_compiler, pick_device
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.nodes import Node, NodeCoordinator
from shardwise.workers.supervisor import Supervisor
from shardwise.workers.worker_pool import WorkerPool

WORKER_ENTRY_POINT = "shardwise.launch.worker:main"
# Slurm's names for what torchrun calls RANK and so on.
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def existing_world_size() -> int | None:
    """The size of the world that torchrun or Slurm made for us; None if we are to make one."""
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        for ours, theirs in _SLURM.items():
            os.environ[ours] = os.environ[theirs]
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
        if "MASTER_ADDR" not in os.environ:
            raise LayoutError(
                "started by Slurm without MASTER_ADDR; export it (the first host of the job) and MASTER_PORT, "
                "or start with `srun torchrun ...`."
            )
        os.environ.setdefault("MASTER_PORT", "29500")
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def check_layout_fits(layout: Layout, job: Job, nodes: int = 1) -> None:
    """Raises where this world, or this machine, does not have what a layout and a job need."""
    if job.compile is True and pick_device(job) == "cpu":
        check_compiler()
    world_size = existing_world_size()
    if layout.world % nodes:
        raise LayoutError(
            f"layout '{layout}' has {pluralize(layout.world, 'process')}, which {nodes} nodes cannot share."
        )
    if world_size is not None and world_size != layout.world:
        raise LayoutError(
            f"layout '{layout}' needs {pluralize(layout.world, 'process')}, but this world has {world_size}."
        )
    max_processes = max(job.run.processes, torch.cuda.device_count()) if pick_device(job) == "cuda" else layout.world
    if world_size is None and layout.world > max_processes * nodes:
        raise LayoutError(
            f"layout '{layout}' needs {pluralize(layout.world, 'process')}, but this machine has "
            f"{pluralize(torch.cuda.device_count(), 'GPU')}; "
            "use a smaller layout, start under torchrun on more machines, let processes share a GPU "
            f'(run.processes = {layout.world}), or set run.device = "cpu".'
        )


def launch(
    folder: RunFolder,
    layout: Layout,
    resume: bool,
    entry: str = WORKER_ENTRY_POINT,
    fork_server: ForkServer | None = None,
    node: Node | None = None,
) -> None:
    """Runs the world to its end, through restarts. Raises the failure that they did not help against.

    `entry`: what a worker calls. `nursery`: where workers come from, if there is one already.
    """
    if existing_world_size() is not None:
        _run_in_existing_world(folder, layout, resume)
        return
    folder.clear_errors()
    job = folder.job()

    def log_event(kind: str, message: str, **facts: Any) -> None:
        folder.log_event(kind, message, **facts)
        print_line(f"{kind}: {message}")

    server = ForkServer(WORKER_ENTRY_POINT.partition(":")[0]) if fork_server is None else fork_server
    worker_pool = WorkerPool(folder.path, server, layout.world)
    if node is not None:
        print_line(f"waiting for {pluralize(node.count - 1, 'other node')} at {node.host}:{node.port}")
        worker_pool = NodeCoordinator(folder.path, server, layout.world // node.count, node)
    supervisor = Supervisor(
        folder.path,
        worker_pool,
        entry,
        str(layout),
        layout.world,
        job.run.max_restarts,
        job.run.hang_timeout,
        folder,
        log_event,
        replan=partial(replan, folder, job) if job.run.elastic else None,
        rejoin_timeout=job.run.rejoin_timeout,
        use_standby=job.run.standby and job.run.max_restarts > 0,
    )

    def forward_signal(signal_number: int, frame: FrameType | None) -> None:
        supervisor.forward_signal(signal_number)

    previous = {
        signal_number: signal.signal(signal_number, forward_signal) for signal_number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        supervisor.supervise(resume)
    finally:
        worker_pool.close()
        if fork_server is None:
            server.close()
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)


def replan(folder: RunFolder, job: Job, processes: int) -> tuple[str, int]:
    """The best layout of at most so many processes for a run that goes on, and how many it uses."""
    for count in range(processes, 0, -1):
        try:
            plan, source = choose_plan(job.model_copy(update={"layout": "auto"}), count)
        except LayoutError as error:
            last = error
            continue
        layout = plan.best.layout
        folder.write_plan(plan_record(job, plan, source))
        return str(layout), layout.world
    raise last if processes else LayoutError("no process is left.")


def _run_in_existing_world(folder: RunFolder, layout: Layout, resume: bool) -> None:
    """One rank of a world that others made. If it fails, it speaks only if no other rank failed before it."""
    try:
        run_worker(folder, layout, resume)
    except BaseException as error:  # noqa: BLE001 - it is written down already
        time.sleep(1.0)  # for the records of the others
        records = folder.error_records()
        if records and records[0]["rank"] == int(os.environ["RANK"]):
            print(f"shardwise: {failure_text(records[0])}", file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_code", 1))  # peers wait in collectives: no tear-down that would wait for them
    if dist.is_initialized():
        dist.destroy_process_group()


def failure_text(record: dict[str, Any]) -> str:
    """A worker's last words: the sentence of an error that we raise on purpose, the trace of any other."""
    text = record["trace"] or record["message"]
    return str(text) if record["exit_code"] == 2 else f"rank {record['rank']} failed: {text.rstrip()}"
