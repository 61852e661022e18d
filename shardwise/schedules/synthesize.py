"""Synthesizes a pipeline schedule for uneven stages and a memory limit; named schedules assume even stages.

Stages are seldom even: the first has the embedding, the last the head, and layers do not divide evenly. `synthesize`
runs the list scheduler with many priority rules, then improves the best of them by local search. Named schedules that
fit are candidates too, so the result is never slower in simulation than the best of them. The search budget counts
simulated actions, not seconds, so every rank of a run finds the same schedule. `make_auto_schedule` states the problem
of a layout and checks the result with the memory model that every schedule is held to. The list scheduler starts each
action as soon as its inputs have arrived and its rank is free, in order of time. A free rank runs a forward while it is
below its in-flight limit and has memory, else a backward, else a backward-weight if it fits before the next input."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from math import ceil, inf
from random import Random

from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.layout import AUTO_SCHEDULES, V_SHAPED, Layout, micro_batch_error
from shardwise.schedules import simulate as simulator
from shardwise.schedules.simulate import Action, PeakCounts, PipelineProgram, Simulation, StageCosts, build_program

GAP_FRACTIONS = (0.0, 0.5, 1.0)
TOLERANCE = 2e-3  # the search stops within this fraction of the lower bound
MAX_TRIES, LIMIT_SHRINK = 6, 0.9
RankMemoryFn = Callable[[int, PeakCounts], float]  # the bytes that a rank needs with such counts


@dataclass(frozen=True)
class SchedulingProblem:
    costs: StageCosts
    ranks: int
    micro_batches: int
    activation_sizes: tuple[float, ...] = ()  # memory of a micro-batch in flight, by stage; default 1 for every stage
    memory_limits: tuple[float, ...] = ()  # memory limit by rank; default unlimited
    retained_fraction: float = 1.0  # of memory after backward-input (`PipelineProgram.peak_memory`); may exceed 1
    is_v_shaped: bool = False  # whether a rank's second stage is as far from the last as its first is from the first

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation_sizes", tuple(self.activation_sizes) or (1.0,) * self.costs.stages)
        object.__setattr__(self, "memory_limits", tuple(self.memory_limits) or (inf,) * self.ranks)

    @property
    def virtual(self) -> int:
        return self.costs.stages // self.ranks

    @property
    def stage_to_rank(self) -> list[int]:
        first_to_last = list(range(self.ranks))
        return first_to_last + first_to_last[::-1] if self.is_v_shaped else first_to_last * self.virtual

    def fits(self, program: PipelineProgram) -> bool:
        peaks = program.peak_memory(self.activation_sizes, self.retained_fraction)
        return all(peak <= limit * (1.0 + 1e-9) for peak, limit in zip(peaks, self.memory_limits))


@dataclass(frozen=True)
class PriorityRules:
    """How a rank chooses among actions whose inputs have arrived."""

    max_in_flight: tuple[int, ...]  # forwards ahead of backwards, by rank: below it forwards first, at it none
    min_gap_fraction: float = 0.0  # fraction of a backward-weight that must fit before the next input arrives
    later_stages_first: bool = True  # whether forwards of later stages have priority
    split_backward: bool = True


class ListScheduler:
    """Gives up where a rank's idle time puts its end after `deadline` seconds, or its memory exceeds its limit."""

    def __init__(self, problem: SchedulingProblem, rules: PriorityRules, deadline: float = inf):
        costs, stages, ranks, retained = problem.costs, problem.costs.stages, problem.ranks, problem.retained_fraction
        self.problem, self.rules = problem, rules
        self.stage_to_rank = problem.stage_to_rank
        self.stages_by_rank = [[s for s in range(stages) if self.stage_to_rank[s] == rank] for rank in range(ranks)]
        # By kind of action: seconds by stage, and the change of memory in activations of a micro-batch.
        full_backward = [i + w for i, w in zip(costs.backward_input, costs.backward_weight)]
        self.seconds = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight, "B": full_backward}
        self.memory_change = {"F": 1.0, "I": retained - 1.0, "W": -retained, "B": -1.0}
        # When the input of each stage's forward and backward arrives, by micro-batch.
        self.forward_ready_at = [[0.0 if s == 0 else inf] * problem.micro_batches for s in range(stages)]
        self.backward_ready_at = [[inf] * problem.micro_batches for _ in range(stages)]
        self.backward = "I" if rules.split_backward else "B"
        self.next = {kind: [0] * stages for kind in "FIWB"}  # micro-batch, by kind of action and stage
        self.pending_weights: list[deque[int]] = [deque() for _ in range(ranks)]  # stages, by rank
        self.in_flight = [0] * ranks
        self.memory_limits = [limit * (1.0 + 1e-9) for limit in problem.memory_limits]
        self.memory_used, self.free_at = [0.0] * ranks, [0.0] * ranks
        self.gave_up, self.is_exact = False, True  # whether it starts each action when a simulation does
        work = (sum(costs.forward[s] + full_backward[s] for s in own) for own in self.stages_by_rank)
        self.idle_left = [deadline * (1.0 + 1e-9) - problem.micro_batches * seconds for seconds in work]
        self.order: dict[int, list[Action]] = {rank: [] for rank in range(ranks)}
        self.events: list[tuple[float, int]] = []

    def run(self) -> dict[int, list[Action]] | None:
        """Returns each rank's actions, or None if the memory limits cause a deadlock or it gives up."""
        for rank in range(self.problem.ranks):
            heappush(self.events, (0.0, rank))
        while self.events and not self.gave_up:
            now, rank = heappop(self.events)
            if now >= self.free_at[rank]:
                self._schedule_next(rank, now)
        done = all(n == self.problem.micro_batches for n in self.next[self.backward]) and not any(self.pending_weights)
        return self.order if done and not self.gave_up else None

    def _schedule_next(self, rank: int, now: float) -> None:
        forward, forward_at, blocked = self._next_forward(rank, now)
        started, ended, backward_at, backward = self.next["F"], self.next[self.backward], inf, -1
        for stage in self.stages_by_rank[rank]:
            if ended[stage] < started[stage] and (at := self.backward_ready_at[stage][ended[stage]]) < backward_at:
                backward_at, backward = at, stage
        pending, next_input_at, costs = self.pending_weights[rank], min(forward_at, backward_at), self.problem.costs
        if forward_at <= now:
            self._start("F", rank, forward, now)
        elif blocked and pending:  # frees memory for the blocked forward
            self._start("W", rank, pending.popleft(), now)
        elif backward_at <= now:
            self._start(self.backward, rank, backward, now)
        elif pending and next_input_at - now >= self.rules.min_gap_fraction * costs.backward_weight[pending[0]]:
            self._start("W", rank, pending.popleft(), now)
        elif next_input_at < inf:
            heappush(self.events, (next_input_at, rank))

    def _next_forward(self, rank: int, now: float) -> tuple[int, float, bool]:
        """Returns the next stage to run, when its input arrives, and whether memory alone blocks another forward."""
        if self.in_flight[rank] >= self.rules.max_in_flight[rank]:
            return -1, inf, False
        room = self.memory_limits[rank] - self.memory_used[rank]
        first, first_at, blocked, ready = -1, inf, False, -1
        started, sizes = self.next["F"], self.problem.activation_sizes
        for stage in reversed(self.stages_by_rank[rank]):
            micro_batch = started[stage]
            if micro_batch < self.problem.micro_batches:
                at = self.forward_ready_at[stage][micro_batch]
                if sizes[stage] > room:
                    blocked |= at <= now
                elif at > now:
                    first, first_at = (stage, at) if at <= first_at else (first, first_at)
                elif ready < 0 or not self.rules.later_stages_first:
                    ready = stage
            room -= sizes[stage]  # reserve memory for this rank's later stages
        return (first, first_at, blocked) if ready < 0 else (ready, now, blocked)

    def _start(self, kind: str, rank: int, stage: int, now: float) -> None:
        """Starts an action on the next micro-batch of its kind and stage, and delivers its result to where it goes."""
        micro_batch, end, last = self.next[kind][stage], now + self.seconds[kind][stage], len(self.stage_to_rank) - 1
        self.next[kind][stage] += 1
        self.in_flight[rank] += 1 if kind == "F" else -(kind != "W")
        self.memory_used[rank] += self.memory_change[kind] * self.problem.activation_sizes[stage]
        self.order[rank].append(Action(stage, kind, micro_batch))
        if kind == "W" and now > self.free_at[rank]:  # a blocked forward made it wait, as in no simulation
            self.is_exact, self.idle_left = False, [inf] * len(self.idle_left)
        self.idle_left[rank] -= now - self.free_at[rank]
        self.free_at[rank] = end
        heappush(self.events, (end, rank))
        if kind == "I":
            self.pending_weights[rank].append(stage)
        if kind == "F" and stage == last:
            self.backward_ready_at[stage][micro_batch] = end
        elif kind == "F":
            self._deliver(self.forward_ready_at, stage + 1, micro_batch, end)
        elif kind != "W" and stage:
            self._deliver(self.backward_ready_at, stage - 1, micro_batch, end)
        self.gave_up |= self.idle_left[rank] < 0.0 or self.memory_used[rank] > self.memory_limits[rank]

    def _deliver(self, ready: list[list[float]], stage: int, micro_batch: int, at: float) -> None:
        ready[stage][micro_batch] = at
        rank = self.stage_to_rank[stage]
        heappush(self.events, (max(at, self.free_at[rank]), rank))


def synthesize(problem: SchedulingProblem, effort: int = 200_000) -> Simulation:
    """Returns the fastest schedule that it finds within memory. `effort`: simulated actions per phase of the search."""
    named = min(named_candidates(problem), key=lambda schedule: schedule.seconds, default=None)
    shape = "zbv" if problem.is_v_shaped else "zero-bubble", problem.ranks, problem.virtual, problem.micro_batches
    floor = simulator.lower_bound(*shape, problem.costs) * (1 + TOLERANCE)
    if named is not None and named.seconds <= floor:
        return named
    found: list[tuple[float, int, PriorityRules, Simulation]] = []
    size = problem.costs.stages * problem.micro_batches * 3
    for number, rules in enumerate(_candidate_rules(problem)):
        if number * size > max(effort, 4 * size):
            break
        fastest = min(found)[0] if found else inf
        candidate = _simulate_if_valid(problem, ListScheduler(problem, rules, fastest).run())
        if candidate is not None:
            found.append((candidate.seconds, number, rules, candidate))
            if candidate.seconds <= floor:
                break
    best = named
    if found:
        _, _, rules, start = min(found)
        climbed = _climb(problem, rules, start, effort // 2, floor)
        best = climbed if named is None or named.seconds >= climbed.seconds else named
    if best is None:
        sizes, limits = (", ".join(f"{x:g}" for x in xs) for xs in (problem.activation_sizes, problem.memory_limits))
        what = f"{pluralize(problem.micro_batches, 'micro-batch')} on {pluralize(problem.ranks, 'rank')}"
        needs = f"a micro-batch takes {sizes} by stage, and the limits by rank are {limits}"
        remedy = "use a smaller micro-batch or more activation checkpointing"
        raise LayoutError(f"no schedule of {what} fits in memory: {needs}; {remedy}.")
    best = _merge_backwards(problem, best)
    return best if named is None or best.seconds < named.seconds * (1 - 1e-9) else named


def named_candidates(problem: SchedulingProblem) -> Iterator[Simulation]:
    """Yields the named schedules that fit and allow this number of micro-batches."""
    names = ["gpipe", "1f1b", "zero-bubble"] if problem.virtual == 1 else ["interleaved", "zero-bubble"]
    if problem.is_v_shaped:
        names = [name for name in V_SHAPED if name not in AUTO_SCHEDULES]
    for name in names if problem.ranks > 1 else ():
        layout = Layout(pipeline=problem.ranks, schedule=name, virtual=problem.virtual)
        if not micro_batch_error(layout, problem.micro_batches):
            program = simulator.named_program(name, problem.ranks, problem.virtual, problem.micro_batches)
            if problem.fits(program):
                # Rebuilt from `order`, which splits forward-backward pairs, so each result is sent at once.
                yield simulator.simulate(build_program(program.order), problem.costs)


def _simulate_if_valid(problem: SchedulingProblem, order: dict[int, list[Action]] | None) -> Simulation | None:
    """Returns the simulation of an order; None if there is none, it deadlocks or it does not fit."""
    try:
        program = build_program(order) if order is not None else None
    except LayoutError:
        return None
    return simulator.simulate(program, problem.costs) if program is not None and problem.fits(program) else None


def _candidate_rules(problem: SchedulingProblem) -> Iterator[PriorityRules]:
    """Yields rules with these in-flight limits by rank: 1f1b's, twice that, a round trip's worth, all stages, none."""
    p, m, v = problem.ranks, problem.micro_batches * problem.virtual, problem.virtual
    depths_1f1b, round_trips = _depths_1f1b(problem), _round_trips(problem)
    limits = [depths_1f1b, [2 * depth - 1 for depth in depths_1f1b]]
    limits += [*([n + extra for n in round_trips] for extra in range(4)), [v * p] * p, [m] * p]
    depths = dict.fromkeys(tuple(max(1, min(m, depth)) for depth in limit) for limit in limits)
    for depth, later_first in product(depths, (True, False) if v > 1 else (True,)):
        for gap_fraction in GAP_FRACTIONS:
            yield PriorityRules(depth, gap_fraction, later_first)
        yield PriorityRules(depth, 0.0, later_first, split_backward=False)


def _depths_1f1b(problem: SchedulingProblem) -> list[int]:
    p, v = problem.ranks, problem.virtual
    return [p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1 for rank in range(p)]


def _round_trips(problem: SchedulingProblem) -> list[int]:
    """Returns, by rank, how many micro-batches start on it while one goes to the last stage and back."""
    costs, owner = problem.costs, problem.stage_to_rank
    work = [0.0] * problem.ranks
    for stage, rank in enumerate(owner):
        work[rank] += costs.forward[stage] + costs.backward_input[stage] + costs.backward_weight[stage]
    round_trip, trips = 0.0, [0.0] * problem.ranks
    for stage in reversed(range(costs.stages)):
        round_trip += costs.forward[stage] + costs.backward_input[stage]
        trips[owner[stage]] += round_trip
    return [ceil(trip / max(work)) for trip in trips]


def _climb(problem: SchedulingProblem, rules: PriorityRules, best: Simulation, effort: int, floor: float) -> Simulation:
    """Randomly varies in-flight limits and gap fraction; keeps every change that is no slower."""
    rng, max_depth, seconds, order = Random(0), problem.micro_batches * problem.virtual, best.seconds, None
    for _ in range(min(300, effort // len(best.start_times))):
        if seconds <= floor:
            break
        depth = list(rules.max_in_flight)
        for rank in rng.sample(range(problem.ranks), rng.choice((1, 1, min(2, problem.ranks), problem.ranks))):
            depth[rank] = max(1, min(max_depth, depth[rank] + rng.choice((-1, 1, 1, 2))))
        gap = rng.choice((rules.min_gap_fraction, rules.min_gap_fraction, *GAP_FRACTIONS))
        neighbor_rules = replace(rules, max_in_flight=tuple(depth), min_gap_fraction=gap)
        scheduler = ListScheduler(problem, neighbor_rules, seconds)
        if (found := scheduler.run()) is not None:
            candidate = None if scheduler.is_exact else simulator.simulate(build_program(found), problem.costs)
            if (end := candidate.seconds if candidate else max(scheduler.free_at)) <= seconds:
                rules, order, seconds = neighbor_rules, found, end
    return simulator.simulate(build_program(order), problem.costs) if order is not None else best


def _merge_backwards(problem: SchedulingProblem, result: Simulation) -> Simulation:
    """Merges adjacent backward halves where the simulation gets no slower: a full backward is faster than both."""
    order = result.program.order
    adjacent = [(rank, n, *pair) for rank, row in order.items() for n, pair in enumerate(zip(row, row[1:]))]
    groups = [[(rank, n) for rank, n, a, b in adjacent if a.kind == "I" and b == (a.stage, "W", a.micro_batch, None)]]
    merged: set[tuple[int, int]] = set()
    while groups:
        group = groups.pop()
        candidate = _simulate_if_valid(problem, _merged_order(order, merged | set(group))) if group else None
        if candidate is not None and candidate.seconds <= result.seconds * (1 + 1e-12):
            merged |= set(group)
        elif len(group) > 1 and len(groups) < 24:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return _simulate_if_valid(problem, _merged_order(order, merged)) or result


def _merged_order(order: dict[int, list[Action]], positions: set[tuple[int, int]]) -> dict[int, list[Action]]:
    """Returns the order with a full backward in place of each backward-input at these positions and what follows it."""
    new: dict[int, list[Action]] = {rank: [] for rank in order}
    for rank, actions in order.items():
        for position, action in enumerate(actions):
            if (rank, position - 1) not in positions:
                new[rank].append(action._replace(kind="B") if (rank, position) in positions else action)
    return new


def make_auto_schedule(layout: Layout, costs: StageCosts, micro_batches: int, rank_memory: RankMemoryFn,
                       limit: float) -> Simulation:  # fmt: skip
    """Returns the fastest schedule found within `limit` bytes per rank; if none fits, that of the tightest limits."""
    problem = _scheduling_problem(layout, costs, micro_batches, rank_memory, limit)

    def fits(schedule: Simulation) -> bool:
        peaks = (rank_memory(rank, schedule.program.peak_in_flight(rank)) for rank in range(problem.ranks))
        return all(peak <= limit for peak in peaks)

    min_memory, limits = _min_memory(problem), problem.memory_limits
    for _ in range(MAX_TRIES):
        tried_limits = tuple(map(max, limits, min_memory))  # so that synthesize always finds a schedule
        best = synthesize(replace(problem, memory_limits=tried_limits))
        if tried_limits == min_memory or fits(best):
            break
        # The problem models memory as a sum over micro-batches, which is approximate: leave more headroom.
        limits = tuple(LIMIT_SHRINK * rank_limit for rank_limit in limits)
    # For the same reason the problem's limits may have excluded a named schedule that does fit.
    named = named_candidates(replace(problem, memory_limits=()))
    faster = [schedule for schedule in named if schedule.seconds < best.seconds and fits(schedule)]
    return min(faster, key=lambda schedule: schedule.seconds, default=best)


def _min_memory(problem: SchedulingProblem) -> tuple[float, ...]:
    """Returns the peak memory by rank of a schedule with the fewest micro-batches in flight."""
    most = problem.micro_batches * problem.virtual
    unlimited, depths_1f1b = replace(problem, memory_limits=()), _depths_1f1b(problem)
    depths = (tuple(min(most, n + extra) for n in depths_1f1b) for extra in range(most))
    orders = (ListScheduler(unlimited, PriorityRules(depth, split_backward=False)).run() for depth in depths)
    order = next(order for order in orders if order is not None)
    return build_program(order).peak_memory(problem.activation_sizes, problem.retained_fraction)


def _scheduling_problem(layout: Layout, costs: StageCosts, micro_batches: int, rank_memory: RankMemoryFn,
                        limit: float) -> SchedulingProblem:  # fmt: skip
    """States the problem; a micro-batch's memory is what one more in flight adds in the memory model."""
    sizes, limits, retained_fraction = [0.0] * layout.stage_count, [], 1.0
    for rank in range(layout.pipeline):
        stages = layout.stages_of(rank)
        one_each, none = (1,) * len(stages), (0,) * len(stages)
        base_memory = rank_memory(rank, ((one_each, none),))
        for index, stage in enumerate(stages):
            extra = tuple(int(index == other) for other in range(len(stages)))
            one_more = tuple(a + b for a, b in zip(one_each, extra))
            sizes[stage] = max(1.0, rank_memory(rank, ((one_more, none),)) - base_memory)
            retained = (rank_memory(rank, ((one_each, extra),)) - base_memory) / sizes[stage]
            retained_fraction = max(retained_fraction, retained)
        limits.append(limit - base_memory + sum(sizes[stage] for stage in stages))
    memory = tuple(sizes), tuple(limits), retained_fraction
    return SchedulingProblem(costs, layout.pipeline, micro_batches, *memory, layout.schedule in V_SHAPED)
