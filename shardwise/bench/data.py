"""How long a step of a job waits for its data, and which stage of making a batch takes longest.

Stages are timed in this process, one batch after the other, each without those inside it:

    order       which samples come
    read        records from files, a window of tokens, or numbers drawn where there are no files
    decode      bytes to numbers
    objective   what is predicted: masks, runs left out
    augment     images changed on the fly
    collate     rows to one tensor
    transfer    to the device

The wait is that of real steps on one device, with the job's loader beside them.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardwise.data.loader import Loader
from shardwise.data.make import make_sources
from shardwise.data.objectives import objective_of
from shardwise.data.stream import Stream, share
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.recommender import optimizer_of
from shardwise.step import step
from shardwise.words import counted

WARM = 2
STAGES = ("order", "read", "decode", "objective", "augment", "collate", "transfer")
# Methods of a source by the stage that they are.
METHODS = {
    "rows": "read", "raw": "read", "_line": "read", "_draw": "read", "_row": "decode", "pictures": "decode",
}  # fmt: skip


class Stopwatch:
    """Seconds by stage; what a stage calls of others counts for those."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            self._inside.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                taken = time.perf_counter() - begin
                self.seconds[stage] += taken - self._inside.pop()
                self._inside[-1] += taken

        return run


@dataclass(frozen=True)
class DataReport:
    device: str
    samples: int
    """In a batch."""
    workers: int
    prefetch: int
    stages: dict[str, float]
    """Seconds of a batch, in the median."""
    loader: float
    """Samples a second of the loader with nothing else to do."""
    seconds: float
    """Of a step, in the median."""
    wait: float
    """Of that, for the batch; in the mean, since one step may wait for many."""

    @property
    def slowest(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])

    @property
    def share(self) -> float:
        """Of all steps' time, what is waiting."""
        return self.wait / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "slowest": self.slowest, "share": self.share}

    def text(self) -> str:
        made = counted(self.workers, "worker") if self.workers else "a thread"
        total = sum(self.stages.values())
        lines = [f"{self.device}, batches of {self.samples}, made by {made}, {self.prefetch} ahead"]
        lines += [
            f"  {name:10s} {1e3 * part:9.3f} ms  {100 * part / total:5.1f}%" for name, part in self.stages.items()
        ]
        lines += [
            f"  {'in all':10s} {1e3 * total:9.3f} ms, most of it {self.slowest}",
            f"loader alone {self.loader:,.0f} samples/s; steps take {self.samples / self.seconds:,.0f} samples/s",
            f"a step of {1e3 * self.seconds:.1f} ms waits {1e3 * self.wait:.3f} ms for data, {100 * self.share:.2f}%",
        ]
        return "\n".join(lines)


def bench_data(job: Job, device: torch.device, steps: int = 10) -> DataReport:
    training, _, _ = make_sources(job)
    stream = Stream(training, job.seed, objective=objective_of(job.model, job.seed))
    loader, (seconds, wait) = _rate(job, stream, device, steps), _steps(job, stream, device, steps)
    stages = _stages(job, stream, device, steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return DataReport(name, job.samples, job.data.workers, job.data.prefetch, stages, loader, seconds, wait)


def _loader(job: Job, stream: Stream, device: torch.device) -> Loader:
    return Loader(stream, job.samples, workers=job.data.workers, prefetch=job.data.prefetch, device=device)


def _rate(job: Job, stream: Stream, device: torch.device, steps: int) -> float:
    with _loader(job, stream, device) as loader:
        for _ in range(WARM + job.data.prefetch):
            next(loader)
        begin = time.perf_counter()
        for _ in range(steps):
            next(loader)
        return steps * job.samples / (time.perf_counter() - begin)


def _steps(job: Job, stream: Stream, device: torch.device, steps: int) -> tuple[float, float]:
    """Seconds of a step, and how much of it is waiting."""
    engine = parallelize(job, Layout(), device)
    optimizer = optimizer_of(job, engine)
    times, waits = [], []
    with _loader(job, stream, device) as loader:
        for _ in range(WARM + steps):
            begin, before = time.perf_counter(), loader.wait_seconds
            outcome = step(engine, optimizer, next(loader)[1].to(device), job.optimizer.clip)
            float(outcome.loss)  # as training waits for it
            times.append(time.perf_counter() - begin)
            waits.append(loader.wait_seconds - before)
    return statistics.median(times[WARM:]), statistics.mean(waits[WARM:])


def _stages(job: Job, stream: Stream, device: torch.device, steps: int) -> dict[str, float]:
    """Last, since it leaves its clocks in the stream."""
    watch = Stopwatch()
    source: Any = stream.source
    for name, stage in METHODS.items():
        if hasattr(source, name):
            setattr(source, name, watch.timed(stage, getattr(source, name)))
    if augment := getattr(source, "augment", None):
        for name in ("change", "partners", "mix"):
            setattr(augment, name, watch.timed("augment", getattr(augment, name)))
    replaced: Any = stream
    replaced.indices = watch.timed("order", stream.indices)
    replaced._sample = watch.timed("read", stream._sample)
    replaced.objective = watch.timed("objective", stream.objective)
    read = watch.timed("collate", stream.read)
    found: dict[str, list[float]] = {}
    for number in range(WARM + steps):
        watch.seconds.clear()
        samples = read(share(number, job.samples, 1, 0))
        begin = time.perf_counter()
        samples.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        watch.seconds["transfer"] = time.perf_counter() - begin
        if number >= WARM:
            for stage in watch.seconds:
                found.setdefault(stage, []).append(watch.seconds[stage])
    return {stage: statistics.median(found[stage]) for stage in STAGES if stage in found}
