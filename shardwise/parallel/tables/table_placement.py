"""Where the rows of embedding tables live: by table, by row, by column, or a mix picked from sizes and access rates.

    table    each table whole on one rank
    row      each table's rows in equal runs over all ranks
    column   each row's numbers in equal runs over all ranks
    auto     rows of tables larger than a rank's share of the bytes, columns of those asked for more often than a rank's
             share of the lookups, the others whole; each to the rank that is least loaded by bytes and by lookups

Runs are PyTorch's chunks. A rank has at most one piece of a table. Lookups of a table cut by rows are taken to fall on
its pieces by their sizes: true where ids are hashed, as they are here, and not where small ids are the frequent ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.models.family import TableSpec

SHARDING_TYPES = ("auto", "table", "row", "column")


@dataclass(frozen=True, order=True)
class TableShard:
    """A piece of a table: rows and columns from the first number to before the second."""

    rank: int
    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def start(self) -> tuple[int, int]:
        return self.rows[0], self.columns[0]

    @property
    def size(self) -> int:
        """Numbers."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def place_tables(tables: Sequence[TableSpec], ranks: int, sharding: str = "auto") -> list[TableShard]:
    """The pieces of all tables, by rank and table."""
    assert sharding in SHARDING_TYPES, sharding
    shards_by_table: list[list[TableShard]] = []
    numel_per_rank = sum(table.size for table in tables) / ranks
    lookups_per_rank = sum(table.lookups_per_sample for table in tables) / ranks
    for index, table in enumerate(tables):
        table_sharding, num_shards = sharding, ranks
        if sharding == "auto" and table.size > numel_per_rank:
            table_sharding, num_shards = "row", min(ranks, -(-table.size // max(1, int(numel_per_rank))))
        elif sharding == "auto" and table.lookups_per_sample > lookups_per_rank:
            table_sharding, num_shards = (
                "column",
                min(ranks, table.width, -int(-table.lookups_per_sample // lookups_per_rank)),
            )
        shards_by_table.append(_shard_table(index, table, table_sharding, num_shards))
    if sharding in ("row", "column"):
        return sorted(shard for table_shards in shards_by_table for shard in table_shards)
    return _balance_over_ranks(tables, shards_by_table, ranks)


def _shard_table(table_index: int, table: TableSpec, sharding: str, num_shards: int) -> list[TableShard]:
    """The pieces of a table, on ranks from 0 on."""
    rows, columns = (0, table.rows), (0, table.width)
    if sharding == "row":
        return [
            TableShard(rank, table_index, chunk, columns)
            for rank, chunk in enumerate(_chunk_ranges(table.rows, num_shards))
        ]
    if sharding == "column":
        return [
            TableShard(rank, table_index, rows, chunk)
            for rank, chunk in enumerate(_chunk_ranges(table.width, num_shards))
        ]
    return [TableShard(0, table_index, rows, columns)]


def _chunk_ranges(total: int, num_chunks: int) -> list[tuple[int, int]]:
    """Chunks of equal size but for the last; none that is empty."""
    size = -(-total // num_chunks)
    return [(first, min(first + size, total)) for first in range(0, total, size)]


def _balance_over_ranks(
    tables: Sequence[TableSpec], shards_by_table: list[list[TableShard]], ranks: int
) -> list[TableShard]:
    """Greedy: the heaviest pieces first, each to the rank with the least of what it has most of."""
    total_numel = sum(table.size for table in tables)
    total_lookups = sum(table.lookups_per_sample for table in tables) or 1.0
    loads = [[0.0, 0.0] for _ in range(ranks)]

    def relative_load(shard: TableShard) -> tuple[float, float]:
        table = tables[shard.table]
        return shard.size / total_numel, table.lookups_per_sample * shard.size / table.size / total_lookups

    placed: list[TableShard] = []
    ranks_of_table: dict[int, set[int]] = {}
    for shard in sorted(
        (one for table_shards in shards_by_table for one in table_shards),
        key=lambda one: (-max(relative_load(one)), one),
    ):
        memory_share, lookup_share = relative_load(shard)
        free = [rank for rank in range(ranks) if rank not in ranks_of_table.setdefault(shard.table, set())]
        best = min(
            free,
            key=lambda rank: (
                max(loads[rank][0] + memory_share, loads[rank][1] + lookup_share),
                sum(loads[rank]),
                rank,
            ),
        )
        ranks_of_table[shard.table].add(best)
        loads[best][0] += memory_share
        loads[best][1] += lookup_share
        placed.append(TableShard(best, shard.table, shard.rows, shard.columns))
    return sorted(placed)
