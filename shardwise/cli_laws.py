"""The commands `shardwise laws ...`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from shardwise.cli_options import JsonFlag, Overrides
from shardwise.console import print_line
from shardwise.errors import DataError

laws = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown",
    help="Scaling laws: choose model size and token count for a compute budget.",
)  # fmt: skip


def check_count(scope: str) -> str:
    if scope not in ("all", "blocks"):
        raise DataError(f"--count {scope!r}: use all or blocks.")
    return scope


ParameterScope = Annotated[
    str, Option("--count", callback=check_count, help="Parameters to count: all, or blocks (no embeddings or head).")
]


def _print(values: Any, lines: Iterable[str], as_json: bool) -> None:
    print_line(json.dumps(values) if as_json else "\n".join(lines))


@laws.command("design")
def laws_design(
    budget: Annotated[str, Option(metavar="LOW:HIGH", help="Smallest and largest compute budget, in FLOPs; required.")],
    budgets: Annotated[int, Option(min=1, help="Number of compute budgets.")] = 3,
    sizes: Annotated[int, Option(min=1, help="Number of model sizes per budget.")] = 5,
    spread: Annotated[float, Option(min=1.0, help="Ratio of the largest to the middle model size.")] = 4.0,
    out: Annotated[Path, Option("--out", "-o", help="Folder for the job files and their runs.")] = Path("laws"),
    overrides: Overrides = None, counts: ParameterScope = "all", as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Writes a grid of small jobs for fitting a scaling law: several compute budgets, several model sizes each."""
    from shardwise.laws.budget import design_grid, parse_budget, write_grid
    from shardwise.laws.command import design_lines

    rows = write_grid(design_grid(*parse_budget(budget), budgets, sizes, spread, overrides or [], counts, out))
    _print(rows, design_lines(rows, out), as_json)


@laws.command("fit")
def laws_fit(
    runs: Annotated[list[Path], Argument(help="CSV file, run folders, or folders of run folders.")],
    drop: Annotated[int | None, Option("--drop-highest", min=0, help="Exclude the N highest losses instead.")] = None,
    draws: Annotated[int, Option(min=20, help="Number of bootstrap fits for the confidence intervals.")] = 400,
    seed: Annotated[int, Option(min=0, help="Seed of the bootstrap weights.")] = 0,
    counts: ParameterScope = "all",
    out: Annotated[Path | None, Option("--out", "-o", help="Write the fit to this file (JSON).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to runs, with confidence intervals, residuals and outliers."""
    from shardwise.files import write_text
    from shardwise.laws.command import fit_lines
    from shardwise.laws.fit import fit_as_dict, fit_scaling_law
    from shardwise.laws.runs import read_runs

    values = fit_as_dict(fit_scaling_law(read_runs(runs, counts), drop, draws, seed))
    if out is not None:
        write_text(out, json.dumps(values) + "\n")
    _print(values, fit_lines(values), as_json)


@laws.command("recommend")
def laws_recommend(
    flops: Annotated[float | None, Option(help="Compute budget in FLOPs; alternatively, --days.")] = None,
    devices: Annotated[int | None, Option(min=1, help="Number of devices; needs --cluster.")] = None,
    cluster: Annotated[str | None, Option(help="Cluster preset or calibrated file; needs --devices.")] = None,
    days: Annotated[float | None, Option(help="Time budget in days; needs --devices and --cluster.")] = None,
    law: Annotated[Path | None, Option(help="Saved fit (JSON); default: the built-in law.")] = None,
    overrides: Overrides = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Recommends model size and tokens for a compute budget, and predicts its loss and that of other sizes."""
    from shardwise.files import malformed_as_data_error
    from shardwise.laws.budget import recommend_with_plan
    from shardwise.laws.command import recommend_lines
    from shardwise.laws.fit import published_law, read_fitted_law

    fitted_law = published_law() if law is None else read_fitted_law(law)
    with malformed_as_data_error(law or Path("the built-in law")):
        result = recommend_with_plan(fitted_law, flops, days, devices, cluster, overrides or [])
        _print(result, recommend_lines(result, fitted_law.law.E), as_json)
