"""A sequence cut over CPU processes: activations of a rank as 1/context, bytes against the formula, both ways alike.

    python benchmarks/context.py                   a sequence of 8192 over 1, 2 and 4 processes
    python benchmarks/context.py --sequence 32768

Memory and traffic are of real steps, counted tensor by tensor (the ledger of `shardwise dryrun`); the loss is that of
the third step, in float64. Formulas, for each rank, layer and micro-batch, with c ranks, S positions, D numbers of the
queries of a position, K of its keys: a ring passes keys and values on in c - 1 turns of the forward and the backward,
and their gradients in c: (3c - 2) x 2K x S/c. Exchanged heads take 2 (2D + 2K') x S/c, where K' is K, or D if the
heads of keys do not divide.
"""

from __future__ import annotations

import argparse
import time

import torch

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.data.source import SyntheticTokens
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.dryrun.dry_run import measure_rank
from shardwise.step import step

SHAPE = {"layers": 2, "width": 64, "ulysses": 8, "kv_heads": 4, "ffn": 128, "vocab": 256}
MIB = 2**20


def counted(job: Job, layout: Layout) -> tuple[int, int]:
    """Bytes of activations at the fullest moment, and of what the ring or the exchange moves."""
    report = measure_rank(job, layout, fake=False, all_micro_batches=True)
    return report.memory["activations"], sum(e.bytes for e in report.traffic if e.kind == "all-to-all")


def trained(job: Job, layout: Layout) -> tuple[float, float]:
    """The loss of the third step, and the seconds that it took."""
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    stream = SampleStream(SyntheticTokens(16, job.model.sequence, job.model.vocab, 0), 0)
    loss, begin = torch.zeros(()), 0.0
    for number in range(3):
        begin = time.perf_counter()
        loss = step(engine, optimizer, stream.read(rank_positions(number, job.samples, 1, 0)), 1.0).loss
    return float(loss), time.perf_counter() - begin


def formula(job: Job, layout: Layout) -> int:
    model, c = job.model, layout.context
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if layout.context_method == "ring":
        numbers = (3 * c - 2) * 2 * keys
    else:
        numbers = 2 * (2 * queries + 2 * (queries if model.kv_heads % c else keys))
    return 8 * job.samples * model.layers * numbers * model.sequence // c if c > 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=8192)
    options = parser.parse_args()
    job = make_job({
        "precision": "float64", "model": {**SHAPE, "sequence": options.sequence}, "batch": {"samples": 1},
    })  # fmt: skip
    print(f"a sequence of {options.sequence:,}, {SHAPE}, float64")
    heads = ("layout", "activations", "x ranks / one", "sent", "/ formula", "step")
    print("{:34s} {:>12s} {:>14s} {:>12s} {:>10s} {:>8s}  loss".format(*heads))
    alone = 0
    for text in ("", *(f"context={c} context_method={way}" for c in (2, 4) for way in ("ring", "ulysses"))):
        layout = Layout.parse(text)
        held, sent = max(run_world(counted, layout.world, job, layout))
        loss, seconds = run_world(trained, layout.world, job, layout)[0]
        alone = alone or held
        share_of = f"{sent / formula(job, layout):.4f}" if formula(job, layout) else ""
        print(
            f"{text or 'one process':34s} {held / MIB:8.1f} MiB {layout.context * held / alone:14.3f} "
            f"{sent / MIB:8.1f} MiB {share_of:>10s} {seconds:6.2f} s  {loss:.15g}"
        )


if __name__ == "__main__":
    main()
