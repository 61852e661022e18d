"""What the page of a run, or of runs compared, shows, as one JSON value; downsampled here, not in the browser."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from shardwise.console import fill_in, format_seconds, make_table
from shardwise.errors import JobError, LayoutError
from shardwise.layout import AXES, Layout, micro_batch_error
from shardwise.metrics import rank_metrics
from shardwise.metrics.trackers import flatten
from shardwise.schedules.simulate import Action, Simulation, StageCosts, build_program, named_program, simulate
from shardwise.watch.run_data import TIME_CATEGORIES, Goodput, RunData, bin_means, bin_starts, goodput, to_json_list

ASSETS = Path(__file__).parent / "assets"
MAX_POINTS, COMPARED_POINTS, MAX_SEGMENTS = 2000, 400, 8  # points of a curve; layouts of a run
HEATMAP_COLUMNS, HEATMAP_ROWS = 240, 128
MAX_EVENTS = 400
MAX_ACTIONS = 4000  # actions that the page draws
CURVES = ("grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib", "loss_scale", "gradient_compression_ratio",
         "expert_imbalance", "expert_drop_fraction", *rank_metrics.GPU_SENSORS)  # fmt: skip
HEADERS = ("run", "status", "layout", "steps", "samples", "loss (last 10)", "validation loss", "mean step time",
           "throughput", "goodput")  # fmt: skip
COLLECTIVES = {"replicate": "all-reduce", "world": "all-reduce", "expert": "all-to-all"}  # other axes use several kinds


def category_label(kind: str, name: str) -> str:
    """Returns the label of a time category, e.g. `all-reduce wait (replicate)`."""
    if kind == "wait_seconds":
        return "pipeline bubble" if name == "pipeline" else f"{COLLECTIVES.get(name, 'collective')} wait ({name})"
    return {"data": "data loading"}.get(name, name)


def page_data(run: RunData) -> dict[str, Any]:
    good, parts = goodput(run), list(enumerate(run.segments()))
    segments = [{"before": before, **segment_data(run.segment(n), good)} for n, (before, *_) in parts[-MAX_SEGMENTS:]]
    return {"name": run.name, "status": run.status, "created": time.time(), "unit": run.unit,
            "steps": run.job.total_steps, **segments[-1], "segments": segments[:-1], "series": series(run),
            "notes": run.notes, "events": run.events[-MAX_EVENTS:], "job": run.job.to_toml(), "goodput": vars(good),
            "experts": run.last_record.get("expert_load", [])}  # fmt: skip


def segment_data(run: RunData, good: Goodput) -> dict[str, Any]:
    """Returns what the page shows of one layout of a run."""
    return {"layout": str(run.plan.get("layout", run.job.layout)), "world": run.world, "figures": figures(run),
            "plan": plan_summary(run), "mesh": mesh_summary(run), "pipeline": pipeline_data(run),
            "summary": summary_sentences(run, good), "time_breakdown": time_breakdown(run),
            "ranks": rank_breakdown(run), "heatmap": heatmap(run), "memory": memory_table(run)}  # fmt: skip


def recent_median(values: np.ndarray, count: int = 50) -> float:
    """Returns the median of the last `count` finite values, or NaN if there are none."""
    values = values[np.isfinite(values)][-count:]
    return float(np.median(values)) if len(values) else float("nan")


def step_seconds(run: RunData) -> float:
    """Returns the mean step time, which is what the time categories add up to on the mean of the ranks."""
    table = seconds_by_rank(run)
    return float(table.sum(0).mean()) if table.size else recent_median(run.column("seconds"))


def figures(run: RunData) -> dict[str, float | None]:
    """Returns the key figures at the top of the page; None where one is not known."""
    share, peak = time_shares(run), run.memory.get("peak") or run.column("memory_gib").tolist()[-1:]
    busy = sum(share.get(("phase_seconds", name), np.nan) for name in ("compute", "optimizer"))
    units = recent_median(run.column("tokens_per_s") * run.column("seconds"))  # tokens, images or samples of a step
    values = {"done": run.steps[-1] if run.steps else 0, "step_seconds": step_seconds(run), "units": units,
              "busy": busy, "mfu": recent_median(run.column("mfu")), "peak_gib": max(peak, default=np.nan)}  # fmt: skip
    return dict(zip(values, to_json_list(np.array([*values.values()]), 9), strict=True))


def series(run: RunData, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Returns curves over steps as bin means; the loss also has bin minima and maxima, so that no spike is lost."""
    starts = bin_starts(len(run.steps), max_points)
    if not len(starts):
        return dict.fromkeys(("step", "samples", "hours", "loss"), [])
    curves: dict[str, Any] = {"step": np.frombuffer(run.steps, dtype=np.int64)[starts].tolist()}
    loss = run.column("loss")
    curves["loss"] = to_json_list(bin_means(loss, starts), 7)
    finite_loss = np.where(np.isfinite(loss), loss, np.nan)
    curves["loss_low"] = to_json_list(np.fmin.reduceat(finite_loss, starts), 7)
    curves["loss_high"] = to_json_list(np.fmax.reduceat(finite_loss, starts), 7)
    hours = (run.column("time") - np.fmin.reduce(run.column("time"))) / 3600
    curves |= {"samples": to_json_list(run.column("samples")[starts], 9), "hours": to_json_list(hours[starts], 7)}
    for name in CURVES:
        values = run.column(name)
        if np.isfinite(values).any():
            curves[name] = to_json_list(bin_means(values, starts))
    return curves | {"non_finite_losses": run.non_finite_losses[-50:], "per_sample": run.job.model.sequence_length}


def _stack_lines(run: RunData) -> np.ndarray:
    """Returns seconds per step as an array (lines of ranks.jsonl, time categories, ranks)."""
    return np.stack(run.category_seconds) if run.category_seconds else np.zeros((0, len(TIME_CATEGORIES), 0))


def time_breakdown(run: RunData) -> dict[str, Any]:
    """Returns seconds per step by category, averaged over ranks, over the run."""
    lines = _stack_lines(run)
    breakdown = lines.sum(2) / max(1, lines.shape[2])
    starts = run.line_bins(MAX_POINTS // 2)
    shown = _visible_categories(breakdown.T)
    return {"step": [run.line_steps[begin][0] for begin in starts],
            "names": [category_label(*TIME_CATEGORIES[index]) for index in shown],
            "values": [to_json_list(bin_means(breakdown[:, index], starts), 4) for index in shown]}  # fmt: skip


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
    return {"names": [category_label(*TIME_CATEGORIES[index]) for index in shown],
            "values": [to_json_list(table[index], 4) for index in shown],
            "stragglers": [alert["rank"] for alert in rank_alerts(run)]}  # fmt: skip


def time_shares(run: RunData) -> dict[tuple[str, str], float]:
    """Returns each time category's share of the step time, over all ranks."""
    table = seconds_by_rank(run)
    total = float(table.sum())
    return {key: float(row.sum()) / total for key, row in zip(TIME_CATEGORIES, table)} if total else {}


def heatmap(run: RunData) -> dict[str, Any]:
    """Returns busy seconds per step (compute, optimizer, data loading) by rank, over the run."""
    busy_phases = [TIME_CATEGORIES.index(("phase_seconds", name)) for name in ("compute", "optimizer", "data")]
    busy_seconds = _stack_lines(run)[:, busy_phases].sum(1)
    starts, ranks = run.line_bins(HEATMAP_COLUMNS), bin_starts(busy_seconds.shape[1], HEATMAP_ROWS)
    if not busy_seconds.size:
        return {"ranks": [], "step": [], "values": []}
    means = np.add.reduceat(busy_seconds, starts) / np.diff([*starts, len(busy_seconds)])[:, None]
    busy_seconds = np.maximum.reduceat(means, ranks, axis=1)
    return {"ranks": ranks.tolist(), "step": [run.line_steps[begin][0] for begin in starts],
            "values": [to_json_list(row, 3) for row in busy_seconds.T]}  # fmt: skip


def memory_table(run: RunData) -> dict[str, Any]:
    """Returns peak GiB per rank, by kind where it was counted, sensors, and the prediction of each pipeline rank."""
    prediction, layout = run.plan.get("predicted", {}), run.layout
    stages = [sum(v for key, v in row.items() if key != "pipeline_rank") for row in prediction.get("memory_gib", [])]
    per_stage = layout.world // layout.pipeline if layout is not None else 1
    known = {"gib": run.memory, "predicted": stages, "ranks_per_stage": per_stage}
    return known | {"limit": prediction.get("device_memory_gib")}


def mesh_summary(run: RunData) -> dict[str, Any] | None:
    """Returns the mesh axes, outermost first, and the share of step time waited on each."""
    if (layout := run.layout) is None:
        return None
    shares = time_shares(run).items()
    waits = {axis: round(share, 4) for (kind, axis), share in shares if kind == "wait_seconds" and share > 1e-4}
    return {"axes": [[axis, getattr(layout, axis)] for axis in AXES], "waits": waits}


def plan_summary(run: RunData) -> dict[str, Any]:
    """Returns what the plan predicted, which the page compares with what was measured, and why it was chosen."""
    keys = "step_seconds", "tokens_per_s", "peak_memory_gib", "exposed_seconds"
    predicted = {key: run.plan.get("predicted", {}).get(key) for key in keys}
    return {"reason": run.plan.get("reason", ""), "rejected": run.plan.get("rejected", [])[:20], "predicted": predicted}


def rank_alerts(run: RunData) -> list[dict[str, Any]]:
    """Returns the ranks that are stragglers, or stall on data, over the whole run."""
    table, layout = seconds_by_rank(run), run.layout
    if not table.size:
        return []
    alerts = rank_metrics.find_alerts(table, table.sum(0), layout.pipeline if layout is not None else 1)
    return [{"rank": int(key.split()[1]), "message": sentence} for key, sentence in alerts]


def summary_sentences(run: RunData, good: Goodput) -> list[str]:
    """Returns the summary of a run: step time breakdown, alerts, slow axes and goodput, a sentence each."""
    shares = sorted(time_shares(run).items(), key=lambda item: -item[1])
    parts = [(category_label(*key), share) for key, share in shares if share >= 0.01]
    parts += [("everything else", 1.0 - sum(share for _, share in parts))] if shares else []
    waits = [(axis, share) for (kind, axis), share in shares
             if kind == "wait_seconds" and axis != "pipeline" and share > rank_metrics.ALERT_SHARE]  # fmt: skip
    values = {"run": run, "good": good, "step": step_seconds(run), "parts": parts, "waits": waits}
    return fill_in(ASSETS / "summary.txt", values | {"alerts": rank_alerts(run)}).splitlines()


def pipeline_data(run: RunData) -> dict[str, Any] | None:
    """Returns the predicted and measured timelines; None without a pipeline. The bubble of both is the share of the
    time from the start of the first action to the end of the last in which a rank runs none, on average."""
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
        data["measured"] = {"step": step, "steps": len(measured), "seconds": _span(measured[step]), "bubble": bubble,
                            "actions": actions[:MAX_ACTIONS]}  # fmt: skip
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
    begin = run.starts[0].min() - 1.0 if run.starts else 0.0  # what was recorded before may be of another layout
    steps = {}
    for step, ranks in run.timelines().items():
        rows = {rank // ranks_per_stage: actions for rank, actions in ranks.items() if rank < layout.world}
        is_own = all(row and row[0][3] > begin for row in rows.values()) and step in run.steps
        if len(rows) == layout.pipeline and is_own:
            steps[step] = [[rank, *action] for rank, actions in sorted(rows.items()) for action in actions]
    return steps


def _span(actions: Sequence[Sequence[Any]]) -> float:
    return float(max(action[5] for action in actions) - min(action[4] for action in actions))


def _bubble(actions: Sequence[Sequence[Any]], ranks: int) -> float:
    return 1.0 - sum(action[5] - action[4] for action in actions) / ranks / _span(actions)


def compare(paths: list[Path], known: list[RunData] | None = None) -> dict[str, Any]:
    """Returns the comparison as one JSON value, for the page and the terminal."""
    if len(paths) < 2:
        raise JobError("compare needs at least two run folders.")
    runs = known or [RunData(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    named = list(zip(names, runs, strict=True))
    rows = [[name, *_compared_row(run)] for name, run in named]
    curves = [{"name": name, "unit": run.unit, **series(run, COMPARED_POINTS)} for name, run in named]
    return {"runs": curves, "headers": list(HEADERS), "rows": rows, "differences": differences(runs)}


def _compared_row(run: RunData) -> list[str | None]:
    loss, validations = recent_median(run.column("loss"), 10), run.events_of_kind("validation")
    validation_loss = validations[-1].get("loss") if validations else None
    values, place = figures(run.segment(-1)), " (last layout)" if len(run.segments()) > 1 else ""
    step, units = values["step_seconds"], values["units"]
    return [run.status, str(run.plan.get("layout", "")), str(len(run.steps)), str(run.last_record.get("samples", 0)),
            _format_number(loss, ".4f"), _format_number(validation_loss, ".4f"),
            format_seconds(step) + place if step else None,
            f"{units / step:,.0f} {run.unit}/s{place}" if units and step else None,
            f"{100 * goodput(run).share:.0f}%"]  # fmt: skip


def _format_number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) and np.isfinite(value) else ""


def differences(runs: list[RunData]) -> list[list[str]]:
    """Returns a row per job key that differs: the key, then its value in each run."""
    values = [flatten(run.job.model_dump()) for run in runs]
    keys = sorted({key for job in values for key in job} - {"run.folder"})
    rows = [[key, *(str(job.get(key, "")) for job in values)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def comparison_tables(comparison: dict[str, Any]) -> list[Any]:
    names = [escape(run["name"]) for run in comparison["runs"]]
    overview = make_table("runs compared", ["", *names])
    for index, header in enumerate(HEADERS[1:], start=1):
        cells = ("unknown" if row[index] is None else row[index] for row in comparison["rows"])
        overview.add_row(header, *map(escape, cells))
    jobs = make_table("job differences", ["key", *names])
    for row in comparison["differences"]:
        jobs.add_row(*map(escape, row))
    curves = make_table("loss over samples", ["samples", *names])
    sample_counts = sorted({count for run in comparison["runs"] for count in run["samples"] if count is not None})
    for count in [sample_counts[n] for n in bin_starts(len(sample_counts), 10)]:
        values = (dict(zip(run["samples"], run["loss"])).get(count) for run in comparison["runs"])
        curves.add_row(f"{count:,.0f}", *(_format_number(value, ".4f") for value in values))
    return [overview, *([jobs] if comparison["differences"] else []), *([curves] if sample_counts else [])]
