"""`schedule=auto`: synthesizes a pipeline schedule for one layout's stage costs and memory limit.

This file states the scheduling problem (stage costs, activation memory of a micro-batch, memory limit per rank), lets
`shardwise.schedules.synthesize` solve it, and checks the result with the memory model that every schedule is held to.
"""

from collections.abc import Callable
from dataclasses import replace

from shardwise.layout import V_SHAPED, Layout
from shardwise.schedules.in_flight import InFlightCounts
from shardwise.schedules.list_scheduler import ListScheduler, PriorityRules, SchedulingProblem
from shardwise.schedules.simulate import Simulation, StageCosts, build_program
from shardwise.schedules.synthesize import named_candidates, synthesize

MAX_TRIES, LIMIT_SHRINK = 6, 0.9

RankMemoryFn = Callable[[int, tuple[InFlightCounts, ...]], float]
"""Maps a pipeline rank and its in-flight micro-batch counts to the bytes it needs."""


def make_auto_schedule(
    layout: Layout, costs: StageCosts, micro_batches: int, rank_memory: RankMemoryFn, limit: float
) -> Simulation:
    """Returns the fastest schedule found within `limit` bytes per rank; if none fits, that of the tightest limits."""
    problem = _scheduling_problem(layout, costs, micro_batches, rank_memory, limit)

    def fits(schedule: Simulation) -> bool:
        peaks = (rank_memory(rank, schedule.program.peak_in_flight(rank)) for rank in range(problem.ranks))
        return all(peak <= limit for peak in peaks)

    min_memory, limits = _min_memory(problem), problem.memory_limits
    for _ in range(MAX_TRIES):
        # Never below the minimum, so that synthesize always finds a schedule.
        tried_limits = tuple(map(max, limits, min_memory))
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
    p, m, v = problem.ranks, problem.micro_batches, problem.virtual
    for extra in range(m * v):
        depths_1f1b = (p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1 for rank in range(p))
        depth = tuple(min(m * v, n + extra) for n in depths_1f1b)
        rules = PriorityRules(depth, split_backward=False)
        order = ListScheduler(replace(problem, memory_limits=()), rules).run()
        if order is not None:
            break
    assert order is not None
    return build_program(order).peak_memory(problem.activation_sizes, problem.retained_fraction)


def _scheduling_problem(
    layout: Layout, costs: StageCosts, micro_batches: int, rank_memory: RankMemoryFn, limit: float
) -> SchedulingProblem:
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
