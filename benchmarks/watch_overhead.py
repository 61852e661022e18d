"""Measures the overhead of metrics: steps with all metrics of every rank against steps with none, on CPU.

With metrics: phases, wait time by axis, gathering all ranks' rows, `metrics.jsonl` and `ranks.jsonl`. Without: the
step, the all-reduce of signals and reading the loss, which any loop needs. Both alternate in the same processes, so
that noise affects both equally. The ratio is that of the medians, with a 90% bootstrap interval, for wall time and for
CPU time, which other load on the machine affects less. Run: python benchmarks/watch_overhead.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream, SyntheticTokens, rank_positions
from shardwise.integrity.detectors import CorruptionDetector
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.train.metrics_processor import MetricsProcessor, Progress
from shardwise.train.run_folder import RunFolder

LAYOUTS = ("pipeline=1", "replicate=2", "shard=2 zero=3", "tensor=2", "pipeline=2 micro_batch=2")
Times = list[tuple[float, float]]  # wall and CPU seconds


def compare(job: Job, layout: Layout, turns: int, folder: str) -> tuple[Times, Times]:
    """Returns the times of steps with and without metrics."""
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = engine.make_optimizer(job)
    detector = CorruptionDetector(job, engine, optimizer, Path(folder), 0.0, lambda *_, **__: None)  # not measured here
    metrics_processor = MetricsProcessor(
        job, engine, optimizer, RunFolder(Path(folder)), Progress(turns, False), detector
    )
    stream = SampleStream(SyntheticTokens(4096, job.require_decoder().sequence, job.require_decoder().vocab, 0), 0)
    data = engine.mesh["data"]
    batches = [stream.read(rank_positions(number, job.samples, data.size, data.index)) for number in range(4)]
    times: dict[bool, Times] = {True: [], False: []}
    for turn in range(turns + 3):
        for metrics in (True, False) if turn % 2 else (False, True):
            engine.timer.enabled = metrics
            if layout.world > 1:
                dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            if metrics:
                metrics_processor.ranks.begin(turn)
                engine.timer.begin_phase("data")
                engine.timer.begin_phase("compute")
            outcome = step(engine, optimizer, batches[turn % 4], job.optimizer.clip)
            if metrics:
                metrics_processor.log_step(turn + 1, outcome, 0.0, begin, 0.0)
            else:
                flag = torch.zeros(())
                if layout.world > 1:
                    dist.all_reduce(flag, dist.ReduceOp.MAX)
                torch.stack((outcome.loss, outcome.grad_norm, outcome.skipped, flag)).tolist()
            if turn >= 3:
                times[metrics].append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    return times[True], times[False]


def ratio_interval(with_metrics: list[float], without: list[float], draws: int = 1000) -> tuple[float, float]:
    """Returns the 90% bootstrap interval of the ratio of medians."""
    rng, pairs = random.Random(0), list(zip(with_metrics, without, strict=True))
    ratios = []
    for _ in range(draws):
        sample = rng.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(a for a, _ in sample) / statistics.median(b for _, b in sample))
    return sorted(ratios)[draws // 20], sorted(ratios)[-draws // 20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--layout", action="append", help="may be repeated")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    model = {"layers": 4, "width": options.width, "heads": 8, "vocab": 1024, "sequence": 128}
    job = make_job({"model": model, "batch": {"samples": 8}})
    for text in options.layout or LAYOUTS:
        layout = Layout.parse(text)
        with tempfile.TemporaryDirectory() as folder:
            times = run_world(compare, layout.world, job, layout, options.turns, folder, timeout=900.0)[0]
        for index, clock in enumerate(("wall", "CPU")):
            with_metrics, without = ([pair[index] for pair in pairs] for pairs in times)
            low, high = ratio_interval(with_metrics, without)
            a, b = statistics.median(with_metrics), statistics.median(without)
            seconds = f"with metrics {a * 1e3:.2f} ms, without {b * 1e3:.2f} ms"
            print(f"{text}, {clock} time: {seconds}, ratio {a / b:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
