"""One process runs what PyTorch runs, also a forward that several processes could not run alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_any_module import proven
from test_train import losses, train

from shardwise.errors import LayoutError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import meta_model, prepare
from shardwise.train.local_machine import choose_plan, describe_plan


def job_of(kind: str, **changes: Any) -> Job:
    model = {"name": "python:varying_modules:task", "args": {"kind": kind}}
    return make_job({"precision": "float64", "steps": 4, "model": model, "batch": {"samples": 8}} | changes)


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("Autoencoder", ["pipeline=1"]),
        ("DropPathInBlocks", ["pipeline=1", "recompute=full"]),
        ("LayerDrop", ["pipeline=1"]),
        ("Fading", ["pipeline=1"]),
    ],
)
def test_one_process_equals_the_plain_loop(kind: str, layouts: list[str]) -> None:
    proven(job_of(kind), *layouts, steps=6)


@pytest.mark.parametrize("kind", ["Autoencoder", "DropPath", "LayerDrop"])
def test_random_numbers_need_one_process(kind: str) -> None:
    for layout in ("replicate=2", "shard=2"):
        with pytest.raises(LayoutError, match=r"draws random numbers in its forward .* or use one process"):
            prepare(job_of(kind), Layout.parse(layout))


def test_auto_takes_one_process_where_only_one_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.local_machine.core_count", lambda: 2)
    plan, _ = choose_plan(job_of("Autoencoder"))
    assert plan.best.layout.world == 1


def test_a_resumed_run_draws_the_numbers_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = train(job_of("DropPath", run={"folder": str(tmp_path / "whole")}), "pipeline=1")
    checkpoint = {"every": 2}
    cut = job_of("DropPath", run={"folder": str(tmp_path / "cut")}, checkpoint=checkpoint)
    with pytest.raises(RunError):
        train(cut, "pipeline=1", die_after=3)
    assert losses(train(cut, "pipeline=1", resume=True)) == losses(whole)


def test_a_parameter_that_one_trial_used_is_trained() -> None:
    model = meta_model(job_of("Alternating").model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_no_trial_used_is_not_left_frozen_in_silence(tmp_path: Path) -> None:
    job = job_of("Curriculum", steps=8, run={"folder": str(tmp_path / "run")})
    with pytest.raises(RunError, match="second is used in this step, but was not when the forward was tried"):
        train(job, "pipeline=1")


def test_a_module_that_cannot_be_traced_is_planned_by_its_parameters() -> None:
    model = {"name": "python:user_modules:reads_value"}
    job = make_job({"steps": 3, "model": model, "batch": {"samples": 8}, "layout": "replicate=1"})

    plan, source = choose_plan(job)

    assert plan.best.seconds > 0
    reason = "a rough estimate from the parameters alone, since its forward may differ from step to step"
    assert reason in describe_plan(plan, source)
