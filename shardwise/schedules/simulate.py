"""A pipeline step in simulated time, by the very order of actions that the runtime executes.

The order comes from PyTorch's schedule classes (`shardwise.parallel.torch_pipelining.schedule_actions`) or from
`shardwise.schedules.synthesize`. A rank runs its actions one after the other. An action waits for what the neighbouring
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
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD = range(4)


class Action(NamedTuple):
    """One piece of work of one rank. Fields and letters are those of PyTorch's `_Action`; either can be read."""

    stage: int
    kind: str
    """F forward, I input half of a backward, W its weight half, B both."""
    micro_batch: int | None
    sub_actions: tuple[Any, ...] | None = None
    """A forward and a backward, run one after the other, whose results are sent when both are done."""


PipelineOrder = Mapping[int, Sequence[Any]]
"""Actions by rank, `Action` or `_Action`; None, an empty slot, is passed over."""


class TimelineEvent(NamedTuple):
    """One line of a timeline."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class StageCosts:
    """Seconds by stage."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    """The half of a backward that makes the gradients of the stage's input."""
    backward_weight: Sequence[float]
    """The half that makes the gradients of its weights. A full backward takes both."""
    transfer: Sequence[float]
    """From each stage to the next, and back; one fewer than stages. Nothing between stages of one rank."""

    def __post_init__(self) -> None:
        counts = len(self.forward), len(self.backward_input), len(self.backward_weight), len(self.transfer) + 1
        if len(set(counts)) > 1:
            raise LayoutError(f"forward, input, weight and transfers are of {counts} stages; give all for as many.")

    @classmethod
    def uniform(
        cls, stages: int, forward: float, backward_input: float, backward_weight: float, transfer: float = 0.0
    ) -> StageCosts:
        return cls(
            (forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages, (transfer,) * (stages - 1)
        )

    @property
    def stages(self) -> int:
        return len(self.forward)

    def as_executed(self) -> StageCosts:
        """With the halves of the first stage as PyTorch runs them: it needs no gradient of its input, so its input half
        does nothing and its weight half does all."""
        full_backward = self.backward_input[0] + self.backward_weight[0]
        return replace(
            self,
            backward_input=(0.0, *self.backward_input[1:]),
            backward_weight=(full_backward, *self.backward_weight[1:]),
        )


@dataclass(frozen=True)
class PipelineProgram:
    """An order of actions, sorted so that each comes after what it waits for."""

    ranks: int
    stages: int
    stage_to_rank: tuple[int, ...]
    """The rank of each stage."""
    actions: list[tuple[int, int, int, int]]
    """Rank, kind (a place in `KINDS`), stage, micro-batch."""
    instructions: list[tuple[int, int, int, int]]
    """Rank, place of the cost, the step that is waited for (-1: none), place of the transfer."""

    @property
    def order(self) -> dict[int, list[Action]]:
        """The actions by rank again, pairs taken apart."""
        rows: dict[int, list[Action]] = {rank: [] for rank in range(self.ranks)}
        for index, (rank, *_) in enumerate(self.actions):
            rows[rank].append(self.action(index))
        return rows

    def action(self, index: int) -> Action:
        _, kind, stage, micro_batch = self.actions[index]
        return Action(stage, KINDS[kind], micro_batch)

    @cached_property
    def table_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each action: its kind and stage as one number, its micro-batch."""
        _, kinds, stages, micro_batches = np.array(self.actions).T
        return kinds * self.stages + stages, micro_batches

    @cached_property
    def max_in_flight(self) -> tuple[int, ...]:
        """By stage, the most micro-batches whose activations are held at once."""
        held, most = [0] * self.stages, [0] * self.stages
        for _, kind, stage, _ in self.actions:
            if kind == FORWARD:
                held[stage] += 1
                if held[stage] > most[stage]:
                    most[stage] = held[stage]
            elif kind != BACKWARD_INPUT:
                held[stage] -= 1
        return tuple(most)

    def peak_in_flight(self, rank: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The fullest points of a rank, most in flight first: by its stages, micro-batches before their backward and
        between its halves."""
        stages = [stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank]
        in_flight, pending_weight = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        peaks: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for place, kind, stage, _ in self.actions:
            if place != rank:
                continue
            if kind == BACKWARD_WEIGHT:
                pending_weight[stage] -= 1
                continue
            in_flight[stage] += 1 if kind == FORWARD else -1
            pending_weight[stage] += kind == BACKWARD_INPUT
            peaks.add((tuple(in_flight.values()), tuple(pending_weight.values())))
        flat = {point: (*point[0], *point[1]) for point in peaks}
        return tuple(
            point for point, one in sorted(flat.items(), reverse=True)
            if not any(other != one and all(a >= b for a, b in zip(other, one)) for other in flat.values())
        )  # fmt: skip

    def peak_memory(self, sizes: Sequence[float], retained_fraction: float = 1.0) -> tuple[float, ...]:
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
            elif kind == FULL_BACKWARD:
                held[rank] -= sizes[stage]
            elif kind == BACKWARD_INPUT:
                held[rank] -= sizes[stage] * (1.0 - retained_fraction)
                if held[rank] > most[rank]:
                    most[rank] = held[rank]
            else:
                held[rank] -= sizes[stage] * retained_fraction
        return tuple(most)


@dataclass(frozen=True)
class Simulation:
    """When everything happens."""

    program: PipelineProgram
    start_times: list[float]
    end_times: list[float]
    rank_end_times: tuple[float, ...]
    """By rank, the end of its last action."""

    @cached_property
    def seconds(self) -> float:
        return max(self.rank_end_times)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """By rank, the share of the whole time in which it computes nothing."""
        busy = [0.0] * self.program.ranks
        for (rank, *_), start, end in zip(self.program.actions, self.start_times, self.end_times):
            busy[rank] += end - start
        return tuple(1.0 - time / self.seconds for time in busy)

    def end_time_table(self, count: int) -> np.ndarray:
        """Ends by kind and stage, and by micro-batch; not a number where there is no such action."""
        table = np.full((len(KINDS) * self.program.stages, count), np.nan)
        table[self.program.table_indices] = self.end_times
        return table[~np.isnan(table).all(1)]

    @property
    def timeline(self) -> list[TimelineEvent]:
        parts = zip(self.program.actions, self.start_times, self.end_times)
        return [
            TimelineEvent(rank, KINDS[kind], stage, mb, start, end) for (rank, kind, stage, mb), start, end in parts
        ]


def simulate(program: PipelineProgram, costs: StageCosts, overlap_p2p: bool = True) -> Simulation:
    """Runs a program.

    Overlapped, what a rank sends travels while sender and receiver compute. Otherwise a transfer begins only when the
    receiver has nothing else to do, as PyTorch's own GPipe and 1F1B do, which ask for an input just before they use it.
    """
    if costs.stages != program.stages:
        raise LayoutError(f"costs of {costs.stages} stages for a schedule of {program.stages}; give one per stage.")
    full_backward = [i + w for i, w in zip(costs.backward_input, costs.backward_weight)]
    seconds = [*costs.forward, *costs.backward_input, *costs.backward_weight, *full_backward]
    hops = [0.0, *_transfer_seconds(program.stage_to_rank, costs.transfer)]
    count = len(program.instructions)
    starts, ends, free_at = [0.0] * count, [0.0] * (count + 1), [0.0] * program.ranks
    # The last of `ends` stays 0: it is what an action that waits for nothing (-1) waits for.
    if overlap_p2p:
        for i, (rank, cost, depends_on, transfer) in enumerate(program.instructions):
            start, ready = free_at[rank], ends[depends_on] + hops[transfer]
            if ready > start:
                start = ready
            starts[i] = start
            free_at[rank] = ends[i] = start + seconds[cost]
    else:
        for i, (rank, cost, depends_on, transfer) in enumerate(program.instructions):
            start, ready = free_at[rank], ends[depends_on]
            starts[i] = start = (ready if ready > start else start) + hops[transfer]
            free_at[rank] = ends[i] = start + seconds[cost]
    ends.pop()
    return Simulation(program, starts, ends, tuple(free_at))


def _transfer_seconds(owner: Sequence[int], transfer: Sequence[float]) -> list[float]:
    return [0.0 if here == there else seconds for here, there, seconds in zip(owner, owner[1:], transfer)]


# Rank, kind (a place in KINDS), stage, micro-batch.
ActionKey = tuple[int, int, int, int]
# The action; places of its cost and its transfer; numbers of the results that it waits for, makes, and sends as well.
Instruction = tuple[ActionKey, int, int, int, int, int]


def build_program(order: PipelineOrder) -> PipelineProgram:
    """Checks an order and sorts its actions. Raises where it cannot run to its end."""
    owner = {action[0]: rank for rank in order for part in order[rank] if part for action in part[3] or (part,)}
    stages, width = len(owner), max(len(order[rank]) for rank in order)
    queues = [_rank_instructions(rank, order[rank], stages, width) for rank in range(len(order))]
    # Results by number: the step at whose end they are sent. The last two: nothing made, nothing to wait for.
    sent_at: list[int | None] = [*[None] * (2 * stages * width + 1), -1]
    actions: list[ActionKey] = []
    steps: list[tuple[int, int, int, int]] = []
    positions = [0] * len(queues)
    progressed = True
    while progressed:
        progressed = False
        for rank, queue in enumerate(queues):
            position = positions[rank]
            while position < len(queue):
                action, cost, hop, waits_for, produces, also_sends = queue[position]
                before = sent_at[waits_for]
                if before is None:
                    break
                sent_at[produces] = sent_at[also_sends] = len(steps)
                steps.append((rank, cost, before, hop))
                actions.append(action)
                position += 1
            progressed = progressed or position > positions[rank]
            positions[rank] = position
    for rank, queue in enumerate(queues):
        if positions[rank] < len(queue):
            raise LayoutError(
                f"rank {rank} waits for ever at action {positions[rank]} of the {len(queue)} of its order."
            )
    return PipelineProgram(len(queues), stages, tuple(owner[stage] for stage in range(stages)), actions, steps)


def _rank_instructions(rank: int, parts: Sequence[Any], stages: int, width: int) -> list[Instruction]:
    """A rank's actions with results numbered by stage and micro-batch, of which there are fewer than `width`."""
    no_wait, no_result, last = -1, -2, stages - 1
    tasks: list[Instruction] = []
    for part in parts:
        if part is None:
            continue
        deferred = no_result
        for stage, letter, micro_batch, _ in part[3] or (part,):
            forward, backward = stage * width + micro_batch, (stages + stage) * width + micro_batch
            if letter == "F":
                kind, waits_for, hop, produces = FORWARD, forward - width if stage else no_wait, stage, forward
                if part[3]:  # sent by the backward that follows
                    deferred, produces = produces, no_result
                tasks.append(((rank, kind, stage, micro_batch), stage, hop, waits_for, produces, no_result))
                continue
            kind = BACKWARD_WEIGHT if letter == "W" else BACKWARD_INPUT if letter == "I" else FULL_BACKWARD
            if kind == BACKWARD_WEIGHT:
                waits_for, hop, produces = no_wait, 0, no_result
            elif stage == last:
                waits_for, hop, produces = forward, 0, backward
            else:
                waits_for, hop, produces = backward + width, stage + 1, backward
            tasks.append(((rank, kind, stage, micro_batch), kind * stages + stage, hop, waits_for, produces, deferred))
    return tasks


@lru_cache(maxsize=64)
def named_program(schedule: str, ranks: int, virtual: int, micro_batches: int) -> PipelineProgram:
    """The program of a schedule with a name."""
    from shardwise.parallel.torch_pipelining import schedule_actions  # brings torch, which closed forms can do without

    return build_program(schedule_actions(schedule, ranks, virtual, micro_batches))


# Many micro-batches


def step_seconds(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Seconds of a step by simulation, of as many micro-batches as it takes until each period is like the last.

    In the steady part of a schedule every period (one micro-batch, or one round of them) repeats the actions of the one
    before. Once all of them come later by the same time, they always will: each waits for what came later by it too. So
    the periods that are left out add as many times that.
    """
    period = 1 if schedule in ("1f1b", *V_SHAPED) else micro_batches // max(1, micro_batches // ranks)
    max_in_flight = 2 * max(ranks, period)  # no micro-batch is in flight for longer
    simulated = (4 * max_in_flight // period + 2) * period + micro_batches % period
    while schedule != "gpipe" and simulated < micro_batches:
        program = named_program(schedule, ranks, virtual, simulated)
        simulation = simulate(program, costs)
        ends = simulation.end_time_table(simulated)[:, simulated // 2 - max_in_flight : simulated // 2 + max_in_flight]
        period_seconds = ends[:, period:] - ends[:, :-period]
        first = period_seconds[0, 0]
        if (abs(period_seconds - first)[~np.isnan(ends[:, period:])] <= 1e-9 * first).all():
            return simulation.seconds + float(first) * (micro_batches - simulated) / period
        simulated += 4 * max_in_flight // period * period
    return simulate(named_program(schedule, ranks, virtual, micro_batches), costs).seconds
