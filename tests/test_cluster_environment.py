"""Which cluster a process is in: every scheduler's variables, as its own daemons set them, and what contradicts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.launch.cluster_environment import ClusterEnvironment, detect
from shardwise.workers.nodes import Node

# As printed by torchrun 2.13 with two processes on each of two nodes.
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "a",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "PET_NNODES": "2", "PET_NODE_RANK": "1",
}  # fmt: skip
# As printed by a task of srun 22.05 in a job of two nodes with two tasks each, and by its batch script.
SRUN = {
    "SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[1-2]",
}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
# As Kubeflow Trainer's runtime torch-distributed sets them.
KUBEFLOW = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "RAY_JOB_ID": "01000000",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that answers as Slurm's does for two nodes; tests/test_slurm.py asks the real one."""
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\n[ "$2" = hostnames ] && printf "n1\\nn2\\n" || echo "   NodeAddr=10.1.0.$3 Version=2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, "a:29500", None)),
        ({**TORCHRUN, **SRUN}, ("torchrun", 3, 4, 1, 2, "a:29500", None)),  # srun torchrun ...
        (SRUN, ("Slurm", 3, 4, 1, 2, "10.1.0.n1:22345", None)),
        ({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "9"}, ("Slurm", 3, 4, 1, 2, "x:9", None)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, ("Slurm", 3, 4, 1, 1, "10.1.0.n1:22345", None)),
        (KUBEFLOW, ("Kubeflow", 0, None, 0, 1, "", Node(1, 2, "job-node-0-0.job", 29400))),
        (SKYPILOT, ("SkyPilot", 0, None, 0, 1, "", Node(1, 2, "10.0.0.4", 29400))),
        (SBATCH, ("this machine", 0, None, 0, 1, "", None)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, ("this machine", 0, None, 0, 1, "", None)),
        ({**KUBEFLOW, "PET_NNODES": "1"}, ("this machine", 0, None, 0, 1, "", None)),
        (POD, ("pod of an Indexed Job", 0, None, 0, 1, "", None)),
        ({"RAY_JOB_ID": "01000000"}, ("worker of Ray", 0, None, 0, 1, "", None)),
        ({}, ("this machine", 0, None, 0, 1, "", None)),
    ],
)
def test_the_first_that_applies_decides(variables: dict[str, str], expected: tuple[object, ...]) -> None:
    found = detect(variables=variables)
    place = (found.rank, found.world_size, found.local_rank, found.local_world_size, found.master, found.node)
    assert (found.name, *place) == expected
    assert all(variables.get(name, value) == value for name, value in found.source.items())
    assert found.is_main == (found.rank == 0 and (found.node is None or found.node.index == 0))


def test_an_explicit_node_comes_first() -> None:
    explicit = Node(1, 2, "h", 7)
    for variables in (SRUN, KUBEFLOW, SKYPILOT, POD, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}):
        found = detect("1/2", "h:7", variables)
        assert (found.name, found.node, found.world_size) == ("--node", explicit, None)


def test_the_scheduler_names_the_node() -> None:
    assert detect("auto", None, SRUN).node == Node(1, 2, "10.1.0.n1", 22345)
    assert detect("auto", "h:7", SRUN).node == Node(1, 2, "h", 7)
    assert detect("auto", None, {**SRUN, "SLURM_STEP_NUM_NODES": "1"}) == ClusterEnvironment()
    assert detect("auto", None, SKYPILOT).node == Node(1, 2, "10.0.0.4", 29400)


@pytest.mark.parametrize(
    ("node", "variables", "sentence"),
    [
        ("1/2", TORCHRUN, "--node starts an agent, but torchrun has started this process"),
        ("0/2", SRUN, "would be node 0 of 2, but Slurm says that it is node 1 .SLURM_NODEID.; if a shell expanded"),
        ("0/2", POD, "would be node 0 of 2, but Kubernetes says that it is node 1 .JOB_COMPLETION_INDEX."),
        (None, {**KUBEFLOW, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}, "would be node 1 of 2, but Slurm says"),
        ("auto", {}, "--node auto found no scheduler's node here"),
        ("auto", SBATCH, "--node auto found no scheduler's node here"),
        (None, {"RANK": "0"}, "WORLD_SIZE=None in the environment is not a whole number"),
        (None, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        (None, {"RANK": "0", "WORLD_SIZE": "2"}, "are set, but not MASTER_ADDR"),
        (None, {"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one in the environment is not a whole number"),
        (None, {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES=1:4 is no number of nodes; a range"),
        (None, {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NNODES is set, but not PET_MASTER_ADDR; pass"),
        (None, {"PET_NNODES": "2"}, "is set, but not PET_MASTER_ADDR"),
    ],
)
def test_what_contradicts_is_a_sentence(node: str | None, variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        detect(node, "h:7" if node and node != "auto" else None, variables)


def test_without_scontrol_the_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JobError, match=r"does not tell the address of the first of n\[1-2\]; export it as MASTER_ADDR"):
        detect(variables=SRUN)


def test_a_rank_exports_what_pytorch_reads_and_a_node_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ClusterEnvironment("Slurm", {}, 3, 4, 1, 2, "n1:22345").export()
    assert [os.environ[name] for name in names] == ["3", "4", "1", "2", "n1", "22345"]
    ClusterEnvironment("--node", {}, node=Node(0, 2, "h", 7)).export()
    assert [name for name in names if name in os.environ] == ["MASTER_ADDR", "MASTER_PORT"]


def where(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "where", *options]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


@pytest.mark.cluster
def test_where_says_what_it_read_that_from(tmp_path: Path) -> None:
    told = json.loads(where("--json", str(tmp_path), **TORCHRUN).stdout)
    assert told["environment"] == "torchrun" and (told["rank"], told["world_size"]) == (3, 4)
    assert told["read_from"] == {"RANK": "3", "WORLD_SIZE": "4"}
    assert told["cores"] and told["storage"]["path"] == str(tmp_path) and told["storage"]["free_bytes"] > 0
    assert told["software"]["torch"] and any(link["addresses"] for link in told["links"])
    lines = where(**SKYPILOT).stdout.splitlines()
    assert lines[0] == "world:     SkyPilot: node 1 of 2, with node 0 at 10.0.0.4:29400"
    assert lines[1].startswith("read from: SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2")
    failed = where(RANK="0")
    assert failed.returncode == 2 and failed.stderr.startswith("shardwise: WORLD_SIZE=None in the environment")
