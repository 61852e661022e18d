"""Starting a training world: alone, through PyTorch's elastic agent, or as part of a world that exists already.

What went wrong is told once, in the words of the worker that failed first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import LayoutError, RunError, UserError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.train.folder import RunFolder
from shardwise.train.here import check_compiler, pick_device
from shardwise.train.worker import work
from shardwise.words import counted, signal_name

# Slurm's names for what torchrun calls RANK and so on.
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def joined_world() -> int | None:
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


def check_world(layout: Layout, job: Job) -> None:
    """Raises where this world, or this machine, does not have what a layout and a job need."""
    if job.compile is True and pick_device(job) == "cpu":
        check_compiler()
    world = joined_world()
    if world is not None and world != layout.world:
        raise LayoutError(f"layout '{layout}' needs {counted(layout.world, 'process')}, but this world has {world}.")
    most = max(job.run.processes, torch.cuda.device_count()) if pick_device(job) == "cuda" else layout.world
    if world is None and layout.world > most:
        raise LayoutError(
            f"layout '{layout}' needs {counted(layout.world, 'process')}, but this machine has "
            f"{counted(torch.cuda.device_count(), 'GPU')}; "
            "use a smaller layout, start under torchrun on more machines, let processes share a GPU "
            f'(run.processes = {layout.world}), or set run.device = "cpu".'
        )


def launch(folder: RunFolder, layout: Layout, resume: bool) -> None:
    """Runs the world to its end. Raises the first failure."""
    if joined_world() is not None:
        _join_in(folder, layout, resume)
        return
    folder.clear_errors()
    if layout.world == 1:
        work(folder, layout, resume)
        return
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    told: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        """A signal to the launcher is one to every worker; the agent then sees them end by themselves."""
        told.append(number)
        for child in psutil.Process().children():
            child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    command = ["-u", "-m", "shardwise.train.worker", str(folder.path), str(layout), *(["--resume"] if resume else [])]
    with tempfile.TemporaryDirectory(prefix="shardwise-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=layout.world, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, local_addr="localhost",
            signals_to_handle="SIGQUIT", logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as failure:
            if told and not folder.error_records():
                raise RunError(f"told to stop by {signal_name(told[0])} before training began.") from None
            raise first_failure(folder, failure) from None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _join_in(folder: RunFolder, layout: Layout, resume: bool) -> None:
    """One rank of a world that others made. If it fails, it speaks only if no other rank failed before it."""
    try:
        work(folder, layout, resume)
    except BaseException as error:  # noqa: BLE001 - it is written down already
        time.sleep(1.0)  # for the records of the others
        records = folder.error_records()
        if records and records[0]["rank"] == int(os.environ["RANK"]):
            print(f"shardwise: {last_words(records[0])}", file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_code", 1))  # peers wait in collectives: no tear-down that would wait for them
    if dist.is_initialized():
        dist.destroy_process_group()


def last_words(record: dict[str, Any]) -> str:
    """A worker's last words: the sentence of an error that we raise on purpose, the trace of any other."""
    said = record["trace"] or record["message"]
    return str(said) if record["exit_code"] == 2 else f"rank {record['rank']} failed: {said.rstrip()}"


def first_failure(folder: RunFolder, failure: ChildFailedError) -> Exception:
    """The error of the worker that failed first. One that was killed could write nothing, so it comes before all."""
    records = folder.error_records()
    heard = {record["rank"] for record in records}
    for rank, process in sorted(failure.failures.items()):
        if rank not in heard and process.exitcode < 0 and process.exitcode != -signal.SIGTERM:
            name = signal.Signals(-process.exitcode).name
            return RunError(f"rank {rank} was killed by {name}; the others ended because of it.")
    if not records:
        return RunError(f"the workers ended without a word: {failure.get_first_failure()}")
    first = records[0]
    return (UserError if first["exit_code"] == 2 else RunError)(last_words(first))
