"""Modules that are not ours, tier by tier: proven against the module in one process, or refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import user_modules
from test_train import train, validation

import shardwise.adapters.anatomy as anatomy
import shardwise.adapters.module_family as module_family
import shardwise.parallel.parallelize as parallelize
import shardwise.step as step
from shardwise.adapters.module_chain import ModuleChain
from shardwise.errors import DataError, JobError, LayoutError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import meta_model, prepare
from shardwise.train.export import open_checkpoint
from shardwise.train.run_folder import RunFolder
from shardwise.verify.parity import VerifyResult, verify

TIERS = {
    "data": ("replicate=2 micro_batch=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3 micro_batch=2"),
    "recompute": ("recompute=selective", "shard=2 zero=3 recompute=full micro_batch=2"),
    "pipeline": (
        "pipeline=2 micro_batch=4", "pipeline=2 schedule=zero-bubble micro_batch=2",
        "pipeline=2 schedule=zbv recompute=full micro_batch=2", "pipeline=2 shard=2 zero=3 micro_batch=1",
    ),
    "tensor": ("tensor=2", "tensor=2 shard=2 zero=3 recompute=full", "tensor=2 pipeline=2 micro_batch=2"),
}  # fmt: skip
NO_TRUNK = "no list of blocks was found of which each is called once, on the output of the one before, and keeps"
NO_PLAN = "the model has no tensor-parallel plan; set plan="
READS_VALUES = r"forward reads the value of a tensor in Python at .*user_modules.py:\d+, so it cannot be analysed"
# By module: the tiers in which it is refused, and what the sentence says.
MODULES: dict[str, dict[str, str]] = {
    "vit": {},
    "unet": {"pipeline": NO_TRUNK, "tensor": NO_PLAN},
    "lstm_tagger": {"pipeline": NO_TRUNK, "tensor": NO_PLAN},
    "stacked_lstm": {"tensor": NO_PLAN},
    "encoder": {"tensor": NO_PLAN},
    "sequence_first_encoder": {"tensor": NO_PLAN},
    "two_towers": {
        "pipeline": r"made in user_tower.2 \(prologue\) is used in TwoTowers \(epilogue\), and only the blocks' output",
        "tensor": NO_PLAN,
    },
    "shared_layer": {"pipeline": NO_TRUNK, "tensor": NO_PLAN},
    "repeated_block": {"pipeline": NO_TRUNK, "tensor": NO_PLAN},
    "many_outputs": {"tensor": NO_PLAN},
    "frozen": {},
    "frozen_bottom": {"pipeline": r"stage 0 of \d has no parameters to train", "tensor": NO_PLAN},
    "custom_autograd": {"tensor": NO_PLAN},
    "own_loss": {"tensor": NO_PLAN},
    "tied_lm": {},
    "temperatures": {},
    "unused_head": {"pipeline": r"made in stem \(prologue\) is used in UnusedHead \(epilogue\)", "tensor": NO_PLAN},
    "in_place": {"recompute": "net.4 changes its input in place", "tensor": NO_PLAN},
    "experts": {"pipeline": READS_VALUES, "tensor": NO_PLAN},
    "reads_value": {"pipeline": READS_VALUES, "tensor": NO_PLAN},
    "batch_norm": {
        "data": "(4|2) micro-batches, but this module must run them as one, because its batch norms",
        "recompute": "running statistics of batch norm twice",
        "pipeline": "batch norm spans the whole batch; use replicate or shard", "tensor": "batch norm spans the whole",
    },
}  # fmt: skip
SMALL_VIT = {"name": "python:user_modules:vit", "args": {"depth": 2}}


def any_job(name: str, args: dict[str, Any] | None = None, **changes: Any) -> Job:
    model = {"name": f"python:user_modules:{name}", "args": args or {}}
    return make_job({"precision": "float64", "steps": 3, "model": model, "batch": {"samples": 8}} | changes)


def proven(job: Job, *layouts: str, steps: int = 2) -> None:
    """The second step uses what the first has left behind."""
    for result in verify(job, [Layout.parse(layout) for layout in layouts], steps):
        assert result.ok, result.describe()


def first_difference(job: Job, layout: str) -> VerifyResult:
    """Returns the verdict on the first step, in which all differences of these tests show."""
    (result,) = verify(job, [Layout.parse(layout)], steps=1)
    assert not result.ok
    return result


def tier_cases() -> Iterator[Any]:
    """Yields module, layout, and what the sentence says if it is refused. The kind of a case is its tier, and whether
    it is refused there."""
    for name, refused in MODULES.items():
        for tier, layouts in TIERS.items():
            if name == "batch_norm" and tier == "data":
                layouts = (*layouts, "replicate=2", "shard=2 zero=3")
            for layout in layouts:
                if name in ("in_place", "frozen") and "zbv" in layout:  # recompute is refused; a stage would be frozen
                    continue
                sentence = refused.get(tier, "")
                if name == "batch_norm" and tier == "data" and "micro_batch" not in layout:
                    sentence = ""
                kind = f"{tier}_refused" if sentence else tier
                yield pytest.param(name, layout, sentence, id=f"{kind}-{name}-{layout}")


@pytest.mark.thin(36, by_kind=True)
@pytest.mark.parametrize(("name", "layout", "sentence"), list(tier_cases()))
def test_tier_by_tier(name: str, layout: str, sentence: str) -> None:
    if not sentence:
        proven(any_job(name), layout)
        return
    with pytest.raises(LayoutError, match=f"{sentence}|{MODULES[name].get('pipeline', '-')}"):
        prepare(any_job(name), Layout.parse(layout))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gan", "the forward returns 2 losses, but a job has one loss and one optimizer"),
        ("no_length", "the dataset Endless has no length or cannot be indexed; .* give it __len__ and __getitem__, or"),
        ("ragged", "samples cannot be collated: stack expects each tensor to be equal size.* `collate` that pads"),
        (
            "not_a_tensor",
            r"a batch must hold tensors only, but batch\[1\].* has the type str; convert or drop it in `collate`",
        ),
        ("loss_of_shape", r"the loss must be a scalar tensor, but it is of shape \(4,\)"),
        ("detached_loss", "the loss depends on no trainable parameter; is it detached"),
        ("lazy", "lazy modules, whose shapes are unknown"),
    ],
)
def test_refused_in_a_sentence(name: str, message: str) -> None:
    for layout in ("pipeline=1", "shard=2"):
        with pytest.raises((JobError, DataError), match=message):
            prepare(any_job(name), Layout.parse(layout))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("functional_dropout", r"FunctionalDropout draws random numbers in its forward .* use nn.Dropout there"),
        ("default_encoder", r"encoder.layers.0.self_attn draws random numbers .* set its probability to 0, or use one"),
    ],
)
def test_random_numbers_need_one_process(name: str, message: str) -> None:
    prepare(any_job(name), Layout.parse("pipeline=1"))
    with pytest.raises(LayoutError, match=message):
        prepare(any_job(name), Layout.parse("shard=2"))


def test_a_buffer_that_the_forward_updates_needs_one_process() -> None:
    proven(any_job("ema"), "pipeline=1")
    for layout in ("replicate=2", "shard=2", "pipeline=2"):
        with pytest.raises(LayoutError, match="the forward updates buffer mean, which each rank would do"):
            prepare(any_job("ema"), Layout.parse(layout))
    with pytest.raises(LayoutError, match="micro-batches"):
        prepare(any_job("ema"), Layout.parse("micro_batch=2"))


def test_a_plan_that_splits_heads_names_the_module() -> None:
    found = first_difference(any_job("tied_lm"), "tensor=4")
    assert "did not finish: tensor_plan: shapes do not fit in blocks.0" in found.describe()


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "layout", ["context=2", "context=2 context_method=ulysses pipeline=2 micro_batch=2", "context=2 tensor=2 zero=3"]
)
def test_a_module_with_our_attention_splits_its_sequences(layout: str) -> None:
    proven(any_job("long_lm", {"depth": 2}), layout)


def test_sequences_are_split_only_where_that_is_right() -> None:
    for name, reason in {
        "tied_lm": "the loss is a mean over samples", "lstm_tagger": "it does not attend through shardwise.attention"
    }.items():  # fmt: skip
        with pytest.raises(LayoutError, match=reason):
            prepare(any_job(name), Layout.parse("context=2"))
    found = first_difference(any_job("long_lm", {"arange": True}), "context=2")
    assert "shardwise.positions" in found.describe()


def test_a_mean_over_masked_targets_is_caught_and_explained() -> None:
    found = first_difference(any_job("masked_mean"), "replicate=2")
    assert "first differs in step 0: loss" in found.describe()
    assert "return the sum, and give `count`, the number of targets in a batch" in found.describe()


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=3"])
def test_a_batch_norm_that_is_a_block_spans_the_batch_beside_dropout(layout: str) -> None:
    proven(any_job("normalised", {"norm": "a block beside dropout"}), layout)


@pytest.mark.thin(8)
@pytest.mark.parametrize("layout", ["pipeline=1", "replicate=2", "shard=2 zero=3"])
@pytest.mark.parametrize("name", ["tied_lm", "stacked_lstm", "batch_norm", "vit", "experts"])
def test_bf16(name: str, layout: str) -> None:
    """The weights of LSTMs, parameters of the root, and float32 buffers beside bf16 weights."""
    micro = " micro_batch=2" if "shard" in layout and name != "batch_norm" else ""
    proven(any_job(name, precision="bf16"), f"{layout}{micro}", steps=1)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["pipeline=1", "shard=2 zero=3", "replicate=2 micro_batch=2"])
def test_tensors_in_float32_outside_of_the_module_do_not_end_the_proof(layout: str) -> None:
    proven(any_job("float32_outside"), layout)


def test_a_batch_norm_with_a_forward_of_its_own_keeps_it_in_one_process() -> None:
    proven(any_job("shifted_norm"), "pipeline=1")
    with pytest.raises(LayoutError, match="the forward updates buffer 1.num_batches_tracked, which each rank would do"):
        prepare(any_job("shifted_norm"), Layout.parse("replicate=2"))


# Mutations


def test_a_plan_that_is_wrong_is_caught_and_named() -> None:
    proven(any_job("gated", {"style": "colwise_gather"}), "tensor=2")
    difference = first_difference(any_job("gated", {"style": "colwise"}), "tensor=2").first_difference
    assert difference is not None and (difference.kind, difference.name) == ("output", "0.down")
    plan = user_modules.BLOCK_PLAN | {"blocks.*.down": "colwise"}
    wrong = any_job("vit", model=SMALL_VIT | {"tensor_plan": plan})
    found = first_difference(wrong, "tensor=2")
    assert "did not finish: tensor_plan: shapes do not fit in blocks.0.down" in found.describe()


@pytest.mark.parametrize(
    ("name", "layout", "kind", "culprit"),
    [
        ("vit", "tensor=2", "gradient", "head.bias"),
        ("tied_lm", "pipeline=2 micro_batch=2", "gradient", "tokens.weight"),
        ("skip_mlp", "pipeline=2 micro_batch=2", "loss", "loss"),
        ("sequence_first_encoder", "micro_batch=2", "loss", "loss"),
        ("batch_norm", "replicate=2", "output", "blocks.0.norm"),
    ],
)
def test_mutations(name: str, layout: str, kind: str, culprit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: whole weights are not summed over tensor ranks, a tie is not summed over stages, the anatomy
    overlooks a crossing, dropout takes time steps for samples, batch norm is not synchronized."""
    monkeypatch.setattr(module_family, "_ANATOMIES", {})
    module_family.meta_chain.cache_clear()
    monkeypatch.setattr(step, "all_reduce_tensor_grads", lambda engine: None)
    monkeypatch.setattr(step, "all_reduce_tied_grads", lambda engine: None)
    monkeypatch.setattr(anatomy._Tracker, "_crossing_sentence", lambda tracker: "")
    monkeypatch.setattr(parallelize.batch_norm, "apply", lambda chain, axis: None)
    if name == "sequence_first_encoder":
        build = ModuleChain.configure

        def forget(chain: ModuleChain, *args: Any) -> None:
            build(chain, *args)
            chain.state["sample_dims"] = {}

        monkeypatch.setattr(ModuleChain, "configure", forget)
    found = first_difference(any_job(name), layout).first_difference
    module_family.meta_chain.cache_clear()
    assert found is not None and (found.step, found.kind, found.name) == (0, kind, culprit)


# Training


def training_job(folder: Path, name: str, **changes: Any) -> Job:
    """Six steps are more than an epoch of five."""
    settings = {"steps": 6, "checkpoint": {"every": 2}, "validation": {"samples": 16}, "run": {"folder": str(folder)}}
    return any_job(name, **(settings | changes))


def curve(run: RunFolder) -> list[float]:
    records = list(run.metrics())
    assert [record["step"] for record in records] == list(range(1, run.job().steps + 1))
    return [record["loss"] for record in records]


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("tied_lm", "shard=2 zero=3", "pipeline=2 micro_batch=2"), ("batch_norm", "replicate=2", "shard=2 zero=3"),
        ("frozen", "pipeline=2 micro_batch=2", "tensor=2"), ("ema", "pipeline=1", "pipeline=1"),
        ("streamed", "replicate=2", "shard=2 zero=3"), ("temperatures", "shard=2 zero=3", "tensor=2"),
        ("lstm_tagger", "shard=2 zero=3 micro_batch=2", "pipeline=1"),
    ],
)  # fmt: skip
def test_killed_and_resumed_elsewhere(name: str, before: str, after: str, tmp_path: Path) -> None:
    whole = train(training_job(tmp_path / "whole", name), "pipeline=1")
    job = training_job(tmp_path / "run", name)
    with pytest.raises(RunError, match="-9"):
        train(job, before, die_after=5)
    run = train(job, after, resume=True)
    assert curve(run) == pytest.approx(curve(whole), rel=1e-10)
    if name in ("batch_norm", "ema", "lstm_tagger"):
        assert validation(run) == pytest.approx(validation(whole), rel=1e-10)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("tied_lm", "pipeline=2 micro_batch=2"), ("experts", "shard=2 zero=3"), ("temperatures", "shard=2 zero=1")],
)
def test_killed_and_resumed_in_place_is_bitwise(name: str, layout: str, tmp_path: Path) -> None:
    args = {"depth": 2} if name == "temperatures" else {}
    model = {"name": f"python:user_modules:{name}", "args": args}
    whole = train(training_job(tmp_path / "whole", name, model=model), layout)
    job = training_job(tmp_path / "run", name, model=model)
    with pytest.raises(RunError, match="-9"):
        train(job, layout, die_after=5)
    assert curve(train(job, layout, resume=True)) == curve(whole)


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["pipeline=1", "replicate=2"])
def test_a_frozen_teacher_that_the_forward_updates_is_saved(layout: str, tmp_path: Path) -> None:
    whole = train(training_job(tmp_path / "whole", "taught"), layout)
    job = training_job(tmp_path / "run", "taught")
    with pytest.raises(RunError, match="-9"):
        train(job, layout, die_after=5)
    resumed = train(job, layout, resume=True)
    assert curve(resumed) == curve(whole)

    teacher = open_checkpoint(resumed).load(torch.float64).teacher.weight
    initial = job.family.build_reference(job.model, job.seed, torch.float64).teacher.weight
    assert not torch.equal(teacher, initial)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["pipeline=1", "shard=2 zero=3", "replicate=2 micro_batch=2"])
@pytest.mark.parametrize(
    ("held_out", "samples"), [(19, 64), (19, 13), (5, 64)], ids=["all", "some", "fewer_than_a_batch"]
)
def test_validation_does_not_depend_on_the_layout(held_out: int, samples: int, layout: str, tmp_path: Path) -> None:
    """As many samples as the setting says, or all there are; also those that are fewer than a batch."""
    settings = {"steps": 1, "optimizer": {"lr": 0.0}, "run": {"folder": str(tmp_path)}}
    job = any_job("lstm_tagger", {"held_out": held_out}, validation={"samples": samples}, **settings)
    found = validation(train(job, layout))
    module = job.family.build_reference(job.model, job.seed, torch.float64).eval()
    words, tags = (column[: min(held_out, samples)] for column in user_modules.tagged_sentences().columns)
    expected = user_modules.tag_loss_mean(module(words), tags).item()
    assert found == pytest.approx(expected, rel=1e-10)


def test_validation_in_a_pipeline_takes_every_sample(tmp_path: Path) -> None:
    """19 samples in batches of 8: the last 3 are a micro-batch of 2, and copies of one."""
    settings = {"steps": 1, "optimizer": {"lr": 0.0}, "run": {"folder": str(tmp_path / "run")}}
    job = any_job("frozen", {"held_out": 19}, **settings)
    found = validation(train(job, "pipeline=2 micro_batch=2"))
    module = job.family.build_reference(job.model, job.seed, torch.float64).eval()
    x, y = (column[:19] for column in user_modules.vectors().columns)
    assert found == pytest.approx(torch.nn.functional.cross_entropy(module(x.double()), y).item(), rel=1e-10)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["pipeline=1", "shard=2 zero=3"])
def test_fp16_scales_the_loss(layout: str, tmp_path: Path) -> None:
    """The first scale overflows, is halved until it fits, and training goes on."""
    run = train(training_job(tmp_path, "vit", model=SMALL_VIT, precision="fp16"), layout)
    assert "step_skipped" in (run.path / "events.jsonl").read_text()
    norms = [record["grad_norm"] for record in run.metrics()]
    assert not math.isfinite(float(norms[0])) and all(map(math.isfinite, norms[-3:])) and len(set(curve(run))) == 6


@pytest.mark.thin(5)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=1", "shard=2 zero=3"])
def test_an_expert_without_samples_gets_a_zero_gradient(layout: str) -> None:
    """With a batch of 2, at most 2 of 6 experts are used in a step, and others on every rank."""
    proven(any_job("experts", batch={"samples": 2}), layout, steps=4)


def test_flat_and_cached_anatomies() -> None:
    """What the anatomy says of modules whose blocks are a part of a list, or return other tensors."""
    chain: Any = meta_model(any_job("in_place").model)
    assert chain.anatomy.blocks == tuple(f"net.{number}" for number in range(1, 6))
    assert chain.anatomy.altered >= {"head"} and "head" not in chain.anatomy.units
    chain = meta_model(any_job("many_outputs").model)
    assert (chain.anatomy.stream_key, chain.anatomy.outputs) == (1, (None,))
    chain = meta_model(any_job("sequence_first_encoder").model)
    assert chain.anatomy.stream_dim == 1 and set(chain.state["sample_dims"].values()) == {1}
    chain = meta_model(any_job("unused_head").model)
    assert chain.anatomy.without_gradient == {"other.weight", "other.bias"}


def test_a_metric_that_fails_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    """It is computed for the first time after the last step, when all work would be lost."""
    job = training_job(tmp_path / "run", "measured", model={"name": "python:user_modules:measured",
                                                           "args": {"metric": "vector"}})  # fmt: skip
    with pytest.raises(JobError, match="the metric 'errors' cannot be computed: .* must return one number"):
        train(job, "replicate=2")
    assert not list(RunFolder.open(tmp_path / "run").metrics())


def test_trying_a_metric_changes_no_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": {"name": "python:user_modules:measured", "args": {"metric": "scalar"}}}
    tried = train(training_job(tmp_path / "tried", "measured", **settings), "replicate=2")
    monkeypatch.setattr("shardwise.train.loop.try_metrics", lambda *_: None)
    assert curve(train(training_job(tmp_path / "not", "measured", **settings), "replicate=2")) == curve(tried)
