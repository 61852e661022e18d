"""Where the time of each rank's steps went: a row of numbers of each rank and step, kept in `ranks.jsonl`.

The ranks give each other the row of their last step with the signal to stop, in one collective of each step. The first
rank writes the rows of some steps as one line, sums of them: few at first, more as the run gets on, so that it has some
two thousand lines however long it is.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

OWN = ("compute", "optimizer", "data", "checkpoint", "validation")
AXES = ("pipeline", "tensor", "context", "expert", "shard", "replicate", "data", "apart", "world")
HELD = ("weights", "gradients", "optimizer")
LINES = 1000  # of a run whose lines are all as long as the last
FINE = 200  # lines for what a run has taken so far, at least
ALERT = 20  # steps that are looked at together
SLOW = 1.5  # times the others' median from which a rank is slow ...
SHARE = 0.2  # ... and the share of the step that it costs them; of a wait for data, too


@dataclass
class Row:
    """One rank's step, from its begin to that of the next."""

    start: float = 0.0
    """Seconds since 1970, on the clock of rank 0."""
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds of its own, by phase, without waits for other ranks."""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds that it waited for others, by axis."""
    memory: float = 0.0
    """The most bytes held so far."""
    held: dict[str, float] = field(default_factory=dict)
    """Bytes of weights, gradients and states of the optimizer."""

    def numbers(self) -> list[float]:
        own = [self.spent.get(part, 0.0) for part in OWN]
        waits = [self.waited.get(axis, 0.0) for axis in AXES]
        return [self.start, self.seconds, *own, *waits, self.memory, *(self.held.get(part, 0.0) for part in HELD)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Row:
        start, seconds, *rest = numbers
        waits, memory = len(OWN), len(OWN) + len(AXES)
        return cls(
            start, seconds, dict(zip(OWN, rest)), dict(zip(AXES, rest[waits:memory])), rest[memory],
            dict(zip(HELD, rest[memory + 1 :])),
        )  # fmt: skip


WIDTH = len(Row().numbers())


@dataclass
class Rows:
    """Of the first rank: the rows of all ranks, step by step."""

    path: Path
    total: int
    """Steps of the run."""
    alike: Sequence[Sequence[int]]
    """Ranks that should take as long as each other: those of one pipeline stage."""

    def __post_init__(self) -> None:
        self.window: list[list[Row]] = []
        self.looked: list[list[Row]] = []
        self.told: set[str] = set()

    def add(self, step: int, rows: list[Row]) -> list[str]:
        """Takes in a step. Returns what there is to tell about the last ones, in words."""
        self.window.append(rows)
        if len(self.window) >= min(self.total // LINES, step // FINE):
            self.flush(step)
        self.looked.append(rows)
        if len(self.looked) < ALERT:
            return []
        found = dict(alerts([joined(rank) for rank in zip(*self.looked)], self.alike))
        self.looked = []
        new = [words for key, words in found.items() if key not in self.told]
        self.told = set(found)
        return new

    def flush(self, step: int) -> None:
        """Writes down what was taken in up to a step."""
        if self.window:
            ranks = [joined(rank) for rank in zip(*self.window)]
            with suppress(OSError), self.path.open("a") as file:  # a full disk is told by what a run cannot do without
                file.write(json.dumps(line(step, len(self.window), ranks)) + "\n")
            self.window = []


def joined(rows: Sequence[Row]) -> Row:
    """Steps of one rank as one; what it holds is that of the last."""

    def summed(parts: list[dict[str, float]]) -> dict[str, float]:
        return {name: sum(one[name] for one in parts) for name in parts[0]}

    seconds = sum(row.seconds for row in rows)
    spent, waited = summed([row.spent for row in rows]), summed([row.waited for row in rows])
    return Row(rows[0].start, seconds, spent, waited, rows[-1].memory, rows[-1].held)


def line(step: int, steps: int, ranks: list[Row]) -> dict[str, Any]:
    def column(values: Sequence[float], digits: int = 5) -> list[float]:
        return [round(value, digits) for value in values]

    def columns(parts: list[dict[str, float]], scale: float = 1.0) -> dict[str, list[float]]:
        found = {name: [one[name] / scale for one in parts] for name in parts[0]}
        return {name: column(values) for name, values in found.items() if any(values)}

    gib = 2.0**30
    return {
        "step": step, "steps": steps, "start": column([row.start for row in ranks], 4),
        "seconds": column([row.seconds for row in ranks]), "spent": columns([row.spent for row in ranks]),
        "waited": columns([row.waited for row in ranks]),
        "memory_gib": column([row.memory / gib for row in ranks], 4),
        "held_gib": columns([row.held for row in ranks], gib),
    }  # fmt: skip


def slowest(rows: list[Row]) -> dict[str, Any]:
    """The rank, and its work, that took most above the median of all."""
    worst: dict[str, Any] = {}
    for part in OWN:
        times = [row.spent[part] for row in rows]
        most, middle = max(times), statistics.median_low(times)
        if not worst or most - middle > worst["seconds"] - worst["median"]:
            worst = {"rank": times.index(most), "part": part, "seconds": round(most, 6), "median": round(middle, 6)}
    return worst


def alerts(ranks: list[Row], alike: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """What is wrong with some steps: a word for it, and a sentence."""
    found = []
    for group in alike:
        for rank in group if len(group) > 1 else ():
            work = {one: ranks[one].spent["compute"] + ranks[one].spent["optimizer"] for one in group}
            own, step = work.pop(rank), ranks[rank].seconds
            middle = statistics.median(work.values())
            if own > SLOW * middle and own - middle > SHARE * step:
                words = f"rank {rank} computes {own / middle:.1f} times as long as those that do the same"
                cost = f"the others wait {100 * (own - middle) / step:.0f}% of a step for it"
                found.append((f"slow {rank}", f"{words}: {cost}."))
    data = [row.spent["data"] / row.seconds if row.seconds else 0.0 for row in ranks]
    if max(data) > SHARE:
        rank = data.index(max(data))
        words = f"rank {rank} spends {100 * data[rank]:.0f}% of its steps waiting for data"
        found.append((f"data {rank}", f"{words}; more data.workers would help, or a faster source."))
    return found


def clock_offset(all_gather: Any, device: torch.device, world: int, rank: int, rounds: int = 8) -> float:
    """How far this rank's clock is ahead of that of rank 0: a collective ends for all at about the same time. 0 where
    it is less than what that is off by itself."""
    given = torch.zeros(1, dtype=torch.float64, device=device)
    found = given.repeat(world)
    ahead = []
    for _ in range(rounds):
        all_gather(found, given)
        found.cpu()  # the collective is over
        given.fill_(time.time())
        all_gather(found, given)
        ends = found.tolist()
        ahead.append(ends[rank] - ends[0])
    middle = statistics.median(ahead)
    return middle if abs(middle) > max(ahead) - min(ahead) else 0.0


def held(parts: dict[str, Sequence[Any]]) -> dict[str, float]:
    """Bytes of tensors by what they are; memory that several share counts once, for the first."""
    seen: set[int] = set()
    found = dict.fromkeys(parts, 0.0)
    for part, tensors in parts.items():
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            memory = local.untyped_storage()
            if memory.nbytes() and memory.data_ptr() not in seen:
                seen.add(memory.data_ptr())
                found[part] += memory.nbytes()
    return found
