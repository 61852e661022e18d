"""The config and family of T5, an encoder-decoder trained by span corruption, and its operator costs, written by hand.

A trace has the same parameters and matmul FLOPs (and the relative-position tables, 0.3%), but moves 3 to 11 times the
bytes: RMSNorm and the bias of attention are many operators there, and parts of fused kernels in a compiled block."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field

from shardwise.console import pluralize
from shardwise.models.config import ModelConfig
from shardwise.models.family import Family
from shardwise.models.operator_costs import AttentionOp, MatMul, OperatorCosts


class T5Config(ModelConfig):
    """An encoder-decoder with relative position biases."""

    description = "a T5"
    positions: ClassVar[str] = "relative"
    norm: ClassVar[str] = "rms"
    bias: ClassVar[bool] = False
    targets_are_text = False
    name: str = "t5"
    layers: int = Field(12, ge=1, le=1000)
    width: int = Field(768, ge=1, le=10**6)
    heads: int = Field(12, ge=1, le=10_000)
    head_dim: int = Field(64, ge=1, le=10_000)
    ffn: int = Field(3072, ge=1, le=10**7)
    vocab: int = Field(32128, ge=2, le=10**7)
    sequence: int = Field(512, ge=1, le=10**7)
    target_sequence: int = Field(114, ge=1, le=10**7)
    activation: Literal["relu", "geglu"] = "relu"
    tied: bool = True
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    noise_density: float = Field(0.15, gt=0.0, lt=1.0)
    mean_noise_span_length: float = Field(3.0, ge=1.0)
    relative_attention_num_buckets: int = Field(32, ge=4, le=10**6)
    relative_attention_max_distance: int = Field(128, ge=2, le=10**9)
    norm_eps: float = Field(1e-6, gt=0.0)

    @property
    def length(self) -> int:
        return self.sequence + self.target_sequence

    def noise_counts(self, tokens: int) -> tuple[int, int]:
        """Returns how many of `tokens` tokens are masked, and in how many spans."""
        noise_tokens = min(tokens - 1, max(1, round(self.noise_density * tokens)))
        return noise_tokens, max(1, min(round(noise_tokens / self.mean_noise_span_length), tokens - noise_tokens))

    @property
    def text_window(self) -> int:
        """Most tokens whose unmasked part fits the encoder, with one sentinel per span and an end token."""
        tokens = self.sequence
        while True:
            noise_tokens, spans = self.noise_counts(tokens + 1)
            if tokens + 1 - noise_tokens + spans + 1 > self.sequence:
                return tokens
            tokens += 1

    @property
    def reserved_ids(self) -> int:  # type: ignore[override]
        return self.noise_counts(self.text_window)[1] + 1

    def model_post_init(self, context: Any) -> None:
        noise_tokens, spans = self.noise_counts(self.text_window)
        if self.text_window - noise_tokens + spans + 1 > self.sequence:
            raise ValueError(f"sequence ({self.sequence}) is too short for span corruption; use at least 8")
        if noise_tokens + spans + 1 > self.target_sequence:
            masked = f"{noise_tokens} of {self.text_window} tokens are masked in {pluralize(spans, 'span')}"
            remedy = f"set target_sequence = {noise_tokens + spans + 1}"
            raise ValueError(f"target_sequence is too short: {masked}; {remedy}")

    def _shrunk_values(self) -> dict[str, Any]:
        return {"layers": min(self.layers, 3), "heads": min(self.heads, 4), "head_dim": min(self.head_dim, 8),
                "width": min(self.width, 32), "ffn": min(self.ffn, 48), "vocab": min(self.vocab, 128 + self.vocab % 2),
                "sequence": 24, "target_sequence": 8}  # fmt: skip


class T5Family(Family):
    config = T5Config
    builder = "shardwise.models.t5:build_t5"
    objective_class = "shardwise.models.objectives:SpanCorruption"

    def operator_costs(self, config: T5Config, itemsize: int) -> Callable[..., tuple[OperatorCosts, ...]]:
        return lru_cache(maxsize=64)(lambda *sizes: tuple(t5_operators(config, itemsize, *sizes)))


def t5_operators(model: T5Config, itemsize: int, samples: int, tensor: int = 1) -> Iterator[OperatorCosts]:
    """Yields the costs of a T5's modules: pre-norm blocks without biases, relative positions inside fused attention.
    Tensor ranks split heads, FFN features and vocabulary, and the positions between those matmuls."""
    width, inner, ffn = model.width, model.heads * model.head_dim // tensor, model.ffn // tensor
    encoder, decoder = samples * model.sequence, samples * model.target_sequence  # tokens
    table, stream = model.vocab * width // tensor, (encoder + decoder) * width * itemsize
    yield OperatorCosts(name="embed", parameters=table, output_bytes=stream // tensor, num_ops=2,
                        saved_bytes=(encoder + decoder) * 8, moved_bytes=2 * stream // tensor,
                        all_reduce_bytes=stream / 2)  # fmt: skip
    gates = 2 if model.activation == "geglu" else 1
    attentions = {"encoder": [(encoder, False)], "decoder": [(decoder, True), (encoder, False)]}  # keys, causal
    for side, attended in attentions.items():
        tokens = encoder if side == "encoder" else decoder
        hidden, up, branches = tokens * width // tensor, tokens * ffn, len(attended) + 1
        qkv = sum((2 * tokens + 2 * keys) * inner for keys, _ in attended)
        products = [
            product for keys, _ in attended
            for product in (MatMul(tokens, width, inner), MatMul(keys, width, 2 * inner), MatMul(tokens, inner, width))
        ]  # fmt: skip
        heads, sizes = samples * model.heads // tensor, (model.head_dim, model.head_dim)
        scores = [AttentionOp(heads, tokens // samples, keys // samples, *sizes, causal) for keys, causal in attended]
        gathered = sum(tokens + keys * (keys != tokens) / 2 for keys, _ in attended) + tokens
        block = OperatorCosts(name=side, parameters=(4 * len(attended) * inner + (gates + 1) * ffn + branches) * width,
                              output_bytes=tokens * width * itemsize // tensor, num_ops=8 * len(attended) + 5 + gates,
                              saved_bytes=itemsize * (2 * branches * hidden + qkv + 2 * gates * up),
                              moved_bytes=itemsize * (6 * branches * hidden + qkv + (1 + 2 * gates) * up),
                              products=(*products, MatMul(tokens, width, gates * ffn), MatMul(tokens, ffn, width)),
                              attention=tuple(scores), all_reduce_bytes=itemsize * width * gathered)  # fmt: skip
        yield from (replace(block, name=f"{side}{index}") for index in range(model.layers))
    logits = decoder * model.vocab // tensor
    # The loss casts logits to float32, normalizes them and gathers those of the targets.
    yield OperatorCosts(name="head", parameters=0 if model.tied else table, output_bytes=4, num_ops=6,
                        saved_bytes=decoder * width * itemsize + 8 * logits, moved_bytes=logits * (itemsize + 12),
                        products=(MatMul(decoder, width, -(-model.vocab // tensor)),),
                        all_reduce_bytes=decoder * width * itemsize / 2)  # fmt: skip
