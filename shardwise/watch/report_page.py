"""Renders the page of a run as one HTML document (`assets/page.html`) that contains its styles, scripts and data.

uPlot (`assets/uPlot.LICENSE`) draws the curves, `assets/page.js` the rest. The data is embedded as escaped JSON, and
the script inserts it as text, never as markup. The content security policy blocks every request but those to the page's
own server. At the end of a run, `print_end_of_run` also prints the step time breakdown.
"""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import numpy as np

from shardwise.console import align_columns
from shardwise.files import write_text
from shardwise.watch.page_data import category_label, page_data, seconds_by_rank, summary_sentences
from shardwise.watch.run_data import TIME_CATEGORIES, RunData, goodput

ASSETS = Path(__file__).parent / "assets"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'"
)


def render_page(payload: dict[str, Any], title: str, live_url: str = "") -> str:
    """Returns the HTML document. A live page polls `live_url` for updates."""
    data = json.dumps(payload, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return _fill_template(
        "page.html", title=escape(title), data=data, live=f' data-live="{escape(live_url)}"' if live_url else "",
        plot_style=_read_asset("uPlot.min.css"), plot_script=_read_asset("uPlot.iife.min.js"),
        script=_read_asset("page.js"),
    )  # fmt: skip


def render_run_list(runs: list[dict[str, Any]]) -> str:
    columns = ("run", "status", "layout", "step", "loss")
    header = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = ""
    for run in runs:
        cells = "".join(f"<td>{escape(str(run[column]))}</td>" for column in columns[1:])
        rows += f'<tr><td><a href="/run/{quote(run["name"], safe="")}">{escape(run["name"])}</a></td>{cells}</tr>'
    table = f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"
    return _fill_template("run_list.html", table=table if runs else "<p>No runs yet.</p>")


def _fill_template(name: str, **values: str) -> str:
    template = Template(_read_asset(name))
    return template.substitute(values, policy=CONTENT_SECURITY_POLICY, style=_read_asset("page.css"))


def write_report(folder: Path) -> Path:
    """Writes report.html into the run folder and returns its path."""
    run = RunData(folder)
    path = run.path / "report.html"
    write_text(path, render_page(page_data(run), f"{run.name}: {run.status}"))
    return path


def _read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


MAX_RANKS = 8  # with more ranks, the table shows the fastest, the median and the three slowest


def print_end_of_run(folder: Path, say: Callable[[str], None]) -> None:
    """Prints the time table and the summary, and writes report.html. Never raises: the run itself has ended."""
    try:
        run = RunData(folder)
        for line in [*time_table(run), *summary_sentences(run, goodput(run))]:
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
    headers = ["rank", *(category_label(*TIME_CATEGORIES[index]) for index in shown), "GiB"]
    memory = run.memory.get("peak", [])
    rows = [headers]
    order = np.argsort(times[shown[0]], kind="stable").tolist()  # by compute
    chosen = [order[0], order[len(order) // 2], *order[-3:]] if len(order) > MAX_RANKS else sorted(order)
    for rank in chosen:
        gib = f"{memory[rank]:.2f}" if rank < len(memory) else ""
        rows.append([str(rank), *(f"{value:.1f}" for value in times[shown, rank]), gib])
    return ["step time breakdown, ms:", *(f"  {line}" for line in align_columns(rows))]
