"""One process of a training world.

Forked by our own launcher's nursery, or started by torchrun, by Slurm or alone. Whatever ends it is written down, with
the time, before it dies: nobody else knows who failed first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from shardwise.comm import host_staged
from shardwise.errors import ShardwiseError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.prepare import Prepared, prepare
from shardwise.train.local_machine import host_memory, pick_device
from shardwise.train.loop import Trainer, make_engine
from shardwise.train.metrics_processor import StopFlag
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import snapshot_folder_argument, standby_wait
from shardwise.workers.heartbeat import Heartbeat
from shardwise.workers.nodes import open_store

PROCESS_GROUP_TIMEOUT = timedelta(minutes=10)


def main(arguments: list[str]) -> None:
    """A worker that our launcher started: RUN LAYOUT STORE [--resume] [--held=FILE]."""
    folder, layout = RunFolder.open(Path(arguments[0])), Layout.parse(arguments[1])
    try:
        run_worker(
            folder,
            layout,
            "--resume" in arguments[3:],
            arguments[2],
            standby_wait(arguments),
            snapshot_folder_argument(arguments),
        )
    except BaseException as error:  # noqa: BLE001 - it is written down already, and told by the launcher
        # Peers wait in collectives: leave at once, without the tear-down that would wait for them.
        sys.stdout.flush()
        os._exit(getattr(error, "exit_code", 1))


def run_worker(
    folder: RunFolder, layout: Layout, resume: bool, store: str | None = None,
    standby_gate: Callable[[], None] | None = None, snapshots: str = "",
) -> None:  # fmt: skip
    """Trains as the rank that the environment names. What goes wrong is written to the run folder, then raised.

    A stand-by is `held` until the world before it has ended. By then, on a CPU, it has joined the others and built the
    model, if that is light; a GPU it leaves to those who train.
    """
    rank = int(os.environ.get("RANK", "0"))
    prepared = engine = None
    if standby_gate is not None:
        prepared = prepare(folder.job(), layout)
        if pick_device(prepared.job) == "cpu" and _fits_twice(prepared):
            engine = make_engine(prepared, init_distributed(layout.world, prepared.job, store))
        standby_gate()
    stop = StopFlag()
    install_signal_handlers(stop)
    heartbeat = Heartbeat(folder.path, rank)
    try:
        prepared = prepared or prepare(folder.job(), layout)
        device = init_distributed(layout.world, prepared.job, store)
        Trainer(prepared, folder, device, resume, stop, heartbeat.set_phase, engine, snapshots).run()
    except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt or a DCP exception is to be told too
        is_expected = isinstance(error, ShardwiseError)
        if not is_expected:
            with suppress(OSError):
                heartbeat.dump_collectives()
        folder.write_error(
            rank,
            {
                "rank": rank, "time_ns": time.time_ns(), "kind": type(error).__name__, "message": str(error),
                "exit_code": getattr(error, "exit_code", 1), "trace": None if is_expected else traceback.format_exc(),
            },
        )  # fmt: skip
        raise


def _fits_twice(prepared: Prepared) -> bool:
    """Whether a second copy of every rank's weights takes at most a tenth of the host's memory; tables never do."""
    if prepared.tables:
        return False
    return 8 * prepared.parameters * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= host_memory() / 10


def init_distributed(world_size: int, job: Job, store: str | None = None) -> torch.device:
    """Joins the world that the environment describes (torchrun's names, or Slurm's), and picks this rank's device.

    `store`: a file through which the ranks of this machine find each other, or tcp:HOST:PORT:NAME."""
    device_type, local_rank = pick_device(job), int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, is_shared = torch.device("cpu"), False
    if device_type == "cuda":
        count = torch.cuda.device_count()
        device, is_shared = torch.device("cuda", local_rank % count), local_world_size > count
        torch.cuda.set_device(device)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world_size))
    if world_size > 1 and not dist.is_initialized():
        host_staged.register_backend()
        backend = "gloo" if device.type == "cpu" else host_staged.BACKEND if is_shared else "nccl"
        if store is None:
            dist.init_process_group(backend, timeout=PROCESS_GROUP_TIMEOUT)
        else:
            rank = int(os.environ["RANK"])
            dist.init_process_group(
                backend,
                timeout=PROCESS_GROUP_TIMEOUT,
                store=open_store(store, world_size),
                rank=rank,
                world_size=world_size,
            )
    return device


def install_signal_handlers(stop: StopFlag) -> None:
    """SIGTERM and Ctrl-C set a flag; the step under way is finished and saved."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal_number = number

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
