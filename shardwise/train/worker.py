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

from shardwise.comm import staged
from shardwise.errors import ShardwiseError
from shardwise.guard.beat import Beat
from shardwise.guard.nodes import open_store
from shardwise.guard.nursery import given_memory, wait_held
from shardwise.job import Job
from shardwise.kinds import DLRM
from shardwise.layout import Layout
from shardwise.parallel.parallelize import build, shapes_of
from shardwise.train.folder import RunFolder
from shardwise.train.here import host_memory, pick_device
from shardwise.train.loop import Trainer, make_engine
from shardwise.train.measure import StopFlag

TIMEOUT = timedelta(minutes=10)


def main(arguments: list[str]) -> None:
    """A worker that our launcher started: RUN LAYOUT STORE [--resume] [--held=FILE]."""
    folder, layout = RunFolder.open(Path(arguments[0])), Layout.parse(arguments[1])
    try:
        work(folder, layout, "--resume" in arguments[3:], arguments[2], wait_held(arguments), given_memory(arguments))
    except BaseException as error:  # noqa: BLE001 - it is written down already, and told by the launcher
        # Peers wait in collectives: leave at once, without the tear-down that would wait for them.
        sys.stdout.flush()
        os._exit(getattr(error, "exit_code", 1))


def work(
    folder: RunFolder, layout: Layout, resume: bool, store: str | None = None,
    held: Callable[[], None] | None = None, memory: str = "",
) -> None:  # fmt: skip
    """Trains as the rank that the environment names. What goes wrong is written to the run folder, then raised.

    A stand-by is `held` until the world before it has ended. By then, on a CPU, it has joined the others and built the
    model, if that is light; a GPU it leaves to those who train.
    """
    rank = int(os.environ.get("RANK", "0"))
    engine = None
    if held is not None:
        if pick_device(folder.job()) == "cpu" and _light(folder.job()):
            engine = make_engine(folder.job(), layout, join(layout.world, folder.job(), store))
        held()
    stop = StopFlag()
    listen(stop)
    beat = Beat(folder.path, rank)
    try:
        job = folder.job()
        device = join(layout.world, job, store)
        Trainer(job, layout, folder, device, resume, stop, beat.mark, engine, memory).run()
    except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt or a DCP exception is to be told too
        known = isinstance(error, ShardwiseError)
        if not known:
            with suppress(OSError):
                beat.tell_waits()
        folder.write_error(
            rank,
            {
                "rank": rank, "time_ns": time.time_ns(), "kind": type(error).__name__, "message": str(error),
                "exit_code": getattr(error, "exit_code", 1), "trace": None if known else traceback.format_exc(),
            },
        )  # fmt: skip
        raise


def _light(job: Job) -> bool:
    """Whether a second copy of every rank's weights is at most a tenth of the machine's memory. Tables never are."""
    if isinstance(job.model, DLRM):
        return False
    numbers = sum(shape.numel() for shape in shapes_of(build(job, torch.float32)).values())
    return 8 * numbers * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= host_memory() / 10


def join(world: int, job: Job, store: str | None = None) -> torch.device:
    """Joins the world that the environment describes (torchrun's names, or Slurm's), and picks this rank's device.

    `store`: a file through which the ranks of this machine find each other, or tcp:HOST:PORT:NAME."""
    kind, local = pick_device(job), int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, shared = torch.device("cpu"), False
    if kind == "cuda":
        count = torch.cuda.device_count()
        device, shared = torch.device("cuda", local % count), here > count
        torch.cuda.set_device(device)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // here))
    if world > 1 and not dist.is_initialized():
        staged.register()
        backend = "gloo" if device.type == "cpu" else staged.BACKEND if shared else "nccl"
        if store is None:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            rank = int(os.environ["RANK"])
            dist.init_process_group(
                backend, timeout=TIMEOUT, store=open_store(store, world), rank=rank, world_size=world
            )
    return device


def listen(stop: StopFlag) -> None:
    """SIGTERM and Ctrl-C set a flag; the step under way is finished and saved."""

    def told(number: int, frame: FrameType | None) -> None:
        stop.number = number

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
