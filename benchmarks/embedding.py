"""Compares 8.2 GiB of embedding tables sharded over 4 processes with one process's torch.nn.EmbeddingBag.

    python benchmarks/embedding.py                      26 tables of 1,323,000 rows of width 64, 8.2 GiB
    python benchmarks/embedding.py --rows 20000         the same, small

Rows are initialized with a constant (written, so that the memory is really used), since drawing 2.2 billion normals
would dominate the run. Both sides see the same batches of synthetic clicks (up to 4 lookups per table, 2.45 on average)
and use row-wise AdaGrad. Lookup: from ids to pooled vectors. Update: from the vectors' gradients to updated rows. The
first turn is warmup; rates are medians over turns. The 4 processes have one thread each, the single one has two.

Formula for the bytes a rank sends in a step: distinct rows x (8 bytes of id + 2 x 4 bytes x width) + 8 bytes per table
group for counts, of which 1 - 1/ranks leave the rank. The number of distinct rows follows from the clicks' power law.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any, cast

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
from shardwise.parallel.prepare import prepare
from shardwise.parallel.tables import sharded_tables
from shardwise.parallel.tables.sharded_tables import Bags, ShardedTables, sum_bags
from shardwise.parallel.tables.table_engine import TableEngine
from shardwise.step import step

GIB = 2**30
TURNS = 5
START = 0.01
LR = 0.05


def make(rows: int, samples: int, sharding: str) -> Job:
    model = {
        "name": "dlrm", "tables": 26, "rows": rows, "width": 64, "lookups": 4, "bottom": [64], "top": [128, 64],
    }  # fmt: skip
    return make_job(
        {
            "model": model,
            "batch": {"samples": samples},
            "data": {"source": "synthetic"},
            "embedding_tables": {"sharding": sharding},
            "optimizer": {"lr": LR, "clip": 0.0, "weight_decay": 0.0},
        }
    )


def batches(job: Job, ranks: int, rank: int) -> list[Samples]:
    stream = SampleStream(SyntheticClicks(job.model, 0, 1 << 20, job.seed), job.seed)
    return [stream.read(rank_positions(turn, job.samples, ranks, rank)) for turn in range(TURNS + 1)]


def distinct_rows(job: Job, ranks: int) -> float:
    """Returns the expected number of distinct rows in a rank's samples, over all tables."""
    model = cast(Any, job.model)
    power = 1.0 - SyntheticClicks.zipf_exponent
    edges = np.arange(1.0, model.rows + 2.0) ** power
    probabilities = np.diff(edges) / (edges[-1] - 1.0)
    ids = job.samples / ranks * 0.98 * (1 + model.lookups) / 2
    return float(model.tables * -np.expm1(ids * np.log1p(-probabilities)).sum())


# 4 processes


def bench_sharded(job: Job, layout: Layout) -> dict[str, Any]:
    sent = [0]
    all_to_all = sharded_tables.all_to_all

    def counting(out: Tensor, tensor: Tensor, received: Any, sizes: list[int], axis: Any) -> None:
        sent[0] += tensor.element_size() * (sum(sizes) - sizes[dist.get_rank()])
        all_to_all(out, tensor, received, sizes, axis=axis)

    sharded_tables.all_to_all = counting
    ShardedTables.init_weights = lambda self, seed, std: [rows.fill_(START) for rows in self.storage]  # type: ignore[method-assign,assignment,return-value]
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    assert isinstance(engine, TableEngine)
    results: dict[str, Any] = {"lookup": [], "update": [], "ids": [], "rows": [], "sent": []}
    all_samples = batches(job, layout.world, dist.get_rank())
    for samples in all_samples:
        lookup_and_update(engine, samples, results, sent)
    results["table_bytes"] = engine.tables.storage.nbytes
    engine.tables.init_weights(job.seed)  # the updates above followed no loss
    optimizer = engine.make_optimizer(job)
    for group in optimizer.param_groups:
        group["lr"] = 0.003
    results["losses"], results["step"] = [], []
    for samples in (*all_samples, *all_samples):
        dist.barrier()
        begin = time.perf_counter()
        results["losses"].append(float(step(engine, optimizer, samples, 0.0).loss))
        results["step"].append(time.perf_counter() - begin)
    results["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return results


def lookup_and_update(engine: TableEngine, samples: Samples, results: dict[str, Any], sent: list[int]) -> None:
    clicks = ClickBatch.unpack(samples, engine.model)
    bags = Bags.from_padded(clicks.sparse_ids, clicks.weights)
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
    touched = engine.tables.touched_rows.numel()
    engine.tables.update(LR, 1.0)
    dist.barrier()
    results["lookup"].append(middle - begin)
    results["update"].append(time.perf_counter() - middle)
    results["ids"].append(bags.ids.numel())
    results["rows"].append(touched)
    results["sent"].append(sent[0] - before)


# One process


def bench_embedding_bag(job: Job) -> dict[str, Any]:
    torch.set_num_threads(2)
    model = cast(Any, job.model)
    bags = []
    for _ in range(model.tables):
        weight = torch.full((model.rows, model.width), START)
        bags.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True))
    sums = [torch.zeros(model.rows) for _ in bags]
    results: dict[str, Any] = {"lookup": [], "update": [], "ids": [], "rows": []}
    for samples in batches(job, 1, 0):
        clicks = ClickBatch.unpack(samples, model)
        inputs = []
        for table in range(model.tables):
            ids = Bags.from_padded(clicks.sparse_ids[:, table : table + 1], clicks.weights[:, table : table + 1])
            inputs.append((ids.ids, ids.offsets[:-1], ids.weights.float()))
        begin = time.perf_counter()
        vectors = [bag(*arguments) for bag, arguments in zip(bags, inputs, strict=True)]
        middle = time.perf_counter()
        torch.autograd.backward(vectors, [torch.full_like(vector, 1e-3) for vector in vectors])
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
        results["lookup"].append(middle - begin)
        results["update"].append(time.perf_counter() - middle)
        results["ids"].append(sum(ids.numel() for ids, *_ in inputs))
        results["rows"].append(touched)
    results["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return results


def rates(ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns ids looked up and rows updated per second, as medians over turns."""
    medians = []
    for seconds, count in (("lookup", "ids"), ("update", "rows")):
        by_turn = [
            sum(rank[count][turn] for rank in ranks) / max(rank[seconds][turn] for rank in ranks)
            for turn in range(1, TURNS + 1)
        ]
        medians.append(statistics.median(by_turn))
    return medians[0], medians[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_323_000)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sharding", default="auto")
    options = parser.parse_args()
    job, layout = make(options.rows, options.samples, options.sharding), Layout(shard=options.ranks)
    model = cast(Any, job.model)
    size = 4 * model.tables * model.rows * model.width
    print(f"{model.tables} tables of {model.rows:,} rows of width {model.width} in float32: {size / GIB:.2f} GiB")
    print(f"batch of {job.samples} samples, {options.ranks} processes, sharding {options.sharding}")
    results = run_world(bench_sharded, options.ranks, job, layout, timeout=1200.0)
    for rank, result in enumerate(results):
        peak = f"peak memory {result['peak'] / GIB:.2f} GiB"
        print(f"  rank {rank}: {result['table_bytes'] / GIB:.2f} GiB of rows, {peak}")
    lookups, updates = rates(results)
    print(f"{options.ranks} processes: {lookups:,.0f} lookups/s, {updates:,.0f} rows updated/s")
    step_ms, losses = 1e3 * statistics.median(results[0]["step"][1:]), results[0]["losses"]
    print(f"  training step {step_ms:.0f} ms; loss {losses[0]:.4f} first, {losses[-1]:.4f} in step {len(losses)}")
    table_groups, sent_fraction = 1, 1 - 1 / options.ranks
    row_bytes = distinct_rows(job, options.ranks) * (8 + 8 * model.width)
    expected = (row_bytes + 8 * table_groups * options.ranks) * sent_fraction
    measured = statistics.mean(statistics.mean(result["sent"]) for result in results)
    ratio = f"ratio {measured / expected:.4f}"
    print(f"  bytes sent per rank and step: formula {expected:,.0f}, measured {measured:,.0f}, {ratio}")
    (single,) = run_world(bench_embedding_bag, 1, job, timeout=1200.0)
    single_lookups, single_updates = rates([single])
    print(
        f"1 process, EmbeddingBag(sparse=True): {single_lookups:,.0f} lookups/s, {single_updates:,.0f} rows updated/s"
    )
    print(f"  peak memory {single['peak'] / GIB:.2f} GiB")
    print(f"ratio: lookups {lookups / single_lookups:.2f}, updates {updates / single_updates:.2f}")


if __name__ == "__main__":
    main()
