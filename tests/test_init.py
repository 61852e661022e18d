"""`shardwise init`: a job for each task that plans and, on what it names, trains; four questions; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.data.make_sources import make_sources
from shardwise.errors import DataError, JobError
from shardwise.job import load_job, make_job
from shardwise.launch.init_job import TEMPLATES, write_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.planner.plan import plan_job
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder

NOTHING = {"task": None, "data": None, "model": None, "devices": None}


def make_start(folder: Path) -> str:
    """Trains a tiny run that another can start from."""
    (folder / "text.txt").write_text("To be, or not to be. " * 200)
    values: dict[str, Any] = {
        "steps": 1, "model": {"layers": 2, "width": 16, "heads": 2, "sequence": 128}, "batch": {"samples": 4},
        "data": {"source": "text", "path": str(folder / "text.txt")}, "checkpoint": {"snapshot_every": 0},
        "run": {"folder": str(folder / "start"), "device": "cpu"},
    }  # fmt: skip
    run = RunFolder.create(make_job(values))
    TrainingLoop(prepare(run.job(), Layout.parse("")), run, torch.device("cpu"), False).run()
    return str(run.path)


def make_images(folder: Path) -> str:
    for name in ("train/ants", "train/bees", "val/ants", "val/bees"):
        (folder / "images" / name).mkdir(parents=True)
    return str(folder / "images")


def make_llama(folder: Path) -> str:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=256, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return str(folder / "llama")


def make_chats(folder: Path) -> str:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 60)
    return str(folder / "chats.jsonl")


CASES: dict[str, tuple[str, Any, Any]] = {
    "pretrain": ("pretrain", None, None),
    "preset": ("pretrain", lambda folder: str(folder / "a file.parquet"), lambda folder: "gpt2"),
    "continue": ("continue", None, make_start),
    "continue a folder": ("continue", None, make_llama),
    "tune": ("tune", make_chats, make_start),
    "images": ("images", None, None),
    "image folder": ("images", make_images, lambda folder: "resnet-50"),
    "recommender": ("recommender", None, None),
    "clicks": ("recommender", lambda folder: 'day "0".tsv', None),
}


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES[case][0]} - {case}")
def test_what_is_written_can_be_planned(tmp_path: Path, case: str) -> None:
    task, data, model = CASES[case]
    out = tmp_path / "job.toml"
    given = NOTHING | {"task": task, "devices": "2"}
    given |= {key: make(tmp_path) for key, make in (("data", data), ("model", model)) if make is not None}
    lines = list(write_job(out, given, None))
    assert lines[-1] == f"next: shardwise plan {out}, then shardwise train {out}"
    assert ("no such file or folder" in "".join(lines)) == (case in ("preset", "clicks"))
    job, text = load_job(out), out.read_text()
    assert job.run.processes == 2 and text.count("#") > 8 and "\n\n\n" not in text and "{" not in text.split("sets")[0]
    assert plan_job(out, [], "cpu", 2, None).best.layout.world <= 2
    expected = {
        "preset": ("parquet", "gpt2"), "tune": ("chat", "gpt"), "image folder": ("images", "resnet-50"),
        "clicks": ("criteo", "dlrm"), "images": ("synthetic", "resnet"), "pretrain": ("stdlib", "gpt"),
    }  # fmt: skip
    assert (job.data.source, job.model.name) == expected.get(case, (job.data.source, job.model.name))
    if case == "image folder":
        assert job.model.num_classes == 2  # type: ignore[attr-defined]
    if case == "tune":
        training = make_sources(job, tmp_path / "cache")[0]
        assert len(training) > 0 and job.model.lora.rank == 16  # type: ignore[attr-defined]


def test_every_template_has_its_questions() -> None:
    names = {path.name for path in TEMPLATES.glob("init-*.toml")}
    assert names == {f"init-{name}.toml" for name in ("pretrain", "continue", "tune", "images", "recommender")}


def test_four_questions_and_no_more(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    def ask(question: str, default: Any) -> str:
        asked.append((question.split(":")[0].split(" ")[0].rstrip(","), default))
        return {"Task": "images", "Images": "", "Model": "resnet-50", "Processes": "4"}[asked[-1][0]]

    list(write_job(tmp_path / "a.toml", NOTHING, ask))
    assert asked == [("Task", "pretrain"), ("Images", ""), ("Model", ""), ("Processes", "0")]
    asked.clear()
    list(write_job(tmp_path / "b.toml", NOTHING | {"task": "images", "data": "", "model": ""}, ask))
    assert asked == [("Processes", "0")] and load_job(tmp_path / "b.toml").run.processes == 4


def test_refusals_are_sentences(tmp_path: Path) -> None:
    out = tmp_path / "job.toml"

    def problem_of(path: Path = out, **given: str) -> str:
        with pytest.raises(JobError) as caught:
            list(write_job(path, NOTHING | given, None))
        return str(caught.value)

    assert "--task pretain is unknown; did you mean 'pretrain'?" in problem_of(task="pretain")
    assert "--task any is unknown" in problem_of(task="any")
    assert "--data needs a value. Conversations" in problem_of(task="tune")
    assert "--model needs a value" in problem_of(task="continue")
    assert "--model nope: no such folder" in problem_of(task="continue", model="nope")
    assert "--devices needs a number" in problem_of(devices="many")
    assert "gpt5" in problem_of(model="gpt5")  # what the job itself refuses
    assert "does not exist; create it first" in problem_of(tmp_path / "none" / "job.toml")
    assert not out.exists()
    out.write_text("mine")
    assert "job.toml exists; name another file" in problem_of() and out.read_text() == "mine"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl.gz").touch()
    result = CliRunner().invoke(app, ["init", "--data", "lines", "--task", "pretrain"])
    assert result.exit_code == 0 and result.output.splitlines()[-1].startswith("next: shardwise plan job.toml")
    assert (load_job(Path("job.toml")).data.source, load_job(Path("job.toml")).data.path) == ("jsonl", "lines")


def test_the_path_is_checked_before_the_vocabulary(tmp_path: Path) -> None:
    data = {"source": "text", "path": str(tmp_path / "nope"), "tokenizer": "bpe:4096"}
    with pytest.raises(DataError, match="no such file or folder"):
        make_sources(make_job({"model": {"vocab": 256}, "data": data}))
    assert make_job({"data": data}).model.vocab_size == 4096  # not set: that of the tokenizer


def test_many_devices_get_a_job_for_gpus(tmp_path: Path) -> None:
    given = {"task": "pretrain", "data": None, "model": "llama3-70b", "devices": "64"}
    *_, ending = write_job(tmp_path / "job.toml", given, None)
    assert "--cluster h100 --devices 64, then shardwise submit" in ending and ending.endswith("--gpus-per-node 8")
    job = load_job(tmp_path / "job.toml")
    assert job.precision == "bf16" and job.samples == 512 and job.optimizer.lr == 1.5e-4
