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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_to_all
from shardwise.optim.sparse import rowwise_adagrad_, scatter_add_rows_, sparse_adam_
from shardwise.parallel.tables.bags import Bags, check_ids
from shardwise.parallel.tables.hot_rows import HotRowCache
from shardwise.parallel.tables.table_placement import TableShard, TableSpec
from shardwise.random import hash_key, normal_

RowIndices = list[list[Tensor]]  # rows, by rank and its banks


class FusedTable:
    """Pieces of one rank with the same columns, one below the other in one memory."""

    def __init__(self, columns: tuple[int, int], shards: list[TableShard]):
        self.columns, self.shards = columns, shards
        self.width = columns[1] - columns[0]
        self.row_offsets = [0]
        for shard in shards:
            self.row_offsets.append(self.row_offsets[-1] + shard.rows[1] - shard.rows[0])


def fuse_shards(shards: Sequence[TableShard], rank: int) -> list[FusedTable]:
    """Known of every rank on every rank, in one order."""
    local_shards = [shard for shard in shards if shard.rank == rank]
    column_ranges = sorted({shard.columns for shard in local_shards})
    return [
        FusedTable(columns, [shard for shard in local_shards if shard.columns == columns]) for columns in column_ranges
    ]


@dataclass(frozen=True)
class LookupRoute:
    """Who needs which rows of whom, for one batch."""

    ids: Tensor
    """The samples' places in the stream: which batch it is."""
    offsets: Tensor
    weights: Tensor
    inverse_indices: Tensor
    """Of each id, its row among the distinct ones: first those that are fetched, then those that are kept here."""
    num_fetched_rows: int
    """Rows that are fetched."""
    cached_rows: Tensor
    """The others, by their places among the kept ones."""
    requested_rows: RowIndices
    """Which of the distinct rows come from there."""
    served_rows: RowIndices
    """By rank and bank of ours: which rows it asks for."""


@dataclass(frozen=True)
class TableShardView:
    """A piece that this rank holds, as views: its rows, and their optimizer's state."""

    shard: TableShard
    rows: Tensor
    state: dict[str, Tensor]


@dataclass
class RowGradients:
    """What the whole batch asks of a bank's rows: each row once, in order."""

    rows: Tensor
    gradient: Tensor


class ShardedTables:
    """This rank's part of all tables, and the ways to the others'."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        shards: Sequence[TableShard],
        axis: Axis,
        dtype: torch.dtype,
        optimizer: str = "adagrad",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        pin_memory: bool = False,
    ):
        assert len({table.width for table in tables}) == 1, "the tables of a model have rows of one width"
        self.tables, self.shards, self.axis, self.dtype = list(tables), list(shards), axis, dtype
        self.optimizer, self.betas, self.eps = optimizer, betas, eps
        self.width = tables[0].width
        self.table_offsets = [0]
        for table in tables:
            self.table_offsets.append(self.table_offsets[-1] + table.rows)
        self.fused_tables = [fuse_shards(shards, rank) for rank in range(axis.size)]
        self.local_tables = self.fused_tables[axis.index]
        self.group = axis.group
        factory_kwargs: dict[str, Any] = {"dtype": dtype, "pin_memory": pin_memory}
        self.storage = [
            torch.zeros(fused.row_offsets[-1], fused.width, **factory_kwargs) for fused in self.local_tables
        ]
        self.state: list[dict[str, Tensor]] = []
        for rows in self.storage:
            if optimizer == "adagrad":
                self.state.append({"sum": torch.zeros(rows.shape[0], **factory_kwargs)})
            else:
                self.state.append({key: torch.zeros_like(rows) for key in ("exp_avg", "exp_avg_sq")})
        self.step_state = {"step": torch.zeros((), dtype=torch.int64)}
        self.local_shards = list(self._make_shard_views())
        self.row_gradients: list[RowGradients] = []
        self.last_updated_rows = [torch.empty(0, dtype=torch.int64) for _ in self.local_tables]
        """By bank: the rows of the last update."""
        self.hot_rows: HotRowCache | None = None
        self.has_column_shards = any(shard.columns != (0, self.width) for shard in self.shards)

    def _make_shard_views(self) -> Iterator[TableShardView]:
        for fused, rows, state in zip(self.local_tables, self.storage, self.state, strict=True):
            for shard, first, last in zip(fused.shards, fused.row_offsets, fused.row_offsets[1:]):
                views = {key: value[first:last] for key, value in state.items()}
                yield TableShardView(
                    shard, rows[first:last], views if self.optimizer == "adagrad" else {**views, **self.step_state}
                )

    def init_weights(self, seed: int, std: Sequence[float]) -> None:
        """Fills the rows with what the whole tables have there at the start of a run, however they are cut."""
        for view in self.local_shards:
            table = self.tables[view.shard.table]
            shape = torch.Size((table.rows, table.width))
            key = hash_key("init", seed, table.name)
            normal_(view.rows, key, shape, view.shard.start, std[view.shard.table])

    # Lookup

    def route(self, bags: Bags, ids: Tensor, group: dist.ProcessGroup | None = None) -> LookupRoute:
        """Tells each rank which of its rows this rank's samples use; `ids` are the samples' places in the stream."""
        table = check_ids(bags, self.tables, ids)
        unique_rows, inverse_indices = torch.unique(
            bags.ids + torch.tensor(self.table_offsets)[table], return_inverse=True
        )
        cached_rows = unique_rows[:0]
        if self.hot_rows is not None:
            unique_rows, inverse_indices, cached_rows = self.hot_rows.split_cached(unique_rows, inverse_indices)
        requested, served = self._request_rows(unique_rows, group)
        return LookupRoute(
            ids, bags.offsets, bags.weights, inverse_indices, unique_rows.numel(), cached_rows, requested, served
        )

    def _request_rows(
        self, unique_rows: Tensor, group: dist.ProcessGroup | None = None
    ) -> tuple[RowIndices, RowIndices]:
        """Tells who holds them which rows are needed here; hears which of ours are needed elsewhere."""
        requested: RowIndices = []
        rows: list[Tensor] = []
        for rank_tables in self.fused_tables:
            requested.append([])
            for fused in rank_tables:
                positions, local_rows = [], []
                for shard, first in zip(fused.shards, fused.row_offsets):
                    base = self.table_offsets[shard.table]
                    ends = torch.tensor([base + shard.rows[0], base + shard.rows[1]])
                    begin, end = torch.searchsorted(unique_rows, ends).tolist()
                    positions.append(torch.arange(begin, end))
                    local_rows.append(unique_rows[begin:end] - (base + shard.rows[0] - first))
                requested[-1].append(torch.cat(positions))
                rows.append(torch.cat(local_rows))
        return requested, self._send_requests(requested, _cat_or_empty(rows, torch.int64), group)

    def _send_requests(self, requested: RowIndices, rows: Tensor, group: dist.ProcessGroup | None) -> RowIndices:
        counts = torch.tensor(
            [positions.numel() for rank_tables in requested for positions in rank_tables], dtype=torch.int64
        )
        num_local_tables = len(self.local_tables)
        received_counts = self._all_to_all(
            counts, [len(rank_tables) for rank_tables in requested], [num_local_tables] * self.axis.size, group
        )
        sizes = (
            received_counts.view(self.axis.size, num_local_tables).tolist()
            if num_local_tables
            else [[]] * self.axis.size
        )
        sent = [sum(positions.numel() for positions in rank_tables) for rank_tables in requested]
        received = self._all_to_all(rows, sent, [sum(rank_sizes) for rank_sizes in sizes], group)
        parts = iter(received.split([size for rank_sizes in sizes for size in rank_sizes]))
        return [[next(parts) for _ in rank_sizes] for rank_sizes in sizes]

    def fetch(
        self, route: LookupRoute, group: dist.ProcessGroup | None = None, storage: Sequence[Tensor] | None = None
    ) -> Tensor:
        """The distinct rows of this rank's samples, as they are now; or what another `memory` has in their place."""
        parts = [
            rows.index_select(0, row_indices).reshape(-1)
            for rank_rows in route.served_rows
            for rows, row_indices in zip(storage or self.storage, rank_rows, strict=True)
        ]
        received = self._exchange_rows(_cat_or_empty(parts, self.dtype), route, is_backward=False, group=group)
        rows = torch.empty(route.num_fetched_rows, self.width, dtype=self.dtype)
        start = 0
        for fused, positions in self._requests_by_table(route):
            size = positions.numel() * fused.width
            part = received[start : start + size].view(-1, fused.width)
            rows[:, fused.columns[0] : fused.columns[1]].index_copy_(0, positions, part)
            start += size
        return rows

    def lookup_rows(self, rows: Tensor, storage: Sequence[Tensor] | None = None) -> Tensor:
        """Rows by their number through all tables, in order, or what lies in another memory in their place."""
        empty = rows[:0]
        return self.fetch(
            LookupRoute(empty, empty, empty, empty, rows.numel(), empty, *self._request_rows(rows)), storage=storage
        )

    def lookup_states(self, rows: Tensor) -> dict[str, Tensor]:
        """The optimizer's states of some rows."""
        if self.optimizer == "adagrad":
            sums = [
                state["sum"][:, None].expand(-1, fused.width) for fused, state in zip(self.local_tables, self.state)
            ]
            return {"sum": self.lookup_rows(rows, sums)[:, 0].contiguous()}
        return {key: self.lookup_rows(rows, [one[key] for one in self.state]) for key in ("exp_avg", "exp_avg_sq")}

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
            _cat_or_empty(flat, torch.int64), sent, [sum(one) for one in counts_by_rank], None
        )
        values = [
            storage.index_select(0, row_indices[stale_positions]).view(-1)
            for rank_rows, rank_tables in zip(route.served_rows, stale, strict=True)
            for storage, row_indices, stale_positions in zip(self.storage, rank_rows, rank_tables, strict=True)
        ]
        input_split_sizes = [_numel(rank_tables, self.local_tables) for rank_tables in stale]
        output_split_sizes = [
            sum(n * fused.width for n, fused in zip(one, rank_tables))
            for one, rank_tables in zip(counts_by_rank, self.fused_tables)
        ]
        received = self._all_to_all(_cat_or_empty(values, self.dtype), input_split_sizes, output_split_sizes, None)
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
        received = self._exchange_rows(_cat_or_empty(columns, self.dtype), route, is_backward=True)
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

    def _requests_by_table(self, route: LookupRoute) -> Iterator[tuple[FusedTable, Tensor]]:
        for rank_tables, asked in zip(self.fused_tables, route.requested_rows, strict=True):
            yield from zip(rank_tables, asked, strict=True)

    def _exchange_rows(
        self, values: Tensor, route: LookupRoute, is_backward: bool, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Rows from those who hold them to those who asked, or the other way."""
        served_sizes = [_numel(rank_rows, self.local_tables) for rank_rows in route.served_rows]
        requested_sizes = [
            _numel(positions, rank_tables)
            for positions, rank_tables in zip(route.requested_rows, self.fused_tables, strict=True)
        ]
        return self._all_to_all(
            values, *((requested_sizes, served_sizes) if is_backward else (served_sizes, requested_sizes)), group
        )

    def _all_to_all(
        self,
        input: Tensor,
        input_split_sizes: list[int],
        output_split_sizes: list[int],
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        if self.axis.size == 1:
            return input
        output = input.new_empty(sum(output_split_sizes))
        all_to_all(output, input, output_split_sizes, input_split_sizes, group=group or self.group)
        return output

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

    def update_rows(
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        indices: Tensor,
        gradient: Tensor,
        mean_square: Tensor | None,
        lr: float,
    ) -> None:
        """One update of some rows; `square`: for AdaGrad, the mean of each one's whole gradient."""
        if mean_square is not None:
            rowwise_adagrad_(rows, state["sum"], indices, gradient, mean_square, lr, self.eps)
        else:
            moments, step = (state["exp_avg"], state["exp_avg_sq"]), int(self.step_state["step"])
            sparse_adam_(rows, moments, indices, gradient, step, lr, self.betas, self.eps)

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
            self._all_to_all(_cat_or_empty(out, self.dtype), sizes, sizes, None).split([part.numel() for part in out])
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


def _numel(rows: list[Tensor], rank_tables: list[FusedTable]) -> int:
    """How many there are in some rows of each bank."""
    return sum(row_indices.numel() * fused.width for row_indices, fused in zip(rows, rank_tables, strict=True))


def _cat_or_empty(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


class RowPrefetcher:
    """Fetches the rows of the next batch in a thread, on a group of its own, while this one computes."""

    def __init__(self, tables: ShardedTables):
        self.tables = tables
        self.group = dist.new_group(backend="gloo") if tables.axis.size > 1 else None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="shardwise-rows")
        self.pending: deque[Future[tuple[LookupRoute, Tensor]]] = deque()

    def prefetch(self, bags: Bags, ids: Tensor) -> None:
        """To be called after the update of the batch before the last that was asked for: one update is made good."""
        self.pending.append(self.executor.submit(self._fetch, bags, ids))

    def _fetch(self, bags: Bags, ids: Tensor) -> tuple[LookupRoute, Tensor]:
        route = self.tables.route(bags, ids, self.group)
        # The update may be writing to these rows meanwhile; whatever it writes to is sent again.
        return route, self.tables.fetch(route, self.group)

    def pop(self, ids: Tensor) -> tuple[LookupRoute, Tensor]:
        """Route and rows that were asked for longest ago, which must be those of this very batch."""
        route, rows = self.pending.popleft().result()
        assert torch.equal(route.ids, ids), "batches are taken in the order in which they were asked for"
        self.tables.refresh(route, rows)
        return route, rows

    def close(self) -> None:
        self.executor.shutdown()
