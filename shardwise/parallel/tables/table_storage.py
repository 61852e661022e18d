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


RowIndices = list[list[Tensor]]  # row indices, by rank and fused table


class FusedTable:
    """Shards of one rank with the same columns, stacked in one tensor."""

    def __init__(self, columns: tuple[int, int], shards: list[TableShard]):
        self.columns, self.shards = columns, shards
        self.width = columns[1] - columns[0]
        self.row_offsets = list(accumulate((shard.rows[1] - shard.rows[0] for shard in shards), initial=0))


def fuse_shards(shards: Sequence[TableShard], rank: int) -> list[FusedTable]:
    """Returns the fused tables of a rank; every rank computes the same."""
    local_shards = [shard for shard in shards if shard.rank == rank]
    column_ranges = sorted({shard.columns for shard in local_shards})
    return [FusedTable(columns, [one for one in local_shards if one.columns == columns]) for columns in column_ranges]


@dataclass(frozen=True)
class LookupRoute:
    """Which rows of a batch this rank receives from and sends to each rank."""

    ids: Tensor  # stream positions of the samples, which identify the batch
    offsets: Tensor
    weights: Tensor
    inverse_indices: Tensor  # by id, its index among the distinct rows: first the fetched, then the cached ones
    num_fetched_rows: int  # number of distinct rows to fetch
    cached_rows: Tensor  # the other distinct rows, as indices into the hot-row cache
    requested_rows: RowIndices  # the distinct rows that come from each rank and fused table
    served_rows: RowIndices  # the rows that each rank requests, by fused table of this rank


@dataclass(frozen=True)
class TableShardView:
    """Views of one local shard: its rows and their optimizer state."""

    shard: TableShard
    rows: Tensor
    state: dict[str, Tensor]


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
        self.fused_tables = [fuse_shards(shards, rank) for rank in range(axis.size)]
        self.local_tables = self.fused_tables[axis.index]
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
        self.local_shards = list(self._make_shard_views())
        self.has_column_shards = any(shard.columns != (0, self.width) for shard in self.shards)

    def _make_shard_views(self) -> Iterator[TableShardView]:
        step_state = {} if self.optimizer == "adagrad" else self.step_state
        for fused, rows, state in zip(self.local_tables, self.storage, self.state, strict=True):
            for shard, first, last in zip(fused.shards, fused.row_offsets, fused.row_offsets[1:]):
                views = {key: value[first:last] for key, value in state.items()}
                yield TableShardView(shard, rows[first:last], views | step_state)

    def init_weights(self, seed: int, std: Sequence[float]) -> None:
        """Initializes the rows; the values depend on the seed alone, not on the placement."""
        for view in self.local_shards:
            table = self.tables[view.shard.table]
            shape = torch.Size((table.rows, table.width))
            key = hash_key("init", seed, table.name)
            normal_(view.rows, key, shape, view.shard.start, std[view.shard.table])

    def _request_rows(self, unique_rows: Tensor, axis: Axis | None = None) -> tuple[RowIndices, RowIndices]:
        """Requests rows from the ranks that own them. Returns the requested rows and those requested from this rank."""
        requested: RowIndices = []
        rows: RowIndices = []
        for rank_tables in self.fused_tables:
            requested.append([])
            rows.append([])
            for fused in rank_tables:
                positions, local_rows = [], []
                for shard, first in zip(fused.shards, fused.row_offsets):
                    begin, end, start = self.row_range(shard, unique_rows)
                    positions.append(torch.arange(begin, end))
                    local_rows.append(unique_rows[begin:end] - (start - first))
                requested[-1].append(torch.cat(positions))
                rows[-1].append(torch.cat(local_rows))
        return requested, self._exchange_indices(rows, [len(self.local_tables)] * self.axis.size, axis)

    def row_range(self, shard: TableShard, rows: Tensor) -> tuple[int, int, int]:
        """Returns the range of sorted `rows` that lies in a shard, and the number of the shard's first row."""
        first, last = (self.table_offsets[shard.table] + row for row in shard.rows)
        begin, end = torch.searchsorted(rows, torch.tensor([first, last])).tolist()
        return begin, end, first

    def _exchange_indices(self, indices: RowIndices, received: list[int], axis: Axis | None = None) -> RowIndices:
        """Sends the tensors `indices[n]` to rank n; returns those from each rank, of which there are `received[n]`."""
        flat = [part for parts in indices for part in parts]
        lengths = torch.tensor([part.numel() for part in flat], dtype=torch.int64)
        received_lengths = self._all_to_all(lengths, [len(parts) for parts in indices], received, axis)
        recv_sizes = [int(part.sum()) for part in received_lengths.split(received)]
        sizes = [sum(part.numel() for part in parts) for parts in indices], recv_sizes
        values = self._all_to_all(cat_or_empty(flat, torch.int64), *sizes, axis)
        parts = iter(values.split(received_lengths.tolist()))
        return [[next(parts) for _ in range(count)] for count in received]

    def fetch(self, route: LookupRoute, axis: Axis | None = None, storage: Sequence[Tensor] | None = None) -> Tensor:
        """Fetches the distinct rows of this rank's samples, from `storage` if given instead of the weights."""
        parts = [
            rows.index_select(0, row_indices).reshape(-1)
            for rank_rows in route.served_rows
            for rows, row_indices in zip(storage or self.storage, rank_rows, strict=True)
        ]
        received = self._exchange_rows(cat_or_empty(parts, self.dtype), route, is_backward=False, axis=axis)
        rows = torch.empty(route.num_fetched_rows, self.width, dtype=self.dtype)
        self._store_rows(rows, received, list(self._requests_by_table(route)))
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

    def _requests_by_table(self, route: LookupRoute) -> Iterator[tuple[FusedTable, Tensor]]:
        for rank_tables, requested in zip(self.fused_tables, route.requested_rows, strict=True):
            yield from zip(rank_tables, requested, strict=True)

    def _store_rows(self, rows: Tensor, values: Tensor, targets: list[tuple[FusedTable, Tensor]]) -> None:
        """Copies values, in the order of `targets`, into the columns of each fused table and the given rows."""
        parts = values.split([positions.numel() * fused.width for fused, positions in targets])
        for (fused, positions), part in zip(targets, parts, strict=True):
            rows[:, slice(*fused.columns)].index_copy_(0, positions, part.view(-1, fused.width))

    def _exchange_rows(self, values: Tensor, route: LookupRoute, is_backward: bool, axis: Axis | None = None) -> Tensor:
        """Sends rows from owners to requesters; the opposite way in the backward."""
        served_sizes = [numel_of(rank_rows, self.local_tables) for rank_rows in route.served_rows]
        requested_sizes = list(map(numel_of, route.requested_rows, self.fused_tables))
        sizes = (requested_sizes, served_sizes) if is_backward else (served_sizes, requested_sizes)
        return self._all_to_all(values, *sizes, axis)

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


def numel_of(rows: list[Tensor], rank_tables: list[FusedTable]) -> int:
    """Returns the elements in the given rows of each fused table."""
    return sum(row_indices.numel() * fused.width for row_indices, fused in zip(rows, rank_tables, strict=True))


def cat_or_empty(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
