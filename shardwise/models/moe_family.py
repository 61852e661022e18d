"""The config and family of mixture-of-experts decoders: Mixtral and DeepSeek-V3 shapes."""

from typing import Any, Literal

from pydantic import Field, model_validator

from shardwise.models.gpt_family import DecoderConfig, GPTFamily


class MoEConfig(DecoderConfig):
    """A mixture-of-experts decoder, optionally with multi-head latent attention (MLA)."""

    description = "a mixture of experts"
    supports_mup = False
    is_recomputable_elsewhere = False
    reports_routing = True
    name: str = "moe"
    experts: int = Field(8, ge=2, le=1000)  # Number of routed experts per MoE layer
    experts_per_token: int = Field(2, ge=1, le=1000)  # Number of routed experts per token (top-k)
    expert_ffn: int = Field(0, ge=0, le=10**7)  # Hidden size of each routed expert; 0: `ffn`
    shared_expert_ffn: int = Field(0, ge=0, le=10**7)
    """Hidden size of the shared expert, which processes every token; 0: no shared expert."""
    dense_layers: int = Field(0, ge=0, le=1000)  # Number of leading blocks with a dense MLP instead of experts
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into routing probabilities."""
    routed_scaling_factor: float = Field(1.0, gt=0.0)
    """Factor applied to the routing weights after they are normalized to sum to 1."""
    capacity_factor: float = Field(0.0, ge=0.0)
    """Capacity of an expert per sample, relative to an even load; tokens beyond it are dropped. 0: no limit."""
    router_bias_update_rate: float = Field(0.0, ge=0.0)
    """Auxiliary-loss-free load balancing (DeepSeek-V3): step size of the routing-bias update; 0: off."""
    router_aux_loss_coef: float = Field(0.01, ge=0.0)
    """Coefficient of the load-balancing loss, which is computed per sample; 0: off."""
    router_z_loss_coef: float = Field(0.0, ge=0.0)
    """Coefficient of the router z-loss, the mean squared log-sum-exp of the router logits; 0: off."""
    q_lora_rank: int = Field(0, ge=0, le=10**6)  # MLA: rank of the query projection; 0: no MLA
    kv_lora_rank: int = Field(0, ge=0, le=10**6)  # MLA: rank of the joint key/value projection; 0: no MLA
    qk_rope_head_dim: int = Field(0, ge=0, le=10**6)
    """MLA: features per query and key head that carry RoPE, in addition to `head_dim`."""

    @model_validator(mode="after")
    def _check_experts(self) -> "MoEConfig":
        if not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers ({self.dense_layers}) must be below layers ({self.layers})")
        if bool(self.kv_lora_rank) != bool(self.q_lora_rank) or (self.qk_rope_head_dim and not self.kv_lora_rank):
            raise ValueError(
                "latent attention needs q_lora_rank and kv_lora_rank above 0; else omit qk_rope_head_dim too"
            )
        return self

    def _shrunk_values(self) -> dict[str, Any]:
        ffn_sizes = {key: min(getattr(self, key), 24) for key in ("expert_ffn", "shared_expert_ffn")}
        mla_sizes = {key: min(getattr(self, key), 16) for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")}
        shrunk = super()._shrunk_values() | ffn_sizes | mla_sizes
        return shrunk | {
            "dense_layers": min(self.dense_layers, shrunk["layers"] - 1),
            "experts": self.experts if self.experts <= 8 else 8 + self.experts % 2,
            "experts_per_token": min(self.experts_per_token, 3),
        }

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        return self.experts


class MoEFamily(GPTFamily):
    config = MoEConfig

    def decoder_shape(self, config: MoEConfig) -> dict[str, Any]:  # type: ignore[override]
        keys = ("experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "q_lora_rank", "kv_lora_rank",
                "qk_rope_head_dim")  # fmt: skip
        overrides = {"sparse_layers": config.layers - config.dense_layers, "has_exact_cost_model": False}
        return {**super().decoder_shape(config), **{key: getattr(config, key) for key in keys}, **overrides}

    def refusals(self, config: MoEConfig) -> dict[str, str]:  # type: ignore[override]
        refused = {}
        if config.kv_lora_rank:
            refused["context"] = "latent attention cannot be split along the sequence; leave context at 1."
        elif config.capacity_factor:
            refused["context"] = "model.capacity_factor counts the tokens of full samples; leave context at 1."
        if config.router_bias_update_rate:
            why = "model.router_bias_update_rate needs the expert load of all replicas at every step"
            refused["local_sgd"] = f"{why}; use local_sgd.every = 1."
        return refused
