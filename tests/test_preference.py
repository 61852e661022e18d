"""DPO: pairs of answers in a row, the loss of the paper in every layout, the reference of the model it starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_chat import LLAMA, MOE, QWEN, chat_job, open_rows, write_rows
from test_train import losses, train, validation

from shardwise.comm.world import run_world
from shardwise.data.make_sources import make_sources
from shardwise.errors import DataError, JobError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models import gpt
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.preference import mark_rejected, plain_targets, preference_weights
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.train.validate import score_pairs
from shardwise.verify.parity import verify

USER, YES, NO = ({"role": role, "content": text} for role, text in (("user", "Tea?"), ("assistant", "Yes."), ("assistant", "No, no.")))  # fmt: skip  # noqa: E501
PAIRS: list[dict[str, Any]] = [
    {"prompt": "Tea?", "chosen": "Yes.", "rejected": "No, no."},
    {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    {"chosen": [USER, YES], "rejected": [USER, NO]},
    {"prompt": "Tea?", "chosen": [USER, YES], "rejected": [USER, NO], "score_chosen": 3},
    {"chosen": [{"from": "human", "value": "Tea?"}, {"from": "gpt", "value": "Yes."}], "rejected": [USER, NO]},
]
ROWS = [{"prompt": f"Say {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no " * (n % 4 + 1)} for n in range(24)]


def dpo_job(path: str, model: dict[str, Any] | None = None, samples: int = 4, **changes: Any) -> Job:
    values = chat_job(path, model or {**LLAMA, "sequence": 160}, samples, **changes).model_dump(exclude_none=True)
    return make_job({**values, "loss": {"dpo_beta": 0.3}})


def test_all_forms_of_a_pair_are_the_same_row(tmp_path: Path) -> None:
    rows = open_rows(dpo_job(write_rows(tmp_path / "pairs.jsonl", PAIRS)), tmp_path)
    assert len(rows) == len(PAIRS)
    tokens, targets, is_first = rows.read_row(0)
    for index in range(1, len(rows)):
        assert all((a == b).all() for a, b in zip(rows.read_row(index), (tokens, targets, is_first), strict=True))
    text = lambda ids: bytes(ids.tolist()).decode()  # noqa: E731
    assert text(targets[targets >= 0]).startswith("Yes.")
    assert text(plain_targets(targets[targets < IGNORE_INDEX])).startswith("No, no.")
    assert is_first.sum() == 3  # the padding too


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "Tea?", "completion": "Yes."}, "needs rows with a chosen and a rejected answer"),
    ({"prompt": "Tea?", "chosen": "Yes."}, "this one has not both"),
    ({"chosen": "Yes.", "rejected": "No."}, "but no prompt"),
    ({"prompt": "Tea?", "chosen": [3], "rejected": "No."}, "a list of objects"),
    ({"prompt": "Tea?", "chosen": None, "rejected": "No."}, "message 2 has the content None"),
    ({"chosen": [USER], "rejected": [USER, NO]}, "must end with a message of the assistant"),
])  # fmt: skip
def test_a_bad_pair_is_named_or_skipped(row: Any, said: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", [PAIRS[0], row, PAIRS[1]])
    with pytest.raises(DataError, match=said):
        open_rows(dpo_job(path), tmp_path)
    assert len(open_rows(dpo_job(path, on_bad_record="skip"), tmp_path)) == 2


def test_pairs_and_their_key_belong_together(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="set loss.dpo_beta to learn from both"):
        open_rows(chat_job(write_rows(tmp_path / "pairs.jsonl", PAIRS)), tmp_path)
    for section in ({"source": "text", "path": "x"}, {"source": "chat", "path": "x", "pack": True}):
        with pytest.raises(JobError, match="loss.dpo_beta needs"):
            make_job({"loss": {"dpo_beta": 0.1}, "data": section})
    with pytest.raises(DataError, match="'synthetic' has not; use chat"):
        make_sources(make_job({"loss": {"dpo_beta": 0.1}, "data": {"source": "synthetic"}}))
    with pytest.raises(JobError, match="loss.dpo_beta = 0.3: .* apart"):
        prepare(dpo_job("none", {"name": "t5", "sequence": 24, "target_sequence": 16}), Layout.parse("pipeline=1"))


def test_a_pair_stays_together_when_it_is_cut(tmp_path: Path) -> None:
    long = {"prompt": "Tea? " * 30, "chosen": "Yes.", "rejected": "No."}
    path = write_rows(tmp_path / "pairs.jsonl", [PAIRS[0], long, PAIRS[1]])
    model = {**LLAMA, "sequence": 160}
    assert len(open_rows(dpo_job(path, model, truncate="drop"), tmp_path)) == 2
    assert len(open_rows(dpo_job(path, model), tmp_path)) == 2  # cut at the right, nothing that counts is left
    rows = open_rows(dpo_job(path, model, truncate="left"), tmp_path)
    assert len(rows) == 3 and "2 cut at the left" in rows.summary


def test_the_loss_and_its_gradient_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[IGNORE_INDEX, 3, 4, IGNORE_INDEX, 5, 6], [1, IGNORE_INDEX, IGNORE_INDEX, 2, 10, 0]])
    rejected = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()
    preference = torch.tensor([[0.7, 0.3], [-0.2, 0.5]], dtype=torch.float64)
    log_probs = logits.log_softmax(-1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2) * (targets >= 0)
    margin = (log_probs * ~rejected).sum(1) - (log_probs * rejected).sum(1)
    expected = -F.logsigmoid(preference[:, 1] * (margin - preference[:, 0])).sum()
    expected_grad = torch.autograd.grad(expected, logits)[0]
    coded = torch.where(rejected, mark_rejected(targets), targets)
    assert (plain_targets(coded) == targets).all()
    for chunk_size in (0, 4):
        weigh = preference_weights(coded, preference, None, 1)
        x, eye = logits.detach().flatten(0, 1).requires_grad_(), torch.eye(11, dtype=torch.float64)
        loss = gpt.fused_linear_cross_entropy(x, eye, targets.flatten(), None, chunk_size, weigh=weigh)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0].view_as(logits), expected_grad, rtol=0, atol=1e-14)


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("case", [
    "LLAMA shard=2 zero=3", "LLAMA pipeline=2 tensor=2", "LLAMA context=2", "MOE shard=2 expert=2 context=2",
    "MOE context=2 expert=2", "QWEN tensor=2", "QWEN context=2",
])  # fmt: skip
def test_pairs_in_any_layout(case: str) -> None:
    name, _, layout = case.partition(" ")
    model = {"LLAMA": {**LLAMA, "lora": {"rank": 2, "init_std": 0.1}}, "MOE": MOE, "QWEN": QWEN}[name]
    if name == "QWEN":
        pytest.importorskip("transformers")
    job = dpo_job("none", {**model, "sequence": 24}, 8)
    (record,) = verify(job, [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


def test_a_missing_sum_over_the_context_axis_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = lambda targets, preference, all_reduce, parts: preference_weights(targets, preference, None, parts)  # noqa: E731
    monkeypatch.setattr(gpt, "preference_weights", alone)
    (record,) = verify(dpo_job("none", {**LLAMA, "sequence": 24}, 4), [Layout.parse("context=2")], steps=1)
    assert not record.ok


def _scores(job: Job, layout: str, cache: Path) -> list[float]:
    rows = open_rows(job, cache)
    engine = parallelize(prepare(job, Layout.parse(layout)), torch.device("cpu"))
    return score_pairs(engine, job, rows).tolist()


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["shard=2 zero=3", "pipeline=2", "context=2 tensor=2"])
def test_the_reference_is_the_difference_of_log_probabilities(layout: str, tmp_path: Path) -> None:
    job = dpo_job(write_rows(tmp_path / "pairs.jsonl", ROWS[:7]))
    rows = open_rows(job, tmp_path)
    model, expected = job.family.build_reference(job.model, job.seed, torch.float64), []
    for index in range(len(rows)):
        tokens, targets, is_first = map(torch.from_numpy, rows.read_row(index))
        documents = is_first.cumsum(0).unsqueeze(0)
        log_probs = model(tokens.unsqueeze(0), ids=torch.zeros(1, dtype=torch.int64), document_ids=documents)[0].log_softmax(-1)  # fmt: skip  # noqa: E501
        picked = log_probs.gather(1, plain_targets(targets).clamp(min=0).unsqueeze(1)).squeeze(1)
        expected.append((picked[targets >= 0].sum() - picked[targets < IGNORE_INDEX].sum()).item())
    prepare(job, Layout.parse(layout))  # once, for all ranks
    for scores in run_world(_scores, Layout.parse(layout).world, job, layout, tmp_path):
        assert scores == pytest.approx(expected, rel=1e-12)


def test_a_run_learns_and_is_the_same_in_any_layout_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, found = write_rows(tmp_path / "pairs.jsonl", ROWS), {}
    for name, layout, resumed in (("one", "pipeline=1", ""), ("two", "shard=2 zero=3", "context=2")):
        job = dpo_job(path, {**LLAMA, "layers": 1, "sequence": 160}, 8, validation_fraction=0.1)
        sets = {"more": {"path": write_rows(tmp_path / "more.jsonl", ROWS[:5]), "source": "chat"}}
        job = job.model_copy(update={
            "steps": 6, "run": job.run.model_copy(update={"folder": str(tmp_path / name)}),
            "validation": job.validation.model_validate({"sets": sets}),
            "optimizer": job.optimizer.model_copy(update={"lr": 1e-2}),
            "checkpoint": job.checkpoint.model_copy(update={"every": 2, "asynchronous": False}),
        })  # fmt: skip
        if resumed:
            with pytest.raises(RunError):
                train(job, layout, die_after=3)
            kept = tmp_path / name / "preferences.json"
            before = kept.read_text()
            kept.unlink()  # as on a machine that has only the checkpoints
        run = train(job, resumed or layout, resume=bool(resumed))
        found[name] = [*losses(run), validation(run)]
        if resumed:
            told = [json.loads(text)["scores"] for text in (before, kept.read_text())]
            assert np.allclose(*map(np.concatenate, told), rtol=1e-12)
    assert found["one"] == pytest.approx(found["two"], rel=1e-10)
    assert found["one"][0] == pytest.approx(np.log(2)) and found["one"][-1] < 0.3
