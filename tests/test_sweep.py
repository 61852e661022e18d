"""`shardwise sweep`: all combinations, the worse half stopped early, continued by the same command."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import call
from test_train import JOB_TOML

from shardwise.data.input_files import DataRecord
from shardwise.errors import DataError, JobError
from shardwise.job import load_job
from shardwise.launch import sweep
from shardwise.launch.sweep import make_trials, run_sweep, rungs

JOB = JOB_TOML.replace('layout = "shard=2"', "steps = 8") + "[validation]\nsamples = 2\n"


def test_how_often_runs_are_halved():
    assert list(rungs(1, 100)) == [100]
    assert list(rungs(2, 100)) == [50, 100]
    assert list(rungs(5, 100)) == list(rungs(64, 100)) == [12, 25, 50, 100]
    assert list(rungs(64, 3)) == [1, 3]


def test_all_combinations_or_a_sentence(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    trials = make_trials(tmp_path / "job.toml", [], ["optimizer.lr=1e-4,3e-4", "seed=0,1,2"], tmp_path / "out")
    assert len({trial.folder for trial in trials}) == 6
    assert trials[1].name == "optimizer.lr=1e-4 seed=1"
    for over in ("optimizer.lr", "optimizer.lr=", "=3", "optimizer.lrs=1,2"):
        with pytest.raises(JobError):
            make_trials(tmp_path / "job.toml", [], [over], tmp_path / "out")


@pytest.mark.cluster
def test_the_worse_half_is_stopped_and_the_rest_goes_on(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    said: list[str] = []
    over = ["optimizer.lr=1e-9,1e-2"]
    for _ in range(2):  # the second time, everything is there
        trials = run_sweep(tmp_path / "job.toml", [], over, tmp_path / "out", 2, True, said.append)
        assert [trial.settings for trial in trials] == [["optimizer.lr=1e-2"], ["optimizer.lr=1e-9"]]
        assert (trials[0].step, trials[1].step) == (8, 4) and trials[0].loss < trials[1].loss
    assert said[: len(said) // 2] == said[len(said) // 2 :] and "1 run until step 8 of 8" in said


def write_run(folder: Path, losses: list[Any], event: str) -> None:
    """Writes what a run of these losses leaves behind."""
    folder.mkdir(parents=True)
    rows = ({"step": step, "loss": loss} for step, loss in enumerate(losses, start=1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text(json.dumps({"time": 0.0, "event": event, "message": ""}) + "\n")


def start_with(losses: dict[str, tuple[list[Any], str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets each run end at once, with these losses and this last event; returns the runs, in the order of starts."""
    started: list[str] = []

    def start(job_file: Path, overrides: list[str], trial: sweep.Trial) -> subprocess.Popen[bytes]:
        started.append(trial.name)
        write_run(trial.folder, *losses[trial.name])
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(sweep, "_start", start)
    return started


@pytest.mark.parametrize("halve", [False, True])
def test_a_run_that_ended_early_by_patience_is_judged_by_its_own_end(tmp_path, monkeypatch, halve):
    """The better run needs no more than 3 of 8 steps; it is not trained on, is not nan, and is the best."""
    (tmp_path / "job.toml").write_text(JOB)
    losses = {"seed=0": ([9.0] * 8, "finished"), "seed=1": ([8.0, 2.0, 1.5], "finished")}
    started = start_with(losses, monkeypatch)
    said: list[str] = []
    for _ in range(2):
        trials = run_sweep(tmp_path / "job.toml", [], ["seed=0,1"], tmp_path / "out", 1, halve, said.append)
        assert [(trial.name, trial.loss, trial.step) for trial in trials][0] == ("seed=1", 1.5, 3)
    assert started == ["seed=0", "seed=1"] and "  seed=1: loss 1.5000 at step 3" in said
    assert not any("nan" in line for line in said)


CHANGES = {
    "optimizer.lr=0.02": "optimizer.lr = 0.02 instead of 0.01",
    "steps=4": "steps = 4 instead of 8",  # the learning rates depend on them
    "validation.every=2": "validation.every = 2 instead of 0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_losses_of_another_job_are_not_taken_for_those_of_this_one(tmp_path, monkeypatch, change):
    (tmp_path / "job.toml").write_text(JOB)
    start_with({"seed=0": ([9.0] * 8, "finished"), "seed=1": ([8.0] * 8, "finished")}, monkeypatch)
    again = (["seed=0,1"], tmp_path / "out", 1, True, print)
    run_sweep(tmp_path / "job.toml", ["optimizer.lr=0.01"], *again)
    for seed in (0, 1):
        folder = tmp_path / "out" / f"seed={seed}"
        settings = ["optimizer.lr=0.01", f"seed={seed}", f"run.folder={folder}"]
        (folder / "job.toml").write_text(load_job(tmp_path / "job.toml", settings).to_toml())
    said = f"seed=0 was trained with another job: this one has {CHANGES[change]}. Restore the job, or .* with --out"
    with pytest.raises(JobError, match=said):
        run_sweep(tmp_path / "job.toml", ["optimizer.lr=0.01", change], *again)
    run_sweep(tmp_path / "job.toml", ["optimizer.lr=0.01"], *again)  # what only a resume may change is no other job
    run_sweep(tmp_path / "job.toml", ["optimizer.lr=0.01", "run.processes=1", "checkpoint.keep=3"], *again)


def test_the_losses_of_other_data_are_not_taken_for_those_of_this_one(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    start_with({"seed=0": ([9.0] * 8, "finished")}, monkeypatch)
    again = (tmp_path / "job.toml", [], ["seed=0"], tmp_path / "out", 1, True, print)
    run_sweep(*again)
    folder, text = tmp_path / "out" / "seed=0", tmp_path / "text.txt"
    text.write_text("All work and no play.")
    (folder / "job.toml").write_text(load_job(tmp_path / "job.toml", ["seed=0"]).to_toml())
    record = DataRecord()
    record.take([text])
    record.save(folder / "data.json")
    run_sweep(*again)
    text.write_text("All play and no work.")
    with pytest.raises(DataError, match=r"seed=0 was trained with other data: the content of .*text.txt has changed"):
        run_sweep(*again)


def test_a_run_that_diverged_is_the_worst(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    losses = {"seed=0": ([9.0] * 7 + ["nan"], "finished"), "seed=1": ([9.0] * 8, "finished")}
    start_with(losses, monkeypatch)
    trials = run_sweep(tmp_path / "job.toml", [], ["seed=0,1"], tmp_path / "out", 1, False, print)
    assert [trial.name for trial in trials] == ["seed=1", "seed=0"] and math.isnan(trials[1].loss)


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "job.toml").write_text(JOB)

    def start(job_file: Path, overrides: list[str], trial: sweep.Trial) -> subprocess.Popen[bytes]:
        if trial.settings == ["seed=1"]:
            trial.log.write_text("step 1\nshardwise: no room.\n\n")
        else:
            trial.folder.mkdir()
            rows = ({"step": step, "loss": 9 - step} for step in range(1, 9))
            (trial.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.Popen([sys.executable, "-c", f"exit({trial.settings == ['seed=1']})"])

    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.chdir(tmp_path)
    assert not call(monkeypatch, "sweep", "job.toml", "--over", "seed=0,1", "--no-halve")
    output = capsys.readouterr().out
    assert "seed=1: shardwise: no room." in output and "best:       seed=0, loss 1.0000 at step 8" in output
