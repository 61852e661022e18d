"""The plan that a training follows: for `layout = "auto"` the best for this machine, else the layout that was given.

It is made before any process starts and saved beside the run, so that what was predicted can be held against what was
measured. Every process of a world that others made comes to the same plan by itself.
"""

from __future__ import annotations

import os
from typing import Any

from shardwise.cluster import GIB
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.kinds import DLRM, ResNet
from shardwise.layout import Layout
from shardwise.models.families import cost_of
from shardwise.parallel.balance import cut_stages
from shardwise.parallel.parallelize import check
from shardwise.planner.plan import Plan, estimator_of, make_plan
from shardwise.train.here import cluster_here, local_processes
from shardwise.words import counted


def choose_plan(job: Job, world: int | None = None) -> tuple[Plan, str]:
    """The plan for a world that is there, or for as many processes of this machine as the batch can use; and where the
    description of the machine is from."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if world else 0
    if job.layout != "auto":
        layout = Layout.parse(job.layout)
        cluster, source = cluster_here(job, here or layout.world)
        return make_plan(job, cluster, layout=str(layout)), source
    most = world or local_processes(job)
    for devices in [most] if world else range(most, 0, -1):
        cluster, source = cluster_here(job, here or devices)
        try:
            if isinstance(job.model, ResNet):  # whose batch is one micro-batch, which the search does not try
                return make_plan(job, cluster, layout=f"replicate={devices}"), source
            return make_plan(job, cluster, devices, runnable=True), source
        except LayoutError as error:
            last = error
    raise last


def choose_layout(job: Job, world: int | None = None) -> Layout:
    return choose_plan(job, world)[0].best.layout


def check_memory(job: Job, plan: Plan) -> None:
    """Raises where "auto" found nothing that fits. Who gives a layout may try."""
    if job.layout == "auto" and not plan.fits(plan.best):
        device = plan.cluster.device
        raise LayoutError(
            f"no layout of {plan.devices} x {device.name} holds this job: '{plan.best.layout}' needs least, "
            f"{plan.best.peak / GIB:.3g} GiB a rank of {device.memory / GIB:.3g}; use more devices, or give that "
            "layout to try it all the same."
        )


def reason(plan: Plan, source: str) -> str:
    """Why this layout, in a line."""
    best, device = plan.best, plan.cluster.device
    line = f"predicted {_seconds(best.seconds)} a step, {best.peak / GIB:.2g} of {device.memory / GIB:.3g} GiB on "
    line += f"{device.name} ({source})"
    if plan.evaluated == 1:
        return line
    return f"best of {counted(plan.evaluated, 'layout')}: {line}" + (f"; {plan.lost[0]}" if plan.lost else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _stages(job: Job, layout: Layout) -> list[list[int]]:
    return [list(span) for span in cut_stages(layout, cost_of(job.built()))]


def cut_record(job: Job, layout: Layout) -> dict[str, Any]:
    """What `plan.toml` says of the cut itself."""
    batch = check(job, layout)
    return {
        "layout": str(layout),
        "world": layout.world,
        "stages": [] if isinstance(job.model, DLRM) else _stages(job, layout),
        "micro_batch": batch.micro_batch,
        "micro_batches": batch.micro_batches,
    }


def _pipeline(job: Job, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a pipeline: the predicted seconds of its stages, and its order where that has no name."""
    layout, estimator = plan.best.layout, estimator_of(job, plan.cluster)
    if layout.pipeline == 1:
        return {}, {}
    stages = {part: list(seconds) for part, seconds in vars(estimator.costs(layout)).items()}
    rows = estimator.made(layout).simulation.program.order if estimator.is_made(layout) else {}
    order = [[[action.stage, action.kind, action.micro_batch] for action in row] for row in rows.values()]
    return {"stage_seconds": stages}, {"order": order} if order else {}


def plan_record(job: Job, plan: Plan, source: str) -> dict[str, Any]:
    """What `plan.toml` holds."""
    best = plan.best
    others = zip(plan.layouts[1:], plan.reasons[1:], strict=True)
    stages, order = _pipeline(job, plan)
    return {
        **cut_record(job, best.layout), **order,
        "reason": reason(plan, source),
        "predicted": {
            "device": plan.cluster.device.name, "described_by": source, "step_seconds": best.seconds,
            "tokens_per_s": plan.tokens_per_second(best) * plan.devices, "bubble": best.bubble,
            "peak_memory_gib": best.peak / GIB, "device_memory_gib": plan.cluster.device.memory / GIB,
            "layouts_judged": plan.evaluated, "exposed_seconds": best.exposed, **stages,
            "memory_gib": [
                {"pipeline_rank": rank, **{part: size / GIB for part, size in vars(held).items()}}
                for rank, held in enumerate(best.memory)
            ],
        },
        "rejected": [
            *({"layout": str(other.layout), "step_seconds": other.seconds, "reason": why} for other, why in others),
            *({"choice": what, "reason": why} for what, _, why in (line.partition(": ") for line in plan.lost)),
        ],
    }  # fmt: skip
