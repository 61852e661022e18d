"""The plan that a training follows: for `layout = "auto"` the best for this machine, else the layout that was given.

It is made before any process starts and saved beside the run, so that what was predicted can be held against what was
measured. Every process of a world that others made comes to the same plan by itself.
"""

from __future__ import annotations

import os
from typing import Any

from shardwise.cluster import GIB
from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.prepare import Prepared, prepare
from shardwise.planner.plan import Plan, make_estimator, make_plan
from shardwise.train.local_machine import local_cluster, local_process_count


def choose_plan(job: Job, world_size: int | None = None) -> tuple[Plan, str]:
    """The plan for a world that is there, or for as many processes of this machine as the batch can use; and where the
    description of the machine is from."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if world_size else 0
    if job.layout != "auto":
        layout = Layout.parse(job.layout)
        cluster, source = local_cluster(job, local_world_size or layout.world)
        return make_plan(job, cluster, layout=str(layout)), source
    max_devices = world_size or local_process_count(job)
    for devices in [max_devices] if world_size else range(max_devices, 0, -1):
        cluster, source = local_cluster(job, local_world_size or devices)
        try:
            if job.model.needs_whole_batch:  # the search does not try a whole batch as one micro-batch
                return make_plan(job, cluster, layout=f"replicate={devices}"), source
            return make_plan(job, cluster, devices, runnable=True), source
        except LayoutError as error:
            last = error
    raise last


def choose_layout(job: Job, world_size: int | None = None) -> Layout:
    return choose_plan(job, world_size)[0].best.layout


def check_memory(job: Job, plan: Plan) -> None:
    """Raises where "auto" found nothing that fits. Who gives a layout may try."""
    if job.layout == "auto" and not plan.fits(plan.best):
        device = plan.cluster.device
        raise LayoutError(
            f"no layout of {plan.devices} x {device.name} holds this job: '{plan.best.layout}' needs least, "
            f"{plan.best.peak_memory / GIB:.3g} GiB a rank of {device.memory / GIB:.3g}; use more devices, or give that "
            "layout to try it all the same."
        )


def describe_plan(plan: Plan, source: str) -> str:
    """Why this layout, in a line."""
    best, device = plan.best, plan.cluster.device
    line = f"predicted {_format_seconds(best.seconds)} a step, {best.peak_memory / GIB:.2g} of {device.memory / GIB:.3g} GiB on "
    line += f"{device.name} ({source})"
    if plan.evaluated == 1:
        return line
    return f"best of {pluralize(plan.evaluated, 'layout')}: {line}" + (
        f"; {plan.near_misses[0]}" if plan.near_misses else ""
    )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def layout_record(prepared: Prepared) -> dict[str, Any]:
    """Returns what `plan.toml` says of the layout itself."""
    layout, batch = prepared.layout, prepared.batch
    return {
        "layout": str(layout),
        "world": layout.world,
        "stages": [list(span) for span in prepared.stages],
        "micro_batch": batch.micro_batch,
        "micro_batches": batch.micro_batches,
    }


def _pipeline_record(job: Job, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a pipeline: the predicted seconds of its stages, and its order where that has no name."""
    layout, estimator = plan.best.layout, make_estimator(job, plan.cluster)
    if layout.pipeline == 1:
        return {}, {}
    stages = {part: list(seconds) for part, seconds in vars(estimator.stage_costs(layout)).items()}
    rows = estimator.auto_schedule(layout).simulation.program.order if estimator.is_auto_schedule(layout) else {}
    order = [[[action.stage, action.kind, action.micro_batch] for action in row] for row in rows.values()]
    return {"stage_seconds": stages}, {"order": order} if order else {}


def plan_record(job: Job, plan: Plan, source: str) -> dict[str, Any]:
    """What `plan.toml` holds."""
    best = plan.best
    others = zip(plan.layouts[1:], plan.reasons[1:], strict=True)
    stages, order = _pipeline_record(job, plan)
    return {
        **layout_record(prepare(job, best.layout)), **order,
        "reason": describe_plan(plan, source),
        "predicted": {
            "device": plan.cluster.device.name, "cluster_source": source, "step_seconds": best.seconds,
            "tokens_per_s": plan.tokens_per_second(best) * plan.devices, "bubble": best.bubble,
            "peak_memory_gib": best.peak_memory / GIB, "device_memory_gib": plan.cluster.device.memory / GIB,
            "layouts_evaluated": plan.evaluated, "exposed_seconds": best.exposed, **stages,
            "memory_gib": [
                {"pipeline_rank": rank, **{part: size / GIB for part, size in vars(usage).items()}}
                for rank, usage in enumerate(best.memory)
            ],
        },
        "rejected": [
            *({"layout": str(other.layout), "step_seconds": other.seconds, "reason": why} for other, why in others),
            *({"choice": what, "reason": why} for what, _, why in (line.partition(": ") for line in plan.near_misses)),
        ],
    }  # fmt: skip
