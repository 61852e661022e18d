"""`schedule=auto`: the order of a pipeline that is made for one layout's own stages and memory.

The task is set here (what each stage takes, what a micro-batch in flight holds, what a rank may hold) and the answer
is checked against the same memory model as any other schedule; the order itself is `shardwise.planner.synthesize`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.layout import V_SHAPED, Layout
from shardwise.planner.greedy import LOOP, Rules, Task, V, lay_out
from shardwise.planner.simulate import read
from shardwise.planner.synthesize import Synthesis, synthesize, with_name

if TYPE_CHECKING:
    from shardwise.planner.predict import Estimator

TRIES, SHRINK = 6, 0.9


def make_order(estimator: Estimator, layout: Layout) -> Synthesis:
    """The fastest order found that fits; where none does, one that holds as little as 1f1b."""
    task, placement = _task(estimator, layout), V if layout.schedule in V_SHAPED else LOOP

    def fits(one: Synthesis) -> bool:
        memory = (estimator.memory_of(layout, rank, one.simulation.program) for rank in range(task.ranks))
        return all(held.total <= estimator.machine.device.memory for held in memory)

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


def _task(estimator: Estimator, layout: Layout) -> Task:
    """What a micro-batch holds is read off the memory model: by how much one more in flight makes it grow."""
    own, habit, count = estimator.work.own, estimator.work.habit, estimator.micro_batches(layout)
    assert own is not None
    sizes, limits, kept = [0.0] * layout.stage_count, [], 1.0
    for rank in range(layout.pipeline):
        stages = layout.stages_of(rank)
        ones, none = (1,) * len(stages), (0,) * len(stages)

        def total(live: tuple[int, ...], waiting: tuple[int, ...], rank: int = rank) -> float:
            return own.memory(layout, rank, count, habit, ((live, waiting),)).total

        base = total(ones, none)
        for place, stage in enumerate(stages):
            one = tuple(int(place == other) for other in range(len(stages)))
            twice = tuple(a + b for a, b in zip(ones, one))
            sizes[stage] = max(1.0, total(twice, none) - base)
            kept = max(kept, (total(ones, one) - base) / sizes[stage])
        limits.append(estimator.machine.device.memory - base + sum(sizes[stage] for stage in stages))
    return Task(estimator.costs(layout), layout.pipeline, count, tuple(sizes), tuple(limits), kept)
