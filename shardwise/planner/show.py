"""A plan for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.cluster import GIB
from shardwise.planner.listed import Listed
from shardwise.planner.memory import Memory
from shardwise.planner.plan import Plan
from shardwise.planner.predict import Prediction
from shardwise.planner.stated import SENTENCE

WIDE = 150  # columns of a terminal that can show layouts and reasons in the table itself
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")


def show_plan(plan: Plan, console: Console) -> None:
    console.print(title(plan), highlight=False, soft_wrap=True)
    console.print(layouts(plan, console.width >= WIDE))
    if console.width < WIDE:
        for number, (prediction, why) in enumerate(zip(plan.layouts, plan.reasons, strict=True)):
            console.print(f"{number + 1:3d}  {prediction.layout}{f' ({why})' if why else ''}", highlight=False)
            console.print(f"     exposed: {exposed(prediction) or 'nothing'}", highlight=False)
    if not plan.fits(plan.best):
        what = "It does not fit" if plan.evaluated == 1 else "No layout fits; this is the one that needs least memory"
        console.print(f"{what}: {plan.best.peak / GIB:.0f} GiB of {plan.cluster.device.memory / GIB:.0f}.")
    console.print(memory(plan.best))
    console.print(budget(plan), highlight=False)
    for line in plan.lost:
        console.print(f"  {line}", highlight=False)
    console.print(f"Faults: {plan.effective.sentence(plan.best.seconds)}", highlight=False)
    console.print(SENTENCE, highlight=False)
    if plan.evaluated > 1:
        console.print(f"{plan.evaluated} layouts judged in {plan.seconds:.2f} s.", highlight=False)


def title(plan: Plan) -> str:
    model, shape, device = plan.job.model, plan.shape, plan.cluster.device
    used = f", {_short(shape.active_parameters)} of them used by a token" if shape.experts else ""
    parts = f"{shape.layers} layers of width {shape.width}"
    if isinstance(shape, Listed):
        parts = f"{shape.layers} pieces"
        if shape.tables:
            share = shape.tables.bytes / plan.best.layout.data / GIB
            parts += f" and {shape.tables.bytes / GIB:.0f} GiB of tables, {share:.0f} in each rank's host memory"
    each = f" of {model.sequence} tokens" if model.unit == "tokens" else ""
    return (
        f"{model.name}: {_short(shape.parameters)} parameters{used}, {parts}; {plan.job.samples} samples{each} in "
        f"{plan.job.precision}, on {plan.devices} x {device.name} ({device.memory / GIB:.0f} GiB)"
    )


def _short(number: float) -> str:
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.4g}" if number < 1e4 else f"{number:,.0f}"


def layouts(plan: Plan, wide: bool) -> Table:
    """Where there is no room for words beside the numbers, layouts have a number of their own instead."""
    numbers = ("step s", f"{plan.job.model.unit}/s/device", "model TFLOP/s", "hardware TFLOP/s", "of peak", "GiB",
               "bubble")  # fmt: skip
    table = Table(title="layouts, best first")
    for column in ("layout", *numbers, "exposed", "why not first") if wide else ("#", *numbers):
        table.add_column(column, justify="right" if column in (*numbers, "#") else "left", overflow="fold")
    for number, (one, reason) in enumerate(zip(plan.layouts, plan.reasons, strict=True)):
        table.add_row(
            str(one.layout if wide else number + 1), f"{one.seconds:.3g}", f"{plan.tokens_per_second(one):.4g}",
            f"{plan.flops(one) / 1e12:.3g}", f"{plan.hardware_flops(one) / 1e12:.3g}",
            f"{100 * plan.utilisation(one):.0f}%", f"{one.peak / GIB:.1f}", f"{100 * one.bubble:.1f}%",
            *([exposed(one), reason] if wide else []),
        )  # fmt: skip
    return table


def exposed(prediction: Prediction) -> str:
    shares = {axis: seconds / prediction.seconds for axis, seconds in prediction.exposed.items()}
    return ", ".join(f"{axis} {100 * share:.1f}%" for axis, share in shares.items() if share >= 0.001)


def memory(prediction: Prediction) -> Table:
    """One line per pipeline rank; equal neighbours share a line."""
    table = Table(title=f"memory of '{prediction.layout}' in GiB, by pipeline rank")
    for column in ("rank", *PARTS, "all"):
        table.add_column(column, justify="right")
    for first, last, held in _runs(prediction.memory):
        name = str(first) if first == last else f"{first}-{last}"
        values = [f"{getattr(held, part) / GIB:.1f}" for part in PARTS]
        table.add_row(name, *values, f"{held.total / GIB:.1f}")
    return table


def _runs(memories: tuple[Memory, ...]) -> list[tuple[int, int, Memory]]:
    runs: list[tuple[int, int, Memory]] = []
    for rank, held in enumerate(memories):
        if runs and abs(runs[-1][2].total - held.total) < 0.05 * GIB:
            runs[-1] = runs[-1][0], rank, runs[-1][2]
        else:
            runs.append((rank, rank, held))
    if len(runs) > 12:
        return [*runs[:6], *runs[-6:]]
    return runs


def budget(plan: Plan) -> str:
    seconds, hours = plan.training, plan.training / 3600
    steps, count = sum(steps for steps, _, _ in plan.phases), sum(steps * each for steps, each, _ in plan.phases)
    time = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours" if hours > 1 else f"{seconds:.0f} s"
    lengths = [f"{some} of {each / plan.job.samples:.0f} {plan.job.model.unit}" for some, each, _ in plan.phases]
    parts = f" ({', '.join(lengths)})" if len(lengths) > 1 else ""
    line = f"{steps} steps{parts}, {_short(count)} {plan.job.model.unit}: {time}"
    return f"{line}, {_short(hours * plan.devices)} device-hours{'' if plan.fits(plan.best) else ', if it did fit'}."
