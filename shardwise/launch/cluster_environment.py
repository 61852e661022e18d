"""Which cluster this process was started in, and its place there, read from options and environment variables.

A process is one *rank* of a world that somebody else created, one *node* on which our agent starts the ranks, or on its
own. `detect` tries one after the other, in the order of docs/how-to/clusters.md. If --node says one node and the
scheduler another, that is an error: mostly, a shell expanded a variable too early."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.errors import JobError
from shardwise.workers.nodes import Node

# Variables with the index of this node, the number of nodes, and the address of node 0.
NODE_VARIABLES = {"Kubeflow": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
                  "Slurm": ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", ""),
                  "SkyPilot": ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
                  "Kubernetes": ("JOB_COMPLETION_INDEX", "", "")}  # fmt: skip
LONE_VARIABLES = {"pod of an Indexed Job": "JOB_COMPLETION_INDEX", "worker of Ray": "RAY_JOB_ID"}
Variables = Mapping[str, str]


@dataclass(frozen=True)
class ClusterEnvironment:
    """Where this process runs. `world_size` is None unless it is a rank, `node` unless it is a node."""

    name: str = "this machine"
    source: dict[str, str] = field(default_factory=dict)  # the options and variables that it was read from
    rank: int = 0
    world_size: int | None = None
    local_rank: int = 0
    local_world_size: int = 1
    master: str = ""
    node: Node | None = None

    @property
    def reads_job(self) -> bool:
        """All processes read the job, except the agents of nodes other than node 0."""
        return self.node is None or self.node.index == 0

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for the run."""
        return self.rank == 0 and self.reads_job

    def export(self) -> None:
        """Sets torchrun's variables, which PyTorch reads, for a rank; removes those of others from a node."""
        sizes = {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.local_world_size}
        for name, value in {"RANK": self.rank, "LOCAL_RANK": self.local_rank, **sizes}.items():
            if self.node is not None:
                os.environ.pop(name, None)
            elif self.world_size is not None:
                os.environ[name] = str(value)
        if self.master:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = self.master.rsplit(":", 1)

    def text(self) -> str:
        if self.node is not None:
            return f"{self.name}: node {self.node.index} of {self.node.count}, with node 0 at {self.node.endpoint}"
        return f"{self.name}: {'alone' if self.world_size is None else f'rank {self.rank} of {self.world_size}'}"


def detect(
    node: str | None = None, address: str | None = None, variables: Variables = os.environ
) -> ClusterEnvironment:
    """Returns the environment of this process. `node` and `address`: the options; raises JobError on a conflict."""
    found = _explicit(node, address, variables) or _torchrun(variables) or _node_of("Kubeflow", variables, address)
    found = found or _slurm_task(variables) or _node_of("SkyPilot", variables, address)
    if found is not None and found.node is not None:
        _check_agreement(found.node, variables)
    lone = [ClusterEnvironment(name, {key: variables[key]}) for name, key in LONE_VARIABLES.items() if key in variables]
    return found or (lone or [ClusterEnvironment()])[0]


def _explicit(node: str | None, address: str | None, variables: Variables) -> ClusterEnvironment | None:
    if node is None:
        return None
    if "TORCHELASTIC_RUN_ID" in variables:
        raise JobError("--node starts an agent, but torchrun has started this process; leave out one of them.")
    if node != "auto":
        options = {"--node": node, "--address": address or ""}
        return ClusterEnvironment("--node", options, node=Node.parse(node, address))
    for name in ("Kubeflow", "Slurm", "SkyPilot"):
        if found := _node_of(name, variables, address):
            return found
        if variables.get(NODE_VARIABLES[name][1]) == "1":
            return ClusterEnvironment()  # the only one
    known = ", ".join(count_name for _, count_name, _ in NODE_VARIABLES.values() if count_name)
    raise JobError(f"--node auto found no scheduler's node here (none of {known}); use --node K/N --address HOST:PORT.")


def _torchrun(variables: Variables) -> ClusterEnvironment | None:
    source = {name: variables[name] for name in ("RANK", "WORLD_SIZE") if name in variables}
    if not source:
        return None
    rank, world_size = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise JobError(f"RANK={rank} is not below WORLD_SIZE={world_size}; ranks are numbered from 0.")
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "29500")
    if world_size > 1 and not host:
        raise JobError(f"RANK={rank} and WORLD_SIZE={world_size} are set, but not MASTER_ADDR, the address of rank 0.")
    local = _integer(variables, "LOCAL_RANK", 0), _integer(variables, "LOCAL_WORLD_SIZE", 1)
    return ClusterEnvironment("torchrun", source, rank, world_size, *local, f"{host}:{port}" if host else "")


def _slurm_task(variables: Variables) -> ClusterEnvironment | None:
    world_size = _integer(variables, "SLURM_STEP_NUM_TASKS", 1)
    if world_size < 2:
        return None
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 2(x3),1
    counts = [int(count) for count, repeats in parts for _ in range(int(repeats or 1))]  # of the tasks on each node
    local = _integer(variables, "SLURM_LOCALID"), counts[_integer(variables, "SLURM_NODEID") % len(counts)]
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    source = {name: variables[name] for name in names if name in variables}
    host, port = variables.get("MASTER_ADDR") or _first_slurm_host(variables), variables.get("MASTER_PORT")
    master = f"{host}:{port or _slurm_port(variables)}"
    return ClusterEnvironment("Slurm", source, _integer(variables, "SLURM_PROCID"), world_size, *local, master)


def _node_of(name: str, variables: Variables, address: str | None) -> ClusterEnvironment | None:
    """Returns the environment of one of several nodes of this scheduler."""
    index_name, count_name, host_name = NODE_VARIABLES[name]
    if ":" in variables.get(count_name, ""):
        raise JobError(f"{count_name}={variables[count_name]} is no number of nodes; a range of nodes needs torchrun.")
    if _integer(variables, count_name, 1) < 2:
        return None
    if address is None and name == "Slurm":
        address = f"{_first_slurm_host(variables)}:{_slurm_port(variables)}"
    elif address is None:
        hosts = variables.get(host_name, "").split()
        if not hosts:
            raise JobError(f"{count_name} is set, but not {host_name}; pass the address of node 0 by --address.")
        address = f"{hosts[0]}:{variables.get('PET_MASTER_PORT', '29400')}"
    source = {index_name: variables.get(index_name, ""), count_name: variables[count_name], "address": address}
    place = f"{_integer(variables, index_name)}/{source[count_name]}"
    return ClusterEnvironment(name, source, node=Node.parse(place, address))


def _check_agreement(node: Node, variables: Variables) -> None:
    """Raises JobError if a scheduler says that this is another node."""
    for name, (index_name, count_name, _) in NODE_VARIABLES.items():
        is_told = index_name in variables and (not count_name or variables.get(count_name, "1") != "1")
        if is_told and (index := _integer(variables, index_name)) != node.index:
            here = f"this process would be node {node.index} of {node.count}, but {name} says that it is node {index}"
            raise JobError(f"{here} ({index_name}); if a shell expanded the variable too early, use --node auto.")


def _first_slurm_host(variables: Variables) -> str:
    """Returns the address of the step's first node, which is its name unless Slurm was configured otherwise."""

    def show(*words: str) -> str:
        command = ["scontrol", "show", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    nodes = variables.get("SLURM_STEP_NODELIST", "")
    try:
        return re.findall(r"NodeAddr=(\S+)", show("node", show("hostnames", nodes).split()[0]))[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        problem = f"scontrol does not tell the address of the first of {nodes or 'unknown nodes'}"
        raise JobError(f"{problem}; export it as MASTER_ADDR, or pass --node auto --address HOST:PORT.") from None


def _slurm_port(variables: Variables) -> int:
    """Returns a port that follows from the number of the job, so that jobs that share a node do not meet."""
    return 20000 + _integer(variables, "SLURM_JOB_ID", 0) % 10000


def _integer(variables: Variables, name: str, default: int | None = None) -> int:
    text = variables.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise JobError(f"{name}={text} in the environment is not a whole number; set it as its launcher does.")
    return int(text)
