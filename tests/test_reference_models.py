"""Our decoder against transformers' unmodified modules with the same weights: every logit and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers_reference import reference_decoder, reference_weights

from shardwise.adapters.function_modes import KeepFloat64
from shardwise.job import make_job
from shardwise.models.chain import init_weights

SIZES = {"layers": 3, "width": 32, "heads": 4, "ffn": 48, "vocab": 61, "sequence": 16}
GPT2 = {**SIZES, "positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}


@pytest.mark.parametrize("model", [
    {**SIZES, "kv_heads": 2}, {**SIZES, "tied": False, "kv_heads": 1, "rope_theta": 5e5}, {**SIZES, "head_dim": 16},
    GPT2, {**GPT2, "tied": False},
], ids=["llama", "llama-untied", "llama-wide-heads", "gpt2", "gpt2-untied"])  # fmt: skip
def test_logits_and_gradients_are_those_of_transformers(model: dict[str, object]) -> None:
    job = make_job({"precision": "float64", "model": model})
    ours = job.family.build(job.model, 0).double()
    init_weights(ours, 0)
    with torch.no_grad():
        for weight in ours.parameters():  # biases and norms too, which start at 0 and 1
            weight.add_(
                0.05 * torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(1))
            )
    reference = reference_decoder(job.require_decoder())
    assert reference is not None
    weights = {name: weight.detach() for name, weight in ours.named_parameters(remove_duplicate=False)}
    theirs = reference_weights(job.require_decoder(), weights)
    missing, unexpected = reference.load_state_dict(theirs, strict=False)
    assert not unexpected and not [name for name in missing if "lm_head" not in name and "inv_freq" not in name]
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))
    logits = ours(tokens, ids=torch.arange(2))
    with KeepFloat64():
        expected = reference(tokens).logits
    assert (logits - expected).norm() <= 1e-10 * expected.norm()
    for found in (logits, expected):
        F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    named = dict(reference.named_parameters())
    for name, gradient in reference_weights(job.require_decoder(), gradients).items():
        assert (gradient - named[name].grad).norm() <= 1e-10 * named[name].grad.norm().clamp(min=1e-6), name


def test_shapes_that_transformers_does_not_have() -> None:
    for model in ({**SIZES, "bias": True}, {**GPT2, "kv_heads": 2}, {**SIZES, "name": "moe"}):
        job = make_job({"model": model})
        assert reference_decoder(job.require_decoder()) is None
