"""Several NCCL ranks on one GPU: one node agent per rank, as a user starts one per machine.

NCCL refuses two ranks on one device only if they name the same host. Here each rank names another one, so that NCCL
takes its network transport over loopback."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRANSPORT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


@dataclass
class NcclRun:
    """What is left of a run after all of its agents have ended."""

    folder: Path
    exit_codes: list[int]
    output: str
    seconds_after_last_step: float
    """From the time that the last step was logged until the last agent had ended."""

    @property
    def records(self) -> list[dict[str, Any]]:
        return _read_lines(self.folder / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return _read_lines(self.folder / "events.jsonl")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_over_nccl(
    job_file: Path, ranks: int, port: int, settings: list[str], device: str = "cuda", timeout: float = 300
) -> NcclRun:
    """Trains a job on one GPU with as many agents as ranks; the run's folder is `run` beside the job file."""
    folder = job_file.parent / "run"
    command = [sys.executable, "-m", "shardwise", "train"]
    first_command = [*command, str(job_file)]
    for setting in [f"run.device={device}", f"run.folder={folder}", *settings]:
        first_command += ["--set", setting]

    agents = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            **TRANSPORT,
            "NCCL_HOSTID": f"host{rank}",
            "SHARDWISE_SECRET": "the secret of this test",
        }
        place = ["--node", f"{rank}/{ranks}", "--address", f"127.0.0.1:{port}"]
        log = (job_file.parent / f"agent{rank}.log").open("w")
        agent = subprocess.Popen(
            [*(command if rank else first_command), *place],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        agents.append(agent)

    deadline = time.monotonic() + timeout
    try:
        exit_codes = [agent.wait(timeout=max(0.1, deadline - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    ended = time.time()

    output = "".join((job_file.parent / f"agent{rank}.log").read_text() for rank in range(ranks))
    assert (folder / "metrics.jsonl").exists(), output
    last_step = max((record["time"] for record in _read_lines(folder / "metrics.jsonl")), default=ended)
    return NcclRun(folder, exit_codes, output, ended - last_step)
