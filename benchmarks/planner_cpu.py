"""Predicted against measured step times on CPU processes: does the planner rank layouts correctly after `calibrate`,
and after `tune` has refined its constants?

    python benchmarks/planner_cpu.py [--json] [--rounds N] [--cluster FILE]

Four gloo processes build a small GPT in each of the layouts below. Every round runs one step of each layout, so that
other load on the machine affects all layouts equally; a layout's time is the median over the rounds. What counts is the
order: Spearman's rank correlation of predicted and measured times. `tune`'s constants are refined by every other round
and judged by the rounds between; "unseen": each layout is predicted with constants refined by the other layouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

from shardwise.cluster import Cluster, find_cluster
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream, SyntheticTokens, rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.calibrate import calibrate, refine
from shardwise.planner.plan import make_estimator, resolve_layout
from shardwise.step import step

PROCESSES = 4
MODEL = {"layers": 6, "width": 160, "heads": 8, "kv_heads": 4, "vocab": 512, "sequence": 64}
SAMPLES = 16
ALL, FIRST, SECOND = slice(None), slice(0, None, 2), slice(1, None, 2)  # rounds
LAYOUTS = (
    "replicate=4", "replicate=4 micro_batch=1", "replicate=4 recompute=full", "shard=4 zero=1", "shard=4 zero=3",
    "shard=4 zero=3 micro_batch=1", "tensor=4", "tensor=4 micro_batch=8", "replicate=2 tensor=2",
    "pipeline=4 micro_batch=4", "pipeline=4 micro_batch=1", "pipeline=4 schedule=zbv micro_batch=2",
    "pipeline=2 replicate=2 micro_batch=2", "pipeline=2 tensor=2 micro_batch=4",
    "pipeline=2 shard=2 zero=3 micro_batch=2",
)  # fmt: skip


def the_job() -> Job:
    return make_job({"model": MODEL, "batch": {"samples": SAMPLES}, "run": {"device": "cpu"}})


def measure(layouts: list[str], rounds: int) -> list[list[float]]:
    """Returns the seconds of each round by layout, on one rank. The first round is a warm-up and does not count."""
    job, device = the_job(), torch.device("cpu")
    engines = [parallelize(prepare(job, Layout.parse(text)), device) for text in layouts]
    optimizers = [make_optimizer(job.optimizer, engine.param_shards) for engine in engines]
    stream = SampleStream(SyntheticTokens(256, job.require_decoder().sequence, job.require_decoder().vocab, 0), 0)
    times: list[list[float]] = [[] for _ in layouts]
    for number in range(rounds + 1):
        for layout_times, engine, optimizer in zip(times, engines, optimizers, strict=True):
            data = engine.mesh["data"]
            samples = stream.read(rank_positions(number, job.samples, data.size, data.index))
            dist.barrier()
            begin = time.perf_counter()
            step(engine, optimizer, samples, job.optimizer.clip)
            dist.barrier()
            if number:
                layout_times.append(time.perf_counter() - begin)
    return times


def ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    result = [0.0] * len(values)
    for rank, index in enumerate(order):
        result[index] = float(rank)
    return result


def spearman(a: list[float], b: list[float]) -> float:
    return statistics.correlation(ranks(a), ranks(b))


def predict(cluster: Cluster, layouts: list[Layout]) -> list[float]:
    estimator = make_estimator(the_job(), cluster)
    return [estimator.predict_seconds(layout) for layout in layouts]


def score(predicted: list[float], measured: list[float]) -> dict[str, float]:
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return {"spearman": spearman(predicted, measured), "median_error": statistics.median(errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cluster", help="use this file written by `calibrate --processes 4`; do not measure")
    options = parser.parse_args()
    job = the_job()
    cluster = find_cluster(options.cluster) if options.cluster else calibrate("cpu", PROCESSES)
    times = run_world(measure, PROCESSES, list(LAYOUTS), options.rounds, timeout=1200.0)[0]
    shape = make_estimator(job, cluster).shape
    layouts = [resolve_layout(job, shape, Layout.parse(text)) for text in LAYOUTS]
    measured, first, second = ([statistics.median(t[part]) for t in times] for part in (ALL, FIRST, SECOND))
    before, tuned = predict(cluster, layouts), refine(cluster, job, dict(zip(layouts, first, strict=True)))
    unseen = []
    for layout in layouts:
        others = {other: m for other, m in zip(layouts, measured, strict=True) if other != layout}
        unseen += predict(refine(cluster, job, others), [layout])
    after = predict(tuned, layouts)
    both = list(zip(LAYOUTS, measured, before, after, strict=True))
    record = {
        "processes": PROCESSES, "rounds": options.rounds, "calibrated": score(before, measured),
        "tuned": score(after, second), "tuned_unseen": score(unseen, measured), "noise": score(first, second),
        "layouts": [{"layout": text, "measured_seconds": m, "predicted_seconds": p, "tuned_seconds": a}
                    for text, m, p, a in both],
    }  # fmt: skip
    if options.json:
        print(json.dumps(record))
        return
    for text, seconds, prediction, refined in sorted(both, key=lambda row: row[1]):
        shown = [f"{1e3 * p:7.1f} ms ({100 * (p / seconds - 1):+.0f}%)" for p in (prediction, refined)]
        print(f"{text:45s} {1e3 * seconds:7.1f} ms, predicted {shown[0]}, tuned {shown[1]}")
    for name in ("calibrated", "tuned", "tuned_unseen", "noise"):
        figures = record[name]
        print(f"{name}: rank correlation {figures['spearman']:.2f}, median error {100 * figures['median_error']:.0f}%")


if __name__ == "__main__":
    main()
