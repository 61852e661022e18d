"""Seconds of each piece of a model on one rank: products by shape, attention, memory traffic, collectives.

A piece is the embedding, a block, or the head. Its cost depends on how many samples it sees at once, on the degrees
that cut it and on the device, not on the pipeline or on the other pieces.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import ceil, inf

from shardwise.cluster import Cluster
from shardwise.planner.costs.efficiency import Efficiency
from shardwise.planner.costs.model_shape import ModelShape

LOW_PRECISION = ("fp8", "fp4")
UNALIGNED_HEAD_SLOWDOWN = (
    8.0  # times as long, batched products of heads whose size is no multiple of 8; from published runs
)
TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))  # sides, and rate against the largest
HEAD_KERNELS = 60  # kernels of norm, logits and loss in PyTorch's own operators, one way
KERNELS_PER_COLLECTIVE = 5  # kernels that the host could start in the time it takes to start one collective
MIN_KERNEL_SECONDS = 4e-6  # seconds of the shortest kernel
FUSED_LOSS_BYTES = 16.0  # bytes moved per logit in forward and backward of a fused loss


@dataclass(frozen=True)
class KernelProfile:
    """How a model is computed, beyond its layout."""

    precision: str
    """Of the products; accumulation and norms are wider."""
    fused_attention: bool = True
    """Whether attention never writes its square of scores to memory."""
    flash_attention_2: bool = False
    """Whether that attention is FlashAttention 2 or before."""
    eager: bool = False
    """Whether operators between the products are PyTorch's own, started one by one."""
    loss_bytes_per_logit: float | None = FUSED_LOSS_BYTES
    """Bytes moved per logit in forward and backward of the loss; None: as many as PyTorch's own operators move."""
    overlap_comm: bool = True
    """Whether gradient sums and tensor traffic hide behind computation."""

    @property
    def itemsize(self) -> int:
        """Of one number of an activation."""
        return {"float64": 8, "float32": 4}.get(self.precision, 2)


@dataclass(frozen=True)
class ParallelDegrees:
    """How a piece is cut, and how many samples it sees at once."""

    tensor: int
    context: int
    expert: int
    micro_batch: int
    expert_tensor: int = 1
    """The part of the tensor axis that cuts each expert; the rest of it works on other tokens."""
    sequence_parallel: bool = True
    """Whether what lies between the cut products is cut along the sequence over the tensor axis."""


@dataclass(frozen=True)
class ModuleTime:
    """One pass of one micro-batch through one piece on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    """Both halves, without anything computed again."""
    weight_grad: float = 0.0
    """The part of `backward` that makes weight gradients."""
    core_attention: float = 0.0
    """The part of `forward` that selective recomputation runs again."""
    tensor: float = 0.0
    """Exposed traffic of the tensor axis in a forward; a backward has as much."""
    context: float = 0.0
    expert: float = 0.0
    moved_bytes: float = 0.0
    """Bytes that a forward's other operators move; a backward moves twice as many."""
    launch_seconds: float = 0.0
    """Seconds of the host to start a forward's kernels; a backward has twice as many."""

    @property
    def traffic(self) -> float:
        return self.tensor + self.context + self.expert

    @property
    def total(self) -> float:
        """Forward and backward with their traffic."""
        return self.forward + self.backward + 2 * self.traffic

    def lerp(self, other: ModuleTime, share: float) -> ModuleTime:
        """The mean of both, with `share` of the other."""
        if share in (0.0, 1.0):
            return other if share else self
        pairs = zip(astuple(self), astuple(other), strict=True)
        return ModuleTime(*((1.0 - share) * a + share * b for a, b in pairs))


class Machine:
    """A cluster with its efficiencies: what one operator takes."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency):
        self.cluster, self.device, self.efficiency = cluster, cluster.device, efficiency

    def matmul(self, m: float, k: float, n: float, precision: str, groups: float = 1.0, moved: float = 0.0) -> float:
        """Seconds of `groups` products side by side, of (m x k) and (k x n) each; `moved`: bytes, if not theirs."""
        if not (m and k and n):
            return 0.0
        e = self.efficiency
        narrow = precision in LOW_PRECISION and self.device.peak_flops(precision) > self.device.peak_flops("bf16")
        share = (
            (e.low_precision_matmul if narrow else e.matmul) * k / (k + e.matmul_half_rate_depth * (2 if narrow else 1))
        )
        share *= max(self.tile_utilization(m, n, groups, *tile) for tile in TILES)
        if k % 8 or n % 8:
            share *= e.unaligned_8
        elif k % 64 or n % 64:
            share *= e.unaligned_64
        if groups > 1:
            share *= e.grouped_matmul
        size = 1 if narrow else {"float64": 8, "float32": 4}.get(precision, 2)
        moved = moved or groups * (m * k + k * n + m * n) * size
        return max(2.0 * groups * m * k * n / (self.device.peak_flops(precision) * share), self.memory_time(moved))

    def tile_utilization(
        self, m: float, n: float, groups: float, tile_rows: int, tile_columns: int, rate: float
    ) -> float:
        """What tiles of one size make of a product: their own rate, less what the last wave and the edges waste."""
        waves = ceil(m / tile_rows) * ceil(n / tile_columns) * groups / self.device.compute_units
        used = groups * m * n / (ceil(waves) * self.device.compute_units * tile_rows * tile_columns)
        return rate * (1.0 - self.efficiency.wave_quantization * (1.0 - used))

    def bottleneck_time(self, device_seconds: float, host_seconds: float) -> float:
        """Seconds of a pass: the device's or the host's, whichever is longer, and more where both are about alike, as
        each waits for the other in parts of it."""
        if not host_seconds:
            return device_seconds
        power = self.efficiency.overlap_sharpness
        return (device_seconds**power + host_seconds**power) ** (1.0 / power)

    def linear(self, m: float, k: float, n: float, precision: str, groups: float = 1.0) -> tuple[float, float, float]:
        """Seconds of a layer's product, and of those for the gradients of its input and of its weights."""
        shapes = (m, k, n), (m, n, k), (k, m, n)
        forward, input_grad, weight_grad = (self.matmul(*three, precision, groups) for three in shapes)
        return forward, input_grad, weight_grad

    def memory_time(self, size: float) -> float:
        """Seconds to read or write so many bytes of device memory."""
        return max(size / (self.device.bandwidth * self.efficiency.memory), MIN_KERNEL_SECONDS)

    def bulk_memory_time(self, size: float) -> float:
        """Seconds to move so many bytes in one large operator."""
        return max(
            size / (self.device.bandwidth * (self.efficiency.bulk_memory or self.efficiency.memory)), MIN_KERNEL_SECONDS
        )

    def bandwidth(self, ranks: int, stride: int) -> float:
        """What one rank of a group sees; `stride` devices lie between neighbours."""
        c, e = self.cluster, self.efficiency
        inner = c.inner.bandwidth * e.inner
        if ranks * stride <= c.domain_size:
            dims = int(c.topology[-1]) if c.topology.startswith("torus") else 1
            return inner / dims if ranks <= 16 else inner  # along one side of a torus, the links of that side only
        ranks_per_domain = max(
            1, c.domain_size // stride
        )  # ranks of the group in one domain, each with a port of its own
        return min(inner, ranks_per_domain * c.outer.bandwidth * e.outer)

    def all_gather(self, total_bytes: float, ranks: int, stride: int, bucket: float = inf) -> float:
        """All-gather or reduce-scatter of `whole` bytes in all, in pieces of at most `bucket`."""
        if ranks == 1 or not total_bytes:
            return 0.0
        c = self.cluster
        domains = max(1, ranks * stride // c.domain_size)
        hop_seconds = (ranks - domains) * c.inner.latency + (domains - 1) * c.outer.latency  # once around the ring
        sent_bytes = total_bytes * (ranks - 1) / ranks
        latency = self.efficiency.collective_start + self.efficiency.latency * hop_seconds
        return sent_bytes / self.bandwidth(ranks, stride) + latency * max(1, ceil(total_bytes / bucket))

    def all_reduce(self, total_bytes: float, ranks: int, stride: int, bucket: float = inf) -> float:
        """All-reduce."""
        return 2.0 * self.all_gather(total_bytes, ranks, stride, bucket)

    def all_to_all(self, total_bytes: float, ranks: int, stride: int) -> float:
        """All-to-all: each rank sends `whole` bytes in all."""
        if ranks == 1:
            return 0.0
        c, e = self.cluster, self.efficiency
        ranks_in_domain = min(ranks, max(1, c.domain_size // stride))
        intra_domain = total_bytes * (ranks_in_domain - 1) / ranks / (c.inner.bandwidth * e.inner)
        inter_domain = total_bytes * (ranks - ranks_in_domain) / ranks / (c.outer.bandwidth * e.outer * e.all_to_all)
        return max(intra_domain, inter_domain) + c.inner.latency * 2 + (c.outer.latency if inter_domain else 0.0)

    def p2p(self, size: float, stride: int) -> float:
        """Point to point between neighbours `stride` devices apart."""
        c, e = self.cluster, self.efficiency
        if stride < c.domain_size:
            return size / (c.inner.bandwidth * e.inner) + c.inner.latency
        return size / (c.outer.bandwidth * e.outer) + c.outer.latency


def block_time(
    machine: Machine, shape: ModelShape, kernel_profile: KernelProfile, degrees: ParallelDegrees, sparse: bool
) -> ModuleTime:
    e, size, precision = machine.efficiency, kernel_profile.itemsize, kernel_profile.precision
    t, c = degrees.tensor, degrees.context
    tokens = degrees.micro_batch * shape.sequence / c
    region_tokens = tokens / (t if degrees.sequence_parallel else 1)  # tokens of a rank between the cut products
    forward = backward = weight = 0.0
    products = [(k, n // t if is_colwise else n) if i < len(shape.projections) - 1 else (k // t, n)
                for i, (k, n, is_colwise) in enumerate(shape.projections)]  # fmt: skip
    hidden = shape.shared_expert_ffn if sparse else shape.ffn
    if hidden:
        products += [(shape.width, (shape.ffn_matrices - 1) * hidden // t), (hidden // t, shape.width)]
    for k, n in products:
        product_forward, input_grad, weight_grad = machine.linear(tokens, k, n, precision)
        forward, backward, weight = forward + product_forward, backward + input_grad + weight_grad, weight + weight_grad
    core, core_backward = attention_time(machine, shape, kernel_profile, degrees)
    forward, backward = forward + core, backward + core_backward
    # Norms, residual sums, dropout, rotary: numbers of the stream; activation: numbers of the hidden part.
    moved = size * (
        12 * region_tokens * shape.width + 3 * tokens * (shape.query_width + 2 * shape.kv_heads * shape.head_dim) / t
    )
    moved += size * tokens * hidden / t * (shape.ffn_matrices + 1)
    if precision in LOW_PRECISION:
        moved += tokens * (4 * shape.width + 2 * (shape.attention_width + hidden) / t)
    elementwise = machine.memory_time(moved)
    forward, backward = forward + elementwise, backward + 2 * elementwise
    kernels = 60.0 if _has_fused_softmax(shape, degrees) else 80.0
    if kernel_profile.fused_attention:
        kernels = 24.0 - (8 if shape.positions else 0) - (0 if shape.gated else 2)  # without rotation, without gate
        kernels *= e.eager if kernel_profile.eager else 1.0
    expert = 0.0
    if sparse:
        routed_tokens = tokens * shape.experts_per_token / t
        per_rank = shape.experts / degrees.expert
        tokens_per_expert = routed_tokens * degrees.expert_tensor * degrees.expert / shape.experts
        inner = shape.expert_ffn // degrees.expert_tensor
        for k, n in ((shape.width, (shape.ffn_matrices - 1) * inner), (inner, shape.width)):
            product_forward, input_grad, weight_grad = machine.linear(tokens_per_expert, k, n, precision, per_rank)
            forward, backward, weight = (
                forward + product_forward,
                backward + input_grad + weight_grad,
                weight + weight_grad,
            )
        expert_moved = size * routed_tokens * (6 * shape.width + (shape.ffn_matrices + 1) * shape.expert_ffn)
        forward, backward = (
            forward + machine.memory_time(expert_moved),
            backward + 2 * machine.memory_time(expert_moved),
        )
        moved += expert_moved
        expert = 2 * machine.all_to_all(
            size * routed_tokens * shape.width, degrees.expert, t if degrees.expert > 1 else 1
        )
        expert *= 1.0 - e.overlap_expert
        kernels += e.routing_kernels
    tensor = 0.0
    if t > 1:
        kernels += 2 * KERNELS_PER_COLLECTIVE
        tensor = 2 * machine.all_reduce(size * tokens * shape.width, t, 1)
        tensor = tensor * (1.0 - e.overlap_tensor) if kernel_profile.overlap_comm else tensor + 2 * e.tensor_wait
    context = 0.0
    if c > 1:
        kv = size * 2 * degrees.micro_batch * shape.sequence * shape.kv_heads * shape.head_dim / t
        context = max(0.0, machine.all_gather(kv, c, t) - 0.5 * core)
    return ModuleTime(
        forward=forward,
        backward=backward,
        weight_grad=weight,
        core_attention=core,
        tensor=tensor,
        context=context,
        expert=expert,
        moved_bytes=moved,
        launch_seconds=kernels * e.kernel_launch,
    )


def attention_time(
    machine: Machine, shape: ModelShape, kernel_profile: KernelProfile, degrees: ParallelDegrees
) -> tuple[float, float]:
    """Seconds of forward and backward of the part between the projections."""
    e = machine.efficiency
    queries = shape.sequence / degrees.context
    heads = degrees.micro_batch * shape.heads / degrees.tensor
    head_dims = 2 * shape.head_dim + shape.qk_rope_head_dim
    if kernel_profile.fused_attention:
        flops = 2.0 * heads * queries * shape.sequence * head_dims * (0.5 if shape.causal else 1.0)
        rate = (
            machine.device.peak_flops("bf16" if kernel_profile.precision in LOW_PRECISION else kernel_profile.precision)
            * e.attention
        )
        rate *= e.flash_attention_2 if kernel_profile.flash_attention_2 else 1.0
        rate *= shape.sequence / (shape.sequence + 512)  # short rows fill no tile
        rate *= min(1.0, 0.5 + shape.head_dim / 256)
        forward = flops / rate
        return forward, 2.5 * forward / e.attention_backward
    # Every head's square of scores is written, masked, normalised, dropped out of and read again.
    precision = kernel_profile.precision
    scores = machine.matmul(queries, shape.head_dim, shape.sequence, precision, heads)
    weighted_values = machine.matmul(queries, shape.sequence, shape.head_dim, precision, heads)
    if shape.head_dim % 8:  # batched products of such heads miss the tensor cores
        scores, weighted_values = UNALIGNED_HEAD_SLOWDOWN * scores, UNALIGNED_HEAD_SLOWDOWN * weighted_values
    moves = e.score_passes if _has_fused_softmax(shape, degrees) else 2 * e.score_passes
    score_traffic = machine.memory_time(kernel_profile.itemsize * heads * queries * shape.sequence * moves)
    forward = scores + weighted_values + score_traffic
    return forward, 2 * (scores + weighted_values) + 1.2 * score_traffic


def _has_fused_softmax(shape: ModelShape, degrees: ParallelDegrees) -> bool:
    """Whether the masked softmax is one kernel where attention is not fused: Megatron's takes squares by fours."""
    return degrees.micro_batch * shape.heads // degrees.tensor % 4 == 0


def head_time(
    machine: Machine, shape: ModelShape, kernel_profile: KernelProfile, degrees: ParallelDegrees
) -> ModuleTime:
    """Final norm, logits, loss. The logits' product stays in 16 bits."""
    t = degrees.tensor
    precision = "bf16" if kernel_profile.precision in LOW_PRECISION else kernel_profile.precision
    tokens = shape.logit_fraction * degrees.micro_batch * shape.sequence / degrees.context
    product_forward, input_grad, weight_grad = machine.linear(tokens, shape.width, ceil(shape.vocab / t), precision)
    bytes_per_logit = kernel_profile.loss_bytes_per_logit
    if bytes_per_logit is None:  # of a cut vocabulary, measured runs show no more than a fused loss would take
        bytes_per_logit = machine.efficiency.loss_bytes_per_logit if t == 1 else FUSED_LOSS_BYTES
    loss = machine.bulk_memory_time(tokens * shape.vocab / t * bytes_per_logit / 2)
    host = HEAD_KERNELS * machine.efficiency.kernel_launch if kernel_profile.loss_bytes_per_logit is None else 0.0
    tensor = machine.all_reduce(kernel_profile.itemsize * tokens * shape.width, t, 1) / 2 if t > 1 else 0.0
    forward, backward = (
        machine.bottleneck_time(product_forward + loss, host),
        machine.bottleneck_time(input_grad + weight_grad + loss, host),
    )
    return ModuleTime(forward=forward, backward=backward, weight_grad=weight_grad, tensor=tensor)


def embedding_time(
    machine: Machine, shape: ModelShape, kernel_profile: KernelProfile, degrees: ParallelDegrees
) -> ModuleTime:
    tokens = degrees.micro_batch * shape.sequence / degrees.context
    moved = machine.memory_time(kernel_profile.itemsize * tokens * shape.width * 4)
    tensor = (
        machine.all_reduce(kernel_profile.itemsize * tokens * shape.width, degrees.tensor, 1) / 2
        if degrees.tensor > 1
        else 0.0
    )
    return ModuleTime(forward=moved, backward=3 * moved, weight_grad=3 * moved, tensor=tensor)
