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
    from shardwise.parallel.embedding import Tables


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
        self.gradient = torch.zeros_like(self.values)
        self.touched = torch.empty(0, dtype=torch.int64, device=device)
        """Places of the rows that the last batch used."""

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
        width = gradient.shape[1]
        total = gradient.new_zeros(self.rows.numel(), width + 1)  # the last column: who touched a row
        total.index_copy_(0, places.to(self.device), torch.cat((gradient, torch.ones_like(gradient[:, :1])), dim=1))
        if self.axis.size > 1:
            all_reduce(total, group=self.axis.group)
        self.touched = total[:, width].nonzero()[:, 0]
        self.gradient = total[:, :width].index_select(0, self.touched)

    def gradient_of(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Of a piece of a table: its kept rows that were touched, counted from its first, and their gradient."""
        rows, some = self._within(shard)
        return rows, self.gradient[some, slice(*shard.columns)].cpu()

    def _within(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """The touched rows of a piece: counted from its first, and as places among the touched."""
        base = self.tables.bases[shard.table]
        rows = self.rows[self.touched.cpu()]
        ends = torch.tensor([base + shard.rows[0], base + shard.rows[1]])
        begin, end = torch.searchsorted(rows, ends).tolist()
        return rows[begin:end] - ends[0], torch.arange(begin, end, device=self.device)

    def update(self, lr: float) -> None:
        """Takes the step of all touched rows, and writes this rank's back to where they live."""
        square = self.gradient.square().mean(1) if self.tables.optimizer == "adagrad" else None
        self.tables.step_rows(self.values, self.state, self.touched, self.gradient, square, lr)
        for held in self.tables.held:
            rows, some = self._within(held.shard)
            places = self.touched[some]
            held.rows.index_copy_(0, rows, self.values[places, slice(*held.shard.columns)].cpu())
            for key, value in self.state.items():
                new = value[places] if value.dim() == 1 else value[places, slice(*held.shard.columns)]
                held.state[key].index_copy_(0, rows, new.cpu())
