"""The config and family of T5, an encoder-decoder trained by span corruption, and its operator costs, written by hand.

A search should take 2 s, but would need two traces per tensor degree, and tracing T5-11B takes 7.5 s of CPU time.
Parameters and matmul FLOPs agree with the trace (which adds the relative-position tables, 0.3%), but RMSNorm is several
operators in a trace and one fused kernel in a compiled block.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from shardwise.console import pluralize
from shardwise.models.config import ModelConfig
from shardwise.models.family import Family
from shardwise.models.operator_costs import AttentionOp, MatMul, OperatorCosts, merge_costs

if TYPE_CHECKING:
    from shardwise.models.objectives import Objective


class T5Config(ModelConfig):
    """An encoder-decoder with relative position biases."""

    description = "a T5"
    positions: ClassVar[str] = "relative"
    targets_are_text = False
    name: str = "t5"
    layers: int = Field(12, ge=1, le=1000)
    """Number of encoder blocks, and of decoder blocks."""
    width: int = Field(768, ge=1, le=10**6)
    heads: int = Field(12, ge=1, le=10_000)
    head_dim: int = Field(64, ge=1, le=10_000)
    """Features per head; heads x head_dim need not equal width."""
    ffn: int = Field(3072, ge=1, le=10**7)
    """Hidden size of the MLP."""
    vocab: int = Field(32128, ge=2, le=10**7)
    sequence: int = Field(512, ge=1, le=10**7)
    """Sequence length of the encoder in tokens."""
    target_sequence: int = Field(114, ge=1, le=10**7)
    """Sequence length of the decoder in tokens."""
    activation: Literal["relu", "geglu"] = "relu"
    """Activation of the MLP; `geglu` is gated GELU (T5 v1.1)."""
    tied: bool = True
    """Whether the LM head shares the token embedding's weight."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability of the embeddings and of each residual branch."""
    noise_density: float = Field(0.15, gt=0.0, lt=1.0)
    """Fraction of the tokens that span corruption masks."""
    mean_noise_span_length: float = Field(3.0, ge=1.0)
    """Mean length of a masked span in tokens."""
    relative_attention_num_buckets: int = Field(32, ge=4, le=10**6)
    """Number of relative-position buckets; small distances get one bucket each, larger ones share logarithmically
    spaced buckets."""
    relative_attention_max_distance: int = Field(128, ge=2, le=10**9)
    """Distance in tokens from which all positions share the last bucket."""
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
    def reserved_ids(self) -> int:
        return self.noise_counts(self.text_window)[1] + 1

    @model_validator(mode="after")
    def _check_t5(self) -> "T5Config":
        noise_tokens, spans = self.noise_counts(self.text_window)
        if self.text_window - noise_tokens + spans + 1 > self.sequence:
            raise ValueError(f"sequence ({self.sequence}) is too short for span corruption; use at least 8")
        if noise_tokens + spans + 1 > self.target_sequence:
            raise ValueError(
                f"target_sequence ({self.target_sequence}) is too short: {noise_tokens} of {self.text_window} tokens "
                f"are masked in {pluralize(spans, 'span')}; set target_sequence = {noise_tokens + spans + 1}"
            )
        return self

    def _shrunk_values(self) -> dict[str, Any]:
        return {
            "layers": min(self.layers, 3), "heads": min(self.heads, 4), "head_dim": min(self.head_dim, 8),
            "width": min(self.width, 32), "ffn": min(self.ffn, 48), "vocab": min(self.vocab, 128 + self.vocab % 2),
            "sequence": 24, "target_sequence": 8,
        }  # fmt: skip


class T5Family(Family):
    config = T5Config
    builder = "shardwise.models.t5:build_t5"

    def objective(self, config: T5Config, seed: int) -> "Objective":
        from shardwise.models.objectives import SpanCorruption

        return SpanCorruption(config, seed)

    def operator_costs(self, config: T5Config, itemsize: int) -> "Callable[..., tuple[OperatorCosts, ...]]":
        return lru_cache(maxsize=64)(lambda *sizes: tuple(t5_operators(config, itemsize, *sizes)))


def t5_operators(model: T5Config, itemsize: int, samples: int, tensor: int = 1) -> Iterator[OperatorCosts]:
    """Yields the costs of a T5's modules: pre-norm blocks without biases, relative positions inside fused attention.
    Tensor ranks split heads, FFN features and vocabulary, and the positions between those matmuls."""
    encoder_tokens, decoder_tokens = samples * model.sequence, samples * model.target_sequence
    table = model.vocab * model.width // tensor
    stream = (encoder_tokens + decoder_tokens) * model.width * itemsize
    yield OperatorCosts(
        name="embed", parameters=table, output_bytes=stream // tensor, num_ops=2,
        saved_bytes=(encoder_tokens + decoder_tokens) * 8, moved_bytes=2 * stream // tensor,
        all_reduce_bytes=stream / 2,
    )  # fmt: skip
    for side, tokens in (("encoder", encoder_tokens), ("decoder", decoder_tokens)):
        is_decoder = side == "decoder"
        operators = [_attention_costs(model, itemsize, tokens, tokens, samples, tensor, is_decoder)]
        if is_decoder:
            operators.append(_attention_costs(model, itemsize, tokens, encoder_tokens, samples, tensor, False))
        operators.append(_ffn_costs(model, itemsize, tokens, tensor))
        for index in range(model.layers):
            yield merge_costs(f"{side}{index}", operators, tokens * model.width * itemsize // tensor)
    logits = decoder_tokens * model.vocab // tensor
    weights = 0 if model.tied else table
    # The loss casts logits to float32, normalizes them and gathers those of the targets.
    yield OperatorCosts(
        name="head", parameters=weights, output_bytes=4,
        saved_bytes=decoder_tokens * model.width * itemsize + 8 * logits, moved_bytes=logits * (itemsize + 12),
        num_ops=6, products=(MatMul(decoder_tokens, model.width, -(-model.vocab // tensor)),),
        all_reduce_bytes=decoder_tokens * model.width * itemsize / 2,
    )  # fmt: skip


def _attention_costs(
    model: T5Config, itemsize: int, queries: int, keys: int, samples: int, tensor: int, causal: bool
) -> OperatorCosts:
    width, head = model.width, model.head_dim
    attention_width = model.heads * head // tensor
    inputs = MatMul(queries, width, attention_width), MatMul(keys, width, 2 * attention_width)
    products = (*inputs, MatMul(queries, attention_width, width))
    heads = samples * model.heads // tensor
    attention = AttentionOp(heads, queries // samples, keys // samples, head, head, causal)
    weights = 4 * width * attention_width + width
    hidden_numel, qkv_numel = queries * width // tensor, (2 * queries + 2 * keys) * attention_width
    return OperatorCosts(
        name="", parameters=weights, output_bytes=hidden_numel * itemsize,
        saved_bytes=itemsize * (2 * hidden_numel + qkv_numel), moved_bytes=itemsize * (6 * hidden_numel + qkv_numel),
        num_ops=8, products=products, attention=(attention,),
        all_reduce_bytes=itemsize * width * (queries + keys * (keys != queries) / 2),
    )  # fmt: skip


def _ffn_costs(model: T5Config, itemsize: int, tokens: int, tensor: int) -> OperatorCosts:
    gates = 2 if model.activation == "geglu" else 1
    width, ffn = model.width, model.ffn // tensor
    weights = (gates + 1) * width * ffn + width
    hidden_numel, hidden = tokens * width // tensor, tokens * ffn
    return OperatorCosts(
        name="", parameters=weights, output_bytes=hidden_numel * itemsize,
        saved_bytes=itemsize * (2 * hidden_numel + (2 * gates) * hidden),
        moved_bytes=itemsize * (6 * hidden_numel + (1 + 2 * gates) * hidden), num_ops=5 + gates,
        products=(MatMul(tokens, width, gates * ffn), MatMul(tokens, ffn, width)),
        all_reduce_bytes=itemsize * width * tokens,
    )  # fmt: skip
