"""The pages for those who come from another framework: every flag is answered as the program does, every job trains."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_docs import ROOT, blocks, generator
from test_train import losses, train

import shardwise
from shardwise.cluster import find_cluster
from shardwise.errors import LayoutError
from shardwise.job import BatchConfig, Job, make_job
from shardwise.layout import AXES, Layout
from shardwise.peer_words import JOB_WORDS, LAYOUT_WORDS, job_hint, layout_hint
from shardwise.planner.plan import make_plan
from shardwise.verify.command import shrink_model

PAGES = {page.stem.removeprefix("from-"): page for page in sorted((ROOT / "docs" / "how-to").glob("from-*.md"))}


@cache
def tables() -> Any:
    generator()  # puts tools/ on the path
    return sys.modules["peer_tables"]


def job_of(name: str) -> Job:
    (text,) = blocks(PAGES[name], "toml")
    return make_job(tomllib.loads(text))


def test_every_framework_has_a_page() -> None:
    assert set(tables().FLAGS) == set(PAGES)
    for name, page in PAGES.items():
        assert f"<!-- generated: from-{name} " in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_is_answered_as_the_program_does(name: str) -> None:
    flags = tables().FLAGS[name].split()
    assert len(flags) == len(set(flags)) > 25
    for flag in flags:
        shown, answered = tables().answer(flag)
        word = flag.partition(":")[2] or shown
        known = [part for part in (word, *reversed(word.split("."))) if job_hint(part)]
        told = job_hint(known[0]) if known else None
        assert told is None or answered[1:] in told.replace("{n}", "N"), f"{flag}: {answered}; told: {told}"
        if told is None:  # then it is a key of ours
            parts = answered.split(".")
            assert parts[0] in Job.model_fields, f"{flag}: {answered}"


def test_a_flag_without_an_answer_is_an_error() -> None:
    with pytest.raises(KeyError, match="--number-of-angels"):
        tables().answer("--number-of-angels")


def test_layout_answers_are_layouts() -> None:
    """Whatever form of a layout is suggested can be written."""
    found = 0
    for answer in LAYOUT_WORDS:
        for form in re.findall(r"[a-z_]+=\S+(?: [a-z_]+=\S+)*", answer.replace("{n}", "2").replace("=N", "=2")):
            needs = {
                "virtual": "pipeline=2 schedule=interleaved ",
                "stages": "pipeline=2 ",
                "schedule": "pipeline=2 ",
                "expert": "shard=2 ",
            }
            Layout.parse(needs.get(form.partition("=")[0], "") + re.sub(r"[,.]$", "", form))
            found += 1
    assert found >= len(LAYOUT_WORDS)


def test_hints_of_new_words() -> None:
    assert layout_hint("--use-torch-fsdp2", "8") == "did you mean shard=8 zero=3?"
    host = "to host memory: optimizer.offload = true for states, offload_activations = true; not parameters."
    assert job_hint("offload_param") == host
    with pytest.raises(LayoutError, match="did you mean tensor=4"):
        Layout.parse("autotp_size=4")
    assert all(text[0].isupper() for text in JOB_WORDS if text.endswith("."))


@pytest.mark.parametrize("name", PAGES)
def test_the_job_can_be_planned_as_shown(name: str) -> None:
    """The layout of the page needs the devices of its `shardwise plan`, and fits on them."""
    (asked,) = re.findall(
        r"^\$ shardwise plan job\.toml --cluster (\S+) --devices (\d+)$", PAGES[name].read_text(), re.M
    )
    job, cluster = job_of(name), find_cluster(asked[0])
    plan = make_plan(job, cluster, int(asked[1]), job.layout)
    assert plan.best.peak_memory <= cluster.device.memory, f"{plan.best.peak_memory / 2**30:.1f} GiB"


@pytest.mark.thin(13)
@pytest.mark.parametrize("name", PAGES)
def test_the_job_trains_when_it_is_tiny(name: str, tmp_path: Path) -> None:
    """Its axes, with two ranks each, on a model of its kind that is small."""
    job = job_of(name)
    layout = Layout.parse(job.layout)
    halves = {axis: min(2, getattr(layout, axis)) for axis in AXES}
    update: dict[str, Any] = {
        "steps": 2, "precision": "float32", "batch": BatchConfig(samples=8),
        "data": make_job({"data": {"source": "synthetic", "samples": 64}}).data,
        "run": job.run.model_copy(update={"folder": str(tmp_path / "run")}),
    }  # fmt: skip
    run = train(shrink_model(job).model_copy(update=update), str(replace(layout, **halves, micro_batch=1)))
    assert len(losses(run)) == 2 and all(math.isfinite(loss) for loss in losses(run))


def test_the_trainer_takes_what_the_page_gives_it() -> None:
    (text,) = blocks(PAGES["accelerate"], "python")
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.keywords)
    assert {one.arg for one in call.keywords} <= set(inspect.signature(shardwise.Trainer).parameters)
