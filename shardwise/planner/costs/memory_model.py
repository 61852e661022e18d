"""Bytes that one rank holds at the fullest moment of a step, by category.

Counted for each pipeline rank: weights and gradients as the ZeRO stage leaves them, optimizer state, what the backward
needs of each micro-batch in flight, the logits, buffers of the collectives; and a reserve for what the allocator loses
between blocks and for what the driver and the communication library take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.job import OptimizerConfig
from shardwise.layout import Layout, kept_activation_fraction
from shardwise.planner.costs.block_time import KernelProfile
from shardwise.planner.costs.model_shape import ModelShape


@dataclass(frozen=True)
class FrameworkProfile:
    """Bytes that a framework keeps per parameter, what it keeps of activations, and its reserve."""

    weight_bytes: float = 2.0
    """Of weights that are kept whole."""
    sharded_weight_bytes: float = 0.0
    """Of weights that ZeRO 3 keeps in pieces, where they are no part of `state`."""
    compute_copy_bytes: float = 0.0
    """Of rounded weights that each micro-batch in flight keeps for its backward."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    """Main weights and two moments."""
    logits: float = 8.0
    """Bytes per logit at the loss."""
    keeps_gathered_inputs: bool = False
    """Whether the inputs of the cut products are kept whole, and not gathered again for the backward."""
    has_unfused_activation: bool = False
    """Whether activation and gate are operators of their own, whose inputs are all kept."""
    keeps_dropout_masks: bool = False
    """Whether masks are kept."""
    selective_keeps_matmuls: bool = False
    """Whether selective recomputation keeps products and attention and computes all else again; otherwise it computes
    attention again."""
    has_recv_buffers: bool = False
    """Whether a pipeline rank has a buffer for what it receives in every micro-batch of a step."""
    cast_bytes: float | None = 0.0
    """Bytes moved per weight and micro-batch to round weights for the products and to widen or add their gradients;
    None: as many as software that adds them one by one (`Efficiency.added`)."""
    update_bytes: float = 30.0
    """Bytes moved per weight in the update: four numbers read, three written, the copy of 16 bits."""
    fragmentation: float = 0.04
    """Share that the allocator loses between blocks."""
    fixed_bytes: float = 2.0 * 2**30
    """Driver, kernels, communication buffers."""


def optimizer_state_bytes(optimizer: OptimizerConfig, master_itemsize: float) -> float:
    """Bytes of optimizer state per weight. Adafactor's rows and columns count for nothing, and under Muon embedding and
    head for as much as matrices."""
    if optimizer.name == "adamw":
        return {"float32": 2 * master_itemsize, "bf16": 4.0, "8bit": 2.0}[optimizer.state_dtype]
    momentum = master_itemsize if optimizer.momentum else 0.0
    return {"lamb": 2 * master_itemsize, "adafactor": 0.0, "muon": master_itemsize, "sgd": momentum}[optimizer.name]


def engine_profile(precision: str, optimizer: OptimizerConfig = OptimizerConfig()) -> FrameworkProfile:  # noqa: B008  (it cannot change)
    """What our own engine keeps: weights in the master type, and beside them, for the products, rounded ones."""
    master_itemsize = 8.0 if precision == "float64" else 4.0
    is_mixed_precision = precision not in ("float64", "float32")
    return FrameworkProfile(
        weight_bytes=master_itemsize,
        sharded_weight_bytes=master_itemsize,
        compute_copy_bytes=2.0 if is_mixed_precision else 0.0,
        gradient_bytes=master_itemsize,
        optimizer_bytes=optimizer_state_bytes(optimizer, master_itemsize),
        logits=12.0 if is_mixed_precision else 2 * master_itemsize,
        keeps_gathered_inputs=True,
        has_unfused_activation=True,
        selective_keeps_matmuls=True,
        has_recv_buffers=True,
        cast_bytes=16.0 if is_mixed_precision else 0.0,
        update_bytes=10 * master_itemsize,
        fragmentation=0.03,
        fixed_bytes=1.5 * 2**30,
    )


@dataclass(frozen=True)
class RankMemory:
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


class StageLayers(NamedTuple):
    """What a stage, or all stages of a rank, hold of the chain."""

    blocks: int
    first: bool
    """The embedding."""
    last: bool
    """The head."""


def merge_stages(parts: Sequence[StageLayers]) -> StageLayers:
    """All stages of a rank as one."""
    return StageLayers(
        sum(n for n, _, _ in parts), any(first for _, first, _ in parts), any(last for *_, last in parts)
    )


@dataclass(frozen=True)
class WeightCounts:
    """Numbers that a rank works with, whole along the shard axis: of one block, its experts, and the two ends."""

    block: float
    experts: float
    first: float
    last: float

    def of_stage(self, stage: StageLayers) -> float:
        """Of a part of the chain, without experts."""
        return stage.blocks * self.block + (self.first if stage.first else 0.0) + (self.last if stage.last else 0.0)


def count_weights(shape: ModelShape, layout: Layout, expert_tensor: int) -> WeightCounts:
    t, share = layout.tensor, shape.sparse_layers / shape.layers
    dense = (shape.attention_weights + shape.dense_ffn_weights) / t
    common = shape.non_expert_weights / t
    head = shape.vocab * shape.width / t
    return WeightCounts(
        block=(1 - share) * dense + share * common,
        experts=share * shape.expert_weights / layout.expert / expert_tensor,
        first=shape.embedding_weights / t,
        last=0.0 if shape.tied and layout.pipeline == 1 else head,
    )


@dataclass(frozen=True)
class MemoryInputs:
    """What the memory of a rank follows from, the same for all ranks and for any schedule."""

    weights: WeightCounts
    framework_profile: FrameworkProfile
    itemsize: int
    """Bytes of a number of an activation."""
    saved_per_block: float
    """Bytes of a block that stay for the backward of one micro-batch."""
    recomputed_per_block: float
    """Bytes of a block that is being computed again."""
    logits: float
    hidden_bytes: float
    """Bytes of one micro-batch between two blocks, whole along the tensor axis."""
    stage_output_bytes: float
    """Bytes of one micro-batch that go from stage to stage."""
    kept_fraction: float
    """Share of the blocks whose rounded weights stay until the backward: those that are not computed again."""
    head_weights: float
    """Numbers of the head."""


def make_memory_inputs(
    shape: ModelShape,
    kernel_profile: KernelProfile,
    framework_profile: FrameworkProfile,
    layout: Layout,
    sequence_parallel: bool,
    expert_tensor: int,
) -> MemoryInputs:
    tokens = layout.micro_batch * shape.sequence / layout.context
    share = shape.sparse_layers / shape.layers
    dense = block_activation_bytes(shape, kernel_profile, framework_profile, layout, sequence_parallel, False)
    sparse = (
        block_activation_bytes(shape, kernel_profile, framework_profile, layout, sequence_parallel, True)
        if share
        else dense
    )
    saved_all, selective, full = ((1 - share) * d + share * s for d, s in zip(dense, sparse, strict=True))
    kept_fraction = kept_activation_fraction(layout.recompute)
    if kept_fraction is not None:
        saved_per_block, recomputed_per_block = kept_fraction * saved_all + (1 - kept_fraction) * full, saved_all
    else:
        recomputed = saved_all if framework_profile.selective_keeps_matmuls else 0.0
        saved_per_block, recomputed_per_block = {
            "none": (saved_all, 0.0),
            "selective": (selective, recomputed),
            "full": (full, saved_all),
        }[layout.recompute]
    head_weights = shape.vocab * shape.width / layout.tensor
    hidden_bytes = kernel_profile.itemsize * tokens * shape.width
    return MemoryInputs(
        count_weights(shape, layout, expert_tensor),
        framework_profile,
        kernel_profile.itemsize,
        saved_per_block,
        recomputed_per_block,
        logits=framework_profile.logits * tokens * shape.logit_fraction * shape.vocab / layout.tensor,
        hidden_bytes=hidden_bytes,
        stage_output_bytes=hidden_bytes / (layout.tensor if sequence_parallel else 1),
        head_weights=head_weights,
        kept_fraction=kept_fraction if kept_fraction is not None else float(layout.recompute != "full"),
    )


def block_activation_bytes(
    shape: ModelShape,
    kernel_profile: KernelProfile,
    framework_profile: FrameworkProfile,
    layout: Layout,
    sequence_parallel: bool,
    sparse: bool,
) -> tuple[float, float, float]:
    """Bytes that the backward of one micro-batch needs of a block: without, with selective, with full recomputation."""
    size, t = kernel_profile.itemsize, layout.tensor
    tokens = layout.micro_batch * shape.sequence / layout.context
    hidden_numel = tokens * shape.width / (t if sequence_parallel else 1)
    matmul_inputs = tokens * shape.width if framework_profile.keeps_gathered_inputs else hidden_numel
    kv = 2 * shape.kv_heads * shape.head_dim
    if shape.kv_lora_rank:
        kv = 2 * shape.attention_width + t * (shape.q_lora_rank + shape.kv_lora_rank)
    saved = (
        size * (2 * hidden_numel + 2 * matmul_inputs)
        + size * tokens * (shape.query_width + kv + shape.attention_width) / t
    )
    if framework_profile.has_unfused_activation:
        saved += size * tokens * (shape.query_width + kv / 2) / t  # values are a view that keeps queries and keys alive
    if framework_profile.keeps_dropout_masks:
        saved += 2 * hidden_numel
    hidden = shape.shared_expert_ffn if sparse else shape.ffn
    ffn_maps = shape.ffn_matrices + (1 if framework_profile.has_unfused_activation and shape.gated else 0)
    saved += size * tokens * hidden * ffn_maps / t
    if sparse:
        saved += size * tokens * shape.experts_per_token / t * (2 * shape.width + ffn_maps * shape.expert_ffn)
    selective = saved
    if framework_profile.selective_keeps_matmuls:
        matmul_outputs = shape.query_width + kv + shape.attention_width + (shape.ffn_matrices - 1) * hidden
        selective = size * (
            3 * hidden_numel
            + (2 * matmul_inputs if framework_profile.keeps_gathered_inputs and t > 1 else 0)
            + tokens * matmul_outputs / t
        )
    scores = 0.0
    if not kernel_profile.fused_attention:
        heads = layout.micro_batch * shape.heads / t
        scores = heads * shape.sequence / layout.context * shape.sequence * (2 * size + 1)
    return saved + scores, selective, size * hidden_numel


def rank_memory(inputs: MemoryInputs, layout: Layout, rank: int, stage: StageLayers, micro_batches: int) -> RankMemory:
    """The memory of a pipeline rank that holds some part of the chain."""
    framework_profile, size = inputs.framework_profile, inputs.itemsize
    count = stage.blocks
    dense_weights, experts = inputs.weights.of_stage(stage), count * inputs.weights.experts
    sharded_weights = dense_weights / optimizer_shards(layout) + experts / expert_optimizer_shards(layout)
    block_weights = inputs.weights.block + inputs.weights.experts
    in_flight = in_flight_micro_batches(layout, rank, micro_batches)
    weights = framework_profile.weight_bytes * (dense_weights + experts) + framework_profile.compute_copy_bytes * max(
        1.0, in_flight * inputs.kept_fraction
    ) * (dense_weights + experts)
    gradients, buffers = framework_profile.gradient_bytes * (dense_weights + experts), 0.0
    if layout.shard > 1 and layout.zero >= 2:
        gradients, buffers = framework_profile.gradient_bytes * sharded_weights, size * block_weights
    if layout.shard > 1 and layout.zero == 3:
        weights, buffers = (
            framework_profile.sharded_weight_bytes * sharded_weights,
            size * (2 * max(block_weights, inputs.head_weights) + block_weights),
        )
    if framework_profile.has_recv_buffers and layout.pipeline > 1:
        neighbours = 2 * layout.stages_per_rank - (rank == 0) - (rank == layout.pipeline - 1)
        buffers += micro_batches * neighbours * inputs.stage_output_bytes
    # The loss is done before anything is computed again.
    extra = max(inputs.recomputed_per_block, inputs.logits) if stage.last else inputs.recomputed_per_block
    activations = in_flight * count * inputs.saved_per_block + extra + 4 * inputs.hidden_bytes
    state = framework_profile.optimizer_bytes * sharded_weights
    if layout.pipeline == 1 and micro_batches == 1:
        gradients = max(0.0, gradients - activations)  # they come as activations go
    subtotal = weights + gradients + state + activations + buffers
    return RankMemory(
        weights,
        gradients,
        state,
        activations,
        buffers,
        framework_profile.fragmentation * subtotal + framework_profile.fixed_bytes,
    )


def optimizer_shards(layout: Layout) -> int:
    """Ranks that share the optimizer state of a weight."""
    return layout.shard * (layout.context if layout.shard > 1 else 1)


def expert_optimizer_shards(layout: Layout) -> int:
    return max(1, optimizer_shards(layout) // layout.expert)


def in_flight_micro_batches(layout: Layout, rank: int, micro_batches: int) -> float:
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
