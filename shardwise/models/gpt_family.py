"""The configs and families of decoder-only transformers: GPT-2, GPT-3 and Llama shapes, and mixtures of experts in the
shapes of Mixtral and DeepSeek-V3."""

from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

from pydantic import Field

from shardwise.models.config import ConfigSection, ModelConfig
from shardwise.models.family import Family, reasons
from shardwise.models.pretrained_config import find_format, make_config


class RopeScaling(ConfigSection):
    """Rotary frequencies for sequences longer than those that a model was trained on first."""

    rope_type: Literal["linear", "llama3"] = "linear"
    """`linear` divides all frequencies by `factor`; `llama3` only those of waves that the first sequences cut off."""
    factor: float = Field(1.0, ge=1.0)
    low_freq_factor: float = Field(1.0, gt=0.0)
    high_freq_factor: float = Field(4.0, gt=0.0)
    original_max_position_embeddings: int = Field(8192, ge=1)
    """Length of the sequences that the model was trained on first; with the two factors above, for `llama3`."""


class DecoderConfig(ModelConfig):
    """A decoder-only transformer. The MoE and BERT configs extend it."""

    description = "a decoder"
    is_causal_lm = True
    supports_mup: ClassVar[bool] = True
    name: str = "gpt"
    layers: int = Field(8, ge=1, le=1000)
    width: int = Field(256, ge=1, le=10**6)
    heads: int = Field(8, ge=1, le=10_000)
    kv_heads: int = Field(0, ge=0, le=10_000)
    head_dim: int = Field(0, ge=0, le=10_000)
    ffn: int = Field(0, ge=0, le=10**7)
    vocab: int = Field(256, ge=2, le=10**7)
    sequence: int = Field(256, ge=1, le=10**7)
    positions: Literal["learned", "rotary"] = "rotary"
    norm: Literal["layer", "rms"] = "rms"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    attention_dropout: float = 0.0
    rope_theta: float = Field(10_000.0, gt=0.0)
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = Field(1e-5, gt=0.0)
    init_std: float = Field(0.02, gt=0.0)
    eod_token_id: int = Field(-1, ge=-1)
    mup_base_width: int = Field(0, ge=0, le=10**6)

    def model_post_init(self, context: Any) -> None:
        if self.mup_base_width and not self.supports_mup:
            raise ValueError(f"mup_base_width works for a dense decoder only, not for {self.description}; leave it out")
        if self.eod_token_id >= self.vocab:
            raise ValueError(f"eod_token_id ({self.eod_token_id}) must be below vocab ({self.vocab})")
        if self.eod_token_id >= 0 and not self.is_causal_lm:
            raise ValueError(f"eod_token_id is supported only for decoders, not for {self.description}; leave it out")
        if not self.head_dim and self.width % self.heads:
            sizes = f"width ({self.width}) must be a multiple of heads ({self.heads})"
            raise ValueError(f"{sizes}; change one or set head_dim")
        ffn = 4 * self.width if self.activation == "gelu" else -(-8 * self.width // 3 // 64) * 64
        defaults = {"kv_heads": self.heads, "head_dim": self.width // self.heads, "ffn": ffn or self.width}
        # The config is frozen, so plain assignment fails even inside its own validator.
        for key, value in defaults.items():
            object.__setattr__(self, key, getattr(self, key) or value)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}; change it")
        if self.attention_dropout:
            why = "fused attention draws other masks in each layout"
            raise ValueError(f"attention_dropout must be 0: {why}; use dropout")

    def _shrunk_values(self) -> dict[str, Any]:
        group = self.heads // self.kv_heads
        kv_heads = min(self.kv_heads, max(1, 4 // group) if group < 4 else 2)
        heads = kv_heads * min(group, 4)
        return {"layers": min(self.layers, 6), "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "width": 8 * heads,
                "ffn": min(self.ffn, 16 * heads + self.ffn % 2), "vocab": min(self.vocab, 128 + self.vocab % 2),
                "sequence": min(self.sequence, 32), "eod_token_id": min(self.eod_token_id, 5)}  # fmt: skip

    @property
    def document_separator(self) -> int:  # type: ignore[override]
        return self.eod_token_id

    @property
    def adamw_only(self) -> str:  # type: ignore[override]
        return "mup_base_width" if self.mup_base_width else ""


class MoEConfig(DecoderConfig):
    """A mixture-of-experts decoder, optionally with multi-head latent attention (MLA)."""

    description = "a mixture of experts"
    supports_mup = False
    is_recomputable_elsewhere = False
    reports_routing = True
    name: str = "moe"
    experts: int = Field(8, ge=2, le=1000)
    experts_per_token: int = Field(2, ge=1, le=1000)
    expert_ffn: int = Field(0, ge=0, le=10**7)
    shared_expert_ffn: int = Field(0, ge=0, le=10**7)
    dense_layers: int = Field(0, ge=0, le=1000)
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_scaling_factor: float = Field(1.0, gt=0.0)
    capacity_factor: float = Field(0.0, ge=0.0)
    router_bias_update_rate: float = Field(0.0, ge=0.0)
    router_aux_loss_coef: float = Field(0.01, ge=0.0)
    router_z_loss_coef: float = Field(0.0, ge=0.0)
    q_lora_rank: int = Field(0, ge=0, le=10**6)
    kv_lora_rank: int = Field(0, ge=0, le=10**6)
    qk_rope_head_dim: int = Field(0, ge=0, le=10**6)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers ({self.dense_layers}) must be below layers ({self.layers})")
        if bool(self.kv_lora_rank) != bool(self.q_lora_rank) or (self.qk_rope_head_dim and not self.kv_lora_rank):
            rule = "latent attention needs q_lora_rank and kv_lora_rank above 0"
            raise ValueError(f"{rule}; else omit qk_rope_head_dim too")

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


class GPTFamily(Family):
    config = DecoderConfig
    builder = "shardwise.models.gpt:build_gpt"
    refused = "gpt"

    def reference(self, config: DecoderConfig) -> Any:
        return resolve_name("shardwise.models.pretrained:reference_decoder")(config)

    def pretrained_weights(self, config: DecoderConfig, chain: Any) -> Any:
        folder = config.weights_folder
        return None if folder is None else resolve_name("shardwise.models.pretrained:PretrainedWeights")(config, folder)

    def export_weights(self, config: DecoderConfig, weights: Any) -> Any:
        return resolve_name("shardwise.models.pretrained:export_weights")(config, weights, config.weights_folder)

    def export_config(self, config: DecoderConfig) -> dict[str, Any]:
        if not find_format(config, config.weights_folder):
            return super().export_config(config)
        return make_config(config, config.weights_folder)

    def decoder_shape(self, config: DecoderConfig) -> dict[str, Any]:
        keys = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence", "tied")
        return {key: getattr(config, key) for key in keys} | {
            "gated": config.activation == "swiglu", "has_exact_cost_model": not config.qk_norm,
            "positions": config.sequence if config.positions == "learned" else 0,
        }  # fmt: skip


class MoEFamily(GPTFamily):
    config = MoEConfig

    def decoder_shape(self, config: MoEConfig) -> dict[str, Any]:  # type: ignore[override]
        keys = ("experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "q_lora_rank", "kv_lora_rank",
                "qk_rope_head_dim")  # fmt: skip
        overrides = {"sparse_layers": config.layers - config.dense_layers, "has_exact_cost_model": False}
        return {**super().decoder_shape(config), **{key: getattr(config, key) for key in keys}, **overrides}

    def refusals(self, config: MoEConfig) -> dict[str, str]:  # type: ignore[override]
        refused = reasons("router bias") if config.router_bias_update_rate else {}
        if config.kv_lora_rank or config.capacity_factor:
            refused |= reasons("latent attention" if config.kv_lora_rank else "expert capacity")
        return refused
