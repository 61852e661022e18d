"""Embedding tables over the host memory of all ranks: looked up by all-to-all, updated by the rank that owns a row.

A step of each rank, for all rows that are not in the hot-row cache (`shardwise.parallel.tables.hot_rows`):

    route           requests the distinct rows its samples use from their owners: counts, then row numbers
    fetch           receives the rows; bags are weighted sums of them, with autograd's gradient
    push_gradients  sends the gradients of the distinct rows to the owners, which sum them over ranks
    update          updates each touched row once (`shardwise.optim.sparse`)

Gradients are sums over ranks, not means: the loss is already divided by the samples of the global batch.

`RowPrefetcher` routes and fetches the next batch while the current one computes. Rows that the current update changes
are sent again before use (`refresh`), so the result is bitwise the same.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.optim.sparse import scatter_add_rows_
from shardwise.parallel.tables.bags import Bags, check_ids
from shardwise.parallel.tables.hot_rows import HotRowCache
from shardwise.parallel.tables.table_placement import TableShard
from shardwise.parallel.tables.table_storage import LookupRoute, RowIndices, TableStorage, cat_or_empty, numel_of


@dataclass
class RowGradients:
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
        table = check_ids(bags, self.tables, ids)
        row_numbers = bags.ids + torch.tensor(self.table_offsets)[table]
        unique_rows, inverse_indices = torch.unique(row_numbers, return_inverse=True)
        cached_rows = unique_rows[:0]
        if self.hot_rows is not None:
            unique_rows, inverse_indices, cached_rows = self.hot_rows.split_cached(unique_rows, inverse_indices)
        requests, count = self._request_rows(unique_rows, axis), unique_rows.numel()
        return LookupRoute(ids, bags.offsets, bags.weights, inverse_indices, count, cached_rows, *requests)

    def refresh(self, route: LookupRoute, rows: Tensor) -> None:
        """Refreshes rows that were prefetched before or during the last update: owners resend the rows that it changed,
        with their indices among the requested rows."""
        stale: RowIndices = []
        for rank_rows in route.served_rows:
            pairs = zip(rank_rows, self.last_updated_rows, strict=True)
            stale.append([torch.isin(row_indices, changed).nonzero()[:, 0] for row_indices, changed in pairs])
        resent = self._exchange_indices(stale, [len(rank_tables) for rank_tables in self.fused_tables])
        values = [
            storage.index_select(0, row_indices[stale_positions]).view(-1)
            for rank_rows, rank_tables in zip(route.served_rows, stale, strict=True)
            for storage, row_indices, stale_positions in zip(self.storage, rank_rows, rank_tables, strict=True)
        ]
        input_split_sizes = [numel_of(rank_tables, self.local_tables) for rank_tables in stale]
        output_split_sizes = list(map(numel_of, resent, self.fused_tables))
        received = self._all_to_all(cat_or_empty(values, self.dtype), input_split_sizes, output_split_sizes)
        requests = zip(self._requests_by_table(route), chain.from_iterable(resent), strict=True)
        self._store_rows(rows, received, [(fused, positions[indices]) for (fused, positions), indices in requests])

    def push_gradients(self, route: LookupRoute, gradient: Tensor) -> None:
        """Sends the gradients of the distinct rows to their owners, which sum them by row over ranks."""
        columns = [
            gradient[:, slice(*fused.columns)].index_select(0, positions).view(-1)
            for fused, positions in self._requests_by_table(route)
        ]
        received = self._exchange_rows(cat_or_empty(columns, self.dtype), route, is_backward=True)
        served = [pair for rank_rows in route.served_rows for pair in zip(self.local_tables, rank_rows, strict=True)]
        parts = received.split([rows.numel() * fused.width for fused, rows in served])
        self.row_gradients = []
        for index, fused in enumerate(self.local_tables):
            row_indices = torch.cat([rank_rows[index] for rank_rows in route.served_rows])
            rows, inverse_indices = torch.unique(row_indices, return_inverse=True)
            total = torch.zeros(rows.numel(), fused.width, dtype=self.dtype)
            gradients = [part.view(-1, fused.width) for part in parts[index :: len(self.local_tables)]]
            scatter_add_rows_(total, inverse_indices, torch.cat(gradients))
            self.row_gradients.append(RowGradients(rows, total))

    # Update

    def gradient_of(self, shard: TableShard) -> tuple[Tensor, Tensor]:
        """Returns the touched rows of a local shard, relative to its first row, and their gradient."""
        for fused, touched in zip(self.local_tables, self.row_gradients, strict=True):
            if shard in fused.shards:
                first = fused.row_offsets[fused.shards.index(shard)]
                last = first + shard.rows[1] - shard.rows[0]
                begin, end = torch.searchsorted(touched.rows, torch.tensor([first, last])).tolist()
                rows, gradient = touched.rows[begin:end] - first, touched.gradient[begin:end]
                if self.hot_rows is not None:
                    cached, cached_gradient = self.hot_rows.gradient_of(shard)
                    rows, gradient = torch.cat((rows, cached)), torch.cat((gradient, cached_gradient))
                return rows, gradient
        raise KeyError(shard)

    def divide_gradients(self, divisor: float) -> None:
        """Divides all gradients."""
        hot_gradients = [self.hot_rows.gradient] if self.hot_rows else []
        for gradient in [*(touched.gradient for touched in self.row_gradients), *hot_gradients]:
            gradient.div_(divisor)

    def optimizer_states(self) -> dict[Tensor, dict[str, Tensor]]:
        return {view.rows: view.state for view in self.local_shards}

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
        sizes = [0] * self.axis.size
        for one, part in zip(shared, out, strict=True):
            sizes[one.rank] += part.numel()
        received = self._all_to_all(cat_or_empty(out, self.dtype), sizes, sizes)
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
