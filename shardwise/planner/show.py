"""Prints a plan to a terminal."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console

from shardwise.cluster import GIB, changed
from shardwise.console import fill_in, format_number, format_step, make_table
from shardwise.planner.costs.memory_model import RankMemory
from shardwise.planner.estimate import Prediction
from shardwise.planner.plan import Plan, count_parameters, make_estimator

MEMORY_PARTS = RankMemory._fields
TITLE, TRAINING, COSTS, ENDING = (
    Path(__file__).with_name(f"{name}.txt") for name in ("title", "training", "costs", "ending")
)


def show_plan(plan: Plan, console: Console, costs: list[str]) -> None:
    console.print(title(plan), highlight=False, soft_wrap=True)
    console.print(layouts_table(plan))
    for number, (prediction, why) in enumerate(zip(plan.layouts, plan.reasons, strict=True), start=1):
        told = f"{number:3d}  {prediction.layout}{f' ({why})' if why else ''}"
        for line in (told, f"     exposed: {format_exposed(prediction) or 'nothing'}"):
            console.print(fill(line, console.width, subsequent_indent=" " * 5), highlight=False)
    console.print(memory_table(plan.best))
    facts = {"plan": plan, "training": training_summary(plan), "costs": costs}
    for line in fill_in(ENDING, facts).splitlines():
        indent = 4 * " " if line.startswith(" ") else ""
        console.print(fill(line, console.width, subsequent_indent=indent), highlight=False)


def title(plan: Plan) -> str:
    facts = {"plan": plan, "cluster": plan.cluster, "device": plan.cluster.device, "GIB": GIB}
    return fill_in(TITLE, facts | {"parameters": count_parameters(plan.job)})


def layouts_table(plan: Plan) -> Any:
    rates = f"{plan.job.model.throughput_unit}/s per device", "model TFLOP/s", "hardware TFLOP/s", "of peak"
    table = make_table("layouts, best first", ("#", "step", *rates, "GiB", "bubble"), numbers=True)
    for number, p in enumerate(plan.layouts, start=1):
        rate = plan.tokens_per_second(p)
        table.add_row(
            str(number), format_step(p.seconds), format_number(rate), format_number(plan.flops(p) / 1e12),
            format_number(plan.hardware_flops(p) / 1e12), f"{100 * plan.mfu(p):.0f}%",
            f"{p.peak_memory / GIB:,.1f}", f"{100 * p.bubble:.1f}%")  # fmt: skip
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
    return fill_in(TRAINING, {"plan": plan})


def bottlenecks(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yields kinds of hardware with how much faster the best layout's step is with twice of each, the largest first."""
    cluster, device = plan.cluster, plan.cluster.device
    kinds = {
        "matmul FLOP/s": ("flops", device.peak_flops("bf16")), "memory bandwidth": ("bandwidth", device.bandwidth),
        "bandwidth within a node": ("inner", cluster.inner.bandwidth),
        "bandwidth between nodes": ("outer", cluster.outer.bandwidth)}  # fmt: skip
    doubled = {name: changed(cluster, key, 2 * value) for name, (key, value) in kinds.items()}
    seconds = {name: make_estimator(plan.job, c).predict_seconds(plan.best.layout) for name, c in doubled.items()}
    yield from ((name, 1.0 - seconds[name] / plan.best.seconds) for name in sorted(seconds, key=seconds.__getitem__))


def cost_lines(plan: Plan, price: float | None) -> list[str]:
    """Returns what the run costs and what would make it faster. `price`: of a device for an hour."""
    return fill_in(COSTS, {"plan": plan, "price": price, "gains": list(bottlenecks(plan))}).splitlines()
