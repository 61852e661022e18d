"""`shardwise tune`: measures the planner's best layouts, keeps the fastest, and refines the planner's constants."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_cli import call
from test_train import JOB_TOML

from shardwise.cluster import CLUSTERS, read_cluster
from shardwise.job import load_job, make_job
from shardwise.launch import tune
from shardwise.layout import Layout
from shardwise.planner.calibrate import refine
from shardwise.planner.plan import make_estimator, resolve_layout
from shardwise.train.run_folder import RunFolder

JOB = JOB_TOML + "processes = 2\n"


def test_the_fastest_is_kept_and_what_cannot_run_is_listed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "FIRST_STEPS", 2)
    monkeypatch.setattr(tune, "MAX_STEPS", 4)  # two rounds
    planted, launch = [], tune.launch

    def launch_but_one(folder: RunFolder, layout: Layout, *rest) -> None:
        if not planted or layout in planted:
            planted.append(layout)
            folder.write_error({"rank": 1, "time_ns": 1, "kind": "OutOfMemoryError", "message": "CUDA out of memory.",
                                "exit_code": 1, "trace": "..."})  # fmt: skip
            raise tune.RunError("rank 1 failed: torch.OutOfMemoryError: CUDA out of memory.")
        launch(folder, layout, *rest)

    monkeypatch.setattr(tune, "launch", launch_but_one)
    Path("job.toml").write_text(JOB)
    assert not call(monkeypatch, "tune", "job.toml", "--top", "3", "--set", "optimizer.lr=1e-3")
    said = capsys.readouterr().out
    first, last = said.splitlines()[0], said.splitlines()[-1]
    assert first.startswith("tuning gpt on 2 x CPU") and last.endswith("shardwise train runs/tune-job/best.toml")
    assert f"{planted[0]}: ran out of memory" in said
    assert len(planted) == 1  # it was not tried again
    assert max(map(len, said[said.index(" per step") :].splitlines())) <= 80
    best = load_job(Path("runs/tune-job/best.toml"))
    assert best.optimizer.lr == 1e-3 and Layout.parse(best.layout).world == 2 and best.layout != str(planted[0])
    assert best.run.cluster == str(tmp_path / "runs/tune-job/cluster.toml")  # to be found from any folder
    assert best.run.folder == "run" and best.steps is None
    assert sorted(path.name for path in Path("runs/tune-job").iterdir()) == ["best.toml", "cluster.toml", "tune.html"]
    page = Path("runs/tune-job/tune.html").read_text()
    words = " ".join(ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).itertext())
    assert best.layout in words and "ran out of memory" in words and "http" not in page.replace("http-equiv", "")
    assert not call(monkeypatch, "plan", "runs/tune-job/best.toml", "--cluster", "runs/tune-job/cluster.toml")


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch, capsys) -> None:
    """The first layout is measured; then either the launcher's handler or this process has the signal."""
    monkeypatch.chdir(tmp_path)
    launch, launched = tune.launch, list[Layout]()

    def stopped_launch(folder: RunFolder, layout: Layout, *rest) -> int:
        launched.append(layout)
        return launch(folder, layout, *rest) if len(launched) == 1 else signal.SIGINT

    monkeypatch.setattr(tune, "launch", stopped_launch)
    Path("job.toml").write_text(JOB)
    assert call(monkeypatch, "tune", "job.toml", "-o", "out") == 130
    said = capsys.readouterr().out
    assert "Stopped by Ctrl-C: this is what was measured until then" in said and "predicted" in said
    assert f"{launched[1]}: not measured" in " ".join(said.split()) and "the time was up" not in said
    assert Layout.parse(load_job(Path("out/best.toml")).layout) == launched[0]
    assert "stopped by Ctrl-C" in Path("out/tune.html").read_text()
    monkeypatch.setattr(tune, "launch", lambda *_: signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tune.tune_job(load_job(Path("job.toml")), 2, 1.0, Path("other"), print)
    assert not list(Path("other").iterdir())


@pytest.mark.cluster
def test_machines_read_it_too(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "FIRST_STEPS", 2)
    monkeypatch.setattr(tune, "MAX_STEPS", 2)
    Path("job.toml").write_text(JOB)
    assert not call(monkeypatch, "tune", "job.toml", "--top", "2", "--json", "-o", "out")
    found = json.loads(capsys.readouterr().out)
    rows = found["candidates"]
    assert found["planned"] in [row["layout"] for row in rows] and all(row["steps"] > 1 for row in rows)
    assert rows[0]["seconds"] <= rows[1]["seconds"] and all(row["memory_gib"] > 0 for row in rows)
    assert read_cluster(Path(found["cluster"])).measured["matmul"] == found["constants"]["matmul"]


@pytest.mark.parametrize(("words", "sentence"), [
    (["job.toml", "--set", "model.layer=3"], "did you mean 'model.layers'?"), (["jobs.toml"], "does not exist."),
    (["job.toml", "--set", "data.source=text", "--set", "data.path=none.txt"], "none.txt"),
])  # fmt: skip
def test_what_cannot_be_tuned_is_a_sentence(words: list[str], sentence: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    assert call(monkeypatch, "tune", *words) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_failures_are_named() -> None:
    class Folder:
        def __init__(self, *records: dict[str, str]) -> None:
            self.error_records = lambda: list(records)

    memory = {"kind": "RuntimeError", "message": "DefaultCPUAllocator: can't allocate memory: you tried"}
    assert tune.describe_failure(Folder(memory), "...") == "ran out of memory"
    assert "memory" in tune.describe_failure(Folder(), "rank 1 was killed by SIGKILL in step 3.")
    other = {"kind": "ValueError", "message": "no"}
    text = "rank 0 failed: Traceback\n  File x\nValueError: no\n All other ranks were stopped."
    assert tune.describe_failure(Folder(other), text) == "ValueError: no"


def test_measured_steps_refine_what_they_depend_on() -> None:
    """A machine with other constants is found again from the step times that it has."""
    model = {"layers": 6, "width": 64, "heads": 4, "vocab": 256, "sequence": 32}
    job = make_job({"model": model, "batch": {"samples": 16}})
    start = CLUSTERS["cpu"]
    changes = {"kernel_launch": 2 * start.measured["kernel_launch"], "collective_start": 2e-3, "split_backward": 1.5}
    truth = make_estimator(job, replace(start, measured={**start.measured, **changes}))
    texts = ("replicate=4", "replicate=4 micro_batch=1", "shard=4 zero=3", "tensor=4", "pipeline=2 replicate=2",
             "pipeline=4 micro_batch=2", "pipeline=4 schedule=zbv micro_batch=2", "replicate=2 tensor=2")  # fmt: skip
    layouts = [resolve_layout(job, truth.shape, Layout.parse(text)) for text in texts]
    times = {layout: truth.predict_seconds(layout) for layout in layouts}
    before, found = make_estimator(job, start), make_estimator(job, refine(start, job, times))
    for layout, seconds in times.items():
        assert found.predict_seconds(layout) == pytest.approx(seconds, rel=0.06)
    unseen = resolve_layout(job, truth.shape, Layout.parse("pipeline=2 schedule=zbv replicate=2 micro_batch=1"))
    errors = [abs(one.predict_seconds(unseen) / truth.predict_seconds(unseen) - 1) for one in (found, before)]
    assert errors[0] < 0.1 < errors[1]
    same = refine(start, job, {layout: before.predict_seconds(layout) for layout in layouts})
    assert same.measured["matmul"] == pytest.approx(start.measured["matmul"], rel=0.01)
