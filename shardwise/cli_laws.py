"""The commands `shardwise laws ...`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from shardwise.cli_options import JsonFlag, Overrides
from shardwise.console import print_line

laws = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown",
    help="Scaling laws: choose model size and token count for a compute budget.",
)  # fmt: skip
ParameterCount = Annotated[str, Option("--count", help="Parameters to count: all, or blocks (no embeddings or head).")]


@laws.command("design")
def laws_design(
    budget: Annotated[str, Option(metavar="LOW:HIGH", help="Smallest and largest compute budget, in FLOPs; required.")],
    budgets: Annotated[int, Option(min=1, help="Number of compute budgets.")] = 3,
    sizes: Annotated[int, Option(min=1, help="Number of model sizes per budget.")] = 5,
    spread: Annotated[float, Option(min=1.0, help="Ratio of the largest to the middle model size.")] = 4.0,
    out: Annotated[Path, Option("--out", "-o", help="Folder for the job files and their runs.")] = Path("laws"),
    overrides: Overrides = None, counts: ParameterCount = "all", as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Writes a grid of small jobs for fitting a scaling law: several compute budgets, several model sizes each."""
    from shardwise.laws.command import design_text

    print_line(design_text(budget, budgets, sizes, spread, out, overrides or [], counts, as_json))


@laws.command("fit")
def laws_fit(
    runs: Annotated[list[Path], Argument(help="CSV file, run folders, or folders of run folders.")],
    drop: Annotated[
        int | None, Option("--drop-highest", min=0, help="Exclude the N highest losses instead of the outliers.")
    ] = None,
    draws: Annotated[int, Option(min=20, help="Number of bootstrap fits for the confidence intervals.")] = 400,
    seed: Annotated[int, Option(min=0, help="Seed of the bootstrap weights.")] = 0,
    counts: ParameterCount = "all",
    out: Annotated[Path | None, Option("--out", "-o", help="Write the fit to this file (JSON).")] = None,
    plot: Annotated[Path | None, Option(help="Plot the fit to this file (SVG).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to runs, with confidence intervals, residuals and outliers."""
    from shardwise.laws.command import fit_text

    print_line(fit_text(runs, drop, draws, seed, counts, out, plot, as_json))


@laws.command("recommend")
def laws_recommend(
    flops: Annotated[float | None, Option(help="Compute budget in FLOPs; alternatively, --days.")] = None,
    devices: Annotated[int | None, Option(min=1, help="Number of devices; needs --cluster.")] = None,
    cluster: Annotated[str | None, Option(help="Cluster preset or calibrated file; needs --devices.")] = None,
    days: Annotated[float | None, Option(help="Time budget in days; needs --devices and --cluster.")] = None,
    law: Annotated[Path | None, Option(help="Saved fit (JSON); default: the built-in law.")] = None,
    unique_tokens: Annotated[float | None, Option("--unique-tokens", help="Number of unique tokens available.")] = None,
    overrides: Overrides = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Recommends model size and tokens for a compute budget, and predicts its loss and that of other sizes."""
    from shardwise.laws.command import recommend_text

    print_line(recommend_text(law, flops, days, devices, cluster, unique_tokens, overrides or [], as_json))


@laws.command("noise")
def laws_noise(
    runs: Annotated[list[Path], Argument(help="Run folders with a checkpoint each.")],
    batches: Annotated[int, Option(min=2, help="Number of batches to read.")] = 16,
    samples: Annotated[int, Option(min=1, help="Samples per batch.")] = 8, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Estimates the critical batch size of runs from their gradient noise scale."""
    from shardwise.laws.command import noise_text

    print_line(noise_text(runs, batches, samples, as_json))
