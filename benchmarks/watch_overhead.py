"""What measuring costs: steps with all metrics of every rank, and steps with none, side by side in one run on CPU.

With: phases, waits by axis, the exchange of rows, `metrics.jsonl` and `ranks.jsonl`. Without: the step, the agreement
on signals and the reading of the loss, which any loop needs. Both run in the same processes, in turns, so that noise of
the machine hits both alike; the ratio is that of the medians, with the range that nine of ten resampled ratios are in.
Beside wall time stands processor time of the process, which other work on the machine touches less.
Run: python benchmarks/watch_overhead.py
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
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.data.source import SyntheticTokens
from shardwise.integrity.corruption_detector import CorruptionDetector
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.tables.table_engine import make_engine_optimizer
from shardwise.step import step
from shardwise.train.metrics_processor import MetricsProcessor
from shardwise.train.progress import Progress
from shardwise.train.run_folder import RunFolder

LAYOUTS = ("pipeline=1", "replicate=2", "shard=2 zero=3", "tensor=2", "pipeline=2 micro_batch=2")


Times = list[tuple[float, float]]  # seconds on the wall, and of the processor


def compare(job: Job, layout: Layout, turns: int, folder: str) -> tuple[Times, Times]:
    """Steps with and without metrics."""
    engine = parallelize(job, layout, torch.device("cpu"))
    optimizer = make_engine_optimizer(job, engine)
    detector = CorruptionDetector(job, engine, optimizer, Path(folder), 0.0, lambda *_, **__: None)  # not measured here
    metrics_processor = MetricsProcessor(
        job, engine, optimizer, RunFolder(Path(folder)), Progress(turns, False), detector
    )
    stream = SampleStream(SyntheticTokens(4096, job.model.sequence, job.model.vocab, 0), 0)
    data = engine.mesh["data"]
    batches = [stream.read(rank_positions(number, job.samples, data.size, data.index)) for number in range(4)]
    times: dict[bool, Times] = {True: [], False: []}
    for turn in range(turns + 3):
        for metrics in (True, False) if turn % 2 else (False, True):
            engine.timer.enabled = metrics
            if layout.world > 1:
                dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
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
                times[metrics].append((time.perf_counter() - begin, time.process_time() - used))
    return times[True], times[False]


def spread(ours: list[float], bare: list[float], draws: int = 1000) -> tuple[float, float]:
    """Of the ratio of medians, the middle nine tenths over pairs that are drawn again."""
    rng, pairs = random.Random(0), list(zip(ours, bare, strict=True))
    found = []
    for _ in range(draws):
        drawn = rng.choices(pairs, k=len(pairs))
        found.append(statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn))
    return sorted(found)[draws // 20], sorted(found)[-draws // 20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--layout", action="append", help="may be repeated")
    parser.add_argument("--width", type=int, default=256)
    asked = parser.parse_args()
    job = make_job(
        {
            "model": {"layers": 4, "width": asked.width, "heads": 8, "vocab": 1024, "sequence": 128},
            "batch": {"samples": 8},
        }
    )
    for text in asked.layout or LAYOUTS:
        layout = Layout.parse(text)
        with tempfile.TemporaryDirectory() as folder:
            ours, bare = run_world(compare, layout.world, job, layout, asked.turns, folder, timeout=900.0)[0]
        for place, clock in enumerate(("wall", "processor")):
            given, without = [one[place] for one in ours], [one[place] for one in bare]
            low, high = spread(given, without)
            medians = statistics.median(given), statistics.median(without)
            told = f"with {medians[0] * 1e3:.2f} ms, without {medians[1] * 1e3:.2f} ms"
            print(f"{text}, {clock}: {told}, ratio {medians[0] / medians[1]:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
