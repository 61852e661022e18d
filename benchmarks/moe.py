"""Mixture of experts on CPU processes: all-to-all bytes against the formula, step time against a dense model.

    python benchmarks/moe.py                       4 processes, shard=4 expert=4
    python benchmarks/moe.py --layout "shard=2 expert=2"

Formula per rank, MoE layer and micro-batch: rows (positions x experts per token) x width x bytes, for dispatch and
combine in forward and backward, plus the row counts, 8 bytes per expert. The dense model's feed-forward width equals
that of the experts a token uses. Both models alternate steps in the same processes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream, SyntheticTokens, rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout, solve_batch
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.dryrun.dry_run import measure_rank
from shardwise.step import step

SHAPE = {"layers": 4, "width": 256, "heads": 8, "vocab": 256, "sequence": 256}
EXPERTS = {"name": "moe", "experts": 8, "experts_per_token": 2, "expert_ffn": 384}
TURNS = 7


def jobs(samples: int) -> tuple[Job, Job]:
    dense = {**SHAPE, "ffn": EXPERTS["experts_per_token"] * EXPERTS["expert_ffn"]}  # type: ignore[operator]
    sparse = {**SHAPE, **EXPERTS}
    return tuple(make_job({"model": model, "batch": {"samples": samples}}) for model in (sparse, dense))  # type: ignore[return-value]


def formula(job: Job, layout: Layout) -> int:
    model, batch = job.require_decoder(), solve_batch(layout, job.samples)
    rows = batch.micro_batch * model.sequence * EXPERTS["experts_per_token"]  # type: ignore[operator]
    per_layer = 4 * rows * model.width * 4 + 8 * EXPERTS["experts"]  # type: ignore[operator]
    return batch.micro_batches * model.layers // layout.pipeline * per_layer


def sent(job: Job, layout: Layout) -> int:
    """Returns the bytes of this rank's all-to-alls in a real step, counting the larger side of each."""
    report = measure_rank(job, layout, fake=False, all_micro_batches=True)
    return sum(entry.bytes for entry in report.traffic if entry.kind == "all-to-all")


def times(sparse: Job, dense: Job, layout: Layout, plain: Layout) -> tuple[float, float]:
    """Returns the median seconds per step of the sparse and the dense model."""
    seconds: list[list[float]] = [[], []]
    runs = []
    for job, job_layout in ((sparse, layout), (dense, plain)):
        engine = parallelize(prepare(job, job_layout), torch.device("cpu"))
        stream = SampleStream(SyntheticTokens(4096, job.require_decoder().sequence, job.require_decoder().vocab, 0), 0)
        samples = stream.read(rank_positions(0, job.samples, job_layout.data, engine.mesh["data"].index))
        runs.append((engine, make_optimizer(job.optimizer, engine.param_shards), samples))
    for turn in range(TURNS + 2):
        for index, (engine, optimizer, samples) in enumerate(runs):
            dist.barrier()
            begin = time.perf_counter()
            step(engine, optimizer, samples, 1.0)
            dist.barrier()
            if turn >= 2:
                seconds[index].append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="shard=4 expert=4")
    options = parser.parse_args()
    layout = Layout.parse(options.layout)
    if layout.expert == 1 or layout.tensor > 1:
        parser.error("give a layout with expert above 1 and tensor=1, for example 'shard=4 expert=4'")
    plain = Layout(pipeline=layout.pipeline, replicate=layout.replicate, shard=layout.shard, zero=layout.zero)
    sparse, dense = jobs(2 * layout.data * max(2, layout.pipeline))
    measured, expected = run_world(sent, layout.world, sparse, layout), formula(sparse, layout)
    print(f"layout '{layout}': all-to-all bytes per rank and step")
    by_rank = ", ".join(f"{size:,}" for size in measured)
    print(f"  formula {expected:,}, assuming balanced experts; measured by rank {by_rank}")
    print(f"  mean over ranks / formula: {statistics.mean(measured) / expected:.4f}")
    moe, ffn = (1e3 * seconds for seconds in run_world(times, layout.world, sparse, dense, layout, plain)[0])
    print(f"step: MoE {moe:.0f} ms, dense with equal active parameters {ffn:.0f} ms, ratio {moe / ffn:.2f}")


if __name__ == "__main__":
    main()
