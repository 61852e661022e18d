"""`shardwise submit`: writes what a scheduler needs to run a job on several nodes, from a template, and hands it over.

Every template starts one agent per node, `shardwise train JOB --continue --node ...`, so that whatever starts the same
file again continues the run."""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from shardwise.console import fill_in, pluralize
from shardwise.errors import JobError
from shardwise.files import write_text
from shardwise.job import load_job
from shardwise.launch.sweep import parse_values
from shardwise.layout import Layout
from shardwise.object_store import parse_url
from shardwise.parallel.prepare import prepare
from shardwise.run_job import check_job_file, has_job_file

TEMPLATES = Path(__file__).parent / "templates"
# Of each kind: its template, the suffix of the file that is written, and the command that takes it.
KINDS = {"slurm": ("slurm.sbatch", ".sbatch", ["sbatch", "--parsable"]),
         "k8s": ("kubernetes.yaml", ".yaml", ["kubectl", "apply", "-f"]),
         "trainjob": ("trainjob.yaml", ".yaml", ["kubectl", "apply", "-f"]),
         "ray": ("ray.py.txt", ".ray.py", [sys.executable]), "ssh": ("ssh.sh", ".ssh.sh", ["bash"])}  # fmt: skip
POD_SETTINGS = ("run.rejoin_timeout=900", "run.join_timeout=1800")  # a pod may wait for a machine
MINUTES = {"m": 1, "h": 60, "d": 24 * 60}
Values = dict[str, Any]


@dataclass(frozen=True)
class Submission:
    """What to run, and where. `options`: those of the command line that the templates name."""

    kind: str
    job_file: Path
    settings: list[str]
    hosts: list[str]
    options: Values

    @property
    def name(self) -> str:
        return re.sub("[^a-z0-9]+", "-", self.job_file.stem.lower()).strip("-")[:50] or "job"

    @property
    def folder(self) -> str:
        return load_job(self.job_file, self.settings).run.folder or f"runs/{self.name}"

    @property
    def path(self) -> Path:
        return Path(self.name + KINDS[self.kind][1])

    def write(self, command: str) -> str:
        """Writes the file to submit, for its owner only. Returns its text without the secret. `command`: as typed."""
        job, nodes, gpus = load_job(self.job_file, self.settings), self.options["nodes"], self.options["gpus"]
        if job.layout != "auto":
            world = prepare(job, layout := Layout.parse(job.layout)).layout.world
            per_node = gpus or max(1, world // nodes)
            if world != nodes * per_node:
                remedy = f"use --nodes {world // gpus}" if gpus and not world % gpus else "change the layout"
                kind = pluralize(nodes, "node") + (f" of {pluralize(gpus, 'GPU')}" if gpus else "")
                raise JobError(f"layout '{layout}' has {world} processes, which do not fill {kind}; {remedy}.")
        text = fill_in(TEMPLATES / KINDS[self.kind][0], self._values() | {"command": command}) + "\n"
        write_text(self.path, text)
        self.path.chmod(0o600)
        return re.sub("secret: [0-9a-f]{64}", "secret: (not shown)", text)

    def _values(self) -> Values:
        in_pods, options = self.kind in ("k8s", "trainjob"), {key: value or None for key, value in self.options.items()}
        path = "/etc/shardwise/job.toml" if in_pods else str(self.job_file)
        train = [options["python"] or ("python" if in_pods else sys.executable), "-m", "shardwise", "train", path]
        url = parse_url(self.folder)
        folder = url or Path("/workspace" if in_pods else "") / self.folder  # pods mount their volume there
        for setting in (*self.settings, f"run.folder={folder}", *(POD_SETTINGS if in_pods else ())):
            train += ["--set", setting]
        train += ["--continue"]
        values: Values = options | {"name": self.name, "train": shlex.join(train), "folder": shlex.quote(os.getcwd()),
                                    "log": f"{self.name}-%j.log", "values": None, "array_settings": ""}  # fmt: skip
        if in_pods:
            values |= {"job": indent(self.job_file.read_text().rstrip(), "    ").strip(), "train": json.dumps(train)}
            values |= {"secret": secrets.token_hex(32), "image": json.dumps(options["image"])}
            needs_claim = not options["volume"] and not url  # a run in an object store needs no volume
            values["volume"] = self.name if needs_claim else options["volume"]
            values["claim"] = fill_in(TEMPLATES / "claim.yaml", values) if needs_claim else None
        elif self.kind == "ray":
            values |= {"train": repr(train), "folder": repr(os.getcwd()), "gpus": options["gpus"] or 0}
        elif self.kind == "ssh":
            address = options["address"] or f"{self.hosts[0].rpartition('@')[2]}:29400"
            values |= {"hosts": shlex.join(self.hosts), "address": address}
        elif match := re.fullmatch(r"(\d+)([mhd])", time := self.options["time"]):
            values["time"] = int(match[1]) * MINUTES[match[2]]
        elif time and not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", time.lower()):
            raise JobError(f"--time {time}: write 90m, 24h or 2d, or Slurm's own form, such as 1-12:00:00.")
        return values | (self._array_values() if options["sweep"] else {})

    def _array_values(self) -> Values:
        """Returns the values of a job array, whose members differ in one key: KEY=VALUE,VALUE,..."""
        key, words = parse_values(self.options["sweep"], "--sweep")
        settings = f' --set {key}="${{values[$SLURM_ARRAY_TASK_ID]}}"'
        settings += f' --set run.folder={shlex.quote(self.folder)}-"$SLURM_ARRAY_TASK_ID"'
        numbers = {"last_index": len(words) - 1, "log": f"{self.name}-%A-%a.log"}
        return {"values": shlex.join(words), "array_settings": settings, **numbers}

    def submit(self, say: Callable[[str], None]) -> None:
        """Hands the written file over. A scheduler returns at once; Ray's driver and ssh take this process's place."""
        command = [*KINDS[self.kind][2], str(self.path)]
        if shutil.which(command[0]) is None:
            raise JobError(f"{command[0]} was not found here; take {self.path} to where it is: {shlex.join(command)}")
        is_known = has_job_file(Path(self.folder))
        if is_known:
            check_job_file(Path(self.folder))
        say(f"run folder: {self.folder}{' (it has a run, which is continued)' if is_known else ''}")
        say(f"page:       shardwise watch {self.folder}")
        if self.kind in ("ray", "ssh"):
            sys.stdout.flush()
            os.execvp(command[0], command)
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise JobError(f"{shlex.join(command)} failed: {result.stderr.strip()}")
        answer, log, end = ", ".join(result.stdout.split("\n")).strip(", "), "", f"kubectl delete -f {self.path}"
        if self.kind == "slurm":
            number = answer.partition(";")[0]
            log, end = f"{self.name}-{number}{'-*' if self.options['sweep'] else ''}.log", f"scancel {number}"
            answer = f"Slurm job {number}"
        say(f"log:        {log or f'kubectl logs -f -l job-name={self.name}'}")
        say(f"submitted:  {answer}; to end it: {end}")
