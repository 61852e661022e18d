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

import numpy as np
import torch

OWN = ("compute", "optimizer", "data", "checkpoint", "validation")
AXES = ("pipeline", "tensor", "context", "expert", "shard", "replicate", "data", "apart", "world")
HELD = ("weights", "gradients", "optimizer")
LINES = 1000  # of a run whose lines are all as long as the last
FINE = 200  # lines for what a run has taken so far, at least
ALERT = 20  # steps that are looked at together
SLOW = 1.5  # times the others' median from which a rank is slow ...
SHARE = 0.2  # ... and the share of the step that it costs them; of a wait for data, too


# Places in a row: when the step began, how long it took, what that went to, and what was held.
START, SECONDS, FIRST_OWN = 0, 1, 2
FIRST_WAIT = FIRST_OWN + len(OWN)
MEMORY = FIRST_WAIT + len(AXES)
WIDTH = MEMORY + 1 + len(HELD)


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


@dataclass
class Rows:
    """Of the first rank: the rows of all ranks, step by step, each step a table (ranks, `WIDTH`)."""

    path: Path
    total: int
    """Steps of the run."""
    alike: Sequence[Sequence[int]]
    """Ranks that should take as long as each other: those of one pipeline stage."""

    def __post_init__(self) -> None:
        self.window: list[np.ndarray] = []
        self.looked: list[np.ndarray] = []
        self.told: set[str] = set()

    def add(self, step: int, rows: np.ndarray) -> list[str]:
        """Takes in a step. Returns what there is to tell about the last ones, in words."""
        self.window.append(rows)
        # A line of many ranks is long: there are fewer of them.
        if len(self.window) >= max(1 + len(rows) // 32, min(self.total // LINES, step // FINE)):
            self.flush(step)
        self.looked.append(rows)
        if len(self.looked) < ALERT:
            return []
        found = dict(alerts(joined(self.looked), self.alike))
        self.looked = []
        new = [words for key, words in found.items() if key not in self.told]
        self.told = set(found)
        return new

    def flush(self, step: int) -> None:
        """Writes down what was taken in up to a step."""
        if self.window:
            text = json.dumps(line(step, len(self.window), joined(self.window)))
            with suppress(OSError), self.path.open("a") as file:  # a full disk is told by what a run cannot do without
                file.write(text + "\n")
            self.window = []


def joined(steps: list[np.ndarray]) -> np.ndarray:
    """Some steps as one; what is held is that of the last."""
    whole = np.sum(steps, axis=0)
    whole[:, START], whole[:, MEMORY:] = steps[0][:, START], steps[-1][:, MEMORY:]
    return np.asarray(whole)


def line(step: int, steps: int, ranks: np.ndarray) -> dict[str, Any]:
    def columns(names: Sequence[str], first: int, scale: float = 1.0) -> dict[str, list[float]]:
        values = ranks[:, first : first + len(names)].T / scale
        return {name: row.round(5).tolist() for name, row in zip(names, values, strict=True) if row.any()}

    gib = 2.0**30
    return {
        "step": step, "steps": steps, "start": ranks[:, START].round(4).tolist(),
        "seconds": ranks[:, SECONDS].round(5).tolist(), "spent": columns(OWN, FIRST_OWN),
        "waited": columns(AXES, FIRST_WAIT), "memory_gib": (ranks[:, MEMORY] / gib).round(4).tolist(),
        "held_gib": columns(HELD, MEMORY + 1, gib),
    }  # fmt: skip


def slowest(rows: np.ndarray) -> dict[str, Any]:
    """The rank, and its work, that took most above the median of all."""
    own = rows[:, FIRST_OWN:FIRST_WAIT]
    middle = np.sort(own, axis=0)[(len(own) - 1) // 2]
    rank, part = np.unravel_index(int((own - middle).argmax()), own.shape)
    seconds, median = float(own[rank, part]), float(middle[part])
    return {"rank": int(rank), "part": OWN[part], "seconds": round(seconds, 6), "median": round(median, 6)}


def alerts(rows: np.ndarray, alike: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """What is wrong with some steps: a word for it, and a sentence."""
    found = []
    work, seconds = rows[:, FIRST_OWN : FIRST_OWN + 2].sum(1), np.maximum(rows[:, SECONDS], 1e-9)
    for group in alike:
        middle = float(np.sort(work[list(group)])[(len(group) - 1) // 2])  # of two the quicker
        for rank in group:
            more = float(work[rank]) - middle
            if work[rank] > SLOW * middle and more > SHARE * seconds[rank]:
                times = f"{work[rank] / max(middle, 1e-9):.1f} times as long as those that do the same"
                cost = f"the others wait {100 * more / seconds[rank]:.0f}% of a step for it"
                found.append((f"slow {rank}", f"rank {rank} computes {times}: {cost}."))
    data = rows[:, FIRST_OWN + OWN.index("data")] / seconds
    rank = int(data.argmax())
    if data[rank] > SHARE:
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
