"""Everything the page of a run, or of runs compared, shows, as one JSON value. Long runs are downsampled here, not in
the browser."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from shardwise.console import format_seconds
from shardwise.errors import JobError, LayoutError
from shardwise.layout import AXES, Layout, micro_batch_error
from shardwise.metrics import rank_metrics
from shardwise.metrics.trackers import flatten
from shardwise.schedules.simulate import Action, Simulation, StageCosts, build_program, named_program, simulate
from shardwise.watch.run_data import TIME_CATEGORIES, Goodput, RunData, bin_means, bin_starts, goodput, to_json_list

MAX_POINTS, COMPARED_POINTS = 800, 400  # points of a curve
HEATMAP_COLUMNS, HEATMAP_ROWS = 240, 128
MAX_EVENTS = 400
CURVES = ("grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib", "loss_scale", "gradient_compression_ratio",
         "expert_imbalance", "expert_drop_fraction")  # fmt: skip
HEADERS = (
    "run", "status", "layout", "steps", "samples", "loss", "validation loss", "step time", "throughput", "goodput",
)  # fmt: skip
# The other axes use several kinds.
COLLECTIVES = {"replicate": "all-reduce", "world": "all-reduce", "expert": "all-to-all"}


def category_label(kind: str, name: str) -> str:
    """Returns the label of a time category, e.g. `all-reduce wait (replicate)`."""
    if kind == "wait_seconds":
        return "pipeline bubble" if name == "pipeline" else f"{COLLECTIVES.get(name, 'collective')} wait ({name})"
    return {"data": "data loading"}.get(name, name)


def page_data(run: RunData) -> dict[str, Any]:
    good, timeline = goodput(run), pipeline_data(run)
    return {
        "name": run.name, "status": run.status, "created": time.time(), "unit": run.unit,
        "layout": str(run.plan.get("layout", run.job.layout)), "world": run.world, "steps": run.job.total_steps,
        "tiles": tiles(run, good), "series": series(run), "time_breakdown": time_breakdown(run),
        "ranks": rank_breakdown(run), "heatmap": heatmap(run), "memory": memory_table(run),
        "pipeline": timeline, "mesh": mesh_summary(run), "plan": plan_accuracy(run, timeline),
        "events": run.events[-MAX_EVENTS:], "summary": summary_sentences(run, good), "job": run.job.to_toml(),
        "goodput": {"wall_seconds": good.wall_seconds, "share": good.share, "lost_seconds": good.lost_seconds},
        "experts": run.last_record.get("expert_load", []),
    }  # fmt: skip


def recent_median(values: np.ndarray, count: int = 50) -> float:
    """Returns the median of the last `count` finite values, or NaN if there are none."""
    values = values[np.isfinite(values)][-count:]
    return float(np.median(values)) if len(values) else float("nan")


def tiles(run: RunData, good: Goodput) -> list[list[str]]:
    """Returns the key figures at the top of the page, as (label, value)."""
    if not run.steps:
        return [["steps", "none yet"]]
    done, total = run.steps[-1], run.job.total_steps
    loss = run.last_record.get("loss", "unknown")
    step = recent_median(run.column("seconds"))
    figures = [["step", f"{done:,} of {total:,}"], ["loss", f"{loss:.4f}" if isinstance(loss, float) else str(loss)]]
    speed = recent_median(run.column("tokens_per_s"))
    figures += [["step time", format_seconds(step)], [f"{run.unit}/s", f"{speed:,.0f}"]]
    share = time_shares(run)
    if share:
        busy = share["phase_seconds", "compute"] + share["phase_seconds", "optimizer"]
        figures.append(["device busy", f"{100 * busy:.0f}%"])
    mfu = recent_median(run.column("mfu"))
    if np.isfinite(mfu):
        figures.append(["MFU", f"{100 * mfu:.1f}%"])
    figures.append(["goodput", f"{100 * good.share:.0f}%"])
    figures.append(["peak memory", f"{max(run.memory.get('peak', [run.last_record.get('memory_gib', 0)])):.3g} GiB"])
    if run.status not in ("finished", "stopped") and done < total:
        figures.append(["time left", format_seconds((total - done) * step)])
    return figures


def series(run: RunData) -> dict[str, Any]:
    """Returns curves over steps as bin means; the loss also has bin minima and maxima, so that no spike is lost."""
    starts = bin_starts(len(run.steps), MAX_POINTS)
    if not len(starts):
        return {"step": []}
    curves: dict[str, Any] = {"step": np.frombuffer(run.steps, dtype=np.int64)[starts].tolist()}
    loss = run.column("loss")
    curves["loss"] = to_json_list(bin_means(loss, starts))
    finite_loss = np.where(np.isfinite(loss), loss, np.nan)
    curves["loss_low"] = to_json_list(np.fmin.reduceat(finite_loss, starts))
    curves["loss_high"] = to_json_list(np.fmax.reduceat(finite_loss, starts))
    for name in CURVES:
        values = run.column(name)
        if np.isfinite(values).any():
            curves[name] = to_json_list(bin_means(values, starts))
    curves["non_finite_losses"] = run.non_finite_losses[-50:]
    return curves


def _stack_lines(run: RunData) -> np.ndarray:
    """Returns seconds per step as an array (lines of ranks.jsonl, time categories, ranks)."""
    return np.stack(run.category_seconds) if run.category_seconds else np.zeros((0, len(TIME_CATEGORIES), 0))


def time_breakdown(run: RunData) -> dict[str, Any]:
    """Returns seconds per step by category, averaged over ranks, over the run."""
    lines = _stack_lines(run)
    breakdown = lines.sum(2) / max(1, lines.shape[2])
    starts = run.line_bins(MAX_POINTS // 2)
    shown = _visible_categories(breakdown.T)
    return {
        "step": [run.line_steps[begin][0] for begin in starts],
        "names": [category_label(*TIME_CATEGORIES[index]) for index in shown],
        "values": [to_json_list(bin_means(breakdown[:, index], starts), 4) for index in shown],
    }


def _visible_categories(seconds: np.ndarray) -> list[int]:
    """Returns the indices of the categories (rows) that ever exceed 0.01% of the largest step time (column sum)."""
    return np.flatnonzero(seconds.max(1) > 1e-4 * seconds.sum(0).max()).tolist() if seconds.size else []


def seconds_by_rank(run: RunData) -> np.ndarray:
    """Returns mean seconds per step as an array (time categories, ranks), without startup (first line) if possible."""
    lines = _stack_lines(run)
    if not len(lines):
        return np.zeros((len(TIME_CATEGORIES), 0))
    first = 1 if len(lines) > 1 else 0
    weights = np.array([steps for _, steps in run.line_steps[first:]], dtype=float)
    return np.asarray(np.average(lines[first:], axis=0, weights=weights))


def rank_breakdown(run: RunData) -> dict[str, Any]:
    table = seconds_by_rank(run)
    shown = _visible_categories(table)
    return {
        "names": [category_label(*TIME_CATEGORIES[index]) for index in shown],
        "values": [to_json_list(table[index], 4) for index in shown],
        "stragglers": [alert["rank"] for alert in rank_alerts(run)],
    }


def time_shares(run: RunData) -> dict[tuple[str, str], float]:
    """Returns each time category's share of the step time, over all ranks."""
    table = seconds_by_rank(run)
    total = float(table.sum())
    return {key: float(row.sum()) / total for key, row in zip(TIME_CATEGORIES, table)} if total else {}


def heatmap(run: RunData) -> dict[str, Any]:
    """Returns busy seconds per step (compute, optimizer, data loading) by rank, over the run."""
    lines = _stack_lines(run)
    busy_phases = [TIME_CATEGORIES.index(("phase_seconds", name)) for name in ("compute", "optimizer", "data")]
    busy_seconds = lines[:, busy_phases].sum(1)
    starts, ranks = run.line_bins(HEATMAP_COLUMNS), bin_starts(busy_seconds.shape[1], HEATMAP_ROWS)
    if not busy_seconds.size:
        return {"ranks": [], "step": [], "values": []}
    means = np.add.reduceat(busy_seconds, starts) / np.diff([*starts, len(busy_seconds)])[:, None]
    busy_seconds = np.maximum.reduceat(means, ranks, axis=1)
    return {
        "ranks": ranks.tolist(), "step": [run.line_steps[begin][0] for begin in starts],
        "values": [to_json_list(row, 3) for row in busy_seconds.T],
    }  # fmt: skip


def memory_table(run: RunData) -> dict[str, Any]:
    """Returns peak GiB per rank, by kind where it was counted, and the prediction of its pipeline rank."""
    prediction, layout = run.plan.get("predicted", {}), run.layout
    predicted_gib, rows = prediction.get("memory_gib", []), []
    for rank in bin_starts(len(run.memory.get("peak", [])), HEATMAP_ROWS).tolist():
        known: dict[str, float] = {name: values[rank] for name, values in run.memory.items()}
        other = max(0.0, known.pop("peak") - sum(known.values()))
        row: dict[str, Any] = {"rank": rank, **known, "activations and other": other}
        stage = rank // (layout.world // layout.pipeline if layout is not None else 1)
        if stage < len(predicted_gib):
            row["predicted"] = sum(value for key, value in predicted_gib[stage].items() if key != "pipeline_rank")
        rows.append(row)
    return {"limit": prediction.get("device_memory_gib"), "rows": rows}


def mesh_summary(run: RunData) -> dict[str, Any] | None:
    """Returns the mesh axes, outermost first, the share of step time waited on each, and compute time by rank."""
    layout = run.layout
    if layout is None:
        return None
    waits = {name: share for (kind, name), share in time_shares(run).items() if kind == "wait_seconds"}
    compute = seconds_by_rank(run)[TIME_CATEGORIES.index(("phase_seconds", "compute"))]
    return {
        "axes": [[axis, getattr(layout, axis)] for axis in AXES],
        "waits": {axis: round(share, 4) for axis, share in waits.items() if share > 1e-4},
        "compute": to_json_list(compute, 3), "stages": run.plan.get("stages", []),
    }  # fmt: skip


def plan_accuracy(run: RunData, timeline: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a row per predicted quantity: predicted, measured, error; and the reasons for the chosen plan."""
    prediction, rows = run.plan.get("predicted", {}), []

    def add_row(label: str, predicted: float | None, measured: float | None, unit: str, scale: float = 1.0) -> None:
        if predicted is not None and measured is not None and np.isfinite(measured):
            error = f"{100 * (predicted / measured - 1):+.0f}%" if measured else ""
            both = (f"{v * scale:,.0f}" if v > 1e3 else f"{v * scale:.3g} {unit}" for v in (predicted, measured))
            rows.append([label, *both, error])

    add_row("step time", prediction.get("step_seconds"), recent_median(run.column("seconds")), "s")
    add_row(f"{run.unit}/s", prediction.get("tokens_per_s"), recent_median(run.column("tokens_per_s")), "")
    peak = max(run.memory.get("peak", []), default=None)
    add_row("peak memory per rank", prediction.get("peak_memory_gib"), peak, "GiB")
    share = time_shares(run)
    exposed = prediction.get("exposed_seconds", {})
    step = statistics.mean(seconds_by_rank(run).sum(0)) if share else 0.0
    for axis, seconds in exposed.items() if isinstance(exposed, dict) else ():
        # The plan counts all data-parallel communication as "shard".
        axes = ("shard", "replicate", "data") if axis == "shard" else (axis,)
        measured = step * sum(share.get(("wait_seconds", name), 0.0) for name in axes)
        if axis != "pipeline":
            add_row(f"exposed communication ({'data parallel' if axis == 'shard' else axis})", seconds, measured, "s")
    if timeline and "measured" in timeline:
        predicted = timeline.get("predicted", {}).get("bubble")
        add_row("pipeline bubble", predicted, timeline["measured"]["bubble"], "%", 100.0)
    return {"reason": run.plan.get("reason", ""), "rows": rows, "rejected": run.plan.get("rejected", [])[:20]}


def rank_alerts(run: RunData) -> list[dict[str, Any]]:
    """Returns the ranks that are stragglers, or stall on data, over the whole run."""
    table, layout = seconds_by_rank(run), run.layout
    if not table.size:
        return []
    alerts = rank_metrics.find_alerts(table, table.sum(0), layout.pipeline if layout is not None else 1)
    return [{"rank": int(key.split()[1]), "message": sentence} for key, sentence in alerts]


def summary_sentences(run: RunData, good: Goodput) -> list[str]:
    """Returns the summary of a run: step time breakdown, alerts, slow axes and goodput, a sentence each."""
    if not run.steps:
        return ["No step has been measured yet."]
    shares = sorted(time_shares(run).items(), key=lambda item: -item[1])
    breakdown = ", ".join(f"{100 * share:.0f}% {category_label(*key)}" for key, share in shares if share >= 0.01)
    step_time = format_seconds(recent_median(run.column("seconds")))
    sentences = [f"A step takes {step_time}: {breakdown}."] if breakdown else []
    sentences += [alert["message"][0].upper() + alert["message"][1:] for alert in rank_alerts(run)]
    for (kind, axis), share in shares:
        if share > rank_metrics.ALERT_SHARE and kind == "wait_seconds" and axis != "pipeline":
            sentences.append(f"Ranks spend {100 * share:.0f}% of each step waiting for collectives on the {axis} axis.")
    if good.wall_seconds:
        causes = sorted(good.lost_seconds.items(), key=lambda item: -item[1])
        lost = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in causes) or "none"
        wall_time = format_seconds(good.wall_seconds)
        sentences.append(f"Goodput is {100 * good.share:.0f}% of {wall_time} wall time; lost time: {lost}.")
    return sentences


MAX_ACTIONS = 4000  # actions that the page draws


def pipeline_data(run: RunData) -> dict[str, Any] | None:
    """Returns the predicted and measured timelines; None without a pipeline.

    The bubble is defined alike for both: the share of the time from the start of the first action to the end of the
    last in which a rank runs no action, averaged over ranks."""
    layout, micro_batches = run.layout, run.plan.get("micro_batches", 0)
    if layout is None or layout.pipeline == 1 or micro_batches < 1 or micro_batch_error(layout, micro_batches):
        return None
    data: dict[str, Any] = {"ranks": layout.pipeline, "schedule": layout.schedule, "micro_batches": micro_batches}
    with suppress(KeyError, ValueError, TypeError, LayoutError):  # no valid prediction
        simulation = _simulate_plan(run.plan, layout)
        actions = [[*event, round(start, 6), round(end, 6)] for *event, start, end in simulation.timeline]
        bubble = _bubble(simulation.timeline, layout.pipeline)
        data["predicted"] = {"seconds": simulation.seconds, "bubble": bubble, "actions": actions[:MAX_ACTIONS]}
    if measured := _measured_steps(run, layout):
        step = max(measured)
        begin = min(action[4] for action in measured[step])
        actions = [[*action, round(a - begin, 6), round(b - begin, 6)] for *action, a, b in measured[step]]
        bubble = statistics.mean(_bubble(actions, layout.pipeline) for actions in measured.values())
        data["measured"] = {
            "step": step, "steps": len(measured), "seconds": _span(measured[step]), "bubble": bubble,
            "actions": actions[:MAX_ACTIONS],
        }  # fmt: skip
    return data


def _simulate_plan(plan: dict[str, Any], layout: Layout) -> Simulation:
    seconds = plan["predicted"]["stage_seconds"]
    costs = StageCosts(*(tuple(seconds[key]) for key in ("forward", "backward_input", "backward_weight")))
    if "order" in plan:
        rows = [[Action(int(stage), str(kind), int(batch)) for stage, kind, batch in row] for row in plan["order"]]
        return simulate(build_program(dict(enumerate(rows))), costs)
    shape = layout.pipeline, layout.stages_per_rank, plan["micro_batches"]
    return simulate(named_program(layout.schedule, *shape), costs)


def _measured_steps(run: RunData, layout: Layout) -> dict[int, list[list[Any]]]:
    """Returns the recorded actions of all pipeline ranks by step, without steps that some rank did not record."""
    ranks_per_stage = layout.world // layout.pipeline
    # Steps before the last resume may have run in another layout.
    last_resume = max((event.get("step", 0) for event in run.events_of_kind("resumed")), default=0)
    steps = {}
    for step, ranks in run.timelines().items():
        rows = {rank // ranks_per_stage: actions for rank, actions in ranks.items() if rank < layout.world}
        if len(rows) == layout.pipeline and step > last_resume:
            steps[step] = [[rank, *action] for rank, actions in sorted(rows.items()) for action in actions]
    return steps


def _span(actions: Sequence[Sequence[Any]]) -> float:
    return float(max(action[5] for action in actions) - min(action[4] for action in actions))


def _bubble(actions: Sequence[Sequence[Any]], ranks: int) -> float:
    return 1.0 - sum(action[5] - action[4] for action in actions) / ranks / _span(actions)


def compare(paths: list[Path]) -> dict[str, Any]:
    """Returns the comparison as one JSON value, for the page and the terminal."""
    if len(paths) < 2:
        raise JobError("compare needs at least two run folders.")
    runs = [RunData(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    rows = [[name, *_compared_row(run)] for name, run in zip(names, runs, strict=True)]
    curves = [{"name": name, **_compared_curves(run)} for name, run in zip(names, runs, strict=True)]
    return {"runs": curves, "headers": list(HEADERS), "rows": rows, "differences": differences(runs)}


def _compared_row(run: RunData) -> list[str]:
    loss, validations = recent_median(run.column("loss"), 10), run.events_of_kind("validation")
    validation_loss = validations[-1].get("loss") if validations else None
    speed = recent_median(run.column("tokens_per_s"))
    return [
        run.status, str(run.plan.get("layout", "")), str(len(run.steps)), str(run.last_record.get("samples", 0)),
        _format_number(loss, ".4f"), _format_number(validation_loss, ".4f"),
        format_seconds(recent_median(run.column("seconds"))) if run.steps else "",
        f"{_format_number(speed, ',.0f')} {run.unit}/s" if run.steps else "",
        f"{100 * goodput(run).share:.0f}%",
    ]  # fmt: skip


def _format_number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) and np.isfinite(value) else ""


def _compared_curves(run: RunData) -> dict[str, Any]:
    starts = bin_starts(len(run.steps), COMPARED_POINTS)
    time = run.column("time")
    return {
        "samples": to_json_list(run.column("samples")[starts], 9),
        "hours": to_json_list((time[starts] - time[:1]) / 3600, 7),
        "loss": to_json_list(bin_means(run.column("loss"), starts)),
        "tokens_per_s": to_json_list(bin_means(run.column("tokens_per_s"), starts)),
    }


def differences(runs: list[RunData]) -> list[list[str]]:
    """Returns a row per job key that differs: the key, then its value in each run."""
    values = [flatten(run.job.model_dump()) for run in runs]
    keys = sorted({key for job in values for key in job} - {"run.folder"})
    rows = [[key, *(str(job.get(key, "")) for job in values)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def comparison_tables(comparison: dict[str, Any]) -> list[Table]:
    names = [escape(run["name"]) for run in comparison["runs"]]
    overview = Table("", *names, title="runs compared")
    for index, header in enumerate(HEADERS[1:], start=1):
        overview.add_row(header, *(escape(row[index]) for row in comparison["rows"]))
    jobs = Table("key", *names, title="job differences")
    for row in comparison["differences"]:
        jobs.add_row(*map(escape, row))
    curves = Table("samples", *names, title="loss over samples")
    sample_counts = sorted({count for run in comparison["runs"] for count in run["samples"] if count is not None})
    for count in [sample_counts[n] for n in bin_starts(len(sample_counts), 10)]:
        values = (dict(zip(run["samples"], run["loss"])).get(count) for run in comparison["runs"])
        curves.add_row(f"{count:,.0f}", *(_format_number(value, ".4f") for value in values))
    return [overview, *([jobs] if comparison["differences"] else []), *([curves] if sample_counts else [])]
