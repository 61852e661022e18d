"""Embedding tables over the memory of all ranks: looked up by all-to-all, updated by the rank that owns a row.

This is our own code because PyTorch has no sharded embedding tables, and TorchRec keeps tables and optimizers in
kernels of its own. docs/explanation/embeddings.md says how tables are placed on ranks, and follows a step: `route`
requests the distinct rows of a rank's samples from their owners, `fetch` receives them, `push_gradients` returns their
gradients, `update` updates each touched row once; rows in the hot-row cache (`HotRowCache`) are not sent. Chunks of
rows are those of `torch.chunk`, and a rank has at most one shard of a table. Lookups of a row-wise table are assumed to
be proportional to shard size: true for hashed ids, as here, but not if small ids are the frequent ones.

Gradients are sums over ranks, not means: the loss is already divided by the samples of the global batch. Storage and
routes are on the GPU if the tables fit there, otherwise in host memory, pinned if there is a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.collectives import Axis, all_reduce, all_to_all
from shardwise.errors import DataError
from shardwise.models.family import TableSpec
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sparse import rowwise_adagrad_, scatter_add_rows_, sparse_adam_
from shardwise.random import hash_key, normal_

SHARDING_TYPES = ("auto", "table", "row")


@dataclass(frozen=True, order=True)
class TableShard:
    """A shard of a table: a half-open range of its rows."""

    rank: int
    table: int
    rows: tuple[int, int]

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
    """A local shard of a table, as a step, checkpoints and verify see it. `grad` has the touched rows, in order."""

    is_table = True

    tables: "ShardedTables"
    shard: TableShard
    first_row: int  # its first row in the storage of the rank
    state: dict[str, Tensor]  # views of the optimizer state of its rows

    @property
    def grad(self) -> Tensor:
        return self.tables.gradient_of(self)[1]

    @property
    def full_grad(self) -> Tensor:
        return torch.zeros_like(self.tensor).index_copy_(0, *self.tables.gradient_of(self))

    @property
    def offset_and_shape(self) -> tuple[tuple[int, ...], list[int]]:
        return (self.shard.rows[0], 0), list(self.tensor.shape)


@dataclass(frozen=True)
class Bags:
    """The lookups of some samples. Bag b is of sample b // tables and table b % tables; its ids are
    `ids[offsets[b]:offsets[b + 1]]`, maybe none, and its vector is the sum of their rows times `weights`."""

    ids: Tensor  # (N,) int64
    offsets: Tensor  # (bags + 1,) int64
    weights: Tensor  # (N,)

    @classmethod
    def from_padded(cls, ids: Tensor, weights: Tensor) -> "Bags":
        """Returns the bags of padded ids (sample, table, slot); -1 is padding."""
        is_present = ids != -1
        offsets = F.pad(is_present.sum(2).flatten().cumsum(0), (1, 0))
        return cls(ids[is_present], offsets, weights[is_present])


def check_ids(bags: Bags, tables: Sequence[TableSpec], sample_ids: Tensor) -> Tensor:
    """Returns the table of each id. Raises DataError if one is out of range; `sample_ids` are stream positions."""
    counts, device = bags.offsets.diff(), bags.ids.device
    bag_indices = torch.arange(counts.numel(), device=device).repeat_interleave(counts, output_size=bags.ids.numel())
    table = bag_indices % len(tables)
    rows = torch.tensor([spec.rows for spec in tables], device=device)[table]
    out_of_range = ((bags.ids < 0) | (bags.ids >= rows)).nonzero()
    if out_of_range.numel():
        first = int(out_of_range[0])
        bad_table = tables[int(table[first])]
        sample = int(sample_ids[int(bag_indices[first]) // len(tables)])
        problem = f"id {int(bags.ids[first])} is outside of its table, which has rows 0 to {bad_table.rows - 1}"
        raise DataError(f"sample {sample}, {bad_table.name}: {problem}; give ids modulo the rows, or more rows.")
    return table


def sum_bags(rows: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Returns the vector of each bag, a weighted sum of the distinct rows; zero for an empty bag."""
    if not rows.shape[0]:
        return rows.new_zeros(offsets.numel() - 1, rows.shape[1])
    weights = weights.to(rows.dtype)
    return F.embedding_bag(indices, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def most_frequent_ids(ids: Tensor, count: int) -> Tensor:
    """Returns the `count` most frequent ids, sorted, without those that occur once."""
    unique_ids, counts = torch.unique(ids, return_counts=True)
    order = torch.sort(counts, descending=True, stable=True).indices[:count]
    return unique_ids[order[counts[order] > 1]].sort().values


class HotRowCache:
    """The most used rows of all tables on every rank's device, with their optimizer state. They need no all-to-all and
    no copy from host memory: their gradients are all-reduced like those of dense weights, and every rank applies the
    same update. The rank that owns a row writes it back to host memory after each update, so checkpoints, norms and
    other layouts find it there. The cached rows are those that the first samples of the stream use most. That depends
    on the data alone, so a resumed run caches the same rows."""

    def __init__(self, tables: "ShardedTables", rows: Tensor, axis: Axis, device: torch.device):
        """`rows`: sorted row numbers over all tables. `axis`: the ranks whose gradients are summed."""
        self.tables, self.rows, self.axis, self.device = tables, rows, axis, device
        values, state = tables.lookup_rows(rows)
        self.values, self.state = values.to(device), {key: value.to(device) for key, value in state.items()}
        owners, local_rows = tables.locate(rows)
        self.local_rows = local_rows.where(owners == tables.axis.index, -1)
        """The index of each cached row in the storage of this rank; -1 if another rank owns it."""
        self._set_gradients(rows[:0].to(device), self.values[:0])

    def split_cached(self, unique_rows: Tensor, inverse_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits a batch's distinct rows into rows to fetch and cached rows. Returns the rows to fetch; the inverse
        indices into both, in this order; and the indices of the cached rows in this cache."""
        cache_index = torch.searchsorted(self.rows, unique_rows).clamp_(max=self.rows.numel() - 1)
        is_cached = self.rows[cache_index] == unique_rows
        order = torch.cat(((~is_cached).nonzero()[:, 0], is_cached.nonzero()[:, 0]))
        new_position = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
        return unique_rows[~is_cached], new_position[inverse_indices], cache_index[is_cached]

    def reduce_gradients(self, cached_rows: Tensor, gradient: Tensor) -> None:
        """Sums the gradients of cached rows over all ranks."""
        if self.axis.size == 1:
            self._set_gradients(cached_rows.to(self.device), gradient)
            return
        width = gradient.shape[1]
        total = gradient.new_zeros(self.rows.numel(), width + 1)  # the last column counts the ranks that use a row
        counted = torch.cat((gradient, torch.ones_like(gradient[:, :1])), dim=1)
        total.index_copy_(0, cached_rows.to(self.device), counted)
        all_reduce(total, axis=self.axis)
        touched = total[:, width].nonzero()[:, 0]
        self._set_gradients(touched, total[:, :width].index_select(0, touched))

    def _set_gradients(self, touched: Tensor, gradient: Tensor) -> None:
        """Sets the cached rows that the global batch uses and their gradient, with a copy of both in host memory."""
        self.touched, self.gradient = touched, gradient
        self.touched_cpu, self.gradient_cpu = touched.cpu(), gradient.cpu()

    def gradient_of(self, local: TableParamShard) -> tuple[Tensor, Tensor]:
        """Returns the touched cached rows of a shard, relative to its first row, and their gradient."""
        first = self.tables.table_offsets[local.shard.table] + local.shard.rows[0]
        rows = self.rows[self.touched_cpu]
        begin, end = torch.searchsorted(rows, torch.tensor([first, first + local.shard.num_rows])).tolist()
        return rows[begin:end] - first, self.gradient_cpu[begin:end]

    def update(self, lr: float) -> None:
        """Updates all touched rows and writes those that this rank owns back to host memory."""
        tables = self.tables
        tables.update_rows(self.values, self.state, self.touched, self.gradient, lr)
        rows = self.local_rows[self.touched_cpu]
        is_local = rows >= 0
        touched = self.touched[is_local.to(self.device)]
        tables.storage.index_copy_(0, rows[is_local], self.values[touched].cpu())
        for key, value in self.state.items():
            tables.state[key].index_copy_(0, rows[is_local], value[touched].cpu())


class ShardedTables:
    """This rank's shards of all tables, stacked in one tensor; lookup, gradients and update of the rows of a batch.
    Rows are numbered over all tables; a rank stores its own in the order of their numbers."""

    def __init__(self, tables: Sequence[TableSpec], shards: Sequence[TableShard], axis: Axis, dtype: torch.dtype,
                 optimizer: str = "adagrad", betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 device: torch.device | str = "cpu", pin_memory: bool = False):  # fmt: skip
        assert len({table.width for table in tables}) == 1, "the tables of a model have rows of one width"
        self.tables, self.axis, self.dtype, self.device = list(tables), axis, dtype, torch.device(device)
        self.optimizer, self.betas, self.eps = optimizer, betas, eps
        self.table_offsets = list(accumulate((table.rows for table in tables), initial=0))
        by_row = sorted(shards, key=lambda shard: (shard.table, shard.rows))
        rows_of_rank, local_firsts = [0] * axis.size, dict[TableShard, int]()
        for shard in by_row:
            local_firsts[shard] = rows_of_rank[shard.rank]
            rows_of_rank[shard.rank] += shard.num_rows
        make_tensor = partial(torch.tensor, device=device)
        self.shard_starts = make_tensor([self.table_offsets[shard.table] + shard.rows[0] for shard in by_row])
        self.shard_owners = make_tensor([shard.rank for shard in by_row])
        self.local_offsets = self.shard_starts - make_tensor([local_firsts[shard] for shard in by_row])
        """By shard, in the order of row numbers: the number of a row minus its index in the storage of its rank."""
        size = rows_of_rank[axis.index], tables[0].width
        self.storage = torch.zeros(size, dtype=dtype, device=device, pin_memory=pin_memory)
        if optimizer == "adagrad":
            self.state = {"sum": torch.zeros(size[0], dtype=dtype, device=device, pin_memory=pin_memory)}
        else:
            self.state = {key: torch.zeros_like(self.storage) for key in ("exp_avg", "exp_avg_sq")}
        self.step_state = {"step": torch.zeros((), dtype=torch.int64)}
        local_shards = [shard for shard in by_row if shard.rank == axis.index]
        self.local_shards = [self._make_param_shard(shard, local_firsts[shard]) for shard in local_shards]
        ends = [local.first_row + local.shard.num_rows for local in self.local_shards]
        self.local_ends = make_tensor(ends, dtype=torch.int64)
        self._set_gradient(self.local_ends[:0], self.storage[:0])
        self.hot_rows: HotRowCache | None = None

    def _make_param_shard(self, shard: TableShard, first: int) -> TableParamShard:
        table, rows = self.tables[shard.table], slice(first, first + shard.num_rows)
        state = {key: value[rows] for key, value in self.state.items()}
        state |= {} if self.optimizer == "adagrad" else self.step_state
        return TableParamShard(table.name, self.storage[rows], torch.Size((table.rows, table.width)),
                               tables=self, shard=shard, first_row=first, state=state)  # fmt: skip

    def init_weights(self, seed: int) -> None:
        """Initializes the rows; the values depend on the seed alone, not on the placement."""
        for local in self.local_shards:
            key, std = hash_key("init", seed, local.name), self.tables[local.shard.table].init_std
            normal_(local.tensor, key, local.shape, local.offset_and_shape[0], std)

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rank that owns each row, and the row's index in its storage."""
        shards = torch.searchsorted(self.shard_starts, rows, right=True) - 1
        return self.shard_owners[shards], rows - self.local_offsets[shards]

    def _request_rows(self, rows: Tensor) -> tuple[Tensor, list[int], Tensor, list[int]]:
        """Requests distinct rows from the ranks that own them. Returns the last four fields of a `LookupRoute`."""
        owners, local_rows = self.locate(rows)
        positions, requested = owners.argsort(stable=True), owners.bincount(minlength=self.axis.size)
        each = [1] * self.axis.size
        served_counts = self._all_to_all(requested, each, each).tolist()
        requested_counts = requested.tolist()
        served_rows = self._all_to_all(local_rows[positions], requested_counts, served_counts)
        return positions, requested_counts, served_rows, served_counts

    def fetch(self, route: LookupRoute, state: str = "") -> Tensor:
        """Fetches the distinct rows of this rank's samples, or an optimizer state of them."""
        served = (self.state[state] if state else self.storage).index_select(0, route.served_rows)
        received = self._all_to_all(served, route.served_counts, route.requested_counts)
        return torch.empty_like(received).index_copy_(0, route.positions, received)

    def lookup_rows(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Fetches distinct rows by number, and their optimizer state."""
        empty = rows[:0]
        route = LookupRoute(empty, empty, empty, empty, *self._request_rows(rows))
        return self.fetch(route), {key: self.fetch(route, key) for key in self.state}

    def _all_to_all(self, input: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends rows of a tensor, so many to each rank, and returns those that arrive."""
        if self.axis.size == 1:
            return input
        output = input.new_empty(sum(received), *input.shape[1:])
        all_to_all(output, input, received, sent, axis=self.axis)
        return output

    def update_rows(self, rows: Tensor, state: dict[str, Tensor], indices: Tensor, gradient: Tensor, lr: float) -> None:
        if self.optimizer == "adagrad":
            rowwise_adagrad_(rows, state["sum"], indices, gradient, lr, self.eps)
        else:
            moments, step = (state["exp_avg"], state["exp_avg_sq"]), int(self.step_state["step"])
            sparse_adam_(rows, moments, indices, gradient, step, lr, self.betas, self.eps)

    def route(self, bags: Bags, ids: Tensor) -> LookupRoute:
        """Requests the rows that this rank's samples use from their owners; `ids` are stream positions."""
        unique_rows, inverse_indices = torch.unique(self._row_numbers(bags, ids), return_inverse=True)
        cached_rows = unique_rows[:0]
        if self.hot_rows is not None:
            unique_rows, inverse_indices, cached_rows = self.hot_rows.split_cached(unique_rows, inverse_indices)
        return LookupRoute(bags.offsets, bags.weights, inverse_indices, cached_rows, *self._request_rows(unique_rows))

    def _row_numbers(self, bags: Bags, ids: Tensor) -> Tensor:
        """Returns the row number over all tables of each id."""
        return bags.ids + torch.tensor(self.table_offsets, device=self.device)[check_ids(bags, self.tables, ids)]

    def cache_hot_rows(self, bags: Bags, ids: Tensor, count: int, axis: Axis, device: torch.device) -> None:
        """Caches the `count` rows that these samples use most on every device."""
        rows = most_frequent_ids(self._row_numbers(bags, ids), count)
        self.hot_rows = HotRowCache(self, rows, axis, device) if rows.numel() else None

    def push_gradients(self, route: LookupRoute, gradient: Tensor) -> None:
        """Sends the gradients of the distinct rows to their owners, which sum them by row over ranks."""
        sent = gradient.index_select(0, route.positions)
        if self.axis.size == 1:  # each row is requested once, in order
            self._set_gradient(route.served_rows, sent.to(self.dtype))
            return
        received = self._all_to_all(sent, route.requested_counts, route.served_counts)
        touched_rows, inverse_indices = torch.unique(route.served_rows, return_inverse=True)
        gradient = self.storage.new_zeros(touched_rows.numel(), received.shape[1])
        scatter_add_rows_(gradient, inverse_indices, received)
        self._set_gradient(touched_rows, gradient)

    def _set_gradient(self, touched_rows: Tensor, gradient: Tensor) -> None:
        """Sets the rows of this rank's storage that the batch uses, sorted, each once, and their gradient."""
        self.touched_rows, self.gradient = touched_rows, gradient
        self.bounds = [0, *torch.searchsorted(touched_rows, self.local_ends).tolist()]  # of each local shard in them

    def gradient_of(self, local: TableParamShard) -> tuple[Tensor, Tensor]:
        """Returns the touched rows of a local shard, relative to its first row, and their gradient."""
        number = self.local_shards.index(local)
        touched = slice(self.bounds[number], self.bounds[number + 1])
        rows, gradient = self.touched_rows[touched] - local.first_row, self.gradient[touched]
        if self.hot_rows is not None:
            cached, cached_gradient = self.hot_rows.gradient_of(local)
            rows, gradient = torch.cat((rows, cached)), torch.cat((gradient, cached_gradient))
        return rows, gradient

    def divide_gradients(self, divisor: float) -> None:
        for gradient in (self.gradient, *([self.hot_rows.gradient] if self.hot_rows else ())):
            gradient.div_(divisor)

    @torch.no_grad()
    def update(self, lr: float, scale: float) -> None:
        """Updates all touched rows; divides gradients by `scale` first."""
        self.step_state["step"] += 1
        if scale != 1.0:
            self.divide_gradients(scale)
        self.update_rows(self.storage, self.state, self.touched_rows, self.gradient, lr)
        if self.hot_rows is not None:
            self.hot_rows.update(lr)
