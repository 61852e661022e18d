"""The job: everything the user configures, read from TOML and `--set`, validated, with every default filled in.

All problems are reported at once, each with its key. A key means the same in the file, in `--set` and in the
resolved copy that is saved with the run. The `[model]` section is defined by each family in `shardwise.models`. What
each other key means is in `job_keys.toml`, from which the reference page is made."""

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from shardwise.console import format_count
from shardwise.errors import JobError, LayoutError, shorten
from shardwise.files import parse_toml
from shardwise.job_problems import describe_problems
from shardwise.layout import Layout, divisible_batch
from shardwise.models.config import ConfigSection, Count, ModelConfig
from shardwise.models.family import Family
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.pretrained_config import mask_token, tokenizer_size
from shardwise.models.registry import family_name, family_of, parse_model

_COMPRESSION = re.compile(r"|fp16|bf16|int8|onebit|topk:0?\.\d{0,9}[1-9]\d{0,9}|powersgd(:rank=[1-9]\d{0,4})?")
_REPLACED_KEYS = {"batch.samples": "tokens", "batch.tokens": "samples", "steps": "tokens", "tokens": "steps"}
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_GATE = re.compile(r"\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*", re.IGNORECASE)
TrackerName = Literal["", "csv", "tensorboard", "wandb", "prometheus", "mlflow"]


class DataConfig(ConfigSection):
    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "chat", "tokens", "mix", "synthetic", "criteo",
                    "images", "cifar10"] = "stdlib"  # fmt: skip
    path: str = ""
    mix: dict[str, Annotated[float, Field(gt=0.0)]] = {}
    text_field: str = "text"
    tokenizer: str = "bytes"
    chat_template: str = ""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    truncate: Literal["right", "left", "drop"] = "right"
    pack: bool = False
    validation_fraction: float = Field(0.02, ge=0.0, lt=1.0)
    workers: int = Field(0, ge=0, le=256)
    prefetch: int = Field(2, ge=1, le=1000)
    samples: Count = Field(4096, ge=1, le=10**12)
    augment: tuple[Literal["crop", "flip", "colour", "cutout"], ...] = ()
    on_bad_record: Literal["stop", "skip"] = "stop"

    def model_post_init(self, context: Any) -> None:
        if bool(self.mix) != (self.source == "mix"):
            raise ValueError('source = "mix" and paths below [data.mix] belong together; set both or neither')
        for key in ("chat_template", "train_on", "truncate", "pack"):
            if self.source not in ("chat", "synthetic") and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f'{key} = {getattr(self, key)!r} is for source = "chat" only; remove it')
        if self.path and "source" not in self.model_fields_set:
            raise ValueError(f"path = {self.path!r} needs a source: text, jsonl, parquet, datasets, tokens or images")


class BatchConfig(ConfigSection):
    samples: Count | None = Field(None, ge=1, le=10**8)
    tokens: Count | None = Field(None, ge=1, le=10**12)

    def model_post_init(self, context: Any) -> None:
        if self.samples is not None and self.tokens is not None:
            raise ValueError("set samples or tokens, not both")


class OptimizerConfig(ConfigSection):
    name: Literal["adamw", "lamb", "adafactor", "muon", "sgd"] = "adamw"
    lr: float = Field(3e-4, ge=0.0)
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    weight_decay_overrides: dict[str, Annotated[float, Field(ge=0.0)]] = {}
    momentum: float = Field(0.95, ge=0.0, lt=1.0)
    state_dtype: Literal["float32", "bf16", "8bit"] = "float32"
    offload: bool = False
    clip: float = Field(1.0, ge=0.0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: float = Field(0.05, ge=0.0)
    wsd_decay: float = Field(0.2, ge=0.0)
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0)

    def model_post_init(self, context: Any) -> None:
        if self.state_dtype != "float32" and self.name != "adamw":
            raise ValueError(f"state_dtype = {self.state_dtype!r} works with adamw only, not {self.name}; remove it")
        if self.offload and (self.name != "adamw" or self.state_dtype == "8bit"):
            raise ValueError("offload works with adamw and moments in float32 or bf16 only; remove it or change them")
        if self.schedule != "wsd" and self.wsd_decay != type(self).model_fields["wsd_decay"].default:
            raise ValueError(f'wsd_decay = {self.wsd_decay:g} is for schedule = "wsd" only, whose decay is linear')


class EmbeddingTablesConfig(ConfigSection):
    sharding: Literal["auto", "table", "row"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    optimizer: Literal["adagrad", "adam"] = "adagrad"
    lr_multiplier: float = Field(1.0, gt=0.0)
    cached_rows: Count = Field(0, ge=0, le=10**10)


class GradientConfig(ConfigSection):
    compress: str = ""
    compress_after: float = Field(0.2, ge=0.0)

    def uncompressed_steps(self, total_steps: int) -> int:
        return round(self.compress_after * total_steps if self.compress_after < 1 else self.compress_after)

    def model_post_init(self, context: Any) -> None:
        if not _COMPRESSION.fullmatch(self.compress):
            methods = "fp16, bf16, int8, onebit, topk:0.01 (a fraction between 0 and 1) or powersgd:rank=4"
            raise ValueError(f"compress = {self.compress!r} is not a compression method; use {methods}")


class LocalSGDConfig(ConfigSection):
    every: int = Field(1, ge=1, le=10**9)
    outer_optimizer: Literal["", "nesterov"] = ""
    outer_lr: float = Field(0.7, gt=0.0)
    outer_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    fragments: int = Field(1, ge=1, le=10_000)

    def model_post_init(self, context: Any) -> None:
        if self.fragments > self.every:
            raise ValueError(f"fragments ({self.fragments}) exceeds every ({self.every}); a step sends at most one")


class LossConfig(ConfigSection):
    chunk_size: int = Field(0, ge=0, le=10**9)
    dpo_beta: float = Field(0.0, ge=0.0)


class CheckpointConfig(ConfigSection):
    every: int = Field(0, ge=0)
    keep: int = Field(2, ge=1, le=10**6)
    asynchronous: bool = True
    snapshot_every: int = Field(10, ge=0)


class ValidationSet(ConfigSection):
    path: str  # a file, folder or glob; its suffix or a prefix gives the format, as in `data.mix`
    source: str = ""  # the format, if `path` does not give it: a value of `data.source`
    weight: float = Field(1.0, ge=0.0)  # weight of the set's loss in the validation loss


class ValidationConfig(ConfigSection):
    every: int = Field(0, ge=0)
    samples: int = Field(64, ge=1, le=10**9)
    sets: dict[str, ValidationSet] = {}
    patience: int = Field(0, ge=0, le=10**9)
    keep_best: bool = False

    @field_validator("sets", mode="before")
    @classmethod
    def _read_paths(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: {"path": value} if isinstance(value, str) else value for name, value in values.items()}

    def model_post_init(self, context: Any) -> None:
        for name in self.sets:
            if not re.fullmatch(r"[\w-]{1,40}", name) or name in ("loss", "bits_per_byte", "accuracy"):
                raise ValueError(f"sets: {name!r} is no name for a set; use letters, digits, - and _, and no metric")
        if self.sets and not any(one.weight for one in self.sets.values()):
            raise ValueError("sets: all weights are 0; give at least one set a weight")
        if self.patience and not self.every:
            raise ValueError("patience counts validations; set every as well")


class ExportConfig(ConfigSection):
    gates: dict[str, Any] = {}

    def model_post_init(self, context: Any) -> None:
        self.conditions()

    def conditions(self) -> dict[str, tuple[str, float]]:
        """Returns the gates by dotted name: the comparison and its bound."""
        return dict(_conditions(self.gates, ""))


def _conditions(values: Mapping[str, Any], prefix: str) -> Any:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _conditions(value, f"{prefix}{name}.")
        elif isinstance(value, str) and (match := _GATE.fullmatch(value)):
            yield f"{prefix}{name}", (match[1], float(match[2]))
        else:
            raise ValueError(f'gates: {prefix}{name} = {value!r} is no condition; write for example "<= 2.1"')


class RunConfig(ConfigSection):
    folder: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: int = Field(0, ge=0, le=10_000)
    cluster: str = ""
    max_restarts: int = Field(3, ge=0, le=10**6)
    hang_timeout: float = Field(300.0, gt=0, le=10**7)
    standby: bool = True
    rejoin_timeout: float = Field(30.0, ge=0, le=10**7)
    join_timeout: float = Field(300.0, gt=0, le=10**7)
    node_patience: float = Field(0.7, ge=0.3, le=10**6)
    elastic: bool = False
    on_nan: Literal["skip", "rollback", "stop"] = "skip"
    loss_spike_threshold: float = Field(0.0, ge=0)
    checksum_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    redundant_compute_every: int = Field(500, ge=0)
    max_corruptions: int = Field(3, ge=0)

    @field_validator("folder")
    @classmethod
    def _refuse_control_characters(cls, folder: str) -> str:
        # Every command names the folder in a line of its own, and its user pastes it into the next command.
        if _CONTROL_CHARACTER.search(folder):
            raise ValueError(
                f"folder = {shorten(folder)} has a line break or another character that cannot be printed; "
                "choose a name without it"
            )
        return folder


class Job(ConfigSection):
    """One training job, checked, with every default filled in; `job.toml` in the run folder shows them all."""

    seed: int = Field(0, ge=0)
    steps: int | None = Field(None, ge=1, le=10**9)
    tokens: Count | None = Field(None, ge=1)
    layout: str = "auto"
    precision: Literal["float64", "float32", "bf16", "fp16", "fp8"] = "float32"
    compile: bool | Literal["auto"] = "auto"
    offload_activations: bool = False
    tracker: TrackerName | tuple[TrackerName, ...] = ""
    sdpa_backend: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    model: SerializeAsAny[ModelConfig] = DecoderConfig()
    embedding_tables: EmbeddingTablesConfig = EmbeddingTablesConfig()
    loss: LossConfig = LossConfig()
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    gradient: GradientConfig = GradientConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    export: ExportConfig = ExportConfig()
    run: RunConfig = RunConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _choose_family(cls, values: Any) -> Any:
        return parse_model(values) if isinstance(values, Mapping) else values

    @field_validator("layout")
    @classmethod
    def _parse_layout(cls, text: str) -> str:
        try:
            layout = Layout() if text == "auto" else Layout.parse(text)
        except LayoutError as error:
            given = f"layout {shorten(text)}: "
            raise ValueError(given + str(error).removeprefix(given)) from None
        if not text.strip():
            raise ValueError('layout is empty; write layout = "replicate=1" for one process, or "auto"')
        if layout.zero > layout.shard == 1:
            raise ValueError(f"layout '{text}': zero={layout.zero} shards over shard=N, which is 1; set shard")
        return text

    def model_post_init(self, context: Any) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("set steps or tokens, not both")
        if self.gradient.compress and self.precision == "fp16":
            raise ValueError("gradient.compress: fp16 loss scaling would rescale the error-feedback buffers; use bf16")
        if self.optimizer.name == "muon" and not self.model.supports_muon:
            needs = "optimizer.name = 'muon' needs matrices of transformer blocks"
            raise ValueError(f"{needs}; {self.model.description} has none")
        if self.optimizer.name != "adamw" and self.model.adamw_only:
            raise ValueError(f"{self.model.adamw_only} works with adamw only, not with {self.optimizer.name}")
        if self.data.augment and self.model.sample_kind != "images":
            raise ValueError(f"data.augment applies to images, but {self.model.description} reads none; remove it")
        if self.data.source == "chat" and self.model.document_separator >= 0:
            raise ValueError("model.eod_token_id is for text; with data.source = 'chat' use data.pack instead")
        if self.loss.dpo_beta and (self.data.source not in ("chat", "synthetic") or self.data.pack):
            raise ValueError('loss.dpo_beta needs data.source = "chat" with pairs of answers, and without data.pack')

    @property
    def samples(self) -> int:
        """Global batch size in samples."""
        if self.batch.tokens is not None:
            return divisible_batch(self.batch.tokens / self.model.sequence_length)
        return self.batch.samples or 32

    @property
    def rounding(self) -> str:
        """Says that the batch is not quite `batch.tokens`, if so."""
        wanted = self.batch.tokens
        if wanted is None or wanted == self.samples * self.model.sequence_length:
            return ""
        return f" (batch.tokens = {format_count(wanted)}, rounded to divide well)"

    @property
    def is_packed(self) -> bool:
        """Whether a sample may hold several conversations; those of DPO hold two."""
        return self.data.pack or self.loss.dpo_beta > 0

    def is_validated_after(self, step: int) -> bool:
        return step == self.total_steps or bool(self.validation.every and step % self.validation.every == 0)

    @property
    def trackers(self) -> tuple[str, ...]:
        names = (self.tracker,) if isinstance(self.tracker, str) else self.tracker
        return tuple(dict.fromkeys(name for name in names if name))

    def should_compile(self, device: str, layout: Layout) -> bool:
        """Whether to compile blocks on a device of this type."""
        return device == "cuda" and not layout.has_split_backward if self.compile == "auto" else self.compile

    @property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return max(1, -(-self.tokens // (self.samples * self.model.sequence_length)))
        return self.steps if self.steps is not None else 200

    @property
    def family(self) -> Family:
        return family_of(self.model)

    def require_decoder(self) -> DecoderConfig:
        """Returns the config of a model that generates text; raises JobError for any other."""
        model = self.model
        if not model.is_causal_lm:
            raise JobError(f"model.name = {model.name!r}: {model.description} does not generate text; use a decoder.")
        return cast(DecoderConfig, model)

    def to_toml(self) -> str:
        """Returns the job as TOML with every default filled in; `load_job` reads it back as an equal job."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def load_job(path: Path | None, overrides: Sequence[str] = ()) -> Job:
    """Reads a job file (None means all defaults), applies `key.path=value` overrides and validates the result."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply_override({}, override)  # for its form: "--set steps 5" has a job file "5"
    if path is not None:
        try:
            values = parse_toml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise JobError(f"the job file {path} does not exist.") from None
        except OSError as error:
            remedy = f"; `shardwise init --data {path}` writes a job for a folder of data" if path.is_dir() else ""
            raise JobError(f"the job file {path} cannot be read: {error.strerror}{remedy}.") from None
        except ValueError as error:
            remedy = " A job is a TOML file; docs/how-to has DeepSpeed's keys beside ours." * (path.suffix == ".json")
            raise JobError(f"{path} is not valid TOML: {error}.{remedy}") from None
    for override in overrides:
        _apply_override(values, override)
    return make_job(values, str(path) if path else "the job", {text.partition("=")[0].strip() for text in overrides})


def make_job(values: Mapping[str, Any], origin: str = "the job", overridden: Container[str] = ()) -> Job:
    """Validates a mapping as parsed from TOML and returns the job; raises JobError that lists all problems, those of
    keys that are not `overridden` with their origin."""
    problems: list[Any] = []
    family, model = "", values.get("model", {})
    if isinstance(model, Mapping):  # validated separately: the keys depend on the family
        try:
            family = family_name(model["name"]) if isinstance(model.get("name"), str) else "gpt"
            values = _match_tokenizer(values, parse_model(model))
        except ValidationError as error:
            problems = [{**problem, "loc": ("model", *problem["loc"])} for problem in error.errors()]
        except ValueError as error:
            problems = [{"type": "value_error", "loc": ("model",), "msg": str(error), "input": None}]
            if "flavor" in model:  # torchtitan's half of a name
                problems.append({"type": "extra_forbidden", "loc": ("model", "flavor"), "input": model["flavor"]})
    if problems:
        values = {key: value for key, value in values.items() if key != "model"}
    try:
        job = Job(**values)
    except ValidationError as error:
        # After a model error, checks across sections (empty loc) would complain about the default model.
        problems += [problem for problem in error.errors() if problem["loc"] or not problems]
    except TypeError as error:
        raise JobError(f"{origin}: {error}.") from None
    if not problems:
        return job
    told = describe_problems(problems, family, Job.model_fields)
    raise JobError("\n".join(f"{origin}: " * (key not in overridden) + sentence for key, sentence in told))


def _match_tokenizer(values: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns the job's values with the model: it takes the tokenizer of what it starts from, or else its vocabulary
    is that of a given tokenizer; only where the job does not say so."""
    data = values.get("data", {})
    given, folder = data.get("tokenizer") if isinstance(data, Mapping) else None, model.tokenizer_folder
    asked = getattr(model, "mask_token_id", 0) == -1
    known = {"mask_token_id": mask} if asked and (mask := mask_token(given or str(folder or ""))) >= 0 else {}
    model = model.model_copy(update=known)
    if isinstance(data, Mapping) and given is None and folder is not None:
        return {**values, "model": model, "data": {**data, "tokenizer": str(folder)}}
    field = type(model).model_fields.get("vocab")
    is_open = field is not None and field.default and "vocab" not in model.model_fields_set
    if isinstance(given, str) and is_open and (vocab := tokenizer_size(given)):
        model = parse_model({**values.get("model", {}), **known, "vocab": vocab + model.reserved_ids})
    return {**values, "model": model}


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise JobError(f"--set {shorten(override)} is not of the form key=value; write for example --set steps=100.")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()  # an unquoted string
    *sections, leaf = key.split(".")
    section_values = values
    for section in sections:
        section_values = section_values.setdefault(section, {})
        if not isinstance(section_values, dict):
            raise JobError(f"--set {key}: {section!r} is a value, not a section.")
    section_values[leaf] = value
    section_values.pop(_REPLACED_KEYS.get(key, ""), None)
