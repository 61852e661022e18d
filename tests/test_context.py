"""Sequences cut over ranks: rings and exchanged heads, beside every other axis."""

import math

import pytest
import torch

from shardwise.comm.collectives import Axis
from shardwise.comm.world import run_world
from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.gpt import build_gpt
from shardwise.models.layers import sdpa
from shardwise.parallel import context
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import verify

LLAMA = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 31, "sequence": 24, "dropout": 0.1}
GPT2 = {"layers": 2, "width": 24, "heads": 4, "ffn": 48, "vocab": 31, "sequence": 24, "dropout": 0.1, "norm": "layer",
        "positions": "learned", "activation": "gelu", "bias": True}  # fmt: skip
MOE = {
    **LLAMA,
    "name": "moe",
    "experts": 4,
    "expert_ffn": 20,
    "router_aux_loss_coef": 0.1,
    "router_z_loss_coef": 0.01,
    "dense_layers": 1,
}
LATENT = {**MOE, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4}


def with_blocks_for(layout: str, model: dict[str, object]) -> dict[str, object]:
    """Returns the model with as many blocks as the stages of a pipeline need."""
    return model | {"layers": 4} if "pipeline" in layout else model


def job(model: dict[str, object], **more: object) -> Job:
    return make_job({"precision": "float64", "model": model, "batch": {"samples": 8}, **more})


@pytest.mark.thin(16)
@pytest.mark.parametrize("layout", [
    "context=3", "context=4 context_method=ulysses", "shard=2 context=2 zero=3", "context=2 recompute=selective",
    "pipeline=2 context=2 schedule=zbv recompute=full",
    "pipeline=2 context=2 tensor=2 schedule=interleaved", "replicate=2 shard=2 context=2 zero=3",
])  # fmt: skip
def test_a_cut_sequence_computes_what_one_process_does(layout):
    (record,) = verify(job(with_blocks_for(layout, LLAMA)), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["context=3", "context=2 tensor=2 context_method=ulysses", "pipeline=2 context=2"])
def test_learned_positions_and_dropout_lie_where_they_should(layout):
    (record,) = verify(job(GPT2), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.thin(16)
@pytest.mark.parametrize("layout", [
    "context=4 expert=2", "shard=2 context=2 expert=4", "shard=2 context=2 tensor=2 expert=4 zero=2",
    "pipeline=2 context=2 tensor=2 expert=2 schedule=zbv",
])  # fmt: skip
def test_experts_beside_a_cut_sequence(layout):
    (record,) = verify(job(with_blocks_for(layout, MOE)), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.thin(8)
@pytest.mark.parametrize(("layout", "name"), [
    ("context=2", "LLAMA"), ("context=2 tensor=2 context_method=ulysses", "LLAMA"),
    ("pipeline=2 context=2 schedule=zbv", "LLAMA"), ("shard=2 tensor=2 zero=3 recompute=full", "LLAMA"),
    ("context=3 recompute=selective", "GPT2"), ("pipeline=2 tensor=2", "LATENT"),
])  # fmt: skip
def test_documents_do_not_see_one_another(layout, name):
    model = with_blocks_for(layout, globals()[name])
    (record,) = verify(job(model | {"eod_token_id": 3}), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


def test_a_document_is_read_as_if_it_stood_alone():
    shape = job({**LLAMA, "eod_token_id": 3, "dropout": 0.0}).model
    model = build_gpt(shape, 0).double()
    init_weights(model, 0)
    tokens = torch.tensor([[5, 9, 3, 7, 3, 3, 11, 2, 8]])
    ids = torch.zeros(1, dtype=torch.int64)
    whole = context.Samples(tokens, tokens, ids).with_document_ids(3)
    assert whole.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]
    found = model(tokens, **whole.forward_kwargs)
    for first, last in ((0, 3), (3, 5), (5, 6), (6, 9)):
        assert torch.allclose(found[:, first:last], model(tokens[:, first:last], ids=ids), rtol=1e-10)
    assert not torch.allclose(found[:, 6:], model(tokens, ids=ids)[:, 6:], rtol=1e-3)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_documents_that_are_seen_after_all_are_caught(way, monkeypatch):
    """Planted: a rank takes the documents of its own positions for those of the keys that come round, or of none."""
    if way == "ring":
        right = context.other_document_mask
        monkeypatch.setattr(
            context,
            "other_document_mask",
            lambda document_ids, axis, ring_step, *rest: right(document_ids, axis, 0, *rest),
        )
    else:
        monkeypatch.setattr(context, "sdpa", lambda q, k, v, causal, document_ids: sdpa(q, k, v, causal))
    (record,) = verify(job(LLAMA | {"eod_token_id": 3}), [Layout.parse(f"context=2 context_method={way}")], steps=2)
    assert not record.ok and record.failure is None, record.describe()


@pytest.mark.parametrize(("model", "layout", "said"), [
    (LLAMA, "context=5", "the sequence length 24 is not divisible by 10; the nearest valid length is 20"),
    (LLAMA, "context=4 tensor=4", "the sequence length 24 is not divisible by 16"),
    (LLAMA, "context=3 context_method=ulysses", "use context_method=ring"),
    (MOE, "context=2 expert=4", "tensor is 1 x 2 x 1"),
])  # fmt: skip
def test_what_cannot_be_cut_is_told_before_the_run(model, layout, said):
    with pytest.raises(LayoutError, match=said):
        prepare(job(model), Layout.parse(layout))


def test_a_layout_names_its_way_of_attending():
    assert str(Layout.parse("context=2 context_method=ulysses")) == "context=2 context_method=ulysses"
    with pytest.raises(LayoutError, match="context_method=ulyses: did you mean 'ulysses'"):
        Layout.parse("context=2 context_method=ulyses")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_each_rank_has_as_much_to_do(ranks):
    held = [context.local_positions(60, Axis(ranks, rank, object()), "ring") for rank in range(ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(60))
    work = [int((where + 1).sum()) for where in held]
    assert max(work) == min(work)


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_attention_agree_with_the_definition(causal):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(4))
    nothing_hidden = torch.zeros(2, 8, 8, dtype=torch.bool)  # with a mask, no flash kernel is used
    out, total = context.attend(q, k, v, causal, nothing_hidden)
    for one, other in zip((out, total), context.attend(q, k, v, causal, None), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    masks = nothing_hidden, None
    found, expected = (context.attend_backward(grad, q, k, v, out, total, causal, hidden) for hidden in masks)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def _attend(kind: str) -> list[torch.Tensor]:
    import torch.distributed as dist

    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    torch.manual_seed(0)
    q = torch.randn(2, 6, 24, 8)
    k, v = torch.randn(2, 3, 24, 8), torch.randn(2, 3, 24, 8)
    where = context.local_positions(24, axis, kind)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = sdpa(*whole, True)
    expected.square().sum().backward()
    own = [x[:, :, where].clone().requires_grad_() for x in (q, k, v)]
    found = (context.ring_attention if kind == "ring" else context.ulysses_attention)(axis, *own, True)
    found.square().sum().backward()
    pairs = [(found, expected[:, :, where]), *((a.grad, b.grad[:, :, where]) for a, b in zip(own, whole, strict=True))]
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_attention_itself_in_float32(kind):
    for errors in run_world(_attend, 3, kind):
        assert max(errors) < 1e-4 and not any(math.isnan(error) for error in errors)
