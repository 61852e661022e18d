"""BERT and T5: against their definitions, and cut in every way against one process."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import JobError, LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.bert_family import BertConfig
from shardwise.models.chain import IGNORE_INDEX, init_weights
from shardwise.models.objectives import MaskedLM, SpanCorruption, _random_partition
from shardwise.models.registry import family_of
from shardwise.models.resnet import BatchNorm
from shardwise.models.t5 import relative_position_bucket
from shardwise.models.t5_family import T5Config
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import verify

BERT = {"name": "bert", "layers": 3, "width": 24, "heads": 4, "ffn": 40, "vocab": 61, "sequence": 16, "dropout": 0.1}
SPANS = {"name": "t5", "layers": 2, "width": 24, "heads": 4, "head_dim": 8, "ffn": 40, "vocab": 61, "sequence": 24,
         "target_sequence": 8, "dropout": 0.1, "activation": "geglu"}  # fmt: skip


def job(model: dict[str, object], samples: int = 8) -> Job:
    return make_job({"precision": "float64", "model": model, "batch": {"samples": samples}})


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", [
    "shard=2 zero=3", "pipeline=2 schedule=zbv", "pipeline=2 tensor=2 recompute=full", "context=2",
    "pipeline=2 shard=2 context=2 context_method=ulysses",
])  # fmt: skip
def test_bert_in_any_layout(layout):
    (record,) = verify(job(BERT), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.thin(10)
@pytest.mark.parametrize("layout", [
    "shard=2 zero=3", "pipeline=2 schedule=zbv", "shard=2 tensor=2 zero=2 recompute=selective",
    "pipeline=3 schedule=interleaved virtual=2", "pipeline=2 shard=2 tensor=2 zero=2",
])  # fmt: skip
def test_t5_in_any_layout(layout):
    (record,) = verify(job(SPANS, 12), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


def test_an_untied_t5_with_relu():
    (record,) = verify(
        job({**SPANS, "layers": 1, "tied": False, "activation": "relu"}), [Layout.parse("pipeline=2 tensor=2")], steps=2
    )
    assert record.ok, record.describe()


@pytest.mark.parametrize(("model", "layout", "said"), [
    (SPANS, "context=2", "a T5 cannot be split along the sequence"),
    ({**SPANS, "heads": 6}, "tensor=4", "tensor=4 does not divide the 6 heads"),
    ({**SPANS, "sequence": 23}, "tensor=2", "the sequence length 31 is not divisible"),
    (SPANS, "shard=2 expert=2", "has no experts"),
])  # fmt: skip
def test_what_cannot_be_cut_is_told(model, layout, said):
    with pytest.raises(LayoutError, match=said):
        prepare(job(model), Layout.parse(layout))


@pytest.mark.parametrize(("model", "said"), [
    ({**SPANS, "target_sequence": 3}, "4 of 26 tokens are masked in 1 span; set target_sequence = 6"),
    ({**BERT, "mask_token_id": 61}, "must be below vocab"),
    ({**BERT, "kv_heads": 2}, "a BERT has learned positions"),
    ({**BERT, "activation": "swiglu"}, "a BERT has learned positions"),
])  # fmt: skip
def test_shapes_that_cannot_be(model, said):
    with pytest.raises(JobError, match=said):
        job(model)


# What samples become


def test_masked_tokens():
    model = job({**BERT, "sequence": 200, "vocab": 50}).model
    assert isinstance(model, BertConfig) and model.max_predictions == 30 and model.resolved_mask_id == 49
    row = np.arange(201) % 49
    made = [MaskedLM(model, 0).transform(row, place) for place in range(300)]
    for tokens, targets in made:
        chosen = targets != IGNORE_INDEX
        assert chosen.sum() == 30
        assert (tokens[~chosen] == row[:200][~chosen]).all() and (targets[chosen] == row[:200][chosen]).all()
        assert tokens.max() <= 49
    hidden = np.concatenate([tokens[targets != IGNORE_INDEX] for tokens, targets in made])
    as_it_was = np.concatenate([(tokens == row[:200])[targets != IGNORE_INDEX] for tokens, targets in made])
    assert abs((hidden == 49).mean() - 0.8) < 0.02 and abs(as_it_was.mean() - 0.1) < 0.02
    again = MaskedLM(model, 0).transform(row, 7)
    assert (again[0] == made[7][0]).all() and (again[1] == made[7][1]).all()


def test_runs_left_out():
    model = make_job({"model": {"name": "t5"}, "batch": {"samples": 1}}).model
    assert isinstance(model, T5Config)
    assert (model.text_window, *model.noise_counts(model.text_window)) == (568, 85, 28)  # as the paper's 512 and 114
    row = np.arange(569) + 1000
    tokens, targets = SpanCorruption(model, 0).transform(row, 3)
    assert len(tokens) == len(targets) == model.length == 626
    marks = [model.vocab - 1 - number for number in range(28)]
    end = model.vocab - 29
    read, wrote = tokens[:512], targets[512:]
    assert (targets[:512] == IGNORE_INDEX).all() and read[-1] == end and wrote[-1] == end
    assert [t for t in read if t in marks] == marks == [t for t in wrote if t in marks]
    text = {int(mark): [] for mark in marks}  # put together again, it is the text
    mark = None
    for token in wrote[:-1]:
        mark = int(token) if token in marks else mark
        if token not in marks:
            text[mark].append(int(token))
    whole = [t for token in read[:-1] for t in (text[int(token)] if token in marks else [int(token)])]
    assert whole == row[:568].tolist()
    assert tokens[512] == end and (tokens[513:] == wrote[:-1]).all()


@pytest.mark.parametrize(("total", "count"), [(1, 1), (5, 5), (85, 28), (7, 1)])
def test_parts_add_up(total, count):
    parts = _random_partition(np.random.default_rng(0), total, count)
    assert len(parts) == count and parts.sum() == total and parts.min() >= 1


# What models are


def parameters(model: dict[str, object]) -> int:
    with torch.device("meta"):
        return sum(
            weight.numel() for _, weight in job(model).family.build(job(model).model, 0).named_unique_parameters()
        )


def test_sizes():
    # BERT-base has 109.5M with its pooler (0.6M) and 30,522 biases of the vocabulary, and here 0.6M of the transform.
    assert parameters({"name": "bert-base"}) == 30522 * 768 + 514 * 768 + 1536 + 12 * 7_087_872 + 590_592 + 1536
    t5 = parameters({"name": "t5"})  # of 222.9M that are known of T5-base; here each block has a table of distances
    assert t5 == 222_903_552 + 22 * 32 * 12


def test_a_bert_looks_both_ways_and_a_t5_decoder_does_not():
    model = job({**BERT, "dropout": 0.0}).model
    chain = family_of(model).build(model, 0).double()
    init_weights(chain, 0)
    tokens = torch.randint(0, 60, (1, 16))
    changed = tokens.clone()
    changed[0, 12] = (tokens[0, 12] + 1) % 60
    assert (chain(tokens) - chain(changed)).abs().amax(-1)[0].min() > 0
    model = job({**SPANS, "dropout": 0.0}).model
    chain = family_of(model).build(model, 0).double()
    init_weights(chain, 0)
    tokens = torch.randint(0, 60, (1, 32))
    changed = tokens.clone()
    changed[0, 28] = (tokens[0, 28] + 1) % 60  # the fifth of the decoder
    moved = (chain(tokens) - chain(changed)).abs().amax(-1)[0]
    assert moved.shape == (8,) and moved[:4].max() == 0 and moved[4:].min() > 0
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % 60
    assert (chain(tokens) - chain(changed)).abs().amax(-1)[0].min() > 0


def test_distances_in_groups():
    ahead = torch.tensor([0, -1, -7, -8, -9, -127, -128, -1000, 1, 7, 8, 127, 500])
    both = relative_position_bucket(ahead, True, 32, 128).tolist()
    assert both == [0, 1, 7, 8, 8, 15, 15, 15, 17, 23, 24, 31, 31]
    assert relative_position_bucket(ahead, False, 32, 128).tolist()[:8] == [0, 1, 7, 8, 9, 31, 31, 31] and both[8] != 0


def test_costs_follow_the_trace():
    for model in (BERT, SPANS):
        built = job({**model, "dropout": 0.0}).model
        chain = family_of(built).build(built, 0)
        counter = FlopCounterMode(display=False)
        init_weights(chain, 0)
        tokens = torch.randint(0, 60, (1, built.length))
        targets = torch.full_like(tokens, IGNORE_INDEX)
        targets[0, -1] = 1
        with counter:
            chain(tokens, targets=targets)
        counted = counter.get_total_flops()
        assert counted == pytest.approx(sum(family_of(built).forward_flops(built)), rel=0.2)


# Images

IMAGES = {"name": "resnet", "depth": 18, "width": 4, "stem": "cifar", "image_size": 8, "num_classes": 5}


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ["replicate=3", "shard=2 zero=1", "replicate=2 shard=2 zero=3"])
def test_resnet_in_any_layout(layout):
    (record,) = verify(job(IMAGES, 12), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


def test_a_bottleneck_with_the_stem_of_imagenet():
    model = {**IMAGES, "depth": 50, "stem": "imagenet", "image_size": 32}
    (record,) = verify(job(model, 24), [Layout.parse("shard=2 zero=3")], steps=1)
    assert record.ok, record.describe()


@pytest.mark.parametrize(("layout", "said"), [
    ("pipeline=2", "supports data parallelism only"), ("tensor=2", "use replicate or shard"),
    ("micro_batch=2", "6 micro-batches"), ("recompute=full", "recompute=none"),
])  # fmt: skip
def test_what_a_batch_norm_does_not_allow(layout, said):
    with pytest.raises(LayoutError, match=said):
        prepare(job(IMAGES, 12), Layout.parse(layout))


def test_sizes_of_resnets():
    # torchvision's: 11,689,512; 25,557,032; 44,549,160
    for depth, size in ((18, 11_689_512), (50, 25_557_032), (101, 44_549_160)):
        assert parameters({"name": "resnet", "depth": depth}) == size


def test_a_resnet_is_that_of_plain_batch_norms():
    chain = job(IMAGES).family.build(job(IMAGES).model, 0).double()
    init_weights(chain, 0)
    norm = next(module for module in chain.modules() if isinstance(module, BatchNorm))
    x = torch.randn(6, 4, 8, 8, dtype=torch.float64)
    plain = torch.nn.BatchNorm2d(4).double()
    for _ in range(3):
        assert torch.allclose(norm(x), plain(x), atol=1e-12)
    assert torch.allclose(norm.running_mean, plain.running_mean) and torch.allclose(norm.running_var, plain.running_var)
    assert torch.allclose(norm.eval()(x), plain.eval()(x), atol=1e-12)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert chain(images).shape == (4, 1, 5)
