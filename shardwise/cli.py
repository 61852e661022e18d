"""The commands: parse, call, print. No logic."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shardwise import __version__
from shardwise.console import print_line
from shardwise.errors import JobError, ShardwiseError
from shardwise.files import require_parent_folder
from shardwise.job import load_job
from shardwise.watch import command as watch

app = typer.Typer(
    name="shardwise", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the other kind takes "[data]" for a style
    help="Train PyTorch models in any layout, proven equal to one device.",
)  # fmt: skip

JobFile = Annotated[Path | None, typer.Argument(help="The job file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key of the job; may be repeated.")
]


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print_line(f"shardwise {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Shows the version.")]


@app.callback()
def shardwise(version: Version = False) -> None:
    """Holds what is said before a command's name."""


@app.command()
def train(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: Annotated[str | None, typer.Option(help="Short for --set layout=...")] = None,
    cluster: Annotated[str | None, typer.Option(help="Short for --set run.cluster=...")] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Plans a layout for so many; short for --set run.processes=... layout=auto."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Goes on with this run folder, in any layout.")] = None,
    node: Annotated[
        str | None, typer.Option(metavar="K/N", help="Which of several machines this is; 0 leads, and has the job.")
    ] = None,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the first machine listens.")] = None,
) -> None:
    """Trains a job; with no job file, the built-in demo on this machine."""
    if resume is not None and job_file is not None:
        raise JobError("--resume takes its job from the run folder; leave the job file out.")
    if address is not None and node is None:
        raise JobError("--address is where the first of several machines listens; say which one this is: --node 0/2.")
    if processes is not None and layout is not None:
        raise JobError("--processes plans a layout of its own; leave it or --layout out.")
    flag_overrides = [f"layout={layout}"] * bool(layout) + [f"run.cluster={cluster}"] * bool(cluster)
    flag_overrides += ["layout=auto", f"run.processes={processes}"] if processes is not None else []
    # Of this process, which forks workers; they have threads of their own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    overrides = [*(overrides or []), *flag_overrides]
    if resume is None:
        load_job(job_file, overrides).require_trainable()  # a typo is told at once, before PyTorch is imported

    from shardwise.launch.start import start_training
    from shardwise.workers.nodes import Node

    start_training(job_file, overrides, resume, print_line, Node.parse(node, address) if node is not None else None)


@app.command()
def verify(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: Annotated[list[str] | None, typer.Option(help="A layout to prove; may be repeated.")] = None,
    shrink: Annotated[bool, typer.Option(help="Makes the model small first, keeping its kind and odd sizes.")] = False,
    steps: Annotated[int, typer.Option(min=3, help="Optimizer steps to compare.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record per layout.")] = False,
) -> None:
    """Proves that layouts compute what one device computes."""
    load_job(job_file, overrides or []).require_trainable()

    from shardwise.verify.command import verify_job

    console = Console()
    columns = ("layout", "loss", "grad norm", "gradients", "weights", "verdict")
    table = Table(*columns, title="relative errors against one process")

    def show(record: Any) -> None:
        if as_json:
            print_line(json.dumps(record.as_dict()))
            return
        errors = [f"{value:.1e}" for value in (record.loss, record.grad_norm, record.grad, record.weight)]
        table.add_row(record.layout, *errors, "exact" if record.ok else "DIFFERS")
        if sys.stdout.isatty():
            console.print(f"{record.layout}: {'exact' if record.ok else 'DIFFERS'}", highlight=False)

    records = verify_job(job_file, overrides or [], layout or [], shrink, steps, show)
    if not as_json:
        console.print(table)
    failed = [record for record in records if not record.ok]
    for record in failed:
        if not as_json:
            print_line(record.describe())
    if failed:
        raise typer.Exit(1)


@app.command()
def plan(
    job_file: JobFile = None,
    overrides: Overrides = None,
    cluster: Annotated[str, typer.Option(help="A known machine (a100-80g, h100, ...) or a calibrated file.")] = "cpu",
    devices: Annotated[int | None, typer.Option(min=1, help="How many; one node if left out.")] = None,
    layout: Annotated[str | None, typer.Option(help="Judges this layout instead of searching.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Writes the plan as a page of its own to this file too.")] = None,
) -> None:
    """Chooses a layout for a job and says what it will cost, for machines that need not be here."""
    from shardwise.planner.plan import plan_job
    from shardwise.planner.plan_page import write_page
    from shardwise.planner.show import show_plan

    plan_result = plan_job(job_file, overrides or [], cluster, devices, layout)
    if html is not None:
        write_page(plan_result, html)
    if as_json:
        print_line(json.dumps(plan_result.as_dict()))
    else:
        show_plan(plan_result, Console())


@app.command()
def dryrun(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: Annotated[str | None, typer.Option(help="The layout; without it, the job's.")] = None,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="A rank to look at; may be repeated.")] = None,
    every_stage: Annotated[bool, typer.Option("--every-stage", help="A rank of each place in the pipeline.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record per rank.")] = False,
) -> None:
    """Takes a step as some ranks of any world, without its devices: exact memory and traffic."""
    load_job(job_file, overrides or []).require_trainable()

    from shardwise.planner.dryrun.command import describe_reports, dryrun_job

    reports = dryrun_job(job_file, overrides or [], layout, rank or [], every_stage, lambda report: None)
    for text in [json.dumps(report.as_dict()) for report in reports] if as_json else [describe_reports(reports)]:
        print_line(text)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="The cluster file to write (TOML).")] = Path("cluster.toml"),
    processes: Annotated[int, typer.Option(min=1, help="Processes of a world on this machine, without a GPU.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Measures this machine for the planner; give the file to `plan` as --cluster."""
    from shardwise.planner.calibrate import calibrate_to_file

    print_line(calibrate_to_file(out, processes, device))


bench = typer.Typer(no_args_is_help=True, help="Measures this machine at work.", rich_markup_mode="markdown")
app.add_typer(bench, name="bench")


@bench.command("step")
def bench_step(
    job_file: JobFile = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Short for --set model.name=...")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Short for --set batch.samples=...")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to measure.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Takes steps of a job on one device with random tokens: tokens/s, memory, and where the time goes."""
    flag_overrides = [f"model.name={model}"] * bool(model) + [f"batch.samples={batch}"] * bool(batch)
    job = load_job(job_file, [*(overrides or []), *flag_overrides])
    job.require_trainable()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own talk

    import torch

    from shardwise.bench.train_step import bench_step as run_bench
    from shardwise.train.local_machine import pick_device

    report = run_bench(job, torch.device(pick_device(job)), steps)
    print_line(json.dumps(report.as_dict()) if as_json else report.text())


@bench.command("data")
def bench_data(
    job_file: JobFile = None,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to measure.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Says how long a step of a job waits for data on one device, and which stage of a batch takes longest."""
    job = load_job(job_file, overrides or [])
    job.require_trainable()

    import torch

    from shardwise.bench.data_loading import bench_data as run_bench
    from shardwise.train.local_machine import pick_device

    report = run_bench(job, torch.device(pick_device(job)), steps)
    print_line(json.dumps(report.as_dict()) if as_json else report.text())


@bench.command("comm")
def bench_comm(
    processes: Annotated[int, typer.Option(min=2, help="Processes to start; under torchrun, those that it made.")] = 4,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Processes on a node; without it, as torchrun says, or half of all."
        ),
    ] = None,
    max_mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="The largest message, in MiB.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is measured.")] = 7,
    plot: Annotated[Path | None, typer.Option(help="Draws times and fits into this file (SVG).")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Puts the links into this cluster file (TOML), for `plan --cluster`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Sums messages over processes by ring, halving, tree, two levels and parameter server, beside PyTorch's own."""
    from shardwise.bench import comm
    from shardwise.draw import write_svg

    require_parent_folder(plot, write)
    report = comm.bench_comm(processes, nproc_per_node, max_mib << 20, repeats)
    if report is None:
        return
    print_line(json.dumps(report.as_dict()) if as_json else report.text())
    if plot is not None:
        write_svg(comm.draw_report(report), plot)
    if write is not None:
        comm.write_links(report, write)


@app.command()
def doctor(run: Annotated[Path, typer.Argument(help="A run folder, of a run that is under way or not.")]) -> None:
    """Explains a run that hangs or died: which rank, in which operation, where in the code; who waits for it."""
    from shardwise.workers.diagnosis import diagnose_run

    for line in diagnose_run(run):
        print_line(line)


for _command in watch.COMMANDS:
    app.command()(_command)


@app.command()
def chaos(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: Annotated[str | None, typer.Option(help="Short for --set layout=...")] = None,
    faults: Annotated[int, typer.Option(min=1, help="How many faults.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of faults.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Runs a job twice, once under random real faults (kill -9, SIGSTOP, flipped bits, NaN), and prints the tally."""
    from shardwise.chaos.run import run_chaos

    report = run_chaos(job_file, [*(overrides or []), *[f"layout={layout}"] * bool(layout)], faults, seed, print_line)
    print_line(json.dumps(report.as_dict()) if as_json else report.text())
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    prompt: Annotated[str, typer.Option(help="What the text starts with.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Writes text with a trained run, on one device."""
    from shardwise.train.generate import sample_run

    print_line(sample_run(run, prompt, tokens, temperature, seed))


@app.command()
def data(
    out: Annotated[Path, typer.Argument(help="The token file to write (.bin).")],
    job_file: Annotated[Path | None, typer.Option("--job", help="Takes [data] from this job file.")] = None,
    overrides: Overrides = None,
) -> None:
    """Writes a source as a memory-mapped token file, for `data.source = "tokens"`."""
    from shardwise.data.encode import write_token_file

    print_line(write_token_file(job_file, overrides or [], out))


laws = typer.Typer(no_args_is_help=True, help="How big, how long: scaling laws.", rich_markup_mode="markdown")
app.add_typer(laws, name="laws")
ParameterCount = Annotated[
    str, typer.Option("--count", help="Parameters: all, or those of the blocks without embeddings and head.")
]


@laws.command("design")
def laws_design(
    budget: Annotated[str, typer.Option(metavar="LOW:HIGH", help="FLOPs of the smallest and the largest runs.")],
    model: Annotated[str, typer.Option(help="The kind of model; gpt is the one that is known.")] = "gpt",
    budgets: Annotated[int, typer.Option(min=1, help="How many budgets.")] = 3,
    sizes: Annotated[int, typer.Option(min=1, help="Models for each.")] = 5,
    spread: Annotated[float, typer.Option(min=1.0, help="The largest over the middle one.")] = 4.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for job files and runs.")] = Path("laws"),
    overrides: Overrides = None,
    counts: ParameterCount = "all",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Writes a grid of small jobs to fit a law to: some budgets, and at each models of several sizes."""
    from shardwise.laws.command import design_text

    print_line(design_text(budget, budgets, sizes, spread, model, out, overrides or [], counts, as_json))


@laws.command("fit")
def laws_fit(
    runs: Annotated[list[Path], typer.Argument(help="A CSV file, or run folders and folders of them.")],
    drop: Annotated[
        int | None,
        typer.Option(
            "--drop-highest",
            min=0,
            help="Leaves out so many highest losses, and nothing else; without it: runs far off the law.",
            show_default=False,
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=20, help="Fits of reweighted runs behind the intervals.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
    counts: ParameterCount = "all",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Writes the fit to this file (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draws the fit into this file (SVG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to runs, with intervals, residuals and outliers."""
    from shardwise.laws.command import fit_text

    print_line(fit_text(runs, drop, draws, seed, counts, out, plot, as_json))


@laws.command("recommend")
def laws_recommend(
    flops: Annotated[float | None, typer.Option(help="The budget, as 6 x parameters x tokens.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many train it.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A known machine (h100, ...) or a calibrated file.")] = None,
    days: Annotated[float | None, typer.Option(help="The budget, as days of all devices.")] = None,
    law: Annotated[Path | None, typer.Option(help="A fit that was saved; without it, the built-in law.")] = None,
    unique_tokens: Annotated[
        float | None, typer.Option("--unique-tokens", help="Different tokens that there are.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Says which size and how many tokens a budget should buy, the loss, and what other choices cost."""
    from shardwise.laws.command import recommend_text

    print_line(recommend_text(law, flops, days, devices, cluster, unique_tokens, overrides or [], as_json))


@laws.command("noise")
def laws_noise(
    runs: Annotated[list[Path], typer.Argument(help="Run folders with a checkpoint.")],
    batches: Annotated[int, typer.Option(min=2, help="Batches to read.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Samples in each.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Estimates the critical batch size of runs from the noise of their gradients."""
    from shardwise.laws.command import noise_text

    print_line(noise_text(runs, batches, samples, as_json))


def main() -> None:
    """The entry point: errors that we raise on purpose are told in a sentence, never as a traceback."""
    try:
        sys.exit(app(standalone_mode=False))  # the code of a typer.Exit, or None
    except ShardwiseError as error:
        # In a world made by others every rank finds the same mistake; one tells it.
        if os.environ.get("RANK", "0") == "0":
            print(f"shardwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (PermissionError, IsADirectoryError) as error:
        if error.filename is None:
            raise
        print(f"shardwise: {error.filename} cannot be used: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a wrong option or argument, told by the parser
            print(f"shardwise: {error.format_message()}", file=sys.stderr)  # type: ignore[attr-defined]
            sys.exit(error.exit_code)
        raise


if __name__ == "__main__":
    main()
