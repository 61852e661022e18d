"""Bags: the ids that samples look up in embedding tables, with weights, and their weighted sums."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import DataError
from shardwise.parallel.tables.table_placement import TableSpec


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
