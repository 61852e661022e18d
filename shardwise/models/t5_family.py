"""T5: an encoder-decoder trained by span corruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from shardwise.console import pluralize
from shardwise.models.config import ModelConfig
from shardwise.models.family import Family, listed_costs

if TYPE_CHECKING:
    from shardwise.models.chain import Chain
    from shardwise.models.objectives import Objective
    from shardwise.models.operator_costs import OperatorCosts


class T5Config(ModelConfig):
    """An encoder, and a decoder that also attends to what the encoder gave; relative positions."""

    description = "a T5"
    targets_are_text = False
    name: str = "t5"
    layers: int = Field(12, ge=1, le=10_000)
    """Blocks of the encoder, and as many of the decoder."""
    width: int = Field(768, ge=1)
    heads: int = Field(12, ge=1)
    head_dim: int = Field(64, ge=1)
    """Features of one head; heads x head_size need not be the width."""
    ffn: int = Field(3072, ge=1)
    """Hidden features of the feed-forward part."""
    vocab: int = Field(32128, ge=2)
    sequence: int = Field(512, ge=1)
    """Tokens that the encoder reads."""
    target_sequence: int = Field(114, ge=1)
    """Tokens that the decoder predicts."""
    activation: Literal["relu", "geglu"] = "relu"
    """Of the feed-forward part."""
    tied: bool = True
    """Whether the head uses the token embedding's weights."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout of embeddings and of what each block adds to the stream."""
    noise_density: float = Field(0.15, gt=0.0, lt=1.0)
    """Share of the text that the decoder is to write."""
    mean_noise_span_length: float = Field(3.0, ge=1.0)
    """Tokens that are left out in a row, in the mean."""
    relative_attention_num_buckets: int = Field(32, ge=4)
    """Distances that attention tells apart: near ones one by one, farther ones in ever wider groups."""
    relative_attention_max_distance: int = Field(128, ge=2)
    """The distance from which on all are one group."""
    norm_eps: float = Field(1e-6, gt=0.0)

    @property
    def length(self) -> int:
        return self.sequence + self.target_sequence

    def noise_counts(self, tokens: int) -> tuple[int, int]:
        """Of so many tokens, how many are left out, in how many runs."""
        noise_tokens = min(tokens - 1, max(1, round(self.noise_density * tokens)))
        return noise_tokens, max(1, min(round(noise_tokens / self.mean_noise_span_length), tokens - noise_tokens))

    @property
    def text_window(self) -> int:
        """The most tokens of which what is left, with a mark for each run and one for the end, fits the encoder."""
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
    def _check_t5(self) -> T5Config:
        noise_tokens, spans = self.noise_counts(self.text_window)
        if self.text_window - noise_tokens + spans + 1 > self.sequence:
            raise ValueError(f"sequence ({self.sequence}) is too short for span corruption; use at least 8")
        if noise_tokens + spans + 1 > self.target_sequence:
            raise ValueError(
                f"target_sequence ({self.target_sequence}) is too short: {noise_tokens} of {self.text_window} tokens are "
                f"masked in {pluralize(spans, 'span')}; set target_sequence = {noise_tokens + spans + 1}"
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

    def build(self, config: T5Config, seed: int) -> Chain:
        from shardwise.models.t5 import build_t5

        return build_t5(config, seed)

    def objective(self, config: T5Config, seed: int) -> Objective:
        from shardwise.models.objectives import SpanCorruption

        return SpanCorruption(config, seed)

    def operator_costs(self, config: T5Config, itemsize: int) -> Callable[..., tuple[OperatorCosts, ...]]:
        from shardwise.models.t5_operators import t5_operators

        return listed_costs(t5_operators, config, itemsize)
