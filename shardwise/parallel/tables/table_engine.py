"""The engine of a model with sharded embedding tables: the dense part trains like any model, the tables are sharded
over the GPUs of all ranks if they fit there, otherwise over their host memory.

Table shards are parameter shards like any other: the same step computes the norm of their gradients and clips them, and
the same checkpoint saves and reshards them. Their gradient holds only the rows that the batch touched."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.criteo import ClickBatch
from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.optim.sparse import CombinedOptimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.prepare import Prepared
from shardwise.parallel.tables.sharded_tables import Bags, LookupRoute, ShardedTables, place_tables, sum_bags

HOT_ROW_SAMPLES = 32_768  # samples that are read to find the most frequently used rows
MAX_GPU_SHARE = 0.5  # of a GPU's memory, for tables and optimizer states


def table_bytes(prepared: Prepared) -> list[float]:
    """Returns the bytes of tables and optimizer states by rank."""
    job, ranks = prepared.job, prepared.layout.data
    element_size = 8 if job.precision == "float64" else 4
    copies = 3.0 if job.embedding_tables.optimizer == "adam" else 1.0 + 1.0 / prepared.tables[0].width
    bytes_by_rank = [0.0] * ranks
    for shard in place_tables(prepared.tables, ranks, job.embedding_tables.sharding):
        bytes_by_rank[shard.rank] += shard.num_rows * prepared.tables[0].width * element_size * copies
    return bytes_by_rank


def check_host_memory(prepared: Prepared, bytes_per_rank: float) -> None:
    """Raises LayoutError if the tables and optimizer states of a rank do not fit into its host memory."""
    if not prepared.tables:
        return
    job, layout, bytes_by_rank = prepared.job, prepared.layout, table_bytes(prepared)
    max_bytes = max(bytes_by_rank)
    if max_bytes > bytes_per_rank:
        total_bytes = sum(bytes_by_rank)
        ranks = -int(-total_bytes // bytes_per_rank)
        remedy = f"use at least {ranks} ranks with that much memory each, or fewer model.rows"
        if job.embedding_tables.sharding != "auto" and total_bytes / layout.data <= bytes_per_rank:
            remedy = 'use embedding_tables.sharding = "auto", which splits tables that are too large'
        size, rank = f"{max_bytes / 2**30:.3g} GiB of tables and optimizer states", bytes_by_rank.index(max_bytes)
        problem = f"rank {rank} would hold {size}, but has {bytes_per_rank / 2**30:.3g} GiB of memory"
        raise LayoutError(f"layout '{layout}': {problem}; {remedy}.")


@dataclass
class TableEngine(Engine):
    has_tables = True

    model: Any
    compute_dtype: torch.dtype = torch.float32
    tables: ShardedTables = field(kw_only=True)

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        route = self._route(samples)
        rows = self._fetch(route).requires_grad_()
        total = torch.zeros_like(scale)
        for number, (micro_batch, vectors) in enumerate(self._micro_batches(samples, route, rows), start=1):
            with self.data.micro_batch(last=number == self.batch.micro_batches):
                loss = self._loss(self.data.modules[0], micro_batch, vectors) * scale
                loss.backward()
            total += loss.detach()
        gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
        self.tables.push_gradients(route, gradient[: len(route.positions)].to(self.tables.device))
        if self.tables.hot_rows is not None:
            self.tables.hot_rows.reduce_gradients(route.cached_rows, gradient[len(route.positions) :])
        return total

    def evaluate(self, samples: Samples) -> Tensor:
        route = self._route(samples)
        parts = self._micro_batches(samples, route, self._fetch(route))
        return torch.stack([self._loss(self.chains[0], micro_batch, vectors) for micro_batch, vectors in parts]).sum()

    def _fetch(self, route: LookupRoute) -> Tensor:
        """Returns a batch's rows on the device: the fetched ones, then those cached there."""
        rows, hot = self.tables.fetch(route).to(self.mesh.device), self.tables.hot_rows
        return rows if hot is None else torch.cat((rows, hot.values[route.cached_rows.to(rows.device)]))

    def divide_gradients(self, divisor: Tensor) -> None:
        torch._foreach_div_([shard.grad for shard in self.dense_shards], divisor)
        self.tables.divide_gradients(float(divisor))

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        """Returns one optimizer for both the dense weights and the tables."""
        return CombinedOptimizer(super().make_optimizer(job), self.tables, job.embedding_tables.lr_multiplier)

    def begin_stream(self, job: Job, stream: SampleStream) -> None:
        """Caches, on every device, the rows that the first samples use most."""
        self.tables.hot_rows = None
        if job.embedding_tables.cached_rows and self.tables.device.type == "cpu":
            bags, ids = self._bags(stream.read(np.arange(HOT_ROW_SAMPLES))), torch.arange(HOT_ROW_SAMPLES)
            place = self.mesh["data"], self.mesh.device
            self.tables.cache_hot_rows(bags, ids, job.embedding_tables.cached_rows, *place)

    def _bags(self, samples: Samples) -> Bags:
        clicks, device = ClickBatch.unpack(samples, self.model), self.tables.device
        return Bags.from_padded(clicks.sparse_ids.to(device), clicks.weights.to(device))

    def _route(self, samples: Samples) -> LookupRoute:
        return self.tables.route(self._bags(samples), samples.ids.to(self.tables.device))

    def _micro_batches(self, samples: Samples, route: LookupRoute, rows: Tensor) -> Iterator[tuple[Samples, Tensor]]:
        """Yields the micro-batches, each with its pooled embedding vectors."""
        bag = 0
        for micro_batch in samples.split(self.batch.micro_batch):
            offsets = route.offsets[bag : bag + micro_batch.ids.numel() * self.model.tables + 1]
            first, last = offsets[[0, -1]].tolist()
            bag_inputs = route.inverse_indices[first:last], offsets - first, route.weights[first:last]
            vectors = sum_bags(rows, *(tensor.to(rows.device) for tensor in bag_inputs))
            yield micro_batch, vectors.view(-1, self.model.tables, self.model.width)
            bag += micro_batch.ids.numel() * self.model.tables

    def _loss(self, module: Any, micro_batch: Samples, vectors: Tensor) -> Tensor:
        clicks = ClickBatch.unpack(micro_batch, self.model)
        dense_features, vectors = clicks.dense_features.to(self.compute_dtype), vectors.to(self.compute_dtype)
        return module(dense_features, vectors, clicks.labels)  # type: ignore[no-any-return]


def make_tables(prepared: Prepared, mesh: Mesh, dtype: torch.dtype) -> ShardedTables:
    """Returns this rank's tables with initial weights."""
    axis, on_gpu = mesh["data"], mesh.device.type == "cuda"
    job, settings = prepared.job, prepared.job.embedding_tables
    device = mesh.device if on_gpu and fit_on_gpu(prepared) else torch.device("cpu")
    in_host_memory = on_gpu and device.type == "cpu"
    if in_host_memory and axis.size > 1:
        axis = replace(axis, group=dist.new_group(backend="gloo"))
    shards = place_tables(prepared.tables, axis.size, settings.sharding)
    options = settings.optimizer, job.optimizer.betas, job.optimizer.eps
    tables = ShardedTables(prepared.tables, shards, axis, dtype, *options, device=device, pin_memory=in_host_memory)
    tables.init_weights(job.seed)
    return tables


def fit_on_gpu(prepared: Prepared) -> bool:
    """Returns whether tables and optimizer states live on the GPU: by default, if they take up to half of it."""
    settings = prepared.job.embedding_tables
    if settings.device != "auto" or settings.cached_rows:
        return settings.device == "cuda"
    ranks = -(-int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // torch.cuda.device_count())  # that share a GPU
    return max(table_bytes(prepared)) * ranks <= MAX_GPU_SHARE * torch.cuda.mem_get_info()[1]
