"""Slurm's own daemons in a temporary folder: munged, slurmctld and two slurmd on one machine, on loopback ports.

$ python tests/slurm_cluster.py FOLDER          until Ctrl-C; `export SLURM_CONF=FOLDER/slurm.conf` to use it
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# cred_expire: how long a job that was requeued waits, and how late a message may arrive.
CONFIG = """\
ClusterName=shardwise
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
JobRequeue=1
KillWait=30
ReturnToService=2
SlurmdTimeout=300
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no daemons can be started here; empty if they can."""
    lacking = [name for name in DAEMONS if find(name) is None]
    if lacking:
        return f"Slurm's daemons are not installed ({', '.join(lacking)}); Debian has them in slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root here"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    return ports


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Runs the daemons; yields the environment in which Slurm's commands find them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=free_ports(3)))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PATH"] += ":/usr/sbin:/sbin"
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", name] for name in NODES),
    ]  # fmt: skip
    processes = []
    try:
        for command in commands:
            with (folder / f"{'-'.join(command[:1] + command[3:4])[:12]}.out").open("wb") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while run(environment, "sinfo", "-h", "-o", "%T %D") != f"idle {len(NODES)}":
            assert time.monotonic() < deadline, run(environment, "sinfo")
            assert all(process.poll() is None for process in processes), [process.args for process in processes]
            time.sleep(0.2)
        yield environment
    finally:
        run(environment, "scancel", "--user", "root")
        for _ in range(600):  # until no process of a job is left, which would hold its port
            if not run(environment, "squeue", "-h"):
                break
            time.sleep(0.1)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def run(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.strip()


if __name__ == "__main__":
    with slurm(Path(sys.argv[1]).absolute()) as values:
        print(f"export SLURM_CONF={values['SLURM_CONF']}", flush=True)
        signal.pause()
