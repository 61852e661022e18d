"""A pipeline step in simulated time, by the very order of actions that the runtime executes.

The order comes from PyTorch's schedule classes (`shardwise.parallel.pipeline.named_order`) or from
`shardwise.planner.synthesize`. A rank runs its actions one after the other. An action waits for what the neighbouring
stage makes for it: a forward for the forward of the stage before, a backward for that of the stage after.

`read` sorts the actions once so that each comes after what it waits for; `simulate` is then one pass over plain lists.
The sorted form is kept per (schedule, ranks, virtual stages, micro-batches), so that a search pays for it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.layout import V_SHAPED

KINDS = ("F", "I", "W", "B")
FORWARD, INPUT, WEIGHT, FULL = range(4)


class Action(NamedTuple):
    """One piece of work of one rank. Fields and letters are those of PyTorch's `_Action`; either can be read."""

    stage: int
    kind: str
    """F forward, I input half of a backward, W its weight half, B both."""
    micro_batch: int | None
    pair: tuple[Any, ...] | None = None
    """A forward and a backward, run one after the other, whose results are sent when both are done."""


Order = Mapping[int, Sequence[Any]]
"""Actions by rank, `Action` or `_Action`; None, an empty slot, is passed over."""


class Event(NamedTuple):
    """One line of a timeline."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """Seconds by stage."""

    forward: Sequence[float]
    input: Sequence[float]
    """The half of a backward that makes the gradients of the stage's input."""
    weight: Sequence[float]
    """The half that makes the gradients of its weights. A full backward takes both."""
    transfer: Sequence[float]
    """From each stage to the next, and back; one fewer than stages. Nothing between stages of one rank."""

    def __post_init__(self) -> None:
        counts = len(self.forward), len(self.input), len(self.weight), len(self.transfer) + 1
        if len(set(counts)) > 1:
            raise LayoutError(f"forward, input, weight and transfers are of {counts} stages; give all for as many.")

    @classmethod
    def even(cls, stages: int, forward: float, input: float, weight: float, transfer: float = 0.0) -> Costs:
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, (transfer,) * (stages - 1))

    @property
    def stages(self) -> int:
        return len(self.forward)

    def as_executed(self) -> Costs:
        """With the halves of the first stage as PyTorch runs them: it needs no gradient of its input, so its input half
        does nothing and its weight half does all."""
        whole = self.input[0] + self.weight[0]
        return replace(self, input=(0.0, *self.input[1:]), weight=(whole, *self.weight[1:]))


@dataclass(frozen=True)
class Program:
    """An order of actions, sorted so that each comes after what it waits for."""

    ranks: int
    stages: int
    owner: tuple[int, ...]
    """The rank of each stage."""
    actions: list[tuple[int, int, int, int]]
    """Rank, kind (a place in `KINDS`), stage, micro-batch."""
    steps: list[tuple[int, int, int, int]]
    """Rank, place of the cost, the step that is waited for (-1: none), place of the transfer."""

    @property
    def order(self) -> dict[int, list[Action]]:
        """The actions by rank again, pairs taken apart."""
        rows: dict[int, list[Action]] = {rank: [] for rank in range(self.ranks)}
        for place, (rank, *_) in enumerate(self.actions):
            rows[rank].append(self.action(place))
        return rows

    def action(self, place: int) -> Action:
        _, kind, stage, micro_batch = self.actions[place]
        return Action(stage, KINDS[kind], micro_batch)

    @cached_property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each action: its kind and stage as one number, its micro-batch."""
        _, kinds, stages, micro_batches = np.array(self.actions).T
        return kinds * self.stages + stages, micro_batches

    @cached_property
    def live(self) -> tuple[int, ...]:
        """By stage, the most micro-batches whose activations are held at once."""
        held, most = [0] * self.stages, [0] * self.stages
        for _, kind, stage, _ in self.actions:
            if kind == FORWARD:
                held[stage] += 1
                if held[stage] > most[stage]:
                    most[stage] = held[stage]
            elif kind != INPUT:
                held[stage] -= 1
        return tuple(most)

    def flights(self, rank: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The fullest points of a rank, most in flight first: by its stages, micro-batches before their backward and
        between its halves."""
        stages = [stage for stage, owner in enumerate(self.owner) if owner == rank]
        live, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for place, kind, stage, _ in self.actions:
            if place != rank:
                continue
            if kind == WEIGHT:
                waiting[stage] -= 1
                continue
            live[stage] += 1 if kind == FORWARD else -1
            waiting[stage] += kind == INPUT
            found.add((tuple(live.values()), tuple(waiting.values())))
        flat = {point: (*point[0], *point[1]) for point in found}
        return tuple(
            point for point, one in sorted(flat.items(), reverse=True)
            if not any(other != one and all(a >= b for a, b in zip(other, one)) for other in flat.values())
        )  # fmt: skip

    def peak(self, sizes: Sequence[float], kept: float = 1.0) -> tuple[float, ...]:
        """By rank, the most that its stages hold at once, where a micro-batch in flight holds `sizes[stage]`.

        A forward takes it, a full backward or a weight half frees it. After an input half the share `kept` is still
        held; PyTorch keeps the whole graph until the weight half, so it is 1 there.
        """
        held, most = [0.0] * self.ranks, [0.0] * self.ranks
        for rank, kind, stage, _ in self.actions:
            if kind == FORWARD:
                held[rank] += sizes[stage]
                if held[rank] > most[rank]:
                    most[rank] = held[rank]
            elif kind == FULL:
                held[rank] -= sizes[stage]
            elif kind == INPUT:
                held[rank] -= sizes[stage] * (1.0 - kept)
                if held[rank] > most[rank]:
                    most[rank] = held[rank]
            else:
                held[rank] -= sizes[stage] * kept
        return tuple(most)


@dataclass(frozen=True)
class Simulation:
    """When everything happens."""

    program: Program
    starts: list[float]
    ends: list[float]
    finish: tuple[float, ...]
    """By rank, the end of its last action."""

    @cached_property
    def seconds(self) -> float:
        return max(self.finish)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """By rank, the share of the whole time in which it computes nothing."""
        busy = [0.0] * self.program.ranks
        for (rank, *_), start, end in zip(self.program.actions, self.starts, self.ends):
            busy[rank] += end - start
        return tuple(1.0 - time / self.seconds for time in busy)

    def by_micro_batch(self, count: int) -> np.ndarray:
        """Ends by kind and stage, and by micro-batch; not a number where there is no such action."""
        table = np.full((len(KINDS) * self.program.stages, count), np.nan)
        table[self.program.cells] = self.ends
        return table[~np.isnan(table).all(1)]

    @property
    def timeline(self) -> list[Event]:
        parts = zip(self.program.actions, self.starts, self.ends)
        return [Event(rank, KINDS[kind], stage, mb, start, end) for (rank, kind, stage, mb), start, end in parts]


def simulate(program: Program, costs: Costs, overlapped: bool = True) -> Simulation:
    """Runs a program.

    Overlapped, what a rank sends travels while sender and receiver compute. Otherwise a transfer begins only when the
    receiver has nothing else to do, as PyTorch's own GPipe and 1F1B do, which ask for an input just before they use it.
    """
    if costs.stages != program.stages:
        raise LayoutError(f"costs of {costs.stages} stages for a schedule of {program.stages}; give one per stage.")
    whole = [i + w for i, w in zip(costs.input, costs.weight)]
    seconds = [*costs.forward, *costs.input, *costs.weight, *whole]
    hops = [0.0, *_hops(program.owner, costs.transfer)]
    count = len(program.steps)
    starts, ends, free = [0.0] * count, [0.0] * (count + 1), [0.0] * program.ranks
    # The last of `ends` stays 0: it is what an action that waits for nothing (-1) waits for.
    if overlapped:
        for i, (rank, cost, before, hop) in enumerate(program.steps):
            start, ready = free[rank], ends[before] + hops[hop]
            if ready > start:
                start = ready
            starts[i] = start
            free[rank] = ends[i] = start + seconds[cost]
    else:
        for i, (rank, cost, before, hop) in enumerate(program.steps):
            start, ready = free[rank], ends[before]
            starts[i] = start = (ready if ready > start else start) + hops[hop]
            free[rank] = ends[i] = start + seconds[cost]
    ends.pop()
    return Simulation(program, starts, ends, tuple(free))


def _hops(owner: Sequence[int], transfer: Sequence[float]) -> list[float]:
    return [0.0 if here == there else seconds for here, there, seconds in zip(owner, owner[1:], transfer)]


# Rank, kind (a place in KINDS), stage, micro-batch.
Done = tuple[int, int, int, int]
# The action; places of its cost and its transfer; numbers of the results that it waits for, makes, and sends as well.
Task = tuple[Done, int, int, int, int, int]


def read(order: Order) -> Program:
    """Checks an order and sorts its actions. Raises where it cannot run to its end."""
    owner = {action[0]: rank for rank in order for part in order[rank] if part for action in part[3] or (part,)}
    stages, width = len(owner), max(len(order[rank]) for rank in order)
    queues = [_tasks(rank, order[rank], stages, width) for rank in range(len(order))]
    # Results by number: the step at whose end they are sent. The last two: nothing made, nothing to wait for.
    sent: list[int | None] = [*[None] * (2 * stages * width + 1), -1]
    actions: list[Done] = []
    steps: list[tuple[int, int, int, int]] = []
    places = [0] * len(queues)
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            place = places[rank]
            while place < len(queue):
                action, cost, hop, waits, makes, also = queue[place]
                before = sent[waits]
                if before is None:
                    break
                sent[makes] = sent[also] = len(steps)
                steps.append((rank, cost, before, hop))
                actions.append(action)
                place += 1
            moved = moved or place > places[rank]
            places[rank] = place
    for rank, queue in enumerate(queues):
        if places[rank] < len(queue):
            raise LayoutError(f"rank {rank} waits for ever at action {places[rank]} of the {len(queue)} of its order.")
    return Program(len(queues), stages, tuple(owner[stage] for stage in range(stages)), actions, steps)


def _tasks(rank: int, parts: Sequence[Any], stages: int, width: int) -> list[Task]:
    """A rank's actions with results numbered by stage and micro-batch, of which there are fewer than `width`."""
    none, nothing, last = -1, -2, stages - 1
    tasks: list[Task] = []
    for part in parts:
        if part is None:
            continue
        held = nothing
        for stage, letter, micro_batch, _ in part[3] or (part,):
            forward, backward = stage * width + micro_batch, (stages + stage) * width + micro_batch
            if letter == "F":
                kind, waits, hop, makes = FORWARD, forward - width if stage else none, stage, forward
                if part[3]:  # sent by the backward that follows
                    held, makes = makes, nothing
                tasks.append(((rank, kind, stage, micro_batch), stage, hop, waits, makes, nothing))
                continue
            kind = WEIGHT if letter == "W" else INPUT if letter == "I" else FULL
            if kind == WEIGHT:
                waits, hop, makes = none, 0, nothing
            elif stage == last:
                waits, hop, makes = forward, 0, backward
            else:
                waits, hop, makes = backward + width, stage + 1, backward
            tasks.append(((rank, kind, stage, micro_batch), kind * stages + stage, hop, waits, makes, held))
    return tasks


@lru_cache(maxsize=64)
def named(schedule: str, ranks: int, virtual: int, micro_batches: int) -> Program:
    """The program of a schedule with a name."""
    from shardwise.parallel.pipeline import named_order  # brings torch, which closed forms can do without

    return read(named_order(schedule, ranks, virtual, micro_batches))


# Many micro-batches


def step_seconds(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: Costs) -> float:
    """Seconds of a step by simulation, of as many micro-batches as it takes until each period is like the last.

    In the steady part of a schedule every period (one micro-batch, or one round of them) repeats the actions of the one
    before. Once all of them come later by the same time, they always will: each waits for what came later by it too. So
    the periods that are left out add as many times that.
    """
    length = 1 if schedule in ("1f1b", *V_SHAPED) else micro_batches // max(1, micro_batches // ranks)
    deep = 2 * max(ranks, length)  # no micro-batch is in flight for longer
    few = (4 * deep // length + 2) * length + micro_batches % length
    while schedule != "gpipe" and few < micro_batches:
        program = named(schedule, ranks, virtual, few)
        simulation = simulate(program, costs)
        ends = simulation.by_micro_batch(few)[:, few // 2 - deep : few // 2 + deep]
        later = ends[:, length:] - ends[:, :-length]
        first = later[0, 0]
        if (abs(later - first)[~np.isnan(ends[:, length:])] <= 1e-9 * first).all():
            return simulation.seconds + float(first) * (micro_batches - few) / length
        few += 4 * deep // length * length
    return simulate(named(schedule, ranks, virtual, micro_batches), costs).seconds
