"""Bytes that one rank holds at the fullest moment of a step, by category.

Counted for each pipeline rank: weights and gradients as the ZeRO stage leaves them, optimizer state, what the backward
needs of each micro-batch in flight, the logits, buffers of the collectives; and a reserve for what the allocator loses
between blocks and for what the driver and the communication library take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.job import Optimizer
from shardwise.layout import Layout, keep_share
from shardwise.planner.cost import Setting
from shardwise.planner.shape import Shape


@dataclass(frozen=True)
class Habit:
    """Bytes that a framework keeps per parameter, what it keeps of activations, and its reserve."""

    weight: float = 2.0
    """Of weights that are kept whole."""
    sharded: float = 0.0
    """Of weights that ZeRO 3 keeps in pieces, where they are no part of `state`."""
    copies: float = 0.0
    """Of rounded weights that each micro-batch in flight keeps for its backward."""
    gradient: float = 4.0
    state: float = 12.0
    """Main weights and two moments."""
    logits: float = 8.0
    """Bytes per logit at the loss."""
    gathered: bool = False
    """Whether the inputs of the cut products are kept whole, and not gathered again for the backward."""
    unfused: bool = False
    """Whether activation and gate are operators of their own, whose inputs are all kept."""
    dropout: bool = False
    """Whether masks are kept."""
    keeps_products: bool = False
    """Whether selective recomputation keeps products and attention and computes all else again; otherwise it computes
    attention again."""
    receives: bool = False
    """Whether a pipeline rank has a buffer for what it receives in every micro-batch of a step."""
    cast: float | None = 0.0
    """Bytes moved per weight and micro-batch to round weights for the products and to widen or add their gradients;
    None: as many as software that adds them one by one (`Efficiency.added`)."""
    update: float = 30.0
    """Bytes moved per weight in the update: four numbers read, three written, the copy of 16 bits."""
    spare: float = 0.04
    """Share that the allocator loses between blocks."""
    fixed: float = 2.0 * 2**30
    """Driver, kernels, communication buffers."""


def state_of(settings: Optimizer, wide: float) -> float:
    """Bytes of optimizer state per weight. Adafactor's rows and columns count for nothing, and under Muon embedding and
    head for as much as matrices."""
    if settings.name == "adamw":
        return {"float32": 2 * wide, "bf16": 4.0, "8bit": 2.0}[settings.states]
    momentum = wide if settings.momentum else 0.0
    return {"lamb": 2 * wide, "adafactor": 0.0, "muon": wide, "sgd": momentum}[settings.name]


def ours(precision: str, optimizer: Optimizer = Optimizer()) -> Habit:  # noqa: B008  (it cannot change)
    """What our own engine keeps: weights in the master type, and beside them, for the products, rounded ones."""
    wide = 8.0 if precision == "float64" else 4.0
    mixed = precision not in ("float64", "float32")
    return Habit(
        weight=wide, sharded=wide, copies=2.0 if mixed else 0.0, gradient=wide,
        state=state_of(optimizer, wide),
        logits=12.0 if mixed else 2 * wide, gathered=True, unfused=True, keeps_products=True, receives=True,
        cast=16.0 if mixed else 0.0, update=10 * wide, spare=0.03, fixed=1.5 * 2**30,
    )  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by category."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    reserve: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.reserve


class Part(NamedTuple):
    """What a stage, or all stages of a rank, hold of the chain."""

    blocks: int
    first: bool
    """The embedding."""
    last: bool
    """The head."""


def joined(parts: Sequence[Part]) -> Part:
    """All stages of a rank as one."""
    return Part(sum(n for n, _, _ in parts), any(first for _, first, _ in parts), any(last for *_, last in parts))


@dataclass(frozen=True)
class Weights:
    """Numbers that a rank works with, whole along the shard axis: of one block, its experts, and the two ends."""

    block: float
    experts: float
    first: float
    last: float

    def part(self, part: Part) -> float:
        """Of a part of the chain, without experts."""
        return part.blocks * self.block + (self.first if part.first else 0.0) + (self.last if part.last else 0.0)


def weights_of(shape: Shape, layout: Layout, expert_tensor: int) -> Weights:
    t, share = layout.tensor, shape.sparse_layers / shape.layers
    dense = (shape.attention_weights + shape.dense_ffn_weights) / t
    common = shape.common_weights / t
    head = shape.vocab * shape.width / t
    return Weights(
        block=(1 - share) * dense + share * common,
        experts=share * shape.expert_weights / layout.expert / expert_tensor,
        first=shape.table_weights / t,
        last=0.0 if shape.tied and layout.pipeline == 1 else head,
    )


@dataclass(frozen=True)
class Held:
    """What the memory of a rank follows from, the same for all ranks and for any schedule."""

    weights: Weights
    habit: Habit
    size: int
    """Bytes of a number of an activation."""
    stays: float
    """Bytes of a block that stay for the backward of one micro-batch."""
    again: float
    """Bytes of a block that is being computed again."""
    logits: float
    stream: float
    """Bytes of one micro-batch between two blocks, whole along the tensor axis."""
    passed: float
    """Bytes of one micro-batch that go from stage to stage."""
    kept: float
    """Share of the blocks whose rounded weights stay until the backward: those that are not computed again."""
    table: float
    """Numbers of the head."""


def hold_of(
    shape: Shape, setting: Setting, habit: Habit, layout: Layout, sequence_parallel: bool, expert_tensor: int
) -> Held:
    tokens = layout.micro_batch * shape.sequence / layout.context
    share = shape.sparse_layers / shape.layers
    dense = block_bytes(shape, setting, habit, layout, sequence_parallel, False)
    sparse = block_bytes(shape, setting, habit, layout, sequence_parallel, True) if share else dense
    every, selective, full = ((1 - share) * d + share * s for d, s in zip(dense, sparse, strict=True))
    kept = keep_share(layout.recompute)
    if kept is not None:
        stays, again = kept * every + (1 - kept) * full, every
    else:
        partly = every if habit.keeps_products else 0.0
        stays, again = {"none": (every, 0.0), "selective": (selective, partly), "full": (full, every)}[layout.recompute]
    table = shape.vocab * shape.width / layout.tensor
    stream = setting.bytes * tokens * shape.width
    return Held(
        weights_of(shape, layout, expert_tensor), habit, setting.bytes, stays, again,
        logits=habit.logits * tokens * shape.predicted * shape.vocab / layout.tensor, stream=stream,
        passed=stream / (layout.tensor if sequence_parallel else 1), table=table,
        kept=kept if kept is not None else float(layout.recompute != "full"),
    )  # fmt: skip


def block_bytes(
    shape: Shape, setting: Setting, habit: Habit, layout: Layout, sequence_parallel: bool, sparse: bool
) -> tuple[float, float, float]:
    """Bytes that the backward of one micro-batch needs of a block: without, with selective, with full recomputation."""
    size, t = setting.bytes, layout.tensor
    tokens = layout.micro_batch * shape.sequence / layout.context
    stream = tokens * shape.width / (t if sequence_parallel else 1)
    inputs = tokens * shape.width if habit.gathered else stream
    kv = 2 * shape.kv_heads * shape.head_size
    if shape.kv_rank:
        kv = 2 * shape.attended + t * (shape.q_rank + shape.kv_rank)
    kept = size * (2 * stream + 2 * inputs) + size * tokens * (shape.query + kv + shape.attended) / t
    if habit.unfused:
        kept += size * tokens * (shape.query + kv / 2) / t  # values are a view that keeps queries and keys alive
    if habit.dropout:
        kept += 2 * stream
    hidden = shape.shared_ffn if sparse else shape.ffn
    maps = shape.matrices + (1 if habit.unfused and shape.gated else 0)
    kept += size * tokens * hidden * maps / t
    if sparse:
        kept += size * tokens * shape.chosen / t * (2 * shape.width + maps * shape.expert_ffn)
    selective = kept
    if habit.keeps_products:
        cut = shape.query + kv + shape.attended + (shape.matrices - 1) * hidden
        selective = size * (3 * stream + (2 * inputs if habit.gathered and t > 1 else 0) + tokens * cut / t)
    scores = 0.0
    if not setting.fused:
        heads = layout.micro_batch * shape.heads / t
        scores = heads * shape.sequence / layout.context * shape.sequence * (2 * size + 1)
    return kept + scores, selective, size * stream


def hold(held: Held, layout: Layout, rank: int, part: Part, micro_batches: int) -> Memory:
    """The memory of a pipeline rank that holds some part of the chain."""
    habit, size = held.habit, held.size
    count = part.blocks
    own, experts = held.weights.part(part), count * held.weights.experts
    cut = own / shards(layout) + experts / expert_shards(layout)
    one = held.weights.block + held.weights.experts
    flying = in_flight(layout, rank, micro_batches)
    weights = habit.weight * (own + experts) + habit.copies * max(1.0, flying * held.kept) * (own + experts)
    gradients, buffers = habit.gradient * (own + experts), 0.0
    if layout.shard > 1 and layout.zero >= 2:
        gradients, buffers = habit.gradient * cut, size * one
    if layout.shard > 1 and layout.zero == 3:
        weights, buffers = habit.sharded * cut, size * (2 * max(one, held.table) + one)
    if habit.receives and layout.pipeline > 1:
        neighbours = 2 * layout.stages_per_rank - (rank == 0) - (rank == layout.pipeline - 1)
        buffers += micro_batches * neighbours * held.passed
    # The loss is done before anything is computed again.
    more = max(held.again, held.logits) if part.last else held.again
    activations = flying * count * held.stays + more + 4 * held.stream
    state = habit.state * cut
    if layout.pipeline == 1 and micro_batches == 1:
        gradients = max(0.0, gradients - activations)  # they come as activations go
    subtotal = weights + gradients + state + activations + buffers
    return Memory(weights, gradients, state, activations, buffers, habit.spare * subtotal + habit.fixed)


def shards(layout: Layout) -> int:
    """Ranks that share the optimizer state of a weight."""
    return layout.shard * (layout.context if layout.shard > 1 else 1)


def expert_shards(layout: Layout) -> int:
    return max(1, shards(layout) // layout.expert)


def in_flight(layout: Layout, rank: int, micro_batches: int) -> float:
    """Micro-batches, counted in whole ranks' worth of layers, whose activations pipeline rank `rank` holds at once."""
    p, v = layout.pipeline, layout.stages_per_rank
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return micro_batches
    if v == 1:
        return min(micro_batches, p - rank)
    if layout.schedule in ("zbv", "dualpipev"):
        return min(micro_batches, p)
    return min(micro_batches * v, (p - rank - 1) * 2 + (v - 1) * p + 1) / v
