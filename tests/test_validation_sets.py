"""Validation sets of their own, early stopping, the best checkpoint, and trackers that get the validation loss."""

import csv
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.comm.world import run_world
from shardwise.data.input_files import DataFile
from shardwise.errors import DataError, JobError
from shardwise.eval.language_model import LanguageModel
from shardwise.eval.tasks import Request
from shardwise.job import make_job
from shardwise.launch.start import StartOptions, open_data, start_job, start_training
from shardwise.layout import Layout
from shardwise.metrics.trackers import PrometheusWriter, Tracker, check_tracker_installed
from shardwise.parallel.prepare import prepare
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.train.validation_history import ValidationHistory


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
    assert [loss for _, loss in run.validations()] == losses
    train_on = f"validation.patience to 0, or to more than 2: shardwise train --resume {run.path} --set"
    assert train_on in last["message"]


def test_a_run_that_has_ended_early_is_not_trained_on_by_the_same_command(tmp_path: Path) -> None:
    """The launcher's own way, as `--continue` takes it; it says that the run ended, why, and how to train on."""
    job = {"steps": 40, "layout": "replicate=1", "optimizer": {"lr": 30.0, "schedule": "constant", "warmup": 0}}
    validation = {"every": 1, "patience": 2, "samples": 8}
    run = make_run(tmp_path, **job, validation=validation)
    steps = len(train(run))
    assert steps < 40
    said: list[str] = []
    command = (tmp_path / "run" / "job.toml", [f"run.folder={run.path}", "run.processes=1"], None, said.append)
    folder, is_finished = start_training(*command, resume_if_exists=True)
    assert folder is not None and is_finished and len(list(run.metrics())) == steps
    last = list(run.events())[-1]
    assert last["event"] == "finished" and last["step"] == steps
    assert "has ended already, with no lower validation loss in 2 validations" in last["message"]
    assert f"train --resume {run.path} --set validation.patience=0" in last["message"]
    # What the sentence says takes the run on: a greater number waits for that many.
    change_job(run, validation={"patience": 3})
    assert len(train(run, resume=True)) == steps + 1
    change_job(run, steps=steps + 3, validation={"patience": 0})
    assert len(train(run, resume=True)) == steps + 3


def test_a_history_of_validations() -> None:
    history = ValidationHistory()
    assert history.lowest is None and not history.is_out_of_patience(1)
    for step, loss in ((2, math.nan), (4, 3.0), (6, 3.0), (8, math.nan)):
        history.add(step, loss)
    assert history.lowest == (4, 3.0)  # the first of equal ones, and never one that is no number
    assert history.is_out_of_patience(2) and not history.is_out_of_patience(3) and not history.is_out_of_patience(0)
    history.add(10, 2.0)
    assert history.lowest == (10, 2.0) and not history.is_out_of_patience(1)
    assert (history.loss_at(6), history.loss_at(7)) == (3.0, None)


def change_job(run: RunFolder, **changes: Any) -> None:
    """Changes sections of a run's job, as `--resume` with settings does."""
    job = run.job().model_dump(exclude_none=True)
    for key, value in changes.items():
        job[key] = job[key] | value if isinstance(value, dict) else value
    (run.path / "job.toml").write_text(make_job(job).to_toml())


def best_steps(run: RunFolder) -> list[str]:
    return [path.name for path in run.best.iterdir()]


@pytest.mark.parametrize("steps", [5, 4])
def test_the_best_checkpoint_is_never_of_steps_that_did_not_happen(tmp_path: Path, steps: int) -> None:
    """A run that falls back from step 6 to step 4, and ends at step 5 or right there."""
    run = make_run(tmp_path, steps=6, checkpoint={"every": 2, "snapshot_every": 0, "keep": 3},
                   validation={"every": 1, "keep_best": True, "samples": 8})  # fmt: skip
    losses = [record["validation"]["loss"] for record in train(run)]
    assert losses == sorted(losses, reverse=True) and best_steps(run) == ["step-00000006"]
    (run.checkpoints / "step-00000006" / "manifest.json").unlink()
    change_job(run, steps=steps)
    train(run, resume=True)
    assert best_steps(run) == [f"step-{steps:08d}"]
    assert LanguageModel(run.path, step="best").step == steps
    assert not any(event["event"] == "best_lost" for event in run.events())


def test_it_is_said_if_the_best_checkpoint_is_not_there(tmp_path: Path) -> None:
    job = {"steps": 3, "optimizer": {"lr": 30.0, "schedule": "constant", "warmup": 0}}
    run = make_run(tmp_path, **job, validation={"every": 1, "samples": 8})
    losses = [record["validation"]["loss"] for record in train(run)]
    lowest = losses.index(min(losses)) + 1
    assert lowest < 3
    change_job(run, steps=4, validation={"keep_best": True})
    train(run, resume=True)
    [event] = [event for event in run.events() if event["event"] == "best_lost"]
    assert event["step"] == lowest and f"{min(losses):.4f} after step {lowest}" in event["message"]
    assert best_steps(run) == ["step-00000004"]  # the best of what came after


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


SETS_OF_FILES = {  # of each kind: the file, its content, and what is changed in it
    "text": ("mine.txt", b"for i in range(10):\n    print(i)\n" * 20, (b"print", b"paint")),
    "jsonl": ("mine.jsonl", b'{"text": "for i in range(10): print(i)"}\n' * 20, (b"print", b"paint")),
    "tokens": ("mine.bin", b"".join(bytes([number % 99, 0]) for number in range(400)), (b"\x05", b"\x06")),
}


@pytest.mark.parametrize("kind", SETS_OF_FILES)
def test_a_resume_validates_on_the_data_that_the_run_began_with(kind: str, tmp_path: Path) -> None:
    """A file of a set that changed is refused, as one of training is; what was appended to it is not read."""
    name, content, change = SETS_OF_FILES[kind]
    file = tmp_path / name
    file.write_bytes(content)
    mine = {"path": f"{file}:uint16", "source": "tokens"} if kind == "tokens" else {"path": str(file)}
    validation = {"every": 2, "samples": 99, "sets": {"mine": mine}}
    run = make_run(tmp_path, steps=2, layout="replicate=1", validation=validation)
    first = train(run)[-1]["validation"]["mine"]["loss"]
    file.write_bytes(content + content[: len(content) // 2])
    train(run, resume=True)  # at its end, it validates once more
    again = [event for event in run.events() if event["event"] == "validation"][-1]
    assert again["mine"]["loss"] == first

    file.write_bytes(content.replace(*change))
    text = rf"data has changed since the run began: the content of {file} has changed. Restore it, or .*accept-data"
    for attempt in (lambda: start_job(run.job(), print, run.path), lambda: train(run, resume=True)):
        with pytest.raises(DataError, match=text):
            attempt()
    file.unlink()
    with pytest.raises(DataError, match=f"{file} is missing"):
        start_job(run.job(), print, run.path)


def test_a_resume_that_changes_the_sets_says_so(tmp_path: Path) -> None:
    """The user may: then there is nothing to compare, the files of the old sets may go, and those of the new count."""
    run = make_run(tmp_path, layout="replicate=1")
    train(run)
    (tmp_path / "code.jsonl").unlink()
    other = tmp_path / "other.txt"
    other.write_text("Home is where you wear your hat.\n" * 40)
    job = run.job()
    sets = {"prose": job.validation.sets["prose"].model_dump(), "code": {"path": str(other)}}
    changed = make_job(job.model_dump(exclude_none=True) | {"validation": {"every": 2, "samples": 8, "sets": sets}})
    start_job(changed, print, run.path)
    [event] = [event for event in run.events() if event["event"] == "validation_changed"]
    assert "validation.sets.code = " in event["message"] and "sets.prose" not in event["message"]
    assert str(other) in event["message"] and "samples" not in event["message"]
    other.write_text("Home is where you hang your hat.\n" * 40)
    with pytest.raises(DataError, match=f"the content of {other} has changed"):
        start_job(changed, print, run.path)
    options = StartOptions(run.path, accept_data_change=True)
    record, _, events = open_data(prepare(changed, Layout()), run, options)
    [message] = [message for kind, message in events if kind == "data_changed"]
    assert f"the content of {other} has changed" in message
    assert record.validation_sets[str(other)].files[str(other)] == DataFile.of(other)


def test_patience_and_the_best_checkpoint_begin_anew_with_other_sets(tmp_path: Path) -> None:
    """A set of unlike text has greater losses; they are not compared with those before, nor after a later restart."""
    unlike = tmp_path / "unlike.txt"
    unlike.write_text("".join(f"{number} DULL boys AND no play\n" for number in range(200)))
    validation = {"every": 1, "samples": 8, "keep_best": True, "sets": {"one": str(tmp_path / "prose.txt")}}
    run = make_run(tmp_path, layout="replicate=1", validation=validation)
    train(run)
    before = [loss for _, loss in run.validations()]
    assert len(before) == 4

    changed = run.job().model_dump(exclude_none=True)
    changed["validation"] |= {"sets": {"one": {"path": str(unlike)}}, "patience": 1}
    job = make_job(changed | {"steps": 7})
    _, _, events = open_data(prepare(job, Layout()), run, StartOptions(run.path))
    for kind, message in events:
        run.log_event(kind, message)
    (run.path / "job.toml").write_text(job.to_toml())
    train(run, resume=True)
    after = run.validations()
    assert [step for step, _ in after] == [5, 6, 7]
    assert min(loss for _, loss in after) > min(before)
    assert best_steps(run) == [f"step-{min(after, key=lambda one: one[1])[0]:08d}"]

    train(run, resume=True)
    assert [step for step, _ in run.validations()] == [5, 6, 7]
    for name in ("step-00000007", "step-00000005"):
        run.log_event("resumed", f"from {name}", step=int(name[-1]))
    assert len(run.validations()) == 3
    run.log_event("resumed", "from a step before the change", step=2)
    assert [step for step, _ in run.validations()] == [3, 4, 5, 6, 7]  # taken again since


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
