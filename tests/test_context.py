"""Sequences cut over ranks: rings and exchanged heads, beside every other axis."""

import math

import pytest
import torch

from shardwise.comm.world import run_world
from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import reset
from shardwise.models.gpt import gpt
from shardwise.models.parts import attend
from shardwise.parallel import context
from shardwise.parallel.mesh import Axis
from shardwise.parallel.parallelize import check
from shardwise.verify.parity import verify

LLAMA = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 31, "sequence": 24, "dropout": 0.1}
GPT2 = {"layers": 2, "width": 24, "heads": 4, "ffn": 48, "vocab": 31, "sequence": 24, "dropout": 0.1, "norm": "layer",
        "positions": "learned", "activation": "gelu", "bias": True}  # fmt: skip
MOE = {**LLAMA, "name": "moe", "experts": 4, "expert_ffn": 20, "balance": 0.1, "z_loss": 0.01, "dense_layers": 1}


def job(model: dict[str, object], **more: object) -> Job:
    return make_job({"precision": "float64", "model": model, "batch": {"samples": 8}, **more})


@pytest.mark.parametrize("layout", [
    "context=3", "context=4 context_by=heads", "shard=2 context=2 zero=3", "context=2 recompute=selective",
    "pipeline=2 context=2 schedule=zbv recompute=full",
    "pipeline=2 context=2 tensor=2 schedule=interleaved", "replicate=2 shard=2 context=2 zero=3",
])  # fmt: skip
def test_a_cut_sequence_computes_what_one_process_does(layout):
    (record,) = verify(job(LLAMA), [Layout.parse(layout)], steps=2)
    assert record.ok, record.sentence()


@pytest.mark.parametrize("layout", ["context=3", "context=2 tensor=2 context_by=heads", "pipeline=2 context=2"])
def test_learned_positions_and_dropout_lie_where_they_should(layout):
    (record,) = verify(job(GPT2), [Layout.parse(layout)], steps=2)
    assert record.ok, record.sentence()


@pytest.mark.parametrize("layout", [
    "context=4 expert=2", "shard=2 context=2 expert=4", "shard=2 context=2 tensor=2 expert=4 zero=2",
    "pipeline=2 context=2 tensor=2 expert=2 schedule=zbv",
])  # fmt: skip
def test_experts_beside_a_cut_sequence(layout):
    (record,) = verify(job(MOE), [Layout.parse(layout)], steps=2)
    assert record.ok, record.sentence()


@pytest.mark.parametrize(("model", "layout"), [
    (LLAMA, "context=2"), (LLAMA, "context=2 tensor=2 context_by=heads"), (LLAMA, "pipeline=2 context=2 schedule=zbv"),
    (LLAMA, "shard=2 tensor=2 zero=3 recompute=full"), (GPT2, "context=3 recompute=selective"),
    (MOE | {"q_rank": 12, "kv_rank": 8, "rope_size": 4}, "pipeline=2 tensor=2"),
])  # fmt: skip
def test_documents_do_not_see_one_another(model, layout):
    (record,) = verify(job(model | {"document_end": 3}), [Layout.parse(layout)], steps=2)
    assert record.ok, record.sentence()


def test_a_document_is_read_as_if_it_stood_alone():
    shape = job({**LLAMA, "document_end": 3, "dropout": 0.0}).built()
    model = gpt(shape, 0).double()
    reset(model, 0)
    tokens = torch.tensor([[5, 9, 3, 7, 3, 3, 11, 2, 8]])
    ids = torch.zeros(1, dtype=torch.int64)
    whole = context.Samples(tokens, tokens, ids).apart(3)
    assert whole.documents.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]
    found = model(tokens, **whole.batch)
    for first, last in ((0, 3), (3, 5), (5, 6), (6, 9)):
        assert torch.allclose(found[:, first:last], model(tokens[:, first:last], ids=ids), rtol=1e-10)
    assert not torch.allclose(found[:, 6:], model(tokens, ids=ids)[:, 6:], rtol=1e-3)


@pytest.mark.parametrize("way", ["ring", "heads"])
def test_documents_that_are_seen_after_all_are_caught(way, monkeypatch):
    """Planted: a rank takes the documents of its own positions for those of the keys that come round, or of none."""
    if way == "ring":
        right = context.strangers
        monkeypatch.setattr(context, "strangers", lambda documents, axis, turn, *rest: right(documents, axis, 0, *rest))
    else:
        monkeypatch.setattr(context, "attend", lambda q, k, v, causal, documents: attend(q, k, v, causal))
    (record,) = verify(job(LLAMA | {"document_end": 3}), [Layout.parse(f"context=2 context_by={way}")], steps=2)
    assert not record.ok and record.problem is None, record.sentence()


@pytest.mark.parametrize(("model", "layout", "said"), [
    (LLAMA, "context=5", "a sequence of 24 does not divide by 10; the nearest that does: 20"),
    (LLAMA, "context=4 tensor=4", "a sequence of 24 does not divide by 16"),
    (LLAMA, "context=3 context_by=heads", "use context_by=ring"),
    (MOE, "context=2 expert=4", "1 x 2 x 1 cannot be cut so"),
])  # fmt: skip
def test_what_cannot_be_cut_is_told_before_the_run(model, layout, said):
    with pytest.raises(LayoutError, match=said):
        check(job(model), Layout.parse(layout))


def test_a_layout_names_its_way_of_attending():
    assert str(Layout.parse("context=2 context_by=heads")) == "context=2 context_by=heads"
    with pytest.raises(LayoutError, match="context_by=head: did you mean 'heads'"):
        Layout.parse("context=2 context_by=head")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_each_rank_has_as_much_to_do(ranks):
    held = [context.positions(60, Axis(ranks, rank, object()), "ring") for rank in range(ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(60))
    work = [int((where + 1).sum()) for where in held]
    assert max(work) == min(work)


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_attention_agree_with_the_definition(causal):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(4))
    plain, flash = context.Plain(), context.OnCPU()
    out, total = plain.forward(q, k, v, causal)
    for one, other in zip((out, total), flash.forward(q, k, v, causal), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    found, expected = (kernel.backward(grad, q, k, v, out, total, causal) for kernel in (plain, flash))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def _attend(kind: str) -> list[torch.Tensor]:
    import torch.distributed as dist

    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    torch.manual_seed(0)
    q = torch.randn(2, 6, 24, 8)
    k, v = torch.randn(2, 3, 24, 8), torch.randn(2, 3, 24, 8)
    where = context.positions(24, axis, kind)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attend(*whole, True)
    expected.square().sum().backward()
    own = [x[:, :, where].clone().requires_grad_() for x in (q, k, v)]
    found = (context.Ring(axis) if kind == "ring" else context.Heads(axis))(*own, True)
    found.square().sum().backward()
    pairs = [(found, expected[:, :, where]), *((a.grad, b.grad[:, :, where]) for a, b in zip(own, whole, strict=True))]
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("kind", ["ring", "heads"])
def test_attention_itself_in_float32(kind):
    for errors in run_world(_attend, 3, kind):
        assert max(errors) < 1e-4 and not any(math.isnan(error) for error in errors)
