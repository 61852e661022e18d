"""This machine: its devices, the number of processes to run on them, its description for the planner, and the plan.

The plan of a training run is the planner's best layout for `layout = "auto"`, else the job's own layout. It is made
before any process starts and saved in the run folder, so that predictions can be compared with measurements. Under an
external launcher every process computes the same plan by itself."""

import ctypes
import os
import shutil
import sys
import timeit
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from shardwise.cluster import CLUSTERS, GIB, Cluster, cluster_by_driver_name, find_cluster
from shardwise.console import format_count, format_seconds, pluralize
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.prepare import Prepared, prepare
from shardwise.planner.plan import Plan, count_parameters, make_estimator, make_plan

FORKED_PROCESS_BYTES = 0.1 * GIB  # that a worker does not share with the process it was forked from
MAX_COUNTS = 512  # process counts to try one by one; of a larger number, only powers of two below it
MAX_SLOWDOWN = 5.0  # of matmuls in 16 bits on a CPU; beyond it they are warned of, and planned
MEMORY_TOLERANCE = 2.0  # a layout that the job names is refused beyond this: predictions err, but less than this


def low_precision_slowdown(job: Job) -> float:
    """Returns how many times longer than in float32 matmuls take in the job's precision: on a CPU without instructions
    for it a hundred times and more. 1 for a GPU, and for float32 and float64."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    if dtype is None or pick_device(job) != "cpu":
        return 1.0
    seconds = {}
    for kind in (torch.float32, dtype):
        matrix = torch.ones(128, 128, dtype=kind)
        seconds[kind] = min(timeit.repeat(partial(torch.mm, matrix, matrix), number=1, repeat=4))
    return seconds[dtype] / seconds[torch.float32]


def pick_device(job: Job) -> str:
    """Returns `cuda` or `cpu`. Queries NVML, since initializing CUDA would break processes forked later."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if job.run.device == "cuda" and not torch.cuda.is_available():
        raise LayoutError('run.device = "cuda", but PyTorch sees no GPU here; use "cpu" or "auto".')
    if job.run.device != "auto":
        return job.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_compiler() -> None:
    """Raises JobError if there is no C++ compiler, which `compile` needs on CPUs."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # where PyTorch looks
    if shutil.which(name) is None:
        raise JobError(f"compile = true needs a C++ compiler, but {name!r} was not found; install it, or set CXX.")


def local_process_count(job: Job) -> int:
    return job.run.processes or (torch.cuda.device_count() if pick_device(job) == "cuda" else core_count())


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_cluster(job: Job, processes: int) -> tuple[Cluster, str]:
    """Returns this machine as a cluster of that many processes, and where the numbers come from: `run.cluster` if set,
    else the data sheet of the GPU by its name and memory, else the CPU preset."""
    if job.run.cluster:
        return find_cluster(job.run.cluster), job.run.cluster
    if pick_device(job) == "cpu":
        cluster, slowdown = _cpu_cluster(processes), low_precision_slowdown(job)
        if slowdown > MAX_SLOWDOWN:
            peaks = cluster.device.peak_by_precision
            peaks = {**peaks, job.precision: peaks["float32"] / slowdown}
            cluster = replace(cluster, device=replace(cluster.device, peak_by_precision=peaks))
        return cluster, "the CPU preset"
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
    oversubscription = max(1.0, processes / core_count())
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


def available_memory() -> float:
    """Returns the memory that is free on this machine, or in its container, in bytes."""
    free = float(psutil.virtual_memory().available)
    limit, statistics = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if not limit.is_file() or not statistics.is_file() or not limit.read_text().strip().isdigit():
        return free

    lines = (line.split() for line in statistics.read_text().splitlines())
    used = {key: float(value) for key, value in lines}
    taken = used.get("anon", 0.0) + used.get("shmem", 0.0)  # the rest are caches, which give way
    return min(free, float(limit.read_text()) - taken)


def require_memory(job: Job, bytes_per_parameter: int, processes: int = 1, share: float = 1.0) -> None:
    """Raises LayoutError if this machine cannot hold a single copy of the model's state (a share of it, if there are
    other machines) and the processes: a lower bound that no layout gets below."""
    parameters, owned = count_parameters(job), torch.cuda.device_count() * first_gpu()[1]
    needed = share * parameters * bytes_per_parameter
    if pick_device(job) == "cpu":
        needed, owned = needed + processes * (1 + job.data.workers) * FORKED_PROCESS_BYTES, host_memory()
    if needed > owned > 0:
        needs = f"{format_count(parameters)} parameters in {pluralize(processes, 'process')} need {needed / GIB:,.1f}"
        remedy = "use a smaller model, fewer processes and data.workers, or more machines"
        raise LayoutError(f"{needs} GiB of memory, but this machine has {owned / GIB:,.1f} GiB; {remedy}.")


def choose_plan(job: Job, world_size: int | None = None, at_most: bool = False) -> tuple[Plan, str]:
    """Returns the plan for `world_size` processes (default: at most what fits here), and the machine's source."""
    if job.layout != "auto":
        layout = Layout.parse(job.layout)
        cluster, source = local_cluster(job, int(os.environ.get("LOCAL_WORLD_SIZE", world_size or layout.world)))
        return make_plan(job, cluster, world_size, str(layout)), source
    max_devices = world_size or local_process_count(job)
    counts = [*range(max_devices, 0, -1)]
    if max_devices > MAX_COUNTS:
        counts = [max_devices, *(2**n for n in range(9, -1, -1))]
    for devices in counts[:1] if world_size and not at_most else counts:
        cluster, source = local_cluster(job, int(os.environ.get("LOCAL_WORLD_SIZE", devices)))
        try:
            return make_plan(job, cluster, devices, runnable=True), source
        except LayoutError as error:
            last_error = error
    raise last_error


def check_memory(job: Job, plan: Plan) -> None:
    """Raises LayoutError if no layout that "auto" tried fits in memory, or if the job's own layout does not by far."""
    device, needed = plan.cluster.device, plan.best.peak_memory
    sizes = " of ".join(f"{size / GIB:,.1f}" for size in (needed, device.memory))
    if job.layout == "auto" and not plan.fits(plan.best):
        problem = f"no layout of {plan.devices} x {device.name} fits in memory"
        raise LayoutError(f"{problem}: '{plan.best.layout}' needs least, {sizes} GiB per rank; use more devices.")
    if needed > MEMORY_TOLERANCE * device.memory:
        layout = plan.best.layout
        ways = {"recompute=full": layout.recompute != "full", "a smaller micro_batch": layout.micro_batch > 1,
                "zero=3": layout.shard > 1 and layout.zero < 3}  # fmt: skip
        remedy = ", ".join(["use a smaller model or batch", *(way for way, helps in ways.items() if helps)])
        remedy += ", or more devices"
        raise LayoutError(f"layout '{plan.best.layout}' does not fit in memory: {sizes} GiB per rank; {remedy}.")


def describe_plan(plan: Plan, source: str) -> str:
    """Returns the prediction for the chosen layout and why it won, in one line."""
    best, device = plan.best, plan.cluster.device
    peak = best.peak_memory / GIB
    memory = f"{peak:.{2 if peak < 100 else 3}g} of {device.memory / GIB:.3g} GiB"
    line = f"predicted {format_seconds(best.seconds)} per step, {memory} on {device.name} ({source})"
    if plan.untraceable:
        line += f"; a rough estimate from the parameters alone, since {plan.untraceable}"
    if plan.evaluated == 1:
        return line
    near_miss = f"; {plan.near_misses[0]}" if plan.near_misses else ""
    return f"best of {pluralize(plan.evaluated, 'layout')}: {line}{near_miss}"


def layout_record(prepared: Prepared) -> dict[str, Any]:
    """Returns the part of `plan.toml` that describes the layout itself."""
    layout, batch = prepared.layout, prepared.batch
    return {"layout": str(layout), "world": layout.world, "stages": [list(span) for span in prepared.stages],
            "micro_batch": batch.micro_batch, "micro_batches": batch.micro_batches}  # fmt: skip


def _pipeline_record(job: Job, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the predicted seconds of the pipeline's stages, and its order if the schedule is synthesized."""
    layout, estimator = plan.best.layout, make_estimator(job, plan.cluster)
    if layout.pipeline == 1:
        return {}, {}
    stages = {part: list(seconds) for part, seconds in vars(estimator.stage_costs(layout)).items()}
    rows = estimator.auto_schedule(layout).program.order if estimator.is_auto_schedule(layout) else {}
    order = [[[action.stage, action.kind, action.micro_batch] for action in row] for row in rows.values()]
    return {"stage_seconds": stages}, {"order": order} if order else {}


def plan_record(job: Job, plan: Plan, source: str) -> dict[str, Any]:
    """Returns the contents of `plan.toml`."""
    best = plan.best
    others = zip(plan.layouts[1:], plan.reasons[1:], strict=True)
    stages, order = _pipeline_record(job, plan)
    memory = [{"pipeline_rank": rank, **{part: size / GIB for part, size in usage._asdict().items()}}
              for rank, usage in enumerate(best.memory)]  # fmt: skip
    predicted = {"device": plan.cluster.device.name, "cluster_source": source, "step_seconds": best.seconds,
                 "tokens_per_s": plan.tokens_per_second(best) * plan.devices, "bubble": best.bubble,
                 "peak_memory_gib": best.peak_memory / GIB, "device_memory_gib": plan.cluster.device.memory / GIB,
                 "layouts_evaluated": plan.evaluated, "exposed_seconds": best.exposed, **stages,
                 "memory_gib": memory}  # fmt: skip
    rejected = [{"layout": str(other.layout), "step_seconds": other.seconds, "reason": why} for other, why in others]
    missed = [line.partition(": ") for line in plan.near_misses]
    rejected += [{"choice": choice, "reason": reason} for choice, _, reason in missed]
    return {**layout_record(prepare(job, best.layout)), **order, "reason": describe_plan(plan, source),
            "predicted": predicted, "rejected": rejected}  # fmt: skip
