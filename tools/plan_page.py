"""A plan as one self-contained HTML page: layouts, where time and memory go, the pipeline's timeline, other choices.

    python tools/plan_page.py examples/llama3-70b.toml plan.html --cluster h100 --devices 64

The SVG is drawn by hand: a plotting library would add megabytes of script for a few rectangles. The timeline shows the
actions that training executes (`shardwise.schedules.simulate`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from draw import svg_text

from shardwise.cluster import GIB
from shardwise.console import format_seconds
from shardwise.files import require_parent_folder, write_text
from shardwise.layout import micro_batch_error
from shardwise.planner.estimate import Prediction
from shardwise.planner.plan import Plan, make_estimator, plan_job, time_breakdown
from shardwise.planner.show import MEMORY_PARTS, format_exposed, title, training_summary
from shardwise.schedules.simulate import TimelineEvent, named_program, simulate
from shardwise.watch.page_data import ASSETS

TEMPLATE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
STYLE = (ASSETS / "page.css").read_text(encoding="utf-8")  # one look with the pages of runs
PAGE_WIDTH = 1120  # pixels of every drawing
LABEL_WIDTH = 96  # pixels left of a bar
MAX_ROWS = 16  # ranks in a drawing
TIMELINE_PAIRS = 30  # forward-backward pairs of a rank in the timeline
MAX_ACTIONS = 20_000  # to simulate for the timeline
MEMORY_COLOURS = dict(zip(MEMORY_PARTS, ("#4e79a7", "#f28e2b", "#59a14f", "#e8c547", "#b07aa1", "#bab0ac")))
TIME_COLOURS = ("#4e79a7", "#e15759", "#f28e2b", "#76b7b2", "#b07aa1", "#9c755f", "#e8c547", "#bab0ac")
ACTION_STYLES = {
    "F": ("forward", "#9ecae9"), "B": ("backward", "#ffbf79"), "I": ("backward: input gradients", "#ffbf79"),
    "W": ("backward: weight gradients", "#a5d69a"),
}  # fmt: skip


def plan_page(plan: Plan) -> str:
    """Returns the HTML document: `plan_page.html` with its blanks filled in."""
    texts = {
        "model": plan.job.model.name, "devices": str(plan.devices), "device": plan.cluster.device.name,
        "summary": title(plan), "layout": str(plan.best.layout), "step": format_seconds(plan.best.seconds),
        "training": training_summary(plan), "best_layout": "Best layout" if plan.evaluated > 1 else "Layout",
        "layouts": "Layouts, best first" if plan.evaluated > 1 else "Layout",
    }  # fmt: skip
    blocks = {
        "fit": "" if plan.fits(plan.best) else " <strong>It does not fit.</strong>",
        "layouts_table": _layouts_table(plan), "time_bars": "\n".join(_time_bars(plan)),
        "memory_bars": "\n".join(_memory_bars(plan)), "timeline": "\n".join(_pipeline_section(plan)),
        "near_misses": _bullet_list(plan.near_misses or ("No search: only this layout was predicted.",)),
        "assumptions": _bullet_list(_assumptions(plan)), "style": STYLE,
    }  # fmt: skip
    return TEMPLATE.substitute({name: escape(text) for name, text in texts.items()}, **blocks)


def write_page(plan: Plan, path: Path) -> None:
    require_parent_folder(path)
    write_text(path, plan_page(plan))


def _bullet_list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _layouts_table(plan: Plan) -> str:
    unit = plan.job.model.throughput_unit
    heads = ("#", "layout", "step", f"{unit}/s per device", "model TFLOP/s", "hardware TFLOP/s", "of peak", "GiB",
             "bubble", "exposed communication", "why not first")  # fmt: skip
    text_columns = ("layout", "exposed communication", "why not first")
    best_row, rows = " class='best'", []

    def css_class(head: str) -> str:
        return " class='text'" if head in text_columns else ""

    for number, (p, reason) in enumerate(zip(plan.layouts, plan.reasons, strict=True)):
        cells = (
            str(number + 1), str(p.layout), format_seconds(p.seconds), f"{plan.tokens_per_second(p):.4g}",
            f"{plan.flops(p) / 1e12:.3g}", f"{plan.hardware_flops(p) / 1e12:.3g}", f"{100 * plan.mfu(p):.0f}%",
            f"{p.peak_memory / GIB:.1f}", f"{100 * p.bubble:.1f}%", format_exposed(p), reason,
        )  # fmt: skip
        row = ""
        for head, cell in zip(heads, cells, strict=True):
            text = f"<code>{escape(cell)}</code>" if head == "layout" else escape(cell)
            row += f"<td role='cell' data-label='{escape(head)}'{css_class(head)}>{text}</td>"
        rows.append(f"<tr role='row'{'' if number else best_row}>{row}</tr>")
    header = "".join(f"<th scope='col' role='columnheader'{css_class(head)}>{escape(head)}</th>" for head in heads)
    return (
        f"<table class='cards plan' role='table'><thead role='rowgroup'><tr role='row'>{header}</tr></thead>"
        f"<tbody role='rowgroup'>{''.join(rows)}</tbody></table>"
    )


def _legend(colours: dict[str, str]) -> str:
    keys = [f"<li><i style='background:{colour}'></i>{escape(name)}</li>" for name, colour in colours.items()]
    return f"<ul class='key'>{''.join(keys)}</ul>"


def _svg(height: float, shapes: Iterable[str], label: str) -> str:
    box = f"viewBox='0 0 {PAGE_WIDTH} {height:.0f}' role='img' aria-label='{escape(label)}'"
    drawing = f"<svg xmlns='http://www.w3.org/2000/svg' {box}>{''.join(shapes)}</svg>"
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(label)}, drawn'>{drawing}</div>"


def _rect(x: float, y: float, width: float, height: float, colour: str, note: str) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' width='{max(width, 0.1):.1f}' height='{height}'"
    return f"<rect {place} fill='{colour}' stroke-width='0.6'><title>{escape(note)}</title></rect>"


def _bars(rows: dict[str, dict[str, float]], fill: dict[str, str], most: float, unit: str, limit: float = 0) -> str:
    """Returns a bar for each row, with its name and its sum; `most` is the full width, `limit` is marked."""
    found = []
    for name, values in rows.items():
        note = ", ".join(f"{part} {value:.3g} {unit}" for part, value in values.items())
        parts = "".join(
            f"<i style='width:{100 * v / most:.2f}%;background:{fill[part]}'></i>" for part, v in values.items()
        )
        mark = f"<u style='left:calc({100 * limit / most:.2f}% - 2px)'></u>" if limit else ""
        bar = f"<span class='bar' role='img' title='{escape(note)}' aria-label='{escape(note)}'>{parts}{mark}</span>"
        found.append(f"<span>{escape(name)}</span>{bar}<span>{sum(values.values()):.3g} {unit}</span>")
    return f"<div class='bars'>{''.join(found)}</div>"


def _time_bars(plan: Plan) -> Iterator[str]:
    """Yields a legend and a bar for each layout of the table."""
    breakdowns = [{part: max(0.0, value) for part, value in time_breakdown(p).items()} for p in plan.layouts]
    breakdowns = [{"compute": parts["compute"], **parts} for parts in breakdowns]
    visible = (name for parts in breakdowns for name, value in parts.items() if value > 0.001 * sum(parts.values()))
    names = list(dict.fromkeys(visible))
    colours = dict(zip(names, TIME_COLOURS, strict=False))
    breakdowns = [{name: parts[name] for name in names if name in parts} for parts in breakdowns]
    yield _legend(colours)
    rows = {f"# {n + 1}": parts for n, parts in enumerate(breakdowns)}
    yield _bars(rows, colours, max(sum(parts.values()) for parts in breakdowns), "s")


def _memory_bars(plan: Plan) -> Iterator[str]:
    """Yields a legend and a bar for each pipeline rank, with the device's limit."""
    limit, memories = plan.cluster.device.memory / GIB, plan.best.memory
    hidden = range(MAX_ROWS // 2, len(memories) - MAX_ROWS // 2) if len(memories) > MAX_ROWS else ()
    shown = [rank for rank in range(len(memories)) if rank not in hidden]
    most = max(limit, *(memory.total / GIB for memory in memories))
    rows = {f"rank {n}": {part: size / GIB for part, size in memories[n]._asdict().items()} for n in shown}
    yield _legend(MEMORY_COLOURS | {f"limit: {limit:.3g} GiB": "var(--mark)"})
    yield _bars(rows, MEMORY_COLOURS, most, "GiB", limit)
    if len(shown) < len(memories):
        yield f"<p class='dim'>{len(shown)} of {len(memories)} pipeline ranks shown: the first and the last.</p>"


def _pipeline_section(plan: Plan) -> Iterator[str]:
    """Yields the timeline of the best layout that has a pipeline."""
    prediction = next((prediction for prediction in plan.layouts if prediction.layout.pipeline > 1), None)
    if prediction is None:
        yield "<p>None of these layouts has a pipeline: every rank runs all layers, micro-batch after micro-batch.</p>"
        return
    if prediction is not plan.best:
        yield "<p>The best layout has no pipeline. This is the best layout that has one:</p>"
    yield f"<p><code>{escape(str(prediction.layout))}</code></p>"
    yield from _timeline_chart(plan, prediction)


def _timeline_chart(plan: Plan, prediction: Prediction) -> Iterator[str]:
    layout, estimator = prediction.layout, make_estimator(plan.job, plan.cluster)
    micro_batches = estimator.micro_batches(layout)
    # All micro-batches, or as many as the schedule allows within `MAX_ACTIONS`.
    limit = max(2 * layout.pipeline, MAX_ACTIONS // (3 * layout.stage_count))
    counts = range(min(micro_batches, limit), 0, -1)
    count = next(count for count in counts if micro_batch_error(layout, count) is None)
    if estimator.is_auto_schedule(layout):
        count, simulation = micro_batches, estimator.auto_schedule(layout)
    else:
        program = named_program(layout.schedule, layout.pipeline, layout.stages_per_rank, count)
        simulation = simulate(program, estimator.stage_costs(layout))
    events = simulation.timeline
    rows = min(layout.pipeline, MAX_ROWS)
    first = layout.pipeline - rows  # the last ranks start their backwards first
    begin = min(event.start for event in events if event.rank >= first)
    until = min(simulation.seconds, begin + TIMELINE_PAIRS * max(_micro_batch_spans(events, first)))
    if simulation.seconds - begin < 1.3 * (until - begin):
        until = simulation.seconds
    scale = (PAGE_WIDTH - LABEL_WIDTH - 8) / (until - begin)
    shown = [event for event in events if event.rank >= first and event.start < until]
    yield _legend(dict(ACTION_STYLES[event.kind] for event in shown))
    shapes = [svg_text(LABEL_WIDTH - 8, 26 * rank + 16, f"rank {first + rank}", "end") for rank in range(rows)]
    for event in shown:
        end = min(event.end, until)
        place = LABEL_WIDTH + (event.start - begin) * scale, 26.0 * (event.rank - first), (end - event.start) * scale
        shapes += _action_rect(event, *place, event.stage >= layout.pipeline)
    for tick in range(9):
        moment, anchor = (until - begin) * tick / 8, "start" if tick == 0 else "end" if tick == 8 else "middle"
        word = format_seconds(begin + moment) if begin + moment else "0"
        shapes.append(svg_text(LABEL_WIDTH + moment * scale, 26 * rows + 18, word, anchor))
    yield _svg(26 * rows + 24, shapes, "timeline of the pipeline")
    caption = "Numbers are micro-batches; a dark upper edge marks stages after a rank's first; gaps are the bubble."
    if rows < layout.pipeline:
        caption += f" Shown: the last {rows} of {layout.pipeline} pipeline ranks, from their first action on."
    if until < simulation.seconds:
        caption += f" Shown: {format_seconds(until - begin)} of {format_seconds(simulation.seconds)}."
    if count < micro_batches:
        caption += f" Simulated with {count} of the {micro_batches} micro-batches."
    yield f"<p class='dim'>{escape(caption)}</p>"


def _micro_batch_spans(events: Sequence[TimelineEvent], rank: int) -> list[float]:
    """Returns the seconds of forward and backward of one micro-batch, for each stage of a rank."""
    spans: dict[int, dict[str, float]] = {}
    for event in events:
        if event.rank == rank:
            spans.setdefault(event.stage, {})[event.kind] = event.end - event.start
    return [sum(kinds.values()) for kinds in spans.values()]


def _action_rect(event: TimelineEvent, x: float, y: float, width: float, later: bool) -> Iterator[str]:
    """Yields a rectangle, labelled with its micro-batch if there is room; `later` marks stages after a rank's first."""
    name, colour = ACTION_STYLES[event.kind]
    note = f"{name}, stage {event.stage}, micro-batch {event.micro_batch}: {format_seconds(event.end - event.start)}"
    number = str(event.micro_batch)
    yield _rect(x, y, width, 22, colour, note)
    if later:
        yield f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(width, 0.1):.1f}' height='4' fill='#1f2933' opacity='0.45'/>"
    if width >= 7 * len(number) + 3:
        yield svg_text(x + width / 2, y + 16, number, "middle", "class='on-colour' style='font-size:11px'")


def _assumptions(plan: Plan) -> Iterator[str]:
    device, cluster = plan.cluster.device, plan.cluster
    links = f"{cluster.inner.bandwidth / 1e9:.3g} GB/s within groups of {cluster.domain_size}"
    kind = "measured by calibrate" if cluster.measured else "fitted to published runs"
    rate = device.peak_flops(plan.shape.precision(plan.job.precision)) / 1e12
    yield plan.accuracy
    yield (
        f"{device.name}: {rate:.4g} TFLOP/s in {plan.job.precision}, {device.memory / GIB:.0f} GiB at "
        f"{device.bandwidth / 1e9:.4g} GB/s; links: {links}, {cluster.outer.bandwidth / 1e9:.3g} GB/s between them; "
        f"efficiencies: {kind}."
    )
    yield "All devices are identical and healthy; data loading, checkpoints, validation and failures take no time."
    yield "Memory includes a reserve for the allocator, the driver and the communication library."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("job_file", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--cluster", default="cpu")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--layout")
    options = parser.parse_args()
    write_page(plan_job(options.job_file, options.set, options.cluster, options.devices, options.layout), options.page)


if __name__ == "__main__":
    main()
