"""The proof before the first step: what it must not miss, what it must not mistake, and when it cannot be had."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import user_modules
from torch import Tensor, nn
from user_modules import CLASSES, FEATURES, Rows, floats, integers

import shardwise.verify.command as command
from shardwise.adapters.task import Task
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare

ONE_PROCESS = "pipeline=1 micro_batch=2"


def job_of(name: str, **args: Any) -> Job:
    return make_job({"model": {"name": f"python:{name}", "args": args}, "batch": {"samples": 16}, "steps": 8})


def prove(job: Job, layout: str) -> list[str]:
    """Returns what the proof says; raises JobError if it refuses the layout."""
    said: list[str] = []
    command.prove(prepare(job, Layout.parse(layout)), said.append)
    return said


def refusal(job: Job, layout: str) -> str:
    with pytest.raises(JobError) as caught:
        prove(job, layout)
    sentence = str(caught.value)
    assert "The run was not started, since it would train another model" in sentence
    assert "--no-proof" in sentence and "Traceback" not in sentence
    return sentence


# Losses that compare the samples of a batch with one another


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def info_nce(embedding: Tensor, view: Tensor) -> Tensor:
    """As in CLIP: the other samples of the batch are the negatives."""
    logits = F.normalize(embedding, dim=-1) @ F.normalize(view, dim=-1).T / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits)))


def hardest_triplets(embedding: Tensor, classes: Tensor) -> Tensor:
    """For each sample, the farthest of its class and the nearest of the others."""
    distances = (embedding[:, None] - embedding[None]).square().sum(-1)
    is_same = classes[:, None] == classes[None]
    positive = distances.masked_fill(~is_same, 0.0).amax(1)
    negative = distances.masked_fill(is_same, 1e3).amin(1)
    return F.softplus(positive - negative).mean()


def vicreg(embedding: Tensor, view: Tensor) -> Tensor:
    """Invariance, variance and covariance over the batch."""
    centered = embedding - embedding.mean(0)
    covariance = centered.T @ centered / max(1, len(embedding) - 1)
    spread = F.relu(1.0 - (covariance.diagonal() + 1e-4).sqrt()).mean()
    others = covariance - covariance.diagonal().diag()
    return F.mse_loss(embedding, view) + spread + others.square().sum() / FEATURES


def pairwise_ranking(embedding: Tensor, relevance: Tensor) -> Tensor:
    """A hinge for each pair of samples in the wrong order, or too close."""
    scores = embedding[:, 0]
    is_better = (relevance[:, None] > relevance[None]).to(scores)
    hinges = F.relu(1.0 - (scores[:, None] - scores[None])) * is_better
    return hinges.sum() / len(scores) ** 2


IN_BATCH = {"info_nce": info_nce, "hardest_triplets": hardest_triplets, "vicreg": vicreg,
            "pairwise_ranking": pairwise_ranking}  # fmt: skip


def in_batch(loss: str) -> Task:
    has_views = loss in ("info_nce", "vicreg")
    target = floats(FEATURES, seed=5) if has_views else integers(CLASSES)
    return Task(Embedder, IN_BATCH[loss], Rows(floats(FEATURES), target))


@pytest.mark.thin(21, by_kind=True)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=3", ONE_PROCESS])
@pytest.mark.parametrize("loss", IN_BATCH)
def test_a_loss_over_the_batch_is_refused_where_the_batch_is_split(loss: str, layout: str) -> None:
    sentence = refusal(job_of("test_proof:in_batch", loss=loss), layout)
    assert "first differs in step 0: loss" in sentence
    assert "If the loss compares the samples of a batch with one another" in sentence


@pytest.mark.thin(2)
@pytest.mark.parametrize("loss", ["info_nce", "vicreg"])
def test_a_loss_over_the_batch_is_proven_where_the_batch_is_whole(loss: str) -> None:
    plan = {"first": "colwise", "second": "rowwise"}
    job = job_of("test_proof:in_batch", loss=loss)
    job = job.model_copy(update={"model": job.model.model_copy(update={"tensor_plan": plan})})
    assert "equals one process" in prove(job, "tensor=2")[0]
    assert prove(job, "pipeline=1") == []  # one process and one micro-batch are the module itself


# What a step leaves behind


class FollowsStudent(nn.Module):
    """A teacher that starts as the student, and follows it in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                slow.lerp_(fast, 0.2)
        return self.student(x), self.teacher(x)


def teacher_and_classes(outputs: tuple[Tensor, Tensor], classes: Tensor) -> Tensor:
    student, teacher = outputs
    return F.cross_entropy(student, classes) + F.mse_loss(student, teacher)


def teacher() -> Task:
    return Task(FollowsStudent, teacher_and_classes, user_modules.vectors())


class FollowsUnused(FollowsStudent):
    """A teacher that follows its student, but is only exported."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        student, _ = super().forward(x)
        return student, student


def exported_teacher() -> Task:
    return Task(FollowsUnused, teacher_and_classes, user_modules.vectors())


@pytest.mark.parametrize("name", ["teacher", "exported_teacher"])
def test_a_teacher_that_sharding_forgets_is_seen(name: str) -> None:
    sentence = refusal(job_of(f"test_proof:{name}"), "shard=2 zero=3")
    assert "teacher.weight (frozen weight)" in sentence and "use replicate or zero=1" in sentence


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=1"])
@pytest.mark.parametrize("name", ["teacher", "exported_teacher"])
def test_a_teacher_is_proven_where_each_rank_has_it_whole(name: str, layout: str) -> None:
    assert "equals one process" in prove(job_of(f"test_proof:{name}"), layout)[0]


class Reassigned(nn.Module):
    """Makes a new buffer in each forward, instead of changing the old one."""

    mean: Tensor
    count: Tensor
    hidden: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.kind == "hidden mean":
            x = x - self.hidden
            self.hidden = 0.9 * self.hidden + 0.1 * x.detach().mean(0)
        else:
            self.count = self.count + 1
        return self.layer(x)


def reassigned(kind: str) -> Task:
    return Task(lambda: Reassigned(kind), nn.CrossEntropyLoss(), user_modules.vectors())


@pytest.mark.parametrize("kind", ["mean", "count"])
def test_a_buffer_that_the_forward_replaces_needs_one_process(kind: str) -> None:
    job = job_of("test_proof:reassigned", kind=kind)
    for layout in ("replicate=2", "shard=2 zero=3"):
        with pytest.raises(LayoutError, match=f"the forward updates buffer {kind}, which each rank would do"):
            prepare(job, Layout.parse(layout))
    with pytest.raises(LayoutError, match="into 8 micro-batches, but this module must run them as one"):
        prepare(job, Layout.parse("micro_batch=2"))


def test_a_cache_that_is_more_than_a_cache_is_seen() -> None:
    job = job_of("test_proof:reassigned", kind="hidden mean")
    assert "first differs in step 1: loss" in refusal(job, "replicate=2")


# No false alarms


class Buffers(nn.Module):
    """Buffers of any kind: infinite, complex, boolean, empty, a cache of the batch's own shape, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, CLASSES)
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.zero = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("mask", torch.full((FEATURES,), -math.inf).masked_fill(torch.arange(FEATURES) < 4, 0.0))
        self.register_buffer("unknown", torch.full((2,), math.nan))
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(x) + self.first(x) + self.zero.sum())
        self.last = hidden.detach()  # of as many rows as this rank has samples
        attention = torch.softmax(hidden + self.mask, -1)
        turned = torch.view_as_complex(attention.unflatten(-1, (-1, 2))) * self.angles
        return self.second(torch.view_as_real(turned).flatten(1) * self.scale)


def buffers() -> Task:
    return Task(Buffers, nn.CrossEntropyLoss(), user_modules.vectors())


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=1", "shard=2 zero=3"])
def test_ordinary_buffers_and_frozen_weights_raise_no_alarm(layout: str) -> None:
    assert "equals one process" in prove(job_of("test_proof:buffers"), layout)[0]


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("batch_norm", "shard=2 zero=3"), ("tied_lm", "pipeline=2 micro_batch=2"), ("frozen", "tensor=2"),
     ("vit", "replicate=2 micro_batch=2"), ("lstm_tagger", ONE_PROCESS), ("unused_head", "replicate=2")],
)  # fmt: skip
def test_the_modules_of_the_other_tests_are_proven(name: str, layout: str) -> None:
    assert "equals one process" in prove(job_of(f"user_modules:{name}"), layout)[0]


def test_a_batch_that_fits_the_layout_need_not_fit_its_small_copy() -> None:
    """9 samples on 3 ranks; the proof has 2 ranks. And one micro-batch stays one, as batch norm needs."""
    job = job_of("user_modules:lstm_tagger")
    job = job.model_copy(update={"batch": job.batch.model_copy(update={"samples": 9})})
    assert "equals one process" in prove(job, "replicate=3")[0]
    assert "equals one process" in prove(job_of("user_modules:batch_norm"), "replicate=2 micro_batch=8")[0]


# When it runs


def helped() -> Task:
    helper = importlib.import_module("helper_of_a_module")

    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return helper.scores(self.layer(x))  # type: ignore[no-any-return]

    return Task(Helped, nn.CrossEntropyLoss(), user_modules.vectors())


def test_a_helper_that_changed_is_proven_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "helper_of_a_module.py"
    helper.write_text("def scores(x):\n    return x\n")
    job = job_of("test_proof:helped")
    assert "equals one process" in prove(job, "replicate=2")[0]

    helper.write_text("def scores(x):\n    return x - 2.0 * x.mean(0, keepdim=True)  # of the samples of this rank\n")
    try:
        importlib.reload(sys.modules["helper_of_a_module"])
        assert "relative error" in refusal(job, "replicate=2")
    finally:
        del sys.modules["helper_of_a_module"]


def test_a_large_module_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LARGE", 50)
    assert "first differs in step 0: loss" in refusal(job_of("test_proof:in_batch", loss="info_nce"), "replicate=2")
    said = prove(job_of("test_proof:teacher"), "replicate=2")
    assert "takes minutes; --no-proof skips it" in said[0] and "equals one process" in said[1]


def test_without_the_memory_for_it_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "available_memory", lambda: 1e5)
    with pytest.raises(JobError, match=r"takes about .* GiB of memory, but 0.0 GiB are free here.*--no-proof"):
        prove(job_of("test_proof:teacher"), "replicate=2")
