"""A cache of the most used table rows on every rank's device, with their optimizer state.

Cached rows need no all-to-all and no copy from host memory: their gradients are all-reduced like those of dense
weights, and every rank applies the same update. The rank that owns a row writes it back to host memory after each
update, so checkpoints, norms and other layouts find it there.

The cached rows are those that the first samples of the stream use most. That depends on the data alone, so a resumed
run caches the same rows.
"""

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.parallel.tables.table_placement import TableShard
from shardwise.parallel.tables.table_storage import FusedTable, TableStorage


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
