"""BERT: an encoder trained by masked language modelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shardwise.models.gpt_family import DecoderConfig, GPTFamily

if TYPE_CHECKING:
    from shardwise.models.chain import Chain
    from shardwise.models.objectives import Objective


class BertConfig(DecoderConfig):
    """An encoder that predicts masked tokens."""

    description = "a BERT"
    is_causal_lm = False
    supports_mup = False
    name: str = "bert"
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    mlm_probability: float = Field(0.15, gt=0.0, le=1.0)
    """Share of the tokens that are predicted; only they reach the head."""
    mask_token_id: int = Field(-1, ge=-1)
    """The id that hides a token; -1: the last of the vocabulary, which no text may then have."""
    phase1_sequence: int = Field(0, ge=0)
    """Tokens in a sample of the first part of the training; 0: there is no such part."""
    phase1_fraction: float = Field(0.9, ge=0.0, le=1.0)
    """Share of the steps that the first part takes, where there is one."""

    @property
    def resolved_mask_id(self) -> int:
        return self.vocab - 1 if self.mask_token_id < 0 else self.mask_token_id

    @property
    def reserved_ids(self) -> int:
        return int(self.mask_token_id < 0)

    @property
    def max_predictions(self) -> int:
        """Positions of a sample that are predicted."""
        return max(1, round(self.mlm_probability * self.sequence))

    @model_validator(mode="after")
    def _check_bert(self) -> BertConfig:
        if self.mask_token_id >= self.vocab:
            raise ValueError(f"mask_id ({self.mask_token_id}) is not below vocab ({self.vocab})")
        if self.kv_heads != self.heads or self.positions != "learned" or self.norm != "layer" or not self.bias:
            raise ValueError("a BERT has learned positions, layer norms, biases, and a key for each query's head")
        return self

    def phases(self, steps: int) -> list[tuple[int, Self]]:
        first = round(self.phase1_fraction * steps) if self.phase1_sequence else 0
        short = self.model_copy(update={"sequence": self.phase1_sequence})
        return [(first, short), (steps - first, self)] if first else [(steps, self)]


class BertFamily(GPTFamily):
    config = BertConfig

    def build(self, config: BertConfig, seed: int) -> Chain:  # type: ignore[override]
        from shardwise.models.bert import build_bert

        return build_bert(config, seed)

    def objective(self, config: BertConfig, seed: int) -> Objective:
        from shardwise.models.objectives import MaskedLM

        return MaskedLM(config, seed)

    def reference(self, config: BertConfig) -> None:  # type: ignore[override]
        return None

    def decoder_shape(self, config: BertConfig) -> dict[str, Any]:  # type: ignore[override]
        predicted = {"causal": False, "logit_fraction": config.mlm_probability, "has_engine_model": False}
        return {**super().decoder_shape(config), **predicted}

    def forward_flops(self, config: BertConfig) -> list[float]:
        *others, _ = super().forward_flops(config)
        logits = config.max_predictions * config.vocab  # the head computes only the predicted positions
        return [*others, 2.0 * config.width * (config.sequence * config.width + logits)]
