"""The command line: parses options, calls the package, prints the result."""

import difflib
import errno
import io
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from shardwise import __version__, cli_commands, quick_import
from shardwise.cli_commands import Commands, JobFile, JsonFlag, LayoutOption, Overrides
from shardwise.console import Answer, make_table, print_answer, print_line
from shardwise.errors import EXIT_UNFINISHED, JobError, ShardwiseError
from shardwise.job import Job, load_job
from shardwise.models.registry import families
from shardwise.peer_words import BY_COMMAND_WORD, job_hint

KEYS = {key for key in Job.model_fields if key not in ("model", "data", "batch", "optimizer", "run")}
app = Commands(
    name="shardwise", no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the rich markup would take "[data]" for a style
    help="Distributed training of PyTorch models in any parallel layout, verified against a single process.",
)  # fmt: skip
app.add_typer(cli_commands.laws, name="laws")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print_line(f"shardwise {__version__}")
        raise typer.Exit


VersionOption = Annotated[bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")]


@app.callback()
def shardwise(version: VersionOption = False) -> None:
    """Options that come before the command."""


@app.command()
def train(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutOption = None,
    cluster: Annotated[str | None, Option(help="Cluster preset or file; short for --set run.cluster=...")] = None,
    processes: Annotated[int | None, Option(min=1, help="Plan the layout for N processes of this machine.")] = None,
    resume: Annotated[Path | None, Option(help="Resume the run in this folder, in any layout.")] = None,
    continue_run: Annotated[
        bool, Option("--continue", help="Resume the run in run.folder if there is one; exit with 75 if it is stopped.")
    ] = False,
    node: Annotated[str | None, Option(metavar="K/N", help="Node K (from 0) of N; auto asks the scheduler.")] = None,
    address: Annotated[str | None, Option(metavar="HOST:PORT", help="Multi-node: address of node 0.")] = None,
    proof: Annotated[bool, Option(help="First verify the layout of a model not built in; --no-proof skips it.")] = True,
    accept_data_change: Annotated[bool, Option("--accept-data-change", help="Resume with changed data.")] = False,
    accept_task_change: Annotated[
        bool, Option("--accept-task-change", help="Resume a module of your own whose task has changed.")
    ] = False,
    strict: Annotated[bool, Option("--strict", help="Refuse suspicious settings.")] = False,
) -> Answer:
    """Trains a job. Without a job file, trains the built-in demo on this machine."""
    if resume is not None and job_file is not None:
        raise JobError("--resume reads the job from the run folder; remove the job file from the command.")
    if address is not None and node is None:
        raise JobError("--address needs --node, e.g. --node 0/2 on the first of two nodes.")
    if processes is not None and layout is not None:
        raise JobError("--processes lets the planner choose the layout and excludes --layout; pass only one of them.")
    flag_overrides = [f"layout={layout}"] * (layout is not None) + [f"run.cluster={cluster}"] * bool(cluster)
    flag_overrides += ["layout=auto", f"run.processes={processes}"] if processes is not None else []
    # For this process, which forks the workers; each worker sets its own thread count.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    overrides = [*(overrides or []), *flag_overrides]
    if resume is None and (job_file is None or job_file.exists() or node is None):
        load_job(job_file, overrides)  # reports a typo before the slow import of PyTorch

    start_training = quick_import("shardwise.launch.start").start_training
    from shardwise.launch.cluster_environment import detect
    from shardwise.verify.command import prove

    folder, is_finished = start_training(
        job_file, overrides, resume, print_line, continue_run, environment=detect(node, address),
        check=prove if proof else None, accept_data_change=accept_data_change,
        accept_task_change=accept_task_change, strict=strict,
    )  # fmt: skip
    if continue_run and not is_finished:
        raise typer.Exit(EXIT_UNFINISHED)
    if folder is None:  # not node 0
        return Answer({"is_finished": is_finished})
    last: dict[str, Any] = next(iter(reversed(list(folder.metrics()))), {})
    result = f"step {last['step']}, loss {float(last['loss']):.4f}" if last else "no step was made"
    found = {"run": str(folder.place), "is_finished": is_finished, "step": last.get("step"), "loss": last.get("loss")}
    return Answer(found, result=f"{folder.place}: {result}")


@app.command()
def inspect(job_file: JobFile = None, overrides: Overrides = None) -> Answer:
    """Shows a model's blocks, parameters and tied weights, and which axes of a layout it supports."""
    inspect_job = quick_import("shardwise.verify.command").inspect_job

    found = inspect_job(load_job(job_file, overrides or []))
    rows = {**found, **found["axes"]}
    del rows["axes"]
    return Answer(found, "\n".join(f"{name + ':':<12} {value}" for name, value in rows.items()))


@app.command()
def verify(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: Annotated[list[str] | None, Option(help="Layout; repeatable. Default: the job's, for auto a set.")] = None,
    shrink: Annotated[bool, Option(help="Shrink the model first, to verify large models quickly.")] = False,
    steps: Annotated[int, Option(min=3, help="Number of optimizer steps to compare.")] = 3,
    against: Annotated[str | None, Option(help="Compare one process with transformers' module instead: hf.")] = None,
    as_json: JsonFlag = False,
) -> Answer | None:
    """Verifies that a layout computes the same losses, gradients and weights as a single process."""
    job = load_job(job_file, overrides or [])
    if against not in (None, "hf"):
        raise JobError(f"--against {against} is unknown; known: hf.")
    command = quick_import("shardwise.verify.command")
    if against is not None:
        return command.compare_with_transformers(command.shrink_model(job) if shrink else job)  # type: ignore[no-any-return]

    columns = ("layout", "loss", "grad norm", "gradients", "weights", "verdict")
    table = make_table("relative error against the single-process reference", columns, numbers=True)
    table.columns[0].justify = "left"

    def show(record: Any) -> None:
        if as_json:
            print_answer(json.dumps(record.as_dict()))
            return
        errors = [f"{value:.1e}" for value in (record.loss, record.grad_norm, record.grad, record.weight)]
        table.add_row(record.layout, *errors, "exact" if record.ok else "DIFFERS")
        if sys.stdout.isatty():
            print_line(f"{record.layout}: {'exact' if record.ok else 'DIFFERS'}")

    records = command.verify_job(job_file, overrides or [], layout or [], shrink, steps, show)
    if not as_json:
        Console().print(table, command.ERROR_NOTE, highlight=False)
    failed = [record for record in records if not record.ok]
    for record in failed if not as_json else ():
        print_answer(record.describe())
    if failed:
        raise typer.Exit(1)
    return None


@app.command()
def plan(
    job_file: JobFile = None,
    overrides: Overrides = None,
    cluster: Annotated[str | None, Option(help="Preset (h100, ...) or calibrated file; default: this machine.")] = None,
    devices: Annotated[int | None, Option(min=1, max=10**5, help="Default: one node, rack or pod; here: all.")] = None,
    layout: Annotated[str | None, Option(help="Estimate this layout instead of searching.")] = None,
    price: Annotated[float | None, Option(min=0, help="Of a device for an hour: states the run's cost.")] = None,
) -> Answer:
    """Chooses the fastest layout for a job on a cluster and predicts step time and memory. Needs no devices.
    For example: shardwise plan job.toml --cluster h100 --devices 64 --set batch.tokens=4M"""
    plan_job = quick_import("shardwise.planner.plan").plan_job
    from shardwise.planner.show import cost_lines, show_plan

    settings = [*(overrides or []), *[f"layout={layout}"] * (layout is not None)]
    if cluster is None:  # as `train` plans
        choose_plan = quick_import("shardwise.train.local_machine").choose_plan
        plan_result, _ = choose_plan(load_job(job_file, settings), devices)
    else:
        plan_result = plan_job(job_file, settings, cluster, devices, None if layout == "auto" else layout)
    statements = cost_lines(plan_result, price)
    with (console := Console()).capture() as shown:
        show_plan(plan_result, console, statements)
    facts = plan_result.as_dict() | {"price": price, "statements": statements}
    return Answer(facts, shown.get().rstrip("\n"))


@app.command()
def dryrun(
    job_file: JobFile = None,
    overrides: Overrides = None,
    layout: Annotated[str | None, Option(help="Layout to run; default: the job's layout.")] = None,
    rank: Annotated[
        list[int] | None, Option(min=0, help="Rank; repeatable. Default: of the first, second, middle, last stage.")
    ] = None,
    every_stage: Annotated[bool, Option("--every-stage", help="Simulate one rank per pipeline position.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Simulates a step of selected ranks of any world size on fake tensors; prints their exact memory and traffic."""
    load_job(job_file, overrides or [])  # reports a typo before the slow import of PyTorch

    from shardwise.planner.dryrun.dry_run import describe_reports, dryrun_job

    reports = dryrun_job(job_file, overrides or [], layout, rank or [], every_stage)
    for text in [json.dumps(report.as_dict()) for report in reports] if as_json else [describe_reports(reports)]:
        print_answer(text)


@app.command()
def calibrate(
    out: Annotated[Path, Option("--out", "-o", help="Cluster file to write (TOML).")] = Path("cluster.toml"),
    processes: Annotated[int, Option(min=1, help="Number of CPU processes to measure with; unused on GPUs.")] = 2,
    device: Annotated[str, Option(help="Device to measure: auto, cpu or cuda.")] = "auto",
) -> Answer | None:
    """Measures this machine for the planner. Pass the file to `plan` as --cluster.

    Under torchrun or srun, measures that world: its devices, links within nodes and between them."""
    from shardwise.launch.cluster_environment import detect
    from shardwise.planner.calibrate import calibrate_to_file

    in_world = (detect().world_size or 1) > 1
    text = cli_commands.calibrate_world(out, device) if in_world else calibrate_to_file(out, processes, device)
    if text is None:
        return None
    return Answer({"file": str(out), **tomllib.loads(out.read_text(encoding="utf-8"))}, text)


bench = Commands(no_args_is_help=True, rich_markup_mode="markdown", help="Benchmarks of this machine.")
app.add_typer(bench, name="bench")


@bench.command("step")
def bench_step(
    job_file: JobFile = None, overrides: Overrides = None,
    model: Annotated[str | None, Option(help="Model family or preset; short for --set model.name=...")] = None,
    batch: Annotated[int | None, Option(min=1, help="Global batch; short for --set batch.samples=...")] = None,
    steps: Annotated[int, Option(min=2, help="Number of steps to measure.")] = 10,
) -> Answer:  # fmt: skip
    """Benchmarks training steps of a job on one device with random tokens: tokens/s, memory, time by kernel."""
    flag_overrides = [f"model.name={model}"] * bool(model) + [f"batch.samples={batch}"] * bool(batch)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log
    job = load_job(job_file, [*(overrides or []), *flag_overrides])

    import torch

    from shardwise.bench.train_step import bench_step
    from shardwise.train.local_machine import pick_device, require_memory

    require_memory(job, 8)
    report = bench_step(job, torch.device(pick_device(job)), steps)
    return Answer(report.as_dict(), report.text())


@app.command()
def doctor(
    run: Annotated[Path, Argument(help="Run folder; the run may be in progress or finished.")] = Path("."),
    preflight: Annotated[bool, Option("--preflight", help="Measure devices, disks, clocks and links instead.")] = False,
) -> Answer | None:
    """Diagnoses a run that hangs or has failed: which rank, in which operation, where in the code, who waits for it.

    With --preflight, under torchrun or srun, measures that world before a run and names what is slow."""
    from shardwise.train.run_store import fetch_run
    from shardwise.workers.diagnosis import diagnose_run

    if preflight:
        return cli_commands.preflight(run)
    lines = list(diagnose_run(fetch_run(run)))
    return Answer(lines, "\n".join(lines))


for _name, _function in cli_commands.COMMANDS.items():
    app.command(_name)(_function)


@app.command()
def chaos(
    job_file: JobFile = None, overrides: Overrides = None, layout: LayoutOption = None,
    faults: Annotated[int, Option(min=1, help="Number of faults to inject.")] = 10,
    seed: Annotated[int, Option(min=0, help="Seed of the fault schedule.")] = 0,
) -> Answer:  # fmt: skip
    """Runs a job with and without injected faults (kill -9, SIGSTOP, bit flips, NaN) and compares the two runs."""
    from shardwise.chaos.run import run_chaos

    overrides = [*(overrides or []), *[f"layout={layout}"] * (layout is not None)]
    report = run_chaos(job_file, overrides, faults, seed, print_line)
    return Answer(report.as_dict(), report.text(), report.ok)


@app.command()
def data(
    out: Annotated[Path, Argument(metavar="OUT|preview", help="Token file to write (.bin), or the word preview.")],
    preview_file: Annotated[Path | None, Argument(metavar="[JOB_FILE]", help="Job file, with preview.")] = None,
    job_file: Annotated[Path | None, Option("--job", help="Job file with the [data] section.")] = None,
    overrides: Overrides = None,
    count: Annotated[int, Option(min=1, help="Number of samples to show, with preview.")] = 3,
) -> Answer:
    """Tokenizes a data source into a memory-mapped token file, for `data.source = "tokens"`.

    `data preview` shows samples as a model gets them. What counts towards the loss is green, or in [[ ]] when piped."""
    from shardwise.data.text import encode_source

    if str(out) != "preview":
        text = encode_source(load_job(job_file, overrides or []).data, out)
        return Answer({"file": str(out), "text": text}, text)
    job = load_job(preview_file or job_file, overrides or [])
    lines = list(quick_import("shardwise.data.make_sources").preview_job(job, count, sys.stdout.isatty()))
    return Answer(lines, "\n".join(lines))


def _say_where_it_goes(error: Any, message: str) -> str:
    """Returns what to tell of a wrong option: it may be a key of the job, or of another framework's."""
    if message.startswith("Got unexpected extra argument"):
        return f"{message}; --set takes key=value, without spaces around ="
    if message.startswith("No such command") and (command := BY_COMMAND_WORD.get(message.split("'")[1].lower())):
        return f"{message.partition('.')[0]}; did you mean {command}?"
    if not message.startswith("No such option"):
        return message
    option = error.option_name
    key = option.lstrip("-").replace("-", "_")
    section, _, word = key.rpartition(".")
    fields = getattr(getattr(Job.model_fields.get(section), "annotation", None), "model_fields", {})
    if section == "model":
        fields = {name for family in families().values() for name in family.config.model_fields}
    if word in fields or (word in KEYS and section not in Job.model_fields):
        ours = key if section in Job.model_fields else word
        return f"No such option: {option}; it is a key of the job: --set {ours}=..."
    is_misspelt = difflib.get_close_matches(f"--{key}", error.possibilities or (), cutoff=0.8)
    hint = job_hint(key) or job_hint(word)
    if hint and hint.endswith("."):
        return f"No such option: {option}; {hint}"
    if not is_misspelt and (hint or (near := difflib.get_close_matches(word, KEYS, 1, 0.8))):
        return f"No such option: {option}; keys of the job are set by --set key=value: {hint or f'--set {near[0]}=...'}"
    return message


def main() -> None:
    """Runs the command line. Prints expected errors as a sentence, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a file name or a run's text may have characters that the terminal has not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(app(standalone_mode=False))  # the exit code of a typer.Exit, or None
    except ShardwiseError as error:
        # Under torchrun or Slurm every rank raises the same error; only rank 0 prints it.
        if not (rank := os.environ.get("RANK", "0")).isdecimal() or int(rank) == 0:
            print(f"shardwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:  # not about a file
            raise
        print(f"shardwise: cannot access {error.filename}: {error.strerror}.", file=sys.stderr)
        sys.exit(1 if error.errno == errno.EIO else 2)
    except typer.Abort:
        print("shardwise: stopped by Ctrl-C.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
            print("shardwise: not enough memory; use a smaller model or batch, or more ranks.", file=sys.stderr)
            sys.exit(1)
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a wrong option or argument
            if not (message := error.format_message()):  # type: ignore[attr-defined]  # the command line was empty, and help is printed
                sys.exit(0)
            print(f"shardwise: {_say_where_it_goes(error, message)}", file=sys.stderr)
            sys.exit(error.exit_code)
        raise
