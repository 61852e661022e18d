"""What is written of a run: its page, a trace, and the step time breakdown at its end.

A page is one HTML document (`assets/page.html`) that contains its styles, scripts and data; uPlot draws the curves. The
data is embedded as escaped JSON, and the scripts insert it as text, never as markup. The content security policy blocks
every request but those to the page's own server. The trace is for Perfetto or chrome://tracing, with all ranks on the
clock of rank 0. Each rank has a row of steps and, below it, a row that breaks each step down by cause: the durations
are measured, their order within a step is not. Steps with a recorded pipeline timeline also show its actions."""

import json
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from shardwise.console import fit_columns
from shardwise.errors import JobError
from shardwise.files import require_parent_folder, write_text
from shardwise.watch.page_data import ASSETS, category_label, page_data, seconds_by_rank, summary_sentences
from shardwise.watch.run_data import TIME_CATEGORIES, RunData, goodput

STEP_ROW, CATEGORY_ROW, ACTION_ROW = 0, 1, 2  # a thread id of the trace each
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward (input)", "W": "backward (weight)"}
MAX_RANKS = 8  # with more ranks, the table shows the fastest, the median and the three slowest
SCRIPTS = "elements", "charts", "run_panels", "rank_panels", "run_page", "run_list", "page"  # in the order of loading
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'"
)


def render_page(payload: dict[str, Any], title: str, live_url: str = "") -> str:
    """Returns the HTML document. A live page polls `live_url` for updates."""
    data = json.dumps(payload, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    title = title.encode(errors="backslashreplace").decode()  # a folder's name need not be valid Unicode
    return Template(_read_asset("page.html")).substitute(
        title=escape(title), data=data, live=f' data-live="{escape(live_url)}"' if live_url else "",
        plot_style=_read_asset("uPlot.min.css"), plot_script=_read_asset("uPlot.iife.min.js"),
        script="\n".join(_read_asset(f"{name}.js") for name in SCRIPTS), style=_read_asset("page.css"),
        policy=CONTENT_SECURITY_POLICY,
    )  # fmt: skip


def write_report(folder: Path) -> Path:
    """Writes report.html into the run folder and returns its path."""
    run = RunData(folder)
    path = run.path / "report.html"
    write_text(path, render_page(page_data(run), f"{run.name}: {run.status}"))
    return path


def _read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def print_end_of_run(folder: Path, say: Callable[[str], None]) -> None:
    """Prints the time table and the summary, and writes report.html. Never raises: the run itself has ended."""
    try:
        run = RunData(folder).segment(-1)
        for line in [*time_table(run), *summary_sentences(run, goodput(RunData(folder)))]:
            say(line)
        say(f"report: {write_report(folder)}")
    except Exception as error:  # noqa: BLE001
        say(f"could not write the report ({type(error).__name__}: {error}); try: shardwise report {folder}")


def time_table(run: RunData) -> list[str]:
    """Returns the lines of a table with milliseconds per step, by rank and time category."""
    times = 1e3 * seconds_by_rank(run)
    if not times.size:
        return []
    shown = [index for index in range(len(TIME_CATEGORIES)) if times[index].max() >= 0.005 * times.sum(0).max()]
    rows = [["rank", *(category_label(*TIME_CATEGORIES[index]) for index in shown), "GiB"]]
    memory = run.memory.get("peak", [])
    order = np.argsort(times[shown[0]], kind="stable").tolist()  # by compute
    for rank in [order[0], order[len(order) // 2], *order[-3:]] if len(order) > MAX_RANKS else sorted(order):
        rows.append([str(rank), *(f"{value:.1f}" for value in times[shown, rank]), f"{memory[rank]:.2f}"])
    return ["step time breakdown, ms:", *(f"  {line}" for line in fit_columns(rows))]


def write_trace(folder: Path, out: Path | None) -> tuple[Path, int]:
    """Writes the trace. Returns its path and its number of events."""
    run = RunData(folder)
    path = out or run.path / "trace.json"
    require_parent_folder(path)
    if not run.category_seconds:
        raise JobError(f"{folder} has no per-rank step times to trace: its ranks.jsonl is missing or empty.")
    events = list(_trace_events(run))
    origin = min(float(starts.min()) for starts in run.starts)
    for event in events:
        if "ts" in event:
            event["ts"] = round(1e6 * (event["ts"] - origin), 1)
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path, len(events)


def _trace_events(run: RunData) -> Iterator[dict[str, Any]]:
    for rank in range(max(starts.size for starts in run.starts)):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for row, name in ((STEP_ROW, "steps"), (CATEGORY_ROW, "time breakdown"), (ACTION_ROW, "pipeline")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
    for (last, steps), starts, category_seconds in zip(run.line_steps, run.starts, run.category_seconds, strict=True):
        name = f"step {last}" if steps == 1 else f"steps {last - steps + 1} to {last}"
        for rank, start in enumerate(starts.tolist()):
            seconds = (category_seconds[:, rank] * steps).tolist()
            yield _complete_event(name, rank, STEP_ROW, start, sum(seconds))
            for category, length in zip(TIME_CATEGORIES, seconds, strict=True):
                if length > 0:
                    yield _complete_event(category_label(*category), rank, CATEGORY_ROW, start, length)
                    start += length
    for step, ranks in run.timelines().items():
        for rank, actions in ranks.items():
            for kind, stage, micro_batch, begin, end in actions:
                args = {"stage": stage, "micro_batch": micro_batch, "step": step}
                name = f"{ACTION_NAMES.get(kind, kind)} {micro_batch}"
                yield _complete_event(name, rank, ACTION_ROW, begin, end - begin, **args)


def _complete_event(name: str, rank: int, row: int, start: float, seconds: float, **args: int) -> dict[str, Any]:
    length = round(1e6 * seconds, 1)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": length, "args": args}
