"""`shardwise sweep`: trains a job once for each combination of values, and stops the hopeless runs early.

Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943): all runs train for a part of the steps, the better
half for twice as many, and so on. A run that goes on is resumed, so no step is taken twice, with the learning rates of
the whole run. All runs see the same samples in the same order (the seed decides), so losses at a step compare."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from shardwise.console import pluralize
from shardwise.errors import EXIT_UNFINISHED, JobError
from shardwise.job import load_job
from shardwise.train.run_folder import RunFolder

FIRST_SHARE = 1 / 8  # of the steps, at least, before runs are compared
Say = Callable[[str], None]


def parse_values(text: str, option: str) -> tuple[str, list[str]]:
    """Parses KEY=VALUE,VALUE,..."""
    key, _, listed = text.partition("=")
    values = [value for value in listed.split(",") if value]
    if not key or not values:
        raise JobError(f"{option} {text} is not of the form KEY=VALUE,VALUE, such as seed=0,1,2.")
    return key, values


@dataclass
class Trial:
    settings: list[str]  # KEY=VALUE
    folder: Path
    loss: float = math.nan
    step: int = 0
    problem: str = ""

    @property
    def name(self) -> str:
        return " ".join(self.settings)

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def losses(self) -> dict[int, float]:
        """Returns the loss of each step so far."""
        rows = RunFolder(self.folder).metrics()
        return {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in rows}

    def judge(self, until: int) -> None:
        """Sets the loss: the mean over the last tenth of the steps until `until`."""
        last = {step: loss for step, loss in self.losses().items() if 0.9 * until <= step <= until}
        self.step, self.loss = max(last, default=0), sum(last.values()) / len(last) if last else math.nan


def make_trials(job_file: Path, overrides: list[str], over: list[str], out: Path) -> list[Trial]:
    """Returns the runs of a sweep, after checking each of their jobs."""
    keys = [parse_values(text, "--over") for text in over]
    trials = []
    for values in product(*(values for _, values in keys)):
        settings = [f"{key}={value}" for (key, _), value in zip(keys, values, strict=True)]
        load_job(job_file, [*overrides, *settings])
        trials.append(Trial(settings, out / ",".join(settings).replace("/", "_")))
    return trials


def run_sweep(job_file: Path, overrides: list[str], over: list[str], out: Path, parallel: int, halve: bool,
              say: Say) -> list[Trial]:  # fmt: skip
    """Trains all runs, the best ones to the end; returns them, best first."""
    trials = make_trials(job_file, overrides, over, out)
    total = load_job(job_file, overrides).total_steps
    out.mkdir(parents=True, exist_ok=True)
    left = trials
    for steps in rungs(len(trials), total) if halve else [total]:
        say(f"{pluralize(len(left), 'run')} until step {steps} of {total}")
        _train(job_file, overrides, left, steps, total, parallel)
        left = sorted(left, key=lambda trial: (math.isnan(trial.loss), trial.loss))
        for trial in left:
            say(f"  {trial.name}: {trial.problem or f'loss {trial.loss:.4f} at step {trial.step}'}")
        left = [trial for trial in left[: -(-len(left) // 2)] if not trial.problem]
        if not left:
            break
    return sorted(trials, key=lambda trial: (-trial.step, math.isnan(trial.loss), trial.loss))


def rungs(runs: int, steps: int) -> Iterator[int]:
    """Yields the steps after which runs are compared; the last is `steps`."""
    halvings = min(math.ceil(math.log2(runs)), round(-math.log2(FIRST_SHARE)))
    yield from sorted({max(1, steps >> power) for power in range(halvings + 1)})


def _train(job_file: Path, overrides: list[str], trials: list[Trial], until: int, total: int, parallel: int) -> None:
    """Trains runs until a step, `parallel` at a time, and judges them."""
    waiting = [trial for trial in trials if max(trial.losses(), default=0) < until]  # the sweep may be a repeated one
    running: list[tuple[Trial, subprocess.Popen[bytes]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                running.append((waiting[0], _start(job_file, overrides, waiting.pop(0))))
            time.sleep(0.1)
            for trial, process in list(running):
                if until < total and max(trial.losses(), default=0) >= until and process.poll() is None:
                    process.terminate()  # saves a checkpoint and ends
                    process.wait()
                if (status := process.poll()) is not None:
                    running.remove((trial, process))
                    if status not in (0, EXIT_UNFINISHED, -signal.SIGTERM):  # the last: it was at its end
                        lines = trial.log.read_text(errors="replace").split("\n")
                        trial.problem = next((line for line in reversed(lines) if line.strip()), f"exit code {status}")
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()
    for trial in trials:
        trial.judge(until)


def _start(job_file: Path, overrides: list[str], trial: Trial) -> subprocess.Popen[bytes]:
    settings = [*overrides, *trial.settings, f"run.folder={trial.folder}"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "shardwise", "train", str(job_file), "--continue", *arguments]
    with trial.log.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
