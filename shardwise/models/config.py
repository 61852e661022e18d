"""The base of every config section, and of the `[model]` section of every family. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from shardwise.models.presets import PRESETS

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
    """A section of a job: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class ModelConfig(ConfigSection):
    """The base of every family's `[model]` section: what the rest of the package may ask of any model."""

    description: ClassVar[str]
    """The family with its article, for messages: "a decoder"."""
    sample_kind: ClassVar[Literal["tokens", "images", "clicks"]] = "tokens"
    """What a sample of the data is."""
    is_causal_lm: ClassVar[bool] = False
    """Whether the model generates text from left to right."""
    targets_are_text: ClassVar[bool] = True
    """Whether every target is a token of the text, so that bits per byte can be computed from the loss."""
    is_recomputable_elsewhere: ClassVar[bool] = True
    """Whether a sample's result depends on the other samples of the batch (batch norm, shared expert capacity)."""
    requires_single_micro_batch: ClassVar[bool] = False
    """Whether each rank must run its share of the batch as a single micro-batch."""
    supports_muon: ClassVar[bool] = True
    """Whether blocks have weight matrices that Muon can update."""
    name: str

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Fills in the shape of a preset; keys that are given win."""
        preset = PRESETS.get(str(values.get("name")), {}) if isinstance(values, Mapping) else {}
        return {**{key: value for key, value in preset.items() if key != "family"}, **values} if preset else values

    def shrink(self) -> Self:
        """Returns a small model of the same family for proofs; odd sizes stay odd."""
        return self.model_validate(self.model_dump() | self._shrunk_values())

    def _shrunk_values(self) -> dict[str, Any]:
        """Returns the values that differ in the small model."""
        raise NotImplementedError

    @property
    def throughput_unit(self) -> str:
        """What throughput counts: tokens or samples."""
        return "tokens" if self.sample_kind == "tokens" else "samples"

    @property
    def sequence_length(self) -> int:
        """Positions of a sample inside the model; 1 if a sample is not a sequence."""
        return int(getattr(self, "sequence", 1))

    @property
    def vocab_size(self) -> int:
        """Number of token ids; 0 if a sample has no tokens."""
        return int(getattr(self, "vocab", 0))

    @property
    def length(self) -> int:
        """Positions that the model computes per sample, over encoder and decoder."""
        return self.sequence_length

    @property
    def text_window(self) -> int:
        """Tokens of text that one sample is made from."""
        return self.length

    @property
    def reserved_ids(self) -> int:
        """Number of ids at the end of the vocabulary that the text must not contain (mask, sentinels)."""
        return 0

    @property
    def document_separator(self) -> int:
        """Token id across which attention is masked; -1: attention is not masked by document."""
        return -1

    @property
    def num_experts(self) -> int:
        """Experts of a sparse block; 0: the model has none."""
        return 0

    @property
    def adamw_only(self) -> str:
        """The configured key that works only with AdamW; empty: none."""
        return ""

    def phases(self, steps: int) -> list[tuple[int, Self]]:
        """Returns the phases of a run of `steps` steps, as pairs (steps, model config)."""
        return [(steps, self)]
