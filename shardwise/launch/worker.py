"""One training process (rank), forked by our launcher or started by torchrun, Slurm or on its own.

Before a worker dies of an error, it records the error with a timestamp in the run folder, so that the launcher can tell
which rank failed first."""

import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import host_staged
from shardwise.comm.collectives import forbid_pickles, leave_world
from shardwise.errors import ShardwiseError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.train.local_machine import core_count, host_memory, pick_device
from shardwise.train.loop import TrainingLoop, make_engine
from shardwise.train.metrics_processor import StopFlag
from shardwise.train.run_folder import RunFolder
from shardwise.workers.diagnosis import Heartbeat
from shardwise.workers.nodes import open_store

GROUP_TIMEOUT = timedelta(minutes=10)


def main(arguments: list[str], **options: Any) -> None:
    """Entry point of workers that our launcher starts: RUN LAYOUT STORE [--resume], and the fork server's options."""
    folder, layout = RunFolder.open(Path(arguments[0])), Layout.parse(arguments[1])
    try:
        run_worker(folder, layout, "--resume" in arguments[3:], arguments[2], **options)
    except BaseException as error:  # noqa: BLE001 - run_worker has recorded it; the launcher reports it
        # Peers hang in collectives: exit at once, because a regular exit would wait for them.
        sys.stdout.flush()
        os._exit(getattr(error, "exit_code", 1))


def run_worker(
    folder: RunFolder, layout: Layout, resume: bool, store: str | None = None,
    standby_gate: Callable[[], None] | None = None, snapshots: str = "", loop: type[TrainingLoop] = TrainingLoop,
) -> None:  # fmt: skip
    """Trains as the rank given by the environment. Records an error in the run folder, then raises it.

    A standby worker blocks in `standby_gate` until the current workers have ended. On a CPU it first joins the process
    group and builds the model, if that is small; on a GPU it leaves the device to the current workers."""
    rank = int(os.environ.get("RANK", "0"))
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # the launcher has warned of slow bf16, in a line
    prepared = engine = None
    if standby_gate is not None:
        prepared = prepare(folder.job(), layout)
        copies = 8 * prepared.parameters * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # bytes, one per local rank
        is_small = not prepared.tables and copies <= host_memory() / 10
        if pick_device(prepared.job) == "cpu" and is_small:
            engine = make_engine(prepared, init_distributed(layout.world, prepared.job, store))
        if prepared.job.should_compile(pick_device(prepared.job), layout):
            importlib.import_module("torch._inductor.compile_fx")  # takes seconds, which a restart then saves
        standby_gate()
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGINT):  # the current step is finished and saved
        signal.signal(number, stop.set)
    heartbeat = Heartbeat(folder.path, rank)
    try:
        prepared = prepared or prepare(folder.job(), layout)
        device = init_distributed(layout.world, prepared.job, store)
        loop(prepared, folder, device, resume, stop, heartbeat.set_phase, engine, snapshots).run()
        heartbeat.set_phase("leaving", heartbeat.step)
        leave_world()
    except BaseException as error:  # noqa: BLE001 - includes KeyboardInterrupt and DCP's BaseExceptions
        is_expected = isinstance(error, ShardwiseError)
        if not is_expected:
            with suppress(OSError):
                heartbeat.dump_collectives()
        folder.write_error({
            "rank": rank, "time_ns": time.time_ns(), "kind": type(error).__name__, "message": str(error),
            "exit_code": getattr(error, "exit_code", 1), "trace": None if is_expected else traceback.format_exc(),
        })  # fmt: skip
        raise


def init_distributed(world_size: int, job: Job, store: str | None = None) -> torch.device:
    """Initializes the process group from torchrun's environment variables and returns this rank's device.

    `store` is the rendezvous: a file shared by the ranks of this machine, or tcp:HOST:PORT:NAME."""
    device_type, local_rank = pick_device(job), int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, is_shared = torch.device("cpu"), False
    if device_type == "cuda":
        count = torch.cuda.device_count()
        device, is_shared = torch.device("cuda", local_rank % count), local_world_size > count
        torch.cuda.set_device(device)
    elif not dist.is_initialized():  # a world that was forked has one thread per process: its pools do not survive
        torch.set_num_threads(max(1, core_count() // local_world_size))
    if world_size > 1 and not dist.is_initialized():
        forbid_pickles()
        host_staged.register_backend()
        backend = "gloo" if device.type == "cpu" else host_staged.BACKEND if is_shared else "nccl"
        place: dict[str, Any] = {}  # without a store, PyTorch reads it from the environment
        if store is not None:
            place = {"store": open_store(store, world_size), "rank": int(os.environ["RANK"]), "world_size": world_size}
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT, **place)
    return device
