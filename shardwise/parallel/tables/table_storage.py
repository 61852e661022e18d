"""This rank's rows of all embedding tables in host memory, and the exchange of rows with the other ranks.

Storage and routes stay in host memory, pinned if there is a GPU. A world of size 1 sends nothing. This is our own code
because PyTorch has no sharded embedding tables, and TorchRec keeps tables and optimizers in kernels of its own.

Tables are placed on ranks table-wise, row-wise, column-wise, or by a mix chosen by size and lookups:

    table    each table on one rank
    row      the rows of each table in equal chunks over all ranks
    column   the columns of each table in equal chunks over all ranks
    auto     row-wise if a table exceeds a rank's share of all bytes, column-wise if it exceeds a rank's share of all
             lookups, otherwise table-wise; each shard goes to the rank with the least memory and lookups so far

Chunks are those of `torch.chunk`. A rank has at most one shard of a table. Lookups of a row-wise table are assumed to
be proportional to shard size: true for hashed ids, as here, but not if small ids are the frequent ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_to_all
from shardwise.models.family import TableSpec
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sparse import rowwise_adagrad_, sparse_adam_
from shardwise.random import hash_key, normal_

SHARDING_TYPES = ("auto", "table", "row", "column")


@dataclass(frozen=True, order=True)
class TableShard:
    """A shard of a table: half-open ranges of rows and columns."""

    rank: int
    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def start(self) -> tuple[int, int]:
        return self.rows[0], self.columns[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def place_tables(tables: Sequence[TableSpec], ranks: int, sharding: str = "auto") -> list[TableShard]:
    """Returns the shards of all tables, sorted by rank and table."""
    assert sharding in SHARDING_TYPES, sharding
    shards: list[TableShard] = []
    numel_per_rank = sum(table.size for table in tables) / ranks
    lookups_per_rank = sum(table.lookups_per_sample for table in tables) / ranks
    for index, table in enumerate(tables):
        by_columns, num_shards = sharding == "column", ranks if sharding in ("row", "column") else 1
        if sharding == "auto" and table.size > numel_per_rank:
            num_shards = min(ranks, -(-table.size // max(1, int(numel_per_rank))))
        elif sharding == "auto" and table.lookups_per_sample > lookups_per_rank:
            by_columns = True
            num_shards = min(ranks, table.width, -int(-table.lookups_per_sample // lookups_per_rank))
        for rank, chunk in enumerate(_chunk_ranges(table.width if by_columns else table.rows, num_shards)):
            rows, columns = ((0, table.rows), chunk) if by_columns else (chunk, (0, table.width))
            shards.append(TableShard(rank, index, rows, columns))
    return sorted(shards if sharding in ("row", "column") else _balance_over_ranks(tables, shards, ranks))


def _chunk_ranges(total: int, num_chunks: int) -> list[tuple[int, int]]:
    """Returns chunks of equal size except the last; none is empty."""
    size = -(-total // num_chunks)
    return [(first, min(first + size, total)) for first in range(0, total, size)]


def _balance_over_ranks(tables: Sequence[TableSpec], shards: list[TableShard], ranks: int) -> list[TableShard]:
    """Assigns shards greedily, heaviest first, to the rank whose larger load (memory or lookups) stays smallest."""
    total_numel = sum(table.size for table in tables)
    total_lookups = sum(table.lookups_per_sample for table in tables) or 1.0
    loads = [[0.0, 0.0] for _ in range(ranks)]

    def relative_load(shard: TableShard) -> tuple[float, float]:
        table = tables[shard.table]
        return shard.size / total_numel, table.lookups_per_sample * shard.size / table.size / total_lookups

    placed: list[TableShard] = []
    ranks_of_table: dict[int, set[int]] = {}
    for shard in sorted(shards, key=lambda shard: (-max(relative_load(shard)), shard)):
        memory_share, lookup_share = relative_load(shard)
        free = [rank for rank in range(ranks) if rank not in ranks_of_table.setdefault(shard.table, set())]
        larger_load = {rank: max(loads[rank][0] + memory_share, loads[rank][1] + lookup_share) for rank in free}
        best = min(free, key=lambda rank: (larger_load[rank], sum(loads[rank]), rank))
        ranks_of_table[shard.table].add(best)
        loads[best][0] += memory_share
        loads[best][1] += lookup_share
        placed.append(replace(shard, rank=best))
    return placed


RowIndices = list[Tensor]  # row indices, by fused table


class FusedTable:
    """Shards of one rank with the same columns, stacked in one tensor."""

    def __init__(self, rank: int, columns: tuple[int, int], shards: list[TableShard]):
        self.rank, self.columns, self.shards = rank, columns, shards
        self.width = columns[1] - columns[0]
        self.row_offsets = list(accumulate((shard.rows[1] - shard.rows[0] for shard in shards), initial=0))


def fuse_shards(shards: Sequence[TableShard]) -> list[FusedTable]:
    """Returns the fused tables of all ranks, by rank; every rank computes the same."""
    keys = sorted({(shard.rank, shard.columns) for shard in shards})
    return [FusedTable(*key, [shard for shard in shards if (shard.rank, shard.columns) == key]) for key in keys]


@dataclass(frozen=True)
class LookupRoute:
    """Which rows of a batch this rank receives from and sends to each rank."""

    ids: Tensor  # stream positions of the samples, which identify the batch
    offsets: Tensor
    weights: Tensor
    inverse_indices: Tensor  # by id, its index among the distinct rows: first the fetched, then the cached ones
    num_fetched_rows: int  # number of distinct rows to fetch
    cached_rows: Tensor  # the other distinct rows, as indices into the hot-row cache
    requested_rows: RowIndices  # the distinct rows that come from each fused table of all ranks
    served_rows: RowIndices  # the rows that each rank requests from each fused table of this rank


@dataclass(eq=False, kw_only=True)
class TableParamShard(ParamShard):
    """A local shard of a table, as a step, checkpoints and verify see it. `grad` holds the touched rows only, in their
    order."""

    is_table = True

    tables: Any  # the `ShardedTables` that it is a part of
    shard: TableShard
    state: dict[str, Tensor]  # views of the optimizer state of its rows

    @property
    def grad(self) -> Tensor:
        return self.tables.gradient_of(self.shard)[1]  # type: ignore[no-any-return]

    @property
    def full_grad(self) -> Tensor:
        return torch.zeros_like(self.tensor).index_copy_(0, *self.tables.gradient_of(self.shard))

    @property
    def offset_and_shape(self) -> tuple[tuple[int, ...], list[int]]:
        return self.shard.start, list(self.tensor.shape)


class TableStorage:
    """This rank's shards of all tables, with lookups of rows that any rank holds."""

    def __init__(
        self, tables: Sequence[TableSpec], shards: Sequence[TableShard], axis: Axis, dtype: torch.dtype,
        optimizer: str = "adagrad", betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        pin_memory: bool = False,
    ):  # fmt: skip
        assert len({table.width for table in tables}) == 1, "the tables of a model have rows of one width"
        self.tables, self.shards, self.axis, self.dtype = list(tables), list(shards), axis, dtype
        self.optimizer, self.betas, self.eps = optimizer, betas, eps
        self.width = tables[0].width
        self.table_offsets = list(accumulate((table.rows for table in tables), initial=0))
        self.fused_tables = fuse_shards(shards)
        self.local_tables = [fused for fused in self.fused_tables if fused.rank == axis.index]
        self.owners = [fused.rank for fused in self.fused_tables]  # the other ends of `requested_rows` ...
        self.requesters = [rank for rank in range(axis.size) for _ in self.local_tables]  # ... and of `served_rows`
        factory_kwargs: dict[str, Any] = {"dtype": dtype, "pin_memory": pin_memory}
        sizes = [(fused.row_offsets[-1], fused.width) for fused in self.local_tables]
        self.storage = [torch.zeros(size, **factory_kwargs) for size in sizes]
        self.state: list[dict[str, Tensor]] = []
        for rows in self.storage:
            if optimizer == "adagrad":
                self.state.append({"sum": torch.zeros(rows.shape[0], **factory_kwargs)})
            else:
                self.state.append({key: torch.zeros_like(rows) for key in ("exp_avg", "exp_avg_sq")})
        self.step_state = {"step": torch.zeros((), dtype=torch.int64)}
        self.local_shards = list(self._make_local_shards())
        self.has_column_shards = any(shard.columns != (0, self.width) for shard in self.shards)

    def _make_local_shards(self) -> Iterator[TableParamShard]:
        step_state = {} if self.optimizer == "adagrad" else self.step_state
        for fused, rows, state in zip(self.local_tables, self.storage, self.state, strict=True):
            for shard, first, last in zip(fused.shards, fused.row_offsets, fused.row_offsets[1:]):
                views, table = {key: value[first:last] for key, value in state.items()}, self.tables[shard.table]
                yield TableParamShard(
                    table.name, rows[first:last], torch.Size((table.rows, table.width)),
                    tables=self, shard=shard, state=views | step_state,
                )  # fmt: skip

    def init_weights(self, seed: int) -> None:
        """Initializes the rows; the values depend on the seed alone, not on the placement."""
        for local in self.local_shards:
            std = self.tables[local.shard.table].init_std
            normal_(local.tensor, hash_key("init", seed, local.name), local.shape, local.shard.start, std)

    def _request_rows(self, unique_rows: Tensor, axis: Axis | None = None) -> tuple[RowIndices, RowIndices]:
        """Requests rows from the ranks that own them. Returns the requested rows and those requested from this rank."""
        requested, rows = [], []
        for fused in self.fused_tables:
            positions, local_rows = [], []
            for shard, first in zip(fused.shards, fused.row_offsets):
                begin, end, start = self.row_range(shard, unique_rows)
                positions.append(torch.arange(begin, end))
                local_rows.append(unique_rows[begin:end] - (start - first))
            requested.append(torch.cat(positions))
            rows.append(torch.cat(local_rows))
        return requested, self._exchange_indices(rows, self.owners, self.requesters, axis)

    def row_range(self, shard: TableShard, rows: Tensor) -> tuple[int, int, int]:
        """Returns the range of sorted `rows` that lies in a shard, and the number of the shard's first row."""
        first, last = (self.table_offsets[shard.table] + row for row in shard.rows)
        begin, end = torch.searchsorted(rows, torch.tensor([first, last])).tolist()
        return begin, end, first

    def _exchange_indices(
        self, indices: RowIndices, to_ranks: list[int], from_ranks: list[int], axis: Axis | None = None
    ) -> RowIndices:
        """Sends `indices[n]` to rank `to_ranks[n]`; returns one tensor per entry of `from_ranks`."""
        lengths = [part.numel() for part in indices]
        counts = self._sum_by_rank(to_ranks, [1] * len(to_ranks)), self._sum_by_rank(from_ranks, [1] * len(from_ranks))
        received = self._all_to_all(torch.tensor(lengths, dtype=torch.int64), *counts, axis).tolist()
        sizes = self._sum_by_rank(to_ranks, lengths), self._sum_by_rank(from_ranks, received)
        return list(self._all_to_all(cat_or_empty(indices, torch.int64), *sizes, axis).split(received))

    def _sum_by_rank(self, ranks: Sequence[int], sizes: Sequence[int]) -> list[int]:
        totals = [0] * self.axis.size
        for rank, size in zip(ranks, sizes, strict=True):
            totals[rank] += size
        return totals

    def fetch(self, route: LookupRoute, axis: Axis | None = None, storage: Sequence[Tensor] | None = None) -> Tensor:
        """Fetches the distinct rows of this rank's samples, from `storage` if given instead of the weights."""
        served = zip([*(storage or self.storage)] * self.axis.size, route.served_rows, strict=True)
        parts = [rows.index_select(0, row_indices).reshape(-1) for rows, row_indices in served]
        received = self._exchange_rows(parts, route.served_rows, route.requested_rows, axis=axis)
        rows = torch.empty(route.num_fetched_rows, self.width, dtype=self.dtype)
        self._store_rows(rows, received, route.requested_rows)
        return rows

    def lookup_rows(self, rows: Tensor, storage: Sequence[Tensor] | None = None) -> Tensor:
        """Fetches rows by sorted number over all tables, from `storage` if given instead of the weights."""
        empty = rows[:0]
        route = LookupRoute(empty, empty, empty, empty, rows.numel(), empty, *self._request_rows(rows))
        return self.fetch(route, storage=storage)

    def lookup_states(self, rows: Tensor) -> dict[str, Tensor]:
        """Fetches the optimizer state of some rows."""
        if self.optimizer == "adagrad":
            pairs = zip(self.local_tables, self.state)
            sums = [state["sum"][:, None].expand(-1, fused.width) for fused, state in pairs]
            return {"sum": self.lookup_rows(rows, sums)[:, 0].contiguous()}
        return {key: self.lookup_rows(rows, [state[key] for state in self.state]) for key in ("exp_avg", "exp_avg_sq")}

    def _store_rows(self, rows: Tensor, values: Tensor, positions: RowIndices) -> None:
        """Copies values into the columns of each fused table and the rows at its positions."""
        parts = values.split(numels(positions, self.fused_tables))
        for fused, table_positions, part in zip(self.fused_tables, positions, parts, strict=True):
            rows[:, slice(*fused.columns)].index_copy_(0, table_positions, part.view(-1, fused.width))

    def _exchange_rows(
        self, values: list[Tensor], served: RowIndices, requested: RowIndices, is_backward: bool = False,
        axis: Axis | None = None,
    ) -> Tensor:  # fmt: skip
        """Sends rows from owners to requesters; the opposite way in the backward."""
        served_sizes = self._sum_by_rank(self.requesters, numels(served, self.local_tables * self.axis.size))
        requested_sizes = self._sum_by_rank(self.owners, numels(requested, self.fused_tables))
        sizes = (requested_sizes, served_sizes) if is_backward else (served_sizes, requested_sizes)
        return self._all_to_all(cat_or_empty(values, self.dtype), *sizes, axis)

    def _all_to_all(self, input: Tensor, sent: list[int], received: list[int], axis: Axis | None = None) -> Tensor:
        if self.axis.size == 1:
            return input
        output = input.new_empty(sum(received))
        all_to_all(output, input, received, sent, axis=axis or self.axis)
        return output

    def update_rows(
        self, rows: Tensor, state: dict[str, Tensor], indices: Tensor, gradient: Tensor, mean_square: Tensor | None,
        lr: float,
    ) -> None:  # fmt: skip
        """Updates some rows. `mean_square`: for row-wise AdaGrad, the mean square of each row's full gradient."""
        if mean_square is not None:
            rowwise_adagrad_(rows, state["sum"], indices, gradient, mean_square, lr, self.eps)
        else:
            moments, step = (state["exp_avg"], state["exp_avg_sq"]), int(self.step_state["step"])
            sparse_adam_(rows, moments, indices, gradient, step, lr, self.betas, self.eps)


def numels(rows: RowIndices, tables: list[FusedTable]) -> list[int]:
    """Returns the elements in the given rows of each fused table."""
    return [row_indices.numel() * fused.width for row_indices, fused in zip(rows, tables, strict=True)]


def cat_or_empty(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
