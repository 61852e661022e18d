"""The job: everything the user configures, read from TOML and `--set`, validated, with every default filled in.

All problems are reported at once, each with its key. A key means the same in the file, in `--set` and in the
resolved copy that is saved with the run. The `[model]` section is defined by each family in `shardwise.models`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from shardwise.errors import JobError, LayoutError, shorten
from shardwise.files import parse_toml
from shardwise.job_errors import describe_problems
from shardwise.layout import Layout
from shardwise.models.config import ConfigSection, Count, ModelConfig
from shardwise.models.family import Family
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.pretrained_config import mask_token, tokenizer_size
from shardwise.models.registry import family_name, family_of, parse_model


class DataConfig(ConfigSection):
    source: Literal["stdlib", "text", "jsonl", "chat", "tokens", "mix", "synthetic", "criteo", "cifar10"] = "stdlib"
    """Where samples come from."""
    path: str = ""
    """A file, folder or glob for text, jsonl, chat and tokens; a file for criteo; a folder for cifar10. A URL such as
    `s3://bucket/corpus` is downloaded once per machine."""
    mix: dict[str, Annotated[float, Field(gt=0.0)]] = {}
    """For `source = "mix"`: sampling weight by path. The suffix gives the format (`.jsonl`, `.bin`, otherwise text), or
    a prefix does (`jsonl:folder`); `stdlib` is a valid entry too."""
    text_field: str = "text"
    """The field of a jsonl record that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the source and saved with the run), or the path of a saved tokenizer. If it is
    not set, a model that starts from a folder or run takes the tokenizer of that."""
    chat_template: str = ""
    """For `source = "chat"`: a Jinja file; empty takes the template of the tokenizer's folder, or else ChatML."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """For chat: what counts towards the loss: all messages of the assistant, its last one, or everything."""
    truncate: Literal["right", "left", "drop"] = "right"
    """For chat: which end of a conversation is cut if it is longer than the sequence; or it is dropped."""
    pack: bool = False
    """For chat: whether a sample holds several conversations, which do not see one another."""
    validation_fraction: float = Field(0.02, ge=0.0, lt=1.0)
    """Fraction of the samples held out for validation."""
    workers: int = Field(0, ge=0, le=256)
    """Loader processes; 0 prepares batches in a thread."""
    prefetch: int = Field(2, ge=1, le=1000)
    """Batches to prepare ahead of time."""
    samples: Count = Field(4096, ge=1, le=10**12)
    """Samples per epoch of the synthetic source."""
    augment: tuple[Literal["crop", "flip", "colour", "cutout"], ...] = ()
    """Augmentations applied to training images on the fly."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """What to do with a jsonl, chat, criteo or cifar10 record that cannot be read: end the run, or log and skip it."""

    @model_validator(mode="after")
    def _check_mix(self) -> "DataConfig":
        if bool(self.mix) != (self.source == "mix"):
            raise ValueError('source = "mix" and paths below [data.mix] belong together; set both or neither')
        for key in ("chat_template", "train_on", "truncate", "pack"):
            if self.source not in ("chat", "synthetic") and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f'{key} = {getattr(self, key)!r} is for source = "chat" only; remove it')
        if self.path and "source" not in self.model_fields_set:
            raise ValueError(
                f"path = {self.path!r} needs a source: text, jsonl, chat, tokens, criteo or cifar10; the default, "
                "stdlib, reads Python's standard library"
            )
        return self


class BatchConfig(ConfigSection):
    samples: Count | None = Field(None, ge=1, le=10**8)
    """Global batch size in samples; 32 if neither `samples` nor `tokens` is set."""
    tokens: Count | None = Field(None, ge=1, le=10**12)
    """Global batch size in tokens, rounded down to whole samples."""

    @model_validator(mode="after")
    def _check_one_unit(self) -> "BatchConfig":
        if self.samples is not None and self.tokens is not None:
            raise ValueError("set samples or tokens, not both")
        return self


class OptimizerConfig(ConfigSection):
    name: Literal["adamw", "lamb", "adafactor", "muon", "sgd"] = "adamw"
    """See [optimizers](../explanation/optimizers.md) for what each one does."""
    lr: float = Field(3e-4, ge=0.0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    """Decay rates of the first and second moment, for adamw, lamb and the AdamW part of muon."""
    eps: float = Field(1e-8, gt=0.0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.1, ge=0.0)
    """Applies to matrices and embeddings; biases and norms are not decayed."""
    weight_decay_overrides: dict[str, Annotated[float, Field(ge=0.0)]] = {}
    """Weight decay by parameter name pattern (`"embed.*" = 0.0`); the first match wins."""
    momentum: float = Field(0.95, ge=0.0, lt=1.0)
    """Momentum of sgd and muon."""
    state_dtype: Literal["float32", "bf16", "8bit"] = "float32"
    """Dtype of AdamW's two moments: bf16 halves and 8bit (256 values per scale) quarters them, with rounding."""
    offload: bool = False
    """Whether AdamW's moments live in host memory, and pass through the GPU in every update; same results."""
    clip: float = Field(1.0, ge=0.0)
    """Maximum global gradient norm; 0 disables clipping."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Learning rate after the warm-up: constant, decaying to `min_lr_ratio`, or warmup-stable-decay (wsd)."""
    warmup: float = Field(0.05, ge=0.0)
    """Warm-up steps; a value below 1 is a fraction of all steps."""
    wsd_decay: float = Field(0.2, ge=0.0)
    """Steps of the final decay of `wsd`; a value below 1 is a fraction of all steps."""
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Final learning rate divided by the peak."""

    @model_validator(mode="after")
    def _check_state_dtype(self) -> "OptimizerConfig":
        if self.state_dtype != "float32" and self.name != "adamw":
            raise ValueError(f"state_dtype = {self.state_dtype!r} works with adamw only, not {self.name}; remove it")
        if self.offload and (self.name != "adamw" or self.state_dtype == "8bit"):
            raise ValueError("offload works with adamw and moments in float32 or bf16 only; remove it or change them")
        return self


class EmbeddingTablesConfig(ConfigSection):
    sharding: Literal["auto", "table", "row"] = "auto"
    """How a DLRM's embedding tables are sharded over the ranks; auto picks per table, balancing bytes and lookups."""
    optimizer: Literal["adagrad", "adam"] = "adagrad"
    """Row-wise AdaGrad (one value per row) or sparse Adam (two per weight); updates only rows that the batch uses."""
    lr_multiplier: float = Field(1.0, gt=0.0)
    """Learning rate of the tables, relative to that of the dense weights."""
    cached_rows: Count = Field(0, ge=0, le=10**10)
    """Number of most-used rows that every device also keeps, with their optimizer state."""


class GradientConfig(ConfigSection):
    compress: str = ""
    """Gradient compression with error feedback: `fp16`, `bf16`, `int8`, `onebit`, `topk:0.01` (the largest 1%) or
    `powersgd:rank=4`; empty disables it."""
    compress_after: float = Field(0.2, ge=0.0)
    """Uncompressed steps before compression starts; a value below 1 is a fraction of all steps."""

    def uncompressed_steps(self, total_steps: int) -> int:
        return round(self.compress_after * total_steps if self.compress_after < 1 else self.compress_after)

    @model_validator(mode="after")
    def _check_compress(self) -> "GradientConfig":
        if not re.fullmatch(
            r"|fp16|bf16|int8|onebit|topk:0?\.\d{0,9}[1-9]\d{0,9}|powersgd(:rank=[1-9]\d{0,4})?", self.compress
        ):
            raise ValueError(
                f"compress = {self.compress!r} is not a compression method; use fp16, bf16, int8, onebit, topk:0.01 "
                "(a fraction between 0 and 1) or powersgd:rank=4"
            )
        return self


class LocalSGDConfig(ConfigSection):
    every: int = Field(1, ge=1, le=10**9)
    """Average replica weights every N steps (local SGD); 1 means ordinary synchronous training."""
    outer_optimizer: Literal["", "nesterov"] = ""
    """Optimizer applied to the averaged weight change at each synchronization (DiLoCo); empty takes the plain
    average."""
    outer_lr: float = Field(0.7, gt=0.0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum of the outer optimizer."""
    fragments: int = Field(1, ge=1, le=10_000)
    """Number of fragments into which the blocks are divided; each fragment is synchronized at a different step within
    `every` (streaming DiLoCo)."""

    @model_validator(mode="after")
    def _check_fragments(self) -> "LocalSGDConfig":
        if self.fragments > self.every:
            raise ValueError(f"fragments ({self.fragments}) exceeds every ({self.every}); a step sends at most one")
        return self


class LossConfig(ConfigSection):
    chunk_size: int = Field(0, ge=0, le=10**9)
    """Number of positions per chunk of the fused linear cross-entropy, used without a pipeline; 0 picks a chunk whose
    logits take 1 GiB in bf16."""


class CheckpointConfig(ConfigSection):
    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves only at the end and on a signal."""
    keep: int = Field(2, ge=1, le=10**6)
    """Number of newest checkpoints to keep."""
    asynchronous: bool = True
    """Whether to write files in the background while training continues."""
    snapshot_every: int = Field(10, ge=0)
    """Steps between in-memory snapshots, which survive the death of a worker and speed up restarts in the same
    layout; 0 disables them."""


class RunConfig(ConfigSection):
    folder: str = ""
    """The run folder; empty creates a new one below `runs`. A URL such as `s3://bucket/run` keeps the run in an
    [object store](../how-to/object-store.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto uses GPUs if PyTorch sees any."""
    processes: int = Field(0, ge=0, le=10_000)
    """Processes for `layout = "auto"`; 0 means one per GPU, or one per core without a GPU. With more processes than
    GPUs, processes share them."""
    cluster: str = ""
    """Hardware description for the planner: a file written by `calibrate`, or a name; empty uses the built-in data
    sheet of this machine's GPU, or the `cpu` preset without a GPU."""
    max_restarts: int = Field(3, ge=0, le=10**6)
    """Maximum number of consecutive restarts without progress."""
    hang_timeout: float = Field(300.0, gt=0, le=10**7)
    """Seconds without progress on any rank before the rank that the others wait for counts as hung."""
    standby: bool = True
    """Whether to keep a second set of workers on standby once steps are running: they are forked in advance
    and, on a CPU, also build the model if that takes at most a tenth of the memory."""
    rejoin_timeout: float = Field(30.0, ge=0, le=10**7)
    """Seconds to wait for a lost node before continuing without it (elastic) or ending the run."""
    join_timeout: float = Field(300.0, gt=0, le=10**7)
    """Seconds that the nodes of a run wait for each other at the start, and for a lost node 0."""
    node_patience: float = Field(0.7, ge=0.3, le=10**6)
    """Seconds of silence after which a node counts as lost; 15 times as long, and longer on a busy machine, while its
    kernel still answers."""
    elastic: bool = False
    """Whether to continue with the remaining processes, in a newly planned layout, if restarts cannot bring a rank back
    or a node is lost."""
    on_nan: Literal["skip", "rollback", "stop"] = "skip"
    """What to do after a step with non-finite gradients, which updates nothing: continue, roll back to the last
    checkpoint and retry once, or stop. A dynamic loss scale always skips."""
    loss_spike_threshold: float = Field(0.0, ge=0)
    """Roll back to the last checkpoint and skip the batches since then if the loss exceeds the median of the last
    64 losses by this many robust standard deviations (1.4826 x MAD); 0 disables detection."""
    checksum_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Verify checksums of weights and optimizer states, covering all of them once every N steps, and roll back on
    corruption. 0 disables it; auto keeps the cost below 1% of a step."""
    redundant_compute_every: int = Field(500, ge=0)
    """Steps between checks in which all data-parallel ranks compute one micro-batch and compare; 0 disables them."""
    max_corruptions: int = Field(3, ge=0)
    """Corruptions tolerated per rank before the run ends and names the rank."""


class ValidationConfig(ConfigSection):
    every: int = Field(0, ge=0)
    """Steps between validations; 0 validates only at the end."""
    samples: int = Field(64, ge=1, le=10**9)
    """Maximum number of held-out samples to evaluate."""


class Job(ConfigSection):
    """One training job, checked, with every default filled in; `job.toml` in the run folder shows them all."""

    seed: int = Field(0, ge=0)
    """Determines initial weights, sample order, dropout, augmentation and masking; there is no other random state."""
    steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer steps; 200 if neither `steps` nor `tokens` is set."""
    tokens: Count | None = Field(None, ge=1)
    """Tokens to train on, instead of `steps` (samples, for a model without tokens); rounded up to whole steps."""
    layout: str = "auto"
    """A layout in [text form](layout.md); `"auto"` uses the [planner](../how-to/plan-a-run.md)'s choice for this
    machine."""
    precision: Literal["float64", "float32", "bf16", "fp16", "fp8"] = "float32"
    """Compute dtype. Master weights, gradient accumulation and optimizer states are float64 for float64, otherwise
    float32 (except `optimizer.state_dtype`)."""
    compile: bool | Literal["auto"] = "auto"
    """Whether to compile each block with `torch.compile` (on a CPU this needs a C++ compiler); auto compiles on a GPU
    unless the schedule splits the backward."""
    tracker: Literal["", "csv", "tensorboard", "wandb", "prometheus"] = ""
    """Experiment tracker to log to in addition to `metrics.jsonl`; see [watch a run](../how-to/watch-a-run.md)."""
    sdpa_backend: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Backend of PyTorch's scaled dot-product attention; auto lets PyTorch choose."""
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
    run: RunConfig = RunConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _choose_family(cls, values: Any) -> Any:
        return parse_model(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_consistency(self) -> "Job":
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
        if self.layout != "auto":
            try:
                Layout.parse(self.layout)
            except LayoutError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def samples(self) -> int:
        """Global batch size in samples."""
        if self.batch.samples is not None:
            return self.batch.samples
        if self.batch.tokens is not None:
            return max(1, self.batch.tokens // self.model.sequence_length)
        return 32

    def should_compile(self, device: str, layout: Layout) -> bool:
        """Whether to compile blocks on a device of this type."""
        if self.compile == "auto":
            return device == "cuda" and not layout.has_split_backward
        return self.compile

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


def load_job(path: Path | None, overrides: Sequence[str] = (), own_model: bool = False) -> Job:
    """Reads a job file (None means all defaults), applies `key.path=value` overrides and validates the result. With
    `own_model`, model and tokenizer of the file give way to overrides that name a model."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = parse_toml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise JobError(f"the job file {path} does not exist.") from None
        except OSError as error:
            raise JobError(f"the job file {path} cannot be read: {error}.") from None
        except ValueError as error:
            raise JobError(f"{path} is not valid TOML: {error}.") from None
    if own_model and any(override.startswith(("model.name=", "model.weights=")) for override in overrides):
        values = {**values, "model": {}, "data": {"source": values["data"]["source"]}}
    for override in overrides:
        _apply_override(values, override)
    return make_job(values, str(path) if path else "the job")


def make_job(values: Mapping[str, Any], origin: str = "the job") -> Job:
    """Validates a mapping as parsed from TOML and returns the job; raises JobError that lists all problems."""
    problems: list[Any] = []
    family, model = "", values.get("model", {})
    if isinstance(model, Mapping):  # validated separately: the keys depend on the family
        try:
            family = family_name(model["name"]) if isinstance(model.get("name"), str) else "gpt"
            values = _match_tokenizer(values, parse_model(model))
        except ValidationError as error:
            problems = [{**problem, "loc": ("model", *problem["loc"])} for problem in error.errors()]
        except ValueError as error:
            problems = [{"type": "value_error", "loc": ("model",), "msg": str(error)}]
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
    raise JobError("\n".join(f"{origin}: {sentence}" for sentence in describe_problems(problems, family, Job)))


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
    if leaf in ("samples", "tokens") and sections == ["batch"]:
        section_values.pop("tokens" if leaf == "samples" else "samples", None)
    if not sections and leaf in ("steps", "tokens"):
        section_values.pop("tokens" if leaf == "steps" else "steps", None)
