"""Compares gradient compression with PyTorch's DDP on slow links, and measures what compression costs in loss.

    python benchmarks/compression.py                steps on links of 1000 and 100 Mbit/s, then losses
    python benchmarks/compression.py --rates 100 --steps 0

Slow links are network namespaces (`benchmarks/comm.py`; skipped without root). All methods take turns in the same
processes. The bytes counted by a node's interface are compared with those that
`shardwise/parallel/gradient_reduction.py` reports. The step time is compared with the planner's model without
overlap: the time of a single process plus bytes over the link rate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import comm
import torch
import torch.distributed as dist

from shardwise.comm.world import run_world
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.lr_schedule import learning_rate, set_learning_rate
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.train.validate import validate

METHODS = ("", "fp16", "bf16", "int8", "topk:0.01", "onebit", "powersgd:rank=4")
REPEATS = 5
MODEL = {"layers": 4, "width": 256, "heads": 4, "sequence": 64}
SMALL = {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "init_std": 0.079}
COMPARED_METHODS = ("fp16", "bf16", "int8", "onebit", "topk:0.1", "topk:0.01", "powersgd:rank=8", "powersgd:rank=4")
SEEDS = 3  # uncompressed runs, whose losses show the variation between seeds


def job_of(
    method: str, model: dict[str, object], samples: int, steps: int = 1, after: float = 0.0, seed: int = 0
) -> Job:
    return make_job({"model": model, "batch": {"samples": samples}, "steps": steps, "optimizer": {"lr": 2e-3},
                     "gradient": {"compress": method, "compress_after": after}, "validation": {"samples": 2048},
                     "seed": seed})  # fmt: skip


def worker() -> None:
    """Runs one process on a slow link: steps with every method in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, counter = dist.get_world_size(), Path("/sys/class/net/up/statistics/tx_bytes")
    runs = {}
    for method in METHODS:
        job = job_of(method, MODEL, 2 * ranks)
        engine = parallelize(prepare(job, Layout.parse(f"replicate={ranks}")), torch.device("cpu"))
        runs[method] = job, engine, make_optimizer(job.optimizer, engine.param_shards)
    stream = SampleStream(make_sources(job_of("", MODEL, 2 * ranks))[0], 0)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    wire: dict[str, list[float]] = {method: [] for method in METHODS}
    reported: dict[str, int] = {}
    for repeat in range(REPEATS + 1):
        for method, (job, engine, optimizer) in runs.items():
            samples = stream.read(rank_positions(repeat, job.samples, ranks, dist.get_rank()))
            engine.timer.bytes_sent.clear()
            dist.barrier()
            before, begin = int(counter.read_text()), time.perf_counter()
            step(engine, optimizer, samples, 1.0)
            dist.barrier()
            seconds[method].append(time.perf_counter() - begin)
            wire[method].append(int(counter.read_text()) - before)
            reported[method] = engine.timer.bytes_sent["data"]
    if dist.get_rank() == 0:
        medians = {name: [statistics.median(table[name][1:]) for table in (seconds, wire)] for name in METHODS}
        print(json.dumps({name: (*medians[name], reported[name]) for name in METHODS}), flush=True)
    dist.barrier()


def bench_links(rate: int, nodes: int) -> None:
    try:
        comm.create_links(nodes, rate)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        comm.delete_links(nodes)
        print(f"skipped: cannot create network namespaces or token buckets ({getattr(error, 'stderr', error)}).")
        return
    results = json.loads(comm.in_namespaces([__file__, "--worker"], nodes, 1, seconds=900)[0])
    gradients, ddp, single = gradient_bytes(MODEL), results[""][0], run_world(single_process_seconds, 1)[0]
    links = f"links of {rate} Mbit/s; a single process takes {1e3 * single:.0f} ms"
    print(f"\n{nodes} processes, {gradients / 1e6:.1f} MB of gradients, {links}")
    print(f"{'':16s} {'ms':>7s} {'model':>8s} {'/ DDP':>7s} {'MB sent':>8s} {'model':>7s} {'smaller':>8s}")
    ring = 2 * (nodes - 1) / nodes * gradients
    for method, (seconds, wire, reported) in results.items():
        sent = reported or ring
        predicted = single + sent / (rate * 1e6 / 8)
        print(f"{method or 'DDP':16s} {1e3 * seconds:7.0f} {1e3 * predicted:8.0f} {seconds / ddp:7.2f} "
              f"{wire / 1e6:8.2f} {sent / 1e6:7.2f} {ring / sent:8.1f}", flush=True)  # fmt: skip


def gradient_bytes(model: dict[str, object]) -> int:
    job = job_of("", model, 8)
    chain = job.family.build_on_meta(job.model)
    return 4 * sum(weight.numel() for _, weight in chain.named_unique_parameters())


def single_process_seconds() -> float:
    """Returns the median seconds of a step on one rank's samples in a single process."""
    job = job_of("", MODEL, 2)
    engine = parallelize(prepare(job, Layout()), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    stream = SampleStream(make_sources(job)[0], 0)
    times = []
    for repeat in range(REPEATS + 1):
        begin = time.perf_counter()
        step(engine, optimizer, stream.read(rank_positions(repeat, 2, 1, 0)), 1.0)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def validation_loss(method: str, steps: int, after: float, seed: int = 0) -> tuple[float, int]:
    """Returns the validation loss after a run on two ranks, and the bytes a rank sends in a compressed step."""
    torch.set_num_threads(1)
    job = job_of(method, SMALL, 8, steps, after, seed)
    engine = parallelize(prepare(job, Layout.parse("replicate=2")), torch.device("cpu"))
    training, held_out, tokenizer = make_sources(job)
    optimizer, stream = make_optimizer(job.optimizer, engine.param_shards), SampleStream(training, seed)
    for number in range(steps):
        set_learning_rate(optimizer, learning_rate(job.optimizer, number, steps))
        engine.data.compression_paused = number < job.gradient.uncompressed_steps(steps)
        engine.timer.bytes_sent.clear()
        step(engine, optimizer, stream.read(rank_positions(number, 8, 2, dist.get_rank())), 1.0)
    sent = engine.timer.bytes_sent["data"]
    result = validate(engine, job, held_out, tokenizer)
    assert result is not None
    return result["loss"], sent


def compare_losses(steps: int, after: float) -> None:
    gradients = gradient_bytes(SMALL)
    size = f"2 ranks, {gradients / 1e6:.2f} MB of gradients"
    print(f"\nvalidation loss after {steps} steps, the first {after:.0%} uncompressed, {size}")
    plain = [run_world(validation_loss, 2, "", steps, 0.0, seed, timeout=3000.0)[0][0] for seed in range(SEEDS)]
    print("uncompressed, by seed:", ", ".join(f"{loss:.4f}" for loss in plain), flush=True)
    for method in COMPARED_METHODS:
        loss, sent = run_world(validation_loss, 2, method, steps, after, timeout=3000.0)[0]
        print(f"{method:16s} {loss:.4f} {loss / plain[0] - 1:+7.2%}  {gradients / sent:.1f}x smaller", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=int, nargs="*", default=[1000, 100], help="Mbit/s")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=400, help="steps of the runs whose losses are compared; 0 skips them"
    )
    parser.add_argument(
        "--after", type=float, default=0.2, help="fraction of uncompressed steps (gradient.compress_after)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    if options.rates and (os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc")):
        print("skipping slow links: they need root, `ip` and `tc`.")
        options.rates = []
    for rate in options.rates:
        bench_links(rate, options.nodes)
    if options.steps:
        compare_losses(options.steps, options.after)


if __name__ == "__main__":
    main()
