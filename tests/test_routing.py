"""Experts with a capacity, balanced by a bias, chosen by sigmoids; latent attention. Cut in every way."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.gpt import MultiHeadLatentAttention
from shardwise.models.layers import rope_angles
from shardwise.models.moe import MoE, within_capacity
from shardwise.models.registry import family_of
from shardwise.parallel import expert
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import verify

MOE = {"name": "moe", "layers": 2, "width": 24, "heads": 4, "ffn": 40, "vocab": 31, "sequence": 8, "experts": 4,
       "experts_per_token": 2, "expert_ffn": 12, "dense_layers": 1}  # fmt: skip
BIASED = {
    **MOE,
    "scoring_func": "sigmoid",
    "router_bias_update_rate": 0.05,
    "routed_scaling_factor": 2.5,
    "shared_expert_ffn": 8,
}
TIGHT = {**MOE, "capacity_factor": 0.75, "router_aux_loss_coef": 0.1}
LATENT = {**BIASED, "head_dim": 6, "q_lora_rank": 10, "kv_lora_rank": 8, "qk_rope_head_dim": 4}


def with_blocks_for(layout: str, model: dict[str, object]) -> dict[str, object]:
    """Returns the model with as many blocks as a V-shaped pipeline needs."""
    return model | {"layers": 3} if "zbv" in layout else model


def job(model: dict[str, object], samples: int = 8) -> Job:
    return make_job({"precision": "float64", "model": model, "batch": {"samples": samples}})


@pytest.mark.thin(7)
@pytest.mark.parametrize("layout", [
    "shard=2 expert=2 zero=3", "pipeline=2 schedule=zbv", "shard=2 tensor=2 expert=2 recompute=full",
    "context=2 expert=2",
])  # fmt: skip
def test_experts_balanced_by_a_bias(layout):
    (record,) = verify(job(with_blocks_for(layout, BIASED)), [Layout.parse(layout)], steps=3)
    assert record.ok, record.describe()


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["shard=2 tensor=2 expert=2 zero=2", "pipeline=2"])
def test_experts_with_a_capacity(layout):
    (record,) = verify(job(TIGHT), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.thin(6)
@pytest.mark.parametrize("layout", [
    "tensor=4", "shard=2 expert=2 zero=3", "pipeline=2 schedule=zbv", "shard=2 tensor=2 expert=2 recompute=selective",
])  # fmt: skip
def test_latent_attention(layout):
    (record,) = verify(job(with_blocks_for(layout, LATENT)), [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.parametrize(("model", "layout", "said"), [
    (LATENT, "context=2", "latent attention cannot be split"), (TIGHT, "context=2", "model.capacity_factor"),
    ({**LATENT, "heads": 6, "width": 36}, "tensor=4", "does not divide the 6 heads"),
])  # fmt: skip
def test_what_cannot_be_cut_is_told(model, layout, said):
    with pytest.raises(LayoutError, match=said):
        prepare(job(model), Layout.parse(layout))


def test_a_bias_of_each_rank_s_own_is_caught(monkeypatch):
    right = expert.update_expert_bias

    def own(model: Any, chains: Any, world: Any, device: Any) -> None:
        right(model, chains, expert.Axis(1, 0, None), device)

    monkeypatch.setattr("shardwise.step.update_expert_bias", own)
    (record,) = verify(job(BIASED), [Layout.parse("replicate=2")], steps=1)
    assert not record.ok and record.first_difference is not None
    assert (record.first_difference.kind, record.first_difference.name) == ("buffer", "block1.mlp.expert_bias")


def test_a_count_that_recomputation_doubles_is_caught(monkeypatch):
    """On one stage only: of all alike no sign would change."""
    right = MoE.apply_experts

    def twice(self: Any, tokens: Any, weights: Any, chosen: Any, samples: int) -> Any:
        if self.tokens_per_expert is not None and torch.distributed.is_initialized():
            self.tokens_per_expert[0] += 100
        return right(self, tokens, weights, chosen, samples)

    monkeypatch.setattr(MoE, "apply_experts", twice)
    (record,) = verify(job(BIASED), [Layout.parse("pipeline=2")], steps=1)
    assert not record.ok and record.failure is None, record.describe()


def test_room():
    chosen = torch.tensor([[0, 1, 0, 2, 0, 3], [1, 1, 1, 1, 1, 0]])
    kept = within_capacity(chosen, 4, 1.0).view(2, -1)  # two each
    assert kept.tolist() == [[True, True, True, True, False, True], [True, True, False, False, False, True]]
    assert within_capacity(chosen, 4, 4.0).all()


def test_experts_by_hand():
    built = job(TIGHT).model
    layer = MoE(built, None).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for sample in range(2):
        taken = [0] * 4
        for position in range(8):
            token = x[sample, position]
            likely = (layer.router @ token).softmax(0)
            weights, chosen = likely.topk(2)
            for weight, one in zip(weights / weights.sum(), chosen.tolist(), strict=True):
                taken[one] += 1
                if taken[one] <= 3:  # 0.75 x 16 choices / 4 experts
                    hidden = F.silu(layer.bank.gate[one] @ token) * (layer.bank.up[one] @ token)
                    expected[sample, position] += weight * (layer.bank.down[one] @ hidden)
    layer.aux_loss_scale = lambda: torch.zeros((), dtype=torch.float64)
    assert torch.allclose(layer(x), expected, atol=1e-10)


def test_a_bias_moves_towards_those_that_got_less():
    built = job(BIASED).model
    layer = MoE(built, None)
    layer.update_expert_bias(torch.tensor([4.0, 0.0, 2.0, 2.0]))
    assert layer.expert_bias.tolist() == pytest.approx([-0.05, 0.05, 0.0, 0.0])


def test_latent_attention_by_hand():
    built = job(LATENT).model
    attention = MultiHeadLatentAttention(built).double()
    for weight in attention.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    cos, sin = rope_angles(8, 4, 10000.0, x.device)

    def turn(v: torch.Tensor, at: int) -> torch.Tensor:
        a, b = v[:2], v[2:]
        return torch.cat((a * cos[at] - b * sin[at], b * cos[at] + a * sin[at]))

    def norm(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v / (v.square().mean() + 1e-5).sqrt() * weight

    rows = []
    for at in range(8):
        out = []
        q = attention.q_up.weight @ norm(attention.q_down.weight @ x[0, at], attention.q_norm.weight)
        for head in range(4):
            scores, values = [], []
            own = q.view(4, 10)[head]
            for before in range(at + 1):
                down = attention.kv_down.weight @ x[0, before]
                up = (attention.kv_up.weight @ norm(down[:8], attention.kv_norm.weight)).view(4, 12)[head]
                scores.append((own[:6] @ up[:6] + turn(own[6:], at) @ turn(down[8:], before)) / 10**0.5)
                values.append(up[6:])
            out.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        rows.append(attention.out.weight @ torch.cat(out))
    assert torch.allclose(attention(x)[0], torch.stack(rows), atol=1e-9)


def test_deepseek_v3_has_the_size_that_is_published():
    config = make_job({"model": {"name": "deepseek-v3"}, "batch": {"samples": 1}}).model
    with torch.device("meta"):
        chain = family_of(config).build(config, 0)
    size = sum(weight.numel() for _, weight in chain.named_unique_parameters())
    assert size == pytest.approx(671e9, rel=2e-3)
    small = job(LATENT).family.build(job(LATENT).model, 0)
    init_weights(small, 0)
    assert small(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()
