"""The commands for clusters, pages, trained models and scaling laws, and the options that several commands share."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer import Argument, Exit, Option

from shardwise import quick_import
from shardwise.console import Answer, elapsed_shown, fill_in, print_answer, print_line, quietly
from shardwise.errors import DataError, JobError
from shardwise.files import malformed_as_data_error, require_parent_folder, write_text
from shardwise.job import load_job

JobFile = Annotated[Path | None, Argument(help="Job file (TOML); default: the built-in demo.", show_default=False)]
Overrides = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a job key; repeatable.")]
LayoutOption = Annotated[str | None, Option(help='Layout, e.g. "shard=4 tensor=2"; short for --set layout=...')]
RunArgument = Annotated[Path, Argument(help="Run folder.")]
JsonFlag = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
QuietFlag = Annotated[bool, Option("--quiet", "-q", help="Print nothing but the result and errors.")]
MAX_OPTIONS = {"seed": 2**63 - 1, "processes": 1000, "budgets": 100, "sizes": 100}  # of all others: a million


class Commands(typer.Typer):
    """Gives every command what all have: --quiet, --json, a bound for every number, the time that it takes."""

    def command(self, *names: str, **options: Any) -> Callable[..., Any]:  # type: ignore[override]
        register = super().command(*names, **options)
        return lambda function: register(_with_common_options(function))


def _with_common_options(function: Callable[..., Answer | None]) -> Callable[..., None]:
    given = signature(function)
    for name, hint in get_type_hints(function, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if option.min is not None and option.max is None:
                option.max = MAX_OPTIONS.get(name, 10**6)
    own = {"as_json"} & given.parameters.keys()
    common: dict[str, Any] = {"quiet": QuietFlag}
    if not own and "Answer" in str(given.return_annotation):
        common["as_json"] = JsonFlag

    @wraps(function)
    def run(quiet: bool, as_json: bool = False, **options: Any) -> None:
        is_silent = function.__name__ not in ("train", "watch", "init")  # these say what they do
        with quietly() if quiet or as_json else elapsed_shown(function.__name__) if is_silent else nullcontext():
            answer = function(**options, **dict.fromkeys(own, as_json))
        if answer is None:
            return
        if text := json.dumps(answer.data) if as_json else (quiet and answer.result) or answer.text:
            print_answer(text)
        if not answer.ok:
            raise Exit(answer.exit_code)

    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in common.items()]
    run.__signature__ = given.replace(parameters=[*given.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = function.__annotations__ | common
    return run


def where(
    folder: Annotated[Path, Argument(exists=True, help="Folder whose storage is described.")] = Path("."),
) -> Answer:
    """Shows which scheduler started this process, what says so, its rank or node, devices, links and storage."""
    found = quick_import("shardwise.launch.where")
    from shardwise.launch.cluster_environment import detect

    place = found.describe_place(detect(), folder)
    return Answer(place, fill_in(Path(found.__file__).parent / "templates" / "where.txt", {**place, "gib": 2**30}))


def init(
    out: Annotated[Path, Argument(help="Job file to write.")] = Path("job.toml"),
    task: Annotated[str | None, Option(help="pretrain, continue, tune, images or recommender.")] = None,
    data: Annotated[str | None, Option(help="What to train on: a file, folder or glob; empty: built-in data.")] = None,
    model: Annotated[str | None, Option(help="A preset; to continue or tune, a Hugging Face folder or a run.")] = None,
    devices: Annotated[str | None, Option(help="Processes; 0: one per GPU or core of this machine.")] = None,
) -> Answer:
    """Writes a commented job file for a task. In a terminal, asks for what no option says."""
    given, ask = {"task": task, "data": data, "model": model, "devices": devices}, sys.stdin.isatty() and typer.prompt
    lines = list(quick_import("shardwise.launch.init_job").write_job(out, given, ask))
    return Answer({"file": str(out)}, "\n".join(lines), result="\n".join(lines[:-1]))


def submit(
    job_file: Annotated[Path, Argument(help="Job file (TOML).")],
    kind: Annotated[str | None, Argument(help="With --k8s: trainjob, for Kubeflow Trainer.")] = None,
    overrides: Overrides = None,
    slurm: Annotated[bool, Option("--slurm", help="Submit to Slurm by sbatch.")] = False,
    k8s: Annotated[bool, Option("--k8s", help="Submit to Kubernetes by kubectl.")] = False,
    ray: Annotated[bool, Option("--ray", help="Start on the Ray cluster of this machine or RAY_ADDRESS.")] = False,
    ssh: Annotated[str | None, Option(metavar="HOSTS", help="Start by ssh: a file of hosts, or host,host.")] = None,
    nodes: Annotated[int, Option(min=1, help="Number of nodes; with --ssh, the number of hosts.")] = 1,
    gpus_per_node: Annotated[int, Option(min=0, help="GPUs of each node.")] = 0,
    cpus_per_node: Annotated[int, Option(min=0, help="CPU cores of each node (Slurm); 0: its default.")] = 0,
    time: Annotated[str, Option(help="Time limit (Slurm), e.g. 24h; the run goes on in the next one.")] = "",
    partition: Annotated[str, Option(help="Partition (Slurm).")] = "",
    account: Annotated[str, Option(help="Account (Slurm).")] = "",
    sweep: Annotated[str, Option(metavar="KEY=V,V", help="A job array (Slurm) with a run for each value.")] = "",
    image: Annotated[str, Option(help="Container image with Shardwise (Kubernetes).")] = "",
    volume: Annotated[str, Option(help="Existing volume claim (Kubernetes); default: a new one of --storage.")] = "",
    storage: Annotated[str, Option(help="Size of the new volume claim (Kubernetes).")] = "100Gi",
    address: Annotated[str, Option(metavar="HOST:PORT", help="Address of node 0 (ssh); default: first host.")] = "",
    python: Annotated[str, Option(help="Python on the nodes; default: this one (Kubernetes: python).")] = "",
    dry_run: Annotated[bool, Option("--dry-run", help="Only write and show the file.")] = False,
) -> Answer:
    """Writes what a scheduler needs to run a job on several nodes, shows it and submits it. It resumes by itself."""
    if [slurm, k8s, ray, bool(ssh)].count(True) != 1:
        raise JobError("choose where to submit: one of --slurm, --k8s, --ray and --ssh HOSTS.")
    if kind is not None and not (k8s and kind == "trainjob"):
        raise JobError(f"{kind!r} is not known here; `--k8s trainjob` submits a TrainJob of Kubeflow Trainer.")
    if k8s and not image:
        raise JobError("--k8s needs --image, a container image in which `python -m shardwise` works.")
    if sweep and not slurm:
        raise JobError("--sweep submits a job array of Slurm; elsewhere, submit a job for each value.")
    load_job(job_file, overrides or [])
    try:
        hosts = ssh.replace(",", "\n").split() if ssh else []
        if ssh and ("/" in ssh or ssh.endswith(".txt") or Path(ssh).is_file()):
            hosts = Path(ssh).read_text().split()
    except (OSError, ValueError) as error:
        raise JobError(f"--ssh {ssh} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}.") from None
    if ssh and not hosts:
        raise JobError(f"--ssh {ssh} names no host; list hosts in a file, one per line, or as a,b.")
    options = {
        "nodes": len(hosts) or nodes, "gpus": gpus_per_node, "cpus": cpus_per_node, "time": time, "sweep": sweep,
        "partition": partition, "account": account, "image": image, "volume": volume, "storage": storage,
        "address": address, "python": python,
    }  # fmt: skip
    chosen = {"slurm": slurm, "trainjob": kind, "k8s": k8s, "ray": ray, "ssh": ssh}

    from shardwise.launch.submit import Submission

    name = next(name for name, is_chosen in chosen.items() if is_chosen)
    submission = Submission(name, job_file, overrides or [], hosts, options)
    print_line(submission.write(shlex.join(["shardwise", *sys.argv[1:]])))
    print_line(f"written:    {submission.path}")
    if not dry_run:
        submission.submit(print_line)
    return Answer({"file": str(submission.path), "is_submitted": not dry_run})


def sweep(
    job_file: Annotated[Path, Argument(help="Job file (TOML).")],
    over: Annotated[list[str], Option(metavar="KEY=V,V", help="Values of a job key; repeatable: all combinations.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, Option(help="Folder of the runs; default: runs/sweep-JOB.")] = None,
    parallel: Annotated[int, Option(min=1, help="Number of runs side by side.")] = 1,
    halve: Annotated[bool, Option(help="Stop the worse half early, repeatedly; --no-halve trains all.")] = True,
) -> Answer:
    """Trains a job for each combination of values, and compares the runs on one page. The same command continues it."""
    run_sweep = quick_import("shardwise.launch.sweep").run_sweep

    out = out or Path("runs", f"sweep-{job_file.stem}")
    trials = run_sweep(job_file, overrides or [], over, out, parallel, halve, print_line)
    ran = [trial for trial in trials if trial.step]
    if len(ran) > 1:
        from shardwise.watch import page_data, report_page

        comparison = page_data.compare([trial.folder for trial in ran])
        write_text(out / "sweep.html", report_page.render_page(comparison, "Runs compared"))
        print_line(f"compared:   {out / 'sweep.html'}")
    rows = [vars(trial) | {"folder": str(trial.folder), "loss": trial.loss if trial.step else None} for trial in trials]
    if not ran or ran[0].problem:
        return Answer(rows, ok=False)
    best = ran[0]
    return Answer(rows, f"best:       {best.name}, loss {best.loss:.4f} at step {best.step}, {best.folder}")


def tune(
    job_file: JobFile = None,
    overrides: Overrides = None,
    top: Annotated[int, Option(min=1, help="Number of layouts to measure.")] = 8,
    minutes: Annotated[float, Option(min=0.1, help="Time for all of them.")] = 5.0,
    processes: Annotated[int | None, Option(min=1, help="Processes; default: one for each device or core.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="Folder to write; default: runs/tune-JOB.")] = None,
) -> Answer:
    """Trains the planner's best layouts on this machine for a few steps each and keeps the fastest.

    Writes a job with that layout, a cluster file that makes later plans better, and a page."""
    job = load_job(job_file, [*(overrides or []), *[f"run.processes={processes}"] * bool(processes)])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    module = quick_import("shardwise.launch.tune")
    out = out or Path("runs", f"tune-{job_file.stem if job_file else 'job'}")
    found = module.tune_job(job, top, minutes, out, print_line)
    text = fill_in(Path(module.__file__).parent / "templates" / "tune.txt", found)
    return Answer(found, text, not found["stopped"], exit_code=130)


def preflight(folder: Path) -> Answer | None:
    """Measures the world of this process, or this machine; exits with 1 if something is slow."""
    found = quick_import("shardwise.launch.where")
    from shardwise.launch.cluster_environment import detect

    environment = detect()
    measured = found.measure_world(environment, folder)
    problems = found.find_problems(measured)
    if not environment.is_main:
        return None
    return Answer({"ranks": measured, "problems": problems}, found.preflight_text(measured), not problems)


def calibrate_world(out: Path, device: str) -> str | None:
    """Measures the world of this process; the first rank writes the cluster file and says what was measured."""
    worker, module = quick_import("shardwise.launch.worker"), quick_import("shardwise.planner.calibrate")
    from shardwise.job import make_job
    from shardwise.launch.cluster_environment import detect

    require_parent_folder(out)
    environment, job = detect(), make_job({"run": {"device": device}})
    environment.export()
    own = worker.init_distributed(environment.world_size, job)
    cluster = module.calibrate_world(own, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    quick_import("shardwise.comm.collectives").leave_world()
    return str(module.write_calibrated(cluster, out)) if environment.is_main else None


StepOption = Annotated[str, Option(help="Checkpoint: a step, or best; default: the newest.")]


def sample(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint.")],
    prompt: Annotated[list[str] | None, Option(help="Text to continue; repeatable.")] = None,
    tokens: Annotated[int, Option(min=1, help="Tokens to generate; beyond model.sequence, from the last ones.")] = 256,
    temperature: Annotated[float, Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, Option(min=0, help="Choose among the K most likely tokens; 0: among all.")] = 0,
    top_p: Annotated[float, Option(min=0.0, help="Choose among tokens that together have this probability.")] = 1.0,
    stop: Annotated[list[str] | None, Option(help="End the text before this string; repeatable.")] = None,
    seed: Annotated[int, Option(min=0, help="Sampling seed.")] = 0,
) -> Answer:
    """Generates text with the model of a run, on one device."""
    generate = quick_import("shardwise.train.generate")

    sampling = generate.Sampling(tokens, temperature, top_k, top_p, tuple(stop or ()), seed=seed)
    texts = list(generate.sample_run(run, prompt or [""], sampling))
    return Answer(texts, "\n".join(texts))


def evaluate(
    path: Annotated[Path, Argument(metavar="RUN|FOLDER", help="Run folder, or a Hugging Face folder.")],
    data: Annotated[list[str] | None, Option(help="Text or JSONL file for the perplexity; repeatable.")] = None,
    tasks: Annotated[list[Path] | None, Option(help="Task file (YAML, as lm-eval's); repeatable.")] = None,
    layout: Annotated[str, Option(help='Layout, e.g. "tensor=2"; default: one process.')] = "",
    step: StepOption = "",
    batch: Annotated[int, Option(min=1, help="Rows that are computed at once.")] = 8,
    overrides: Overrides = None,
) -> Answer | None:
    """Evaluates a model on files and tasks: perplexity, multiple choice, exact match, metrics of your own."""
    module = quick_import("shardwise.eval.tasks")

    found = module.evaluate(path, data or [], tasks or [], layout, step, overrides or [], batch)
    return module.results_answer(found) if os.environ.get("RANK", "0") == "0" else None


DtypeOption = Annotated[str, Option(help="float32, bf16, fp16 or float64; auto: as the run's first weights.")]
ShardSize = Annotated[float, Option(min=0.001, help="Size of the largest weight file, in GB.")]
CheckFlag = Annotated[bool, Option("--check", help="Load it with transformers and compare; write a reference sample.")]
Gates = Annotated[list[str] | None, Option("--gate", help='Condition, e.g. "validation.loss <= 2.1"; repeatable.')]
OutFolder = Annotated[Path, Argument(help="Folder to write; it must not exist.")]


def export(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint.")], out: OutFolder, step: StepOption = "",
    dtype: DtypeOption = "auto", max_shard_size: ShardSize = 5.0, check: CheckFlag = False, gate: Gates = None,
) -> Answer:  # fmt: skip
    """Writes a run as a folder that transformers loads, with model card, proof and data profile."""
    return _hand_over(run, out, step, dtype, max_shard_size, check, gate, merges=False)


def merge(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint of adapters (model.lora).")], out: OutFolder,
    step: StepOption = "", dtype: DtypeOption = "auto", max_shard_size: ShardSize = 5.0, check: CheckFlag = False,
    gate: Gates = None,
) -> Answer:  # fmt: skip
    """Adds the adapters of a run to the weights that it started from, and writes a folder that transformers loads."""
    return _hand_over(run, out, step, dtype, max_shard_size, check, gate, merges=True)


def _hand_over(
    run: Path, out: Path, step: str, dtype: str, gigabytes: float, check: bool, gates: list[str] | None, merges: bool
) -> Answer:
    hand_over = quick_import("shardwise.export.handover").hand_over

    done = []
    for sentence in hand_over(run, out, step, dtype, int(gigabytes * 1e9), check, merges, gates or []):
        print_line(sentence)
        done.append(sentence)
    return Answer({"folder": str(out), "done": done})


def drift(
    profile: Annotated[Path, Argument(help="An exported folder, or its data-profile.json.")],
    new: Annotated[str, Argument(help="New data: a file or folder of the same kind, or another profile (.json).")],
    threshold: Annotated[float, Option(min=0.0, help="PSI above which a column counts as moved.")] = 0.1,
    page: Annotated[Path | None, Option("--html", help="Write a page with the histograms side by side.")] = None,
) -> Answer:
    """Compares new data with the profile of the training data, column by column; exits with 1 if one has drifted."""
    module = quick_import("shardwise.export.drift")

    require_parent_folder(page)
    return module.drift_answer(module.drift(profile, new, threshold, page))  # type: ignore[no-any-return]


def watch(
    run: Annotated[Path | None, Argument(help="Run folder; without it, the page lists all runs in runs/.")] = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8080,
    host: Annotated[str, Option(help="Address; any but a loopback one exposes the page to the network.")] = "127.0.0.1",
) -> None:
    """Serves a live page of a run, or of all runs."""
    from shardwise.watch.serve import serve_runs

    serve_runs(run, port, host, print_line)


def report(run: RunArgument) -> Answer:
    """Writes the report of a run as one self-contained page: report.html in the run folder."""
    from shardwise.watch.report_page import write_report

    with malformed_as_data_error(run):
        page = str(write_report(run))
    return Answer({"page": page}, page)


def compare(
    runs: Annotated[list[Path], Argument(help="Two or more run folders.")],
    html: Annotated[Path | None, Option(help="Also write an HTML page with curves to this file.")] = None,
) -> Answer:
    """Compares runs: job differences, loss over samples and over time, throughput."""
    from shardwise.watch import page_data
    from shardwise.watch.report_page import render_page

    with malformed_as_data_error(*runs):
        comparison = page_data.compare(runs)
        if html is not None:
            require_parent_folder(html)
            write_text(html, render_page(comparison, "Runs compared"))
        with (console := Console()).capture() as shown:
            console.print(*page_data.comparison_tables(comparison))
        return Answer(comparison, shown.get().rstrip("\n"))


def trace(
    run: RunArgument,
    out: Annotated[Path | None, Option("--out", "-o", help="File; default: trace.json in the run folder.")] = None,
) -> Answer:
    """Writes a trace of all ranks for Perfetto or chrome://tracing."""
    from shardwise.watch.report_page import write_trace

    with malformed_as_data_error(run):
        path, events = write_trace(run, out)
    text = f"{path}: {events:,} events; open it at ui.perfetto.dev or chrome://tracing"
    return Answer({"file": str(path), "events": events}, text)


COMMANDS = {"init": init, "where": where, "submit": submit, "sweep": sweep, "tune": tune, "watch": watch,
            "report": report, "compare": compare, "trace": trace, "sample": sample, "env": where, "eval": evaluate,
            "export": export, "merge": merge, "drift": drift}  # fmt: skip
laws = Commands(
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


@laws.command("design")
def laws_design(
    budget: Annotated[str, Option(metavar="LOW:HIGH", help="Smallest and largest compute budget, in FLOPs; required.")],
    budgets: Annotated[int, Option(min=1, help="Number of compute budgets.")] = 3,
    sizes: Annotated[int, Option(min=1, help="Number of model sizes per budget.")] = 5,
    spread: Annotated[float, Option(min=1.0, help="Ratio of the largest to the middle model size.")] = 4.0,
    out: Annotated[Path, Option("--out", "-o", help="Folder for the job files and their runs.")] = Path("laws"),
    overrides: Overrides = None, counts: ParameterScope = "all",
) -> Answer:  # fmt: skip
    """Writes a grid of small jobs for fitting a scaling law: several compute budgets, several model sizes each."""
    from shardwise.laws.budget import design_grid, design_text, parse_budget, write_grid

    rows = write_grid(design_grid(*parse_budget(budget), budgets, sizes, spread, overrides or [], counts, out))
    return Answer(rows, design_text(rows, out))


@laws.command("fit")
def laws_fit(
    runs: Annotated[list[Path], Argument(help="CSV file, run folders, or folders of run folders.")],
    drop: Annotated[int | None, Option("--drop-highest", min=0, help="Exclude the N highest losses instead.")] = None,
    draws: Annotated[int, Option(min=20, help="Number of bootstrap fits for the confidence intervals.")] = 400,
    seed: Annotated[int, Option(min=0, help="Seed of the bootstrap weights.")] = 0,
    counts: ParameterScope = "all",
    out: Annotated[Path | None, Option("--out", "-o", help="Write the fit to this file (JSON).")] = None,
) -> Answer:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to runs, with confidence intervals, residuals and outliers."""
    from shardwise.laws.fit import fit_as_dict, fit_scaling_law, fit_text, read_runs

    values = fit_as_dict(fit_scaling_law(read_runs(runs, counts), drop, draws, seed))
    if out is not None:
        write_text(out, json.dumps(values) + "\n")
    return Answer(values, fit_text(values))


@laws.command("recommend")
def laws_recommend(
    flops: Annotated[float | None, Option(help="Compute budget in FLOPs; alternatively, --days.")] = None,
    devices: Annotated[int | None, Option(min=1, help="Number of devices; needs --cluster.")] = None,
    cluster: Annotated[str | None, Option(help="Cluster preset or calibrated file; needs --devices.")] = None,
    days: Annotated[float | None, Option(help="Time budget in days; needs --devices and --cluster.")] = None,
    price: Annotated[float | None, Option(min=0, help="Of a device for an hour; adds the cost.")] = None,
    cost: Annotated[float | None, Option(min=0, help="Budget in money, instead of --days; needs --price.")] = None,
    law: Annotated[Path | None, Option(help="Saved fit (JSON); default: the built-in law.")] = None,
    overrides: Overrides = None,
) -> Answer:  # fmt: skip
    """Recommends model size and tokens for a compute budget, and predicts its loss and that of other sizes."""
    from shardwise.laws.budget import recommend_text, recommend_with_plan
    from shardwise.laws.fit import published_law, read_fitted_law

    if cost is not None:
        if not (cost and price and devices and days is None):
            raise JobError("--cost is a budget instead of --days; it needs --price, --devices and --cluster.")
        days = cost / price / devices / 24
    fitted_law = published_law() if law is None else read_fitted_law(law)
    with malformed_as_data_error(law or Path("the built-in law")):
        result = recommend_with_plan(fitted_law, flops, days, devices, cluster, overrides or [])
        return Answer(result, recommend_text(result | {"price": price}, fitted_law.law.E))
