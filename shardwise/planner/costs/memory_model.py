"""Peak memory of one rank by category, in closed form; of dense decoders on our engine, see `engine_memory.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.job import OptimizerConfig
from shardwise.layout import Layout
from shardwise.planner.costs.model_shape import ModelShape
from shardwise.schedules.simulate import PeakCounts


@dataclass(frozen=True)
class FrameworkProfile:
    """Bytes a framework keeps and moves per parameter, and its memory overhead. Defaults: our engine, bf16, AdamW."""

    weight_bytes: float = 4.0  # of weights that every data rank holds in full
    sharded_weight_bytes: float = 4.0  # of weights that ZeRO 3 shards
    compute_copy_bytes: float = 2.0  # of the low-precision weights kept for the backward of each micro-batch in flight
    saves_fp8_inputs: bool = False  # whether a block saves the inputs of its matmuls in 8 bits too
    gradient_bytes: float = 4.0
    persistent_gradients: bool = False  # whether they are allocated once, not as the backward frees activations
    optimizer_bytes: float = 8.0
    offloaded_bytes: float = 0.0  # of optimizer state in host memory, which an update copies to the device and back
    offloads_activations: bool = False  # whether blocks keep what they save in host memory, all but two
    logits: float = 12.0  # bytes per logit at the loss
    casts_once: bool = False  # whether a single process keeps the low-precision weights, and updates them once per step
    cast_bytes: float = 16.0  # moved per weight and micro-batch to downcast weights and accumulate gradients
    update_bytes: float = 40.0  # bytes moved per weight in the optimizer update
    fragmentation: float = 0.03  # fraction of memory that the allocator loses to fragmentation
    fixed_bytes: float = 1.5 * 2**30  # driver, kernels and communication buffers
    buffer_bytes: float = 0.0  # of workspaces of matmuls, and of buffers through which offloaded state passes


def engine_profile(
    precision: str, optimizer: OptimizerConfig = OptimizerConfig(), trained: float = 1.0  # noqa: B008  (it cannot change)
) -> FrameworkProfile:  # fmt: skip
    """Returns our engine's profile: master weights, and in mixed precision a low-precision copy for the matmuls.
    `trained`: the fraction of the weights that are; others are kept in low precision, without anything else."""
    master_itemsize = 8.0 if precision == "float64" else 4.0
    is_mixed_precision = precision not in ("float64", "float32")
    # Bytes of optimizer state per weight, without Adafactor's row and column statistics.
    state_bytes = {
        "adamw": {"float32": 2 * master_itemsize, "bf16": 4.0, "8bit": 2.0}[optimizer.state_dtype],
        "lamb": 2 * master_itemsize, "adafactor": 0.0, "muon": master_itemsize,
        "sgd": master_itemsize if optimizer.momentum else 0.0,
    }[optimizer.name]  # fmt: skip
    kept_bytes = trained * master_itemsize + (1.0 - trained) * (2.0 if is_mixed_precision else master_itemsize)
    return FrameworkProfile(
        weight_bytes=kept_bytes, sharded_weight_bytes=kept_bytes,
        compute_copy_bytes=trained * (2.0 if is_mixed_precision else 0.0), gradient_bytes=trained * master_itemsize,
        saves_fp8_inputs=precision == "fp8", optimizer_bytes=trained * state_bytes,
        logits=12.0 if is_mixed_precision else 2 * master_itemsize,
        casts_once=is_mixed_precision, cast_bytes=trained * (16.0 if is_mixed_precision else 0.0),
        update_bytes=trained * 10 * master_itemsize)  # fmt: skip


class RankMemory(NamedTuple):
    """Peak bytes of one rank by category."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # and what their backward needs beside them
    buffers: float  # weights that ZeRO 3 gathers, what pipeline stages receive, the batch, matmul workspaces
    reserve: float  # what the allocator cannot use; driver, kernels and communication

    @property
    def total(self) -> float:
        return sum(self)


class StageLayers(NamedTuple):
    """The modules of one stage, or of all stages of a rank."""

    blocks: int
    first: bool  # has the embedding
    last: bool  # has the head

    def sum(self, block: float, first: float, last: float) -> float:
        """Returns the sum over the modules of what a block, the embedding and the head have each."""
        return self.blocks * block + self.first * first + self.last * last


@dataclass(frozen=True)
class MemoryInputs:
    """Inputs of a rank's memory that are the same for all ranks and schedules. Weights are those of one rank before
    sharding: of a block without experts, of its experts, of embedding and head."""

    block_weights: float
    expert_weights: float
    first_weights: float
    last_weights: float
    saved_per_block: float  # bytes a block saves for the backward of one micro-batch
    recomputed_per_block: float  # bytes of the block that is being recomputed
    pending_per_block: float  # bytes a block keeps between the halves of a split backward of one micro-batch
    logits: float  # bytes of the logits and their gradients at the loss
    saved_logits: float  # bytes of them that the head saves for the backward, unless the loss is fused
    hidden_bytes: float  # bytes of one micro-batch between two blocks, gathered along the tensor axis
    recv_buffer_bytes: float  # bytes of the buffer in which a stage receives one micro-batch
    kept_fraction: float  # fraction of blocks not recomputed, whose low-precision weights are kept until the backward
    head_weights: float

    def dense_weights(self, stage: StageLayers) -> float:
        """Returns the weights of a stage without its experts."""
        return stage.sum(self.block_weights, self.first_weights, self.last_weights)

    def held(self, copy_bytes: float, head: float, stages: Sequence[StageLayers], peaks: PeakCounts) -> float:
        """Returns what a rank with these stages keeps for the backward at a peak of its schedule, with low-precision
        copies of weights (`copy_bytes` each) and `head` bytes of logits."""
        copies = copy_bytes * (self.block_weights + self.expert_weights)
        saved = [part.sum(self.saved_per_block + self.kept_fraction * copies, 0.0, head) for part in stages]
        # Without an input gradient, the weight half of the first stage does the whole backward.
        pending = [held if part.first else part.sum(self.pending_per_block + copies, 0.0, head)
                   for part, held in zip(stages, saved)]  # fmt: skip
        return max(sum([n * size for counts in zip(peak, (saved, pending)) for n, size in zip(*counts)])
                   for peak in peaks)  # fmt: skip


def block_activation_bytes(
    shape: ModelShape, itemsize: int, layout: Layout, sparse: bool, compiled: bool = False, adapters: bool = False
) -> tuple[float, float, float]:
    """Returns the bytes a block saves for one micro-batch's backward: with no, selective and full recomputation."""
    t, tokens = layout.tensor, layout.micro_batch * shape.sequence / layout.context
    hidden_numel, matmul_inputs = tokens * shape.width / t, tokens * shape.width  # region inputs are kept gathered
    kv = 2 * shape.kv_heads * shape.head_dim
    if shape.kv_lora_rank:
        kv = 2 * shape.attention_width + t * (shape.q_lora_rank + shape.kv_lora_rank)
    saved = itemsize * (2 * hidden_numel + 2 * matmul_inputs)
    saved += itemsize * tokens * (shape.query_width + kv + shape.attention_width) / t
    saved += itemsize * tokens * (shape.query_width + kv / 2) / t  # values are a view that keeps queries and keys alive
    ffn_hidden = shape.shared_expert_ffn if sparse else shape.ffn
    num_saved = shape.ffn_matrices + (1 if shape.gated else 0)  # the activation's and the gate's inputs
    saved += itemsize * tokens * ffn_hidden * num_saved / t
    if sparse:
        saved += itemsize * tokens * shape.experts_per_token / t * (2 * shape.width + num_saved * shape.expert_ffn)
    if compiled:  # without norms and activation functions, unless adapters need them as inputs
        heads = (shape.query_width + kv) * (1.5 if adapters else 1.0) + shape.attention_width
        hidden, num_kept = float(ffn_hidden), shape.ffn_matrices - 1 + (adapters or sparse)
        if sparse:
            hidden += shape.experts_per_token * shape.expert_ffn
            heads += 4 * shape.experts_per_token * shape.width  # in and out of the experts, sorted by expert and not
        saved = itemsize * (tokens * (heads + num_kept * hidden) / t + (5 if adapters else 3) * hidden_numel)
        saved += itemsize * matmul_inputs if t > 1 else 0.0
    matmul_outputs = shape.query_width + kv + shape.attention_width + (shape.ffn_matrices - 1) * ffn_hidden
    if sparse:
        matmul_outputs += shape.experts_per_token * ((shape.ffn_matrices - 1) * shape.expert_ffn + shape.width)
    selective = itemsize * (3 * hidden_numel + (4 * matmul_inputs if t > 1 else 0) + tokens * matmul_outputs / t)
    if layout.context > 1:  # what ring attention and Ulysses keep of their parts, as in dry runs
        saved += itemsize * (tokens * shape.query_width / t + matmul_inputs / 2)
        selective += itemsize * (1.5 * tokens * shape.query_width / t + matmul_inputs / 2)
    return saved, selective, itemsize * hidden_numel


def pending_gradient_bytes(shape: ModelShape, itemsize: int, layout: Layout) -> float:
    """Returns the bytes of output gradients that a block keeps between the halves of a split backward."""
    tokens, share = layout.micro_batch * shape.sequence / layout.context, shape.sparse_layers / shape.layers
    t, num_up = layout.tensor, shape.ffn_matrices - 1
    sparse = shape.shared_expert_ffn * num_up + shape.experts_per_token * (shape.expert_ffn * num_up + 2 * shape.width)
    heads = shape.query_width + 2 * shape.kv_heads * shape.head_dim
    outputs = heads + (1 - share) * shape.ffn * num_up + share * sparse
    return itemsize * tokens * (outputs / t + (2 + 4 / t) * shape.width)


def rank_memory(
    inputs: MemoryInputs, profile: FrameworkProfile, size: int, layout: Layout, rank: int,
    stages: Sequence[StageLayers], micro_batches: int, peaks: PeakCounts,
) -> RankMemory:  # fmt: skip
    """Returns the peak memory of a pipeline rank with these stages; `size`: bytes per element of an activation."""
    stage = StageLayers(sum(part.blocks for part in stages), stages[0].first, any(part.last for part in stages))
    dense_weights, experts = inputs.dense_weights(stage), stage.blocks * inputs.expert_weights
    own_weights = sharded_weights(layout, dense_weights, experts)
    block_weights = inputs.block_weights + inputs.expert_weights
    all_weights = dense_weights + experts
    # Every forward makes a low-precision copy, kept until the backward unless that recomputes the block. FSDP gathers.
    keeps_one, is_fsdp = profile.casts_once and layout.world == 1, layout.shard > 1 and layout.zero >= 2
    copy_bytes = 0.0 if keeps_one or is_fsdp else profile.compute_copy_bytes
    weights = (profile.weight_bytes + profile.compute_copy_bytes * keeps_one) * all_weights
    gradients, buffers = profile.gradient_bytes * all_weights, 0.0
    if is_fsdp:
        gradients = profile.gradient_bytes * own_weights
        buffers = (profile.gradient_bytes + size) * block_weights  # of the block whose gradients are being reduced
        weights = profile.sharded_weight_bytes * own_weights + size * all_weights
    if layout.shard > 1 and layout.zero == 3:
        weights = profile.sharded_weight_bytes * own_weights
        buffers = size * (2 * max(block_weights, inputs.head_weights) + block_weights)
    if layout.pipeline > 1:
        neighbours = 2 * layout.stages_per_rank - (rank == 0) - (rank == layout.pipeline - 1)
        buffers += micro_batches * neighbours * inputs.recv_buffer_bytes
    logits = inputs.saved_logits if layout.pipeline > 1 else 0.0  # of each micro-batch in flight
    held = min(2.0, stage.blocks) * inputs.saved_per_block
    if not (offloads := profile.offloads_activations):
        held = inputs.held(copy_bytes, logits, stages, peaks)
    extra = inputs.recomputed_per_block + copy_bytes * block_weights * (1.0 if offloads else 1.0 - inputs.kept_fraction)
    if stage.last:  # the loss's backward ends before any block is recomputed, and frees its logits
        extra = max(extra, inputs.logits + copy_bytes * inputs.head_weights) - logits
    activations = held + extra + 4 * inputs.hidden_bytes
    optimizer, buffers = profile.optimizer_bytes * own_weights, buffers + profile.buffer_bytes
    if layout.pipeline == 1 and micro_batches == 1 and not profile.persistent_gradients:
        gradients = max(0.0, gradients - activations)  # gradients are allocated as activations are freed
    subtotal = weights + gradients + optimizer + activations + buffers
    reserve = profile.fragmentation * subtotal + profile.fixed_bytes
    return RankMemory(weights, gradients, optimizer, activations, buffers, reserve)


def sharded_weights(layout: Layout, dense: float, experts: float) -> float:
    """Returns how many of a rank's weights it keeps the optimizer state of."""
    return dense / layout.weight_shards + experts / max(1, layout.weight_shards // layout.expert)
