"""How a job is parallelized: the degree of each axis, the pipeline schedule, the ZeRO stage, recomputation.

A `Layout` is a frozen value, validated on construction. Command lines, logs and checkpoints show its text form,
`pipeline=2 shard=2 tensor=2`; `Layout.parse` reads it back. What each field means is in `layout_keys.toml`. Before any
process starts, `solve_batch` splits the global batch and `shardwise.parallel.prepare` checks that the model can run in
the layout.

Mesh order, outermost first: pipeline, replicate, shard, context, tensor."""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from math import ceil, floor, isqrt, prod

from shardwise.console import pluralize
from shardwise.errors import LayoutError, shorten, suggest
from shardwise.peer_words import layout_hint

AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # mesh dimensions, outermost first
DEGREES = (*AXES, "expert")  # expert folds over shard x context (x tensor): it is not a mesh dimension
FULL_BACKWARD = ("gpipe", "1f1b", "interleaved")
AUTO_SCHEDULES = ("auto", "auto-v")  # synthesized for the actual stage costs by shardwise.schedules.synthesize
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev", *AUTO_SCHEDULES)
SCHEDULES = FULL_BACKWARD + SPLIT_BACKWARD
V_SHAPED = ("zbv", "dualpipev", "auto-v")
RECOMPUTE = ("none", "selective", "full")
CONTEXT_METHODS = ("ring", "ulysses")
MAX_WORLD = 10**6  # processes; ten times the largest clusters
MAX_SAMPLES = 10**8  # of a batch
MAX_LAYERS = 1000
MAX_ACTIONS = 10**6  # of a pipeline schedule: it is written out in full before the first step


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one job is parallelized. The defaults describe a single process."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    context_method: str = "ring"
    tensor: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    virtual: int = 0
    micro_batch: int = 0
    zero: int = 1
    recompute: str = "none"
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for axis in DEGREES:
            degree = getattr(self, axis)
            if not 1 <= degree <= MAX_WORLD:
                limits = f'at least 1 and at most {MAX_WORLD:,}; layout = "auto" lets the planner choose'
                raise LayoutError(f"{axis}={shorten(degree)}: a degree must be {limits}.")
        if self.world > MAX_WORLD:
            raise LayoutError(f"layout '{self}' has {self.world:,} processes; a world has at most {MAX_WORLD:,}.")
        if self.schedule not in SCHEDULES:
            hint = layout_hint(self.schedule) or suggest(self.schedule.lower(), SCHEDULES)
            raise LayoutError(f"schedule={self.schedule}: unknown schedule; {hint}")
        if self.context_method not in CONTEXT_METHODS:
            raise LayoutError(f"context_method={self.context_method}: {suggest(self.context_method, CONTEXT_METHODS)}")
        if self.zero not in (1, 2, 3):
            raise LayoutError(f"zero={self.zero}: the ZeRO stage must be 1, 2 or 3; without ZeRO, write replicate=N.")
        if not 0 <= self.micro_batch <= MAX_SAMPLES:
            limits = f"at least 1 sample and at most {MAX_SAMPLES:,}"
            raise LayoutError(f"micro_batch={shorten(self.micro_batch)}: a micro-batch must have {limits}.")
        kept_activation_fraction(self.recompute)
        self._check_virtual()

    def _check_virtual(self) -> None:
        if not 0 <= self.virtual <= MAX_LAYERS:
            limits = f"at least 1 stage and at most {MAX_LAYERS:,}"
            raise LayoutError(f"virtual={shorten(self.virtual)}: a rank must hold {limits}.")
        if self.pipeline == 1:
            if self.virtual > 1:
                raise LayoutError(f"virtual={self.virtual} needs a pipeline, but pipeline=1; set pipeline above 1.")
        elif self.schedule in ("gpipe", "1f1b") and self.virtual > 1:
            raise LayoutError(f"virtual={self.virtual}: {self.schedule} has 1 per rank; use schedule=interleaved.")
        elif self.schedule in V_SHAPED and self.virtual not in (0, 2):
            raise LayoutError(f"virtual={self.virtual}: {self.schedule} runs exactly 2 stages per rank; remove it.")
        if self.stages and len(self.stages) != self.stage_count:
            listed = f"stages={','.join(map(str, self.stages))} lists {pluralize(len(self.stages), 'stage')}"
            count = f"{self.stage_count} (pipeline={self.pipeline} x {self.stages_per_rank} per rank)"
            raise LayoutError(f"{listed}, but the pipeline has {count}.")
        if not all(0 <= layers <= MAX_LAYERS for layers in self.stages):
            listed = shorten(",".join(map(str, self.stages)))
            raise LayoutError(f"stages={listed}: a stage cannot hold fewer than 0 layers, or more than {MAX_LAYERS:,}.")

    @cached_property
    def world(self) -> int:
        """World size: the number of processes."""
        return prod(getattr(self, axis) for axis in AXES)

    @cached_property
    def data(self) -> int:
        """Data-parallel degree: how many ways the global batch is split."""
        return self.replicate * self.shard

    @cached_property
    def weight_shards(self) -> int:
        """How many ranks, adjacent but for the tensor axis, share the weights, gradients or states that ZeRO shards."""
        return self.shard * self.context if self.shard > 1 else 1

    @cached_property
    def expert_ranks(self) -> int:
        """The part of the expert degree on shard x context; the tensor axis provides the rest."""
        return self.expert if self.shard * self.context % self.expert == 0 else self.expert // self.tensor

    @cached_property
    def stages_per_rank(self) -> int:
        default = 2 if self.schedule in ("interleaved", *V_SHAPED) else 1
        return 1 if self.pipeline == 1 else self.virtual or default

    @cached_property
    def stage_count(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def has_split_backward(self) -> bool:
        """Whether the schedule runs input and weight gradients as separate actions."""
        return self.pipeline > 1 and self.schedule in SPLIT_BACKWARD

    @property
    def kept_fraction(self) -> float:
        """Fraction of the blocks whose matmuls are not recomputed; selective recomputation repeats none."""
        fraction = kept_activation_fraction(self.recompute)
        return float(self.recompute != "full") if fraction is None else fraction

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a pipeline rank in model order: every `pipeline`-th one, or a symmetric pair in a V."""
        if self.pipeline > 1 and self.schedule in V_SHAPED:
            return rank, self.stage_count - 1 - rank
        return tuple(range(rank, self.stage_count, self.pipeline))

    def __str__(self) -> str:
        parts, always = [], {"schedule": self.pipeline > 1, "zero": self.shard > 1}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or always.get(field.name):
                parts.append(f"{field.name}={','.join(map(str, value)) if field.name == 'stages' else value}")
        return " ".join(parts) or "pipeline=1"

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parses the text form: key=value words separated by spaces."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        words = [(word, *word.partition("=")) for word in text.split()]
        for word, key, equals, _ in words:
            if not equals:
                ending = f"; {hint}" if (hint := layout_hint(key)) else "."
                raise LayoutError(f"layout {shorten(text)}: {shorten(word)} is not of the form key=value{ending}")
        if unknown := {key: value for _, key, _, value in words if key not in fields}:
            hints = [f"unknown key {shorten(k)}; {layout_hint(k, v) or suggest(k, fields)}" for k, v in unknown.items()]
            raise LayoutError(f"layout {shorten(text)}: {' '.join(hints)}")
        for _, key, _, value in words:
            if key in values:
                raise LayoutError(f"layout {shorten(text)}: {key} is set twice; set it once.")
            is_text = key in ("schedule", "recompute", "context_method")
            values[key] = value if is_text else _parse_integers(text, key, value)
        return cls(**values)  # type: ignore[arg-type]


def _parse_integers(text: str, key: str, value: str) -> object:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        separator = "; separate keys by spaces" if "=" in value else ""
        raise LayoutError(f"layout {shorten(text)}: {key}={shorten(value)} is not a whole number{separator}.") from None
    if key == "stages":
        return numbers
    if len(numbers) != 1:
        raise LayoutError(f"layout {shorten(text)}: {key} takes one number, not {shorten(value)}.")
    return numbers[0]


def kept_activation_fraction(recompute: str) -> float | None:
    """Returns the fraction of block activations that `recompute` keeps, or None if it names a policy."""
    if recompute in RECOMPUTE:
        return None
    fraction = -1.0
    with suppress(ValueError):
        fraction = float(recompute)
    if not 0.0 <= fraction <= 1.0:
        known = ", ".join(RECOMPUTE)
        raise LayoutError(f"recompute={recompute}: use {known}, or the fraction of blocks to keep (from 0 to 1).")
    return fraction


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is split: `samples` = data-parallel degree x micro-batches x micro-batch size."""

    samples: int
    micro_batch: int
    micro_batches: int


def micro_batch_error(layout: Layout, count: int) -> str | None:
    """Returns why the schedule cannot run this number of micro-batches, or None if it can."""
    if layout.pipeline == 1:
        return None
    if count * layout.stage_count > MAX_ACTIONS:
        return f"{count:,} micro-batches on {layout.stage_count:,} stages exceed {MAX_ACTIONS:,} pipeline actions"
    if layout.schedule in ("1f1b", "dualpipev") and count < layout.stage_count:
        return f"schedule {layout.schedule} needs at least as many micro-batches as stages ({layout.stage_count})"
    if layout.schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, count // layout.pipeline)
        if count % rounds:
            runs = f"schedule {layout.schedule} runs its micro-batches in max(1, n // pipeline) equal rounds"
            return f"{runs}, but {count} micro-batches are not divisible by {rounds}"
    return None


@cache
def divisible_batch(wanted: float, tolerance: float = 0.02) -> int:
    """Returns the number of samples near `wanted` that most sizes up to 128 divide; `wanted` itself if it is whole."""
    if wanted == int(wanted) or wanted < 1:
        return max(1, int(wanted))
    reach = min(tolerance * wanted, 1000.0)
    near = range(ceil(wanted - reach), floor(wanted + reach) + 1)
    divisors = {number: sum(number % size == 0 for size in range(1, 129)) for number in near}
    return max(near, key=lambda number: (divisors[number], -abs(number - wanted)), default=int(wanted))


def solve_batch(layout: Layout, samples: int) -> BatchSplit:
    """Splits a global batch into micro-batches; raises LayoutError with the nearest valid batch sizes if it cannot."""
    if not 1 <= samples <= MAX_SAMPLES:
        raise LayoutError(f"a global batch of {samples} samples: it must have at least 1 and at most {MAX_SAMPLES:,}.")
    split = _split_batch(layout, samples)
    if isinstance(split, BatchSplit):
        return split
    # Every schedule runs some count of micro-batches in any range of twice as many as it has stages.
    unit, reach = layout.data * max(1, layout.micro_batch), 2 * layout.stage_count + 1
    counts = range(max(1, samples // unit - reach), samples // unit + reach + 1)
    candidates = sorted((n * unit for n in counts), key=lambda size: abs(size - samples))
    valid_sizes = (n for n in candidates if n <= MAX_SAMPLES and isinstance(_split_batch(layout, n), BatchSplit))
    nearest_sizes = sorted(islice(valid_sizes, 2))
    remedy = f"Change the layout, or the batch; the nearest valid sizes: {' and '.join(map(str, nearest_sizes))}."
    if not nearest_sizes:
        remedy = "No nearby size is valid; change the layout."
    requested = pluralize(samples, "sample")
    raise LayoutError(f"layout '{layout}' cannot run a global batch of {requested}: {split}. {remedy}")


def _split_batch(layout: Layout, samples: int) -> BatchSplit | str:
    if samples % layout.data:
        return f"it is not divisible by replicate x shard = {layout.data}"
    per_rank = samples // layout.data
    if layout.micro_batch:
        if per_rank % layout.micro_batch:
            return f"a rank's {per_rank} samples are not divisible by micro_batch={layout.micro_batch}"
        count = per_rank // layout.micro_batch
        return micro_batch_error(layout, count) or BatchSplit(samples, layout.micro_batch, count)
    counts = [count for count in divisors(per_rank) if not micro_batch_error(layout, count)]
    if not counts:
        return micro_batch_error(layout, per_rank) or "no number of micro-batches works"
    if layout.pipeline == 1:
        count = counts[0]
    else:
        # Four micro-batches per stage keep the 1f1b bubble near a fifth; with more, small matmuls cost more.
        count = min(counts, key=lambda n: (n < 4 * layout.pipeline, abs(n - 4 * layout.pipeline)))
    return BatchSplit(samples, per_rank // count, count)


@cache
def divisors(number: int) -> list[int]:
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
