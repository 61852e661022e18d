"""Evaluation and generation: scores in any layout equal those of one process, and lm-eval's own numbers."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import JobError
from shardwise.job import make_job
from shardwise.models.chain import init_weights
from shardwise.models.kv_cache import KeyValueCache
from shardwise.train.generate import LocalDecoder, Sampling, generate_texts

TINY = {"layers": 2, "width": 32, "heads": 4, "vocab": 256, "sequence": 24}


def tiny_decoder(**model: Any) -> LocalDecoder:
    job = make_job({"model": {"name": "gpt", **TINY, **model}})
    with torch.device("cpu"):
        chain = job.family.build(job.model, 0).double()
    init_weights(chain, 0)
    with torch.no_grad():
        for weight in chain.parameters():
            weight.mul_(3.0)
    return LocalDecoder(chain, job.model)


@pytest.mark.parametrize("model", [{}, {"positions": "learned", "norm": "layer"}, {"kv_heads": 2, "qk_norm": True}])
def test_key_value_cache_gives_the_same_logits(model: dict[str, Any]) -> None:
    decoder, tokens = tiny_decoder(**model), torch.arange(20).reshape(2, 10) * 7
    with torch.no_grad():
        expected = decoder.logits(tokens)
        cache = KeyValueCache(decoder.model, decoder.config)
        found = [cache(tokens[:, :4]), *(cache(tokens[:, n : n + 1]) for n in range(4, 10))]
        cache.close()
        assert torch.equal(decoder.logits(tokens), expected)
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 3:], rtol=0, atol=1e-12)


def test_generation_is_independent_of_batching_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tokenizer = tiny_decoder(), ByteTokenizer()
    prompts = [list(b"one"), list(b"two"), list(b"longer one")]
    sampling = Sampling(12, temperature=0.9, top_k=20, top_p=0.9)
    together = generate_texts(decoder, tokenizer, prompts, sampling)
    assert together[0] == generate_texts(decoder, tokenizer, prompts[:1], sampling)[0]
    monkeypatch.setattr(LocalDecoder, "open_cache", lambda self, tokens: None)
    assert generate_texts(decoder, tokenizer, prompts, sampling) == together


def test_sampling_keeps_top_k_and_top_p() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 2.0, 1.0]), torch.Generator().manual_seed(0)
    assert {Sampling(1, 1.0, top_k=2).choose(logits, generator) for _ in range(200)} == {1, 2}
    assert {Sampling(1, 1.0, top_p=0.6).choose(logits, generator) for _ in range(200)} == {1}
    assert Sampling(1).choose(logits, generator) == 1
    with pytest.raises(JobError, match="top-p above 0"):
        Sampling(1, top_p=0.0)


def test_text_ends_at_stop_strings_and_at_the_end_token() -> None:
    class Scripted:
        length, device = 100, torch.device("cpu")

        def open_cache(self, tokens: int) -> None:
            return None

        def last_logits(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([b"abc\ndef\0ghi"[rows.shape[1] - 1]]), 256)

    def text(**options: Any) -> str:
        return generate_texts(Scripted(), ByteTokenizer(), [[0]], Sampling(11, **options))[0]

    assert text() == "abc\ndefghi"
    assert text(stop=("\n", "c")) == "ab"
    assert text(end_token=0) == "abc\ndef"
