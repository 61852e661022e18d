"""`schedule=auto`: the order of a pipeline that is made for one layout's own stages and memory.

The task is set here (what each stage takes, what a micro-batch in flight holds, what a rank may hold) and the answer
is checked against the same memory model as any other schedule; the order itself is `shardwise.schedules.synthesize`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.layout import V_SHAPED, Layout
from shardwise.schedules.in_flight import InFlightCounts
from shardwise.schedules.list_scheduler import (
    LOOP_PLACEMENT,
    V_PLACEMENT,
    PriorityRules,
    SchedulingProblem,
    list_schedule,
)
from shardwise.schedules.simulate import StageCosts, build_program
from shardwise.schedules.synthesize import SynthesizedSchedule, named_candidates, synthesize

MAX_TRIES, LIMIT_SHRINK = 6, 0.9

RankMemoryFn = Callable[[int, tuple[InFlightCounts, ...]], float]
"""Bytes that a pipeline rank holds with so many micro-batches in flight."""


def make_auto_schedule(
    layout: Layout, costs: StageCosts, micro_batches: int, rank_memory: RankMemoryFn, limit: float
) -> SynthesizedSchedule:
    """The fastest order found whose ranks all hold at most `limit`; where none does, one as shallow as can be."""
    problem, placement = (
        _scheduling_problem(layout, costs, micro_batches, rank_memory, limit),
        V_PLACEMENT if layout.schedule in V_SHAPED else LOOP_PLACEMENT,
    )

    def fits(one: SynthesizedSchedule) -> bool:
        return all(
            rank_memory(rank, one.simulation.program.peak_in_flight(rank)) <= limit for rank in range(problem.ranks)
        )

    min_memory, limits = _min_memory(problem, placement), problem.memory_limits
    for _ in range(MAX_TRIES):
        # Never below what the plainest order holds, so that there is one.
        tried_limits = tuple(max(a, b) for a, b in zip(limits, min_memory))
        found = synthesize(replace(problem, memory_limits=tried_limits), (placement,))
        if tried_limits == min_memory or fits(found):
            break
        limits = tuple(LIMIT_SHRINK * one for one in limits)  # what is held is not quite a sum: leave more room
    # For the same reason the task may have ruled out a schedule with a name that fits.
    others = [
        one
        for one in named_candidates(replace(problem, memory_limits=()), placement, {})
        if one.seconds < found.seconds
    ]
    return min([one for one in others if fits(one)], key=lambda one: one.seconds, default=found)


def _min_memory(problem: SchedulingProblem, placement: str) -> tuple[float, ...]:
    """What an order holds that is as shallow as can be."""
    p, m, v = problem.ranks, problem.micro_batches, problem.virtual
    for extra in range(m * v):
        depths_1f1b = (p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1 for rank in range(p))
        depth = tuple(min(m * v, n + extra) for n in depths_1f1b)
        order = list_schedule(replace(problem, memory_limits=()), placement, PriorityRules(depth, split_backward=False))
        if order is not None:
            break
    assert order is not None
    return build_program(order).peak_memory(problem.activation_sizes, problem.retained_fraction)


def _scheduling_problem(
    layout: Layout, costs: StageCosts, micro_batches: int, rank_memory: RankMemoryFn, limit: float
) -> SchedulingProblem:
    """What a micro-batch holds is read off the memory model: by how much one more in flight makes it grow."""
    sizes, limits, retained_fraction = [0.0] * layout.stage_count, [], 1.0
    for rank in range(layout.pipeline):
        stages = layout.stages_of(rank)
        one_each, none = (1,) * len(stages), (0,) * len(stages)
        base_memory = rank_memory(rank, ((one_each, none),))
        for place, stage in enumerate(stages):
            one = tuple(int(place == other) for other in range(len(stages)))
            one_more = tuple(a + b for a, b in zip(one_each, one))
            sizes[stage] = max(1.0, rank_memory(rank, ((one_more, none),)) - base_memory)
            retained_fraction = max(
                retained_fraction, (rank_memory(rank, ((one_each, one),)) - base_memory) / sizes[stage]
            )
        limits.append(limit - base_memory + sum(sizes[stage] for stage in stages))
    return SchedulingProblem(costs, layout.pipeline, micro_batches, tuple(sizes), tuple(limits), retained_fraction)
