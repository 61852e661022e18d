"""The decoder on one device: sizes of the published shapes, causality, grouped queries, ties, options."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.job import DecoderConfig
from shardwise.models.chain import Chain, init_weights
from shardwise.models.gpt import build_gpt
from shardwise.models.layers import parametrize
from shardwise.models.registry import family_of, parse_model
from shardwise.parallel.prepare import forward_flops

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 61, "sequence": 16}


def make(**changes: object) -> Chain:
    model = build_gpt(DecoderConfig(**(SMALL | changes)), 0).double()
    init_weights(model, 0)
    return model


# Parameter counts as published: GPT-2 124M and 1.56B (with its learned positions), Llama 3 8.03B, 70.6B, 405.9B.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800),
    ],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name: str, count: int) -> None:
    config = parse_model({"name": name})
    with torch.device("meta"):
        model = family_of(config).build(config, 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_trillion_and_175b() -> None:
    for name, low, high in (("gpt-1t", 1.0e12, 1.02e12), ("gpt3-175b", 174e9, 176e9)):
        config = parse_model({"name": name})
        with torch.device("meta"):
            model = family_of(config).build(config, 0)
        assert low < sum(parameter.numel() for parameter in model.parameters()) < high


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize(("norm", "activation", "bias"), [("layer", "gelu", True), ("rms", "swiglu", False)])
def test_the_future_does_not_reach_the_past(positions: str, norm: str, activation: str, bias: bool) -> None:
    model = make(positions=positions, norm=norm, activation=activation, bias=bias).eval()
    tokens = torch.randint(0, 61, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    grouped = make(kv_heads=2).eval()
    full = make(kv_heads=4).eval()
    state = grouped.state_dict()
    for i in range(2):
        rows = state[f"block{i}.attention.qkv.weight"].view(2, 4, 8, 32)  # kv head, (q, q, k, v), features, width
        each = [torch.stack((rows[h // 2, h % 2], rows[h // 2, 2], rows[h // 2, 3])) for h in range(4)]
        state[f"block{i}.attention.qkv.weight"] = torch.stack(each).reshape(-1, 32)
    full.load_state_dict(state)
    tokens = torch.randint(0, 61, (2, 16))
    assert torch.allclose(grouped(tokens), full(tokens), atol=1e-12)


def test_rotary_attention_depends_on_distance_alone() -> None:
    from shardwise.models.layers import apply_rope, rope_angles

    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turn = rope_angles(32, 8, 10_000.0, torch.device("cpu"))
    turned_q, turned_k = (apply_rope(one.expand(32, 1, 8), turn)[:, 0] for one in (q, k))
    scores = turned_q @ turned_k.T
    assert torch.allclose(scores[5, 2], scores[25, 22])
    assert not torch.allclose(scores[5, 2], scores[5, 3])


def test_tied_head_shares_its_weight_and_untied_does_not() -> None:
    tied, untied = make(tied=True), make(tied=False)
    assert tied.head.project.weight is tied.embed.tokens.weight
    assert "head.project.weight" not in dict(tied.named_unique_parameters())
    assert untied.head.project.weight is not untied.embed.tokens.weight


def test_loss_is_the_sum_over_targets_that_count() -> None:
    model = make()
    tokens, targets = torch.randint(0, 61, (2, 16)), torch.randint(0, 61, (2, 16))
    targets[0, :5] = -100
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.allclose(model(tokens, targets=targets), expected)


def test_parts_of_a_chain_make_the_chain() -> None:
    model = make()
    tokens = torch.randint(0, 61, (2, 16))
    x = tokens
    for first, last in ((0, 2), (2, 3), (3, 4)):
        x = model.slice(first, last)(x)
    assert torch.equal(x, model(tokens))


def test_cost_counts_products() -> None:
    model = DecoderConfig(**SMALL)
    pieces = forward_flops(model)
    assert len(pieces) == model.layers + 2
    assert pieces[-1] == 2 * 16 * 32 * 61


# muP


def mup_model(width: int, base: int) -> DecoderConfig:
    return DecoderConfig(
        layers=2, width=width, heads=width // 16, ffn=3 * width, vocab=64, sequence=16, mup_base_width=base
    )


def test_mup_moves_hidden_weights_by_the_rate_over_the_widening() -> None:
    """What a weight does to its input is its value times the scale: the first step of Adam moves each by the rate."""
    model = mup_model(128, 32)
    chain = build_gpt(model, 0)
    init_weights(chain, 0)
    before = {name: weight.detach().clone() for name, weight in chain.named_parameters()}
    optimizer = torch.optim.AdamW(chain.parameters(), lr=0.01, eps=1e-30, weight_decay=0.0)
    tokens = torch.arange(64).view(4, 16)
    chain(tokens, ids=torch.arange(4)).logsumexp(-1).sum().backward()
    optimizer.step()
    after = dict(chain.named_parameters())
    moved = (after["block0.mlp.up.weight"].detach() - before["block0.mlp.up.weight"]).abs().median() / 4
    assert float(moved) == pytest.approx(0.01 / 4, rel=1e-3)
    assert float(before["block0.mlp.up.weight"].std() / 4) == pytest.approx(model.init_std / 2, rel=0.05)
    assert float(before["embed.tokens.weight"].std()) == pytest.approx(model.init_std, rel=0.05)


@pytest.mark.parametrize("base", [0, 32])
def test_with_mup_activations_move_alike_at_every_width(base: int) -> None:
    """After some steps of one learning rate, how far logits moved: without muP the more the wider, with it alike."""
    moved = []
    for width in (32, 256):
        chain = build_gpt(mup_model(width, base), 0)
        init_weights(chain, 0)
        optimizer = torch.optim.AdamW(chain.parameters(), lr=0.01)
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
        first = chain(tokens[:, :-1], ids=torch.arange(8)).detach()
        for _ in range(4):
            logits = chain(tokens[:, :-1], ids=torch.arange(8))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        moved.append(float((chain(tokens[:, :-1], ids=torch.arange(8)) - first).square().mean().sqrt()))
    ratio = moved[1] / moved[0]
    assert 0.5 < ratio < 2.0 if base else ratio > 3.0, moved


def test_modules_that_are_parametrized_alike_share_a_class() -> None:
    """The compiler guards on the class: with one of its own, every block would be compiled again."""
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    for layer in layers:
        parametrize(layer, "weight", torch.neg)

    assert type(layers[0]) is type(layers[1])
    assert type(layers[0]) is not torch.nn.Linear
    assert torch.equal(layers[0].weight, -layers[0]._parameters["weight"])
