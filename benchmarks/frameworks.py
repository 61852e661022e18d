"""How other people's training software differs from our engine, for predicting their measured runs.

The planner predicts our engine. The classes here override it for Megatron-LM of 2020 to 2022, DeepSpeed, Megatron-Core,
PyTorch FSDP, torchtitan and XLA: unfused attention, eager operators, no overlap, growing gradient buckets, and what
each keeps in memory. `benchmarks/published.py` decides which run used which software.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cluster import DeviceSpec, Efficiency
from shardwise.layout import Layout
from shardwise.planner.costs import cached_by
from shardwise.planner.costs.machine import (
    LOW_PRECISION,
    POWER_LIMITED,
    BlockTimeModel,
    KernelProfile,
    Machine,
    ModuleTime,
    ParallelDegrees,
    efficiency_of,
    power_share,
)
from shardwise.planner.costs.memory_model import FrameworkProfile, MemoryInputs, RankMemory
from shardwise.planner.costs.model_shape import ModelShape
from shardwise.planner.estimate import Estimator, memory_inputs_key
from shardwise.schedules.simulate import PeakCounts, lower_bound

CONSTANTS = tomllib.loads((Path(__file__).parent / "frameworks.toml").read_text(encoding="utf-8"))["common"]
BUCKET_GROWTH_RANKS = 40  # data ranks above which Megatron-Core's gradient buckets grow with their number
UNALIGNED_HEAD_SLOWDOWN = 8.0  # batched matmuls with a head size not divisible by 8; from published runs
EAGER_KERNELS = 2  # kernels per block in eager PyTorch, relative to fused kernels
# How often PyTorch's own RMSNorm (float32 copy, square, mean, product, cast, weight: 36 bytes per element, twice) and
# residuals read or write the hidden state of a forward in 16 bits, and rotary positions the heads.
EAGER_NORM_PASSES, EAGER_ROTARY_PASSES = 42, 10
# Rate of matmuls with an odd number of logits, relative to padded ones: between the 0.23 that we measured on an H200
# (docs/explanation/speed.md) and about 0.5, by what padding GPT-2's vocabulary gained nanoGPT on an A100.
ODD_VOCABULARY = 0.4
HEAD_KERNELS = 60  # kernels of norm, logits and loss in eager PyTorch, one way
FRAGMENTATION = 0.2  # what nvidia-smi shows beyond live tensors and fixed buffers, with the allocator of 2020 to 2024
FLASH_ATTENTION_1 = 0.65  # rate in Triton relative to FlashAttention 2, which is 1.3 to 2.5 times as fast by its paper
SCORE_PASSES = 4.5  # how often softmax and dropout of an unfused forward read or write each score
GRAD_ACCUMULATION_BYTES = 6.0  # moved per weight and micro-batch when eager PyTorch adds 16-bit gradients
FUSED_LOSS_BYTES = 16.0  # bytes moved per logit in forward and backward of a fused loss


@dataclass(frozen=True, kw_only=True)
class FrameworkEfficiency(Efficiency):
    """Efficiencies with the constants that only other people's software needs; fitted by `tools/fit_planner.py`."""

    flash_attention_2: float = CONSTANTS["flash_attention_2"]
    """Rate of FlashAttention 2 on devices that have newer kernels, relative to these."""
    loss_bytes_per_logit: float = CONSTANTS["loss_bytes_per_logit"]
    """Bytes moved per logit in forward and backward of an eager loss."""
    tensor_wait: float = CONSTANTS["tensor_wait"]
    """Seconds that tensor ranks wait for each other at an all-reduce that nothing overlaps."""


def framework_efficiency(device: DeviceSpec, fitted: FrameworkEfficiency | None = None) -> FrameworkEfficiency:
    """Returns a device's constants; `fitted`: those of its family, in place of the ones in use."""
    if fitted is None:
        return FrameworkEfficiency(**vars(efficiency_of(device, {})))
    return replace(fitted, **{name: power_share(device) * getattr(fitted, name) for name in POWER_LIMITED})


@dataclass(frozen=True)
class FrameworkKernels(KernelProfile):
    """How a framework computes. Defaults: Megatron-Core with Transformer Engine."""

    loss_bytes_per_logit: float = FUSED_LOSS_BYTES
    has_eager_loss: bool = False
    """Whether the loss is PyTorch's own operators."""
    fused_attention: bool = True
    flash_attention: int = 3
    """Generation of the fused attention; 3: the newest kernels of the device."""
    eager: bool = False
    """Whether elementwise operators are PyTorch's own, launched one by one."""
    has_eager_norms: bool = False
    """Whether RMSNorm and rotary positions, of models that have them, are PyTorch's own operators too."""
    overlap_comm: bool = True
    """Whether gradient reduction and tensor-parallel communication overlap with compute."""
    sequence_parallel: bool = True


@dataclass(frozen=True)
class FrameworkMemory(FrameworkProfile):
    """What a framework keeps. Defaults: mixed-precision Adam in Megatron-Core."""

    weight_bytes: float = 2.0
    sharded_weight_bytes: float = 0.0  # counted in `optimizer_bytes`
    compute_copy_bytes: float = 0.0
    optimizer_bytes: float = 12.0
    """Main weights and two moments."""
    logits: float = 8.0
    cast_bytes: float = 0.0
    update_bytes: float = 30.0
    fragmentation: float = 0.03
    fixed_bytes: float = 2.5 * 2**30
    """CUDA context, NCCL's buffers and cuBLAS workspaces."""
    zero_bucket_bytes: float = 0.0
    """DeepSpeed's two reduce buckets and one gather bucket, of 5e8 16-bit elements each; its pipelines have none."""
    keeps_gathered_inputs: bool = False
    """Whether the backward keeps the gathered inputs of tensor-parallel matmuls and does not gather them again."""
    has_unfused_activation: bool = False
    """Whether activation and gate are separate operators that each save their input."""
    keeps_dropout_masks: bool = False
    selective_keeps_matmuls: bool = False
    """Whether selective recomputation keeps matmuls and attention; otherwise it recomputes attention only."""


# DeepSpeed and Megatron-LM in fp16; eager PyTorch where the ZeRO stage is stated, with a fused loss for FSDP (stage 3);
# XLA on TPUs; Megatron-Core otherwise. All but FSDP and XLA allocate 16-bit gradients once.
LEGACY_MEGATRON = FrameworkMemory(
    gradient_bytes=2.0, optimizer_bytes=16.0, cast_bytes=GRAD_ACCUMULATION_BYTES, keeps_dropout_masks=True, logits=10.0,
    fragmentation=FRAGMENTATION, persistent_gradients=True, zero_bucket_bytes=3 * 5e8 * 2,
)  # fmt: skip
PYTORCH_EAGER = FrameworkMemory(
    gradient_bytes=2.0, keeps_gathered_inputs=True, has_unfused_activation=True, fragmentation=FRAGMENTATION,
    persistent_gradients=True,
)  # fmt: skip
PYTORCH_FSDP = FrameworkMemory(logits=6.0, fixed_bytes=1.5 * 2**30)  # fewer communicators
XLA_TPU = FrameworkMemory(gradient_bytes=2.0, logits=4.0, fragmentation=0.0, fixed_bytes=0.5 * 2**30)
MEGATRON_CORE = FrameworkMemory(gradient_bytes=2.0, persistent_gradients=True)


class FrameworkTimeModel(BlockTimeModel):
    """Module times with a framework's kernels."""

    kernel_profile: FrameworkKernels

    def __init__(self, machine: Machine, shape: ModelShape, kernels: FrameworkKernels, efficiency: FrameworkEfficiency):
        super().__init__(machine, shape, kernels)
        self.efficiency = efficiency
        if kernels.has_eager_norms and shape.gated:
            self.hidden_passes, self.head_passes = EAGER_NORM_PASSES, EAGER_ROTARY_PASSES

    def attention(self, degrees: ParallelDegrees) -> tuple[float, float]:
        if self.kernel_profile.fused_attention:
            forward, backward = super().attention(degrees)
            generation, has_newer = self.kernel_profile.flash_attention, self.machine.device.family != "ampere"
            rate = self.efficiency.flash_attention_2 if generation < 3 and has_newer else 1.0
            rate *= FLASH_ATTENTION_1 if generation == 1 else 1.0
            return forward / rate, backward / rate
        # Unfused: the scores are written, masked, normalised, dropped out and read again.
        shape, precision, queries = self.shape, self.kernel_profile.precision, self.shape.sequence / degrees.context
        heads = degrees.micro_batch * shape.heads / degrees.tensor
        matmuls = self.machine.matmul(queries, shape.head_dim, shape.sequence, precision, heads)
        matmuls += self.machine.matmul(queries, shape.sequence, shape.head_dim, precision, heads)
        matmuls *= UNALIGNED_HEAD_SLOWDOWN if shape.head_dim % 8 else 1.0  # no tensor cores
        passes = SCORE_PASSES * (1 if self._has_fused_softmax(degrees) else 2)
        score_bytes = self.kernel_profile.itemsize * heads * queries * shape.sequence * passes
        scores = self.machine.memory_time(score_bytes)
        return matmuls + scores, 2 * matmuls + 1.2 * scores

    def _has_fused_softmax(self, degrees: ParallelDegrees) -> bool:
        """Returns whether Megatron's fused masked softmax applies: it needs a batch of heads divisible by four."""
        return degrees.micro_batch * self.shape.heads // degrees.tensor % 4 == 0

    def kernels_per_block(self, degrees: ParallelDegrees) -> float:
        if not self.kernel_profile.fused_attention:
            return 60.0 if self._has_fused_softmax(degrees) else 80.0
        return super().kernels_per_block(degrees) * (EAGER_KERNELS if self.kernel_profile.eager else 1)

    def hidden_tokens(self, tokens: float, tensor: int) -> float:
        return super().hidden_tokens(tokens, tensor) if self.kernel_profile.sequence_parallel else tokens

    def exposed_tensor_time(self, seconds: float) -> float:
        overlaps = self.kernel_profile.overlap_comm
        return super().exposed_tensor_time(seconds) if overlaps else seconds + 2 * self.efficiency.tensor_wait

    def loss_bytes_per_logit(self, tensor: int) -> float:
        is_eager = self.kernel_profile.has_eager_loss
        return self.efficiency.loss_bytes_per_logit if is_eager else super().loss_bytes_per_logit(tensor)

    def head(self, degrees: ParallelDegrees) -> ModuleTime:
        head = super().head(degrees)
        if self.shape.vocab // degrees.tensor % 2:  # super() pads
            tokens = degrees.micro_batch * self.shape.sequence / degrees.context
            matmuls = self.machine.linear(tokens, self.shape.width, self.shape.vocab, self.kernel_profile.precision)
            more = [(1 / ODD_VOCABULARY - 1) * seconds for seconds in matmuls]
            head = head._replace(forward=head.forward + more[0], backward=head.backward + more[1] + more[2])
        host = HEAD_KERNELS * self.efficiency.kernel_launch if self.kernel_profile.has_eager_loss else 0.0
        forward, backward = (self.machine.bottleneck_time(seconds, host) for seconds in (head.forward, head.backward))
        return head._replace(forward=forward, backward=backward)


class FrameworkEstimator(Estimator):
    """Predicts layouts that a framework runs."""

    def __init__(self, machine: Machine, shape: ModelShape, kernels: FrameworkKernels, memory: FrameworkMemory,
                 samples: int, efficiency: FrameworkEfficiency):  # fmt: skip
        super().__init__(machine, shape, kernels, samples, memory)
        self.kernels, self.profile = kernels, memory
        self.time_model = FrameworkTimeModel(machine, shape, kernels, efficiency)
        self.gathers_per_block = 1 if kernels.overlap_comm else 8  # older FSDP gathers each weight separately
        self.reduced_gradient_bytes = min(4.0, memory.gradient_bytes)
        self.schedule_time = lower_bound  # which also knows schedules with fewer micro-batches than ranks

    def bucket_bytes(self, layout: Layout) -> float:
        growth = 1.0 if self.kernels.eager else max(1.0, layout.data / BUCKET_GROWTH_RANKS)
        return super().bucket_bytes(layout) * growth

    def exposed_sync_time(self, reduce: float, gather: float, last_pass: float) -> float:
        if self.kernels.eager:  # the next forward waits for all gathered weights
            return self._exposed_comm(reduce, last_pass) + gather
        return super().exposed_sync_time(reduce, gather, last_pass)

    def data(self, layout: Layout, dense_weights: float, experts: float, last_pass: float) -> float:
        # With several stages per rank, those that finish first communicate while the others run their micro-batches.
        window = layout.pipeline * (1.0 - 1.0 / layout.stages_per_rank)
        return super().data(layout, dense_weights, experts, last_pass * max(1.0, window))

    def _exposed_comm(self, traffic: float, compute: float) -> float:
        return super()._exposed_comm(traffic, compute) if self.kernels.overlap_comm else traffic

    def selective_recompute_time(self, layout: Layout, block: ModuleTime) -> float:
        if self.profile.selective_keeps_matmuls:
            return super().selective_recompute_time(layout, block)
        return self.time_model.attention(self.parallel_degrees(layout))[0]

    @cached_by(memory_inputs_key)
    def memory_inputs(self, layout: Layout) -> MemoryInputs:
        inputs = super().memory_inputs(layout)
        if layout.recompute == "selective" and not self.profile.selective_keeps_matmuls:
            inputs = replace(inputs, recomputed_per_block=0.0)
        return replace(inputs, recv_buffer_bytes=0.0)

    def memory(self, layout: Layout, rank: int, peaks: PeakCounts | None = None) -> RankMemory:
        memory = super().memory(layout, rank, peaks)
        buckets = self.profile.zero_bucket_bytes if layout.shard > 1 and layout.pipeline == 1 else 0.0
        return memory._replace(buffers=memory.buffers + buckets)

    def activation_bytes(self, layout: Layout, sparse: bool) -> tuple[float, float, float]:
        """Returns the bytes a block saves for one micro-batch's backward: with no, selective and full recomputation."""
        shape, itemsize = self.shape, self.kernels.itemsize
        t, tokens = layout.tensor, layout.micro_batch * shape.sequence / layout.context
        hidden_numel = tokens * shape.width / (t if self.kernels.sequence_parallel else 1)
        matmul_inputs = tokens * shape.width if self.profile.keeps_gathered_inputs else hidden_numel
        kv = 2 * shape.kv_heads * shape.head_dim
        if shape.kv_lora_rank:
            kv = 2 * shape.attention_width + t * (shape.q_lora_rank + shape.kv_lora_rank)
        narrow = 1 if self.kernels.precision in LOW_PRECISION and not self.kernels.eager else itemsize
        saved = itemsize * 2 * hidden_numel + narrow * 2 * matmul_inputs
        saved += itemsize * tokens * (shape.query_width + kv + shape.attention_width) / t
        if self.profile.has_unfused_activation:
            saved += itemsize * tokens * (shape.query_width + kv / 2) / t
        if self.profile.keeps_dropout_masks:
            saved += 2 * hidden_numel
        hidden = shape.shared_expert_ffn if sparse else shape.ffn
        num_saved = shape.ffn_matrices + (1 if self.profile.has_unfused_activation and shape.gated else 0)
        ffn_bytes = itemsize * (num_saved - 1) + narrow  # of the last matmul's input in its own precision
        saved += tokens * hidden * ffn_bytes / t
        if sparse:
            routed = tokens * shape.experts_per_token / t
            saved += routed * ((itemsize + narrow) * shape.width + ffn_bytes * shape.expert_ffn)
        selective = saved
        if self.profile.selective_keeps_matmuls:
            matmul_outputs = shape.query_width + kv + shape.attention_width + (shape.ffn_matrices - 1) * hidden
            gathered = 2 * matmul_inputs if self.profile.keeps_gathered_inputs and t > 1 else 0
            selective = itemsize * (3 * hidden_numel + gathered + tokens * matmul_outputs / t)
        if not self.kernels.fused_attention:
            heads = layout.micro_batch * shape.heads / t
            saved += heads * shape.sequence / layout.context * shape.sequence * (2 * itemsize + 1)
        return saved, selective, itemsize * hidden_numel
