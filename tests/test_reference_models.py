"""Our decoder against transformers' unmodified modules with the same weights: every logit and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import JobError
from shardwise.job import make_job
from shardwise.models import pretrained
from shardwise.verify.command import compare_with_transformers

SIZES = {"layers": 3, "width": 32, "heads": 4, "ffn": 48, "vocab": 61, "sequence": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
GPT2 = {**SIZES, "positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}


@pytest.mark.parametrize("model", [
    {**SIZES, "kv_heads": 2}, {**SIZES, "tied": False, "kv_heads": 1, "rope_theta": 5e5}, {**SIZES, "head_dim": 16},
    GPT2, {**GPT2, "tied": False}, {**SIZES, "qkv_bias": True, "rope_scaling": LLAMA3}, {**SIZES, "qk_norm": True},
    {**SIZES, "name": "moe", "experts": 5}, {**SIZES, "name": "moe", "expert_ffn": 24, "qk_norm": True},
], ids=["llama", "untied", "wide-heads", "gpt2", "gpt2-untied", "qwen2", "qwen3", "mixtral", "qwen3-moe"])  # fmt: skip
def test_logits_and_gradients_are_those_of_transformers(model: dict[str, object]) -> None:
    answer = compare_with_transformers(make_job({"model": model}))
    found = answer.data
    assert answer.ok and found["count"] > 10 and max(found["logits"], found["gradient"]) < 1e-12, found


def test_a_weight_under_a_wrong_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    names = pretrained.FORMATS["llama"].names
    swapped = {"mlp.gate.weight": names["mlp.up.weight"], "mlp.up.weight": names["mlp.gate.weight"]}
    form = replace(pretrained.FORMATS["llama"], names={**names, **swapped})
    monkeypatch.setitem(pretrained.FORMATS, "llama", form)
    found = compare_with_transformers(make_job({"model": {**SIZES, "kv_heads": 2}}))
    assert not found.ok and found.data["logits"] > 1e-3


def test_shapes_that_transformers_does_not_have() -> None:
    for model in ({**SIZES, "bias": True}, {**GPT2, "kv_heads": 2}, {**SIZES, "name": "moe", "shared_expert_ffn": 8}):
        with pytest.raises(JobError, match="no module"):
            compare_with_transformers(make_job({"model": model}))
