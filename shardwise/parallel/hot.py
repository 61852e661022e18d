"""Rows that are used most, kept on every rank's device with their optimizer's state.

They need no asking and no copy from host memory: their gradients are summed over all ranks like those of dense weights,
and every rank takes the same update. The rank that a row belongs to writes it back to host memory after each, so that
checkpoints, norms and other layouts find every row where it lives.

Which rows: those that the first samples of the stream use most. That depends on the data alone, so a run that goes on
keeps the rows that it kept before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce
from shardwise.parallel.mesh import Axis
from shardwise.parallel.placement import Shard

if TYPE_CHECKING:
    from shardwise.parallel.embedding import Bank, Tables


def most_used(ids: Tensor, count: int) -> Tensor:
    """The `count` numbers that come most often, but none that comes once; in order."""
    found, times = torch.unique(ids, return_counts=True)
    order = torch.sort(times, descending=True, stable=True).indices[:count]
    return found[order[times[order] > 1]].sort().values


class Hot:
    def __init__(self, tables: Tables, rows: Tensor, axis: Axis, device: torch.device):
        """`rows`: counted through all tables, in order. `axis`: the ranks whose gradients are summed."""
        self.tables, self.rows, self.axis, self.device = tables, rows, axis, device
        self.values = tables.look(rows).to(device)
        self.state = {key: value.to(device) for key, value in tables.look_states(rows).items()}
        self.home = [self._rows_of(bank) for bank in tables.own]
        """By bank of ours: where in it each kept row lives, -1 where it does not."""
        self._take(rows[:0].to(device), self.values[:0])

    def _rows_of(self, bank: Bank) -> Tensor:
        home = torch.full_like(self.rows, -1)
        for shard, first in zip(bank.shards, bank.firsts):
            begin, end, start = self._span(shard, self.rows)
            home[begin:end] = self.rows[begin:end] - start + first
        return home

    def _span(self, shard: Shard, rows: Tensor) -> tuple[int, int, int]:
        """Which of some rows are of a piece, from a place to before another; and the number of its first row."""
        first, last = (self.tables.bases[shard.table] + row for row in shard.rows)
        begin, end = torch.searchsorted(rows, torch.tensor([first, last])).tolist()
        return begin, end, first

    def part(self, distinct: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a batch's distinct rows: those that are not kept; the ids' places when the kept ones come after these; the
        places of those among all that are kept."""
        at = torch.searchsorted(self.rows, distinct).clamp_(max=self.rows.numel() - 1)
        kept = self.rows[at] == distinct
        order = torch.cat(((~kept).nonzero()[:, 0], kept.nonzero()[:, 0]))
        after = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
        return distinct[~kept], after[places], at[kept]

    def give(self, places: Tensor, gradient: Tensor) -> None:
        """Takes this rank's gradients of kept rows, and adds up those of all ranks."""
        if self.axis.size == 1:
            self._take(places.to(self.device), gradient)
            return
        width = gradient.shape[1]
        total = gradient.new_zeros(self.rows.numel(), width + 1)  # the last column: who touched a row
        total.index_copy_(0, places.to(self.device), torch.cat((gradient, torch.ones_like(gradient[:, :1])), dim=1))
        all_reduce(total, group=self.axis.group)
        touched = total[:, width].nonzero()[:, 0]
        self._take(touched, total[:, :width].index_select(0, touched))

    def _take(self, touched: Tensor, gradient: Tensor) -> None:
        """The kept rows that the whole batch uses, and their gradient; in host memory, too."""
        self.touched, self.gradient = touched, gradient
        self.touched_here, self.gradient_here = touched.cpu(), gradient.cpu()

    def gradient_of(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Of a piece of a table: its kept rows that were touched, counted from its first, and their gradient."""
        rows = self.rows[self.touched_here]
        begin, end, first = self._span(shard, rows)
        return rows[begin:end] - first, self.gradient_here[begin:end, slice(*shard.columns)]

    def update(self, lr: float) -> None:
        """Takes the step of all touched rows, and writes this rank's back to where they live."""
        tables = self.tables
        square = self.gradient.square().mean(1) if tables.optimizer == "adagrad" else None
        tables.step_rows(self.values, self.state, self.touched, self.gradient, square, lr)
        for bank, memory, state, home in zip(tables.own, tables.memory, tables.state, self.home, strict=True):
            rows = home[self.touched_here]
            ours = rows >= 0
            places = self.touched[ours.to(self.device)]
            columns = slice(*bank.columns)
            memory.index_copy_(0, rows[ours], self.values[places][:, columns].cpu())
            for key, value in self.state.items():
                new = value[places] if value.dim() == 1 else value[places][:, columns]
                state[key].index_copy_(0, rows[ours], new.cpu())
