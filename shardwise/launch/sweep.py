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
from shardwise.data.input_files import MAX_SHOWN
from shardwise.errors import EXIT_UNFINISHED, DataError, JobError
from shardwise.job import Job, load_job
from shardwise.train.run_folder import RunFolder, changed_results
from shardwise.train.validate import refresh_copies
from shardwise.train.warm_start import name_step

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
    loss: float = math.nan  # what runs are compared by
    step: int = 0  # the last one that `loss` is of
    until: int = 0  # the step of the last comparison that this run took part in
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
        return {row["step"]: math.nan if row["loss"] is None else float(row["loss"]) for row in rows}

    def is_trained(self, until: int) -> bool:
        """Whether this run has reached a step, or has ended before it by `validation.patience`."""
        return max(self.losses(), default=0) >= until or RunFolder(self.folder).has_finished

    def judge(self, until: int) -> None:
        """Sets the loss: the mean over the last tenth of the steps until `until`.

        A run that ended before is judged by its own last steps: it is what a training of `until` steps gives."""
        losses = self.losses()
        if RunFolder(self.folder).has_finished:
            until = min(until, max(losses, default=0))
        last = {step: loss for step, loss in losses.items() if 0.9 * until <= step <= until}
        self.step = max(last, default=0)
        self.loss = sum(last.values()) / len(last) if last else math.nan


def make_trials(job_file: Path, overrides: list[str], over: list[str], out: Path) -> list[Trial]:
    """Returns the runs of a sweep, after checking each of their jobs."""
    keys = [parse_values(text, "--over") for text in over]
    trials = []
    for values in product(*(values for _, values in keys)):
        settings = [f"{key}={value}" for (key, _), value in zip(keys, values, strict=True)]
        load_job(job_file, [*overrides, *settings])
        trials.append(Trial(settings, out / ",".join(settings).replace("/", "_")))
    return trials


def check_same_job(trial: Trial, job: Job) -> None:
    """Raises an error if a run that is there already is of another job or of other data: of an earlier sweep.

    Its losses would be taken for those of this job, and a run that goes on would mix the two."""
    folder = RunFolder(trial.folder)
    if not (folder.path / "job.toml").is_file():
        return
    earlier = folder.job()
    same_folder = {"run": job.run.model_copy(update={"folder": earlier.run.folder})}  # however its path is spelled
    changes = changed_results(earlier, name_step(job.model_copy(update=same_folder), earlier))
    if changes:
        raise JobError(
            f"{folder.path} was trained with another job: this one has {', '.join(changes)}. "
            "Restore the job, or give this sweep a folder of its own with --out."
        )
    refresh_copies(earlier)
    data_changes = folder.data_record().changes()
    if data_changes:
        raise DataError(
            f"{folder.path} was trained with other data: {'; '.join(data_changes[:MAX_SHOWN])}. "
            "Restore it, or give this sweep a folder of its own with --out."
        )


def run_sweep(job_file: Path, overrides: list[str], over: list[str], out: Path, parallel: int, halve: bool,
              say: Say) -> list[Trial]:  # fmt: skip
    """Trains all runs, the best ones to the end; returns them, best first."""
    trials = make_trials(job_file, overrides, over, out)
    for trial in trials:
        check_same_job(trial, load_job(job_file, [*overrides, *trial.settings]))
    total = load_job(job_file, overrides).total_steps
    out.mkdir(parents=True, exist_ok=True)
    left = trials
    for steps in rungs(len(trials), total) if halve else [total]:
        say(f"{pluralize(len(left), 'run')} until step {steps} of {total}")
        _train(job_file, overrides, left, steps, total, parallel)
        for trial in left:
            trial.until = steps
        left = sorted(left, key=lambda trial: (math.isnan(trial.loss), trial.loss))
        for trial in left:
            say(f"  {trial.name}: {trial.problem or f'loss {trial.loss:.4f} at step {trial.step}'}")
        left = [trial for trial in left[: -(-len(left) // 2)] if not trial.problem]
        if not left:
            break
    # Those that were dropped early come later, whatever their losses were. How many steps a run took says nothing:
    # the best one may have ended early.
    return sorted(trials, key=lambda trial: (bool(trial.problem), -trial.until, math.isnan(trial.loss), trial.loss))


def rungs(runs: int, steps: int) -> Iterator[int]:
    """Yields the steps after which runs are compared; the last is `steps`."""
    halvings = min(math.ceil(math.log2(runs)), round(-math.log2(FIRST_SHARE)))
    yield from sorted({max(1, steps >> power) for power in range(halvings + 1)})


def _train(job_file: Path, overrides: list[str], trials: list[Trial], until: int, total: int, parallel: int) -> None:
    """Trains runs until a step, `parallel` at a time, and judges them."""
    waiting = [trial for trial in trials if not trial.is_trained(until)]  # the sweep may be a repeated one
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
