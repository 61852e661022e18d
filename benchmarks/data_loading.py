"""Benchmarks the data pipeline: how long a step waits for its batch, and which stage of a batch is the slowest.

Stages are timed in this process, one batch after the other; a stage excludes the stages it calls:

    order       choose the samples of the batch
    read        read records or token windows from files, or generate synthetic ones
    decode      parse bytes
    objective   build inputs and targets (masking, span corruption)
    augment     augment images
    collate     stack samples into one tensor
    transfer    copy to the device

The wait is measured in real steps on one device, with the job's loader running concurrently.

    python benchmarks/data_loading.py JOB.toml [--set key=value ...] [--steps 10] [--json]
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.console import pluralize
from shardwise.data import sample_stream
from shardwise.data.loader import Loader
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream, job_stream, rank_positions
from shardwise.job import Job, load_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.train.local_machine import pick_device

WARMUP_STEPS = 2
STAGES = ("order", "read", "decode", "objective", "augment", "collate", "transfer")
# The stage of each method of a source.
STAGE_OF_METHOD = {
    "rows": "read", "read_bytes": "read", "_read_line": "read", "_draw": "read", "_parse_row": "decode",
    "read_images": "decode",
}  # fmt: skip


class StageTimer:
    """Accumulates seconds by stage; time in a nested stage counts only for the nested one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._nested_seconds = [0.0]

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._nested_seconds.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - begin
                self.seconds[stage] += elapsed - self._nested_seconds.pop()
                self._nested_seconds[-1] += elapsed

        return run


@dataclass(frozen=True)
class DataReport:
    device: str
    batch_size: int  # samples per batch
    workers: int
    prefetch: int
    stage_seconds: dict[str, float]  # median seconds per batch, by stage
    loader_samples_per_s: float  # throughput of the loader alone
    step_seconds: float  # median seconds per step
    wait_seconds: float  # mean seconds per step spent waiting for the batch; waits are too rare for a median

    @property
    def slowest_stage(self) -> str:
        return max(self.stage_seconds, key=lambda stage: self.stage_seconds[stage])

    @property
    def wait_fraction(self) -> float:
        """Fraction of the step time spent waiting for data."""
        return self.wait_seconds / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "slowest_stage": self.slowest_stage, "wait_fraction": self.wait_fraction}

    def text(self) -> str:
        loader = pluralize(self.workers, "worker") if self.workers else "a thread"
        stages, total = self.stage_seconds, sum(self.stage_seconds.values())
        lines = [f"{self.device}, {self.batch_size} samples per batch, loaded by {loader}, prefetch {self.prefetch}"]
        lines += [f"  {name:10s} {1e3 * part:9.3f} ms  {100 * part / total:5.1f}%" for name, part in stages.items()]
        training = self.batch_size / self.step_seconds
        wait = f"{1e3 * self.wait_seconds:.3f} ms ({100 * self.wait_fraction:.2f}%)"
        lines += [
            f"  {'total':10s} {1e3 * total:9.3f} ms; the slowest stage is {self.slowest_stage}",
            f"loader alone: {self.loader_samples_per_s:,.0f} samples/s; training: {training:,.0f} samples/s",
            f"a step takes {1e3 * self.step_seconds:.1f} ms, of which it waits {wait} for data",
        ]
        return "\n".join(lines)


def bench_data(job: Job, device: torch.device, steps: int = 10) -> DataReport:
    """Measures the loader alone, real steps, and each stage of a batch."""
    training, _, _ = make_sources(job)
    stream = job_stream(job, training)
    throughput = _measure_loader(job, stream, device, steps)
    seconds, wait = _measure_steps(job, stream, device, steps)
    stages = _measure_stages(job, stream, device, steps)  # last, since it instruments the stream
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return DataReport(name, job.samples, job.data.workers, job.data.prefetch, stages, throughput, seconds, wait)


def _make_loader(job: Job, stream: SampleStream, device: torch.device) -> Loader:
    return Loader(stream, job.samples, workers=job.data.workers, prefetch=job.data.prefetch, device=device)


def _measure_loader(job: Job, stream: SampleStream, device: torch.device, steps: int) -> float:
    """Returns the samples per second of the loader alone."""
    with closing(_make_loader(job, stream, device)) as loader:
        for _ in range(WARMUP_STEPS + job.data.prefetch):
            next(loader)
        begin = time.perf_counter()
        for _ in range(steps):
            next(loader)
        return steps * job.samples / (time.perf_counter() - begin)


def _measure_steps(job: Job, stream: SampleStream, device: torch.device, steps: int) -> tuple[float, float]:
    """Returns the median seconds per step and the mean seconds it waits for data."""
    engine = parallelize(prepare(job, Layout()), device)
    optimizer = engine.make_optimizer(job)
    times, waits = [], []
    with closing(_make_loader(job, stream, device)) as loader:
        for _ in range(WARMUP_STEPS + steps):
            begin, before = time.perf_counter(), loader.wait_seconds
            outcome = step(engine, optimizer, next(loader)[1].to(device), job.optimizer.clip)
            float(outcome.loss)  # synchronizes, as training does
            times.append(time.perf_counter() - begin)
            waits.append(loader.wait_seconds - before)
    return statistics.median(times[WARMUP_STEPS:]), statistics.mean(waits[WARMUP_STEPS:])


def _measure_stages(job: Job, stream: SampleStream, device: torch.device, steps: int) -> dict[str, float]:
    """Returns the median seconds per batch of each stage. Leaves timers in the stream."""
    timer = StageTimer()
    source: Any = stream.source
    for name, stage in STAGE_OF_METHOD.items():
        if hasattr(source, name):
            setattr(source, name, timer.wrap(stage, getattr(source, name)))
    if augment := getattr(source, "augment", None):
        augment.apply = timer.wrap("augment", augment.apply)
    patched: Any = stream
    patched.indices = timer.wrap("order", stream.indices)
    sample_stream.read_sample = timer.wrap("read", sample_stream.read_sample)
    patched.objective = timer.wrap("objective", stream.objective)
    read = timer.wrap("collate", stream.read)
    times: dict[str, list[float]] = {}
    for number in range(WARMUP_STEPS + steps):
        timer.seconds.clear()
        samples = read(rank_positions(number, job.samples, 1, 0))
        begin = time.perf_counter()
        samples.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        timer.seconds["transfer"] = time.perf_counter() - begin
        if number >= WARMUP_STEPS:
            for stage in timer.seconds:
                times.setdefault(stage, []).append(timer.seconds[stage])
    return {stage: statistics.median(times[stage]) for stage in STAGES if stage in times}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("job_file", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = load_job(options.job_file, options.set)
    report = bench_data(job, torch.device(pick_device(job)), options.steps)
    print(json.dumps(report.as_dict()) if options.json else report.text())


if __name__ == "__main__":
    main()
