"""Validation sets of their own, early stopping, the best checkpoint, and trackers that get the validation loss."""

import csv
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.comm.world import run_world
from shardwise.errors import DataError, JobError
from shardwise.eval.language_model import LanguageModel
from shardwise.eval.tasks import Request
from shardwise.job import make_job
from shardwise.launch.start import start_job
from shardwise.layout import Layout
from shardwise.metrics.trackers import PrometheusWriter, Tracker, check_tracker_installed
from shardwise.parallel.prepare import prepare
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder


def make_run(folder: Path, **changes: Any) -> RunFolder:
    (folder / "prose.txt").write_text("All work and no play makes Jack a dull boy.\n" * 40)
    (folder / "code.jsonl").write_text('{"text": "for i in range(10):\\n    print(i)\\n"}\n' * 20)
    values: dict[str, Any] = {
        "steps": 4, "precision": "float64", "model": {"layers": 2, "width": 16, "heads": 2, "sequence": 16},
        "batch": {"samples": 4}, "data": {"source": "text", "path": str(folder / "prose.txt")},
        "checkpoint": {"snapshot_every": 0}, "run": {"folder": str(folder / "run"), "device": "cpu"},
        "optimizer": {"lr": 0.01, "schedule": "constant", "warmup": 0},
        "validation": {"every": 2, "samples": 8, "sets": {
            "prose": str(folder / "prose.txt"), "code": {"path": str(folder / "code.jsonl"), "weight": 3}}},
    }  # fmt: skip
    return RunFolder.create(make_job(values | changes))


def train(run: RunFolder, layout: str = "", resume: bool = False) -> list[dict[str, Any]]:
    TrainingLoop(prepare(run.job(), Layout.parse(layout)), run, torch.device("cpu"), resume).run()
    return list(run.metrics())


def train_in_world(path: str, layout: str) -> None:
    train(RunFolder.open(Path(path)), layout)


def test_sets_are_in_metrics_events_and_trackers(tmp_path: Path) -> None:
    run = make_run(tmp_path, tracker=["csv", "prometheus"])
    records = train(run)
    assert ["validation" in record for record in records] == [False, True, False, True]
    found = records[-1]["validation"]
    assert found["loss"] == pytest.approx((found["prose"]["loss"] + 3 * found["code"]["loss"]) / 4, rel=1e-14)
    assert found["held_out"]["loss"] > 0 and found["code"]["bits_per_byte"] > 0
    events = [event for event in run.events() if event["event"] == "validation"]
    assert [event["loss"] for event in events] == [records[1]["validation"]["loss"], found["loss"]]
    assert "code" in events[0]["message"]
    with (run.path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["validation.code.loss"] for row in rows] == ["", str(records[1]["validation"]["code"]["loss"]), "",
                                                             str(found["code"]["loss"])]  # fmt: skip
    assert rows[-1]["validation.held_out.bits_per_byte"] == str(found["held_out"]["bits_per_byte"])
    assert f'part="loss"}} {found["loss"]}' in (run.path / "metrics.prom").read_text()
    # Each set's loss is that of its first samples, as windows of the run's tokenizer.
    model, text = LanguageModel(run.path), "{}".format("for i in range(10):\n    print(i)\n")
    tokens = [*text.encode(), 0] * 20
    windows = [(tokens[n : n + 1], tokens[n + 1 : n + 17]) for n in range(0, 8 * 16, 16)]
    expected = -sum(score for score, _ in model.score_tokens(windows)) / (8 * 16)
    assert found["code"]["loss"] == pytest.approx(expected, rel=1e-12)
    assert model.loglikelihood([Request(("for", " i"))])[0][0] < 0


def test_a_layout_gives_the_same_validation(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = train(make_run(tmp_path / "one"))[-1]["validation"]
    run_world(train_in_world, 2, str(make_run(tmp_path / "two").path), "shard=2 zero=3")
    found = list(RunFolder.open(tmp_path / "two" / "run").metrics())[-1]["validation"]
    for name in ("prose", "code"):
        assert found[name]["loss"] == pytest.approx(expected[name]["loss"], rel=1e-10)


def test_a_run_stops_early_and_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    job = {"steps": 40, "optimizer": {"lr": 30.0, "schedule": "constant", "warmup": 0}}
    run = make_run(tmp_path, **job, validation={"every": 1, "patience": 2, "keep_best": True, "samples": 8})
    records = train(run)
    losses = [record["validation"]["loss"] for record in records]
    best = losses.index(min(losses))
    assert len(records) == best + 3 < 40
    last = list(run.events())[-1]
    assert last["event"] == "finished" and "no lower validation loss in 2" in last["message"]
    assert [path.name for path in run.best.iterdir()] == [f"step-{best + 1:08d}"]
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{len(records):08d}"]
    assert run.validation_losses() == losses
    again = train(run, resume=True)  # the count of validations goes on: the next one ends the run again
    assert len(again) == len(records) + 1


def test_best_checkpoint_is_evaluated(tmp_path: Path) -> None:
    job = {"optimizer": {"lr": 30.0, "schedule": "constant", "warmup": 0}}
    run = make_run(tmp_path, **job, validation={"every": 1, "keep_best": True, "samples": 8})
    train(run)
    best, newest = LanguageModel(run.path, step="best"), LanguageModel(run.path)
    assert best.step < newest.step == 4
    request = [Request(("All work and no play",))]
    assert best.loglikelihood_rolling(request)[0] > newest.loglikelihood_rolling(request)[0]


def test_bad_sets_are_errors(tmp_path: Path) -> None:
    for sets, message in (
        ({"loss": "a.txt"}, "no name for a set"),
        ({"a": {"path": "x", "weight": 0}}, "weights are 0"),
    ):
        with pytest.raises(JobError, match=message):
            make_run(tmp_path, validation={"sets": sets})
    with pytest.raises(JobError, match="set every"):
        make_run(tmp_path, validation={"patience": 2})
    run = make_run(tmp_path, validation={"sets": {"gone": str(tmp_path / "gone.txt")}})
    with pytest.raises(DataError, match="validation.sets.gone"):
        train(run)


def test_sets_are_opened_before_anything_is_started(tmp_path: Path) -> None:
    """A mistake leaves no run folder behind; sets without held-out samples are nothing to warn of."""
    (tmp_path / "prose.txt").write_text("All work and no play makes Jack a dull boy.\n" * 40)
    values: dict[str, Any] = {
        "steps": 2, "model": {"layers": 2, "width": 16, "heads": 2, "sequence": 16}, "batch": {"samples": 4},
        "data": {"source": "text", "path": str(tmp_path / "prose.txt"), "validation_fraction": 0.0,
                 "tokenizer": "bpe:300"},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "processes": 1}, "layout": "replicate=1",
    }  # fmt: skip
    with pytest.raises(DataError, match="validation.sets.mine"):
        start_job(make_job(values | {"validation": {"every": 2, "sets": {"mine": str(tmp_path / "*.txxt")}}}), print)
    assert not (tmp_path / "run").exists()
    sets = {"mine": str(tmp_path / "prose.txt")}
    run = start_job(make_job(values | {"validation": {"every": 2, "sets": sets}}), lambda text: None, strict=True)
    assert not any(event["event"] == "warning" for event in run.events())  # and --strict found none
    assert "mine" in list(run.metrics())[-1]["validation"]


def test_mlflow_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    module = ModuleType("mlflow")
    module.__dict__.update(
        set_tracking_uri=lambda uri: logged.append(uri),
        start_run=lambda run_id, run_name: SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new")),
        log_params=lambda values: logged.append(values), log_metrics=lambda values, step: logged.append((step, values)),
        end_run=lambda: logged.append("ended"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", module)
    job = make_job({"steps": 2, "tracker": ["mlflow", "csv"]})
    (tmp_path / "metrics.jsonl").write_text("")
    tracker = Tracker(job, tmp_path, lambda kind, message: logged.append(message))
    for step in (1, 2):
        record = {"step": step, "loss": 2.0, "validation": {"loss": 3.0, "code": {"loss": 4.0}}}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        tracker(record)
    assert logged[1]["model.width"] == "256" and logged[-1] == "ended"
    assert logged[2] == (1, {"loss": 2.0, "validation/loss": 3.0, "validation/code/loss": 4.0})
    assert (tmp_path / "mlflow-run.txt").read_text() == "new"
    with pytest.raises(JobError, match="needs the package wandb"):
        check_tracker_installed(("csv", "wandb"))


def test_prometheus_keeps_the_last_validation(tmp_path: Path) -> None:
    out = PrometheusWriter(make_job({"steps": 2}), tmp_path)
    out({"step": 1, "loss": 2.5, "validation": {"loss": 3.0}})
    out({"step": 2, "loss": 2.5})
    assert 'shardwise_validation{run="' in (tmp_path / "metrics.prom").read_text()
