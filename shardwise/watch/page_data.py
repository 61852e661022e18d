"""All that the page of a run shows, as one value for JSON; long runs are made short here, not in the browser."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from shardwise.errors import LayoutError
from shardwise.layout import AXES, Layout
from shardwise.metrics.rank_metrics import (
    ALERT_SHARE,
    FIRST_PHASE,
    FIRST_WAIT,
    MEMORY_KINDS,
    NUM_COLUMNS,
    PHASES,
    SECONDS,
    find_alerts,
)
from shardwise.watch.goodput import Goodput, goodput
from shardwise.watch.pipeline_timeline import pipeline_data
from shardwise.watch.run_data import (
    TIME_CATEGORIES,
    RunData,
    bin_means,
    bin_starts,
    bin_starts_by_step,
    to_json_list,
    unit_of,
)

MAX_POINTS = 800  # of a curve
HEATMAP_COLUMNS, HEATMAP_ROWS = 240, 128  # of the heat map
MAX_EVENTS = 400
CURVES = ("grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib", "loss_scale", "gradient_compression_ratio",
         "expert_imbalance", "expert_drop_fraction")  # fmt: skip
COLLECTIVES = {"replicate": "all-reduce", "world": "all-reduce", "expert": "all-to-all"}  # by axis; others use several


def category_label(kind: str, name: str) -> str:
    if kind == "wait_seconds":
        return "pipeline bubble" if name == "pipeline" else f"{COLLECTIVES.get(name, 'collective')} wait ({name})"
    return {"data": "data loading"}.get(name, name)


def page_data(run: RunData) -> dict[str, Any]:
    good = goodput(run)
    return {
        "name": run.name,
        "status": run.status,
        "created": time.time(),
        "unit": unit_of(run.job),
        "layout": str(run.plan.get("layout", run.job.layout)),
        "world": run.world,
        "steps": run.job.total_steps,
        "tiles": tiles(run, good),
        "series": series(run),
        "time_breakdown": time_breakdown(run),
        "ranks": rank_breakdown(run),
        "heatmap": heatmap(run),
        "memory": memory_table(run),
        "pipeline": pipeline_data(run),
        "mesh": mesh_summary(run),
        "plan": plan_accuracy(run),
        "events": run.events[-MAX_EVENTS:],
        "summary": summary_sentences(run, good),
        "job": run.job.to_toml(),
        "goodput": {"wall_seconds": good.wall_seconds, "share": good.share, "lost_seconds": good.lost_seconds},
        "experts": run.last_record.get("expert_load", []),
    }


def format_seconds(seconds: float) -> str:
    if not np.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{seconds:.3g} s"
        if seconds < 60
        else f"{hours}:{minutes:02d}:{rest:02d}"
        if hours
        else f"{minutes}:{rest:02d} min"
    )


def recent_median(values: np.ndarray, count: int = 50) -> float:
    """The median of the last ones that are numbers."""
    values = values[np.isfinite(values)][-count:]
    return float(np.median(values)) if len(values) else float("nan")


def tiles(run: RunData, good: Goodput) -> list[list[str]]:
    if not run.steps:
        return [["steps", "none yet"]]
    done, total = run.steps[-1], run.job.total_steps
    loss = run.last_record.get("loss", "unknown")
    step = recent_median(run.column("seconds"))
    found = [["step", f"{done:,} of {total:,}"], ["loss", f"{loss:.4f}" if isinstance(loss, float) else str(loss)]]
    found += [
        ["step time", format_seconds(step)],
        [f"{unit_of(run.job)}/s", f"{recent_median(run.column('tokens_per_s')):,.0f}"],
    ]
    share = time_shares(run)
    if share:
        found.append(["device busy", f"{100 * (share['compute'] + share['optimizer']):.0f}%"])
    mfu = recent_median(run.column("mfu"))
    if np.isfinite(mfu):
        found.append(["MFU", f"{100 * mfu:.1f}%"])
    found.append(["goodput", f"{100 * good.share:.0f}%"])
    found.append(["peak memory", f"{max(run.memory.get('peak', [run.last_record.get('memory_gib', 0)])):.3g} GiB"])
    if run.status not in ("finished", "stopped") and done < total:
        found.append(["time left", format_seconds((total - done) * step)])
    return found


def series(run: RunData) -> dict[str, Any]:
    """Curves over steps: of each piece the mean; of the loss the least and the most too, so that no spike is lost."""
    starts = bin_starts(len(run.steps), MAX_POINTS)
    if not len(starts):
        return {"step": []}
    found: dict[str, Any] = {"step": np.frombuffer(run.steps, dtype=np.int64)[starts].tolist()}
    loss = run.column("loss")
    found["loss"] = to_json_list(bin_means(loss, starts))
    finite_loss = np.where(np.isfinite(loss), loss, np.nan)
    found["loss_low"] = to_json_list(np.fmin.reduceat(finite_loss, starts))
    found["loss_high"] = to_json_list(np.fmax.reduceat(finite_loss, starts))
    for name in CURVES:
        values = run.column(name)
        if np.isfinite(values).any():
            found[name] = to_json_list(bin_means(values, starts))
    found["non_finite_losses"] = run.non_finite_losses[-50:]
    return found


def _stack_lines(run: RunData) -> np.ndarray:
    """Lines x parts x ranks."""
    return np.stack(run.category_seconds) if run.category_seconds else np.zeros((0, len(TIME_CATEGORIES), 0))


def time_breakdown(run: RunData) -> dict[str, Any]:
    """Seconds of a step by what they went to, in the mean over ranks."""
    breakdown = _stack_lines(run).mean(2) if run.category_seconds else np.zeros((0, len(TIME_CATEGORIES)))
    starts = bin_starts_by_step([step for step, _ in run.line_steps], MAX_POINTS // 2)
    shown = [
        place
        for place in range(len(TIME_CATEGORIES))
        if len(breakdown) and breakdown[:, place].max() > 1e-4 * breakdown.sum(1).max()
    ]
    return {
        "step": [run.line_steps[begin][0] for begin in starts],
        "names": [category_label(*TIME_CATEGORIES[place]) for place in shown],
        "values": [to_json_list(bin_means(breakdown[:, place], starts), 4) for place in shown],
    }


def seconds_by_rank(run: RunData) -> np.ndarray:
    """Parts x ranks: seconds of a step over the whole run but its first line."""
    lines = _stack_lines(run)
    if not len(lines):
        return np.zeros((len(TIME_CATEGORIES), 0))
    kept = slice(1, None) if len(lines) > 1 else slice(None)
    weights = np.array([steps for _, steps in run.line_steps][kept], dtype=float)
    return np.asarray(np.average(lines[kept], axis=0, weights=weights))


def rank_breakdown(run: RunData) -> dict[str, Any]:
    table = seconds_by_rank(run)
    shown = [
        place for place in range(len(TIME_CATEGORIES)) if table.size and table[place].max() > 1e-4 * table.sum(0).max()
    ]
    return {
        "names": [category_label(*TIME_CATEGORIES[place]) for place in shown],
        "values": [to_json_list(table[place], 4) for place in shown],
        "stragglers": [one["rank"] for one in find_stragglers(run)],
    }


def time_shares(run: RunData) -> dict[str, float]:
    """Of a step, in the mean over ranks."""
    table = seconds_by_rank(run)
    total = float(table.sum())
    return (
        {category_label(*part): float(table[place].sum()) / total for place, part in enumerate(TIME_CATEGORIES)}
        if total
        else {}
    )


def heatmap(run: RunData) -> dict[str, Any]:
    """Each rank's own work in a step, without waits for others, over time."""
    lines = _stack_lines(run)
    busy = [
        place
        for place, (kind, name) in enumerate(TIME_CATEGORIES)
        if kind == "phase_seconds" and name in ("compute", "optimizer", "data")
    ]
    busy_seconds = lines[:, busy].sum(1)
    last_steps = [step for step, _ in run.line_steps]
    starts, ranks = bin_starts_by_step(last_steps, HEATMAP_COLUMNS), bin_starts(busy_seconds.shape[1], HEATMAP_ROWS)
    if not busy_seconds.size:
        return {"ranks": [], "step": [], "values": []}
    busy_seconds = np.maximum.reduceat(
        np.add.reduceat(busy_seconds, starts) / np.diff([*starts, len(busy_seconds)])[:, None], ranks, axis=1
    )
    return {
        "ranks": ranks.tolist(), "step": [run.line_steps[begin][0] for begin in starts],
        "values": [to_json_list(row, 3) for row in busy_seconds.T],
    }  # fmt: skip


def memory_table(run: RunData) -> dict[str, Any]:
    """GiB of each rank: what it held at most, by what is known of it, beside what was predicted."""
    prediction = run.plan.get("predicted", {})
    layout = parse_layout(run)
    predicted_gib = prediction.get("memory_gib", [])
    peak = run.memory.get("peak", [])
    ranks_per_stage = layout.world // layout.pipeline if layout is not None else 1
    rows = []
    for rank in bin_starts(len(peak), HEATMAP_ROWS).tolist():
        known: dict[str, float] = {name: run.memory[name][rank] for name in MEMORY_KINDS if name in run.memory}
        row: dict[str, Any] = {
            "rank": rank,
            **known,
            "activations and other": max(0.0, peak[rank] - sum(known.values())),
        }
        stage = rank // ranks_per_stage
        if stage < len(predicted_gib):
            row["predicted"] = sum(value for key, value in predicted_gib[stage].items() if key != "pipeline_rank")
        rows.append(row)
    return {"limit": prediction.get("device_memory_gib"), "rows": rows}


def parse_layout(run: RunData) -> Layout | None:
    try:
        return Layout.parse(str(run.plan.get("layout", "")))
    except LayoutError:
        return None


def mesh_summary(run: RunData) -> dict[str, Any] | None:
    """The axes of the layout, outermost first, and how long a step waits over each."""
    layout = parse_layout(run)
    if layout is None:
        return None
    table, total = seconds_by_rank(run), float(seconds_by_rank(run).sum())
    waits = {name: float(table[place].sum()) / total for place, (kind, name) in enumerate(TIME_CATEGORIES)
             if kind == "wait_seconds" and total}  # fmt: skip
    axes = [[axis, getattr(layout, axis)] for axis in AXES]
    compute = table[
        [place for place, (kind, name) in enumerate(TIME_CATEGORIES) if kind == "phase_seconds" and name == "compute"]
    ]
    return {
        "axes": axes, "waits": {axis: round(share, 4) for axis, share in waits.items() if share > 1e-4},
        "work": to_json_list(compute[0], 3) if compute.size else [], "stages": run.plan.get("stages", []),
    }  # fmt: skip


def plan_accuracy(run: RunData) -> dict[str, Any]:
    """What was predicted beside what was measured."""
    prediction, rows = run.plan.get("predicted", {}), []

    def row(what: str, predicted: float | None, measured: float | None, unit: str, scale: float = 1.0) -> None:
        if predicted is not None and measured is not None and np.isfinite(measured):
            error = f"{100 * (predicted / measured - 1):+.0f}%" if measured else ""
            both = (
                f"{value * scale:,.0f}" if value > 1e3 else f"{value * scale:.3g} {unit}"
                for value in (predicted, measured)
            )
            rows.append([what, *both, error])

    row("step", prediction.get("step_seconds"), recent_median(run.column("seconds")), "s")
    row(f"{unit_of(run.job)}/s", prediction.get("tokens_per_s"), recent_median(run.column("tokens_per_s")), "")
    row(
        "peak memory of a rank", prediction.get("peak_memory_gib"), max(run.memory.get("peak", []), default=None), "GiB"
    )
    share = time_shares(run)
    exposed = prediction.get("exposed_seconds", {})
    step = statistics.mean(seconds_by_rank(run).sum(0)) if share else 0.0
    for axis, seconds in exposed.items() if isinstance(exposed, dict) else ():
        # The plan has one word for all sums over samples.
        axes = ("shard", "replicate", "data") if axis == "shard" else (axis,)
        measured = step * sum(share.get(category_label("wait_seconds", one), 0.0) for one in axes)
        if axis != "pipeline":
            row(f"exposed communication ({'data parallel' if axis == 'shard' else axis})", seconds, measured, "s")
    timeline = pipeline_data(run)
    if timeline and "measured" in timeline:
        row("bubble", timeline.get("predicted", {}).get("bubble"), timeline["measured"]["bubble"], "%", 100.0)
    return {"reason": run.plan.get("reason", ""), "rows": rows, "rejected": run.plan.get("rejected", [])[:20]}


def find_stragglers(run: RunData) -> list[dict[str, Any]]:
    """Ranks that are slow, or wait for data, over the whole run."""
    table, layout = seconds_by_rank(run), parse_layout(run)
    if not table.size:
        return []
    ranks_per_stage = table.shape[1] // layout.pipeline if layout is not None else table.shape[1]
    rows = np.zeros((table.shape[1], NUM_COLUMNS))
    rows[:, SECONDS], rows[:, FIRST_PHASE:FIRST_WAIT] = table.sum(0), table[: len(PHASES)].T
    peer_groups = [range(first, first + ranks_per_stage) for first in range(0, table.shape[1], ranks_per_stage)]
    return [{"rank": int(key.split()[1]), "message": sentence} for key, sentence in find_alerts(rows, peer_groups)]


def summary_sentences(run: RunData, good: Goodput) -> list[str]:
    """What there is to know, in sentences."""
    if not run.steps:
        return ["No step has been measured yet."]
    share = sorted(time_shares(run).items(), key=lambda one: -one[1])
    parts = ", ".join(f"{100 * value:.0f}% {name}" for name, value in share if value >= 0.01)
    found = (
        [f"A step takes {format_seconds(recent_median(run.column('seconds')))}; of all time: {parts}."] if parts else []
    )
    found += [one["message"][0].upper() + one["message"][1:] for one in find_stragglers(run)]
    for name, value in share:
        if value > ALERT_SHARE and " wait (" in name:
            found.append(
                f"Ranks wait {100 * value:.0f}% of a step for each other over the axis {name.partition('(')[2][:-1]}."
            )
    if good.wall_seconds:
        causes = sorted(good.lost_seconds.items(), key=lambda one: -one[1])
        lost = ", ".join(f"{cause} {format_seconds(time)}" for cause, time in causes) or "nothing"
        goodput_text = f"{100 * good.share:.0f}% of {format_seconds(good.wall_seconds)}"
        found.append(f"{goodput_text} went into steps that counted; lost: {lost}.")
    return found
