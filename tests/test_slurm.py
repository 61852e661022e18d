"""A run on Slurm's own daemons: submitted, stopped as before a time limit, requeued, and the same to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from test_nodes import STEPS, curve, job_of

from shardwise.train.run_folder import RunFolder

pytestmark = pytest.mark.cluster

if slurm_cluster.missing():
    pytest.skip(slurm_cluster.missing(), allow_module_level=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def shardwise(environment: dict[str, str], folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shardwise", *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait(environment: dict[str, str], what: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + 150
    while not what():
        if time.monotonic() > deadline:
            jobs, nodes = (slurm_cluster.run(environment, "scontrol", "show", kind) for kind in ("job", "node"))
            daemon = (Path(environment["SLURM_CONF"]).parent / "slurmctld.log").read_text()[-4000:]
            raise AssertionError("\n".join([log.read_text() if log.is_file() else "no log", jobs, nodes, daemon]))
        time.sleep(0.1)


def is_restarted(environment: dict[str, str], number: str, restarts: int) -> bool:
    shown = slurm_cluster.run(environment, "scontrol", "show", "job", number)
    return "JobState=RUNNING" in shown and f" Restarts={restarts} " in shown


def test_a_run_on_two_nodes_is_requeued_and_ends_as_if_it_had_not_been(cluster: dict[str, str], tmp_path: Path) -> None:
    run, plain = RunFolder(tmp_path / "runs" / "first"), RunFolder(tmp_path / "plain")
    (tmp_path / "first.toml").write_text(job_of(Path("runs/first")).to_toml())
    (tmp_path / "plain.toml").write_text(job_of(plain.path).to_toml())
    told = shardwise(cluster, tmp_path, "submit", "first.toml", "--slurm", "--nodes", "2", "--time", "2h")
    assert "#SBATCH --nodes=2\n" in told and "#SBATCH --time=120\n" in told and "run folder: runs/first\n" in told
    number = told.partition("submitted:  Slurm job ")[2].partition(";")[0]
    log = tmp_path / f"first-{number}.log"
    assert f"log:        {log.name}\n" in told
    node = slurm_cluster.run(cluster, "sinfo", "-h", "-N", "-o", "%N").split()[-1]
    disturbances = (
        [["scancel", "--signal=TERM", number]],  # as before the time limit
        [["scontrol", "requeue", number]],
        [["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost"],
         ["scontrol", "update", f"NodeName={node}", "State=RESUME"]],
    )  # fmt: skip
    for restarts, (disturb, *repair) in enumerate(disturbances, start=1):
        steps = len(curve(run))
        wait(cluster, lambda: len(curve(run)) >= steps + 5, log)
        slurm_cluster.run(cluster, *disturb)
        if repair:
            wait(
                cluster,
                lambda: "JobState=PENDING" in slurm_cluster.run(cluster, "scontrol", "show", "job", number),
                log,
            )
            slurm_cluster.run(cluster, *repair[0])
        wait(cluster, lambda: is_restarted(cluster, number, restarts), log)
    wait(cluster, lambda: slurm_cluster.run(cluster, "squeue", "-h", "-j", number) == "", log)
    shardwise(cluster, tmp_path, "train", "plain.toml")
    assert "JobState=COMPLETED" in slurm_cluster.run(cluster, "scontrol", "show", "job", number), log.read_text()
    assert curve(run) == curve(plain) and len(curve(run)) == STEPS
    assert [event["event"] for event in run.events()].count("resumed") == 3


def test_a_cancelled_run_is_continued_by_its_file_and_on_fewer_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    """As docs/how-to/slurm.md says: `scancel`, `sbatch first.sbatch`; `scancel`, another `--nodes`."""
    run, plain = RunFolder(tmp_path / "runs" / "first"), RunFolder(tmp_path / "plain")
    (tmp_path / "first.toml").write_text(job_of(Path("runs/first")).to_toml())
    (tmp_path / "plain.toml").write_text(job_of(plain.path).to_toml())
    submit = ["submit", "first.toml", "--slurm", "--nodes"]
    told = shardwise(cluster, tmp_path, *submit, "2")
    for again in range(3):
        numbers = slurm_cluster.run(cluster, "squeue", "-h", "-o", "%A").split()
        log = tmp_path / f"first-{numbers[0]}.log"
        if again == 2:
            wait(cluster, lambda: slurm_cluster.run(cluster, "squeue", "-h") == "", log)
            continue
        steps = len(curve(run))
        wait(cluster, lambda: len(curve(run)) >= steps + 5, log)
        slurm_cluster.run(cluster, "scancel", *numbers)
        wait(cluster, lambda: slurm_cluster.run(cluster, "squeue", "-h") == "", log)
        if again == 0:
            subprocess.run(["sbatch", "first.sbatch"], env=cluster, cwd=tmp_path, check=True, capture_output=True)
        else:
            told = shardwise(cluster, tmp_path, *submit, "1")
            assert "it has a run, which is continued" in told
    shardwise(cluster, tmp_path, "train", "plain.toml")
    assert curve(run) == curve(plain) and len(curve(run)) == STEPS


def test_a_task_of_srun_is_a_rank_and_a_job_array_sweeps(cluster: dict[str, str], tmp_path: Path) -> None:
    where = [sys.executable, "-m", "shardwise", "where", "--json"]
    lines = slurm_cluster.run(cluster, "srun", "-N2", "-n4", "--overcommit", *where).splitlines()
    places = sorted((json.loads(line) for line in lines), key=lambda place: place["rank"])
    assert [(place["rank"], place["world_size"]) for place in places] == [(rank, 4) for rank in range(4)]
    assert [place["local_rank"] for place in places] == [0, 1, 0, 1] and {p["local_world_size"] for p in places} == {2}
    assert {place["master"].partition(":")[0] for place in places} == {"127.0.0.1"}
    (tmp_path / "job.toml").write_text(job_of(Path("runs/a")).to_toml())
    train = ["-m", "shardwise", "train", "job.toml", "--set", "steps=2"]
    ranks = ["srun", "-N2", "-n4", "--overcommit", "--chdir", str(tmp_path), sys.executable, *train]
    done = subprocess.run(ranks, env=cluster, capture_output=True, text=True, timeout=200)  # without MASTER_ADDR
    assert done.returncode == 0 and len(curve(RunFolder(tmp_path / "runs" / "a"))) == 2, done.stderr
    sweep = ["--set", "steps=1", "--set", "layout=tensor=2", "--set", "run.folder=runs/seed"]
    told = shardwise(cluster, tmp_path, "submit", "job.toml", "--slurm", "--sweep", "seed=3,4", *sweep)
    assert "#SBATCH --array=0-1\n" in told
    wait(cluster, lambda: slurm_cluster.run(cluster, "squeue", "-h") == "", tmp_path)
    runs = [RunFolder(tmp_path / "runs" / f"seed-{index}") for index in range(2)]
    assert [run.job().seed for run in runs] == [3, 4] and [len(curve(run)) for run in runs] == [1, 1]
