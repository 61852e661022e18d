"""All that the page of a run shows, as one value for JSON; long runs are made short here, not in the browser."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from shardwise.errors import LayoutError
from shardwise.layout import AXES, Layout
from shardwise.watch.goodput import Goodput, goodput
from shardwise.watch.pipeline import pipeline_of
from shardwise.watch.read import PARTS, Run, even, listed, means, thin, unit_of
from shardwise.watch.rows import FIRST_OWN, FIRST_WAIT, HELD, OWN, SECONDS, SHARE, WIDTH, alerts

POINTS = 800  # of a curve
COLUMNS, ROWS = 240, 128  # of the heat map
EVENTS = 400
SHOWN = ("grad_norm", "lr", "tokens_per_s", "utilisation", "memory_gib", "loss_scale", "gradient_ratio",
         "expert_imbalance", "expert_dropped")  # fmt: skip
QUIET = ("checkpoint", "validation")


def label(kind: str, name: str) -> str:
    if kind == "waited":
        return "pipeline bubble" if name == "pipeline" else f"waiting: {name}"
    return {"data": "waiting for data"}.get(name, name)


def state(run: Run) -> dict[str, Any]:
    good = goodput(run)
    return {
        "name": run.name, "status": run.status, "made": time.time(), "unit": unit_of(run.job),
        "layout": str(run.plan.get("layout", run.job.layout)), "world": run.world, "steps": run.job.total_steps,
        "tiles": tiles(run, good), "series": series(run), "parts": parts(run), "ranks": by_rank(run),
        "heat": heat(run), "memory": memory(run), "pipeline": pipeline_of(run), "mesh": mesh(run),
        "plan": plan(run), "events": run.events[-EVENTS:], "words": words(run, good), "job": run.job.text(),
        "goodput": {"wall": good.wall, "share": good.share, "losses": good.losses},
        "experts": run.last.get("expert_load", []),
    }  # fmt: skip


def seconds_text(seconds: float) -> str:
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


def recent(values: np.ndarray, count: int = 50) -> float:
    """The median of the last ones that are numbers."""
    values = values[np.isfinite(values)][-count:]
    return float(np.median(values)) if len(values) else float("nan")


def tiles(run: Run, good: Goodput) -> list[list[str]]:
    if not run.steps:
        return [["steps", "none yet"]]
    done, total = run.steps[-1], run.job.total_steps
    loss = run.last.get("loss", "unknown")
    step = recent(run.column("seconds"))
    found = [["step", f"{done:,} of {total:,}"], ["loss", f"{loss:.4f}" if isinstance(loss, float) else str(loss)]]
    found += [
        ["step time", seconds_text(step)],
        [f"{unit_of(run.job)}/s", f"{recent(run.column('tokens_per_s')):,.0f}"],
    ]
    share = shares(run)
    if share:
        found.append(["device busy", f"{100 * (share['compute'] + share['optimizer']):.0f}%"])
    use = recent(run.column("utilisation"))
    if np.isfinite(use):
        found.append(["model FLOP use", f"{100 * use:.1f}%"])
    found.append(["goodput", f"{100 * good.share:.0f}%"])
    found.append(["most memory", f"{max(run.memory.get('peak', [run.last.get('memory_gib', 0)])):.3g} GiB"])
    if run.status not in ("finished", "stopped") and done < total:
        found.append(["left", seconds_text((total - done) * step)])
    return found


def series(run: Run) -> dict[str, Any]:
    """Curves over steps: of each piece the mean; of the loss the least and the most too, so that no spike is lost."""
    begins = thin(len(run.steps), POINTS)
    if not len(begins):
        return {"step": []}
    found: dict[str, Any] = {"step": np.frombuffer(run.steps, dtype=np.int64)[begins].tolist()}
    loss = run.column("loss")
    found["loss"] = listed(means(loss, begins))
    safe = np.where(np.isfinite(loss), loss, np.nan)
    found["loss_low"] = listed(np.fmin.reduceat(safe, begins))
    found["loss_high"] = listed(np.fmax.reduceat(safe, begins))
    for name in SHOWN:
        values = run.column(name)
        if np.isfinite(values).any():
            found[name] = listed(means(values, begins))
    found["broken"] = run.losses_as_text[-50:]
    return found


def _lines(run: Run) -> np.ndarray:
    """Lines x parts x ranks."""
    return np.stack(run.spent) if run.spent else np.zeros((0, len(PARTS), 0))


def parts(run: Run) -> dict[str, Any]:
    """Seconds of a step by what they went to, in the mean over ranks."""
    every = _lines(run).mean(2) if run.spent else np.zeros((0, len(PARTS)))
    begins = even([step for step, _ in run.lines], POINTS // 2)
    names = [place for place in range(len(PARTS)) if len(every) and every[:, place].max() > 1e-4 * every.sum(1).max()]
    return {
        "step": [run.lines[begin][0] for begin in begins], "names": [label(*PARTS[place]) for place in names],
        "values": [listed(means(every[:, place], begins), 4) for place in names],
    }  # fmt: skip


def per_rank(run: Run) -> np.ndarray:
    """Parts x ranks: seconds of a step over the whole run but its first line."""
    every = _lines(run)
    if not len(every):
        return np.zeros((len(PARTS), 0))
    kept = slice(1, None) if len(every) > 1 else slice(None)
    weights = np.array([steps for _, steps in run.lines][kept], dtype=float)
    return np.asarray(np.average(every[kept], axis=0, weights=weights))


def by_rank(run: Run) -> dict[str, Any]:
    table = per_rank(run)
    names = [place for place in range(len(PARTS)) if table.size and table[place].max() > 1e-4 * table.sum(0).max()]
    return {
        "names": [label(*PARTS[place]) for place in names], "values": [listed(table[place], 4) for place in names],
        "slow": [one["rank"] for one in told(run)],
    }  # fmt: skip


def shares(run: Run) -> dict[str, float]:
    """Of a step, in the mean over ranks."""
    table = per_rank(run)
    whole = float(table.sum())
    return {label(*part): float(table[place].sum()) / whole for place, part in enumerate(PARTS)} if whole else {}


def heat(run: Run) -> dict[str, Any]:
    """Each rank's own work in a step, without waits for others, over time."""
    every = _lines(run)
    own = [
        place
        for place, (kind, name) in enumerate(PARTS)
        if kind == "spent" and name in ("compute", "optimizer", "data")
    ]
    work = every[:, own].sum(1)
    lasts = [step for step, _ in run.lines]
    begins, ranks = even(lasts, COLUMNS), thin(work.shape[1], ROWS)
    if not work.size:
        return {"ranks": [], "step": [], "values": []}
    work = np.maximum.reduceat(np.add.reduceat(work, begins) / np.diff([*begins, len(work)])[:, None], ranks, axis=1)
    return {
        "ranks": ranks.tolist(), "step": [run.lines[begin][0] for begin in begins],
        "values": [listed(row, 3) for row in work.T],
    }  # fmt: skip


def memory(run: Run) -> dict[str, Any]:
    """GiB of each rank: what it held at most, by what is known of it, beside what was predicted."""
    told = run.plan.get("predicted", {})
    layout = layout_of(run)
    planned = told.get("memory_gib", [])
    peak = run.memory.get("peak", [])
    each = layout.world // layout.pipeline if layout is not None else 1
    rows = []
    for rank in thin(len(peak), ROWS).tolist():
        known: dict[str, float] = {name: run.memory[name][rank] for name in HELD if name in run.memory}
        row: dict[str, Any] = {"rank": rank, **known, "the rest": max(0.0, peak[rank] - sum(known.values()))}
        place = rank // each
        if place < len(planned):
            row["planned"] = sum(value for key, value in planned[place].items() if key != "pipeline_rank")
        rows.append(row)
    return {"limit": told.get("device_memory_gib"), "rows": rows}


def layout_of(run: Run) -> Layout | None:
    try:
        return Layout.parse(str(run.plan.get("layout", "")))
    except LayoutError:
        return None


def mesh(run: Run) -> dict[str, Any] | None:
    """The axes of the layout, outermost first, and how long a step waits over each."""
    layout = layout_of(run)
    if layout is None:
        return None
    table, whole = per_rank(run), float(per_rank(run).sum())
    waits = {name: float(table[place].sum()) / whole for place, (kind, name) in enumerate(PARTS)
             if kind == "waited" and whole}  # fmt: skip
    axes = [[axis, getattr(layout, axis)] for axis in AXES]
    work = table[[place for place, (kind, name) in enumerate(PARTS) if kind == "spent" and name == "compute"]]
    return {
        "axes": axes, "waits": {axis: round(share, 4) for axis, share in waits.items() if share > 1e-4},
        "work": listed(work[0], 3) if work.size else [], "stages": run.plan.get("stages", []),
    }  # fmt: skip


def plan(run: Run) -> dict[str, Any]:
    """What was predicted beside what was measured."""
    told, rows = run.plan.get("predicted", {}), []

    def row(what: str, predicted: float | None, measured: float | None, unit: str, scale: float = 1.0) -> None:
        if predicted is not None and measured is not None and np.isfinite(measured):
            off = f"{100 * (predicted / measured - 1):+.0f}%" if measured else ""
            both = (
                f"{value * scale:,.0f}" if value > 1e3 else f"{value * scale:.3g} {unit}"
                for value in (predicted, measured)
            )
            rows.append([what, *both, off])

    row("step", told.get("step_seconds"), recent(run.column("seconds")), "s")
    row(f"{unit_of(run.job)}/s", told.get("tokens_per_s"), recent(run.column("tokens_per_s")), "")
    row("most memory of a rank", told.get("peak_memory_gib"), max(run.memory.get("peak", []), default=None), "GiB")
    share = shares(run)
    exposed = told.get("exposed_seconds", {})
    step = statistics.mean(per_rank(run).sum(0)) if share else 0.0
    for axis, seconds in exposed.items() if isinstance(exposed, dict) else ():
        # The plan has one word for all sums over samples.
        axes = ("shard", "replicate", "data") if axis == "shard" else (axis,)
        measured = step * sum(share.get(f"waiting: {one}", 0.0) for one in axes)
        if axis != "pipeline":
            row(f"waiting: {'sums over samples' if axis == 'shard' else axis}", seconds, measured, "s")
    found = pipeline_of(run)
    if found and "measured" in found:
        row("bubble", found.get("predicted", {}).get("bubble"), found["measured"]["bubble"], "%", 100.0)
    return {"reason": run.plan.get("reason", ""), "rows": rows, "rejected": run.plan.get("rejected", [])[:20]}


def told(run: Run) -> list[dict[str, Any]]:
    """Ranks that are slow, or wait for data, over the whole run."""
    table, layout = per_rank(run), layout_of(run)
    if not table.size:
        return []
    each = table.shape[1] // layout.pipeline if layout is not None else table.shape[1]
    rows = np.zeros((table.shape[1], WIDTH))
    rows[:, SECONDS], rows[:, FIRST_OWN:FIRST_WAIT] = table.sum(0), table[: len(OWN)].T
    alike = [range(first, first + each) for first in range(0, table.shape[1], each)]
    return [{"rank": int(key.split()[1]), "words": sentence} for key, sentence in alerts(rows, alike)]


def words(run: Run, good: Goodput) -> list[str]:
    """What there is to know, in sentences."""
    if not run.steps:
        return ["No step has been measured yet."]
    share = sorted(shares(run).items(), key=lambda one: -one[1])
    parts = ", ".join(f"{100 * value:.0f}% {name}" for name, value in share if value >= 0.01)
    found = [f"A step takes {seconds_text(recent(run.column('seconds')))}; of all time: {parts}."] if parts else []
    found += [one["words"][0].upper() + one["words"][1:] for one in told(run)]
    for name, value in share:
        if value > SHARE and name.startswith("waiting: "):
            found.append(f"Ranks wait {100 * value:.0f}% of a step for each other over the axis {name[9:]}.")
    if good.wall:
        causes = sorted(good.losses.items(), key=lambda one: -one[1])
        lost = ", ".join(f"{cause} {seconds_text(time)}" for cause, time in causes) or "nothing"
        of = f"{100 * good.share:.0f}% of {seconds_text(good.wall)}"
        found.append(f"{of} went into steps that counted; lost: {lost}.")
    return found
