"""Prints a plan to a terminal."""

from collections.abc import Iterator
from itertools import groupby
from textwrap import fill
from typing import Any

from rich.console import Console

from shardwise.cluster import GIB, changed
from shardwise.console import format_count, format_number, format_seconds, format_step, make_table, pluralize
from shardwise.planner.costs.memory_model import RankMemory
from shardwise.planner.costs.model_shape import OperatorListModel
from shardwise.planner.estimate import Prediction
from shardwise.planner.plan import Plan, count_parameters, make_estimator

MEMORY_PARTS = RankMemory._fields
MEMORY_NOTE = (
    "buffers: what zero=3 gathers and stages receive, matmul workspaces; reserve: fragmentation, driver, kernels."
)
NO_GRADIENTS_NOTE = "gradients 0.0: they are allocated as activations are freed."
FP8_NOTE = "fp8's rates are of other systems' runs; ours was 1.2 to 1.4 times as fast as bf16 (1.5B to 8B, one H200)."
FLOAT32_NOTE = "It is planned in float32, the default; add --set precision=bf16 for what GPUs are usually trained in."


def show_plan(plan: Plan, console: Console, price: float | None = None) -> None:
    console.print(title(plan), highlight=False, soft_wrap=True)
    console.print(layouts_table(plan))
    for number, (prediction, why) in enumerate(zip(plan.layouts, plan.reasons, strict=True), start=1):
        told = f"{number:3d}  {prediction.layout}{f' ({why})' if why else ''}"
        for line in (told, f"     exposed: {format_exposed(prediction) or 'nothing'}"):
            console.print(fill(line, console.width, subsequent_indent=" " * 5), highlight=False)
    console.print(memory_table(plan.best), MEMORY_NOTE, highlight=False)
    if not plan.best.memory[0].gradients:
        console.print(NO_GRADIENTS_NOTE, highlight=False)
    verdict = "It does not fit" if plan.evaluated == 1 else "No layout fits; this one needs the least memory"
    verdict = "Peak memory" if plan.fits(plan.best) else verdict
    ending = [f"{verdict}: {plan.memory_verdict(plan.best)}", training_summary(plan), *cost_lines(plan, price)]
    ending += [FP8_NOTE] * (plan.job.precision == "fp8" and "low_precision_matmul" not in plan.cluster.measured)
    is_gpu = plan.cluster.device.family not in ("cpu", "tpu")
    ending += [FLOAT32_NOTE] * (is_gpu and "precision" not in plan.job.model_fields_set)
    choices = "Other choices (a key alone: layout 1 with only that and the data-parallel degree changed):"
    ending += [choices] * bool(plan.near_misses)
    ending += [*(f"  {line}" for line in plan.near_misses), plan.accuracy]
    if plan.evaluated > 1:
        ending.append(f"{plan.evaluated} layouts evaluated in {plan.seconds:.2f} s.")
    for line in ending:
        console.print(line, highlight=False)


def title(plan: Plan) -> str:
    model, shape, device = plan.job.model, plan.shape, plan.cluster.device
    active = f" ({format_count(shape.active_parameters)} active)" if shape.experts else ""
    parts = f"{shape.layers} layers of width {shape.width}"
    if isinstance(shape, OperatorListModel):
        parts = f"{shape.layers} modules"
        if shape.tables:
            size = sum(4.0 * table.size for table in shape.tables) / GIB
            parts += f" and {size:.0f} GiB of embedding tables"
            parts += f", {size / plan.best.layout.data:.0f} in each rank's host memory"
    length = f" of {model.sequence_length} tokens{plan.job.rounding}" if model.throughput_unit == "tokens" else ""
    inner, outer = (f"{link.bandwidth / 1e9:g} GB/s" for link in (plan.cluster.inner, plan.cluster.outer))
    facts = f"{format_number(device.memory / GIB)} GiB" + (f", {inner} per device" if plan.devices > 1 else "")
    facts += f", {outer} between nodes" if plan.devices > (node := plan.cluster.domain_size) else ""
    facts += f", not whole nodes of {node}" if plan.devices > node and plan.devices % node else ""
    return (
        f"{model.name}: {format_count(count_parameters(plan.job))} parameters{active}, {parts}; "
        f"batch of {pluralize(plan.job.samples, 'sample')}{length} in {plan.job.precision}, "
        f"on {plan.devices} x {device.name} ({facts})"
    )


def layouts_table(plan: Plan) -> Any:
    rates = f"{plan.job.model.throughput_unit}/s per device", "model TFLOP/s", "hardware TFLOP/s", "of peak"
    table = make_table("layouts, best first", ("#", "step", *rates, "GiB", "bubble"), numbers=True)
    for number, p in enumerate(plan.layouts, start=1):
        rate = plan.tokens_per_second(p)
        table.add_row(
            str(number), format_step(p.seconds), format_number(rate), format_number(plan.flops(p) / 1e12),
            format_number(plan.hardware_flops(p) / 1e12), f"{100 * plan.mfu(p):.0f}%",
            f"{p.peak_memory / GIB:,.1f}", f"{100 * p.bubble:.1f}%",
        )  # fmt: skip
    return table


def format_exposed(prediction: Prediction) -> str:
    shares = {axis: seconds / prediction.seconds for axis, seconds in prediction.exposed.items()}
    text = ", ".join(f"{axis} {100 * share:.1f}%" for axis, share in shares.items() if share >= 0.001)
    return text.replace("shard", "data-parallel")  # replicate, too


def memory_table(prediction: Prediction) -> Any:
    """Returns a table with one row per pipeline rank; consecutive equal ranks share a row."""
    table = make_table("memory of layout 1 in GiB, by pipeline rank", ("rank", *MEMORY_PARTS, "total"), numbers=True)
    ranks = groupby(enumerate(prediction.memory), key=lambda pair: round(pair[1].total / GIB, 1))
    runs = [list(run) for _, run in ranks]
    for run in [*runs[:6], *runs[-6:]] if len(runs) > 12 else runs:
        (first, memory), (last, _) = run[0], run[-1]
        name = str(first) if first == last else f"{first}-{last}"
        table.add_row(name, *(f"{size / GIB:.1f}" for size in (*memory, memory.total)))
    return table


def training_summary(plan: Plan) -> str:
    time, hours, job = format_seconds(plan.training_seconds), plan.training_seconds / 3600, plan.job
    count = format_count(job.total_steps * job.samples * job.model.sequence_length)
    rate = f"{format_number(plan.tokens_per_second(plan.best) * plan.devices)} {job.model.throughput_unit}/s in all"
    line = f"{rate}: {job.total_steps:,} steps, {count} {job.model.throughput_unit} in {time} without failures"
    return f"{line}, {format_count(hours * plan.devices)} device-hours{', if it did fit' * (not plan.fits(plan.best))}."


def bottlenecks(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yields kinds of hardware with how much faster the best layout's step is with twice of each, the largest first."""
    cluster, device = plan.cluster, plan.cluster.device
    kinds = {
        "matmul FLOP/s": ("flops", device.peak_flops("bf16")), "memory bandwidth": ("bandwidth", device.bandwidth),
        "bandwidth within a node": ("inner", cluster.inner.bandwidth),
        "bandwidth between nodes": ("outer", cluster.outer.bandwidth),
    }  # fmt: skip
    doubled = {name: changed(cluster, key, 2 * value) for name, (key, value) in kinds.items()}
    seconds = {name: make_estimator(plan.job, c).predict_seconds(plan.best.layout) for name, c in doubled.items()}
    yield from ((name, 1.0 - seconds[name] / plan.best.seconds) for name in sorted(seconds, key=seconds.__getitem__))


def cost_lines(plan: Plan, price: float | None) -> Iterator[str]:
    """Yields what the run costs and what would make it faster. `price`: of a device for an hour."""
    hours, power = plan.training_seconds / 3600 * plan.devices, plan.cluster.device.power
    if price is not None:
        suffix = "" if plan.fits(plan.best) else ", if it did fit"
        yield f"Cost at {price:g} for an hour of a device: {hours * price:,.2f}{suffix}."
    if power:
        yield f"Energy at the devices' rated {power:.0f} W, without hosts and cooling: {hours * power / 1000:,.0f} kWh."
    else:
        yield f"Energy: unknown, because the rated power of {plan.cluster.device.name} is not known."
    (name, gain), *others = bottlenecks(plan)
    rest = "; ".join(f"{other} {100 * share:.0f}%" for other, share in others)
    yield f"Bottleneck: {name}. Twice of it would save {100 * gain:.0f}% of the step in this layout ({rest})."
