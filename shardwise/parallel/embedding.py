"""Embedding tables over the host memory of all ranks: looked up by all-to-all, updated where the rows live.

A step, on each rank, for all rows but those that every device keeps (`shardwise.parallel.hot`):

    route      the distinct rows that its samples use are told to the ranks that hold them: counts, then row numbers
    fetch      those ranks send the rows; bags are then weighted sums over them, with PyTorch's own gradient
    give_back  gradients of the distinct rows go the same way back, and those that several ranks sent for one row are
               added up: each row has one gradient, that of the whole batch
    update     each touched row once (`shardwise.optim.sparse`)

Nothing is divided by the number of ranks: the loss is divided by the samples of the whole batch already.

The next batch's route can be made, and its rows fetched, while this one computes (`Ahead`). Rows that this one's update
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

from shardwise.comm.collectives import all_to_all
from shardwise.optim.sparse import adagrad_, adam_, add_rows_
from shardwise.parallel.bags import Bags, check_ids
from shardwise.parallel.hot import Hot
from shardwise.parallel.mesh import Axis
from shardwise.parallel.placement import Shard, Table
from shardwise.random import key_of, normal_

Numbers = list[list[Tensor]]  # rows, by rank and its banks


class Bank:
    """Pieces of one rank with the same columns, one below the other in one memory."""

    def __init__(self, columns: tuple[int, int], shards: list[Shard]):
        self.columns, self.shards = columns, shards
        self.width = columns[1] - columns[0]
        self.firsts = [0]
        for shard in shards:
            self.firsts.append(self.firsts[-1] + shard.rows[1] - shard.rows[0])


def banks_of(shards: Sequence[Shard], rank: int) -> list[Bank]:
    """Known of every rank on every rank, in one order."""
    own = [shard for shard in shards if shard.rank == rank]
    spans = sorted({shard.columns for shard in own})
    return [Bank(span, [shard for shard in own if shard.columns == span]) for span in spans]


@dataclass(frozen=True)
class Route:
    """Who needs which rows of whom, for one batch."""

    ids: Tensor
    """The samples' places in the stream: which batch it is."""
    offsets: Tensor
    weights: Tensor
    places: Tensor
    """Of each id, its row among the distinct ones: first those that are fetched, then those that are kept here."""
    distinct: int
    """Rows that are fetched."""
    kept: Tensor
    """The others, by their places among the kept ones."""
    asked: Numbers
    """Which of the distinct rows come from there."""
    wanted: Numbers
    """By rank and bank of ours: which rows it asks for."""


@dataclass(frozen=True)
class Held:
    """A piece that this rank holds, as views: its rows, and their optimizer's state."""

    shard: Shard
    rows: Tensor
    state: dict[str, Tensor]


@dataclass
class Touched:
    """What the whole batch asks of a bank's rows: each row once, in order."""

    rows: Tensor
    gradient: Tensor


class Tables:
    """This rank's part of all tables, and the ways to the others'."""

    def __init__(
        self, tables: Sequence[Table], shards: Sequence[Shard], axis: Axis, dtype: torch.dtype,
        optimizer: str = "adagrad", betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, pinned: bool = False,
    ):  # fmt: skip
        assert len({table.width for table in tables}) == 1, "the tables of a model have rows of one width"
        self.tables, self.shards, self.axis, self.dtype = list(tables), list(shards), axis, dtype
        self.optimizer, self.betas, self.eps = optimizer, betas, eps
        self.width = tables[0].width
        self.bases = [0]
        for table in tables:
            self.bases.append(self.bases[-1] + table.rows)
        self.banks = [banks_of(shards, rank) for rank in range(axis.size)]
        self.own = self.banks[axis.index]
        self.group = axis.group
        memory: dict[str, Any] = {"dtype": dtype, "pin_memory": pinned}
        self.memory = [torch.zeros(bank.firsts[-1], bank.width, **memory) for bank in self.own]
        self.state: list[dict[str, Tensor]] = []
        for rows in self.memory:
            if optimizer == "adagrad":
                self.state.append({"sum": torch.zeros(rows.shape[0], **memory)})
            else:
                self.state.append({key: torch.zeros_like(rows) for key in ("exp_avg", "exp_avg_sq")})
        self.count = {"step": torch.zeros((), dtype=torch.int64)}
        self.held = list(self._pieces())
        self.touched: list[Touched] = []
        self.changed = [torch.empty(0, dtype=torch.int64) for _ in self.own]
        """By bank: the rows of the last update."""
        self.hot: Hot | None = None
        self.cut_columns = any(shard.columns != (0, self.width) for shard in self.shards)

    def _pieces(self) -> Iterator[Held]:
        for bank, rows, state in zip(self.own, self.memory, self.state, strict=True):
            for shard, first, last in zip(bank.shards, bank.firsts, bank.firsts[1:]):
                views = {key: value[first:last] for key, value in state.items()}
                yield Held(shard, rows[first:last], views if self.optimizer == "adagrad" else {**views, **self.count})

    def start(self, seed: int, std: Sequence[float]) -> None:
        """Fills the rows with what the whole tables have there at the start of a run, however they are cut."""
        for held in self.held:
            table = self.tables[held.shard.table]
            shape = torch.Size((table.rows, table.width))
            key = key_of("init", seed, table.name)
            normal_(held.rows, key, shape, held.shard.start, std[held.shard.table])

    # Lookup

    def route(self, bags: Bags, ids: Tensor, group: dist.ProcessGroup | None = None) -> Route:
        """Tells each rank which of its rows this rank's samples use; `ids` are the samples' places in the stream."""
        table = check_ids(bags, self.tables, ids)
        distinct, places = torch.unique(bags.ids + torch.tensor(self.bases)[table], return_inverse=True)
        kept = distinct[:0]
        if self.hot is not None:
            distinct, places, kept = self.hot.part(distinct, places)
        asked, wanted = self._ask(distinct, group)
        return Route(ids, bags.offsets, bags.weights, places, distinct.numel(), kept, asked, wanted)

    def _ask(self, distinct: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Numbers, Numbers]:
        """Tells who holds them which rows are needed here; hears which of ours are needed elsewhere."""
        asked: Numbers = []
        rows: list[Tensor] = []
        for banks in self.banks:
            asked.append([])
            for bank in banks:
                which, numbers = [], []
                for shard, first in zip(bank.shards, bank.firsts):
                    base = self.bases[shard.table]
                    ends = torch.tensor([base + shard.rows[0], base + shard.rows[1]])
                    begin, end = torch.searchsorted(distinct, ends).tolist()
                    which.append(torch.arange(begin, end))
                    numbers.append(distinct[begin:end] - (base + shard.rows[0] - first))
                asked[-1].append(torch.cat(which))
                rows.append(torch.cat(numbers))
        return asked, self._tell(asked, _joined(rows, torch.int64), group)

    def _tell(self, asked: Numbers, rows: Tensor, group: dist.ProcessGroup | None) -> Numbers:
        counts = torch.tensor([which.numel() for banks in asked for which in banks], dtype=torch.int64)
        mine = len(self.own)
        theirs = self._exchange(counts, [len(banks) for banks in asked], [mine] * self.axis.size, group)
        sizes = theirs.view(self.axis.size, mine).tolist() if mine else [[]] * self.axis.size
        sent = [sum(which.numel() for which in banks) for banks in asked]
        came = self._exchange(rows, sent, [sum(one) for one in sizes], group)
        parts = iter(came.split([size for one in sizes for size in one]))
        return [[next(parts) for _ in one] for one in sizes]

    def fetch(
        self, route: Route, group: dist.ProcessGroup | None = None, memory: Sequence[Tensor] | None = None
    ) -> Tensor:
        """The distinct rows of this rank's samples, as they are now; or what another `memory` has in their place."""
        parts = [
            rows.index_select(0, numbers).reshape(-1)
            for wanted in route.wanted
            for rows, numbers in zip(memory or self.memory, wanted, strict=True)
        ]
        came = self._vectors(_joined(parts, self.dtype), route, back=False, group=group)
        rows = torch.empty(route.distinct, self.width, dtype=self.dtype)
        start = 0
        for bank, which in self._in_turn(route):
            size = which.numel() * bank.width
            part = came[start : start + size].view(-1, bank.width)
            rows[:, bank.columns[0] : bank.columns[1]].index_copy_(0, which, part)
            start += size
        return rows

    def look(self, rows: Tensor, memory: Sequence[Tensor] | None = None) -> Tensor:
        """Rows by their number through all tables, in order, or what lies in another memory in their place."""
        none = rows[:0]
        return self.fetch(Route(none, none, none, none, rows.numel(), none, *self._ask(rows)), memory=memory)

    def look_states(self, rows: Tensor) -> dict[str, Tensor]:
        """The optimizer's states of some rows."""
        if self.optimizer == "adagrad":
            sums = [state["sum"][:, None].expand(-1, bank.width) for bank, state in zip(self.own, self.state)]
            return {"sum": self.look(rows, sums)[:, 0].contiguous()}
        return {key: self.look(rows, [one[key] for one in self.state]) for key in ("exp_avg", "exp_avg_sq")}

    def refresh(self, route: Route, rows: Tensor) -> None:
        """Brings rows that were fetched before or during the last update up to date: those that it changed come again,
        with their places among the rows that were asked for."""
        hits = [
            [
                torch.isin(numbers, changed).nonzero()[:, 0]
                for numbers, changed in zip(wanted, self.changed, strict=True)
            ]
            for wanted in route.wanted
        ]
        counts = torch.tensor([some.numel() for banks in hits for some in banks], dtype=torch.int64)
        lengths = [len(banks) for banks in self.banks]
        heard = iter(self._exchange(counts, [len(self.own)] * self.axis.size, lengths, None).tolist())
        theirs = [[next(heard) for _ in banks] for banks in self.banks]
        flat = [some for banks in hits for some in banks]
        sent = [sum(some.numel() for some in banks) for banks in hits]
        places = self._exchange(_joined(flat, torch.int64), sent, [sum(one) for one in theirs], None)
        values = [
            memory.index_select(0, numbers[some]).view(-1)
            for wanted, banks in zip(route.wanted, hits, strict=True)
            for memory, numbers, some in zip(self.memory, wanted, banks, strict=True)
        ]
        out = [_numbers(banks, self.own) for banks in hits]
        into = [sum(n * bank.width for n, bank in zip(one, banks)) for one, banks in zip(theirs, self.banks)]
        came = self._exchange(_joined(values, self.dtype), out, into, None)
        start = first = 0
        for (bank, which), count in zip(self._in_turn(route), [n for one in theirs for n in one], strict=True):
            part = came[start : start + count * bank.width].view(-1, bank.width)
            columns = rows[:, bank.columns[0] : bank.columns[1]]
            columns.index_copy_(0, which[places[first : first + count]], part)
            start, first = start + count * bank.width, first + count

    def give_back(self, route: Route, gradient: Tensor) -> None:
        """Takes the gradients of the distinct rows to where these live, and adds up those of one row."""
        columns = [
            gradient[:, bank.columns[0] : bank.columns[1]].index_select(0, which).view(-1)
            for bank, which in self._in_turn(route)
        ]
        came = self._vectors(_joined(columns, self.dtype), route, back=True)
        parts: list[list[Tensor]] = [[] for _ in self.own]
        start = 0
        for wanted in route.wanted:
            for number, (bank, rows) in enumerate(zip(self.own, wanted, strict=True)):
                size = rows.numel() * bank.width
                parts[number].append(came[start : start + size].view(-1, bank.width))
                start += size
        self.touched = []
        for number, found in enumerate(parts):
            rows, places = torch.unique(torch.cat([wanted[number] for wanted in route.wanted]), return_inverse=True)
            total = torch.zeros(rows.numel(), self.own[number].width, dtype=self.dtype)
            add_rows_(total, places, torch.cat(found))
            self.touched.append(Touched(rows, total))

    def _in_turn(self, route: Route) -> Iterator[tuple[Bank, Tensor]]:
        for banks, asked in zip(self.banks, route.asked, strict=True):
            yield from zip(banks, asked, strict=True)

    def _vectors(self, numbers: Tensor, route: Route, back: bool, group: dist.ProcessGroup | None = None) -> Tensor:
        """Rows from those who hold them to those who asked, or the other way."""
        held = [_numbers(wanted, self.own) for wanted in route.wanted]
        asked = [_numbers(which, banks) for which, banks in zip(route.asked, self.banks, strict=True)]
        return self._exchange(numbers, *((asked, held) if back else (held, asked)), group)

    def _exchange(self, sent: Tensor, sizes: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
        if self.axis.size == 1:
            return sent
        came = sent.new_empty(sum(received))
        all_to_all(came, sent, received, sizes, group=group or self.group)
        return came

    # Update

    def gradient_of(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Of a piece of this rank: the rows that were touched, counted from its first, and their gradient."""
        for bank, touched in zip(self.own, self.touched, strict=True):
            if shard in bank.shards:
                first = bank.firsts[bank.shards.index(shard)]
                last = first + shard.rows[1] - shard.rows[0]
                begin, end = torch.searchsorted(touched.rows, torch.tensor([first, last])).tolist()
                rows, gradient = touched.rows[begin:end] - first, touched.gradient[begin:end]
                if self.hot is not None:
                    kept, theirs = self.hot.gradient_of(shard)
                    rows, gradient = torch.cat((rows, kept)), torch.cat((gradient, theirs))
                return rows, gradient
        raise KeyError(shard)

    def divide(self, by: float) -> None:
        """Divides all gradients."""
        for gradient in [*(one.gradient for one in self.touched), *([self.hot.gradient] if self.hot else [])]:
            gradient.div_(by)

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        return {held.rows: held.state for held in self.held}

    @torch.no_grad()
    def update(self, lr: float, scale: float) -> None:
        """Takes the step of all touched rows; gradients are divided by `scale` first."""
        self.count["step"] += 1
        if scale != 1.0:
            self.divide(scale)
        squares = self._mean_squares() if self.optimizer == "adagrad" else [None] * len(self.own)
        for rows, state, touched, square in zip(self.memory, self.state, self.touched, squares, strict=True):
            self.step_rows(rows, state, touched.rows, touched.gradient, square, lr)
        if self.hot is not None:
            self.hot.update(lr)
        self.changed = [touched.rows for touched in self.touched]
        self.touched = []

    def step_rows(
        self, rows: Tensor, state: dict[str, Tensor], which: Tensor, gradient: Tensor, square: Tensor | None, lr: float
    ) -> None:
        """One update of some rows; `square`: for AdaGrad, the mean of each one's whole gradient."""
        if square is not None:
            adagrad_(rows, state["sum"], which, gradient, square, lr, self.eps)
        else:
            averages, number = (state["exp_avg"], state["exp_avg_sq"]), int(self.count["step"])
            adam_(rows, averages, which, gradient, number, lr, self.betas, self.eps)

    def _mean_squares(self) -> list[Tensor | None]:
        """Of each touched row's whole gradient. Ranks with other columns of a row touch it too, so each sends its sum
        of squares to the others; all add them up in the order of the columns and come to the same number."""
        sums = [touched.gradient.square().sum(1) for touched in self.touched]
        if self.cut_columns and self.axis.size > 1:
            sums = self._whole_sums(sums)
        return [one / self.width for one in sums]

    def _whole_sums(self, sums: list[Tensor]) -> list[Tensor]:
        cut: dict[int, Tensor] = {}  # by table: a rank has one piece of it
        spans: dict[int, tuple[int, int, int]] = {}
        for number, bank in enumerate(self.own):
            for shard, first, last in zip(bank.shards, bank.firsts, bank.firsts[1:]):
                if shard.columns != (0, self.width):
                    ends = torch.searchsorted(self.touched[number].rows, torch.tensor([first, last])).tolist()
                    spans[shard.table] = (number, *ends)
                    cut[shard.table] = sums[number][ends[0] : ends[1]]
        partners: list[list[Shard]] = [
            [one for one in self.shards if one.rank == rank and one.table in cut] for rank in range(self.axis.size)
        ]
        out = [cut[one.table] for others in partners for one in others]
        sizes = [sum(cut[one.table].numel() for one in others) for others in partners]
        came = iter(self._exchange(_joined(out, self.dtype), sizes, sizes, None).split([part.numel() for part in out]))
        heard: dict[int, list[tuple[int, Tensor]]] = {}
        for others in partners:
            for one in others:
                heard.setdefault(one.table, []).append((one.columns[0], next(came)))
        for table, found in heard.items():
            number, begin, end = spans[table]
            total = torch.zeros(end - begin, dtype=self.dtype)
            for _, part in sorted(found, key=lambda item: item[0]):
                total += part
            sums[number][begin:end] = total
        return sums


def _numbers(rows: list[Tensor], banks: list[Bank]) -> int:
    """How many there are in some rows of each bank."""
    return sum(some.numel() * bank.width for some, bank in zip(rows, banks, strict=True))


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


class Ahead:
    """Fetches the rows of the next batch in a thread, on a group of its own, while this one computes."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.group = dist.new_group(backend="gloo") if tables.axis.size > 1 else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-rows")
        self.pending: deque[Future[tuple[Route, Tensor]]] = deque()

    def ask(self, bags: Bags, ids: Tensor) -> None:
        """To be called after the update of the batch before the last that was asked for: one update is made good."""
        self.pending.append(self.thread.submit(self._get, bags, ids))

    def _get(self, bags: Bags, ids: Tensor) -> tuple[Route, Tensor]:
        route = self.tables.route(bags, ids, self.group)
        # The update may be writing to these rows meanwhile; whatever it writes to is sent again.
        return route, self.tables.fetch(route, self.group)

    def take(self, ids: Tensor) -> tuple[Route, Tensor]:
        """Route and rows that were asked for longest ago, which must be those of this very batch."""
        route, rows = self.pending.popleft().result()
        assert torch.equal(route.ids, ids), "batches are taken in the order in which they were asked for"
        self.tables.refresh(route, rows)
        return route, rows

    def close(self) -> None:
        self.thread.shutdown()
