"""How one training job is cut: the degrees of each axis, the pipeline schedule, the ZeRO stage, recomputation.

A `Layout` is a frozen value, checked when it is made. Its text form, `pipeline=2 shard=2 tensor=2`, is what command
lines, logs and checkpoints show; `Layout.parse` reads it back. What a layout means for a certain model and batch
(does the sequence divide, how many micro-batches are there) is answered by `solve_batch` here and by
`shardwise.parallel.parallelize.check`, before any process is started.

Mesh order, outermost first: pipeline, replicate, shard, context, tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import isqrt, prod

from shardwise.console import pluralize
from shardwise.errors import LayoutError, suggest
from shardwise.peer_words import layout_hint

AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # mesh dimensions, outermost first
DATA_AXES = ("replicate", "shard")  # whose ranks see different samples
DEGREES = (*AXES, "expert")  # expert folds over shard x context (x tensor), so it is no mesh dimension of its own
FULL_BACKWARD = ("gpipe", "1f1b", "interleaved")
AUTO_SCHEDULES = ("auto", "auto-v")  # orders made for the stages that there are, by shardwise.schedules.synthesize
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev", *AUTO_SCHEDULES)
SCHEDULES = FULL_BACKWARD + SPLIT_BACKWARD
V_SHAPED = ("zbv", "dualpipev", "auto-v")
RECOMPUTE = ("none", "selective", "full")
CONTEXT_METHODS = ("ring", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One cut of one job. Every field has a default that means "do not cut"."""

    pipeline: int = 1
    """Ranks that each hold some of the layers."""
    replicate: int = 1
    """Copies of the model that each see other samples."""
    shard: int = 1
    """Ranks that share optimizer states, gradients or weights (see `zero`) and each see other samples."""
    context: int = 1
    """Ranks that each hold a part of every sequence."""
    context_method: str = "ring"
    """How they attend: keys and values go round in a ring, or each rank gets some heads of the whole sequence."""
    tensor: int = 1
    """Ranks that each hold a part of every matrix; activations between matrices are cut along the sequence."""
    expert: int = 1
    """Ranks that share the experts, folded over shard x context, and over tensor where these do not suffice."""
    schedule: str = "1f1b"
    """The order of forwards and backwards in a pipeline."""
    virtual: int = 0
    """Pipeline stages per rank; 0 lets the schedule decide (2 for interleaved and the V-shaped, otherwise 1)."""
    micro_batch: int = 0
    """Samples in one forward; 0 lets `solve_batch` decide."""
    zero: int = 1
    """What `shard` cuts: 1 optimizer states, 2 gradients too, 3 weights too."""
    recompute: str = "none"
    """What is computed again in the backward: none, selective, full, or the share of block activations to keep."""
    stages: tuple[int, ...] = ()
    """Layers per pipeline stage, fixed by the user (`stages=3,5`); empty: balanced by cost."""

    def __post_init__(self) -> None:
        for axis in DEGREES:
            degree = getattr(self, axis)
            if degree < 1:
                raise LayoutError(f"{axis}={degree}: a degree counts processes, so it is at least 1.")
        if self.schedule not in SCHEDULES:
            raise LayoutError(f"schedule={self.schedule}: no such schedule; {suggest(self.schedule, SCHEDULES)}")
        if self.context_method not in CONTEXT_METHODS:
            raise LayoutError(f"context_method={self.context_method}: {suggest(self.context_method, CONTEXT_METHODS)}")
        if self.zero not in (1, 2, 3):
            raise LayoutError(f"zero={self.zero}: the ZeRO stage is 1, 2 or 3.")
        if self.micro_batch < 0:
            raise LayoutError(f"micro_batch={self.micro_batch}: a micro-batch has at least 1 sample.")
        kept_activation_fraction(self.recompute)
        self._check_virtual()

    def _check_virtual(self) -> None:
        if self.virtual < 0:
            raise LayoutError(f"virtual={self.virtual}: a rank holds at least 1 stage.")
        if self.pipeline == 1:
            if self.virtual > 1:
                raise LayoutError(f"virtual={self.virtual} cuts pipeline stages, but pipeline=1; set pipeline above 1.")
        elif self.schedule in ("gpipe", "1f1b") and self.virtual > 1:
            raise LayoutError(
                f"virtual={self.virtual}: schedule {self.schedule} runs one stage per rank; "
                "use schedule=interleaved or leave virtual out."
            )
        elif self.schedule in V_SHAPED and self.virtual not in (0, 2):
            raise LayoutError(f"virtual={self.virtual}: schedule {self.schedule} runs exactly 2 stages per rank.")
        if self.stages and len(self.stages) != self.stage_count:
            raise LayoutError(
                f"stages={','.join(map(str, self.stages))} fixes {pluralize(len(self.stages), 'stage')}, "
                f"but the pipeline has {self.stage_count} (pipeline={self.pipeline} x {self.stages_per_rank} per rank)."
            )
        if any(layers < 0 for layers in self.stages):
            raise LayoutError(f"stages={','.join(map(str, self.stages))}: a stage cannot hold fewer than 0 layers.")

    # Derived facts.

    @cached_property
    def world(self) -> int:
        """Processes that run this layout."""
        return prod(getattr(self, axis) for axis in AXES)

    @cached_property
    def data(self) -> int:
        """Groups of processes that see different samples."""
        return self.replicate * self.shard

    @cached_property
    def expert_ranks(self) -> int:
        """Of the expert degree, what lies on shard x context; the rest lies on the tensor axis."""
        return self.expert if self.shard * self.context % self.expert == 0 else self.expert // self.tensor

    @cached_property
    def stages_per_rank(self) -> int:
        if self.pipeline == 1:
            return 1
        default = 2 if self.schedule in ("interleaved", *V_SHAPED) else 1
        return self.virtual or default

    @cached_property
    def stage_count(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def has_split_backward(self) -> bool:
        """Whether the schedule runs input and weight gradients apart."""
        return self.pipeline > 1 and self.schedule in SPLIT_BACKWARD

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pipeline rank `rank` holds, in model order: in loops, or down and up again in a V."""
        if self.pipeline > 1 and self.schedule in V_SHAPED:
            return rank, self.stage_count - 1 - rank
        return tuple(range(rank, self.stage_count, self.pipeline))

    # Text form.

    def __str__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_shown = value != field.default
            if field.name == "schedule":
                is_shown = self.pipeline > 1 or is_shown
            elif field.name == "zero":
                is_shown = self.shard > 1 or is_shown
            if is_shown:
                parts.append(f"{field.name}={','.join(map(str, value)) if field.name == 'stages' else value}")
        return " ".join(parts) or "pipeline=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads the text form: words of the form key=value with spaces between them."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals:
                hint = layout_hint(key)
                raise LayoutError(
                    f"layout {text!r}: {word!r} is not of the form key=value{f'; {hint}' if hint else '.'}"
                )
            if key not in fields:
                hint = layout_hint(key, value) or suggest(key, fields)
                raise LayoutError(f"layout {text!r}: unknown key {key!r}; {hint}")
            if key in values:
                raise LayoutError(f"layout {text!r}: {key} is given twice; give it once.")
            values[key] = (
                value if key in ("schedule", "recompute", "context_method") else _parse_integers(text, key, value)
            )
        return cls(**values)  # type: ignore[arg-type]


def _parse_integers(text: str, key: str, value: str) -> object:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise LayoutError(f"layout {text!r}: {key}={value!r} is not a whole number.") from None
    if key == "stages":
        return numbers
    if len(numbers) != 1:
        raise LayoutError(f"layout {text!r}: {key} takes one number, not {value!r}.")
    return numbers[0]


def kept_activation_fraction(recompute: str) -> float | None:
    """The share of block activations that `recompute` keeps, where it is given as a number; None for a policy."""
    if recompute in RECOMPUTE:
        return None
    try:
        fraction = float(recompute)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise LayoutError(
            f"recompute={recompute}: give one of {', '.join(RECOMPUTE)}, or the share of block activations to keep "
            "as a number from 0 to 1."
        )
    return fraction


# Batch arithmetic: solved, never asked for.


@dataclass(frozen=True)
class BatchSplit:
    """How one global batch is served: `samples` = data ranks x micro-batches x micro-batch size."""

    samples: int
    micro_batch: int
    micro_batches: int


def micro_batch_error(layout: Layout, count: int) -> str | None:
    """Why a pipeline cannot run this number of micro-batches; None if it can."""
    if layout.pipeline == 1:
        return None
    if layout.schedule == "1f1b" and count < layout.stage_count:
        return f"schedule 1f1b needs at least as many micro-batches as stages ({layout.stage_count})"
    if layout.schedule == "dualpipev" and count < layout.stage_count:
        return f"schedule dualpipev needs at least as many micro-batches as stages ({layout.stage_count})"
    if layout.schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, count // layout.pipeline)
        if count % rounds:
            return (
                f"schedule {layout.schedule} runs its micro-batches in max(1, n // pipeline) equal rounds, "
                f"and {count} micro-batches do not make {rounds}"
            )
    return None


def solve_batch(layout: Layout, samples: int) -> BatchSplit:
    """Micro-batch and accumulation for a global batch of `samples`, or an error with the nearest that can be served."""
    if samples < 1:
        raise LayoutError(f"a global batch of {samples} samples: it needs at least 1.")
    split = _split_batch(layout, samples)
    if isinstance(split, BatchSplit):
        return split
    limit = 64 * layout.data * max(1, layout.micro_batch) * layout.stage_count
    nearest_sizes = list(
        islice((n for n in _nearest_first(samples, limit) if isinstance(_split_batch(layout, n), BatchSplit)), 2)
    )
    remedy = (
        f"The nearest that can: {' and '.join(map(str, sorted(nearest_sizes)))}."
        if nearest_sizes
        else "No nearby batch can."
    )
    requested = pluralize(samples, "sample")
    raise LayoutError(f"layout '{layout}' cannot serve a global batch of {requested}: {split}. {remedy}")


def _split_batch(layout: Layout, samples: int) -> BatchSplit | str:
    if samples % layout.data:
        return f"it does not divide over replicate x shard = {layout.data}"
    per_rank = samples // layout.data
    if layout.micro_batch:
        if per_rank % layout.micro_batch:
            return f"a rank's share of {per_rank} is no multiple of micro_batch={layout.micro_batch}"
        count = per_rank // layout.micro_batch
        return micro_batch_error(layout, count) or BatchSplit(samples, layout.micro_batch, count)
    counts = [count for count in _divisors(per_rank) if not micro_batch_error(layout, count)]
    if not counts:
        return micro_batch_error(layout, per_rank) or "no number of micro-batches fits"
    if layout.pipeline == 1:
        count = counts[0]
    else:
        # Four micro-batches per stage keep the bubble of 1f1b near a fifth; beyond that small products cost more.
        count = min(counts, key=lambda n: (n < 4 * layout.pipeline, abs(n - 4 * layout.pipeline)))
    return BatchSplit(samples, per_rank // count, count)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _nearest_first(value: int, limit: int) -> Iterable[int]:
    for step in range(1, limit + 1):
        if value - step >= 1:
            yield value - step
        yield value + step
