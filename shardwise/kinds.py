"""The `[model]` section of a job: one class for each kind of model, chosen by `name`.

A kind knows what its samples are made of and how it is made small for a proof; `shardwise/models/` builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from shardwise.errors import nearest
from shardwise.presets import PRESETS
from shardwise.words import counted

_SUFFIX = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _count(value: object) -> object:
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


Count = Annotated[int, BeforeValidator(_count)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class Named(Section):
    """What all kinds have. With a preset as `name`, the preset's shape is the default."""

    what: ClassVar[str]
    """The kind, in words."""
    unit: ClassVar[str] = "tokens"
    """What is counted of a sample."""
    writes: ClassVar[bool] = False
    """Whether it goes on with a text."""
    name: str

    def small(self) -> Self:
        """The same kind of model, small: few layers and heads, narrow, a short sequence; what is odd stays odd."""
        return self.model_validate(self.model_dump() | self._less())

    def _less(self) -> dict[str, Any]:
        """The values that are others in a small one."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Positions of a sample in the model."""
        return getattr(self, "sequence", 1)

    @property
    def window(self) -> int:
        """Tokens of text that a sample is made from."""
        return self.length

    @property
    def spare(self) -> int:
        """Ids at the end of the vocabulary that no text has."""
        return 0

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name in KINDS:
            return values
        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}; {nearest(name, [*KINDS, *PRESETS])}")
        return {**{key: value for key, value in PRESETS[name].items() if key != "kind"}, **values}


class Model(Named):
    """A row of equal blocks: a decoder, where no kind below says otherwise."""

    what = "a decoder"
    writes = True
    name: str = "gpt"
    layers: int = Field(8, ge=1, le=10_000)
    width: int = Field(256, ge=1)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(0, ge=0)
    """Heads of keys and values; 0: as many as `heads`."""
    head_size: int = Field(0, ge=0)
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
    document_end: int = Field(-1, ge=-1)
    """The id that ends a document; tokens do not attend to documents before their own. -1: they do."""
    mup_base_width: int = Field(0, ge=0)
    """The width at which the learning rate was found, for it to hold at this width too (muP); 0: off."""

    @model_validator(mode="after")
    def _shape(self) -> Model:
        fill = {}
        if self.mup_base_width and type(self) is not Model:
            raise ValueError(f"mup_base_width is for 'gpt', not for {self.what}; leave it out")
        if self.document_end >= self.vocab:
            raise ValueError(f"document_end ({self.document_end}) is not below vocab ({self.vocab})")
        if self.document_end >= 0 and not self.writes:
            raise ValueError(f"document_end is for decoders, not for {self.what}; leave it out")
        if not self.kv_heads:
            fill["kv_heads"] = self.heads
        if not self.head_size:
            if self.width % self.heads:
                raise ValueError(
                    f"width {self.width} does not divide into {self.heads} heads; change one of them or set head_size"
                )
            fill["head_size"] = self.width // self.heads
        if not self.ffn:
            hidden = 4 * self.width if self.activation == "gelu" else -(-8 * self.width // 3 // 64) * 64
            fill["ffn"] = hidden or self.width
        # The class is frozen for its users; here it is still being made.
        for key, value in fill.items():
            object.__setattr__(self, key, value)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs of features, but a head has {self.head_size}; make it even")
        if self.attention_dropout:
            raise ValueError(
                "dropout of attention probabilities would need their masks to be the same in every layout, which "
                "no fused attention kernel gives; use dropout (of the blocks' outputs) and leave attention_dropout out"
            )
        return self

    def _less(self) -> dict[str, Any]:
        group = self.heads // self.kv_heads
        kv_heads = min(self.kv_heads, max(1, 4 // group) if group < 4 else 2)
        heads = kv_heads * min(group, 4)
        return {
            "layers": min(self.layers, 6), "heads": heads, "kv_heads": kv_heads, "head_size": 8, "width": 8 * heads,
            "ffn": min(self.ffn, 16 * heads + self.ffn % 2), "vocab": min(self.vocab, 128 + self.vocab % 2),
            "sequence": min(self.sequence, 32), "document_end": min(self.document_end, 5),
        }  # fmt: skip


class MoE(Model):
    """A decoder with experts, of which each token uses some; its attention may be latent."""

    what = "a mixture of experts"
    name: str = "moe"
    experts: int = Field(8, ge=2)
    """Experts in a block."""
    experts_per_token: int = Field(2, ge=1)
    """Experts that a token uses."""
    expert_ffn: int = Field(0, ge=0)
    """Hidden features of one expert; 0: as `ffn`."""
    shared_ffn: int = Field(0, ge=0)
    """Hidden features of the feed-forward part that every token uses beside its experts."""
    dense_layers: int = Field(0, ge=0)
    """Blocks at the begin that have no experts."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a token's likelihoods of its router's scores."""
    scale: float = Field(1.0, gt=0.0)
    """Factor of what the experts give."""
    capacity: float = Field(0.0, ge=0.0)
    """Tokens of a sample that an expert takes, over its even share; those that come later are dropped. 0: takes all."""
    bias_rate: float = Field(0.0, ge=0.0)
    """Balance without a loss: after each step experts that got less than their share become likelier by this."""
    balance: float = Field(0.01, ge=0.0)
    """Weight of the loss that asks each sample to use all experts alike; 0: none."""
    z_loss: float = Field(0.0, ge=0.0)
    """Weight of the loss that keeps the router's scores small: the mean of their squared log-sum-exp; 0: none."""
    q_rank: int = Field(0, ge=0)
    """Latent attention: numbers of a token that its queries are made from."""
    kv_rank: int = Field(0, ge=0)
    """Latent attention: numbers of a token that its keys and values are made from; 0: plain attention."""
    rope_size: int = Field(0, ge=0)
    """Latent attention: features of a head that carry the position, beside `head_size`."""

    @model_validator(mode="after")
    def _experts(self) -> MoE:
        if not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) is above experts ({self.experts})")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers ({self.dense_layers}) leaves none of {self.layers} layers for experts")
        if bool(self.kv_rank) != bool(self.q_rank) or (self.rope_size and not self.kv_rank):
            raise ValueError(
                "latent attention has q_rank and kv_rank, and may have rope_size; plain attention has none"
            )
        return self

    def _less(self) -> dict[str, Any]:
        narrow = {key: min(getattr(self, key), 24) for key in ("expert_ffn", "shared_ffn")}
        ranks = {key: min(getattr(self, key), 16) for key in ("q_rank", "kv_rank", "rope_size")}
        less = super()._less() | narrow | ranks
        return less | {
            "dense_layers": min(self.dense_layers, less["layers"] - 1),
            "experts": self.experts if self.experts <= 8 else 8 + self.experts % 2,
            "experts_per_token": min(self.experts_per_token, 3),
        }


class Bert(Model):
    """An encoder that predicts masked tokens."""

    what = "a BERT"
    writes = False
    name: str = "bert"
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    masked: float = Field(0.15, gt=0.0, le=1.0)
    """Share of the tokens that are predicted; only they reach the head."""
    mask_id: int = Field(-1, ge=-1)
    """The id that hides a token; -1: the last of the vocabulary, which no text may then have."""
    short_sequence: int = Field(0, ge=0)
    """Tokens in a sample of the first part of the training; 0: there is no such part."""
    short_share: float = Field(0.9, ge=0.0, le=1.0)
    """Share of the steps that the first part takes, where there is one."""

    @property
    def mask(self) -> int:
        return self.vocab - 1 if self.mask_id < 0 else self.mask_id

    @property
    def spare(self) -> int:
        return int(self.mask_id < 0)

    @property
    def predicted(self) -> int:
        """Positions of a sample that are predicted."""
        return max(1, round(self.masked * self.sequence))

    @model_validator(mode="after")
    def _bert(self) -> Bert:
        if self.mask_id >= self.vocab:
            raise ValueError(f"mask_id ({self.mask_id}) is not below vocab ({self.vocab})")
        if self.kv_heads != self.heads or self.positions != "learned" or self.norm != "layer" or not self.bias:
            raise ValueError("a BERT has learned positions, layer norms, biases, and a key for each query's head")
        return self


class T5(Named):
    """An encoder, and a decoder that also attends to what the encoder gave; relative positions."""

    what = "a T5"
    name: str = "t5"
    layers: int = Field(12, ge=1, le=10_000)
    """Blocks of the encoder, and as many of the decoder."""
    width: int = Field(768, ge=1)
    heads: int = Field(12, ge=1)
    head_size: int = Field(64, ge=1)
    """Features of one head; heads x head_size need not be the width."""
    ffn: int = Field(3072, ge=1)
    """Hidden features of the feed-forward part."""
    vocab: int = Field(32128, ge=2)
    sequence: int = Field(512, ge=1)
    """Tokens that the encoder reads."""
    targets: int = Field(114, ge=1)
    """Tokens that the decoder predicts."""
    activation: Literal["relu", "geglu"] = "relu"
    """Of the feed-forward part."""
    tied: bool = True
    """Whether the head uses the token embedding's weights."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout of embeddings and of what each block adds to the stream."""
    left_out: float = Field(0.15, gt=0.0, lt=1.0)
    """Share of the text that the decoder is to write."""
    span: float = Field(3.0, ge=1.0)
    """Tokens that are left out in a row, in the mean."""
    buckets: int = Field(32, ge=4)
    """Distances that attention tells apart: near ones one by one, farther ones in ever wider groups."""
    farthest: int = Field(128, ge=2)
    """The distance from which on all are one group."""
    norm_eps: float = Field(1e-6, gt=0.0)

    @property
    def length(self) -> int:
        return self.sequence + self.targets

    def noise(self, tokens: int) -> tuple[int, int]:
        """Of so many tokens, how many are left out, in how many runs."""
        out = min(tokens - 1, max(1, round(self.left_out * tokens)))
        return out, max(1, min(round(out / self.span), tokens - out))

    @property
    def window(self) -> int:
        """The most tokens of which what is left, with a mark for each run and one for the end, fits the encoder."""
        tokens = self.sequence
        while True:
            out, spans = self.noise(tokens + 1)
            if tokens + 1 - out + spans + 1 > self.sequence:
                return tokens
            tokens += 1

    @property
    def spare(self) -> int:
        return self.noise(self.window)[1] + 1

    @model_validator(mode="after")
    def _t5(self) -> T5:
        out, spans = self.noise(self.window)
        if self.window - out + spans + 1 > self.sequence:
            raise ValueError(f"sequence ({self.sequence}) is too short for a text with runs left out; give at least 8")
        if out + spans + 1 > self.targets:
            raise ValueError(
                f"targets ({self.targets}) is too short: of {self.window} tokens {out} are left out in "
                f"{counted(spans, 'run')}, which take {out + spans + 1}; set targets = {out + spans + 1}"
            )
        return self

    def _less(self) -> dict[str, Any]:
        return {
            "layers": min(self.layers, 3), "heads": min(self.heads, 4), "head_size": min(self.head_size, 8),
            "width": min(self.width, 32), "ffn": min(self.ffn, 48), "vocab": min(self.vocab, 128 + self.vocab % 2),
            "sequence": 24, "targets": 8,
        }  # fmt: skip


class ResNet(Named):
    """A residual network, for images."""

    what = "a ResNet"
    unit = "samples"
    name: str = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Convolutions in a row, and the last product."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """The first convolution: 7 x 7 in steps of two and pooled, or 3 x 3."""
    width: int = Field(64, ge=1)
    """Channels of the first blocks; each of the three stages after them has twice as many."""
    image: int = Field(224, ge=8)
    """Pixels of a side."""
    classes: int = Field(1000, ge=1)

    @property
    def deep(self) -> bool:
        """Whether blocks are bottlenecks."""
        return self.depth >= 50

    @property
    def sequence(self) -> int:
        return 1

    def _less(self) -> dict[str, Any]:
        return {"width": min(self.width, 8), "image": min(self.image, 32), "classes": min(self.classes, 10)}


class DLRM(Named):
    """A recommender: a row of a table for each category, and two rows of products (Naumov et al. 2019)."""

    what = "a DLRM"
    unit = "samples"
    name: str = "dlrm"
    tables: int = Field(26, ge=1)
    """Categories, each with a table of its own, kept in the hosts' memory."""
    rows: Annotated[Count, Field(ge=1)] | tuple[Annotated[Count, Field(ge=1)], ...] = 1_000_000
    """Rows of each table, or a list with those of every one."""
    width: int = Field(128, ge=1)
    """Numbers in a row."""
    lookups: int = Field(1, ge=1)
    """Rows of a table that a sample uses; they are summed."""
    features: int = Field(13, ge=1)
    """Numbers of a sample that are no categories."""
    bottom: tuple[Annotated[int, Field(ge=1)], ...] = (512, 256)
    """Hidden features of the products that turn `features` into `width` numbers."""
    top: tuple[Annotated[int, Field(ge=1)], ...] = (1024, 1024, 512, 256)
    """Hidden features of the products after tables and features have met."""

    @model_validator(mode="after")
    def _every_table(self) -> DLRM:
        if isinstance(self.rows, tuple) and len(self.rows) != self.tables:
            raise ValueError(f"rows has {len(self.rows)} numbers, but there are {self.tables} tables; give each one.")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of every table."""
        return self.rows if isinstance(self.rows, tuple) else (self.rows,) * self.tables

    @property
    def sequence(self) -> int:
        return 1

    def _less(self) -> dict[str, Any]:
        tables = min(self.tables, 5)
        few = [min(size, 41) for size in self.sizes[:tables]]
        return {
            "tables": tables, "rows": few if isinstance(self.rows, tuple) else few[0], "width": min(self.width, 8),
            "lookups": min(self.lookups, 3), "bottom": [min(size, 16) for size in self.bottom[:2]],
            "top": [min(size, 16) for size in self.top[:2]],
        }  # fmt: skip


KINDS: dict[str, type[Named]] = {"gpt": Model, "moe": MoE, "bert": Bert, "t5": T5, "resnet": ResNet, "dlrm": DLRM}


def kind_of(values: Any) -> str:
    """The kind of a model, or of what is to become one; `gpt` finds the words for a name that is unknown."""
    name = values.get("name") if isinstance(values, Mapping) else getattr(values, "name", None)
    if not isinstance(name, str) or name in KINDS:
        return name if isinstance(name, str) else "gpt"
    return str(PRESETS.get(name, {}).get("kind", "gpt"))


AnyModel = Annotated[
    Annotated[Model, Tag("gpt")] | Annotated[MoE, Tag("moe")] | Annotated[Bert, Tag("bert")]
    | Annotated[T5, Tag("t5")] | Annotated[ResNet, Tag("resnet")] | Annotated[DLRM, Tag("dlrm")],
    Discriminator(kind_of),
]  # fmt: skip
