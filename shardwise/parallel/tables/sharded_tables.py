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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.errors import DataError
from shardwise.optim.sparse import scatter_add_rows_
from shardwise.parallel.tables import table_storage
from shardwise.parallel.tables.table_storage import FusedTable, LookupRoute, TableShard, TableStorage


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
        self.values = tables.lookup_rows(rows).to(device)
        self.state = {key: value.to(device) for key, value in tables.lookup_states(rows).items()}
        self.local_rows = [self._find_local_rows(fused) for fused in tables.local_tables]
        """By fused table of this rank: the index of each cached row in it; -1 if the row is not in this table."""
        self._set_gradients(rows[:0].to(device), self.values[:0])

    def _find_local_rows(self, fused: FusedTable) -> Tensor:
        local_rows = torch.full_like(self.rows, -1)
        for shard, first in zip(fused.shards, fused.row_offsets):
            begin, end, start = self.tables.row_range(shard, self.rows)
            local_rows[begin:end] = self.rows[begin:end] - start + first
        return local_rows

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

    def gradient_of(self, shard: TableShard) -> tuple[Tensor, Tensor]:
        """Returns the touched cached rows of a shard, relative to its first row, and their gradient."""
        rows = self.rows[self.touched_cpu]
        begin, end, first = self.tables.row_range(shard, rows)
        return rows[begin:end] - first, self.gradient_cpu[begin:end, slice(*shard.columns)]

    def update(self, lr: float) -> None:
        """Updates all touched rows and writes those that this rank owns back to host memory."""
        tables = self.tables
        mean_square = self.gradient.square().mean(1) if tables.optimizer == "adagrad" else None
        tables.update_rows(self.values, self.state, self.touched, self.gradient, mean_square, lr)
        columns_of = zip(tables.local_tables, tables.storage, tables.state, self.local_rows, strict=True)
        for fused, storage, state, local_rows in columns_of:
            rows = local_rows[self.touched_cpu]
            is_local = rows >= 0
            local_touched = self.touched[is_local.to(self.device)]
            columns = slice(*fused.columns)
            storage.index_copy_(0, rows[is_local], self.values[local_touched][:, columns].cpu())
            for key, value in self.state.items():
                new = value[local_touched] if value.dim() == 1 else value[local_touched][:, columns]
                state[key].index_copy_(0, rows[is_local], new.cpu())


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


def check_ids(bags: Bags, tables: Sequence[table_storage.TableSpec], sample_ids: Tensor) -> Tensor:
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


class RowGradients(NamedTuple):
    """The gradient of the touched rows of a fused table: sorted, each row once."""

    rows: Tensor
    gradient: Tensor


class ShardedTables(TableStorage):
    """Lookup, gradients and update of the tables of one batch."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.row_gradients: list[RowGradients] = []
        self.last_updated_rows = [torch.empty(0, dtype=torch.int64) for _ in self.local_tables]
        """By fused table, the rows of the last update."""
        self.hot_rows: HotRowCache | None = None

    # Lookup

    def route(self, bags: Bags, ids: Tensor, axis: Axis | None = None) -> LookupRoute:
        """Requests the rows that this rank's samples use from their owners; `ids` are stream positions."""
        unique_rows, inverse_indices = torch.unique(self._row_numbers(bags, ids), return_inverse=True)
        cached_rows = unique_rows[:0]
        if self.hot_rows is not None:
            unique_rows, inverse_indices, cached_rows = self.hot_rows.split_cached(unique_rows, inverse_indices)
        requests, count = self._request_rows(unique_rows, axis), unique_rows.numel()
        return LookupRoute(ids, bags.offsets, bags.weights, inverse_indices, count, cached_rows, *requests)

    def _row_numbers(self, bags: Bags, ids: Tensor) -> Tensor:
        """Returns the row number over all tables of each id."""
        return bags.ids + torch.tensor(self.table_offsets)[check_ids(bags, self.tables, ids)]

    def cache_hot_rows(self, bags: Bags, ids: Tensor, count: int, axis: Axis, device: torch.device) -> None:
        """Caches the `count` rows that these samples use most on every device."""
        rows = most_frequent_ids(self._row_numbers(bags, ids), count)
        self.hot_rows = HotRowCache(self, rows, axis, device) if rows.numel() else None

    def refresh(self, route: LookupRoute, rows: Tensor) -> None:
        """Refreshes rows that were prefetched before or during the last update: owners resend the rows that it changed,
        with their indices among the requested rows."""
        changed = self.last_updated_rows * self.axis.size
        pairs = zip(route.served_rows, changed, strict=True)
        stale = [torch.isin(row_indices, updated).nonzero()[:, 0] for row_indices, updated in pairs]
        resent = self._exchange_indices(stale, self.requesters, self.owners)
        served = zip(self.storage * self.axis.size, route.served_rows, stale, strict=True)
        values = [table.index_select(0, row_indices[indices]).view(-1) for table, row_indices, indices in served]
        received = self._exchange_rows(values, stale, resent)
        requests = zip(route.requested_rows, resent, strict=True)
        self._store_rows(rows, received, [positions[indices] for positions, indices in requests])

    def push_gradients(self, route: LookupRoute, gradient: Tensor) -> None:
        """Sends the gradients of the distinct rows to their owners, which sum them by row over ranks."""
        columns = [
            gradient[:, slice(*fused.columns)].index_select(0, positions).view(-1)
            for fused, positions in zip(self.fused_tables, route.requested_rows, strict=True)
        ]
        received = self._exchange_rows(columns, route.served_rows, route.requested_rows, is_backward=True)
        parts = received.split(table_storage.numels(route.served_rows, self.local_tables * self.axis.size))
        self.row_gradients = []
        for index, fused in enumerate(self.local_tables):
            row_indices = torch.cat(route.served_rows[index :: len(self.local_tables)])
            rows, inverse_indices = torch.unique(row_indices, return_inverse=True)
            total = torch.zeros(rows.numel(), fused.width, dtype=self.dtype)
            gradients = [part.view(-1, fused.width) for part in parts[index :: len(self.local_tables)]]
            scatter_add_rows_(total, inverse_indices, torch.cat(gradients))
            self.row_gradients.append(RowGradients(rows, total))

    # Update

    def gradient_of(self, shard: TableShard) -> tuple[Tensor, Tensor]:
        """Returns the touched rows of a local shard, relative to its first row, and their gradient."""
        tables = zip(self.local_tables, self.row_gradients, strict=True)
        fused, touched = next(pair for pair in tables if shard in pair[0].shards)
        first = fused.row_offsets[fused.shards.index(shard)]
        last = first + shard.rows[1] - shard.rows[0]
        begin, end = torch.searchsorted(touched.rows, torch.tensor([first, last])).tolist()
        rows, gradient = touched.rows[begin:end] - first, touched.gradient[begin:end]
        if self.hot_rows is not None:
            cached, cached_gradient = self.hot_rows.gradient_of(shard)
            rows, gradient = torch.cat((rows, cached)), torch.cat((gradient, cached_gradient))
        return rows, gradient

    def divide_gradients(self, divisor: float) -> None:
        """Divides all gradients."""
        hot_gradients = [self.hot_rows.gradient] if self.hot_rows else []
        for gradient in [*(touched.gradient for touched in self.row_gradients), *hot_gradients]:
            gradient.div_(divisor)

    def optimizer_states(self) -> dict[Tensor, dict[str, Tensor]]:
        return {local.tensor: local.state for local in self.local_shards}

    @torch.no_grad()
    def update(self, lr: float, scale: float) -> None:
        """Updates all touched rows; divides gradients by `scale` first."""
        self.step_state["step"] += 1
        if scale != 1.0:
            self.divide_gradients(scale)
        squares = self._mean_squares() if self.optimizer == "adagrad" else [None] * len(self.local_tables)
        for rows, state, touched, square in zip(self.storage, self.state, self.row_gradients, squares, strict=True):
            self.update_rows(rows, state, touched.rows, touched.gradient, square, lr)
        if self.hot_rows is not None:
            self.hot_rows.update(lr)
        self.last_updated_rows = [touched.rows for touched in self.row_gradients]
        self.row_gradients = []

    def _mean_squares(self) -> list[Tensor | None]:
        """Returns the mean square of each touched row's full gradient. Ranks that share a column-wise row exchange
        their sums of squares and add them in column order, so all get the same bits."""
        sums = [touched.gradient.square().sum(1) for touched in self.row_gradients]
        if self.has_column_shards and self.axis.size > 1:
            sums = self._sum_over_column_shards(sums)
        return [total / self.width for total in sums]

    def _sum_over_column_shards(self, sums: list[Tensor]) -> list[Tensor]:
        column_sums: dict[int, Tensor] = {}  # by table: a rank has one shard of it
        spans: dict[int, tuple[int, int, int]] = {}
        for index, fused in enumerate(self.local_tables):
            for shard, first, last in zip(fused.shards, fused.row_offsets, fused.row_offsets[1:]):
                if shard.columns != (0, self.width):
                    ends = torch.searchsorted(self.row_gradients[index].rows, torch.tensor([first, last])).tolist()
                    spans[shard.table] = (index, *ends)
                    column_sums[shard.table] = sums[index][ends[0] : ends[1]]
        shared = sorted((one for one in self.shards if one.table in column_sums), key=lambda one: one.rank)
        out = [column_sums[one.table] for one in shared]
        sizes = self._sum_by_rank([one.rank for one in shared], [part.numel() for part in out])
        received = self._all_to_all(table_storage.cat_or_empty(out, self.dtype), sizes, sizes)
        sums_by_table: dict[int, list[tuple[int, Tensor]]] = {}
        for one, part in zip(shared, received.split([part.numel() for part in out]), strict=True):
            sums_by_table.setdefault(one.table, []).append((one.columns[0], part))
        for table, column_parts in sums_by_table.items():
            index, begin, end = spans[table]
            total = torch.zeros(end - begin, dtype=self.dtype)
            for _, part in sorted(column_parts, key=lambda item: item[0]):
                total += part
            sums[index][begin:end] = total
        return sums


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
