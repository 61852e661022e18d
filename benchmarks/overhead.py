"""Measures the overhead of Shardwise's step over hand-written PyTorch loops on CPU.

    one process     our step against a plain PyTorch loop with the same model and batch
    two processes   our `replicate=2` step against a plain DistributedDataParallel loop

Both loops alternate in the same processes, so that noise affects both equally; the ratio is that of the medians.
Run: python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import Samples, SampleStream, SyntheticTokens, rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.gpt import build_gpt
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step


def plain_step(job: Job, world: int) -> Callable[[Samples], Tensor]:
    """Returns a hand-written step: model, DDP for several processes, AdamW, gradient clipping."""
    model = build_gpt(job.model, job.seed)
    init_weights(model, job.seed)
    module: torch.nn.Module = model
    if world > 1:
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.optimizer.lr, fused=True)

    def run(samples: Samples) -> Tensor:
        loss = module(samples.tokens, ids=samples.ids, targets=samples.targets) / samples.targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def our_step(job: Job, layout: Layout) -> Callable[[Samples], Tensor]:
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    return lambda samples: step(engine, optimizer, samples, job.optimizer.clip).loss


def compare(job: Job, layout: Layout, turns: int) -> tuple[float, float]:
    """Returns the median seconds of our step and of the plain one."""
    stream = SampleStream(SyntheticTokens(4096, job.model.sequence_length, job.model.vocab_size, 0), 0)
    rank = dist.get_rank() if layout.world > 1 else 0
    batches = [stream.read(rank_positions(number, job.samples, layout.data, rank)) for number in range(4)]
    ours, plain = our_step(job, layout), plain_step(job, layout.world)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(turns + 2):
        pairs = [("ours", ours), ("plain", plain)]
        for name, run in pairs if turn % 2 else reversed(pairs):
            if layout.world > 1:
                dist.barrier()
            begin = time.perf_counter()
            run(batches[turn % 4])
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return statistics.median(times["ours"]), statistics.median(times["plain"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    turns = parser.parse_args().turns
    job = make_job(
        {"model": {"layers": 6, "width": 256, "heads": 8, "vocab": 1024, "sequence": 128}, "batch": {"samples": 16}}
    )
    for name, layout, target in (("one process", "pipeline=1", 0.02), ("replicate=2", "replicate=2", 0.03)):
        parsed = Layout.parse(layout)
        ours, plain = run_world(compare, parsed.world, job, parsed, turns)[0]
        times = f"Shardwise {ours * 1e3:.1f} ms, plain PyTorch {plain * 1e3:.1f} ms"
        print(f"{name}: {times}, ratio {ours / plain:.3f} (target {1 + target:.2f})")


if __name__ == "__main__":
    main()
