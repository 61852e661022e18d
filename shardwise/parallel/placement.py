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

WAYS = ("auto", "table", "row", "column")


@dataclass(frozen=True)
class Table:
    """A table as the plan sees it."""

    name: str
    rows: int
    width: int
    rate: float = 1.0
    """Lookups of a sample."""

    @property
    def size(self) -> int:
        """Numbers."""
        return self.rows * self.width


@dataclass(frozen=True, order=True)
class Shard:
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


def place_tables(tables: Sequence[Table], ranks: int, way: str = "auto") -> list[Shard]:
    """The pieces of all tables, by rank and table."""
    assert way in WAYS, way
    pieces: list[list[Shard]] = []
    bytes_each = sum(table.size for table in tables) / ranks
    lookups_each = sum(table.rate for table in tables) / ranks
    for number, table in enumerate(tables):
        how, parts = way, ranks
        if way == "auto" and table.size > bytes_each:
            how, parts = "row", min(ranks, -(-table.size // max(1, int(bytes_each))))
        elif way == "auto" and table.rate > lookups_each:
            how, parts = "column", min(ranks, table.width, -int(-table.rate // lookups_each))
        pieces.append(_cut(number, table, how, parts))
    if way in ("row", "column"):
        return sorted(shard for cut in pieces for shard in cut)
    return _balanced(tables, pieces, ranks)


def _cut(number: int, table: Table, how: str, parts: int) -> list[Shard]:
    """The pieces of a table, on ranks from 0 on."""
    rows, columns = (0, table.rows), (0, table.width)
    if how == "row":
        return [Shard(rank, number, run, columns) for rank, run in enumerate(_runs(table.rows, parts))]
    if how == "column":
        return [Shard(rank, number, rows, run) for rank, run in enumerate(_runs(table.width, parts))]
    return [Shard(0, number, rows, columns)]


def _runs(total: int, parts: int) -> list[tuple[int, int]]:
    """Chunks of equal size but for the last; none that is empty."""
    size = -(-total // parts)
    return [(first, min(first + size, total)) for first in range(0, total, size)]


def _balanced(tables: Sequence[Table], pieces: list[list[Shard]], ranks: int) -> list[Shard]:
    """Greedy: the heaviest pieces first, each to the rank with the least of what it has most of."""
    numbers = sum(table.size for table in tables)
    lookups = sum(table.rate for table in tables) or 1.0
    loads = [[0.0, 0.0] for _ in range(ranks)]

    def weight(shard: Shard) -> tuple[float, float]:
        table = tables[shard.table]
        return shard.size / numbers, table.rate * shard.size / table.size / lookups

    placed: list[Shard] = []
    taken: dict[int, set[int]] = {}
    for shard in sorted((one for cut in pieces for one in cut), key=lambda one: (-max(weight(one)), one)):
        size, rate = weight(shard)
        free = [rank for rank in range(ranks) if rank not in taken.setdefault(shard.table, set())]
        best = min(free, key=lambda rank: (max(loads[rank][0] + size, loads[rank][1] + rate), sum(loads[rank]), rank))
        taken[shard.table].add(best)
        loads[best][0] += size
        loads[best][1] += rate
        placed.append(Shard(best, shard.table, shard.rows, shard.columns))
    return sorted(placed)
