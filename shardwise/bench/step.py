"""How fast one device takes steps of a job, and where a step's time goes.

Steps are taken as training takes them, on random tokens. Their time is the median between device events, or on a CPU
of the clock. Where it goes is read off the profiler, in one more step: kernels by their names, the head (projection and
loss, with the products of their backward, which are computed at once) by when they ran.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.cluster import GIB, peak_rate
from shardwise.data.make import made_up
from shardwise.data.objectives import objective_of
from shardwise.data.stream import Samples, Stream, share
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.models import bert, gpt, t5
from shardwise.models.families import cost_of
from shardwise.optim import make_optimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.step import Recorded, step, taker

WARM = 3  # steps in which blocks are compiled and states made
HEAD = "shardwise head"
KINDS = {
    "attention": r"sdpa|flash|fmha|attention|cudnn::fusion",
    "matrix products": r"gemm|nvjet|cutlass|wgmma|xmma|aten::(mm|addmm|bmm|_scaled_mm)|mkldnn",
    "optimizer": r"adam|multi_tensor|NormTwo|foreach",
}


@dataclass(frozen=True)
class StepReport:
    """One job on one device."""

    device: str
    layout: str
    compiled: bool
    recorded: bool
    """Whether steps are replayed as one CUDA graph."""
    tokens: int
    """In a step."""
    seconds: float
    """Of a step, in the median."""
    spread: float
    """Between the quarter of fastest and of slowest steps, over the median."""
    flops: float
    """Of the model, a second: nothing that is computed again counts."""
    peak_flops: float
    """Of the data sheet; 0 where there is none."""
    peak_memory_gib: float
    parts: dict[str, float]
    """Seconds by what they go to, of one profiled step."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def utilisation(self) -> float:
        return self.flops / self.peak_flops if self.peak_flops else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second, "utilisation": self.utilisation}

    def text(self) -> str:
        words = [word for word, used in (("compiled", self.compiled), ("recorded", self.recorded)) if used]
        rate = f"{100 * self.utilisation:.0f}% of the peak" if self.peak_flops else "no peak rate known"
        held = f"; peak memory {self.peak_memory_gib:.1f} GiB" if self.peak_memory_gib else ""
        lines = [
            f"{self.device}, layout '{self.layout}'{', ' if words else ''}{', '.join(words)}",
            f"{1e3 * self.seconds:.1f} ms a step of {self.tokens:,} tokens, half of them within "
            f"{100 * self.spread:.1f}%: {self.tokens_per_second:,.0f} tokens/s",
            f"{self.flops / 1e12:.4g} TFLOP/s of the model, {rate}{held}",
        ]
        total = sum(self.parts.values())
        lines += [f"  {name:16s} {1e3 * part:8.1f} ms  {100 * part / total:5.1f}%" for name, part in self.parts.items()]
        return "\n".join(lines)


def bench_step(job: Job, device: torch.device, steps: int = 10, warm: int = WARM) -> StepReport:
    """Measures a job on one device, after `warm` steps."""
    layout = Layout() if job.layout == "auto" else Layout.parse(job.layout)
    if layout.world > 1:
        raise LayoutError(
            f"layout '{layout}': `bench step` measures one device; leave it out or give one of 1 process."
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine = parallelize(job, layout, device)
    optimizer = make_optimizer(job.optimizer, engine.holdings)
    model = job.built()
    stream = Stream(made_up(job, 4 * job.samples), job.seed, objective=objective_of(model, job.seed))
    batches = [stream.read(share(number, job.samples, 1, 0)).to(device) for number in range(4)]

    for number in range(warm):
        step(engine, optimizer, batches[number % 4], job.optimizer.clip)
    parts = _parts(engine, lambda: step(engine, optimizer, batches[0], job.optimizer.clip), device)
    compiled = job.compiles(device.type, layout)
    take = taker(engine, optimizer, job.optimizer.clip, compiled, before=0)
    for number in range(2):
        take(batches[number])
    clock = _on_gpu if device.type == "cuda" else _on_cpu
    times = clock(take, [batches[number % 4] for number in range(steps)])
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    middle = statistics.median(times)
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [middle] * 3
    rest = middle - sum(parts.values())
    if rest > 0:
        parts["gaps"] = rest
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return StepReport(
        name, str(layout), compiled, isinstance(take, Recorded), job.samples * job.model.sequence, middle,
        (quarters[2] - quarters[0]) / middle, 3 * sum(cost_of(model)) * job.samples / middle,
        peak_rate(device, job.precision) or 0.0, peak, parts,
    )  # fmt: skip


def _on_gpu(take: Callable[[Samples], Any], batches: list[Samples]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    events[0].record()
    for batch, event in zip(batches, events[1:], strict=True):
        take(batch)
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]


def _on_cpu(take: Callable[[Samples], Any], batches: list[Samples]) -> list[float]:
    times = []
    for batch in batches:
        begin = time.perf_counter()
        take(batch)
        times.append(time.perf_counter() - begin)
    return times


def _parts(engine: Engine, take: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of a step by kind of work."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _marked(engine), profile(activities=activities) as found:
        take()
        if on_gpu:
            torch.cuda.synchronize()
    events: Any = found.events()
    if on_gpu:
        events = [event for event in events if event.device_type == DeviceType.CUDA]
    heads = [event.time_range for event in events if event.name == HEAD]
    parts = dict.fromkeys(["matrix products", "attention", "head", "elementwise", "optimizer"], 0.0)
    for event in events:
        seconds = (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6
        if event.name != HEAD and not (on_gpu and event.is_user_annotation):
            inside = any(head.start <= event.time_range.start <= head.end for head in heads)
            parts["head" if inside else kind_of_work(event.name)] += seconds
    return {name: seconds for name, seconds in parts.items() if seconds}


def kind_of_work(kernel: str) -> str:
    """What a kernel is for, by its name."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "elementwise"


@contextmanager
def _marked(engine: Engine) -> Iterator[None]:
    """Lets the profiler see when the head runs."""
    marks: list[Any] = []

    def begin(*args: Any) -> None:
        marks.append(record_function(HEAD))
        marks[-1].__enter__()

    def end(*args: Any) -> None:
        marks.pop().__exit__(None, None, None)

    heads = [
        module
        for chain in engine.chains
        for module in chain.modules()
        if isinstance(module, gpt.Head | bert.Head | t5.Head)
    ]
    handles = [handle for head in heads
               for handle in (head.register_forward_pre_hook(begin), head.register_forward_hook(end))]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
