"""Whole runs: golden losses, resume after kill -9 in any layout, validation, signals, failures told in a sentence."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from suite.report import REAL_PYTHON

from shardwise.comm.world import run_world
from shardwise.data.token_file import write_token_arrays
from shardwise.errors import DataError, JobError, RunError
from shardwise.integrity.detectors import Verdict
from shardwise.job import BatchConfig, Job, load_job, make_job
from shardwise.launch.start import start_training, summarize
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.step import CudaGraphStep
from shardwise.train import loop
from shardwise.train.generate import Sampling, sample_run
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RESUMABLE_KEYS, RunFolder
from shardwise.verify.command import shrink_model
from shardwise.workers.diagnosis import read_heartbeats

SMALL = {
    "precision": "float64", "steps": 12,
    "model": {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 61, "sequence": 16, "dropout": 0.1},
    "data": {"source": "synthetic"}, "batch": {"samples": 8}, "checkpoint": {"every": 3},
    "validation": {"samples": 11}, "optimizer": {"lr": 3e-3},
}  # fmt: skip
# Half as long and half as deep, for what is run several times: it validates, and saves three times.
SHORT = {"steps": 6, "model": SMALL["model"] | {"layers": 2}, "checkpoint": {"every": 2}}  # type: ignore[operator]
JOB_TOML = """
precision = "float64"
layout = "shard=2"
[model]
layers = 2
width = 16
heads = 2
vocab = 61
sequence = 8
[data]
source = "synthetic"
[batch]
samples = 4
[run]
folder = "run"
device = "cpu"
"""


def small_job(folder: Path, **changes: object) -> Job:
    return make_job(SMALL | {"run": {"folder": str(folder)}} | changes)


def _train(folder: str, layout: str, resume: bool, die_after: int | None) -> None:
    run = RunFolder.open(Path(folder))
    trainer = TrainingLoop(prepare(run.job(), Layout.parse(layout)), run, torch.device("cpu"), resume)
    if die_after is not None:
        measure = trainer.metrics.log_step

        def fatal(done: int, *rest: object) -> Verdict:
            told = measure(done, *rest)  # type: ignore[arg-type]
            if done == die_after:
                trainer.checkpoints.finish()
                os.kill(os.getpid(), signal.SIGKILL)
            return told

        trainer.metrics.log_step = fatal  # type: ignore[method-assign]
    trainer.run()


def train(job: Job, layout: str, resume: bool = False, die_after: int | None = None) -> RunFolder:
    run = RunFolder.open(Path(job.run.folder)) if resume else RunFolder.create(job)
    prepare(run.job(), Layout.parse(layout))  # once, for all ranks
    run_world(_train, Layout.parse(layout).world, str(run.path), layout, resume, die_after)
    return run


def losses(run: RunFolder) -> list[float]:
    records = list(run.metrics())
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert [record["samples"] for record in records] == [8 * record["step"] for record in records]
    return [record["loss"] for record in records]


def validation(run: RunFolder) -> float:
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return next(event["loss"] for event in reversed(events) if event["event"] == "validation")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(small_job(tmp_path_factory.mktemp("runs") / "one"), "pipeline=1")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(small_job(tmp_path_factory.mktemp("runs") / "short", **SHORT), "pipeline=1")


def test_golden_losses(undisturbed: RunFolder) -> None:
    golden = [float(line) for line in (Path(__file__).parent / "golden" / "gpt_float64.txt").read_text().split()]
    assert losses(undisturbed) == pytest.approx(golden, rel=1e-9)  # processors round differently


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    "layout", ["pipeline=2 shard=2 zero=2", "tensor=2 replicate=2", "pipeline=2 schedule=zbv tensor=2 micro_batch=2"]
)
def test_any_layout_gives_the_same_run(layout: str, short: RunFolder, tmp_path: Path) -> None:
    run = train(small_job(tmp_path / "run", **SHORT | {"checkpoint": {"every": 0}}), layout)
    assert losses(run) == pytest.approx(losses(short), rel=1e-10)
    assert validation(run) == pytest.approx(validation(short), rel=1e-10)


@pytest.mark.thin(7)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pipeline=2 tensor=2 micro_batch=2", "shard=2 zero=3"),
        ("pipeline=2 tensor=2 micro_batch=2", "shard=3 micro_batch=1"),
        ("shard=2 zero=3", "pipeline=2 schedule=interleaved"), ("pipeline=1", "replicate=2"),
        ("tensor=2", "pipeline=1"),
    ],
)  # fmt: skip
def test_kill_and_resume_elsewhere(before: str, after: str, short: RunFolder, tmp_path: Path) -> None:
    job = small_job(tmp_path / "run", **SHORT)
    if "shard=3" in after:
        job = small_job(tmp_path / "run", **SHORT, batch={"samples": 24})
        short = train(small_job(tmp_path / "whole", **SHORT, batch={"samples": 24}), "pipeline=1")
    with pytest.raises(RunError, match="-9"):
        train(job, before, die_after=5)
    run = train(job, after, resume=True)
    records = list(run.metrics())
    assert [record["step"] for record in records] == list(range(1, 7))
    expected = [record["loss"] for record in short.metrics()]
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-10)


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ["shard=2 zero=3", "pipeline=2 shard=2", "tensor=2 shard=2 zero=3"])
def test_kill_and_resume_in_place_is_bitwise(layout: str, tmp_path: Path) -> None:
    whole = train(small_job(tmp_path / "whole", **SHORT), layout)
    job = small_job(tmp_path / "broken", **SHORT)
    with pytest.raises(RunError, match="-9"):
        train(job, layout, die_after=5)
    assert losses(train(job, layout, resume=True)) == losses(whole)


@pytest.mark.thin(4)
@pytest.mark.parametrize("kind", ["mixture", "images"])
def test_what_data_is_made_of_goes_on_elsewhere(kind: str, tmp_path: Path) -> None:
    """Weighted sources, and images that are changed on the fly: killed, then gone on with by three ranks."""
    given: dict[str, object] = {"steps": 4, "checkpoint": {"every": 2}, "batch": {"samples": 12}}
    if kind == "mixture":
        for letter in "abc":
            text = "".join(f"{letter}{n} " for n in range(400))
            (tmp_path / f"{letter}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        mix = {str(tmp_path / f"{letter}.jsonl"): weight for letter, weight in zip("abc", (0.5, 0.3, 0.2), strict=True)}
        given |= {"model": SMALL["model"] | {"vocab": 256}, "data": {"source": "mix", "mix": mix}}  # type: ignore[operator]
    else:
        ways = ["crop", "flip", "colour", "cutout"]
        given |= {
            "model": {"name": "resnet", "depth": 18, "width": 4, "image_size": 8, "num_classes": 5, "stem": "cifar"},
            "data": {"source": "synthetic", "augment": ways},
        }
    whole = train(small_job(tmp_path / "whole", **given), "pipeline=1")
    job = small_job(tmp_path / "run", **given)
    with pytest.raises(RunError, match="-9"):
        train(job, "replicate=2", die_after=3)
    run = train(job, "shard=3", resume=True)
    found, expected = ([record["loss"] for record in one.metrics()] for one in (run, whole))
    assert found == pytest.approx(expected, rel=1e-10) and len(found) == 4


def test_lower_precision_follows_float64(tmp_path: Path) -> None:
    """Every engine keeps master weights: losses stay near the exact ones, and near each other."""
    few = {"steps": 4, "optimizer": {"lr": 3e-3, "schedule": "constant", "warmup": 0}, "checkpoint": {"every": 0}}
    few |= {"model": SMALL["model"] | {"layers": 2}, "validation": {"samples": 2}}  # type: ignore[operator]
    exact = losses(train(small_job(tmp_path / "exact", **few), "pipeline=1"))
    for precision in ("bf16", "fp16"):
        kind = few | {"precision": precision}
        whole = losses(train(small_job(tmp_path / f"whole-{precision}", **kind), "pipeline=1"))
        sharded = losses(train(small_job(tmp_path / f"sharded-{precision}", **kind), "shard=2 zero=3"))
        assert whole == pytest.approx(exact, rel=2e-2)
        assert sharded == pytest.approx(whole, rel=2e-2)


class FailingGraph:
    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        raise RuntimeError("the stream is busy.\nCompile with more options")

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_failed_capture_costs_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of plain steps, although the loop fetches batches and writes metrics one step later."""
    runs = []
    for name in ("plain", "graph"):
        runs.append(RunFolder.create(small_job(tmp_path / name, validation={"every": 5})))
        TrainingLoop(prepare(runs[-1].job(), Layout()), runs[-1], torch.device("cpu")).run()
        calls = {"CUDAGraph": FailingGraph, "Stream": lambda: None, "stream": lambda stream: nullcontext(),
                 "graph_pool_handle": lambda: (0, 1), "synchronize": lambda: None, "empty_cache": lambda: None,
                 "current_device": lambda: 0, "graph": lambda graph, capture_error_mode: nullcontext()}  # fmt: skip
        for call, stub in calls.items():
            monkeypatch.setattr(torch.cuda, call, stub)
        for call in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, call, lambda device, pool: None, raising=False)
        monkeypatch.setattr(
            loop, "make_step_fn",
            lambda engine, optimizer, clip, *_, on_capture_failure, **__: CudaGraphStep(
                engine, optimizer, clip, 3, on_capture_failure
            ),
        )  # fmt: skip
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[1])) == 12
    (failure,) = [event["message"] for event in runs[1].events() if event["event"] == "capture_failed"]
    assert failure.endswith("so steps run without one: RuntimeError: the stream is busy.")
    rows = [json.loads(line)["step"] for line in (runs[1].path / "ranks.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 13))
    for record in runs[1].metrics():
        assert sum(record["phase_seconds"].values()) == pytest.approx(record["seconds"], abs=1e-5)


def test_a_resume_tells_its_new_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.start.launch", lambda *_, **__: None)
    run, said = RunFolder.create(small_job(tmp_path / "run", layout="pipeline=1")), []
    start_training(None, ["data.workers=1", "checkpoint.keep=3"], run.path, said.append)
    assert not list(run.events())
    start_training(None, ["steps=30"], run.path, said.append)
    (event,) = run.events()
    assert event["event"] == "steps_changed" and event["message"].startswith("30 steps instead of 12;")
    assert f"steps_changed: {event['message']}" in said


def test_a_resume_names_what_must_stay_and_what_may_change(tmp_path: Path) -> None:
    run = RunFolder.create(small_job(tmp_path / "run"))
    with pytest.raises(JobError) as raised:
        start_training(None, ["seed=3", "model.layers=2", "data.workers=1"], run.path, print)
    assert (
        "but seed, model.layers would change; it may change only layout, steps, tokens, compile, tracker, data."
        in str(raised.value)
    )
    page = Path(__file__).parent.parent / "docs" / "how-to" / "resume-elsewhere.md"
    assert all(f"`{key.removesuffix('.*')}`" in page.read_text() for key in RESUMABLE_KEYS)


def test_tokens_without_a_tokenizer_are_not_taken_for_text(tmp_path: Path) -> None:
    write_token_arrays(tmp_path / "some.bin", [np.arange(1000) % 61], 61)
    for data in ({"source": "tokens", "path": str(tmp_path / "some.bin")}, {"source": "synthetic"}):
        run = RunFolder.create(small_job(tmp_path / data["source"], data=data))
        said: list[str] = []
        summarize(run, run.job(), said.append)
        assert said == [f"run folder: {run.path}"]
        with pytest.raises(DataError, match="without a tokenizer"):
            sample_run(run.path, [""], Sampling(8))


# Through the command line, as users do


def command(*arguments: str, folder: Path, python: str | None = None, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python or sys.executable, "-m", "shardwise", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, **options,
    )  # type: ignore[call-overload]  # fmt: skip


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.thin(4)
@pytest.mark.parametrize("number", ["fork server", signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_cleanly(number: signal.Signals | str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB_TOML)
    # An interpreter of its own where the test looks at the number of the process, its children and their names.
    python = REAL_PYTHON if isinstance(number, str) else sys.executable
    process = command("train", "job.toml", "--set", "steps=1000000", folder=tmp_path, python=python)
    wait_for_step(tmp_path / "run", 3, process)
    if isinstance(number, str):
        children = psutil.Process(process.pid).children(recursive=True)
        names = {" ".join(child.cmdline()).strip(): child for child in children}
        assert "shardwise: rank 1 of 2, run" in names, list(names)
        names[f"shardwise: fork server of {process.pid}"].send_signal(signal.SIGTERM)  # which passes it on
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else "SIGTERM"
    assert f"stopped: {name}, checkpoint saved at step" in said and "--resume run" in said and "Traceback" not in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_closed_output_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB_TOML)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "train", "job.toml", "--set", "steps=30"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().startswith("job:")
    process.stdout.close()  # what `| head -1` does
    process.stdout = None
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert said == ""
    assert [event["event"] for event in RunFolder.open(tmp_path / "run").events()][-1] == "finished"


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB_TOML)
    process = command("train", "job.toml", "--set", "steps=1000000", "--set", "run.max_restarts=0", folder=tmp_path)
    wait_for_step(tmp_path / "run", 3, process)
    os.kill(read_heartbeats(tmp_path / "run")[1]["pid"], signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "rank 1 was killed by SIGKILL in step" in said and "Traceback" not in said


@pytest.mark.cluster
def test_under_torchrun_it_joins_that_world_and_sample_writes_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    settings = ["data.source=text", "data.path=text.txt", "model.vocab=256", "steps=3"]
    (tmp_path / "job.toml").write_text(JOB_TOML)
    arguments = [part for setting in settings for part in ("--set", setting)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise"]
    done = subprocess.run(
        [*torchrun, "train", "job.toml", *arguments], cwd=tmp_path, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert done.stdout.count("validation: loss") == 1 and done.stdout.count("bits per byte") == 1
    after = done.stdout.partition("generated text after '")[2].partition("':")[0]
    assert after and after in "to be or not to be, that is the question. " * 2
    assert run_world(sample_run, 1, tmp_path / "run", ["to be"], Sampling(8, 0.8))[0][0].startswith("to be")
    resumed = subprocess.run(
        [*torchrun, "train", "--resume", "run", "--set", "steps=5"], cwd=tmp_path, capture_output=True, timeout=120
    )
    assert resumed.returncode == 0, resumed.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))


@pytest.mark.thin(4)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_takes_steps(example: Path, tmp_path: Path) -> None:
    """Models of their kind and shape, small, on random walks or on the chats beside them."""
    has_data = load_job(example, []).data.source == "chat"
    settings = [] if has_data else ["data.source=synthetic", "data.samples=64"]
    job = load_job(example, ["steps=3", "precision=float32", *settings])
    job = job if has_data else shrink_model(job)
    job = job.model_copy(
        update={
            "batch": BatchConfig(samples=8), "run": job.run.model_copy(update={"folder": str(tmp_path / "run")}),
            "checkpoint": job.checkpoint.model_copy(update={"every": 0}),
        }
    )  # fmt: skip
    run = train(job, "pipeline=1")
    assert len(losses(run)) == 3 and all(math.isfinite(loss) for loss in losses(run))


def _create(number: int) -> str:
    return str(RunFolder.create(make_job({})).path)


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with multiprocessing.get_context("fork").Pool(8) as pool:
        folders = pool.map(_create, range(64), chunksize=1)
        pool.close()
        pool.join()  # before the pool ends its processes by a signal, which one may never handle
    assert len(set(folders)) == 64
    job = make_job({"run": {"folder": "same"}})
    RunFolder.create(job)
    with pytest.raises(JobError, match="already has a run"):
        RunFolder.create(job)
