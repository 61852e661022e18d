"""The job file: all problems at once, each in a sentence; resolved text reads back to the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.job import Job, load_job, make_job
from shardwise.models.presets import PRESETS


def problem(values: dict[str, object]) -> str:
    with pytest.raises(JobError) as caught:
        make_job(values)
    return str(caught.value)


def test_every_key_has_a_default_and_the_resolved_job_reads_back(tmp_path: Path) -> None:
    job = Job()
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert load_job(tmp_path / "job.toml") == job


@pytest.mark.parametrize("name", PRESETS)
def test_presets_resolve_and_read_back(name: str, tmp_path: Path) -> None:
    job = make_job({"model": {"name": name}})
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert load_job(tmp_path / "job.toml") == job


def test_explicit_keys_win_over_a_preset() -> None:
    assert make_job({"model": {"name": "llama3-8b", "layers": 2}}).model.layers == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"layer": 3}}, ["model.layer", "'layers'"]),
        ({"step": 3}, ["step", "'steps'"]),
        ({"model": {"name": "lama3-8b"}}, ["lama3-8b", "llama3-8b"]),
        ({"model": {"width": 100, "heads": 7}}, ["width 100", "7 heads"]),
        ({"model": {"heads": 8, "kv_heads": 3}}, ["heads (8)", "kv_heads (3)"]),
        ({"model": {"attention_dropout": 0.1}}, ["attention"]),
        ({"steps": 3, "tokens": "1M"}, ["steps or tokens"]),
        ({"batch": {"samples": 3, "tokens": 9}}, ["samples or tokens"]),
        ({"batch": {"tokens": "half a million"}}, ["half a million", "0.5M"]),
        ({"layout": "pipline=2"}, ["pipline", "pipeline"]),
        ({"layout": "tensor=two"}, ["tensor", "two"]),
        ({"precision": "bf17"}, ["precision", "bf16"]),
        ({"optimizer": {"lr": -1}}, ["optimizer.lr"]),
        ({"model": 3}, ["model"]),
    ],
)
def test_a_mistake_is_told_with_its_place_and_remedy(values: dict[str, object], words: list[str]) -> None:
    message = problem(values)
    assert all(word in message for word in words), message
    assert "Traceback" not in message


def test_all_problems_are_told_at_once() -> None:
    message = problem({"stepps": 1, "optimizer": {"lr": -1}, "model": {"layers": 0}})
    assert message.count("\n") == 2


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('tokens = "1M"\n[batch]\ntokens = "64K"\n')
    job = load_job(path, ["layout=pipeline=2 tensor=2", "model.layers=3", "batch.samples=8", "steps=5"])
    assert (job.layout, job.model.layers, job.samples, job.total_steps) == ("pipeline=2 tensor=2", 3, 8, 5)


@pytest.mark.parametrize("override", ["", "steps", "=3", "steps.x=3"])
def test_bad_overrides(override: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("steps = 3\n")
    with pytest.raises(JobError):
        load_job(path, [override])


def test_unreadable_files(tmp_path: Path) -> None:
    for name, content in {"a": b"steps = ", "b": b"\xff\xfe\x00", "c": b"steps = 1\nsteps = 2"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(JobError):
            load_job(tmp_path / name)
    with pytest.raises(JobError, match="no job file"):
        load_job(tmp_path / "missing.toml")
    with pytest.raises(JobError):
        load_job(tmp_path)
