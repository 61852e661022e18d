"""Context parallelism on CPU processes: activation memory, communication volume against the formula, and loss.

    python benchmarks/context.py                   a sequence of 8192 on 1, 2 and 4 processes
    python benchmarks/context.py --sequence 32768

Memory and traffic are those of real steps, counted tensor by tensor (`MemoryCommTracker`); the loss is that of the
third step, in float64. Elements sent per rank, layer and micro-batch, with c ranks, S positions, query dimension D and
key dimension K per position: ring attention sends keys and values in c - 1 ring steps of forward and backward, and
their gradients in c: (3c - 2) x 2K x S/c. Ulysses sends 2 (2D + 2K') x S/c, where K' is K, or D if the key heads do not
divide by c.
"""

from __future__ import annotations

import argparse
import time

import torch

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream, SyntheticTokens, rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.dryrun.dry_run import measure_rank
from shardwise.step import step

SHAPE = {"layers": 2, "width": 64, "heads": 8, "kv_heads": 4, "ffn": 128, "vocab": 256}
MIB = 2**20


def memory_and_traffic(job: Job, layout: Layout) -> tuple[int, int]:
    """Returns the peak activation bytes of this rank and the bytes of its all-to-alls."""
    report = measure_rank(job, layout, fake=False, all_micro_batches=True)
    return report.memory["activations"], sum(e.bytes for e in report.traffic if e.kind == "all-to-all")


def third_step(job: Job, layout: Layout) -> tuple[float, float]:
    """Returns the loss and the seconds of the third step."""
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    stream = SampleStream(SyntheticTokens(16, job.require_decoder().sequence, job.require_decoder().vocab, 0), 0)
    loss, begin = torch.zeros(()), 0.0
    for number in range(3):
        begin = time.perf_counter()
        loss = step(engine, optimizer, stream.read(rank_positions(number, job.samples, 1, 0)), 1.0).loss
    return float(loss), time.perf_counter() - begin


def formula(job: Job, layout: Layout) -> int:
    """Returns the bytes a rank sends in a step."""
    model, c = job.require_decoder(), layout.context
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if layout.context_method == "ring":
        elements = (3 * c - 2) * 2 * keys
    else:
        elements = 2 * (2 * queries + 2 * (queries if model.kv_heads % c else keys))
    return 8 * job.samples * model.layers * elements * model.sequence // c if c > 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=8192)
    options = parser.parse_args()
    job = make_job({
        "precision": "float64", "model": {**SHAPE, "sequence": options.sequence}, "batch": {"samples": 1},
    })  # fmt: skip
    print(f"a sequence of {options.sequence:,}, {SHAPE}, float64")
    header = ("layout", "activations", "x ranks / single", "sent", "/ formula", "step")
    print("{:34s} {:>12s} {:>16s} {:>12s} {:>10s} {:>8s}  loss".format(*header))
    single = 0
    for text in ("", *(f"context={c} context_method={method}" for c in (2, 4) for method in ("ring", "ulysses"))):
        layout = Layout.parse(text)
        activations, sent = max(run_world(memory_and_traffic, layout.world, job, layout))
        loss, seconds = run_world(third_step, layout.world, job, layout)[0]
        single = single or activations
        ratio = f"{sent / formula(job, layout):.4f}" if formula(job, layout) else ""
        relative = layout.context * activations / single
        print(
            f"{text or 'single process':34s} {activations / MIB:8.1f} MiB {relative:16.3f} "
            f"{sent / MIB:8.1f} MiB {ratio:>10s} {seconds:6.2f} s  {loss:.15g}"
        )


if __name__ == "__main__":
    main()
