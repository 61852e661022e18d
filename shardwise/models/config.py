"""Base classes of config sections and of every family's `[model]` section, whose keys are explained in
`model_keys.toml`. Imports no PyTorch."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from shardwise.errors import shorten
from shardwise.files import parse_toml, user_path
from shardwise.models.adapter_files import read_adapter_config

MAX_NUMBER = 10**15
"""Bound of every number of a job but the seed. Most keys have a lower one: sizes that some product overflows, counts
of processes and files."""


def read_tables(name: str) -> dict[str, dict[str, Any]]:
    """Returns the tables of a TOML file of this folder. `like` names one before it whose values are taken over, also
    those of subtables; tables whose name begins with an underscore are only for that."""
    found: dict[str, dict[str, Any]] = {}
    for key, table in parse_toml((Path(__file__).parent / name).read_text(encoding="utf-8")).items():
        base = found.get(table.pop("like", ""), {})
        subtables = {name: {**base.get(name, {}), **value} for name, value in table.items() if isinstance(value, dict)}
        found[key] = {**base, **table, **subtables}
    return {key: table for key, table in found.items() if not key.startswith("_")}


PRESETS = read_tables("presets.toml")  # published model shapes by name
_SURROGATE = re.compile("[\ud800-\udfff]")  # no text in a file has one: Python's for bytes that are not UTF-8
_SUFFIX_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _parse_count(value: object) -> object:
    """Accepts `"0.5M"` for 500000; leaves anything else to the type check."""
    if not isinstance(value, str):
        return value
    digits, suffix = (value[:-1], value[-1].lower()) if value[-1:].lower() in _SUFFIX_FACTORS else (value, "")
    try:
        number = float(digits) * _SUFFIX_FACTORS.get(suffix, 1)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{shorten(value)} is not a whole number; write 500000 or '0.5M'") from None
    return int(number)


Count = Annotated[int, BeforeValidator(_parse_count)]


class ConfigSection(BaseModel):
    """A section of a job: frozen, every number is finite and bounded, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_value(cls, value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if (isinstance(kind, type) and issubclass(kind, BaseModel)) or "Any" in str(kind):
            return validate(value)
        limit = 2**63 - 1 if info.field_name == "seed" else MAX_NUMBER
        _check_plain(value, "bool" in str(kind), limit)
        valid = validate(value)  # of "10", pydantic makes a number
        _check_plain(valid, True, limit)
        return valid


def _check_plain(value: object, allows_bool: bool, limit: int) -> None:
    """Refuses what Python would take for something else (true for 1) or choke on, in a value or inside of it."""
    if isinstance(value, bool) and not allows_bool:
        raise ValueError(f"{str(value).lower()} is not a number or text")
    if isinstance(value, int | float) and limit < abs(value) < float("inf"):
        raise ValueError(f"{shorten(value)} is beyond {float(limit):g}, the bound of every number here")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("it contains a NUL character")
    if isinstance(value, str) and _SURROGATE.search(value):  # of a file's name in another encoding
        raise ValueError(
            f"{shorten(value)} is not valid UTF-8, in which a run keeps its job; rename what it names, or make a link "
            "to it with another name"
        )
    items = [*value, *value.values()] if isinstance(value, Mapping) else value
    for item in items if isinstance(items, list | tuple) else ():
        _check_plain(item, allows_bool, limit)


def split_step(weights: str) -> tuple[Path, str]:
    """Splits `RUN@STEP`; the step is empty if none is named. A folder may have an @ in its name."""
    path, at, step = weights.rpartition("@")
    is_step = at and not user_path(weights).exists()
    return user_path(path if is_step else weights), step if is_step else ""


CODE_BYTES = {"int8": 1 + 4 / 64, "nf4": 0.5 + 4 / 64}  # of a weight, with its share of a block's scale


class LoRA(ConfigSection):
    """Trains low-rank adapters beside the linear layers instead of the model's weights (`model.lora`)."""

    adapter: str = ""
    rank: int = Field(16, ge=1, le=10**5)
    alpha: float = Field(0.0, ge=0.0)
    targets: tuple[str, ...] = ()
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    init_std: float = Field(0.0, ge=0.0)
    quantize: Literal["", "int8", "nf4"] = ""

    @model_validator(mode="before")
    @classmethod
    def _read_adapter(cls, values: Any) -> Any:
        folder = values.get("adapter") if isinstance(values, Mapping) else ""
        return {**read_adapter_config(Path(folder)), **values} if isinstance(folder, str) and folder else values

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def rank_of(self, layer: str, matches: Callable[[str, str], bool]) -> int:
        return next((rank for pattern, rank in self.ranks.items() if matches(layer, pattern)), self.rank)

    def alpha_of(self, layer: str, matches: Callable[[str, str], bool]) -> float:
        given = next((alpha for pattern, alpha in self.alphas.items() if matches(layer, pattern)), self.alpha)
        return given or 2.0 * self.rank_of(layer, matches)


class ModelConfig(ConfigSection):
    """The base of every family's `[model]` section: the attributes that the rest of the package uses."""

    description: ClassVar[str]  # family name with an indefinite article, for error messages: "a decoder"
    sample_kind: ClassVar[Literal["tokens", "images", "clicks"]] = "tokens"  # type of a data sample
    is_causal_lm: ClassVar[bool] = False  # whether the model generates text from left to right
    targets_are_text: ClassVar[bool] = True
    """Whether every target is a token of the text, so that bits per byte can be computed from the loss."""
    is_recomputable_elsewhere: ClassVar[bool] = True
    """Whether another data-parallel rank can recompute a micro-batch of this model alone (no batch norm over ranks, no
    experts or tables on other ranks)."""
    single_micro_batch: ClassVar[str] = ""
    """Why each rank must run its share of the batch as a single micro-batch, without gradient accumulation: what it is
    that sees the samples together. Empty: the batch may be cut."""
    passes_batch: ClassVar[bool] = False
    """Whether every pipeline stage gets the batch, because it runs the forward of a module that is not ours."""
    supports_muon: ClassVar[bool] = True  # whether blocks have weight matrices, which Muon updates
    counts_samples: ClassVar[bool] = False  # whether the loss is a mean over samples, whatever their targets are
    reserved_ids: ClassVar[int] = 0
    """Number of ids at the end of the vocabulary that the text must not contain (mask, sentinels)."""
    document_separator: ClassVar[int] = -1
    """Id of the end-of-document token, across which attention is masked; -1: no document masking."""
    num_experts: ClassVar[int] = 0  # number of routed experts per MoE layer; 0: the model has none
    reports_routing: ClassVar[bool] = False  # whether the layers count the tokens that each expert gets
    adamw_only: ClassVar[str] = ""  # the configured key that works only with AdamW; empty if there is none
    name: str
    weights: str = ""
    lora: LoRA | None = None

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Fills in the preset's values; explicit keys override them."""
        preset = PRESETS.get(str(values.get("name")), {}) if isinstance(values, Mapping) else {}
        return {**{key: value for key, value in preset.items() if key != "family"}, **values} if preset else values

    def _shrunk_values(self) -> dict[str, Any]:
        """Returns what differs in a small config for `shardwise verify`; odd sizes stay odd (uneven shards)."""
        raise NotImplementedError

    @property
    def throughput_unit(self) -> str:
        """Unit of throughput: tokens or samples."""
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
        """Number of positions that the model computes per sample, in encoder and decoder together."""
        return self.sequence_length

    @property
    def text_window(self) -> int:
        """Number of text tokens that one sample is built from."""
        return self.length

    @property
    def weights_folder(self) -> Path | None:
        """The Hugging Face folder whose weights training starts from, if any."""
        folder = user_path(self.weights)
        return folder if self.weights not in ("", "random") and (folder / "config.json").is_file() else None

    @property
    def pretrained_folder(self) -> Path | None:
        """The Hugging Face folder whose config and tokenizer belong to the model, if any."""
        return self.weights_folder

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the tokenizer.json of the model: that folder, or the run that it starts from, if any."""
        folders = self.pretrained_folder, split_step(self.weights)[0] if self.weights else None
        return next((folder for folder in folders if folder and (folder / "tokenizer.json").is_file()), None)
