"""`shardwise dryrun`: which job, layout and ranks; the reports as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from shardwise.console import pluralize
from shardwise.errors import JobError
from shardwise.job import load_job
from shardwise.layout import Layout
from shardwise.planner.dryrun.dry_run import CollectiveTraffic, RankReport, dry_run, typical_ranks
from shardwise.planner.dryrun.memory_comm_tracker import ROLES, CollectiveKind


def dryrun_job(
    job_file: Path | None, settings: list[str], layout: str | None, ranks: list[int], every_stage: bool,
    on_report: Callable[[RankReport], None],
) -> list[RankReport]:  # fmt: skip
    """Reports of the given ranks, or of one for each typical place in the pipeline, or for every place."""
    job = load_job(job_file, settings)
    layout_text = layout or job.layout
    if layout_text == "auto":
        raise JobError('a dry run needs a layout; give one with --layout "pipeline=2 tensor=4", or in the job.')
    parsed = Layout.parse(layout_text)
    rank_list = sorted({*ranks, *(typical_ranks(parsed, every_stage) if every_stage or not ranks else ())})
    return dry_run(job, parsed, rank_list, on_report)


def describe_reports(reports: Sequence[RankReport]) -> str:
    """Two tables: memory with a line for each rank, traffic with a column for each."""
    layout, micro_batches = Layout.parse(reports[0].layout), reports[0].micro_batches
    return "\n".join(
        [
            f"Layout '{layout}': {pluralize(layout.world, 'process')}, {pluralize(micro_batches, 'micro-batch')} a step.",
            "",
            "Memory of a rank at the fullest moment of a step, GiB",
            *_align_columns(_memory_rows(reports), left=(1, 2, len(ROLES) + 4)),
            "copies: weights in the compute type. buffers: what is received, sums on their way, samples.",
            "",
            "Traffic of a rank in a step",
            *_align_columns(_traffic_rows(reports), left=(0, 1)),
        ]
    )


def _memory_rows(reports: Sequence[RankReport]) -> list[list[str]]:
    rows = [["rank", "stage", "holds", *ROLES, "total", "fullest in"]]
    for report in reports:
        sizes = [_format_gib(report.memory[role]) for role in ROLES]
        stages = " ".join(map(str, report.stages))
        rows.append(
            [str(report.rank), stages, _stage_contents(report), *sizes, _format_gib(report.total), report.peak_phase]
        )
    return rows


def _stage_contents(report: RankReport) -> str:
    """`embed, 2 layers`."""
    kinds = [name.rstrip("0123456789") for stage in report.modules for name in stage]
    groups = [(kind, len(list(group))) for kind, group in groupby(kinds)]
    return ", ".join(pluralize(count, "layer") if kind == "block" else kind for kind, count in groups)


def _traffic_rows(reports: Sequence[RankReport]) -> list[list[str]]:
    """Ranks that send the same share their columns."""
    columns: dict[tuple[CollectiveTraffic, ...], list[int]] = {}
    for report in reports:
        columns.setdefault(report.traffic, []).append(report.rank)
    rows = [
        ["", "", *(text for ranks in columns.values() for text in ("", _format_ranks(ranks)))],
        ["axis", "collective", *(["calls", "GiB"] * len(columns))],
    ]
    found = [{CollectiveKind(entry.axis, entry.kind): entry for entry in traffic} for traffic in columns]
    for transfer in sorted({transfer for entries in found for transfer in entries}, key=lambda each: each.sort_key):
        cells = []
        for entries in found:
            entry = entries.get(transfer)
            cells += ["-", "-"] if entry is None else [f"{entry.count:,}", _format_gib(entry.bytes)]
        rows.append([*transfer, *cells])
    return rows


def _format_ranks(ranks: list[int]) -> str:
    if len(ranks) > 3:
        return f"{len(ranks)} ranks, {ranks[0]}-{ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size >= 2**30 // 100 or not size else "<0.01"


def _align_columns(rows: list[list[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
