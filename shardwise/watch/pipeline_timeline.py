"""The pipeline timeline of a run, predicted and measured: start and end of each action, and the bubble.

The bubble is defined alike for both: the share of the time from the start of the first action to the end of the last in
which a rank runs no action, averaged over ranks.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shardwise.errors import LayoutError
from shardwise.layout import Layout, micro_batch_error
from shardwise.schedules.simulate import Action, PipelineProgram, StageCosts, build_program, named_program, simulate
from shardwise.watch.run_data import RunData, read_timelines

MAX_ACTIONS = 4000  # actions that the page draws


def pipeline_data(run: RunData) -> dict[str, Any] | None:
    """Returns the predicted and measured timelines and the simulated bubble; None without a pipeline."""
    try:
        layout = Layout.parse(str(run.plan["layout"]))
        micro_batches = int(run.plan["micro_batches"])
        program = _program(run, layout, micro_batches)
    except (KeyError, ValueError, TypeError, LayoutError):
        return None
    if program is None:
        return None
    data: dict[str, Any] = {"ranks": layout.pipeline, "schedule": layout.schedule, "micro_batches": micro_batches}
    stage_seconds = run.plan.get("predicted", {}).get("stage_seconds")
    if stage_seconds:
        keys = ("forward", "backward_input", "backward_weight")
        costs = StageCosts(*(tuple(stage_seconds[key]) for key in keys))
        simulation = simulate(program, costs)
        timeline = simulation.timeline[:MAX_ACTIONS]
        actions = [[e.rank, e.kind, e.stage, e.micro_batch, round(e.start, 6), round(e.end, 6)] for e in timeline]
        bubble = statistics.mean(simulation.bubble)
        data["predicted"] = {"seconds": simulation.seconds, "bubble": bubble, "actions": actions}
    measured = _measured_steps(run, layout)
    if measured:
        step = max(measured)
        begin = min(action[4] for action in measured[step])
        actions = [[*action, round(a - begin, 6), round(b - begin, 6)] for *action, a, b in measured[step]]
        bubble = statistics.mean(_bubble(actions, layout.pipeline) for actions in measured.values())
        data["measured"] = {
            "step": step, "steps": len(measured), "seconds": _span(measured[step]), "bubble": bubble,
            "actions": actions[:MAX_ACTIONS],
        }  # fmt: skip
        costs = _measured_costs([action for actions in measured.values() for action in actions], program)
        data["simulated"] = {"bubble": statistics.mean(simulate(program, costs).bubble)}
    return data


def _program(run: RunData, layout: Layout, micro_batches: int) -> PipelineProgram | None:
    if layout.pipeline == 1 or micro_batches < 1 or micro_batch_error(layout, micro_batches):
        return None
    order = run.plan.get("order")
    if order:
        rows = [[Action(int(stage), str(kind), int(batch)) for stage, kind, batch in row] for row in order]
        return build_program(dict(enumerate(rows)))
    return named_program(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)


def _measured_steps(run: RunData, layout: Layout) -> dict[int, list[list[Any]]]:
    """Returns the recorded actions of all pipeline ranks by step, without steps that some rank did not record."""
    ranks_per_stage = layout.world // layout.pipeline
    # Steps before the last resume may have run in another layout.
    last_resume = max((event.get("step", 0) for event in run.events_of_kind("resumed")), default=0)
    steps = {}
    for step, ranks in read_timelines(run.path).items():
        rows = {rank // ranks_per_stage: actions for rank, actions in ranks.items() if rank < layout.world}
        if len(rows) == layout.pipeline and step > last_resume:
            steps[step] = [[rank, *action] for rank, actions in sorted(rows.items()) for action in actions]
    return steps


def _span(actions: Sequence[Sequence[Any]]) -> float:
    return float(max(action[5] for action in actions) - min(action[4] for action in actions))


def _bubble(actions: Sequence[Sequence[Any]], ranks: int) -> float:
    return 1.0 - sum(action[5] - action[4] for action in actions) / ranks / _span(actions)


def _measured_costs(actions: Sequence[Sequence[Any]], program: PipelineProgram) -> StageCosts:
    """Returns the median measured seconds of each stage's actions."""
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _, kind, stage, _, begin, end in actions:
        times[kind, stage].append(end - begin)

    def median_seconds(kind: str, stage: int) -> float:
        return statistics.median(times[kind, stage]) if times[kind, stage] else 0.0

    stages = range(program.stages)
    forward, weight = [median_seconds("F", stage) for stage in stages], [median_seconds("W", stage) for stage in stages]
    backward = [median_seconds("I", stage) or median_seconds("B", stage) for stage in stages]
    return StageCosts(forward, backward, weight)
