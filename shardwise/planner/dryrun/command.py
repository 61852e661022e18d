"""`shardwise dryrun`: resolves job, layout and ranks, and formats the reports as text."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from shardwise.console import align_columns, format_ranks, pluralize
from shardwise.errors import JobError, LayoutError
from shardwise.job import load_job
from shardwise.layout import Layout
from shardwise.planner.dryrun.dry_run import CollectiveTraffic, RankReport, dry_run, typical_ranks
from shardwise.planner.dryrun.memory_comm_tracker import ROLES, by_axis

MAX_DRYRUN_WORLD = 2**16  # PyTorch lists every rank of every group


def dryrun_job(
    job_file: Path | None, settings: list[str], layout: str | None, ranks: list[int], every_stage: bool
) -> list[RankReport]:
    """Dry-runs the given ranks, plus one rank per pipeline stage with `every_stage`; by default `typical_ranks`."""
    job = load_job(job_file, settings)
    layout_text = layout or job.layout
    if layout_text == "auto":
        raise JobError('layout = "auto": a dry run needs a fixed layout, e.g. --layout "pipeline=2 tensor=4".')
    parsed = Layout.parse(layout_text)
    if parsed.world > MAX_DRYRUN_WORLD:
        raise LayoutError(f"layout '{parsed}': a dry run simulates at most {MAX_DRYRUN_WORLD:,} processes.")
    rank_list = sorted({*ranks, *(typical_ranks(parsed, every_stage) if every_stage or not ranks else ())})
    return dry_run(job, parsed, rank_list)


def describe_reports(reports: Sequence[RankReport]) -> str:
    """Formats two tables: peak memory with one row per rank, communication with one column per rank."""
    layout, micro_batches = Layout.parse(reports[0].layout), pluralize(reports[0].micro_batches, "micro-batch")
    lines = [f"Layout '{layout}': {pluralize(layout.world, 'process')}, {micro_batches} per step.", ""]
    rows = [["rank", "stage", "modules", *ROLES, "total", "peak in"]]
    for report in reports:
        kinds = [name.rstrip("0123456789") for stage in report.modules for name in stage]
        groups = [(kind, len(list(group))) for kind, group in groupby(kinds)]
        contents = ", ".join(pluralize(count, "layer") if kind == "block" else kind for kind, count in groups)
        sizes = [_format_gib(size) for size in (*(report.memory[role] for role in ROLES), report.total)]
        rows.append([str(report.rank), " ".join(map(str, report.stages)), contents, *sizes, report.peak_phase])
    lines += ["Peak memory per rank, GiB", *align_columns(rows, left=(1, 2, len(ROLES) + 4))]
    lines += ["copies: weights in the compute dtype. buffers: communication buffers, samples, everything else.", ""]
    return "\n".join([*lines, "Communication per rank and step", *align_columns(_traffic_rows(reports), left=(0, 1))])


def _traffic_rows(reports: Sequence[RankReport]) -> list[list[str]]:
    """Formats the communication table; ranks with equal traffic share a column."""
    columns: dict[tuple[CollectiveTraffic, ...], list[int]] = {}
    for report in reports:
        columns.setdefault(report.traffic, []).append(report.rank)
    names = [f"{len(r)} ranks, {r[0]}-{r[-1]}" if len(r) > 3 else format_ranks(r) for r in columns.values()]
    rows = [
        ["", "", *(text for name in names for text in ("", name))],
        ["axis", "collective", *(["calls", "GiB"] * len(columns))],
    ]
    by_kind = [{(entry.axis, entry.kind): entry for entry in traffic} for traffic in columns]
    for kind in sorted({kind for entries in by_kind for kind in entries}, key=by_axis):
        cells = []
        for entries in by_kind:
            entry = entries.get(kind)
            cells += ["-", "-"] if entry is None else [f"{entry.count:,}", _format_gib(entry.bytes)]
        rows.append([*kind, *cells])
    return rows


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size >= 2**30 // 100 or not size else "<0.01"
