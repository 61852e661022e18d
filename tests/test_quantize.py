"""Frozen weights in 8 or 4 bits: levels, shards that have the values of the whole, layouts, bytes, what is merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.world import run_world
from shardwise.errors import JobError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models import quantize
from shardwise.models.quantize import BLOCK, NF4_LEVELS, decode, drop_weight, encode_blocks, round_weight, store_weight
from shardwise.parallel import parallelize as building
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import make_stream, verify

MODEL = {"layers": 2, "width": 96, "heads": 6, "kv_heads": 3, "ffn": 200, "vocab": 61, "tied": False}
HF = {"name": "hf:llama", "sequence": 12, "args": {
    "vocab_size": 61, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 6,
}}  # fmt: skip


def lora_job(kind: str, model: dict[str, Any] = MODEL) -> Job:
    lora = {"rank": 3, "init_std": 0.1, "quantize": kind}
    return make_job({
        "precision": "float64", "model": {"sequence": 12, **model, "lora": lora}, "batch": {"samples": 4},
        "data": {"source": "synthetic"}, "run": {"device": "cpu"},
    })  # fmt: skip


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.5 / 127), ("nf4", 0.16)])
def test_values_are_rounded_to_the_nearest_level_once(kind: str, worst: float) -> None:
    weight = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    weight[2, 64:128] = 0.0
    rounded = round_weight(weight, kind)
    for first in (0, 64, 128):
        block, expected = rounded[:, first : first + BLOCK], weight[:, first : first + BLOCK]
        largest = expected.abs().amax(1, keepdim=True)
        assert ((block - expected).abs() <= worst * largest * (1 + 1e-6)).all()
        assert (block.abs().amax(1, keepdim=True) == largest).all()
    assert (round_weight(rounded, kind) == rounded).all()
    levels = torch.tensor(NF4_LEVELS) if kind == "nf4" else torch.arange(-127, 128) / 127
    relative = weight[0, :64] / weight[0, :64].abs().max()
    nearest = levels[(relative.unsqueeze(1) - levels).abs().argmin(1)]
    assert torch.allclose(rounded[0, :64] / weight[0, :64].abs().max(), nearest, atol=1e-6)


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """Appendix E of the paper: eight quantiles of each side between 1/2 and an offset of 0.9677083, made symmetric."""
    offset = 0.9677083
    normal = torch.distributions.Normal(0.0, 1.0)
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat((negative, torch.zeros(1), positive.flip(0))) / positive.max()
    assert torch.allclose(levels.float(), torch.tensor(NF4_LEVELS), atol=2e-6)


@given(st.sampled_from(["int8", "nf4"]), st.integers(0, 150), st.integers(1, 90))
def test_a_shard_has_the_values_of_its_part(kind: str, column: int, columns: int) -> None:
    weight = torch.randn(3, 240, generator=torch.Generator().manual_seed(1))
    layer, first = torch.nn.Linear(columns, 3, bias=False, device="meta"), column // BLOCK * BLOCK
    drop_weight(layer, kind, column % BLOCK)
    layer.to_empty(device="cpu")
    last = min(240, -(-(column + columns) // BLOCK) * BLOCK)
    store_weight(layer, round_weight(weight, kind)[:, first:last])
    x = torch.eye(columns)
    assert (layer(x) == round_weight(weight, kind)[:, column : column + columns].T).all()
    x.requires_grad_()
    (layer(x) * torch.arange(3.0)).sum().backward()
    expected = torch.arange(3.0) @ round_weight(weight, kind)[:, column : column + columns]
    assert torch.allclose(x.grad, expected.expand_as(x), atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.thin(by_kind=True)  # of each kind of layout one
@pytest.mark.parametrize(("layout", "name"), [
    ("replicate=2", "nf4"), ("shard=2 zero=3", "nf4"), ("tensor=2", "nf4"), ("tensor=3", "nf4"),
    ("context=2 pipeline=2", "nf4"), ("tensor=3", "int8"),
    ("shard=2 zero=3", "llama"), ("tensor=2", "llama"), ("pipeline=2", "llama"),
])  # fmt: skip
def test_every_layout_equals_one_process(layout: str, name: str) -> None:
    """`llama`: a module of transformers, in nf4."""
    if name == "llama":
        pytest.importorskip("transformers")
        job = lora_job("nf4", HF)
    else:
        job = lora_job(name)
    (record,) = verify(job, [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


def test_blocks_that_begin_with_the_shard_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BLOCK", 1)  # every shard then begins a block
    (record,) = verify(lora_job("nf4"), [Layout.parse("tensor=3")], steps=1)
    assert not record.ok


def _held(job: Job) -> tuple[float, bool, float, float]:
    """Returns a frozen layer's bytes per value, whether the weight is there too, and both losses."""
    engine = parallelize(prepare(job, Layout.parse("micro_batch=4")), torch.device("cpu"))
    layer: Any = engine.chains[0].get_submodule("block0.mlp.up")
    stored = (layer.weight_codes.nbytes + layer.weight_scales.nbytes) / (96 * 200)
    samples = make_stream(job).read(torch.arange(4).numpy())
    loss = float(engine.evaluate(samples)) / int(samples.num_targets)
    reference = job.family.build_reference(job.model, job.seed, torch.float64)
    logits = reference(samples.tokens, ids=samples.ids)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples.targets.flatten())
    has_weight = any(name == "block0.mlp.up.weight" for name, _ in engine.chains[0].named_parameters())
    return stored, has_weight, loss, float(expected.detach())


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.6), ("int8", 1.1)])
def test_frozen_weights_take_few_bytes_and_count_as_rounded(kind: str, most: float) -> None:
    stored, whole, loss, expected = run_world(_held, 1, lora_job(kind))[0]
    assert stored < most and not whole
    assert loss == pytest.approx(expected, rel=1e-12)


def test_codes_are_decoded_as_encoded() -> None:
    weight = torch.randn(4, 70, generator=torch.Generator().manual_seed(2))
    levels = torch.tensor(NF4_LEVELS)
    codes, scales = encode_blocks(weight, levels, BLOCK)
    low, high = codes[:, ::2], codes[:, 1::2]
    assert (decode(low | high << 4, scales, levels, 70) == decode(codes, scales, levels, 70)).all()
    assert quantize.round_weight(weight, "nf4").shape == weight.shape


def test_another_name_is_a_sentence() -> None:
    with pytest.raises(JobError, match="model.lora.quantize"):
        lora_job("fp4")
