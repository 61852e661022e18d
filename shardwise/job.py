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

from shardwise.errors import JobError, LayoutError, nearest
from shardwise.kinds import DLRM, KINDS, T5, AnyModel, Bert, Count, Model, ResNet, Section
from shardwise.layout import Layout

PRECISIONS = ("float64", "float32", "bf16", "fp16", "fp8")


class Data(Section):
    source: Literal["stdlib", "text", "jsonl", "tokens", "mix", "synthetic", "criteo", "cifar10"] = "stdlib"
    path: str = ""
    """A file, folder or glob for text, jsonl and tokens; a file for criteo; a folder for cifar10."""
    mix: dict[str, Annotated[float, Field(gt=0.0)]] = {}
    """Of the source `mix`: paths, and how many samples come from each over those from the others. The name's end tells
    its kind (`.jsonl`, `.bin`, else text), or a word before a colon (`jsonl:folder`); `stdlib` is one too."""
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
    augment: tuple[Literal["crop", "flip", "colour", "cutout", "mixup"], ...] = ()
    """What is done to training images on the fly."""
    bad: Literal["stop", "skip"] = "stop"
    """Whether a record of jsonl, criteo or cifar10 that cannot be read ends the run or is passed over and told."""

    @model_validator(mode="after")
    def _mixed(self) -> Data:
        if bool(self.mix) != (self.source == "mix"):
            raise ValueError('a mixture has source = "mix" and its paths below [data.mix]; give both or neither')
        return self


class BatchSize(Section):
    samples: Count | None = Field(None, ge=1)
    tokens: Count | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one(self) -> BatchSize:
        if self.samples is not None and self.tokens is not None:
            raise ValueError("give samples or tokens, not both")
        return self


class Optimizer(Section):
    name: Literal["adamw", "lamb", "adafactor", "muon", "sgd"] = "adamw"
    """See [optimizers](../explanation/optimizers.md) for what each does."""
    lr: float = Field(3e-4, ge=0.0)
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    """For matrices; biases and norms are not decayed."""
    decays: dict[str, Annotated[float, Field(ge=0.0)]] = {}
    """Other weight decays, by pattern of parameter names (`"embed.*" = 0.0`); the first that matches counts."""
    momentum: float = Field(0.95, ge=0.0, lt=1.0)
    """Of sgd and muon."""
    states: Literal["float32", "bf16", "8bit"] = "float32"
    """What AdamW's two averages are kept in; bf16 halves them, 8bit (blocks of 256 with a scale) makes a quarter of
    them; both round in every step."""
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

    @model_validator(mode="after")
    def _states(self) -> Optimizer:
        if self.states != "float32" and self.name != "adamw":
            raise ValueError(f"states = {self.states!r} is for adamw, not for {self.name}; leave it out")
        return self


class Embedding(Section):
    cut: Literal["auto", "table", "row", "column"] = "auto"
    """How a DLRM's tables lie on the ranks; auto: by sizes and lookups, each the way that balances best."""
    optimizer: Literal["adagrad", "adam"] = "adagrad"
    """Row-wise AdaGrad (one number a row) or sparse Adam (two for each number); only rows of the batch are updated."""
    rate: float = Field(1.0, gt=0.0)
    """The tables' learning rate over that of the dense weights."""
    cache: Count = Field(0, ge=0)
    """Rows, of those that are used most, that every device keeps too, with their states."""
    ahead: bool | Literal["auto"] = "auto"
    """Whether the next batch's rows are fetched while this one computes; auto: where a GPU leaves the CPU time to.
    The results are the same."""


class Gradient(Section):
    reduce: Literal["library", "ring", "halving", "tree", "two-level"] = "library"
    """How whole gradients are summed over data ranks: by PyTorch, or by an algorithm of our own over messages."""
    node: int = Field(0, ge=0)
    """Processes on a node, for `two-level`; 0: as many as were started together on each."""
    compress: str = ""
    """How gradients are made small before they travel, what is lost being added to the next: `fp16`, `bf16`, `int8`,
    `onebit`, `topk:0.01` (the largest hundredth) or `powersgd:rank=4`; empty: not at all."""
    compress_after: float = Field(0.2, ge=0.0, allow_inf_nan=False)
    """Steps with plain sums before `compress` begins; below 1: the share of all steps."""

    def plain_steps(self, total: int) -> int:
        return round(self.compress_after * total if self.compress_after < 1 else self.compress_after)

    @model_validator(mode="after")
    def _way(self) -> Gradient:
        if not re.fullmatch(r"|fp16|bf16|int8|onebit|topk:0?\.\d*[1-9]\d*|powersgd(:rank=[1-9]\d*)?", self.compress):
            raise ValueError(
                f"compress = {self.compress!r} is no way to compress; use fp16, bf16, int8, onebit, topk:0.01 (a share "
                "between 0 and 1) or powersgd:rank=4"
            )
        if self.compress and self.reduce != "library":
            raise ValueError("compress and reduce are two ways to sum; leave one of them out")
        return self


class Sync(Section):
    every: int = Field(1, ge=1)
    """Steps after which replicas average their weights; until then they train apart. 1: they never do."""
    outer: Literal["", "nesterov"] = ""
    """An outer step from where replicas last met, with their mean change as its gradient (DiLoCo); empty: none."""
    rate: float = Field(0.7, gt=0.0)
    """Learning rate of the outer step."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum of the outer step."""
    parts: int = Field(1, ge=1)
    """In how many parts the blocks meet, one after the other, between two meetings of the first."""

    @model_validator(mode="after")
    def _parts(self) -> Sync:
        if self.parts > self.every:
            raise ValueError(f"parts ({self.parts}) is above every ({self.every}): at most one part meets in a step")
        return self


class Loss(Section):
    chunk: int = Field(0, ge=0)
    """Positions whose logits are held at once, without a pipeline; 0: as many as take a gibibyte in bf16."""


class Checkpoint(Section):
    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep: int = Field(2, ge=1)
    """How many of the newest stay."""
    asynchronous: bool = True
    snapshot: int = Field(10, ge=0)
    """Steps between snapshots in memory that outlives a worker, for restarts in the same layout; 0: none."""


class Run(Section):
    folder: str = ""
    """Where the run is kept; empty: a new folder below `runs`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: int = Field(0, ge=0)
    """Processes for `layout = "auto"`; 0: one per device, or per core without a GPU.
    Where they are more than there are GPUs, they share these."""
    cluster: str = ""
    """What the planner takes this machine for: a file that `calibrate` wrote, or a name; empty: by its data sheet."""
    restarts: int = Field(3, ge=0)
    """How often all workers begin again from the newest good checkpoint, in a row, without getting any further."""
    patience: float = Field(300.0, gt=0)
    """Seconds without progress of any worker, after which the one that the others wait for counts as stuck."""
    standby: bool = True
    """Whether, once steps are under way, a second world of workers waits to take over after a fault: forked and, on a
    CPU, with the model built, where that takes at most a tenth of the memory."""
    rejoin: float = Field(30.0, ge=0)
    """Seconds that a lost node has to come back before the run goes on without it or, if not elastic, ends."""
    elastic: bool = False
    """Whether a run whose rank cannot be brought back by restarts, or whose node is lost, goes on with the processes
    that are left, in a layout that is planned for them."""
    on_nan: Literal["skip", "rollback", "stop"] = "skip"
    """After a step whose gradients are not finite and update nothing: go on, go back to the last checkpoint and try
    once more, or end the run. Under a loss scale that moves it is always skip."""
    spike: float = Field(0.0, ge=0)
    """Deviations above the median of the last losses from which a loss is a spike: the run goes back to the last
    checkpoint and leaves out the batches since; 0: none is looked for."""
    check: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """In how many steps checksums of all weights and optimizer states are compared once, a part in each; what changed
    by itself is named, and the run goes back. 0: never; auto: as few as keep it below a hundredth of a step."""
    rerun: int = Field(500, ge=0)
    """Steps between those in which a micro-batch is computed by all data ranks and the results compared; 0: none is."""
    corruptions: int = Field(3, ge=0)
    """How often a rank may be found with changed or differing numbers before the run ends and names it."""


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
    precision: Literal["float64", "float32", "bf16", "fp16", "fp8"] = "float32"
    compile: bool | Literal["auto"] = "auto"
    """Whether each block is compiled; auto: on a GPU, unless the schedule runs backwards in two halves."""
    track: Literal["", "csv", "tensorboard", "wandb", "prometheus"] = ""
    """Where metrics go beside `metrics.jsonl`; see [watch a run](../how-to/watch-a-run.md)."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Which of PyTorch's attention kernels; auto: PyTorch chooses by head size and device."""
    model: AnyModel = Model()
    embedding: Embedding = Embedding()
    loss: Loss = Loss()
    sync: Sync = Sync()
    gradient: Gradient = Gradient()
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
        if self.gradient.compress and self.precision == "fp16":
            raise ValueError("gradient.compress: with fp16 the loss scale moves under what is owed; use bf16")
        if self.optimizer.name == "muon" and isinstance(self.model, DLRM | ResNet):
            raise ValueError(f"optimizer.name = 'muon' is for matrices of blocks, and {self.model.what} has none")
        if self.optimizer.name != "adamw" and isinstance(self.model, Model) and self.model.mup_base_width:
            raise ValueError(f"mup_base_width is worked out for adamw's steps, not for {self.optimizer.name}'s")
        if self.data.augment and not isinstance(self.model, ResNet):
            raise ValueError(f"data.augment changes images, and {self.model.what} reads none; leave it out")
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

    def compiles(self, device: str, layout: Layout) -> bool:
        """Whether blocks are compiled on a device of that type."""
        if self.compile == "auto":
            return device == "cuda" and not layout.split_backward
        return self.compile

    @property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return max(1, -(-self.tokens // (self.samples * self.model.sequence)))
        return self.steps if self.steps is not None else 200

    def built(self) -> Model | T5 | ResNet:
        """The model, where it is of a kind that is built; whatever runs a job asks for it here."""
        if isinstance(self.model, DLRM):
            raise JobError(
                f"model.name = {self.model.name!r}: this is for models of one chain; {self.model.what} can be planned, "
                "trained and verified."
            )
        if isinstance(self.model, Bert) and self.model.short_sequence:
            raise JobError(
                "model.short_sequence: two parts of a training with samples of different length can be planned, not "
                "trained in one run; train each as a run of its own."
            )
        return self.model

    def decoder(self) -> Model:
        """The model, where it is one that writes text."""
        model = self.built()
        if not isinstance(model, Model) or not model.writes:
            raise JobError(f"model.name = {model.name!r}: {model.what} does not write text; this needs a decoder.")
        return model

    def demand_known(self) -> None:
        """Raises for a model that cannot be trained yet."""
        if not isinstance(self.model, DLRM):
            self.built()

    def phases(self) -> list[tuple[int, Job]]:
        """Steps, and the job that takes them: those with short samples, where there are any, then the others."""
        model = self.model
        short = round(model.short_share * self.total_steps) if isinstance(model, Bert) and model.short_sequence else 0
        if not isinstance(model, Bert) or not short:
            return [(self.total_steps, self)]
        less = self.model_copy(update={"model": model.model_copy(update={"sequence": model.short_sequence})})
        return [(short, less), (self.total_steps - short, self)]

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
        problems: dict[str, list[str]] = {}
        for problem in error.errors():
            place, _, words = _sentence(problem).partition(": ")
            problems.setdefault(place, []).append(words)
        # Of a value that may be of several kinds, what each kind asks for is one problem.
        joined = {place: ", or ".join(one.rstrip(".") for one in words[:-1]) for place, words in problems.items()}
        ends = {place: ", or " * bool(joined[place]) + words[-1] for place, words in problems.items()}
        sentences = [f"{place}: {joined[place]}{ends[place]}".removesuffix(": ") for place in problems]
        raise JobError("\n".join(f"{where}: {sentence}" for sentence in sentences)) from None
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
    where = list(problem["loc"])
    kind = where.pop(1) if where[:1] == ["model"] else ""  # of the model: chosen by its name, no part of the place
    if problem["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(map(str, where))!r}; {_meant(where, kind)}"
    # Which of several kinds of value was tried is no part of the place either.
    tried = ("bool", "int", "float", "str", "constrained-int", "constrained-float")
    where = [part for part in where if part not in tried and "[" not in str(part)]
    place = ".".join(map(str, where))
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    message += "" if message.endswith("?") else "."
    if problem["type"] == "value_error":
        return f"{place}: {message}" if place else message
    if problem["type"] == "missing":
        return f"{place}: a value is missing here."
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{place} = {problem['input']!r}: {place} is a section; write its keys below [{place}]."
    return f"{place} = {problem['input']!r}: {message.replace('Input should', 'should')}"


def _meant(where: list[str | int], kind: str) -> str:
    """What an unknown key may have been meant to be: a key of its section, or of a model of another kind."""
    *sections, key = map(str, where)
    if not sections:
        return nearest(key, Job.model_fields)
    others = [name for name, other in KINDS.items() if kind and key in other.model_fields]
    section: Any = KINDS[kind] if kind else Job.model_fields[sections[0]].annotation
    known = nearest(key, section.model_fields)
    return f"it is a key of {' and '.join(map(repr, others))}, not of {kind!r}; {known}" if others else known
