"""Tables of 8.2 GiB over 4 processes: lookups and updates against one process with torch.nn.EmbeddingBag, and traffic.

    python benchmarks/embedding.py                      26 tables of 1,323,000 rows of 64 numbers, 8.2 GiB
    python benchmarks/embedding.py --rows 20000         the same, small

Rows start as one constant (written, so that the memory is really used): drawing 2.2 billion normals would take longer
than all else. The same batches of the generated log (up to 4 lookups a table, on average 2.45) go through both sides,
with row-wise AdaGrad on both. Lookup: ids to the bags' vectors. Update: from the vectors' gradients to updated rows.
The first turn is not counted; rates are those of the median turn. 4 processes have a thread each, the one has two.

Traffic formula, for a rank and a step: rows x (8 bytes of number + there and back 4 bytes x width) + 8 bytes a bank for
counts, of which 1 - 1/ranks leave the rank; rows are the distinct ones that a power law of the log's exponent gives.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.world import run_world
from shardwise.data.criteo import ClickBatch, SyntheticClicks
from shardwise.data.sample_stream import Samples, SampleStream, rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.tables import table_storage
from shardwise.parallel.tables.bags import Bags, sum_bags
from shardwise.parallel.tables.sharded_tables import ShardedTables
from shardwise.parallel.tables.table_engine import TableEngine, dlrm_config, make_engine_optimizer
from shardwise.step import step

GIB = 2**30
TURNS = 5
START = 0.01
LR = 0.05


def make(rows: int, samples: int, cut: str) -> Job:
    model = {
        "name": "dlrm", "tables": 26, "rows": rows, "width": 64, "lookups": 4, "bottom": [64], "top": [128, 64],
    }  # fmt: skip
    return make_job(
        {
            "model": model,
            "batch": {"samples": samples},
            "data": {"source": "synthetic"},
            "embedding_tables": {"sharding": cut},
            "optimizer": {"lr": LR, "clip": 0.0, "weight_decay": 0.0},
        }
    )


def batches(job: Job, ranks: int, rank: int) -> list[Samples]:
    stream = SampleStream(SyntheticClicks(dlrm_config(job), 0, 1 << 20, job.seed), job.seed)
    return [stream.read(rank_positions(turn, job.samples, ranks, rank)) for turn in range(TURNS + 1)]


def distinct_rows(job: Job, ranks: int) -> float:
    """What a rank's samples use of all tables, on average."""
    model = dlrm_config(job)
    power = 1.0 - SyntheticClicks.zipf_exponent
    edges = np.arange(1.0, model.rows + 2.0) ** power
    likely = np.diff(edges) / (edges[-1] - 1.0)
    ids = job.samples / ranks * 0.98 * (1 + model.lookups) / 2
    return float(model.tables * -np.expm1(ids * np.log1p(-likely)).sum())


# 4 processes


def ours(job: Job, layout: Layout) -> dict[str, Any]:
    sent = [0]
    real = table_storage.all_to_all

    def counted(out: Tensor, given: Tensor, received: Any, sizes: list[int], axis: Any) -> None:
        sent[0] += given.element_size() * (sum(sizes) - sizes[dist.get_rank()])
        real(out, given, received, sizes, axis=axis)

    table_storage.all_to_all = counted
    ShardedTables.init_weights = lambda self, seed, std: [rows.fill_(START) for rows in self.storage]  # type: ignore[method-assign,assignment,return-value]
    engine = parallelize(job, layout, torch.device("cpu"))
    assert isinstance(engine, TableEngine)
    found: dict[str, Any] = {"lookup": [], "update": [], "ids": [], "rows": [], "sent": []}
    given = batches(job, layout.world, dist.get_rank())
    for samples in given:
        one_turn(engine, samples, found, sent)
    found["held"] = sum(rows.numel() * rows.element_size() for rows in engine.tables.storage)
    engine.tables.init_weights(job.seed, [])  # the turns above moved rows by no loss
    optimizer = make_engine_optimizer(job, engine)
    for group in optimizer.param_groups:
        group["lr"] = 0.003
    found["losses"] = []
    for words, ahead in (("step", False), ("ahead", True)):
        source = iter(enumerate(given))
        found[words] = []
        for _, samples in engine.prefetched_batches(source, len(given)) if ahead else source:
            dist.barrier()
            begin = time.perf_counter()
            found["losses"].append(float(step(engine, optimizer, samples, 0.0).loss))
            found[words].append(time.perf_counter() - begin)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def one_turn(engine: TableEngine, samples: Samples, found: dict[str, Any], sent: list[int]) -> None:
    clicks = ClickBatch.of(samples, engine.model)
    bags = Bags.of(clicks.sparse_ids, clicks.weights)
    before = sent[0]
    dist.barrier()
    begin = time.perf_counter()
    route = engine.tables.route(bags, samples.ids)
    rows = engine.tables.fetch(route).requires_grad_()
    vectors = sum_bags(rows, route.inverse_indices, route.offsets, route.weights)
    dist.barrier()
    middle = time.perf_counter()
    vectors.backward(torch.full_like(vectors, 1e-3))
    assert rows.grad is not None
    engine.tables.push_gradients(route, rows.grad)
    touched = sum(one.rows.numel() for one in engine.tables.row_gradients)
    engine.tables.update(LR, 1.0)
    dist.barrier()
    found["lookup"].append(middle - begin)
    found["update"].append(time.perf_counter() - middle)
    found["ids"].append(bags.ids.numel())
    found["rows"].append(touched)
    found["sent"].append(sent[0] - before)


# One process


def theirs(job: Job) -> dict[str, Any]:
    torch.set_num_threads(2)
    model = dlrm_config(job)
    bags = []
    for _ in range(model.tables):
        weight = torch.full((model.rows, model.width), START)
        bags.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True))
    sums = [torch.zeros(model.rows) for _ in bags]
    found: dict[str, Any] = {"lookup": [], "update": [], "ids": [], "rows": []}
    for samples in batches(job, 1, 0):
        clicks = ClickBatch.of(samples, model)
        given = []
        for number in range(model.tables):
            one = Bags.of(clicks.sparse_ids[:, number : number + 1], clicks.weights[:, number : number + 1])
            given.append((one.ids, one.offsets[:-1], one.weights.float()))
        begin = time.perf_counter()
        vectors = [bag(*inputs) for bag, inputs in zip(bags, given, strict=True)]
        middle = time.perf_counter()
        torch.autograd.backward(vectors, [torch.full_like(one, 1e-3) for one in vectors])
        touched = 0
        with torch.no_grad():
            for bag, total in zip(bags, sums, strict=True):
                assert bag.weight.grad is not None
                gradient = bag.weight.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                total.index_add_(0, rows, values.square().mean(1))
                divisor = total.index_select(0, rows).sqrt_().add_(1e-8)
                bag.weight.index_add_(0, rows, values / divisor[:, None], alpha=-LR)
                bag.weight.grad = None
                touched += rows.numel()
        found["lookup"].append(middle - begin)
        found["update"].append(time.perf_counter() - middle)
        found["ids"].append(sum(inputs[0].numel() for inputs in given))
        found["rows"].append(touched)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def rates(turns: list[dict[str, Any]]) -> tuple[float, float]:
    """Ids looked up and rows updated in a second, of the median turn."""
    found = []
    for seconds, amount in (("lookup", "ids"), ("update", "rows")):
        each = [
            sum(rank[amount][turn] for rank in turns) / max(rank[seconds][turn] for rank in turns)
            for turn in range(1, TURNS + 1)
        ]
        found.append(statistics.median(each))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_323_000)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cut", default="auto")
    options = parser.parse_args()
    job, layout = make(options.rows, options.samples, options.cut), Layout(shard=options.ranks)
    model = dlrm_config(job)
    size = 4 * model.tables * model.rows * model.width
    print(f"{model.tables} tables of {model.rows:,} rows of {model.width} numbers in float32: {size / GIB:.2f} GiB")
    print(f"batch of {job.samples} samples, {options.ranks} processes, cut {options.cut}")
    many = run_world(ours, options.ranks, job, layout, timeout=1200.0)
    for rank, one in enumerate(many):
        print(f"  rank {rank}: {one['held'] / GIB:.2f} GiB of rows, {one['peak'] / GIB:.2f} GiB at most in all")
    lookups, updates = rates(many)
    print(f"{options.ranks} processes: {lookups:,.0f} lookups/s, {updates:,.0f} rows updated/s")
    print(
        f"  a training step {1e3 * statistics.median(many[0]['step'][1:]):.0f} ms, with rows fetched ahead "
        f"{1e3 * statistics.median(many[0]['ahead'][1:]):.0f} ms; loss {many[0]['losses'][0]:.4f} at "
        f"first, {many[0]['losses'][-1]:.4f} in step {len(many[0]['losses'])}"
    )
    banks, share_out = 1, 1 - 1 / options.ranks
    expected = (distinct_rows(job, options.ranks) * (8 + 8 * model.width) + 8 * banks * options.ranks) * share_out
    measured = statistics.mean(statistics.mean(one["sent"]) for one in many)
    print(f"  sent by a rank in a step: formula {expected:,.0f} bytes, measured {measured:,.0f}, ratio", end=" ")
    print(f"{measured / expected:.4f}")
    (alone,) = run_world(theirs, 1, job, timeout=1200.0)
    base, other = rates([alone])
    print(f"1 process, EmbeddingBag(sparse=True): {base:,.0f} lookups/s, {other:,.0f} rows updated/s")
    print(f"  {alone['peak'] / GIB:.2f} GiB at most")
    print(f"ratio: lookups {lookups / base:.2f}, updates {updates / other:.2f}")


if __name__ == "__main__":
    main()
