"""Simulates a pipeline step, using the same order of actions that the runtime executes.

The order comes from PyTorch's schedule classes (`shardwise.parallel.torch_pipelining.schedule_actions`) or from
`shardwise.schedules.synthesize`. Each rank runs its actions one after the other. A forward waits for the forward of the
previous stage, a backward for the backward of the next stage.

`build_program` sorts the actions topologically; `simulate` is then one pass over plain lists. Programs of named
schedules are cached by (schedule, ranks, virtual stages, micro-batches), so a search builds each only once.

`lower_bound` and `peaks_in_flight` give a bound of a step's time, and micro-batches in flight at its memory
peaks, in closed form: this takes microseconds, so the planner's search can call them for every layout. The bound holds
for any stages: no schedule is faster than the time before a rank can start, its own work and the time that other ranks
need after it. The counts were derived from simulated schedules."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.layout import FULL_BACKWARD, V_SHAPED

if TYPE_CHECKING:  # imports torch, which the simulator does without
    from shardwise.parallel.torch_pipelining import PipelineOrder

KINDS = ("F", "I", "W", "B")  # in the order of `simulate`'s list of costs
InFlightCounts = tuple[tuple[int, ...], tuple[int, ...]]
PeakCounts = tuple[InFlightCounts, ...]
"""Per stage of a rank: micro-batches before their backward, and micro-batches whose weight gradients are pending."""


class Action(NamedTuple):
    """One action of one rank. Field order and kind letters match PyTorch's `_Action`, so either type can be used."""

    stage: int
    kind: str  # F: forward, I: backward-input, W: backward-weight, B: full backward
    micro_batch: int
    sub_actions: tuple[Any, ...] | None = None  # a forward and a backward; results are sent when both are done


class TimelineEvent(NamedTuple):
    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class StageCosts:
    """Seconds per micro-batch, by stage."""

    forward: Sequence[float]
    backward_input: Sequence[float]  # computes the gradient of the stage's input
    backward_weight: Sequence[float]  # computes the gradients of the stage's weights; a full backward does both

    @property
    def stages(self) -> int:
        return len(self.forward)

    def as_executed(self) -> "StageCosts":
        """Returns the costs as PyTorch runs it: the first stage has no input gradient; its backward-weight does all."""
        full_backward = self.backward_input[0] + self.backward_weight[0]
        return StageCosts(self.forward, (0.0, *self.backward_input[1:]), (full_backward, *self.backward_weight[1:]))


@dataclass(frozen=True)
class PipelineProgram:
    """An order of actions, topologically sorted."""

    ranks: int
    stages: int
    stage_to_rank: tuple[int, ...]  # the rank of each stage
    actions: list[Action]
    instructions: list[tuple[int, int, int]]  # rank, index of the cost, index of the instruction before it (-1: none)

    @property
    def order(self) -> dict[int, list[Action]]:
        """Returns the actions by rank, with forward-backward pairs split up."""
        rows: dict[int, list[Action]] = {rank: [] for rank in range(self.ranks)}
        for (rank, *_), action in zip(self.instructions, self.actions):
            rows[rank].append(action)
        return rows

    @cached_property
    def table_indices(self) -> tuple[list[int], list[int]]:
        """Row (kind and stage) and column (micro-batch) of each action in a table of them."""
        return [cost for _, cost, _ in self.instructions], [action.micro_batch for action in self.actions]

    def peak_in_flight(self, rank: int) -> PeakCounts:
        """Returns the Pareto-maximal counts of a rank's schedule: no others are at least as high in every one."""
        stages = [stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank]
        in_flight, pending_weight = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        peaks: set[InFlightCounts] = set()
        for stage, kind, *_ in self.order[rank]:
            if kind == "W":
                pending_weight[stage] -= 1
                continue
            in_flight[stage] += 1 if kind == "F" else -1
            pending_weight[stage] += kind == "I"
            peaks.add((tuple(in_flight.values()), tuple(pending_weight.values())))
        flat = {(*live, *pending): (live, pending) for live, pending in peaks}
        beaten = {low for low in flat for high in flat if high != low and all(a >= b for a, b in zip(high, low))}
        return tuple(flat[counts] for counts in sorted(flat.keys() - beaten, reverse=True))

    def peak_memory(self, sizes: Sequence[float], retained_fraction: float = 1.0) -> tuple[float, ...]:
        """Returns the peak memory by rank if a micro-batch in flight takes `sizes[stage]`. A forward allocates it; a
        full backward or a backward-weight frees it. After a backward-input `retained_fraction` of it remains: 1 in
        PyTorch, which keeps the graph until the backward-weight."""
        change = {"F": 1.0, "B": -1.0, "I": retained_fraction - 1.0, "W": -retained_fraction}
        held, most = [0.0] * self.ranks, [0.0] * self.ranks
        for (rank, *_), (stage, kind, *_) in zip(self.instructions, self.actions):
            held[rank] += change[kind] * sizes[stage]
            if held[rank] > most[rank]:
                most[rank] = held[rank]
        return tuple(most)


@dataclass(frozen=True)
class Simulation:
    program: PipelineProgram
    start_times: list[float]
    end_times: list[float]

    @cached_property
    def seconds(self) -> float:
        return max(self.end_times)

    @property
    def timeline(self) -> list[TimelineEvent]:
        parts = zip(self.program.instructions, self.program.actions, self.start_times, self.end_times)
        return [TimelineEvent(rank, a.kind, a.stage, a.micro_batch, start, end) for (rank, *_), a, start, end in parts]


def simulate(program: PipelineProgram, costs: StageCosts) -> Simulation:
    """Simulates a program. Transfers take no time of their own: the planner adds them to the stages' work."""
    counts = len(costs.forward), len(costs.backward_input), len(costs.backward_weight)
    if set(counts) != {program.stages}:
        raise LayoutError(f"got costs of {counts} stages for a schedule of {program.stages}; give one per stage.")
    full_backward = [i + w for i, w in zip(costs.backward_input, costs.backward_weight)]
    seconds = [*costs.forward, *costs.backward_input, *costs.backward_weight, *full_backward]
    count = len(program.instructions)
    starts, ends, free_at = [0.0] * count, [0.0] * (count + 1), [0.0] * program.ranks
    # The last entry of `ends` stays 0: actions without a dependency (-1) read it.
    for i, (rank, cost, depends_on) in enumerate(program.instructions):
        start, ready = free_at[rank], ends[depends_on]
        if ready > start:
            start = ready
        starts[i] = start
        free_at[rank] = ends[i] = start + seconds[cost]
    ends.pop()
    return Simulation(program, starts, ends)


def build_program(order: "PipelineOrder") -> PipelineProgram:
    """Sorts the actions of an order topologically. Raises LayoutError if the order deadlocks."""
    owner = {action[0]: rank for rank in order for part in order[rank] if part for action in part[3] or (part,)}
    stages = len(owner)
    queues = [deque(_rank_instructions(order[rank], stages)) for rank in range(len(order))]
    sent_at = {None: -1}  # the instruction that sends each result
    actions: list[Action] = []
    steps: list[tuple[int, int, int]] = []
    progressed = True
    while progressed:
        progressed = False
        for rank, queue in enumerate(queues):
            while queue and queue[0][1] in sent_at:
                action, waits_for, sends = queue.popleft()
                for result in sends:
                    sent_at[result] = len(steps)
                steps.append((rank, KINDS.index(action.kind) * stages + action.stage, sent_at[waits_for]))
                actions.append(action)
                progressed = True
    for rank, queue in enumerate(queues):
        if queue:
            raise LayoutError(f"the pipeline order deadlocks: rank {rank} waits with {len(queue)} actions left.")
    return PipelineProgram(len(queues), stages, tuple(owner[stage] for stage in range(stages)), actions, steps)


def _rank_instructions(parts: Sequence[Any], stages: int) -> Iterator[tuple[Action, Any, tuple[Any, ...]]]:
    """Yields a rank's actions, each with the result it waits for and those it sends."""
    for part in parts:
        deferred: tuple[Any, ...] = ()  # the result of a paired forward, which its backward sends
        for stage, letter, micro_batch, _ in (part[3] or (part,)) if part else ():
            waits_for, sends = None, deferred
            if letter == "F":
                waits_for, sends = ("F", stage - 1, micro_batch) if stage else None, (("F", stage, micro_batch),)
                if part[3]:
                    deferred, sends = sends, ()
            elif letter != "W":
                waits_for = ("F", stage, micro_batch) if stage == stages - 1 else ("B", stage + 1, micro_batch)
                sends = *deferred, ("B", stage, micro_batch)
            yield Action(stage, KINDS[KINDS.index(letter)], micro_batch), waits_for, sends


@lru_cache(maxsize=64)
def named_program(schedule: str, ranks: int, virtual: int, micro_batches: int) -> PipelineProgram:
    from shardwise.parallel.torch_pipelining import schedule_actions  # imports torch, which closed forms do without

    return build_program(schedule_actions(schedule, ranks, virtual, micro_batches))


def step_seconds(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Returns the simulated seconds of a step; simulates only until the schedule reaches its steady state. In the
    steady state every period (one micro-batch, or one round of them) repeats the actions of the previous period. Once
    all of them are delayed by the same time, they stay so, as their dependencies are. Each later one adds that."""
    period = 1 if schedule in ("1f1b", *V_SHAPED) else micro_batches // max(1, micro_batches // ranks)
    max_in_flight = 2 * max(ranks, period)  # upper bound on micro-batches in flight
    simulated = (4 * max_in_flight // period + 2) * period + micro_batches % period
    while schedule != "gpipe" and simulated < micro_batches:
        program = named_program(schedule, ranks, virtual, simulated)
        simulation = simulate(program, costs)
        table = np.full((len(KINDS) * program.stages, simulated), np.nan)
        table[program.table_indices] = simulation.end_times
        ends = table[~np.isnan(table).all(1), simulated // 2 - max_in_flight : simulated // 2 + max_in_flight]
        period_seconds = ends[:, period:] - ends[:, :-period]
        first = period_seconds[0, 0]
        if (abs(period_seconds - first)[~np.isnan(ends[:, period:])] <= 1e-9 * first).all():
            return simulation.seconds + float(first) * (micro_batches - simulated) / period
        simulated += 4 * max_in_flight // period * period
    return simulate(named_program(schedule, ranks, virtual, micro_batches), costs).seconds


def lower_bound(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Returns a lower bound of the seconds of a step. With equal stages, a schedule with full backwards takes as long,
    unless it has fewer micro-batches than ranks."""
    forward, backward, weight, m = costs.forward, costs.backward_input, costs.backward_weight, micro_batches
    if schedule in FULL_BACKWARD:
        backward, weight = [b + w for b, w in zip(backward, weight)], [0.0] * len(weight)
    both = _work_by_rank(schedule, [f + b for f, b in zip(forward, backward)], ranks)
    weights = _work_by_rank(schedule, weight, ranks)
    # Seconds of one micro-batch: in earlier ranks before this one's first stage and after it, and in all later stages.
    lead_in, lead_out, later = 0.0, 0.0, sum(forward) + sum(backward)
    best = later + (m - 1) * forward[0] + weight[0]  # the path of the last micro-batch
    for rank, (f, b) in enumerate(zip(forward[:ranks], backward)):
        own_weights, after = m * weights[rank], lead_out + weight[0] if rank else 0.0
        total = lead_in + m * both[rank] + (own_weights if own_weights > after else after)
        later -= f + b
        if schedule == "1f1b":  # a rank waits before its first backward, and again before its last ones
            waits = [max(0.0, later - (ranks - 1 - rank) * seconds) for seconds in (f, b)]
            total += max(waits) if m == ranks - rank else sum(waits)
        if total > best:
            best = total
        lead_in, lead_out = lead_in + f, lead_out + b
    return best


def _work_by_rank(schedule: str, seconds: Sequence[float], ranks: int) -> Sequence[float]:
    if schedule in V_SHAPED:
        return [a + b for a, b in zip(seconds[:ranks], reversed(seconds))]
    return seconds if len(seconds) == ranks else [sum(seconds[rank::ranks]) for rank in range(ranks)]


@lru_cache(maxsize=4096)
def peaks_in_flight(schedule: str, p: int, v: int, r: int, m: int) -> PeakCounts:
    """Returns the candidates for the memory peak of rank `r` of `p` with `v` stages each and `m` micro-batches."""
    none = (0,) * v
    if p == 1:
        return (((1,), (0,)),)
    if schedule == "gpipe":
        return (((m,), none),)
    if schedule == "1f1b":
        return (((min(m, p - r),), none),)
    if schedule == "interleaved":
        return tuple((live, none) for live in _interleaved_in_flight(p, v, r, m))
    if schedule == "zero-bubble":
        return tuple(_zero_bubble_in_flight(p, v, r, m))
    # V-shaped: the steady state, then the drain with pending weight gradients.
    steady = ((2 * p - 1 - r, r + 1), (2 * p - r, r)) if schedule == "zbv" else ((2 * p - r, r + 1),)
    pending = (r + 1, r) if schedule == "zbv" else ((r + 2) // 2, (r + 1) // 2)
    drain = (min(m, p - 1 - r), 0), (min(m, pending[0]), min(m, pending[1]))
    peaks = [((min(m, first), min(m, last)), none) for first, last in steady]
    return *peaks, drain, ((min(m, 2 * p - 1 - r), min(m, r)), (0, 1))


def _interleaved_in_flight(p: int, v: int, r: int, m: int) -> Iterator[tuple[int, ...]]:
    """Yields the maximal counts. Forwards visit the stages in rounds; after the warm-up forwards and backwards
    alternate, and backwards visit the stages in rounds in reverse order."""
    size, total = m // max(1, m // p), m * v  # of a round, of all
    warmup = min(total, (p - 1 - r) * 2 + (v - 1) * size)
    live = [0] * v
    counts: set[tuple[int, ...]] = set()
    for step in range(min(total, warmup + 2 * size * v)):
        live[step // size % v] += 1
        if step >= warmup:
            if {step % size, (step - warmup) % size} & {0, size - 1}:  # between these, counts change monotonically
                counts.add(tuple(live))
            live[v - 1 - (step - warmup) // size % v] -= 1
    counts.add(tuple(live))
    for count in counts:
        if not any(other != count and all(a >= b for a, b in zip(other, count)) for other in counts):
            yield count


def _zero_bubble_in_flight(p: int, v: int, r: int, m: int) -> Iterator[InFlightCounts]:
    """Yields the counts: all ranks hold equally many micro-batches, later ranks more with pending weight gradients."""
    size = m // max(1, m // p)
    for extra in {0, size if m > size and v > 1 else 0}:
        live = [size] * v
        live[0], live[-1] = live[0] + extra, live[-1] - extra
        for pending_total in (min(r, m), min(r + 1, m)):
            for order in {tuple(range(v)), tuple(reversed(range(v)))}:
                left, rest, pending = pending_total, list(live), [0] * v
                for stage in order:
                    taken = min(left, rest[stage])
                    left, rest[stage], pending[stage] = left - taken, rest[stage] - taken, taken
                yield tuple(rest), tuple(pending)
