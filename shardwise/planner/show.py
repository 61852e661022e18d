"""A plan for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.cluster import GIB
from shardwise.planner.memory import Memory
from shardwise.planner.plan import Plan
from shardwise.planner.predict import Prediction

PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")


def show_plan(plan: Plan, console: Console) -> None:
    model, device = plan.job.model, plan.cluster.device
    console.print(
        f"{model.name}: {model.layers} layers of width {model.width}, {plan.job.samples} samples of {model.sequence} "
        f"tokens in {plan.job.precision}, on {plan.devices} x {device.name} ({device.memory / GIB:.0f} GiB)",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(layouts(plan))
    if not plan.fits(plan.best):
        console.print("No layout fits; this is the one that needs least memory.", highlight=False)
    console.print(memory(plan.best))
    console.print(budget(plan), highlight=False)
    for line in plan.lost:
        console.print(f"  {line}", highlight=False)
    if plan.evaluated > 1:
        console.print(f"{plan.evaluated} layouts judged in {plan.seconds:.2f} s.", highlight=False)


def layouts(plan: Plan) -> Table:
    columns = ("layout", "step s", "tokens/s/device", "TFLOP/s", "of peak", "GiB", "bubble", "exposed", "why not first")
    table = Table(title="layouts, best first")
    for column in columns:
        left = column in ("layout", "exposed", "why not first")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for prediction, reason in zip(plan.layouts, plan.reasons, strict=True):
        table.add_row(
            str(prediction.layout), f"{prediction.seconds:.3g}", f"{plan.tokens_per_second(prediction):.4g}",
            f"{plan.flops(prediction) / 1e12:.3g}", f"{100 * plan.utilisation(prediction):.0f}%",
            f"{prediction.peak / GIB:.1f}", f"{100 * prediction.bubble:.1f}%", exposed(prediction), reason,
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
    steps = plan.job.total_steps
    seconds = steps * plan.best.seconds
    tokens = steps * plan.job.samples * plan.job.model.sequence
    hours = seconds / 3600
    time = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours" if hours > 1 else f"{seconds:.0f} s"
    return f"{steps} steps, {tokens / 1e9:.3g} billion tokens: {time}, {hours * plan.devices:.4g} device-hours."
