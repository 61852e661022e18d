"""A plan for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.cluster import GIB
from shardwise.planner.accuracy import ACCURACY_SENTENCE
from shardwise.planner.costs.memory_model import RankMemory
from shardwise.planner.costs.operator_list import OperatorListModel
from shardwise.planner.estimate import Prediction
from shardwise.planner.plan import Plan

WIDE_TERMINAL = 150  # columns of a terminal that can show layouts and reasons in the table itself
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")


def show_plan(plan: Plan, console: Console) -> None:
    console.print(title(plan), highlight=False, soft_wrap=True)
    console.print(layouts_table(plan, console.width >= WIDE_TERMINAL))
    if console.width < WIDE_TERMINAL:
        for number, (prediction, why) in enumerate(zip(plan.layouts, plan.reasons, strict=True)):
            console.print(f"{number + 1:3d}  {prediction.layout}{f' ({why})' if why else ''}", highlight=False)
            console.print(f"     exposed: {format_exposed(prediction) or 'nothing'}", highlight=False)
    if not plan.fits(plan.best):
        what = "It does not fit" if plan.evaluated == 1 else "No layout fits; this is the one that needs least memory"
        console.print(f"{what}: {plan.best.peak_memory / GIB:.0f} GiB of {plan.cluster.device.memory / GIB:.0f}.")
    console.print(memory_table(plan.best))
    console.print(training_summary(plan), highlight=False)
    for line in plan.near_misses:
        console.print(f"  {line}", highlight=False)
    console.print(f"Faults: {plan.goodput.describe(plan.best.seconds)}", highlight=False)
    console.print(ACCURACY_SENTENCE, highlight=False)
    if plan.evaluated > 1:
        console.print(f"{plan.evaluated} layouts judged in {plan.seconds:.2f} s.", highlight=False)


def title(plan: Plan) -> str:
    model, shape, device = plan.job.model, plan.shape, plan.cluster.device
    used = f", {_format_count(shape.active_parameters)} of them used by a token" if shape.experts else ""
    parts = f"{shape.layers} layers of width {shape.width}"
    if isinstance(shape, OperatorListModel):
        parts = f"{shape.layers} pieces"
        if shape.tables:
            share = shape.tables.bytes / plan.best.layout.data / GIB
            parts += f" and {shape.tables.bytes / GIB:.0f} GiB of tables, {share:.0f} in each rank's host memory"
    each = f" of {model.sequence_length} tokens" if model.throughput_unit == "tokens" else ""
    return (
        f"{model.name}: {_format_count(shape.parameters)} parameters{used}, {parts}; {plan.job.samples} samples{each} in "
        f"{plan.job.precision}, on {plan.devices} x {device.name} ({device.memory / GIB:.0f} GiB)"
    )


def _format_count(number: float) -> str:
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.4g}" if number < 1e4 else f"{number:,.0f}"


def layouts_table(plan: Plan, wide: bool) -> Table:
    """Where there is no room for words beside the numbers, layouts have a number of their own instead."""
    numbers = (
        "step s",
        f"{plan.job.model.throughput_unit}/s/device",
        "model TFLOP/s",
        "hardware TFLOP/s",
        "of peak",
        "GiB",
        "bubble",
    )
    table = Table(title="layouts, best first")
    for column in ("layout", *numbers, "exposed", "why not first") if wide else ("#", *numbers):
        table.add_column(column, justify="right" if column in (*numbers, "#") else "left", overflow="fold")
    for number, (one, reason) in enumerate(zip(plan.layouts, plan.reasons, strict=True)):
        table.add_row(
            str(one.layout if wide else number + 1), f"{one.seconds:.3g}", f"{plan.tokens_per_second(one):.4g}",
            f"{plan.flops(one) / 1e12:.3g}", f"{plan.hardware_flops(one) / 1e12:.3g}",
            f"{100 * plan.mfu(one):.0f}%", f"{one.peak_memory / GIB:.1f}", f"{100 * one.bubble:.1f}%",
            *([format_exposed(one), reason] if wide else []),
        )  # fmt: skip
    return table


def format_exposed(prediction: Prediction) -> str:
    shares = {axis: seconds / prediction.seconds for axis, seconds in prediction.exposed.items()}
    return ", ".join(f"{axis} {100 * share:.1f}%" for axis, share in shares.items() if share >= 0.001)


def memory_table(prediction: Prediction) -> Table:
    """One line per pipeline rank; equal neighbours share a line."""
    table = Table(title=f"memory of '{prediction.layout}' in GiB, by pipeline rank")
    for column in ("rank", *MEMORY_PARTS, "all"):
        table.add_column(column, justify="right")
    for first, last, memory in _group_ranks(prediction.memory):
        name = str(first) if first == last else f"{first}-{last}"
        values = [f"{getattr(memory, part) / GIB:.1f}" for part in MEMORY_PARTS]
        table.add_row(name, *values, f"{memory.total / GIB:.1f}")
    return table


def _group_ranks(memories: tuple[RankMemory, ...]) -> list[tuple[int, int, RankMemory]]:
    runs: list[tuple[int, int, RankMemory]] = []
    for rank, memory in enumerate(memories):
        if runs and abs(runs[-1][2].total - memory.total) < 0.05 * GIB:
            runs[-1] = runs[-1][0], rank, runs[-1][2]
        else:
            runs.append((rank, rank, memory))
    if len(runs) > 12:
        return [*runs[:6], *runs[-6:]]
    return runs


def training_summary(plan: Plan) -> str:
    seconds, hours = plan.training_seconds, plan.training_seconds / 3600
    steps, count = (
        sum(steps for steps, _, _ in plan.phases),
        sum(steps * per_step for steps, per_step, _ in plan.phases),
    )
    time = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours" if hours > 1 else f"{seconds:.0f} s"
    lengths = [
        f"{steps_of_phase} of {per_step / plan.job.samples:.0f} {plan.job.model.throughput_unit}"
        for steps_of_phase, per_step, _ in plan.phases
    ]
    phase_text = f" ({', '.join(lengths)})" if len(lengths) > 1 else ""
    line = f"{steps} steps{phase_text}, {_format_count(count)} {plan.job.model.throughput_unit}: {time}"
    return f"{line}, {_format_count(hours * plan.devices)} device-hours{'' if plan.fits(plan.best) else ', if it did fit'}."
