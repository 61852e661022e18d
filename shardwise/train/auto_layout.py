"""Chooses the plan of a training run: the planner's best layout for `layout = "auto"`, else the job's own layout.

The plan is made before any process starts and saved in the run folder, so that predictions can be compared with
measurements. Under an external launcher every process computes the same plan by itself.
"""

import os
from typing import Any

from shardwise.cluster import GIB
from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.prepare import Prepared, prepare
from shardwise.planner.plan import Plan, make_estimator, make_plan
from shardwise.planner.show import format_seconds
from shardwise.train.local_machine import local_cluster, local_process_count

MAX_COUNTS = 512  # process counts to try one by one; of a larger number, only powers of two below it
MEMORY_TOLERANCE = 2.0  # a layout that the job names is refused beyond this: predictions err, but less than this


def choose_plan(job: Job, world_size: int | None = None) -> tuple[Plan, str]:
    """Returns the plan for `world_size` processes (default: what this machine can run), and the machine's source."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if world_size else 0
    if job.layout != "auto":
        layout = Layout.parse(job.layout)
        cluster, source = local_cluster(job, local_world_size or layout.world)
        return make_plan(job, cluster, layout=str(layout)), source
    max_devices = world_size or local_process_count(job)
    counts = (
        range(max_devices, 0, -1) if max_devices <= MAX_COUNTS else [max_devices, *(2**n for n in range(9, -1, -1))]
    )
    for devices in [max_devices] if world_size else counts:
        cluster, source = local_cluster(job, local_world_size or devices)
        try:
            if job.model.requires_single_micro_batch:  # the search does not try a whole batch as one micro-batch
                return make_plan(job, cluster, layout=f"replicate={devices}"), source
            return make_plan(job, cluster, devices, runnable=True), source
        except LayoutError as error:
            last_error = error
    raise last_error


def check_memory(job: Job, plan: Plan) -> None:
    """Raises LayoutError if no layout that "auto" tried fits in memory, or if the job's own layout does not by far."""
    device, needed = plan.cluster.device, plan.best.peak_memory
    sizes = " of ".join(
        f"{size / GIB:,.0f}" if size > 100 * GIB else f"{size / GIB:.2g}" for size in (needed, device.memory)
    )
    if job.layout == "auto" and not plan.fits(plan.best):
        raise LayoutError(
            f"no layout of {plan.devices} x {device.name} fits in memory: '{plan.best.layout}' needs least, "
            f"{sizes} GiB per rank; use more devices, or set that layout to try it anyway."
        )
    if needed > MEMORY_TOLERANCE * device.memory:
        raise LayoutError(
            f"layout '{plan.best.layout}' does not fit in memory: it needs about {sizes} GiB per rank; use a "
            "smaller model or batch, recompute=full, a smaller micro_batch, shard with zero=3, or more devices."
        )


def describe_plan(plan: Plan, source: str) -> str:
    """Returns the prediction for the chosen layout and why it won, in one line."""
    best, device = plan.best, plan.cluster.device
    memory = f"{best.peak_memory / GIB:.2g} of {device.memory / GIB:.3g} GiB"
    line = f"predicted {format_seconds(best.seconds)} per step, {memory} on {device.name} ({source})"
    if plan.evaluated == 1:
        return line
    near_miss = f"; {plan.near_misses[0]}" if plan.near_misses else ""
    return f"best of {pluralize(plan.evaluated, 'layout')}: {line}{near_miss}"


def layout_record(prepared: Prepared) -> dict[str, Any]:
    """Returns the part of `plan.toml` that describes the layout itself."""
    layout, batch = prepared.layout, prepared.batch
    return {
        "layout": str(layout), "world": layout.world, "stages": [list(span) for span in prepared.stages],
        "micro_batch": batch.micro_batch, "micro_batches": batch.micro_batches,
    }  # fmt: skip


def _pipeline_record(job: Job, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the predicted seconds of the pipeline's stages, and its order if the schedule is synthesized."""
    layout, estimator = plan.best.layout, make_estimator(job, plan.cluster)
    if layout.pipeline == 1:
        return {}, {}
    stages = {part: list(seconds) for part, seconds in vars(estimator.stage_costs(layout)).items()}
    rows = estimator.auto_schedule(layout).program.order if estimator.is_auto_schedule(layout) else {}
    order = [[[action.stage, action.kind, action.micro_batch] for action in row] for row in rows.values()]
    return {"stage_seconds": stages}, {"order": order} if order else {}


def plan_record(job: Job, plan: Plan, source: str) -> dict[str, Any]:
    """Returns the contents of `plan.toml`."""
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
            *({"choice": choice, "reason": reason}
              for choice, _, reason in (line.partition(": ") for line in plan.near_misses)),
        ],
    }  # fmt: skip
