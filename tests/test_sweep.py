"""`shardwise sweep`: all combinations, the worse half stopped early, continued by the same command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import call
from test_train import JOB_TOML

from shardwise.errors import JobError
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


def test_the_worse_half_is_stopped_and_the_rest_goes_on(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    said: list[str] = []
    over = ["optimizer.lr=1e-9,1e-2"]
    for _ in range(2):  # the second time, everything is there
        trials = run_sweep(tmp_path / "job.toml", [], over, tmp_path / "out", 2, True, said.append)
        assert [trial.settings for trial in trials] == [["optimizer.lr=1e-2"], ["optimizer.lr=1e-9"]]
        assert (trials[0].step, trials[1].step) == (8, 4) and trials[0].loss < trials[1].loss
    assert said[: len(said) // 2] == said[len(said) // 2 :] and "1 run until step 8 of 8" in said


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
