"""The `[model]` section of a job: one class for each kind of model, chosen by `name`.

A kind knows what its samples are made of and how it is made small for a proof; `shardwise/models/` builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from shardwise.console import pluralize
from shardwise.errors import suggest
from shardwise.presets import PRESETS

_SUFFIX = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _parse_count(value: object) -> object:
    """Accepts `"0.5M"` for 500000; leaves anything else to the type check."""
    if not isinstance(value, str):
        return value
    digits, suffix = (value[:-1], value[-1].lower()) if value[-1:].lower() in _SUFFIX else (value, "")
    try:
        number = float(digits) * _SUFFIX.get(suffix, 1)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a whole number; write 500000 or '0.5M'") from None
    return int(number)


Count = Annotated[int, BeforeValidator(_parse_count)]


class ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class ModelConfig(ConfigSection):
    """What all kinds have. With a preset as `name`, the preset's shape is the default."""

    description: ClassVar[str]
    """The kind, in words."""
    throughput_unit: ClassVar[str] = "tokens"
    """What is counted of a sample."""
    is_causal_lm: ClassVar[bool] = False
    """Whether it goes on with a text."""
    name: str

    def shrink(self) -> Self:
        """The same kind of model, small: few layers and heads, narrow, a short sequence; what is odd stays odd."""
        return self.model_validate(self.model_dump() | self._shrunk_values())

    def _shrunk_values(self) -> dict[str, Any]:
        """The values that are others in a small one."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Positions of a sample in the model."""
        return getattr(self, "sequence", 1)

    @property
    def text_window(self) -> int:
        """Tokens of text that a sample is made from."""
        return self.length

    @property
    def reserved_ids(self) -> int:
        """Ids at the end of the vocabulary that no text has."""
        return 0

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name in MODEL_CONFIGS:
            return values
        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}; {suggest(name, [*MODEL_CONFIGS, *PRESETS])}")
        return {**{key: value for key, value in PRESETS[name].items() if key != "family"}, **values}


class DecoderConfig(ModelConfig):
    """A row of equal blocks: a decoder, where no kind below says otherwise."""

    description = "a decoder"
    is_causal_lm = True
    name: str = "gpt"
    layers: int = Field(8, ge=1, le=10_000)
    width: int = Field(256, ge=1)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(0, ge=0)
    """Heads of keys and values; 0: as many as `heads`."""
    head_dim: int = Field(0, ge=0)
    """Features of one head; 0: width / heads."""
    ffn: int = Field(0, ge=0)
    """Hidden features of the feed-forward part; 0: 4 x width, or 8/3 x width for swiglu, in multiples of 64."""
    vocab: int = Field(256, ge=2)
    sequence: int = Field(256, ge=1)
    positions: Literal["learned", "rotary"] = "rotary"
    norm: Literal["layer", "rms"] = "rms"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False
    tied: bool = True
    """Whether the head uses the token embedding's weights."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout of embeddings and of what each block adds to the stream."""
    attention_dropout: float = 0.0
    rope_theta: float = Field(10_000.0, gt=0.0)
    norm_eps: float = Field(1e-5, gt=0.0)
    init_std: float = Field(0.02, gt=0.0)
    eod_token_id: int = Field(-1, ge=-1)
    """The id that ends a document; tokens do not attend to documents before their own. -1: they do."""
    mup_base_width: int = Field(0, ge=0)
    """The width at which the learning rate was found, for it to hold at this width too (muP); 0: off."""

    @model_validator(mode="after")
    def _check_shape(self) -> DecoderConfig:
        defaults = {}
        if self.mup_base_width and type(self) is not DecoderConfig:
            raise ValueError(f"mup_base_width is for 'gpt', not for {self.description}; leave it out")
        if self.eod_token_id >= self.vocab:
            raise ValueError(f"document_end ({self.eod_token_id}) is not below vocab ({self.vocab})")
        if self.eod_token_id >= 0 and not self.is_causal_lm:
            raise ValueError(f"document_end is for decoders, not for {self.description}; leave it out")
        if not self.kv_heads:
            defaults["kv_heads"] = self.heads
        if not self.head_dim:
            if self.width % self.heads:
                raise ValueError(
                    f"width {self.width} does not divide into {self.heads} heads; change one of them or set head_size"
                )
            defaults["head_dim"] = self.width // self.heads
        if not self.ffn:
            hidden = 4 * self.width if self.activation == "gelu" else -(-8 * self.width // 3 // 64) * 64
            defaults["ffn"] = hidden or self.width
        # The class is frozen for its users; here it is still being made.
        for key, value in defaults.items():
            object.__setattr__(self, key, value)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of features, but a head has {self.head_dim}; make it even")
        if self.attention_dropout:
            raise ValueError(
                "dropout of attention probabilities would need their masks to be the same in every layout, which "
                "no fused attention kernel gives; use dropout (of the blocks' outputs) and leave attention_dropout out"
            )
        return self

    def _shrunk_values(self) -> dict[str, Any]:
        group = self.heads // self.kv_heads
        kv_heads = min(self.kv_heads, max(1, 4 // group) if group < 4 else 2)
        heads = kv_heads * min(group, 4)
        return {
            "layers": min(self.layers, 6), "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "width": 8 * heads,
            "ffn": min(self.ffn, 16 * heads + self.ffn % 2), "vocab": min(self.vocab, 128 + self.vocab % 2),
            "sequence": min(self.sequence, 32), "eod_token_id": min(self.eod_token_id, 5),
        }  # fmt: skip


class MoEConfig(DecoderConfig):
    """A decoder with experts, of which each token uses some; its attention may be latent."""

    description = "a mixture of experts"
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


class BertConfig(DecoderConfig):
    """An encoder that predicts masked tokens."""

    description = "a BERT"
    is_causal_lm = False
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


class T5Config(ModelConfig):
    """An encoder, and a decoder that also attends to what the encoder gave; relative positions."""

    description = "a T5"
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
            raise ValueError(f"sequence ({self.sequence}) is too short for a text with runs left out; give at least 8")
        if noise_tokens + spans + 1 > self.target_sequence:
            raise ValueError(
                f"targets ({self.target_sequence}) is too short: of {self.text_window} tokens {noise_tokens} are left out in "
                f"{pluralize(spans, 'run')}, which take {noise_tokens + spans + 1}; set targets = {noise_tokens + spans + 1}"
            )
        return self

    def _shrunk_values(self) -> dict[str, Any]:
        return {
            "layers": min(self.layers, 3), "heads": min(self.heads, 4), "head_dim": min(self.head_dim, 8),
            "width": min(self.width, 32), "ffn": min(self.ffn, 48), "vocab": min(self.vocab, 128 + self.vocab % 2),
            "sequence": 24, "target_sequence": 8,
        }  # fmt: skip


class ResNetConfig(ModelConfig):
    """A residual network, for images."""

    description = "a ResNet"
    throughput_unit = "samples"
    name: str = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Convolutions in a row, and the last product."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """The first convolution: 7 x 7 in steps of two and pooled, or 3 x 3."""
    width: int = Field(64, ge=1)
    """Channels of the first blocks; each of the three stages after them has twice as many."""
    image_size: int = Field(224, ge=8)
    """Pixels of a side."""
    num_classes: int = Field(1000, ge=1)

    @property
    def has_bottlenecks(self) -> bool:
        """Whether blocks are bottlenecks."""
        return self.depth >= 50

    @property
    def sequence(self) -> int:
        return 1

    def _shrunk_values(self) -> dict[str, Any]:
        return {
            "width": min(self.width, 8),
            "image_size": min(self.image_size, 32),
            "num_classes": min(self.num_classes, 10),
        }


class DLRMConfig(ModelConfig):
    """A recommender: a row of a table for each category, and two rows of products (Naumov et al. 2019)."""

    description = "a DLRM"
    throughput_unit = "samples"
    name: str = "dlrm"
    tables: int = Field(26, ge=1)
    """Categories, each with a table of its own, kept in the hosts' memory."""
    rows: Annotated[Count, Field(ge=1)] | tuple[Annotated[Count, Field(ge=1)], ...] = 1_000_000
    """Rows of each table, or a list with those of every one."""
    width: int = Field(128, ge=1)
    """Numbers in a row."""
    lookups: int = Field(1, ge=1)
    """Rows of a table that a sample uses; they are summed."""
    dense_features: int = Field(13, ge=1)
    """Numbers of a sample that are no categories."""
    bottom: tuple[Annotated[int, Field(ge=1)], ...] = (512, 256)
    """Hidden features of the products that turn `features` into `width` numbers."""
    top: tuple[Annotated[int, Field(ge=1)], ...] = (1024, 1024, 512, 256)
    """Hidden features of the products after tables and features have met."""

    @model_validator(mode="after")
    def _check_rows(self) -> DLRMConfig:
        if isinstance(self.rows, tuple) and len(self.rows) != self.tables:
            raise ValueError(f"rows has {len(self.rows)} numbers, but there are {self.tables} tables; give each one.")
        return self

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of every table."""
        return self.rows if isinstance(self.rows, tuple) else (self.rows,) * self.tables

    @property
    def sequence(self) -> int:
        return 1

    def _shrunk_values(self) -> dict[str, Any]:
        tables = min(self.tables, 5)
        rows = [min(size, 41) for size in self.table_rows[:tables]]
        return {
            "tables": tables, "rows": rows if isinstance(self.rows, tuple) else rows[0], "width": min(self.width, 8),
            "lookups": min(self.lookups, 3), "bottom": [min(size, 16) for size in self.bottom[:2]],
            "top": [min(size, 16) for size in self.top[:2]],
        }  # fmt: skip


MODEL_CONFIGS: dict[str, type[ModelConfig]] = {
    "gpt": DecoderConfig,
    "moe": MoEConfig,
    "bert": BertConfig,
    "t5": T5Config,
    "resnet": ResNetConfig,
    "dlrm": DLRMConfig,
}


def family_name(values: Any) -> str:
    """The kind of a model, or of what is to become one; `gpt` finds the words for a name that is unknown."""
    name = values.get("name") if isinstance(values, Mapping) else getattr(values, "name", None)
    if not isinstance(name, str) or name in MODEL_CONFIGS:
        return name if isinstance(name, str) else "gpt"
    return str(PRESETS.get(name, {}).get("family", "gpt"))


AnyModelConfig = Annotated[
    Annotated[DecoderConfig, Tag("gpt")] | Annotated[MoEConfig, Tag("moe")] | Annotated[BertConfig, Tag("bert")]
    | Annotated[T5Config, Tag("t5")] | Annotated[ResNetConfig, Tag("resnet")] | Annotated[DLRMConfig, Tag("dlrm")],
    Discriminator(family_name),
]  # fmt: skip
