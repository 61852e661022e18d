"""A DLRM on many ranks: its dense part data-parallel like any model, its tables over the host memory of all ranks.

Pieces of tables are holdings like any other: the same step sums, measures and clips them, the same checkpoint saves
them and cuts them anew. Only their gradient is of the touched rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.criteo import Clicks
from shardwise.data.stream import Samples, Stream
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job
from shardwise.kinds import DLRM
from shardwise.layout import Batch, Layout, solve_batch
from shardwise.models.dlrm import dlrm, table_std
from shardwise.optim import make_optimizer
from shardwise.optim.sparse import Joined
from shardwise.parallel.bags import Bags, check_ids, sum_bags
from shardwise.parallel.data import Cuts
from shardwise.parallel.embedding import Ahead, Route, Tables
from shardwise.parallel.engine import Engine
from shardwise.parallel.gradient import check as check_gradient
from shardwise.parallel.holding import Holding, start
from shardwise.parallel.hot import Hot, most_used
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.parallel.placement import Shard, Table, place_tables
from shardwise.parallel.precision import LossScale, Precision
from shardwise.parallel.sharded import data_parallel, is_alone, is_sharded
from shardwise.parallel.sync import check as check_sync
from shardwise.support import REFUSED, support

SEEN = 32_768  # samples from which the rows are picked that are used most


def model_of(job: Job) -> DLRM:
    assert isinstance(job.model, DLRM)
    return job.model


def parameters(model: DLRM) -> int:
    """Numbers in tables and products."""
    with torch.device("meta"):
        dense = sum(weight.numel() for weight in dlrm(model).parameters())
    return dense + sum(model.sizes) * model.width


def tables_of(model: DLRM) -> list[Table]:
    return [Table(f"table{i}", rows, model.width, model.lookups) for i, rows in enumerate(model.sizes)]


def shards_of(job: Job, ranks: int) -> list[Shard]:
    return place_tables(tables_of(model_of(job)), ranks, job.embedding.cut)


def check(job: Job, layout: Layout) -> Batch:
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
        raise LayoutError(f"layout '{layout}': {found.sentence}")
    return solve_batch(layout, job.samples)


def check_room(job: Job, layout: Layout, each: float) -> None:
    """Raises where the rows and states of some rank's tables are larger than the `each` bytes that a rank has."""
    word = 8 if job.precision == "float64" else 4
    copies = 3.0 if job.embedding.optimizer == "adam" else 1.0 + 1.0 / model_of(job).width
    held = [0.0] * layout.data
    for shard in shards_of(job, layout.data):
        held[shard.rank] += shard.size * word * copies
    worst = max(held)
    if worst > each:
        whole = sum(held)
        remedy = f"use at least {-int(-whole // each)} ranks with as much each, or fewer model.rows"
        if job.embedding.cut != "auto" and whole / layout.data <= each:
            remedy = 'use embedding.cut = "auto", which cuts tables that are too large'
        raise LayoutError(
            f"layout '{layout}': rank {held.index(worst)} would hold {worst / 2**30:.3g} GiB of tables and their "
            f"states, but has {each / 2**30:.3g} GiB of memory; {remedy}."
        )


@dataclass(eq=False, kw_only=True)
class TablePiece(Holding):
    """A piece of a table. Its gradient is that of the touched rows, in their order."""

    tables: Tables
    shard: Shard

    @property
    def grad(self) -> Tensor:
        return self.tables.gradient_of(self.shard)[1]


@dataclass(kw_only=True)
class Recommender(Engine):
    """What one rank needs for a step of a DLRM."""

    model: DLRM
    compute: torch.dtype
    tables: Tables
    ahead: Ahead | None = None

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        if self.ahead is not None and self.ahead.pending:
            route, found = self.ahead.take(samples.ids.cpu())
        else:
            route = self._route(samples)
            found = self.tables.fetch(route)
        rows = self._all(route, found).requires_grad_()
        total = torch.zeros_like(scale)
        for number, (part, vectors) in enumerate(self._parts(samples, route, rows), start=1):
            with self.data.micro_batch(last=number == self.batch.micro_batches):
                loss = self._loss(self.data.modules[0], part, vectors) * scale
                loss.backward()
            total += loss.detach()
        gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
        self.tables.give_back(route, gradient[: route.distinct].cpu())
        if self.tables.hot is not None:
            self.tables.hot.give(route.kept, gradient[route.distinct :])
        return total

    def evaluate(self, samples: Samples) -> Tensor:
        route = self._route(samples)
        rows = self._all(route, self.tables.fetch(route))
        parts = self._parts(samples, route, rows)
        return torch.stack([self._loss(self.chains[0], part, vectors) for part, vectors in parts]).sum()

    def _all(self, route: Route, found: Tensor) -> Tensor:
        """A batch's rows on the device: those that were fetched, then those that are kept there."""
        rows, hot = found.to(self.mesh.device), self.tables.hot
        return rows if hot is None else torch.cat((rows, hot.values[route.kept.to(rows.device)]))

    def keep(self, stream: Stream, count: int) -> None:
        """Keeps the `count` rows that the first samples use most on every device, as they are now."""
        self.tables.hot = None
        if count:
            bags = self._bags(stream.read(np.arange(SEEN)))
            table = check_ids(bags, self.tables.tables, torch.arange(SEEN))
            rows = most_used(bags.ids + torch.tensor(self.tables.bases)[table], count)
            if rows.numel():
                self.tables.hot = Hot(self.tables, rows, self.mesh["data"], self.mesh.device)

    def divide(self, by: Tensor) -> None:
        torch._foreach_div_([one.grad for one in self.holdings if not isinstance(one, TablePiece)], by)
        self.tables.divide(float(by))

    def coming(self, batches: Iterator[tuple[int, Samples]], count: int) -> Iterator[tuple[int, Samples]]:
        """The batches of `count` steps; while one is computed with, the rows of the next are fetched."""
        if self.ahead is None:
            self.ahead = Ahead(self.tables)
        here: list[tuple[int, Samples]] = []
        for batch in islice(batches, count):
            self.ahead.ask(self._bags(batch[1]), batch[1].ids)
            yield from here
            here = [batch]
        yield from here

    def _bags(self, samples: Samples) -> Bags:
        clicks = Clicks.of(samples, self.model)
        return Bags.of(clicks.categories.cpu(), clicks.weights.cpu())

    def _route(self, samples: Samples) -> Route:
        return self.tables.route(self._bags(samples), samples.ids.cpu())

    def _parts(self, samples: Samples, route: Route, rows: Tensor) -> Iterator[tuple[Samples, Tensor]]:
        """The micro-batches, each with the vectors of its bags."""
        bag = 0
        for part in samples.split(self.batch.micro_batch):
            offsets = route.offsets[bag : bag + part.ids.numel() * self.model.tables + 1]
            first, last = offsets[[0, -1]].tolist()
            given = route.places[first:last], offsets - first, route.weights[first:last]
            vectors = sum_bags(rows, *(tensor.to(rows.device) for tensor in given))
            yield part, vectors.view(-1, self.model.tables, self.model.width)
            bag += part.ids.numel() * self.model.tables

    def _loss(self, module: Any, part: Samples, vectors: Tensor) -> Tensor:
        clicks = Clicks.of(part, self.model)
        loss: Tensor = module(clicks.numbers.to(self.compute), vectors.to(self.compute), clicks.labels)
        return loss


def parallelize(
    job: Job, layout: Layout, device: torch.device, memory: AbstractContextManager[Any] | None = None
) -> Recommender:
    """This rank's part of the job."""
    batch = check(job, layout)
    model, mesh, precision = model_of(job), Mesh(layout, device), Precision(job.precision)
    alone = is_alone(layout, precision)
    with torch.device("meta"):
        chain = dlrm(model).to(precision.compute if alone else precision.master)
    if not is_sharded(layout) and not alone:
        precision.apply(chain)
    data = data_parallel([chain], layout, mesh, precision, batch, job.gradient, job.seed)
    shapes: Cuts = {name: (weight.shape, None, False) for name, weight in chain.named_weights()}
    with memory or nullcontext():
        chain.to_empty(device=device)
        holdings = data.hold(shapes)
        for holding in holdings:
            start(holding, chain.rules.init_of(holding.name), job.seed, mesh)
        data.publish()
    tables = make_tables(job, mesh, precision.master)
    for held in tables.held:
        table, shard = tables.tables[held.shard.table], held.shard
        holdings.append(
            TablePiece(
                table.name,
                held.rows,
                torch.Size((table.rows, table.width)),
                None,
                False,
                1,
                tables=tables,
                shard=shard,
                where=(shard.start, list(held.rows.shape)),
            )  # fmt: skip
        )
    return Recommender(
        mesh, batch, [chain], data, None, holdings, LossScale(precision, device), model=model,
        compute=precision.compute, tables=tables,
    )  # fmt: skip


def make_tables(job: Job, mesh: Mesh, dtype: torch.dtype) -> Tables:
    """This rank's tables, started."""
    axis, on_gpu = mesh["data"], mesh.device.type == "cuda"
    if on_gpu and axis.size > 1:
        axis = Axis(axis.size, axis.index, dist.new_group(backend="gloo"))  # rows are in host memory
    model, settings = model_of(job), job.embedding
    tables = Tables(
        tables_of(model), shards_of(job, axis.size), axis, dtype, settings.optimizer, job.optimizer.betas,
        job.optimizer.eps, pinned=on_gpu,
    )  # fmt: skip
    tables.start(job.seed, [table_std(rows) for rows in model.sizes])
    return tables


def optimizer_of(job: Job, engine: Engine) -> torch.optim.Optimizer:
    """Of a whole engine: AdamW for dense weights, beside it the tables' own where there are any."""
    dense = make_optimizer(job.optimizer, [h for h in engine.holdings if not isinstance(h, TablePiece)])
    if not isinstance(engine, Recommender):
        return dense
    return Joined(dense, engine.tables, job.embedding.rate)
