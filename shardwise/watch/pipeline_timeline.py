"""A pipeline as it was predicted, and as it ran: when each action began and ended, and how long ranks were idle.

Bubble means the same in both: the share of the time from the first action's begin to the last one's end in which a rank
runs none, in the mean over ranks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.schedules.simulate import (
    Action,
    PipelineProgram,
    Simulation,
    StageCosts,
    build_program,
    named_program,
    simulate,
)
from shardwise.watch.run_data import RunData, read_timelines

MAX_ACTIONS = 4000  # actions that are drawn


def pipeline_data(run: RunData) -> dict[str, Any] | None:
    """For the page: predicted, measured, and simulated with the times that were measured; None without a pipeline."""
    try:
        layout = Layout.parse(str(run.plan["layout"]))
        micro_batches = int(run.plan["micro_batches"])
        program = _program(run, layout, micro_batches)
    except (KeyError, ValueError, TypeError, LayoutError):
        return None
    if program is None:
        return None
    found: dict[str, Any] = {"ranks": layout.pipeline, "schedule": layout.schedule, "micro_batches": micro_batches}
    stage_seconds = run.plan.get("predicted", {}).get("stage_seconds")
    if stage_seconds:
        costs = StageCosts(
            *(tuple(stage_seconds[key]) for key in ("forward", "backward_input", "backward_weight", "transfer"))
        )
        found["predicted"] = _simulated_timeline(simulate(program, costs))
    measured = _measured_steps(run, layout)
    if measured:
        step = max(measured)
        begin = min(action[4] for action in measured[step])
        found["measured"] = {
            "step": step,
            "seconds": _span(measured[step]),
            "bubble": statistics.mean(_bubble(actions, layout.pipeline) for actions in measured.values()),
            "steps": len(measured),
            "actions": [[*what, round(a - begin, 6), round(b - begin, 6)] for *what, a, b in measured[step]][
                :MAX_ACTIONS
            ],
        }
        costs = _measured_costs([action for actions in measured.values() for action in actions], program)
        found["simulated"] = {"bubble": statistics.mean(simulate(program, costs).bubble)}
    return found


def _program(run: RunData, layout: Layout, micro_batches: int) -> PipelineProgram | None:
    if layout.pipeline == 1:
        return None
    order = run.plan.get("order")
    if order:
        return build_program(
            {rank: [Action(int(s), str(k), int(m)) for s, k, m in row] for rank, row in enumerate(order)}
        )
    return named_program(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)


def _simulated_timeline(simulation: Simulation) -> dict[str, Any]:
    actions = [
        [e.rank, e.kind, e.stage, e.micro_batch, round(e.start, 6), round(e.end, 6)] for e in simulation.timeline
    ]
    return {
        "seconds": simulation.seconds, "bubble": statistics.mean(simulation.bubble), "actions": actions[:MAX_ACTIONS],
    }  # fmt: skip


def _measured_steps(run: RunData, layout: Layout) -> dict[int, list[list[Any]]]:
    """By step, the actions of all pipeline ranks; steps of which some rank's are missing are left out."""
    ranks_per_stage = layout.world // layout.pipeline
    last_resume = max(
        (event.get("step", 0) for event in run.events_of_kind("resumed")), default=0
    )  # before, in another layout perhaps
    found = {}
    for step, ranks in read_timelines(run.path).items():
        rows = {rank // ranks_per_stage: actions for rank, actions in ranks.items() if rank < layout.world}
        if len(rows) == layout.pipeline and step > last_resume:
            found[step] = [[rank, *action] for rank, actions in sorted(rows.items()) for action in actions]
    return found


def _span(actions: Sequence[Sequence[Any]]) -> float:
    return float(max(action[5] for action in actions) - min(action[4] for action in actions))


def _bubble(actions: Sequence[Sequence[Any]], ranks: int) -> float:
    return 1.0 - sum(action[5] - action[4] for action in actions) / ranks / _span(actions)


def _measured_costs(actions: Sequence[Sequence[Any]], program: PipelineProgram) -> StageCosts:
    """By stage, the median seconds of its actions."""
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _, kind, stage, _, begin, end in actions:
        times[kind, stage].append(end - begin)

    def median_seconds(kind: str, stage: int) -> float:
        return statistics.median(times[kind, stage]) if times[kind, stage] else 0.0

    stages = range(program.stages)
    forward, weight = [median_seconds("F", stage) for stage in stages], [median_seconds("W", stage) for stage in stages]
    backward = [median_seconds("I", stage) or median_seconds("B", stage) for stage in stages]
    return StageCosts(forward, backward, weight, (0.0,) * (program.stages - 1))
