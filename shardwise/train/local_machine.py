"""What this machine has: devices, processes to run on them, and the cluster that it is to the planner."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from shardwise.cluster import CLUSTERS, Cluster, cluster_by_driver_name, find_cluster
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job


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


def local_process_count(job: Job) -> int:
    if job.run.processes:
        return job.run.processes
    if pick_device(job) == "cuda":
        return torch.cuda.device_count()
    return _core_count()


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_cluster(job: Job, processes: int) -> tuple[Cluster, str]:
    """The cluster of this machine, for worlds with so many processes on it; and where its description is from.

    `run.cluster` if it is given; else the data sheet of the GPU, by its name and memory; else that of a CPU.
    """
    if job.run.cluster:
        return find_cluster(job.run.cluster), job.run.cluster
    if pick_device(job) == "cpu":
        return _cpu_cluster(processes), "the preset for CPUs"
    name, memory = first_gpu()
    known = cluster_by_driver_name(name, memory)
    if known is None:  # a GPU that we have no data sheet of: what matters most is how much it holds
        base = CLUSTERS["a100-80g"]
        device = replace(base.device, name=name, memory=memory or base.device.memory)
        return replace(base, device=device, domain_size=processes), "no data sheet: computed as an A100"
    return replace(
        known, domain_size=max(processes, known.domain_size if known.domain_size > 8 else 1)
    ), "its data sheet"


def _cpu_cluster(processes: int) -> Cluster:
    """Processes share the memory, and where they are more than cores those too: all else takes longer by as much."""
    cpu = CLUSTERS["cpu"]
    oversubscription = max(1.0, processes / _core_count())
    peak = {word: rate / oversubscription for word, rate in cpu.device.peak_by_precision.items()}
    device = replace(
        cpu.device,
        peak_by_precision=peak,
        bandwidth=cpu.device.bandwidth / oversubscription,
        memory=host_memory() / processes,
    )
    slower = {key: cpu.measured[key] * oversubscription for key in ("kernel_launch", "collective_start", "latency")}
    return replace(
        cpu,
        device=device,
        domain_size=processes,
        measured={**cpu.measured, **slower, "uncontended_speedup": oversubscription},
    )


def first_gpu() -> tuple[str, float]:
    """Name and bytes of the first GPU, from the driver's monitor, for the same reason as in `pick_device`."""
    try:
        nvml, handle, name = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.create_string_buffer(96)
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        nvml.nvmlInit_v2()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        nvml.nvmlDeviceGetName(handle, name, len(name))
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    except (OSError, AttributeError):
        return "GPU", 0.0
    return name.value.decode(errors="replace") or "GPU", float(memory[0])


def host_memory() -> float:
    """Bytes of this machine, or of the container that we are in."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    total = float(psutil.virtual_memory().total)
    return min(total, float(text)) if text.isdigit() else total
