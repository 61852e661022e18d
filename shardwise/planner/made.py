"""`schedule=auto`: the order of a pipeline that is made for one layout's own stages and memory.

The task is set here (what each stage takes, what a micro-batch in flight holds, what a rank may hold) and the answer
is checked against the same memory model as any other schedule; the order itself is `shardwise.planner.synthesize`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.layout import V_SHAPED, Layout
from shardwise.planner.greedy import LOOP, Rules, Task, V, lay_out
from shardwise.planner.own import Flight
from shardwise.planner.simulate import Costs, read
from shardwise.planner.synthesize import Synthesis, synthesize, with_name

TRIES, SHRINK = 6, 0.9

Hold = Callable[[int, tuple[Flight, ...]], float]
"""Bytes that a pipeline rank holds with so many micro-batches in flight."""


def make_order(layout: Layout, costs: Costs, micro_batches: int, hold: Hold, limit: float) -> Synthesis:
    """The fastest order found whose ranks all hold at most `limit`; where none does, one as shallow as can be."""
    task, placement = _task(layout, costs, micro_batches, hold, limit), V if layout.schedule in V_SHAPED else LOOP

    def fits(one: Synthesis) -> bool:
        return all(hold(rank, one.simulation.program.flights(rank)) <= limit for rank in range(task.ranks))

    least, limits = _least(task, placement), task.limits
    for _ in range(TRIES):
        # Never below what the plainest order holds, so that there is one.
        room = tuple(max(a, b) for a, b in zip(limits, least))
        found = synthesize(replace(task, limits=room), (placement,))
        if room == least or fits(found):
            break
        limits = tuple(SHRINK * one for one in limits)  # what is held is not quite a sum: leave more room
    # For the same reason the task may have ruled out a schedule with a name that fits.
    others = [one for one in with_name(replace(task, limits=()), placement, {}) if one.seconds < found.seconds]
    return min([one for one in others if fits(one)], key=lambda one: one.seconds, default=found)


def _least(task: Task, placement: str) -> tuple[float, ...]:
    """What an order holds that is as shallow as can be."""
    p, m, v = task.ranks, task.micro_batches, task.virtual
    for more in range(m * v):
        deep = (p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1 for rank in range(p))
        depth = tuple(min(m * v, n + more) for n in deep)
        order = lay_out(replace(task, limits=()), placement, Rules(depth, split=False))
        if order is not None:
            break
    assert order is not None
    return read(order).peak(task.sizes, task.kept)


def _task(layout: Layout, costs: Costs, micro_batches: int, hold: Hold, limit: float) -> Task:
    """What a micro-batch holds is read off the memory model: by how much one more in flight makes it grow."""
    sizes, limits, kept = [0.0] * layout.stage_count, [], 1.0
    for rank in range(layout.pipeline):
        stages = layout.stages_of(rank)
        ones, none = (1,) * len(stages), (0,) * len(stages)
        base = hold(rank, ((ones, none),))
        for place, stage in enumerate(stages):
            one = tuple(int(place == other) for other in range(len(stages)))
            twice = tuple(a + b for a, b in zip(ones, one))
            sizes[stage] = max(1.0, hold(rank, ((twice, none),)) - base)
            kept = max(kept, (hold(rank, ((ones, one),)) - base) / sizes[stage])
        limits.append(limit - base + sum(sizes[stage] for stage in stages))
    return Task(costs, layout.pipeline, micro_batches, tuple(sizes), tuple(limits), kept)
