"""The config and family of BERT: an encoder trained by masked language modeling."""

from typing import Any, Literal

from pydantic import Field

from shardwise.models.gpt_family import DecoderConfig, GPTFamily


class BertConfig(DecoderConfig):
    """An encoder trained by masked language modeling."""

    description = "a BERT"
    is_causal_lm = False
    supports_mup = False
    name: str = "bert"
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    mlm_probability: float = Field(0.15, gt=0.0, le=1.0)
    mask_token_id: int = Field(-1, ge=-1)

    @property
    def resolved_mask_id(self) -> int:
        return self.vocab - 1 if self.mask_token_id < 0 else self.mask_token_id

    @property
    def reserved_ids(self) -> int:  # type: ignore[override]
        return int(self.mask_token_id < 0)

    @property
    def max_predictions(self) -> int:
        """Number of predicted positions per sample."""
        return max(1, round(self.mlm_probability * self.sequence))

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.mask_token_id >= self.vocab:
            raise ValueError(f"mask_token_id ({self.mask_token_id}) must be below vocab ({self.vocab})")
        fixed = (self.positions, self.norm, self.activation, self.bias) == ("learned", "layer", "gelu", True)
        if not fixed or self.kv_heads != self.heads:
            raise ValueError("a BERT has learned positions, LayerNorm, GELU, biases and kv_heads = heads; omit them")


class BertFamily(GPTFamily):
    config = BertConfig
    builder = "shardwise.models.bert:build_bert"
    objective_class = "shardwise.models.objectives:MaskedLM"

    def decoder_shape(self, config: BertConfig) -> dict[str, Any]:  # type: ignore[override]
        overrides = {"causal": False, "logit_fraction": config.mlm_probability, "has_exact_cost_model": False}
        return {**super().decoder_shape(config), **overrides}

    def forward_flops(self, config: BertConfig) -> list[float]:
        *others, _ = super().forward_flops(config)
        logits = config.max_predictions * config.vocab  # the head computes only the predicted positions
        return [*others, 2.0 * config.width * (config.sequence * config.width + logits)]
