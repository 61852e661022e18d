"""Steps with compressed gradients beside PyTorch's DDP, over slow links; and what compression costs in loss.

    python benchmarks/compression.py                steps over links of 1000 and 100 Mbit/s, then the losses
    python benchmarks/compression.py --rates 100 --steps 0

Slow links are network namespaces (`benchmarks/comm.py`; needs root, and is left out in words where it cannot be had).
All ways take turns in one world. Beside the bytes that left a node, as its interface counted them, stands what
`shardwise/parallel/gradient_compression.py` says; beside the time, that of one process alone plus bytes over the link's rate, which
is the planner's formula for a sum that hides behind nothing.
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
from shardwise.optim import learning_rate, make_optimizer, set_learning_rate
from shardwise.parallel.parallelize import build_on_meta, parallelize, parameter_shapes
from shardwise.step import step
from shardwise.train.validate import validate

WAYS = ("", "fp16", "bf16", "int8", "topk:0.01", "onebit", "powersgd:rank=4")
TURNS = 5
MODEL = {"layers": 4, "width": 256, "heads": 4, "sequence": 64}
SMALL = {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "init_std": 0.079}
RIVALS = ("fp16", "bf16", "int8", "onebit", "topk:0.1", "topk:0.01", "powersgd:rank=8", "powersgd:rank=4")
SEEDS = 3  # of uncompressed runs, whose losses tell what is chance


def job_of(way: str, model: dict[str, object], samples: int, steps: int = 1, after: float = 0.0, seed: int = 0) -> Job:
    return make_job({"model": model, "batch": {"samples": samples}, "steps": steps, "optimizer": {"lr": 2e-3},
                     "gradient": {"compress": way, "compress_after": after}, "validation": {"samples": 2048},
                     "seed": seed})  # fmt: skip


def worker() -> None:
    """One process on a slow link: steps by every way in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, counter = dist.get_world_size(), Path("/sys/class/net/up/statistics/tx_bytes")
    takers = {}
    for way in WAYS:
        job = job_of(way, MODEL, 2 * ranks)
        engine = parallelize(job, Layout.parse(f"replicate={ranks}"), torch.device("cpu"))
        takers[way] = job, engine, make_optimizer(job.optimizer, engine.param_shards)
    stream = SampleStream(make_sources(job_of("", MODEL, 2 * ranks))[0], 0)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    wire: dict[str, list[float]] = {way: [] for way in WAYS}
    said: dict[str, int] = {}
    for turn in range(TURNS + 1):
        for way, (job, engine, optimizer) in takers.items():
            samples = stream.read(rank_positions(turn, job.samples, ranks, dist.get_rank()))
            engine.timer.read_and_reset()
            dist.barrier()
            before, begin = int(counter.read_text()), time.perf_counter()
            step(engine, optimizer, samples, 1.0)
            dist.barrier()
            seconds[way].append(time.perf_counter() - begin)
            wire[way].append(int(counter.read_text()) - before)
            said[way] = engine.timer.read_and_reset()[0].get("data", 0)
    if dist.get_rank() == 0:
        found = {
            way: (statistics.median(seconds[way][1:]), statistics.median(wire[way][1:]), said[way]) for way in WAYS
        }
        print(json.dumps(found), flush=True)
    dist.barrier()


def over_links(rate: int, nodes: int) -> None:
    try:
        comm.lay(nodes, rate)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        comm.clear(nodes)
        print(f"left out: no namespaces or token buckets can be had here ({getattr(error, 'stderr', error)}).")
        return
    said = comm.in_namespaces([__file__, "--worker"], nodes, 1, seconds=900)
    found = json.loads(said[0])
    weights = 4 * sum(
        shape.numel() for shape in parameter_shapes(build_on_meta(job_of("", MODEL, 2), torch.float32)).values()
    )
    plain, own = found[""][0], run_world(alone, 1)[0]
    print(f"\n{nodes} processes, {weights / 1e6:.1f} MB of gradients, links of {rate} Mbit/s; alone {1e3 * own:.0f} ms")
    print(f"{'':16s} {'ms':>7s} {'formula':>8s} {'of DDP':>7s} {'MB sent':>8s} {'said':>7s} {'smaller':>8s}")
    ring = 2 * (nodes - 1) / nodes * weights
    for way, (taken, wire, moved) in found.items():
        sent = moved or ring
        formula = own + sent / (rate * 1e6 / 8)
        print(f"{way or 'DDP':16s} {1e3 * taken:7.0f} {1e3 * formula:8.0f} {taken / plain:7.2f} {wire / 1e6:8.2f} "
              f"{sent / 1e6:7.2f} {ring / sent:8.1f}", flush=True)  # fmt: skip


def alone() -> float:
    """Seconds of a step of one rank's samples without any link."""
    job = job_of("", MODEL, 2)
    engine = parallelize(job, Layout(), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    stream = SampleStream(make_sources(job)[0], 0)
    taken = []
    for turn in range(TURNS + 1):
        begin = time.perf_counter()
        step(engine, optimizer, stream.read(rank_positions(turn, 2, 1, 0)), 1.0)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def loss_of(way: str, steps: int, after: float, seed: int = 0) -> tuple[float, int]:
    """The held-out loss after a run over two ranks, and the bytes that a rank sent in a compressed step."""
    torch.set_num_threads(1)
    job = job_of(way, SMALL, 8, steps, after, seed)
    engine = parallelize(job, Layout.parse("replicate=2"), torch.device("cpu"))
    training, held_out, tokenizer = make_sources(job)
    optimizer, stream = make_optimizer(job.optimizer, engine.param_shards), SampleStream(training, seed)
    for number in range(steps):
        set_learning_rate(optimizer, learning_rate(job.optimizer, number, steps))
        engine.data.compression_paused = number < job.gradient.uncompressed_steps(steps)
        engine.timer.read_and_reset()
        step(engine, optimizer, stream.read(rank_positions(number, 8, 2, dist.get_rank())), 1.0)
    sent = engine.timer.read_and_reset()[0].get("data", 0)
    found = validate(engine, job, held_out, tokenizer)
    assert found is not None
    return found["loss"], sent


def convergence(steps: int, after: float) -> None:
    weights = 4 * sum(
        shape.numel() for shape in parameter_shapes(build_on_meta(job_of("", SMALL, 8), torch.float32)).values()
    )
    print(f"\nheld-out loss after {steps} steps, {after:g} of them plain, 2 ranks, {weights / 1e6:.2f} MB of gradients")
    plain = [run_world(loss_of, 2, "", steps, 0.0, seed, timeout=3000.0)[0][0] for seed in range(SEEDS)]
    print("uncompressed, by seed:", ", ".join(f"{loss:.4f}" for loss in plain), flush=True)
    for way in RIVALS:
        loss, sent = run_world(loss_of, 2, way, steps, after, timeout=3000.0)[0]
        print(f"{way:16s} {loss:.4f} {loss / plain[0] - 1:+7.2%}  {weights / sent:.1f} times smaller", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=int, nargs="*", default=[1000, 100], help="Mbit/s")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="of the runs whose losses are compared; 0: none")
    parser.add_argument("--after", type=float, default=0.2, help="share of plain steps (gradient.compress_after)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker()
        return
    if given.rates and (os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc")):
        print("slow links are left out: they need root, `ip` and `tc`.")
        given.rates = []
    for rate in given.rates:
        over_links(rate, given.nodes)
    if given.steps:
        convergence(given.steps, given.after)


if __name__ == "__main__":
    main()
