"""Benchmarks training steps of a job on one device, and breaks down where the time goes.

Steps run as in training, on random tokens. The step time is the median between CUDA events, or of the wall clock on a
CPU. The breakdown comes from a separate, profiled step: kernels are classified by name, except those of the head
(projection and loss, whose backward matmuls run in its forward), which are recognized by when they ran."""

import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.cluster import GIB, device_peak_flops
from shardwise.console import fill_in
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import Samples, job_stream, rank_positions
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.models import bert, gpt
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import forward_flops, prepare
from shardwise.step import make_step_fn, step

WARMUP_STEPS = 3  # compile the blocks and initialize optimizer state
HEAD_ANNOTATION = "shardwise head"
KERNEL_PATTERNS = {"attention": r"sdpa|flash|fmha|attention|cudnn::fusion",
                   "matmul": r"gemm|nvjet|cutlass|wgmma|xmma|aten::(mm|addmm|bmm|_scaled_mm)|mkldnn",
                   "optimizer": r"adam|multi_tensor|NormTwo|foreach"}  # fmt: skip


@dataclass(frozen=True)
class StepReport:
    """Throughput, memory and time breakdown of one job on one device."""

    device: str
    layout: str
    compiled: bool
    uses_cuda_graph: bool  # whether steps replay a CUDA graph
    tokens: int  # tokens per step
    seconds: float  # median seconds per step
    relative_iqr: float  # interquartile range of the step time over its median
    flops_per_second: float  # model FLOP/s, without recomputation
    peak_flops_per_second: float  # peak FLOP/s of the device; 0 if unknown
    peak_memory_gib: float
    time_breakdown: dict[str, float]  # seconds by kind of kernel, in one profiled step

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.flops_per_second / self.peak_flops_per_second if self.peak_flops_per_second else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second, "mfu": self.mfu}

    def text(self) -> str:
        return fill_in(Path(__file__).with_name("step.txt"), self.as_dict())


def bench_step(job: Job, device: torch.device, steps: int = 10, warmup_steps: int = WARMUP_STEPS) -> StepReport:
    layout = Layout() if job.layout == "auto" else Layout.parse(job.layout)
    if layout.world > 1:
        raise LayoutError(f"layout '{layout}': `bench step` runs on one device; remove the layout from the job.")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine = parallelize(prepare(job, layout), device)
    optimizer = engine.make_optimizer(job)
    count = warmup_steps + 1 + 2 + steps
    stream = job_stream(job, synthetic_source(job, count * job.samples))
    batches = (stream.read(rank_positions(number, job.samples, 1, 0)).to(device) for number in range(count))
    for _ in range(warmup_steps):
        step(engine, optimizer, next(batches), job.optimizer.clip)
    profiled = next(batches)
    time_breakdown = _profile_step(engine, lambda: step(engine, optimizer, profiled, job.optimizer.clip), device)
    compiled = job.should_compile(device.type, layout)
    captures = compiled and not job.offload_activations
    step_fn = make_step_fn(engine, optimizer, job.optimizer.clip, captures, warmup_steps=0)
    for _ in range(2):
        step_fn(next(batches))
    times = _time_steps(step_fn, list(batches), device.type == "cuda")
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    if (unaccounted := median - sum(time_breakdown.values())) > 0:
        time_breakdown["gaps"] = unaccounted
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return StepReport(name, str(layout), compiled, getattr(step_fn, "graph", None) is not None,
                      job.samples * job.model.sequence_length, median, (quartiles[2] - quartiles[0]) / median,
                      3 * sum(forward_flops(job.model)) * job.samples / median,
                      device_peak_flops(device, job.precision) or 0.0, peak, time_breakdown)  # fmt: skip


def _time_steps(step_fn: Callable[[Samples], Any], batches: list[Samples], on_gpu: bool) -> list[float]:
    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    times = [now()]
    for batch in batches:
        step_fn(batch)
        times.append(now())
    if on_gpu:
        torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in zip(times, times[1:])]


def _profile_step(engine: Engine, step_fn: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Profiles one step; returns its seconds by kind of kernel."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _annotate_head(engine), profile(activities=activities) as profiler:
        step_fn()
        if on_gpu:
            torch.cuda.synchronize()
    events: Any = profiler.events()
    if on_gpu:
        events = [event for event in events if event.device_type == DeviceType.CUDA]
    heads = [event.time_range for event in events if event.name == HEAD_ANNOTATION]
    time_breakdown = dict.fromkeys(["matmul", "attention", "head", "elementwise", "optimizer"], 0.0)
    for event in events:
        seconds = (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6
        if event.name != HEAD_ANNOTATION and not (on_gpu and event.is_user_annotation):
            is_head = any(head.start <= event.time_range.start <= head.end for head in heads)
            time_breakdown["head" if is_head else classify_kernel(event.name)] += seconds
    return {name: seconds for name, seconds in time_breakdown.items() if seconds}


def classify_kernel(kernel: str) -> str:
    kinds = (kind for kind, pattern in KERNEL_PATTERNS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(kinds, "elementwise")


@contextmanager
def _annotate_head(engine: Engine) -> Iterator[None]:
    modules = [module for chain in engine.chains for module in chain.modules()]
    heads = [module for module in modules if isinstance(module, gpt.DecoderHead | bert.BertHead)]
    for head in heads:
        head.forward = record_function(HEAD_ANNOTATION)(head.forward)  # type: ignore[method-assign]
    yield
    for head in heads:
        del head.forward
