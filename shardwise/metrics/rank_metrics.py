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

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_gather
from shardwise.layout import DEGREES

PHASES = ("compute", "optimizer", "data", "checkpoint", "validation")
WAIT_AXES = (*DEGREES, "data", "local_sgd", "world")
MEMORY_KINDS = ("weights", "gradients", "optimizer")
TARGET_LINES = 1000  # of a run whose lines are all as long as the last
MIN_LINES = 200  # lines for what a run has taken so far, at least
ALERT_WINDOW = 20  # steps that are looked at together
STRAGGLER_RATIO = 1.5  # times the others' median from which a rank is slow ...
ALERT_SHARE = 0.2  # ... and the share of the step that it costs them; of a wait for data, too


# Places in a row: when the step began, how long it took, what that went to, and what was held.
START, SECONDS, FIRST_PHASE = 0, 1, 2
FIRST_WAIT = FIRST_PHASE + len(PHASES)
PEAK_MEMORY = FIRST_WAIT + len(WAIT_AXES)
NUM_COLUMNS = PEAK_MEMORY + 1 + len(MEMORY_KINDS)


@dataclass
class RankMetrics:
    """One rank's step, from its begin to that of the next."""

    start: float = 0.0
    """Seconds since 1970, on the clock of rank 0."""
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of its own, by phase, without waits for other ranks."""
    wait_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that it waited for others, by axis."""
    peak_memory: float = 0.0
    """The most bytes held so far."""
    memory_by_kind: dict[str, float] = field(default_factory=dict)
    """Bytes of weights, gradients and states of the optimizer."""

    def to_list(self) -> list[float]:
        phases = [self.phase_seconds.get(part, 0.0) for part in PHASES]
        waits = [self.wait_seconds.get(axis, 0.0) for axis in WAIT_AXES]
        return [
            self.start,
            self.seconds,
            *phases,
            *waits,
            self.peak_memory,
            *(self.memory_by_kind.get(part, 0.0) for part in MEMORY_KINDS),
        ]


@dataclass
class RankMetricsWriter:
    """Of the first rank: the rows of all ranks, step by step, each step a table (ranks, `WIDTH`)."""

    path: Path
    total_steps: int
    """Steps of the run."""
    peer_groups: Sequence[Sequence[int]]
    """Ranks that should take as long as each other: those of one pipeline stage."""

    def __post_init__(self) -> None:
        self.window: list[np.ndarray] = []
        self.recent_steps: list[np.ndarray] = []
        self.active_alerts: set[str] = set()

    def add(self, step: int, rows: np.ndarray) -> list[str]:
        """Takes in a step. Returns what there is to tell about the last ones, in words."""
        self.window.append(rows)
        # A line of many ranks is long: there are fewer of them.
        if len(self.window) >= max(1 + len(rows) // 32, min(self.total_steps // TARGET_LINES, step // MIN_LINES)):
            self.flush(step)
        self.recent_steps.append(rows)
        if len(self.recent_steps) < ALERT_WINDOW:
            return []
        current_alerts = dict(find_alerts(sum_steps(self.recent_steps), self.peer_groups))
        self.recent_steps = []
        new = [message for key, message in current_alerts.items() if key not in self.active_alerts]
        self.active_alerts = set(current_alerts)
        return new

    def flush(self, step: int) -> None:
        """Writes down what was taken in up to a step."""
        if self.window:
            text = json.dumps(to_record(step, len(self.window), sum_steps(self.window)))
            with suppress(OSError), self.path.open("a") as file:  # a full disk is told by what a run cannot do without
                file.write(text + "\n")
            self.window = []


def sum_steps(steps: list[np.ndarray]) -> np.ndarray:
    """Some steps as one; what is held is that of the last."""
    total = np.sum(steps, axis=0)
    total[:, START], total[:, PEAK_MEMORY:] = steps[0][:, START], steps[-1][:, PEAK_MEMORY:]
    return np.asarray(total)


def to_record(step: int, steps: int, ranks: np.ndarray) -> dict[str, Any]:
    def columns(names: Sequence[str], first: int, scale: float = 1.0) -> dict[str, list[float]]:
        values = ranks[:, first : first + len(names)].T / scale
        return {name: row.round(5).tolist() for name, row in zip(names, values, strict=True) if row.any()}

    gib = 2.0**30
    return {
        "step": step, "steps": steps, "start": ranks[:, START].round(4).tolist(),
        "seconds": ranks[:, SECONDS].round(5).tolist(), "phase_seconds": columns(PHASES, FIRST_PHASE),
        "wait_seconds": columns(WAIT_AXES, FIRST_WAIT), "memory_gib": (ranks[:, PEAK_MEMORY] / gib).round(4).tolist(),
        "memory_by_kind_gib": columns(MEMORY_KINDS, PEAK_MEMORY + 1, gib),
    }  # fmt: skip


def find_slowest_rank(rows: np.ndarray) -> dict[str, Any]:
    """The rank, and its work, that took most above the median of all."""
    phases = rows[:, FIRST_PHASE:FIRST_WAIT]
    medians = np.sort(phases, axis=0)[(len(phases) - 1) // 2]
    rank, phase = np.unravel_index(int((phases - medians).argmax()), phases.shape)
    seconds, median = float(phases[rank, phase]), float(medians[phase])
    return {"rank": int(rank), "phase": PHASES[phase], "seconds": round(seconds, 6), "median": round(median, 6)}


def find_alerts(rows: np.ndarray, peer_groups: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """What is wrong with some steps: a word for it, and a sentence."""
    found = []
    work, seconds = rows[:, FIRST_PHASE : FIRST_PHASE + 2].sum(1), np.maximum(rows[:, SECONDS], 1e-9)
    for group in peer_groups:
        median = float(np.sort(work[list(group)])[(len(group) - 1) // 2])  # of two the quicker
        for rank in group:
            excess = float(work[rank]) - median
            if work[rank] > STRAGGLER_RATIO * median and excess > ALERT_SHARE * seconds[rank]:
                slowdown = f"{work[rank] / max(median, 1e-9):.1f} times as long as those that do the same"
                cost = f"the others wait {100 * excess / seconds[rank]:.0f}% of a step for it"
                found.append((f"straggler {rank}", f"rank {rank} computes {slowdown}: {cost}."))
    data_shares = rows[:, FIRST_PHASE + PHASES.index("data")] / seconds
    rank = int(data_shares.argmax())
    if data_shares[rank] > ALERT_SHARE:
        message = f"rank {rank} spends {100 * data_shares[rank]:.0f}% of its steps waiting for data"
        found.append((f"data {rank}", f"{message}; more data.workers would help, or a faster source."))
    return found


def clock_offset(ranks: Axis, device: torch.device, rounds: int = 8) -> float:
    """How far this rank's clock is ahead of that of rank 0: a collective ends for all at about the same time. 0 where
    it is less than what that is off by itself."""
    sent = torch.zeros(1, dtype=torch.float64, device=device)
    received = sent.repeat(ranks.size)
    offsets = []
    for _ in range(rounds):
        all_gather(received, sent, axis=ranks)
        received.cpu()  # the collective is over
        sent.fill_(time.time())
        all_gather(received, sent, axis=ranks)
        times = received.tolist()
        offsets.append(times[ranks.index] - times[0])
    offset = statistics.median(offsets)
    return offset if abs(offset) > max(offsets) - min(offsets) else 0.0


def memory_by_kind(tensors_by_kind: dict[str, Sequence[Any]]) -> dict[str, float]:
    """Bytes of tensors by what they are; memory that several share counts once, for the first."""
    seen: set[int] = set()
    totals = dict.fromkeys(tensors_by_kind, 0.0)
    for kind, tensors in tensors_by_kind.items():
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                totals[kind] += storage.nbytes()
    return totals
