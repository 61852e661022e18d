"""The config and family of T5: an encoder-decoder trained by span corruption."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from shardwise.console import pluralize
from shardwise.models.config import ModelConfig
from shardwise.models.family import Family

if TYPE_CHECKING:
    from shardwise.models.chain import Chain
    from shardwise.models.objectives import Objective
    from shardwise.models.operator_costs import OperatorCosts


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

    def build(self, config: T5Config, seed: int) -> "Chain":
        from shardwise.models.t5 import build_t5

        return build_t5(config, seed)

    def objective(self, config: T5Config, seed: int) -> "Objective":
        from shardwise.models.objectives import SpanCorruption

        return SpanCorruption(config, seed)

    def operator_costs(self, config: T5Config, itemsize: int) -> "Callable[..., tuple[OperatorCosts, ...]]":
        from shardwise.models.t5_operators import t5_operators

        return lru_cache(maxsize=64)(lambda *sizes: tuple(t5_operators(config, itemsize, *sizes)))
