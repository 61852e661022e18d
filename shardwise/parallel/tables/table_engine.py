"""A DLRM on many ranks: its dense part data-parallel like any model, its tables over the host memory of all ranks.

Pieces of tables are holdings like any other: the same step sums, measures and clips them, the same checkpoint saves
them and cuts them anew. Only their gradient is of the touched rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.criteo import ClickBatch
from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job
from shardwise.kinds import DLRMConfig
from shardwise.layout import BatchSplit, Layout, solve_batch
from shardwise.models.dlrm import build_dlrm, table_init_std
from shardwise.optim import make_optimizer
from shardwise.optim.sparse import CombinedOptimizer
from shardwise.parallel.data_parallel import ParamSpecs
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp import is_single_process, make_data_parallel, uses_fsdp
from shardwise.parallel.gradient_reduction import check as check_gradient
from shardwise.parallel.local_sgd import check as check_sync
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.param_shard import ParamShard, init_param_shard
from shardwise.parallel.precision import LossScale, Precision
from shardwise.parallel.tables.bags import Bags, check_ids, sum_bags
from shardwise.parallel.tables.hot_rows import HotRowCache, most_frequent_ids
from shardwise.parallel.tables.sharded_tables import RowPrefetcher, ShardedTables
from shardwise.parallel.tables.table_placement import TableShard, TableSpec, place_tables
from shardwise.parallel.tables.table_storage import LookupRoute
from shardwise.support import REFUSED, support

HOT_ROW_SAMPLES = 32_768  # samples from which the rows are picked that are used most


def dlrm_config(job: Job) -> DLRMConfig:
    assert isinstance(job.model, DLRMConfig)
    return job.model


def count_parameters(model: DLRMConfig) -> int:
    """Numbers in tables and products."""
    with torch.device("meta"):
        dense = sum(weight.numel() for weight in build_dlrm(model).parameters())
    return dense + sum(model.table_rows) * model.width


def table_specs(model: DLRMConfig) -> list[TableSpec]:
    return [TableSpec(f"table{i}", rows, model.width, model.lookups) for i, rows in enumerate(model.table_rows)]


def table_shards(job: Job, ranks: int) -> list[TableShard]:
    return place_tables(table_specs(dlrm_config(job)), ranks, job.embedding_tables.sharding)


def check_dlrm_layout(job: Job, layout: Layout) -> BatchSplit:
    """Raises for what a DLRM cannot have."""
    for axis in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(layout, axis)
        if degree > 1:
            raise LayoutError(
                f"{axis}={degree}: a DLRM is cut by its tables and its samples alone; use shard={degree} or "
                f"replicate={degree}, which both spread the tables over all ranks."
            )
    if layout.recompute != "none":
        raise LayoutError(f"recompute={layout.recompute}: a DLRM has no blocks to compute again; leave it out.")
    if job.compile is True:
        raise JobError("compile = true: a DLRM has no blocks to compile; leave compile out.")
    if job.precision in ("fp8", "fp16"):
        raise JobError(f"precision = {job.precision!r}: a DLRM is trained in bf16, float32 or float64.")
    check_gradient(job.gradient, layout)
    check_sync(job, layout)
    found = support(layout, job.precision)
    if found.verdict == REFUSED:
        raise LayoutError(f"layout '{layout}': {found.explanation}")
    return solve_batch(layout, job.samples)


def check_host_memory(job: Job, layout: Layout, bytes_per_rank: float) -> None:
    """Raises where the rows and states of some rank's tables are larger than the `each` bytes that a rank has."""
    element_size = 8 if job.precision == "float64" else 4
    copies = 3.0 if job.embedding_tables.optimizer == "adam" else 1.0 + 1.0 / dlrm_config(job).width
    bytes_by_rank = [0.0] * layout.data
    for shard in table_shards(job, layout.data):
        bytes_by_rank[shard.rank] += shard.size * element_size * copies
    max_bytes = max(bytes_by_rank)
    if max_bytes > bytes_per_rank:
        total_bytes = sum(bytes_by_rank)
        remedy = f"use at least {-int(-total_bytes // bytes_per_rank)} ranks with as much each, or fewer model.rows"
        if job.embedding_tables.sharding != "auto" and total_bytes / layout.data <= bytes_per_rank:
            remedy = 'use embedding_tables.sharding = "auto", which cuts tables that are too large'
        raise LayoutError(
            f"layout '{layout}': rank {bytes_by_rank.index(max_bytes)} would hold {max_bytes / 2**30:.3g} GiB of tables and their "
            f"states, but has {bytes_per_rank / 2**30:.3g} GiB of memory; {remedy}."
        )


@dataclass(eq=False, kw_only=True)
class TableParamShard(ParamShard):
    """A piece of a table. Its gradient is that of the touched rows, in their order."""

    tables: ShardedTables
    shard: TableShard

    @property
    def grad(self) -> Tensor:
        return self.tables.gradient_of(self.shard)[1]


@dataclass(kw_only=True)
class TableEngine(Engine):
    """What one rank needs for a step of a DLRM."""

    model: DLRMConfig
    compute_dtype: torch.dtype
    tables: ShardedTables
    prefetcher: RowPrefetcher | None = None

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        if self.prefetcher is not None and self.prefetcher.pending:
            route, fetched = self.prefetcher.pop(samples.ids.cpu())
        else:
            route = self._route(samples)
            fetched = self.tables.fetch(route)
        rows = self._rows_on_device(route, fetched).requires_grad_()
        total = torch.zeros_like(scale)
        for number, (micro_batch, vectors) in enumerate(self._micro_batches(samples, route, rows), start=1):
            with self.data.micro_batch(last=number == self.batch.micro_batches):
                loss = self._loss(self.data.modules[0], micro_batch, vectors) * scale
                loss.backward()
            total += loss.detach()
        gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
        self.tables.push_gradients(route, gradient[: route.num_fetched_rows].cpu())
        if self.tables.hot_rows is not None:
            self.tables.hot_rows.reduce_gradients(route.cached_rows, gradient[route.num_fetched_rows :])
        return total

    def evaluate(self, samples: Samples) -> Tensor:
        route = self._route(samples)
        rows = self._rows_on_device(route, self.tables.fetch(route))
        parts = self._micro_batches(samples, route, rows)
        return torch.stack([self._loss(self.chains[0], micro_batch, vectors) for micro_batch, vectors in parts]).sum()

    def _rows_on_device(self, route: LookupRoute, fetched: Tensor) -> Tensor:
        """A batch's rows on the device: those that were fetched, then those that are kept there."""
        rows, hot = fetched.to(self.mesh.device), self.tables.hot_rows
        return rows if hot is None else torch.cat((rows, hot.values[route.cached_rows.to(rows.device)]))

    def cache_hot_rows(self, stream: SampleStream, count: int) -> None:
        """Keeps the `count` rows that the first samples use most on every device, as they are now."""
        self.tables.hot_rows = None
        if count:
            bags = self._bags(stream.read(np.arange(HOT_ROW_SAMPLES)))
            table = check_ids(bags, self.tables.tables, torch.arange(HOT_ROW_SAMPLES))
            rows = most_frequent_ids(bags.ids + torch.tensor(self.tables.table_offsets)[table], count)
            if rows.numel():
                self.tables.hot_rows = HotRowCache(self.tables, rows, self.mesh["data"], self.mesh.device)

    def divide_gradients(self, divisor: Tensor) -> None:
        torch._foreach_div_([one.grad for one in self.param_shards if not isinstance(one, TableParamShard)], divisor)
        self.tables.divide_gradients(float(divisor))

    def prefetched_batches(self, batches: Iterator[tuple[int, Samples]], count: int) -> Iterator[tuple[int, Samples]]:
        """The batches of `count` steps; while one is computed with, the rows of the next are fetched."""
        if self.prefetcher is None:
            self.prefetcher = RowPrefetcher(self.tables)
        current: list[tuple[int, Samples]] = []
        for batch in islice(batches, count):
            self.prefetcher.prefetch(self._bags(batch[1]), batch[1].ids)
            yield from current
            current = [batch]
        yield from current

    def _bags(self, samples: Samples) -> Bags:
        clicks = ClickBatch.of(samples, self.model)
        return Bags.of(clicks.sparse_ids.cpu(), clicks.weights.cpu())

    def _route(self, samples: Samples) -> LookupRoute:
        return self.tables.route(self._bags(samples), samples.ids.cpu())

    def _micro_batches(self, samples: Samples, route: LookupRoute, rows: Tensor) -> Iterator[tuple[Samples, Tensor]]:
        """The micro-batches, each with the vectors of its bags."""
        bag = 0
        for micro_batch in samples.split(self.batch.micro_batch):
            offsets = route.offsets[bag : bag + micro_batch.ids.numel() * self.model.tables + 1]
            first, last = offsets[[0, -1]].tolist()
            bag_inputs = route.inverse_indices[first:last], offsets - first, route.weights[first:last]
            vectors = sum_bags(rows, *(tensor.to(rows.device) for tensor in bag_inputs))
            yield micro_batch, vectors.view(-1, self.model.tables, self.model.width)
            bag += micro_batch.ids.numel() * self.model.tables

    def _loss(self, module: Any, micro_batch: Samples, vectors: Tensor) -> Tensor:
        clicks = ClickBatch.of(micro_batch, self.model)
        loss: Tensor = module(
            clicks.dense_features.to(self.compute_dtype), vectors.to(self.compute_dtype), clicks.labels
        )
        return loss


def parallelize_dlrm(
    job: Job, layout: Layout, device: torch.device, memory: AbstractContextManager[Any] | None = None
) -> TableEngine:
    """This rank's part of the job."""
    batch = check_dlrm_layout(job, layout)
    model, mesh, precision = dlrm_config(job), Mesh(layout, device), Precision(job.precision)
    mixed_alone = is_single_process(layout, precision)
    with torch.device("meta"):
        chain = build_dlrm(model).to(precision.compute_dtype if mixed_alone else precision.master_dtype)
    if not uses_fsdp(layout) and not mixed_alone:
        precision.apply(chain)
    data = make_data_parallel([chain], layout, mesh, precision, batch, job.gradient, job.seed)
    shapes: ParamSpecs = {name: (weight.shape, None, False) for name, weight in chain.named_unique_parameters()}
    with memory or nullcontext():
        chain.to_empty(device=device)
        param_shards = data.make_param_shards(shapes)
        for param_shard in param_shards:
            init_param_shard(param_shard, chain.sharding_plan.init_spec_of(param_shard.name), job.seed, mesh)
        data.sync_weights()
    tables = make_tables(job, mesh, precision.master_dtype)
    for view in tables.local_shards:
        table, shard = tables.tables[view.shard.table], view.shard
        param_shards.append(
            TableParamShard(
                table.name,
                view.rows,
                torch.Size((table.rows, table.width)),
                None,
                False,
                1,
                tables=tables,
                shard=shard,
                fixed_offset_and_shape=(shard.start, list(view.rows.shape)),
            )  # fmt: skip
        )
    return TableEngine(
        mesh, batch, [chain], data, None, param_shards, LossScale(precision, device), model=model,
        compute_dtype=precision.compute_dtype, tables=tables,
    )  # fmt: skip


def make_tables(job: Job, mesh: Mesh, dtype: torch.dtype) -> ShardedTables:
    """This rank's tables, started."""
    axis, on_gpu = mesh["data"], mesh.device.type == "cuda"
    if on_gpu and axis.size > 1:
        axis = replace(axis, group=dist.new_group(backend="gloo"))  # rows are in host memory
    model, settings = dlrm_config(job), job.embedding_tables
    tables = ShardedTables(
        table_specs(model), table_shards(job, axis.size), axis, dtype, settings.optimizer, job.optimizer.betas,
        job.optimizer.eps, pin_memory=on_gpu,
    )  # fmt: skip
    tables.init_weights(job.seed, [table_init_std(rows) for rows in model.table_rows])
    return tables


def make_engine_optimizer(job: Job, engine: Engine) -> torch.optim.Optimizer:
    """Of a whole engine: AdamW for dense weights, beside it the tables' own where there are any."""
    dense = make_optimizer(job.optimizer, [h for h in engine.param_shards if not isinstance(h, TableParamShard)])
    if not isinstance(engine, TableEngine):
        return dense
    return CombinedOptimizer(dense, engine.tables, job.embedding_tables.lr_multiplier)
