"""Placement of embedding tables on ranks: table-wise, row-wise, column-wise, or a mix chosen by size and lookups.

    table    each table on one rank
    row      the rows of each table in equal chunks over all ranks
    column   the columns of each table in equal chunks over all ranks
    auto     row-wise if a table exceeds a rank's share of all bytes, column-wise if it exceeds a rank's share of all
             lookups, otherwise table-wise; each shard goes to the rank with the least memory and lookups so far

Chunks are those of `torch.chunk`. A rank has at most one shard of a table. Lookups of a row-wise table are assumed to
be proportional to shard size: true for hashed ids, as here, but not if small ids are the frequent ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.models.family import TableSpec

SHARDING_TYPES = ("auto", "table", "row", "column")


@dataclass(frozen=True, order=True)
class TableShard:
    """A shard of a table: half-open ranges of rows and columns."""

    rank: int
    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def start(self) -> tuple[int, int]:
        return self.rows[0], self.columns[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def place_tables(tables: Sequence[TableSpec], ranks: int, sharding: str = "auto") -> list[TableShard]:
    """Returns the shards of all tables, sorted by rank and table."""
    assert sharding in SHARDING_TYPES, sharding
    shards: list[TableShard] = []
    numel_per_rank = sum(table.size for table in tables) / ranks
    lookups_per_rank = sum(table.lookups_per_sample for table in tables) / ranks
    for index, table in enumerate(tables):
        by_columns, num_shards = sharding == "column", ranks if sharding in ("row", "column") else 1
        if sharding == "auto" and table.size > numel_per_rank:
            num_shards = min(ranks, -(-table.size // max(1, int(numel_per_rank))))
        elif sharding == "auto" and table.lookups_per_sample > lookups_per_rank:
            by_columns = True
            num_shards = min(ranks, table.width, -int(-table.lookups_per_sample // lookups_per_rank))
        for rank, chunk in enumerate(_chunk_ranges(table.width if by_columns else table.rows, num_shards)):
            rows, columns = ((0, table.rows), chunk) if by_columns else (chunk, (0, table.width))
            shards.append(TableShard(rank, index, rows, columns))
    return sorted(shards if sharding in ("row", "column") else _balance_over_ranks(tables, shards, ranks))


def _chunk_ranges(total: int, num_chunks: int) -> list[tuple[int, int]]:
    """Returns chunks of equal size except the last; none is empty."""
    size = -(-total // num_chunks)
    return [(first, min(first + size, total)) for first in range(0, total, size)]


def _balance_over_ranks(tables: Sequence[TableSpec], shards: list[TableShard], ranks: int) -> list[TableShard]:
    """Assigns shards greedily, heaviest first, to the rank whose larger load (memory or lookups) stays smallest."""
    total_numel = sum(table.size for table in tables)
    total_lookups = sum(table.lookups_per_sample for table in tables) or 1.0
    loads = [[0.0, 0.0] for _ in range(ranks)]

    def relative_load(shard: TableShard) -> tuple[float, float]:
        table = tables[shard.table]
        return shard.size / total_numel, table.lookups_per_sample * shard.size / table.size / total_lookups

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
