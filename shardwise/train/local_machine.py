"""This machine: its devices, the number of processes to run on them, and its description for the planner."""

import ctypes
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from shardwise.cluster import CLUSTERS, GIB, Cluster, cluster_by_driver_name, find_cluster
from shardwise.console import format_count, pluralize
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job
from shardwise.parallel.prepare import meta_model

FORKED_PROCESS_BYTES = 0.1 * GIB  # that a worker does not share with the process it was forked from


def pick_device(job: Job) -> str:
    """Returns `cuda` or `cpu`. Queries NVML, since initializing CUDA would break processes forked later."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if job.run.device != "auto":
        if job.run.device == "cuda" and not torch.cuda.is_available():
            raise LayoutError('run.device = "cuda", but PyTorch sees no GPU here; use "cpu" or "auto".')
        return job.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_compiler() -> None:
    """Raises JobError if there is no C++ compiler, which `compile` needs on CPUs."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # where PyTorch looks
    if shutil.which(name) is None:
        raise JobError(
            f"compile = true needs a C++ compiler, and {name!r} was not found; install it, set CXX, or compile = false."
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
    """Returns this machine as a cluster of that many processes, and where the numbers come from: `run.cluster` if set,
    else the data sheet of the GPU by its name and memory, else the CPU preset."""
    if job.run.cluster:
        return find_cluster(job.run.cluster), job.run.cluster
    if pick_device(job) == "cpu":
        return _cpu_cluster(processes), "the CPU preset"
    name, memory = first_gpu()
    known = cluster_by_driver_name(name, memory)
    if known is None:  # an unknown GPU: its memory size matters most
        base = CLUSTERS["a100-80g"]
        device = replace(base.device, name=name, memory=memory or base.device.memory)
        return replace(base, device=device, domain_size=processes), "unknown GPU: modelled as an A100"
    domain_size = max(processes, known.domain_size if known.domain_size > 8 else 1)
    return replace(known, domain_size=domain_size), "its data sheet"


def _cpu_cluster(processes: int) -> Cluster:
    """Divides the memory among the processes; more processes than cores slow everything else down in proportion."""
    cpu = CLUSTERS["cpu"]
    oversubscription = max(1.0, processes / _core_count())
    peaks = {precision: rate / oversubscription for precision, rate in cpu.device.peak_by_precision.items()}
    bandwidth, memory = cpu.device.bandwidth / oversubscription, host_memory() / processes
    device = replace(cpu.device, peak_by_precision=peaks, bandwidth=bandwidth, memory=memory)
    slower = {key: cpu.measured[key] * oversubscription for key in ("kernel_launch", "collective_start", "latency")}
    measured = {**cpu.measured, **slower, "uncontended_speedup": oversubscription}
    return replace(cpu, device=device, domain_size=processes, measured=measured)


def first_gpu() -> tuple[str, float]:
    """Returns name and memory of GPU 0 from NVML, for the same reason as in `pick_device`."""
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
    """Returns the memory of this machine, or of its container, in bytes."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    total = float(psutil.virtual_memory().total)
    return min(total, float(text)) if text.isdigit() else total


def require_memory(job: Job, bytes_per_parameter: int, processes: int = 1, share: float = 1.0) -> None:
    """Raises LayoutError if this machine cannot hold a single copy of the model's state (a share of it, if there are
    other machines) and the processes: a lower bound that no layout gets below."""
    parameters = sum(weight.numel() for weight in meta_model(job.model, job.seed).parameters())
    parameters += sum(table.size for table in job.family.tables(job.model))
    needed, owned = share * parameters * bytes_per_parameter, torch.cuda.device_count() * first_gpu()[1]
    if pick_device(job) == "cpu":
        needed, owned = needed + processes * (1 + job.data.workers) * FORKED_PROCESS_BYTES, host_memory()
    if needed > owned > 0:
        raise LayoutError(
            f"{format_count(parameters)} parameters in {pluralize(processes, 'process')} need at least "
            f"{needed / GIB:,.1f} GiB of memory, but this machine has {owned / GIB:,.1f} GiB; use a smaller model, "
            "fewer processes and data.workers, or more machines."
        )
