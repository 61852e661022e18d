"""`shardwise submit`: writes what a scheduler needs to run a job on several nodes, from a template, and hands it over.

Every template starts one agent per node, `shardwise train JOB --continue --node ...`, so that whatever starts the same
file again continues the run. A placeholder `@name@` whose value is None removes its line.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from textwrap import indent

from shardwise.errors import JobError
from shardwise.files import write_text
from shardwise.job import load_job

# Of each template: the suffix of the file that is written, and the command that takes it.
TEMPLATES = {
    "slurm.sbatch": (".sbatch", ["sbatch", "--parsable"]),
    "kubernetes.yaml": (".yaml", ["kubectl", "apply", "-f"]),
    "trainjob.yaml": (".yaml", ["kubectl", "apply", "-f"]),
    "ray.py.txt": (".ray.py", [sys.executable]),
    "ssh.sh": (".ssh.sh", ["bash"]),
}
RETURNS_AT_ONCE = ("sbatch", "kubectl")
POD_SETTINGS = ("run.rejoin_timeout=900", "run.join_timeout=1800")  # a pod may wait for a machine
MINUTES = {"m": 1, "h": 60, "d": 24 * 60}


@dataclass(frozen=True)
class Submission:
    """What to run, and where."""

    template: str
    job_file: Path
    settings: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 0
    cpus: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    sweep: str = ""
    image: str = ""
    volume: str = ""
    storage: str = ""
    hosts: tuple[str, ...] = ()
    address: str = ""
    python: str = ""

    @property
    def name(self) -> str:
        return re.sub("[^a-z0-9]+", "-", self.job_file.stem.lower()).strip("-")[:50] or "job"

    @property
    def folder(self) -> str:
        return load_job(self.job_file, self.settings).run.folder or f"runs/{self.name}"

    @property
    def path(self) -> Path:
        return Path(self.name + TEMPLATES[self.template][0])

    def write(self, command: str) -> str:
        """Writes the file to submit, which only its owner can read, and returns its text. `command`: what was typed."""
        text = self._fill_template(command)
        write_text(self.path, text)
        self.path.chmod(0o600)  # it may hold the secret of the run
        return text

    def _fill_template(self, command: str) -> str:
        in_pods = self.template.endswith(".yaml")
        folder = str(Path("/workspace" if in_pods else "") / self.folder)  # pods mount their volume there
        path = "/etc/shardwise/job.toml" if in_pods else str(self.job_file)
        train = [
            self.python or ("python" if in_pods else sys.executable),
            "-m",
            "shardwise",
            "train",
            path,
            "--continue",
        ]
        for setting in (*self.settings, f"run.folder={folder}", *(POD_SETTINGS if in_pods else ())):
            train += ["--set", setting]
        minutes = re.fullmatch(r"(\d+)([mhd])", self.time)  # other forms of a time are left to Slurm
        values: dict[str, object] = {
            "command": command, "name": self.name, "nodes": len(self.hosts) or self.nodes, "gpus": self.gpus or None,
            "cpus": self.cpus or None, "partition": self.partition or None, "account": self.account or None,
            "minutes": int(minutes[1]) * MINUTES[minutes[2]] if minutes else self.time or None,
            "log": f"{self.name}-%j.log", "values": None, "last_index": None, "array_settings": "",
            "train": shlex.join(train), "folder": shlex.quote(os.getcwd()), "hosts": shlex.join(self.hosts),
            "address": self.address or f"{''.join(self.hosts[:1]).rpartition('@')[2]}:29400",
            "secret": secrets.token_hex(32), "image": json.dumps(self.image), "volume": self.volume or self.name,
            "storage": self.storage,
        }  # fmt: skip
        if in_pods:
            values |= {"job": self.job_file.read_text().rstrip(), "train": json.dumps(train)}
            values["claim"] = None if self.volume else fill("claim.yaml", values).rstrip()
        elif self.template == "ray.py.txt":
            values |= {"train": repr(train), "folder": repr(os.getcwd()), "gpus": self.gpus}
        elif self.sweep:
            values |= self._array_values()
        return fill(self.template, values)

    def _array_values(self) -> dict[str, object]:
        """Returns the values of a job array, whose members differ in one key: KEY=VALUE,VALUE,..."""
        key, _, listed = self.sweep.partition("=")
        words = [word for word in listed.split(",") if word]
        if not key or not words:
            raise JobError(f"--sweep {self.sweep} is not of the form KEY=VALUE,VALUE; write --sweep seed=0,1,2.")
        settings = f'--set {key}="${{values[$SLURM_ARRAY_TASK_ID]}}"'
        settings += f' --set run.folder={shlex.quote(self.folder)}-"$SLURM_ARRAY_TASK_ID"'
        numbers = {"last_index": len(words) - 1, "log": f"{self.name}-%A-%a.log"}
        return {"values": shlex.join(words), "array_settings": settings, **numbers}

    def submit(self, say: Callable[[str], None]) -> None:
        """Hands the written file over. A scheduler returns at once; Ray's driver and ssh take this process's place."""
        command = [*TEMPLATES[self.template][1], str(self.path)]
        if shutil.which(command[0]) is None:
            raise JobError(f"{command[0]} was not found here; take {self.path} to where it is: {shlex.join(command)}")
        is_known = (Path(self.folder) / "job.toml").is_file()
        say(f"run folder: {self.folder}{' (it has a run, which is continued)' if is_known else ''}")
        say(f"page:       shardwise watch {self.folder}")
        if command[0] not in RETURNS_AT_ONCE:
            sys.stdout.flush()
            os.execvp(command[0], command)
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise JobError(f"{shlex.join(command)} failed: {result.stderr.strip()}")
        answer = result.stdout.strip()
        if command[0] == "sbatch":
            number = answer.partition(";")[0]
            say(f"log:        {self.name}-{number}{'-*' if self.sweep else ''}.log")
            say(f"submitted:  Slurm job {number}; to end it: scancel {number}")
        else:
            say(f"log:        kubectl logs -f -l batch.kubernetes.io/job-completion-index=0,job-name={self.name}")
            say(f"submitted:  {', '.join(answer.splitlines())}; to end it: kubectl delete -f {self.path}")


def fill(template: str, values: Mapping[str, object]) -> str:
    """Returns a template with its placeholders replaced; a value of several lines keeps the indentation."""
    lines = list[str]()
    for line in (files("shardwise.launch") / "templates" / template).read_text("utf-8").splitlines():
        names = re.findall("@([a-z_]+)@", line)
        if any(values[name] is None for name in names):
            continue
        margin = line[: len(line) - len(line.lstrip())]
        for name in names:
            line = line.replace(f"@{name}@", indent(str(values[name]), margin).strip())
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"
