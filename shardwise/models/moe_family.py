"""Mixture-of-experts decoders (Mixtral, DeepSeek-V3): each token uses a few experts of a sparse block."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shardwise.models.gpt_family import DecoderConfig, GPTFamily


class MoEConfig(DecoderConfig):
    """A decoder with experts, of which each token uses some; its attention may be latent."""

    description = "a mixture of experts"
    supports_mup = False
    mixes_samples = True
    name: str = "moe"
    experts: int = Field(8, ge=2)
    """Experts in a block."""
    experts_per_token: int = Field(2, ge=1)
    """Experts that a token uses."""
    expert_ffn: int = Field(0, ge=0)
    """Hidden features of one expert; 0: as `ffn`."""
    shared_expert_ffn: int = Field(0, ge=0)
    """Hidden features of the feed-forward part that every token uses beside its experts."""
    dense_layers: int = Field(0, ge=0)
    """Blocks at the begin that have no experts."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a token's likelihoods of its router's scores."""
    routed_scaling_factor: float = Field(1.0, gt=0.0)
    """Factor of what the experts give."""
    capacity_factor: float = Field(0.0, ge=0.0)
    """Tokens of a sample that an expert takes, over its even share; those that come later are dropped. 0: takes all."""
    router_bias_update_rate: float = Field(0.0, ge=0.0)
    """Balance without a loss: after each step experts that got less than their share become likelier by this."""
    router_aux_loss_coef: float = Field(0.01, ge=0.0)
    """Weight of the loss that asks each sample to use all experts alike; 0: none."""
    router_z_loss_coef: float = Field(0.0, ge=0.0)
    """Weight of the loss that keeps the router's scores small: the mean of their squared log-sum-exp; 0: none."""
    q_lora_rank: int = Field(0, ge=0)
    """Latent attention: numbers of a token that its queries are made from."""
    kv_lora_rank: int = Field(0, ge=0)
    """Latent attention: numbers of a token that its keys and values are made from; 0: plain attention."""
    qk_rope_head_dim: int = Field(0, ge=0)
    """Latent attention: features of a head that carry the position, beside `head_size`."""

    @model_validator(mode="after")
    def _check_experts(self) -> MoEConfig:
        if not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) is above experts ({self.experts})")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers ({self.dense_layers}) leaves none of {self.layers} layers for experts")
        if bool(self.kv_lora_rank) != bool(self.q_lora_rank) or (self.qk_rope_head_dim and not self.kv_lora_rank):
            raise ValueError(
                "latent attention has q_rank and kv_rank, and may have rope_size; plain attention has none"
            )
        return self

    def _shrunk_values(self) -> dict[str, Any]:
        shrunk_ffn = {key: min(getattr(self, key), 24) for key in ("expert_ffn", "shared_expert_ffn")}
        shrunk_ranks = {key: min(getattr(self, key), 16) for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")}
        shrunk = super()._shrunk_values() | shrunk_ffn | shrunk_ranks
        return shrunk | {
            "dense_layers": min(self.dense_layers, shrunk["layers"] - 1),
            "experts": self.experts if self.experts <= 8 else 8 + self.experts % 2,
            "experts_per_token": min(self.experts_per_token, 3),
        }

    @property
    def num_experts(self) -> int:
        return self.experts


class MoEFamily(GPTFamily):
    config = MoEConfig

    def reference(self, config: MoEConfig) -> None:  # type: ignore[override]
        return None

    def decoder_shape(self, config: MoEConfig) -> dict[str, Any]:  # type: ignore[override]
        keys = ("experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "q_lora_rank", "kv_lora_rank",
                "qk_rope_head_dim")  # fmt: skip
        sparse = {"sparse_layers": config.layers - config.dense_layers, "has_engine_model": False}
        return {**super().decoder_shape(config), **{key: getattr(config, key) for key in keys}, **sparse}

    def refusals(self, config: MoEConfig) -> dict[str, str]:  # type: ignore[override]
        refused = {"redundant_compute": "experts are shared by the samples of all ranks."}
        if config.kv_lora_rank or config.capacity_factor:
            cause = "latent attention" if config.kv_lora_rank else "model.capacity_factor, which counts a whole sample,"
            refused["context"] = f"{cause} cannot be split along the sequence; leave context at 1."
        if config.router_bias_update_rate:
            refused["local_sgd"] = (
                "model.router_bias_update_rate is kept for all samples, not per replica; use local_sgd.every = 1."
            )
        return refused
