"""This rank's rows of all embedding tables in host memory, and the exchange of rows with the other ranks.

Storage and routes stay in host memory, pinned if there is a GPU. A world of size 1 sends nothing. This is our own code
because PyTorch has no sharded embedding tables, and TorchRec keeps tables and optimizers in kernels of its own.

Tables are placed on ranks table-wise, row-wise, or by a mix chosen by size and lookups:

    table    each table on one rank
    row      the rows of each table in equal chunks over all ranks
    auto     row-wise if a table exceeds a rank's share of all bytes or of all lookups, otherwise table-wise; each shard
             goes to the rank with the least memory and lookups so far

Chunks are those of `torch.chunk`. A rank has at most one shard of a table. Lookups of a row-wise table are assumed to
be proportional to shard size: true for hashed ids, as here, but not if small ids are the frequent ones.
"""

from collections.abc import Sequence
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

SHARDING_TYPES = ("auto", "table", "row")


@dataclass(frozen=True, order=True)
class TableShard:
    """A shard of a table: a half-open range of its rows."""

    rank: int
    table: int
    rows: tuple[int, int]

    @property
    def start(self) -> tuple[int, int]:
        return self.rows[0], 0

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


def place_tables(tables: Sequence[TableSpec], ranks: int, sharding: str = "auto") -> list[TableShard]:
    """Returns the shards of all tables, sorted by rank and table."""
    assert sharding in SHARDING_TYPES, sharding
    total_size, total_lookups = _total_load(tables)
    shards: list[TableShard] = []
    for index, table in enumerate(tables):
        num_shards = ranks if sharding == "row" else 1
        if sharding == "auto":  # a table of up to n / ranks of all bytes and lookups has n shards
            by_load = -(-ranks * table.size // total_size), -int(-ranks * table.lookups_per_sample // total_lookups)
            num_shards = min(ranks, max(by_load))
        size = -(-table.rows // num_shards)
        chunks = [(first, min(first + size, table.rows)) for first in range(0, table.rows, size)]
        shards += [TableShard(rank, index, rows) for rank, rows in enumerate(chunks)]
    return sorted(shards if sharding == "row" else _balance_over_ranks(tables, shards, ranks))


def _total_load(tables: Sequence[TableSpec]) -> tuple[int, float]:
    """Returns the elements of all tables, and their lookups per sample."""
    return sum(table.size for table in tables), sum(table.lookups_per_sample for table in tables) or 1.0


def _balance_over_ranks(tables: Sequence[TableSpec], shards: list[TableShard], ranks: int) -> list[TableShard]:
    """Assigns shards greedily, heaviest first, to the rank whose larger load (memory or lookups) stays smallest."""
    total_size, total_lookups = _total_load(tables)
    loads = [[0.0, 0.0] for _ in range(ranks)]

    def relative_load(shard: TableShard) -> tuple[float, float]:
        table = tables[shard.table]
        share = shard.num_rows / table.rows
        return share * table.size / total_size, share * table.lookups_per_sample / total_lookups

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


@dataclass(frozen=True)
class LookupRoute:
    """Which rows of a batch this rank receives from and sends to each rank."""

    ids: Tensor  # stream positions of the samples, which identify the batch
    offsets: Tensor
    weights: Tensor
    inverse_indices: Tensor  # by id, its index among the distinct rows: first the fetched, then the cached ones
    cached_rows: Tensor  # the distinct rows that are not fetched, as indices into the hot-row cache
    positions: Tensor  # by row in the order of the ranks that own them: its index among the distinct rows to fetch
    requested_counts: list[int]  # how many of them each rank owns
    served_rows: Tensor  # the rows of this rank that each rank requests, rank by rank
    served_counts: list[int]  # how many each rank requests


@dataclass(eq=False, kw_only=True)
class TableParamShard(ParamShard):
    """A local shard of a table, as a step, checkpoints and verify see it. `grad` holds the touched rows only, in their
    order."""

    is_table = True

    tables: Any  # the `ShardedTables` that it is a part of
    shard: TableShard
    first_row: int  # its first row in the storage of the rank
    state: dict[str, Tensor]  # views of the optimizer state of its rows

    @property
    def grad(self) -> Tensor:
        return self.tables.gradient_of(self)[1]  # type: ignore[no-any-return]

    @property
    def full_grad(self) -> Tensor:
        return torch.zeros_like(self.tensor).index_copy_(0, *self.tables.gradient_of(self))

    @property
    def offset_and_shape(self) -> tuple[tuple[int, ...], list[int]]:
        return self.shard.start, list(self.tensor.shape)


class TableStorage:
    """This rank's shards of all tables, stacked in one tensor, with lookups of rows that any rank holds.

    Rows are numbered over all tables; a rank stores its own in the order of their numbers."""

    def __init__(
        self, tables: Sequence[TableSpec], shards: Sequence[TableShard], axis: Axis, dtype: torch.dtype,
        optimizer: str = "adagrad", betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        pin_memory: bool = False,
    ):  # fmt: skip
        assert len({table.width for table in tables}) == 1, "the tables of a model have rows of one width"
        self.tables, self.axis, self.dtype = list(tables), axis, dtype
        self.optimizer, self.betas, self.eps = optimizer, betas, eps
        self.table_offsets = list(accumulate((table.rows for table in tables), initial=0))
        by_row = sorted(shards, key=lambda shard: (shard.table, shard.rows))
        rows_of_rank, local_firsts = [0] * axis.size, dict[TableShard, int]()
        for shard in by_row:
            local_firsts[shard] = rows_of_rank[shard.rank]
            rows_of_rank[shard.rank] += shard.num_rows
        self.shard_starts = torch.tensor([self.table_offsets[shard.table] + shard.rows[0] for shard in by_row])
        self.shard_owners = torch.tensor([shard.rank for shard in by_row])
        self.local_offsets = self.shard_starts - torch.tensor([local_firsts[shard] for shard in by_row])
        """By shard, in the order of row numbers: the number of a row minus its index in the storage of its rank."""
        size = rows_of_rank[axis.index], tables[0].width
        self.storage = torch.zeros(size, dtype=dtype, pin_memory=pin_memory)
        if optimizer == "adagrad":
            self.state = {"sum": torch.zeros(size[0], dtype=dtype, pin_memory=pin_memory)}
        else:
            self.state = {key: torch.zeros_like(self.storage) for key in ("exp_avg", "exp_avg_sq")}
        self.step_state = {"step": torch.zeros((), dtype=torch.int64)}
        local_shards = [shard for shard in by_row if shard.rank == axis.index]
        self.local_shards = [self._make_param_shard(shard, local_firsts[shard]) for shard in local_shards]

    def _make_param_shard(self, shard: TableShard, first: int) -> TableParamShard:
        table, rows = self.tables[shard.table], slice(first, first + shard.num_rows)
        state = {key: value[rows] for key, value in self.state.items()}
        state |= {} if self.optimizer == "adagrad" else self.step_state
        return TableParamShard(
            table.name, self.storage[rows], torch.Size((table.rows, table.width)),
            tables=self, shard=shard, first_row=first, state=state,
        )  # fmt: skip

    def init_weights(self, seed: int) -> None:
        """Initializes the rows; the values depend on the seed alone, not on the placement."""
        for local in self.local_shards:
            std = self.tables[local.shard.table].init_std
            normal_(local.tensor, hash_key("init", seed, local.name), local.shape, local.shard.start, std)

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rank that owns each row, and the row's index in its storage."""
        shards = torch.searchsorted(self.shard_starts, rows, right=True) - 1
        return self.shard_owners[shards], rows - self.local_offsets[shards]

    def _request_rows(self, rows: Tensor, axis: Axis | None = None) -> tuple[Tensor, list[int], Tensor, list[int]]:
        """Requests distinct rows from the ranks that own them. Returns the last four fields of a `LookupRoute`."""
        owners, local_rows = self.locate(rows)
        positions, requested = owners.argsort(stable=True), owners.bincount(minlength=self.axis.size)
        each = [1] * self.axis.size
        served_counts = self._all_to_all(requested, each, each, axis).tolist()
        requested_counts = requested.tolist()
        served_rows = self._all_to_all(local_rows[positions], requested_counts, served_counts, axis)
        return positions, requested_counts, served_rows, served_counts

    def fetch(self, route: LookupRoute, axis: Axis | None = None) -> Tensor:
        """Fetches the distinct rows of this rank's samples."""
        return self._fetch_from(self.storage, route, axis)

    def _fetch_from(self, storage: Tensor, route: LookupRoute, axis: Axis | None = None) -> Tensor:
        served = storage.index_select(0, route.served_rows)
        received = self._all_to_all(served, route.served_counts, route.requested_counts, axis)
        return torch.empty_like(received).index_copy_(0, route.positions, received)

    def lookup_rows(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Fetches distinct rows by number, and their optimizer state."""
        empty = rows[:0]
        route = LookupRoute(empty, empty, empty, empty, empty, *self._request_rows(rows))
        return self.fetch(route), {key: self._fetch_from(value, route) for key, value in self.state.items()}

    def _all_to_all(self, input: Tensor, sent: list[int], received: list[int], axis: Axis | None = None) -> Tensor:
        """Sends rows of a tensor, so many to each rank, and returns those that arrive."""
        if self.axis.size == 1:
            return input
        output = input.new_empty(sum(received), *input.shape[1:])
        all_to_all(output, input, received, sent, axis=axis or self.axis)
        return output

    def update_rows(self, rows: Tensor, state: dict[str, Tensor], indices: Tensor, gradient: Tensor, lr: float) -> None:
        """Updates some rows of a tensor."""
        if self.optimizer == "adagrad":
            rowwise_adagrad_(rows, state["sum"], indices, gradient, lr, self.eps)
        else:
            moments, step = (state["exp_avg"], state["exp_avg_sq"]), int(self.step_state["step"])
            sparse_adam_(rows, moments, indices, gradient, step, lr, self.betas, self.eps)
