"""The commands for clusters: where a process is, and how to start a job on many machines."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from shardwise import quick_import
from shardwise.cli_options import JsonFlag, Overrides
from shardwise.console import print_line
from shardwise.errors import JobError
from shardwise.files import write_text
from shardwise.job import load_job


def where(
    folder: Annotated[Path, Argument(exists=True, help="Folder whose storage is described.")] = Path("."),
    as_json: JsonFlag = False,
) -> None:
    """Shows which scheduler started this process, what says so, its rank or node, devices, links and storage."""
    found = quick_import("shardwise.launch.where")
    from shardwise.launch.cluster_environment import detect

    place = found.describe_place(detect(), folder)
    print_line(json.dumps(place) if as_json else found.place_text(place))


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
) -> None:
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


def sweep(
    job_file: Annotated[Path, Argument(help="Job file (TOML).")],
    over: Annotated[list[str], Option(metavar="KEY=V,V", help="Values of a job key; repeatable: all combinations.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, Option(help="Folder of the runs; default: runs/sweep-JOB.")] = None,
    parallel: Annotated[int, Option(min=1, help="Number of runs side by side.")] = 1,
    halve: Annotated[bool, Option(help="Stop the worse half early, repeatedly; --no-halve trains all.")] = True,
) -> None:
    """Trains a job for each combination of values, and compares the runs on one page. The same command continues it."""
    run_sweep = quick_import("shardwise.launch.sweep").run_sweep

    out = out or Path("runs", f"sweep-{job_file.stem}")
    trials = run_sweep(job_file, overrides or [], over, out, parallel, halve, print_line)
    ran = [trial for trial in trials if trial.step]
    if len(ran) > 1:
        from shardwise.watch import compare, report_page

        comparison = compare.compare([trial.folder for trial in ran])
        write_text(out / "sweep.html", report_page.render_page(comparison, "Runs compared"))
        print_line(f"compared:   {out / 'sweep.html'}")
    if not ran or ran[0].problem:
        raise Exit(1)
    print_line(f"best:       {ran[0].name}, loss {ran[0].loss:.4f} at step {ran[0].step}, {ran[0].folder}")


def preflight(folder: Path, as_json: bool) -> None:
    """Measures the world of this process, or this machine; exits with 1 if something is slow."""
    found = quick_import("shardwise.launch.where")
    from shardwise.launch.cluster_environment import detect

    environment = detect()
    measured = found.measure_world(environment, folder)
    problems = found.find_problems(measured)
    if environment.is_main:
        print_line(json.dumps({"ranks": measured, "problems": problems}) if as_json else found.preflight_text(measured))
        raise Exit(1 if problems else 0)


COMMANDS = (where, submit, sweep)
