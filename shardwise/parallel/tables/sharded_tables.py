"""Embedding tables over the host memory of all ranks: looked up by all-to-all, updated where the rows live.

A step, on each rank, for all rows but those that every device keeps (`shardwise.parallel.tables.hot_rows`):

    route      the distinct rows that its samples use are told to the ranks that hold them: counts, then row numbers
    fetch      those ranks send the rows; bags are then weighted sums over them, with PyTorch's own gradient
    push_gradients  gradients of the distinct rows go the same way back, and those that several ranks sent for one row are
               added up: each row has one gradient, that of the whole batch
    update     each touched row once (`shardwise.optim.sparse`)

Nothing is divided by the number of ranks: the loss is divided by the samples of the whole batch already.

The next batch's route can be made, and its rows fetched, while this one computes (`RowPrefetcher`). Rows that this one's update
then changed are sent again before they are used (`refresh`): the result is the same bit by bit.

Rows and routes stay in host memory; where there is a GPU, the memory is pinned and a batch's rows are copied there. A
world of one sends nothing. By hand, since PyTorch has nothing of the kind, and TorchRec keeps tables and optimizers in
kernels of its own.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.optim.sparse import scatter_add_rows_
from shardwise.parallel.tables.bags import Bags, check_ids
from shardwise.parallel.tables.hot_rows import HotRowCache
from shardwise.parallel.tables.table_placement import TableShard
from shardwise.parallel.tables.table_storage import LookupRoute, TableStorage, cat_or_empty, numel_of


@dataclass
class RowGradients:
    """What the whole batch asks of a bank's rows: each row once, in order."""

    rows: Tensor
    gradient: Tensor


class ShardedTables(TableStorage):
    """Lookup, gradients and update of the tables of one batch."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.row_gradients: list[RowGradients] = []
        self.last_updated_rows = [torch.empty(0, dtype=torch.int64) for _ in self.local_tables]
        """By bank: the rows of the last update."""
        self.hot_rows: HotRowCache | None = None

    # Lookup

    def route(self, bags: Bags, ids: Tensor, axis: Axis | None = None) -> LookupRoute:
        """Tells each rank which of its rows this rank's samples use; `ids` are the samples' places in the stream."""
        table = check_ids(bags, self.tables, ids)
        unique_rows, inverse_indices = torch.unique(
            bags.ids + torch.tensor(self.table_offsets)[table], return_inverse=True
        )
        cached_rows = unique_rows[:0]
        if self.hot_rows is not None:
            unique_rows, inverse_indices, cached_rows = self.hot_rows.split_cached(unique_rows, inverse_indices)
        requested, served = self._request_rows(unique_rows, axis)
        return LookupRoute(
            ids, bags.offsets, bags.weights, inverse_indices, unique_rows.numel(), cached_rows, requested, served
        )

    def refresh(self, route: LookupRoute, rows: Tensor) -> None:
        """Brings rows that were fetched before or during the last update up to date: those that it changed come again,
        with their places among the rows that were asked for."""
        stale = [
            [
                torch.isin(row_indices, changed).nonzero()[:, 0]
                for row_indices, changed in zip(rank_rows, self.last_updated_rows, strict=True)
            ]
            for rank_rows in route.served_rows
        ]
        counts = torch.tensor(
            [stale_positions.numel() for rank_tables in stale for stale_positions in rank_tables], dtype=torch.int64
        )
        lengths = [len(rank_tables) for rank_tables in self.fused_tables]
        received_counts = iter(
            self._all_to_all(counts, [len(self.local_tables)] * self.axis.size, lengths, None).tolist()
        )
        counts_by_rank = [[next(received_counts) for _ in rank_tables] for rank_tables in self.fused_tables]
        flat = [stale_positions for rank_tables in stale for stale_positions in rank_tables]
        sent = [sum(stale_positions.numel() for stale_positions in rank_tables) for rank_tables in stale]
        stale_indices = self._all_to_all(
            cat_or_empty(flat, torch.int64), sent, [sum(one) for one in counts_by_rank], None
        )
        values = [
            storage.index_select(0, row_indices[stale_positions]).view(-1)
            for rank_rows, rank_tables in zip(route.served_rows, stale, strict=True)
            for storage, row_indices, stale_positions in zip(self.storage, rank_rows, rank_tables, strict=True)
        ]
        input_split_sizes = [numel_of(rank_tables, self.local_tables) for rank_tables in stale]
        output_split_sizes = [
            sum(n * fused.width for n, fused in zip(one, rank_tables))
            for one, rank_tables in zip(counts_by_rank, self.fused_tables)
        ]
        received = self._all_to_all(cat_or_empty(values, self.dtype), input_split_sizes, output_split_sizes, None)
        start = first = 0
        for (fused, positions), count in zip(
            self._requests_by_table(route), [n for one in counts_by_rank for n in one], strict=True
        ):
            part = received[start : start + count * fused.width].view(-1, fused.width)
            columns = rows[:, fused.columns[0] : fused.columns[1]]
            columns.index_copy_(0, positions[stale_indices[first : first + count]], part)
            start, first = start + count * fused.width, first + count

    def push_gradients(self, route: LookupRoute, gradient: Tensor) -> None:
        """Takes the gradients of the distinct rows to where these live, and adds up those of one row."""
        columns = [
            gradient[:, fused.columns[0] : fused.columns[1]].index_select(0, positions).view(-1)
            for fused, positions in self._requests_by_table(route)
        ]
        received = self._exchange_rows(cat_or_empty(columns, self.dtype), route, is_backward=True)
        parts: list[list[Tensor]] = [[] for _ in self.local_tables]
        start = 0
        for rank_rows in route.served_rows:
            for index, (fused, rows) in enumerate(zip(self.local_tables, rank_rows, strict=True)):
                size = rows.numel() * fused.width
                parts[index].append(received[start : start + size].view(-1, fused.width))
                start += size
        self.row_gradients = []
        for index, gradients in enumerate(parts):
            rows, inverse_indices = torch.unique(
                torch.cat([rank_rows[index] for rank_rows in route.served_rows]), return_inverse=True
            )
            total = torch.zeros(rows.numel(), self.local_tables[index].width, dtype=self.dtype)
            scatter_add_rows_(total, inverse_indices, torch.cat(gradients))
            self.row_gradients.append(RowGradients(rows, total))

    # Update

    def gradient_of(self, shard: TableShard) -> tuple[Tensor, Tensor]:
        """Of a piece of this rank: the rows that were touched, counted from its first, and their gradient."""
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
        for gradient in [
            *(one.gradient for one in self.row_gradients),
            *([self.hot_rows.gradient] if self.hot_rows else []),
        ]:
            gradient.div_(divisor)

    def optimizer_states(self) -> dict[Tensor, dict[str, Tensor]]:
        return {view.rows: view.state for view in self.local_shards}

    @torch.no_grad()
    def update(self, lr: float, scale: float) -> None:
        """Takes the step of all touched rows; gradients are divided by `scale` first."""
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
        """Of each touched row's whole gradient. Ranks with other columns of a row touch it too, so each sends its sum
        of squares to the others; all add them up in the order of the columns and come to the same number."""
        sums = [touched.gradient.square().sum(1) for touched in self.row_gradients]
        if self.has_column_shards and self.axis.size > 1:
            sums = self._sum_over_column_shards(sums)
        return [one / self.width for one in sums]

    def _sum_over_column_shards(self, sums: list[Tensor]) -> list[Tensor]:
        column_sums: dict[int, Tensor] = {}  # by table: a rank has one piece of it
        spans: dict[int, tuple[int, int, int]] = {}
        for index, fused in enumerate(self.local_tables):
            for shard, first, last in zip(fused.shards, fused.row_offsets, fused.row_offsets[1:]):
                if shard.columns != (0, self.width):
                    ends = torch.searchsorted(self.row_gradients[index].rows, torch.tensor([first, last])).tolist()
                    spans[shard.table] = (index, *ends)
                    column_sums[shard.table] = sums[index][ends[0] : ends[1]]
        shards_by_rank: list[list[TableShard]] = [
            [one for one in self.shards if one.rank == rank and one.table in column_sums]
            for rank in range(self.axis.size)
        ]
        out = [column_sums[one.table] for rank_shards in shards_by_rank for one in rank_shards]
        sizes = [sum(column_sums[one.table].numel() for one in rank_shards) for rank_shards in shards_by_rank]
        received = iter(
            self._all_to_all(cat_or_empty(out, self.dtype), sizes, sizes, None).split([part.numel() for part in out])
        )
        sums_by_table: dict[int, list[tuple[int, Tensor]]] = {}
        for rank_shards in shards_by_rank:
            for one in rank_shards:
                sums_by_table.setdefault(one.table, []).append((one.columns[0], next(received)))
        for table, column_parts in sums_by_table.items():
            index, begin, end = spans[table]
            total = torch.zeros(end - begin, dtype=self.dtype)
            for _, part in sorted(column_parts, key=lambda item: item[0]):
                total += part
            sums[index][begin:end] = total
        return sums


class RowPrefetcher:
    """Fetches the rows of the next batch in a thread, on a group of its own, while this one computes."""

    def __init__(self, tables: ShardedTables):
        self.tables = tables
        # A group of its own, whose waits are not timed: they overlap with computation.
        self.axis = tables.axis
        if self.axis.size > 1:
            self.axis = replace(self.axis, group=dist.new_group(backend="gloo"), timer=None)
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="shardwise-rows")
        self.pending: deque[Future[tuple[LookupRoute, Tensor]]] = deque()

    def prefetch(self, bags: Bags, ids: Tensor) -> None:
        """To be called after the update of the batch before the last that was asked for: one update is made good."""
        self.pending.append(self.executor.submit(self._fetch, bags, ids))

    def _fetch(self, bags: Bags, ids: Tensor) -> tuple[LookupRoute, Tensor]:
        route = self.tables.route(bags, ids, self.axis)
        # The update may be writing to these rows meanwhile; whatever it writes to is sent again.
        return route, self.tables.fetch(route, self.axis)

    def pop(self, ids: Tensor) -> tuple[LookupRoute, Tensor]:
        """Route and rows that were asked for longest ago, which must be those of this very batch."""
        route, rows = self.pending.popleft().result()
        assert torch.equal(route.ids, ids), "batches are taken in the order in which they were asked for"
        self.tables.refresh(route, rows)
        return route, rows

    def close(self) -> None:
        self.executor.shutdown()
