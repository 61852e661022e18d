"""What this machine has, and a layout for `layout = "auto"`: until there is a planner, copies on every local device."""

from __future__ import annotations

import os
import shutil
import sys

import torch

from shardwise.errors import JobError, LayoutError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import check
from shardwise.words import counted


def pick_device(job: Job) -> str:
    """`cuda` or `cpu`. Asks the driver's monitor: asking CUDA itself would break every process forked afterwards."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if job.run.device != "auto":
        if job.run.device == "cuda" and not torch.cuda.is_available():
            raise LayoutError('run.device = "cuda", but PyTorch sees no GPU here; use "cpu" or "auto".')
        return job.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_compiler() -> None:
    """Raises where there is nothing to build compiled blocks with: on a CPU they become C++."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # where PyTorch looks
    if shutil.which(name) is None:
        raise JobError(
            f"compile = true needs a C++ compiler on a CPU, and there is no {name!r}; install it, name another one in "
            "the environment variable CXX, or set compile = false."
        )


def local_processes(job: Job) -> int:
    if job.run.processes:
        return job.run.processes
    if pick_device(job) == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_layout(job: Job, processes: int | None = None) -> Layout:
    """The job's layout, or for "auto" the most copies that the global batch divides over, up to `processes`."""
    if job.layout != "auto":
        return Layout.parse(job.layout)
    available = processes or local_processes(job)
    for replicate in range(available, 0, -1):
        if job.samples % replicate == 0 and (processes is None or replicate == processes):
            layout = Layout(replicate=replicate)
            check(job, layout)
            return layout
    raise LayoutError(
        f"a global batch of {counted(job.samples, 'sample')} does not divide over {available} processes; "
        "change batch.samples or give a layout."
    )
