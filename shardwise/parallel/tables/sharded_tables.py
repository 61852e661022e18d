"""Embedding tables over the host memory of all ranks: looked up by all-to-all, updated by the rank that owns a row.

A step of each rank, for all rows that are not in the hot-row cache (`HotRowCache`):

    route           requests the distinct rows its samples use from their owners: counts, then row numbers
    fetch           receives the rows; bags are weighted sums of them, with autograd's gradient
    push_gradients  sends the gradients of the distinct rows to the owners, which sum them over ranks
    update          updates each touched row once (`shardwise.optim.sparse`)

Gradients are sums over ranks, not means: the loss is already divided by the samples of the global batch.

`HotRowCache` keeps the most used rows on every rank's device, with their optimizer state. They need no all-to-all and
no copy from host memory: their gradients are all-reduced like those of dense weights, and every rank applies the same
update. The rank that owns a row writes it back to host memory after each update, so checkpoints, norms and other
layouts find it there. The cached rows are those that the first samples of the stream use most. That depends on the data
alone, so a resumed run caches the same rows.

`RowPrefetcher` routes and fetches the next batch while the current one computes. Rows that the current update changes
are sent again before use (`refresh`), so the result is bitwise the same.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.errors import DataError
from shardwise.models.family import TableSpec
from shardwise.optim.sparse import scatter_add_rows_
from shardwise.parallel.tables.table_storage import LookupRoute, TableParamShard, TableStorage


def most_frequent_ids(ids: Tensor, count: int) -> Tensor:
    """Returns the `count` most frequent ids, sorted, without those that occur once."""
    unique_ids, counts = torch.unique(ids, return_counts=True)
    order = torch.sort(counts, descending=True, stable=True).indices[:count]
    return unique_ids[order[counts[order] > 1]].sort().values


class HotRowCache:
    """The cached rows of all tables on this rank's device."""

    def __init__(self, tables: TableStorage, rows: Tensor, axis: Axis, device: torch.device):
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
        return rows_between(self.rows[self.touched_cpu], self.gradient_cpu, first, local.shard.num_rows)

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


def rows_between(rows: Tensor, gradient: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns which of some sorted rows are among the `count` from `first` on, relative to it, and their gradient."""
    begin, end = torch.searchsorted(rows, torch.tensor([first, first + count])).tolist()
    return rows[begin:end] - first, gradient[begin:end]


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
    counts = bags.offsets.diff()
    bag_indices = torch.arange(counts.numel()).repeat_interleave(counts)
    table = bag_indices % len(tables)
    rows = torch.tensor([spec.rows for spec in tables])[table]
    out_of_range = ((bags.ids < 0) | (bags.ids >= rows)).nonzero()
    if out_of_range.numel():
        first = int(out_of_range[0])
        bad_table = tables[int(table[first])]
        sample = int(sample_ids[int(bag_indices[first]) // len(tables)])
        raise DataError(
            f"sample {sample}, {bad_table.name}: id {int(bags.ids[first])} is outside of its table, which has rows "
            f"0 to {bad_table.rows - 1}; give ids modulo the rows, or a table with more."
        )
    return table


def sum_bags(rows: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Returns the vector of each bag, a weighted sum of the distinct rows; zero for an empty bag."""
    if not rows.shape[0]:
        return rows.new_zeros(offsets.numel() - 1, rows.shape[1])
    weights = weights.to(rows.dtype)
    return F.embedding_bag(indices, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


class ShardedTables(TableStorage):
    """Lookup, gradients and update of the tables of one batch."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.touched_rows, self.gradient = torch.empty(0, dtype=torch.int64), self.storage[:0]
        """The rows of this rank's storage that the batch uses, sorted, each once, and their gradient."""
        self.last_updated_rows = self.touched_rows
        self.hot_rows: HotRowCache | None = None

    def route(self, bags: Bags, ids: Tensor, axis: Axis | None = None) -> LookupRoute:
        """Requests the rows that this rank's samples use from their owners; `ids` are stream positions."""
        unique_rows, inverse_indices = torch.unique(self._row_numbers(bags, ids), return_inverse=True)
        cached_rows = unique_rows[:0]
        if self.hot_rows is not None:
            unique_rows, inverse_indices, cached_rows = self.hot_rows.split_cached(unique_rows, inverse_indices)
        requests = self._request_rows(unique_rows, axis)
        return LookupRoute(ids, bags.offsets, bags.weights, inverse_indices, cached_rows, *requests)

    def _row_numbers(self, bags: Bags, ids: Tensor) -> Tensor:
        """Returns the row number over all tables of each id."""
        return bags.ids + torch.tensor(self.table_offsets)[check_ids(bags, self.tables, ids)]

    def cache_hot_rows(self, bags: Bags, ids: Tensor, count: int, axis: Axis, device: torch.device) -> None:
        """Caches the `count` rows that these samples use most on every device."""
        rows = most_frequent_ids(self._row_numbers(bags, ids), count)
        self.hot_rows = HotRowCache(self, rows, axis, device) if rows.numel() else None

    def refresh(self, route: LookupRoute, rows: Tensor) -> None:
        """Refreshes rows that were prefetched before or during the last update: owners say which of the requested rows
        it changed, and send those again."""
        is_updated = torch.isin(route.served_rows, self.last_updated_rows)
        is_stale = self._all_to_all(is_updated.to(torch.uint8), route.served_counts, route.requested_counts).bool()
        sent = [int(part.sum()) for part in is_updated.split(route.served_counts)]
        received = [int(part.sum()) for part in is_stale.split(route.requested_counts)]
        values = self._all_to_all(self.storage[route.served_rows[is_updated]], sent, received)
        rows.index_copy_(0, route.positions[is_stale], values)

    def push_gradients(self, route: LookupRoute, gradient: Tensor) -> None:
        """Sends the gradients of the distinct rows to their owners, which sum them by row over ranks."""
        sent = gradient.index_select(0, route.positions)
        received = self._all_to_all(sent, route.requested_counts, route.served_counts)
        self.touched_rows, inverse_indices = torch.unique(route.served_rows, return_inverse=True)
        self.gradient = torch.zeros(self.touched_rows.numel(), received.shape[1], dtype=self.dtype)
        scatter_add_rows_(self.gradient, inverse_indices, received)

    def gradient_of(self, local: TableParamShard) -> tuple[Tensor, Tensor]:
        """Returns the touched rows of a local shard, relative to its first row, and their gradient."""
        rows, gradient = rows_between(self.touched_rows, self.gradient, local.first_row, local.shard.num_rows)
        if self.hot_rows is not None:
            cached, cached_gradient = self.hot_rows.gradient_of(local)
            rows, gradient = torch.cat((rows, cached)), torch.cat((gradient, cached_gradient))
        return rows, gradient

    def divide_gradients(self, divisor: float) -> None:
        """Divides all gradients."""
        for gradient in (self.gradient, *([self.hot_rows.gradient] if self.hot_rows else ())):
            gradient.div_(divisor)

    def optimizer_states(self) -> dict[Tensor, dict[str, Tensor]]:
        return {local.tensor: local.state for local in self.local_shards}

    @torch.no_grad()
    def update(self, lr: float, scale: float) -> None:
        """Updates all touched rows; divides gradients by `scale` first."""
        self.step_state["step"] += 1
        if scale != 1.0:
            self.divide_gradients(scale)
        self.update_rows(self.storage, self.state, self.touched_rows, self.gradient, lr)
        if self.hot_rows is not None:
            self.hot_rows.update(lr)
        self.last_updated_rows = self.touched_rows


class RowPrefetcher:
    """Fetches the rows of the next batch in a thread, on its own process group, while the current one computes."""

    def __init__(self, tables: ShardedTables):
        self.tables = tables
        # A group of its own, whose waits are not timed: they overlap with computation.
        self.axis = tables.axis
        if self.axis.size > 1:
            self.axis = replace(self.axis, group=dist.new_group(backend="gloo"), timer=None)
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="shardwise-rows")
        self.pending: deque[Future[tuple[LookupRoute, Tensor]]] = deque()

    def prefetch(self, bags: Bags, ids: Tensor) -> None:
        """Starts to fetch a batch. At most one update may run between this and its `pop`, which refreshes the rows."""
        self.pending.append(self.executor.submit(self._fetch, bags, ids))

    def _fetch(self, bags: Bags, ids: Tensor) -> tuple[LookupRoute, Tensor]:
        route = self.tables.route(bags, ids, self.axis)
        # The update may write to these rows meanwhile; `refresh` sends those again.
        return route, self.tables.fetch(route, self.axis)

    def pop(self, ids: Tensor) -> tuple[LookupRoute, Tensor]:
        """Returns route and up-to-date rows of the oldest prefetch, which must be of this batch."""
        route, rows = self.pending.popleft().result()
        assert torch.equal(route.ids, ids), "batches must be used in the order in which they were prefetched"
        self.tables.refresh(route, rows)
        return route, rows
