"""A job: what the user asked for, read from TOML and `--set`, checked, with every default filled in.

All problems are reported at once, each with its place. A key means the same in the file, in `--set` and in the
resolved copy that is saved with the run. The section of the model is in `shardwise.kinds`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from shardwise.errors import JobError, LayoutError, suggest
from shardwise.kinds import (
    MODEL_CONFIGS,
    AnyModelConfig,
    BertConfig,
    ConfigSection,
    Count,
    DecoderConfig,
    DLRMConfig,
    ResNetConfig,
    T5Config,
)
from shardwise.layout import Layout
from shardwise.peer_words import job_hint


class DataConfig(ConfigSection):
    source: Literal["stdlib", "text", "jsonl", "tokens", "mix", "synthetic", "criteo", "cifar10"] = "stdlib"
    path: str = ""
    """A file, folder or glob for text, jsonl and tokens; a file for criteo; a folder for cifar10."""
    mix: dict[str, Annotated[float, Field(gt=0.0)]] = {}
    """Of the source `mix`: paths, and how many samples come from each over those from the others. The name's end tells
    its kind (`.jsonl`, `.bin`, else text), or a word before a colon (`jsonl:folder`); `stdlib` is one too."""
    text_field: str = "text"
    """The field of a jsonl record that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the source, kept beside the run) or the path of a saved tokenizer."""
    validation_fraction: float = Field(0.02, ge=0.0, lt=1.0)
    """The share of the samples that is held out."""
    workers: int = Field(0, ge=0)
    """Processes that prepare batches; 0: a thread."""
    prefetch: int = Field(2, ge=1)
    """Batches prepared ahead."""
    samples: Count = Field(4096, ge=1)
    """Samples in an epoch of the synthetic source."""
    augment: tuple[Literal["crop", "flip", "colour", "cutout", "mixup"], ...] = ()
    """What is done to training images on the fly."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """Whether a record of jsonl, criteo or cifar10 that cannot be read ends the run or is passed over and told."""

    @model_validator(mode="after")
    def _check_mix(self) -> DataConfig:
        if bool(self.mix) != (self.source == "mix"):
            raise ValueError('a mixture has source = "mix" and its paths below [data.mix]; give both or neither')
        return self


class BatchConfig(ConfigSection):
    samples: Count | None = Field(None, ge=1)
    tokens: Count | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_one_unit(self) -> BatchConfig:
        if self.samples is not None and self.tokens is not None:
            raise ValueError("give samples or tokens, not both")
        return self


class OptimizerConfig(ConfigSection):
    name: Literal["adamw", "lamb", "adafactor", "muon", "sgd"] = "adamw"
    """See [optimizers](../explanation/optimizers.md) for what each does."""
    lr: float = Field(3e-4, ge=0.0)
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    """For matrices; biases and norms are not decayed."""
    weight_decay_overrides: dict[str, Annotated[float, Field(ge=0.0)]] = {}
    """Other weight decays, by pattern of parameter names (`"embed.*" = 0.0`); the first that matches counts."""
    momentum: float = Field(0.95, ge=0.0, lt=1.0)
    """Of sgd and muon."""
    state_dtype: Literal["float32", "bf16", "8bit"] = "float32"
    """What AdamW's two averages are kept in; bf16 halves them, 8bit (blocks of 256 with a scale) makes a quarter of
    them; both round in every step."""
    clip: float = Field(1.0, ge=0.0)
    """The largest global gradient norm; 0: no clipping."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """After the warm-up: constant, cosine or linear down to `final`, or stable with a linear decay at the end."""
    warmup: float = Field(0.05, ge=0.0)
    """Steps of warm-up; below 1: the share of all steps."""
    wsd_decay: float = Field(0.2, ge=0.0)
    """Steps of the final decay of `wsd`; below 1: the share of all steps."""
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """The last learning rate over the highest."""

    @model_validator(mode="after")
    def _check_state_dtype(self) -> OptimizerConfig:
        if self.state_dtype != "float32" and self.name != "adamw":
            raise ValueError(f"states = {self.state_dtype!r} is for adamw, not for {self.name}; leave it out")
        return self


class EmbeddingTablesConfig(ConfigSection):
    sharding: Literal["auto", "table", "row", "column"] = "auto"
    """How a DLRM's tables lie on the ranks; auto: by sizes and lookups, each the way that balances best."""
    optimizer: Literal["adagrad", "adam"] = "adagrad"
    """Row-wise AdaGrad (one number a row) or sparse Adam (two for each number); only rows of the batch are updated."""
    lr_multiplier: float = Field(1.0, gt=0.0)
    """The tables' learning rate over that of the dense weights."""
    cached_rows: Count = Field(0, ge=0)
    """Rows, of those that are used most, that every device keeps too, with their states."""
    prefetch: bool | Literal["auto"] = "auto"
    """Whether the next batch's rows are fetched while this one computes; auto: where a GPU leaves the CPU time to.
    The results are the same."""


class GradientConfig(ConfigSection):
    all_reduce: Literal["library", "ring", "halving", "tree", "two-level"] = "library"
    """How whole gradients are summed over data ranks: by PyTorch, or by an algorithm of our own over messages."""
    nproc_per_node: int = Field(0, ge=0)
    """Processes on a node, for `two-level`; 0: as many as were started together on each."""
    compress: str = ""
    """How gradients are made small before they travel, what is lost being added to the next: `fp16`, `bf16`, `int8`,
    `onebit`, `topk:0.01` (the largest hundredth) or `powersgd:rank=4`; empty: not at all."""
    compress_after: float = Field(0.2, ge=0.0, allow_inf_nan=False)
    """Steps with plain sums before `compress` begins; below 1: the share of all steps."""

    def uncompressed_steps(self, total: int) -> int:
        return round(self.compress_after * total if self.compress_after < 1 else self.compress_after)

    @model_validator(mode="after")
    def _check_compress(self) -> GradientConfig:
        if not re.fullmatch(r"|fp16|bf16|int8|onebit|topk:0?\.\d*[1-9]\d*|powersgd(:rank=[1-9]\d*)?", self.compress):
            raise ValueError(
                f"compress = {self.compress!r} is no way to compress; use fp16, bf16, int8, onebit, topk:0.01 (a share "
                "between 0 and 1) or powersgd:rank=4"
            )
        if self.compress and self.all_reduce != "library":
            raise ValueError("compress and reduce are two ways to sum; leave one of them out")
        return self


class LocalSGDConfig(ConfigSection):
    every: int = Field(1, ge=1)
    """Steps after which replicas average their weights; until then they train apart. 1: they never do."""
    outer_optimizer: Literal["", "nesterov"] = ""
    """An outer step from where replicas last met, with their mean change as its gradient (DiLoCo); empty: none."""
    outer_lr: float = Field(0.7, gt=0.0)
    """Learning rate of the outer step."""
    outer_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum of the outer step."""
    fragments: int = Field(1, ge=1)
    """In how many parts the blocks meet, one after the other, between two meetings of the first."""

    @model_validator(mode="after")
    def _check_fragments(self) -> LocalSGDConfig:
        if self.fragments > self.every:
            raise ValueError(
                f"parts ({self.fragments}) is above every ({self.every}): at most one part meets in a step"
            )
        return self


class LossConfig(ConfigSection):
    chunk_size: int = Field(0, ge=0)
    """Positions whose logits are held at once, without a pipeline; 0: as many as take a gibibyte in bf16."""


class CheckpointConfig(ConfigSection):
    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep: int = Field(2, ge=1)
    """How many of the newest stay."""
    asynchronous: bool = True
    snapshot_every: int = Field(10, ge=0)
    """Steps between snapshots in memory that outlives a worker, for restarts in the same layout; 0: none."""


class RunConfig(ConfigSection):
    folder: str = ""
    """Where the run is kept; empty: a new folder below `runs`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: int = Field(0, ge=0)
    """Processes for `layout = "auto"`; 0: one per device, or per core without a GPU.
    Where they are more than there are GPUs, they share these."""
    cluster: str = ""
    """What the planner takes this machine for: a file that `calibrate` wrote, or a name; empty: by its data sheet."""
    max_restarts: int = Field(3, ge=0)
    """How often all workers begin again from the newest good checkpoint, in a row, without getting any further."""
    hang_timeout: float = Field(300.0, gt=0)
    """Seconds without progress of any worker, after which the one that the others wait for counts as stuck."""
    standby: bool = True
    """Whether, once steps are under way, a second world of workers waits to take over after a fault: forked and, on a
    CPU, with the model built, where that takes at most a tenth of the memory."""
    rejoin_timeout: float = Field(30.0, ge=0)
    """Seconds that a lost node has to come back before the run goes on without it or, if not elastic, ends."""
    elastic: bool = False
    """Whether a run whose rank cannot be brought back by restarts, or whose node is lost, goes on with the processes
    that are left, in a layout that is planned for them."""
    on_nan: Literal["skip", "rollback", "stop"] = "skip"
    """After a step whose gradients are not finite and update nothing: go on, go back to the last checkpoint and try
    once more, or end the run. Under a loss scale that moves it is always skip."""
    loss_spike_threshold: float = Field(0.0, ge=0)
    """Deviations above the median of the last losses from which a loss is a spike: the run goes back to the last
    checkpoint and leaves out the batches since; 0: none is looked for."""
    checksum_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """In how many steps checksums of all weights and optimizer states are compared once, a part in each; what changed
    by itself is named, and the run goes back. 0: never; auto: as few as keep it below a hundredth of a step."""
    redundant_compute_every: int = Field(500, ge=0)
    """Steps between those in which a micro-batch is computed by all data ranks and the results compared; 0: none is."""
    max_corruptions: int = Field(3, ge=0)
    """How often a rank may be found with changed or differing numbers before the run ends and names it."""


class ValidationConfig(ConfigSection):
    every: int = Field(0, ge=0)
    """Steps between validations; 0: only at the end."""
    samples: int = Field(64, ge=1)


class Job(ConfigSection):
    """One training job, checked, with every default filled in; `job.toml` in the run folder shows them all."""

    seed: int = Field(0, ge=0)
    steps: int | None = Field(None, ge=1)
    tokens: Count | None = Field(None, ge=1)
    layout: str = "auto"
    precision: Literal["float64", "float32", "bf16", "fp16", "fp8"] = "float32"
    compile: bool | Literal["auto"] = "auto"
    """Whether each block is compiled; auto: on a GPU, unless the schedule runs backwards in two halves."""
    tracker: Literal["", "csv", "tensorboard", "wandb", "prometheus"] = ""
    """Where metrics go beside `metrics.jsonl`; see [watch a run](../how-to/watch-a-run.md)."""
    sdpa_backend: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Which of PyTorch's attention kernels; auto: PyTorch chooses by head size and device."""
    model: AnyModelConfig = DecoderConfig()
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

    @model_validator(mode="after")
    def _check_consistency(self) -> Job:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("give steps or tokens, not both")
        if self.gradient.compress and self.precision == "fp16":
            raise ValueError("gradient.compress: with fp16 the loss scale moves under what is owed; use bf16")
        if self.optimizer.name == "muon" and isinstance(self.model, DLRMConfig | ResNetConfig):
            raise ValueError(
                f"optimizer.name = 'muon' is for matrices of blocks, and {self.model.description} has none"
            )
        if self.optimizer.name != "adamw" and isinstance(self.model, DecoderConfig) and self.model.mup_base_width:
            raise ValueError(f"mup_base_width is worked out for adamw's steps, not for {self.optimizer.name}'s")
        if self.data.augment and not isinstance(self.model, ResNetConfig):
            raise ValueError(f"data.augment changes images, and {self.model.description} reads none; leave it out")
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

    def should_compile(self, device: str, layout: Layout) -> bool:
        """Whether blocks are compiled on a device of that type."""
        if self.compile == "auto":
            return device == "cuda" and not layout.has_split_backward
        return self.compile

    @property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return max(1, -(-self.tokens // (self.samples * self.model.sequence)))
        return self.steps if self.steps is not None else 200

    def require_chain_model(self) -> DecoderConfig | T5Config | ResNetConfig:
        """The model, where it is of a kind that is built; whatever runs a job asks for it here."""
        if isinstance(self.model, DLRMConfig):
            raise JobError(
                f"model.name = {self.model.name!r}: this is for models of one chain; {self.model.description} can be planned, "
                "trained and verified."
            )
        if isinstance(self.model, BertConfig) and self.model.phase1_sequence:
            raise JobError(
                "model.phase1_sequence: two parts of a training with samples of different length can be planned, not "
                "trained in one run; train each as a run of its own."
            )
        return self.model

    def require_decoder(self) -> DecoderConfig:
        """The model, where it is one that writes text."""
        model = self.require_chain_model()
        if not isinstance(model, DecoderConfig) or not model.is_causal_lm:
            raise JobError(
                f"model.name = {model.name!r}: {model.description} does not write text; this needs a decoder."
            )
        return model

    def require_trainable(self) -> None:
        """Raises for a model that cannot be trained yet."""
        if not isinstance(self.model, DLRMConfig):
            self.require_chain_model()

    def phases(self) -> list[tuple[int, Job]]:
        """Steps, and the job that takes them: those with short samples, where there are any, then the others."""
        model = self.model
        short_steps = (
            round(model.phase1_fraction * self.total_steps)
            if isinstance(model, BertConfig) and model.phase1_sequence
            else 0
        )
        if not isinstance(model, BertConfig) or not short_steps:
            return [(self.total_steps, self)]
        short_phase = self.model_copy(update={"model": model.model_copy(update={"sequence": model.phase1_sequence})})
        return [(short_steps, short_phase), (self.total_steps - short_steps, self)]

    def to_toml(self) -> str:
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
        _apply_override(values, override)
    return make_job(values, str(path) if path else "the job")


def make_job(values: Mapping[str, Any], origin: str = "the job") -> Job:
    try:
        return Job(**values)
    except ValidationError as error:
        problems: dict[str, list[str]] = {}
        for problem in error.errors():
            path, _, messages = _format_problem(problem).partition(": ")
            problems.setdefault(path, []).append(messages)
        # Of a value that may be of several kinds, what each kind asks for is one problem.
        joined = {path: ", or ".join(one.rstrip(".") for one in messages[:-1]) for path, messages in problems.items()}
        last_message = {path: ", or " * bool(joined[path]) + messages[-1] for path, messages in problems.items()}
        sentences = [f"{path}: {joined[path]}{last_message[path]}".removesuffix(": ") for path in problems]
        raise JobError("\n".join(f"{origin}: {sentence}" for sentence in sentences)) from None
    except TypeError as error:
        raise JobError(f"{origin}: {error}.") from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise JobError(f"--set {override!r}: write key=value, for instance --set steps=100.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
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


def _format_problem(problem: Any) -> str:
    location = list(problem["loc"])
    family = (
        location.pop(1) if location[:1] == ["model"] else ""
    )  # of the model: chosen by its name, no part of the place
    if problem["type"] == "extra_forbidden":
        hint = job_hint(str(location[-1]), problem["input"]) or _suggest_key(location, family)
        return f"unknown key {'.'.join(map(str, location))!r}; {hint}"
    # Which of several kinds of value was tried is no part of the place either.
    type_names = ("bool", "int", "float", "str", "constrained-int", "constrained-float")
    location = [part for part in location if part not in type_names and "[" not in str(part)]
    path = ".".join(map(str, location))
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    message += "" if message.endswith("?") else "."
    if problem["type"] == "value_error":
        return f"{path}: {message}" if path else message
    if problem["type"] == "missing":
        return f"{path}: a value is missing here."
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{path} = {problem['input']!r}: {path} is a section; write its keys below [{path}]."
    return f"{path} = {problem['input']!r}: {message.replace('Input should', 'should')}"


def _suggest_key(location: list[str | int], family: str) -> str:
    """What an unknown key may have been meant to be: a key of its section, or of a model of another kind."""
    *sections, key = map(str, location)
    if not sections:
        return suggest(key, Job.model_fields)
    other_families = [name for name, other in MODEL_CONFIGS.items() if family and key in other.model_fields]
    section: Any = MODEL_CONFIGS[family] if family else Job.model_fields[sections[0]].annotation
    suggestion = suggest(key, section.model_fields)
    return (
        f"it is a key of {' and '.join(map(repr, other_families))}, not of {family!r}; {suggestion}"
        if other_families
        else suggestion
    )
