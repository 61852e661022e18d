"""A job: what the user asked for, read from TOML and `--set`, checked, with every default filled in.

All problems are reported at once, each with its place. A key means the same in the file, in `--set` and in the
resolved copy that is saved with the run. Sizes of models come from here, models are built in `shardwise.models`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from shardwise.errors import JobError, LayoutError, nearest
from shardwise.layout import Layout
from shardwise.presets import PRESETS

PRECISIONS = ("float64", "float32", "bf16", "fp16")
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


class Model(Section):
    """The shape of one decoder. With a preset as `name`, the preset's shape is the default."""

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

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("name", "gpt"), str):
            return values
        name = values.get("name", "gpt")
        if name == "gpt":
            return values
        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}; {nearest(name, ['gpt', *PRESETS])}")
        return {**PRESETS[name], **values}

    @model_validator(mode="after")
    def _shape(self) -> Model:
        fill = {}
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


class Data(Section):
    source: Literal["stdlib", "text", "jsonl", "tokens", "synthetic"] = "stdlib"
    path: str = ""
    """A file, folder or glob for text, jsonl and tokens."""
    field: str = "text"
    """The field of a jsonl record that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the source, kept beside the run) or the path of a saved tokenizer."""
    validation: float = Field(0.02, ge=0.0, lt=1.0)
    """The share of the samples that is held out."""
    workers: int = Field(0, ge=0)
    """Processes that prepare batches; 0: a thread."""
    prefetch: int = Field(2, ge=1)
    """Batches prepared ahead."""
    samples: Count = Field(4096, ge=1)
    """Samples in an epoch of the synthetic source."""


class BatchSize(Section):
    samples: Count | None = Field(None, ge=1)
    tokens: Count | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one(self) -> BatchSize:
        if self.samples is not None and self.tokens is not None:
            raise ValueError("give samples or tokens, not both")
        return self


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(3e-4, ge=0.0)
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    """For matrices; biases and norms are not decayed."""
    clip: float = Field(1.0, ge=0.0)
    """The largest global gradient norm; 0: no clipping."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """After the warm-up: constant, cosine or linear down to `final`, or stable with a linear decay at the end."""
    warmup: float = Field(0.05, ge=0.0)
    """Steps of warm-up; below 1: the share of all steps."""
    decay: float = Field(0.2, ge=0.0)
    """Steps of the final decay of `wsd`; below 1: the share of all steps."""
    final: float = Field(0.1, ge=0.0, le=1.0)
    """The last learning rate over the highest."""


class Checkpoint(Section):
    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep: int = Field(2, ge=1)
    """How many of the newest stay."""
    asynchronous: bool = True


class Run(Section):
    folder: str = ""
    """Where the run is kept; empty: a new folder below `runs`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: int = Field(0, ge=0)
    """Processes for `layout = "auto"`; 0: one per device, or per core without a GPU."""


class Validation(Section):
    every: int = Field(0, ge=0)
    """Steps between validations; 0: only at the end."""
    samples: int = Field(64, ge=1)


class Job(Section):
    """One training job, checked, with every default filled in; `job.toml` in the run folder shows them all."""

    seed: int = Field(0, ge=0)
    steps: int | None = Field(None, ge=1)
    tokens: Count | None = Field(None, ge=1)
    layout: str = "auto"
    precision: Literal["float64", "float32", "bf16", "fp16"] = "float32"
    compile: bool = False
    model: Model = Model()
    data: Data = Data()
    batch: BatchSize = BatchSize()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    run: Run = Run()

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("give steps or tokens, not both")
        if self.layout != "auto":
            try:
                Layout.parse(self.layout)
            except LayoutError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def samples(self) -> int:
        """Samples in a global batch."""
        if self.batch.samples is not None:
            return self.batch.samples
        if self.batch.tokens is not None:
            return max(1, self.batch.tokens // self.model.sequence)
        return 32

    @property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return max(1, -(-self.tokens // (self.samples * self.model.sequence)))
        return self.steps if self.steps is not None else 200

    def text(self) -> str:
        """The job as TOML with every default filled in; `load_job` reads it back to an equal job."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def load_job(path: Path | None, overrides: Sequence[str] = ()) -> Job:
    """Reads a job file (None: an empty one), applies `key.path=value` overrides, checks everything."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise JobError(f"there is no job file {path}.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"the job file {path} cannot be read: {error}.") from None
        except tomllib.TOMLDecodeError as error:
            raise JobError(f"{path} is not valid TOML: {error}.") from None
    for override in overrides:
        _override(values, override)
    return make_job(values, str(path) if path else "the job")


def make_job(values: Mapping[str, Any], where: str = "the job") -> Job:
    try:
        return Job(**values)
    except ValidationError as error:
        problems = [_sentence(problem) for problem in error.errors()]
        raise JobError("\n".join(f"{where}: {problem}" for problem in problems)) from None
    except TypeError as error:
        raise JobError(f"{where}: {error}.") from None


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise JobError(f"--set {override!r}: write key=value, for instance --set steps=100.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    *sections, leaf = key.split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise JobError(f"--set {key}: {section!r} is a value, not a section.")
    place[leaf] = value
    if leaf in ("samples", "tokens") and sections == ["batch"]:
        place.pop("tokens" if leaf == "samples" else "samples", None)
    if not sections and leaf in ("steps", "tokens"):
        place.pop("tokens" if leaf == "steps" else "steps", None)


def _sentence(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *sections, key = problem["loc"]
        known = _keys_of(sections)
        return f"unknown key {place!r}; {nearest(str(key), known)}"
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    message += "" if message.endswith("?") else "."
    if problem["type"] == "value_error":
        return f"{place}: {message}" if place else message
    if problem["type"] == "missing":
        return f"{place}: a value is missing here."
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{place} = {problem['input']!r}: {place} is a section; write its keys below [{place}]."
    return f"{place} = {problem['input']!r}: {message.replace('Input should', 'should')}"


def _keys_of(sections: Sequence[str | int]) -> list[str]:
    kind: Any = Job
    for section in sections:
        field = kind.model_fields.get(section)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return []
        kind = field.annotation
    return list(kind.model_fields)
