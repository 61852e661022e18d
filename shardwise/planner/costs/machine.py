"""Seconds of operators, collectives and a decoder's modules on one device, from data-sheet peaks and the shares of them
that software reaches, which `tools/fit_planner.py` fits to published runs (`docs/explanation/planner-model.md`)."""

import tomllib
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from shardwise.cluster import Cluster, DeviceSpec, Efficiency
from shardwise.planner.costs.model_shape import ModelShape

ROUTING_KERNELS = 40  # that a forward launches to choose experts, dispatch tokens to them and combine their outputs
FUSION = 3.0  # kernels of a block for each one that is left when it is compiled
COLLECTIVE_LAUNCHES = 3  # kernels the host could launch in the time it takes to launch one collective
CONSTANTS = tomllib.loads((Path(__file__).parents[1] / "constants.toml").read_text(encoding="utf-8"))


POWER_LIMITED = ("matmul", "low_precision_matmul", "attention")
WATTS_PER_TFLOPS = {"ampere": 1.28, "hopper": 0.708, "blackwell": 0.49}  # rated watts per TFLOP/s in 16 bits


def power_share(device: DeviceSpec) -> float:
    """Returns the clock that a device's power allows, relative to the one on which most runs of its family ran."""
    watts = 1e12 * device.power / device.peak_flops("bf16")
    return watts / WATTS_PER_TFLOPS.get(device.family, watts) if watts else 1.0


def efficiency_of(device: DeviceSpec, measured: dict[str, float]) -> Efficiency:
    """Returns the fitted constants of a device's family, overridden by what `calibrate` measured."""
    shares = CONSTANTS["families"].get(device.family, CONSTANTS["families"]["other"])
    at_power = {name: power_share(device) * shares[name] for name in POWER_LIMITED}
    return Efficiency(**{**CONSTANTS["common"], **shares, **at_power, **measured})


LOW_PRECISION = ("fp8", "fp4")
TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))  # rows, columns, rate relative to the best
MIN_KERNEL_SECONDS = 4e-6  # of the shortest kernel


class Machine:
    """Times operators and collectives on one cluster."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency, trained: float = 1.0):
        """`trained`: the fraction of the weights that are, and need gradients."""
        self.cluster, self.device, self.efficiency, self.trained = cluster, cluster.device, efficiency, trained

    def matmul(self, m: float, k: float, n: float, precision: str, groups: float = 1.0, moved: float = 0.0) -> float:
        """Seconds of `groups` batched (m x k) @ (k x n) matmuls; `moved` overrides the bytes they touch."""
        if not (m and k and n):
            return 0.0
        e = self.efficiency
        narrow = precision in LOW_PRECISION and self.device.peak_flops(precision) > self.device.peak_flops("bf16")
        rate = e.low_precision_matmul if narrow else e.matmul
        rate = rate * k / (k + e.matmul_half_rate_depth * (2 if narrow else 1))
        rate *= max(self.tile_utilization(m, n, groups, *tile) for tile in TILES)
        if k % 64 or n % 64:
            rate *= e.unaligned_64
        if groups > 1:
            rate *= e.grouped_matmul
        size = 1 if narrow else {"float64": 8, "float32": 4}.get(precision, 2)
        moved = moved or groups * (m * k + k * n + m * n) * size
        return max(2.0 * groups * m * k * n / (self.device.peak_flops(precision) * rate), self.memory_time(moved))

    def tile_utilization(self, m: float, n: float, groups: float, rows: int, columns: int, rate: float) -> float:
        """Fraction of the peak that tiles of this size reach, after losses to edges and to the last, partial wave."""
        waves = ceil(m / rows) * ceil(n / columns) * groups / self.device.compute_units
        used = groups * m * n / (ceil(waves) * self.device.compute_units * rows * columns)
        return rate * (1.0 - self.efficiency.wave_quantization * (1.0 - used))

    def linear(
        self, m: float, k: float, n: float, precision: str, groups: float = 1.0, moved: float = 0.0
    ) -> tuple[float, float, float]:
        """Seconds of a linear layer's forward, of its input gradient and of its weight gradient."""
        shapes = (m, k, n), (m, n, k), (k, m, n)
        forward, input_grad, weight_grad = (self.matmul(*sizes, precision, groups, moved) for sizes in shapes)
        return forward, input_grad, self.trained * weight_grad

    def attention(
        self, heads: float, queries: float, keys: int, head_dim: int, rope_head_dim: int, causal: bool, precision: str
    ) -> tuple[float, float]:
        """Seconds of forward and backward of fused attention, without its projections."""
        flops = 2.0 * heads * queries * keys * (2 * head_dim + rope_head_dim)
        rate = self.device.peak_flops("bf16" if precision in LOW_PRECISION else precision) * self.efficiency.attention
        rate *= keys / (keys + (640 if causal else 128))  # short sequences do not fill a tile; those on the diagonal
        rate *= min(1.0, 0.5 + head_dim / 256)
        forward = flops * (0.5 if causal else 1.0) / rate
        return forward, 2.5 * forward / self.efficiency.attention_backward

    def bottleneck_time(self, device_seconds: float, host_seconds: float) -> float:
        """Seconds of a pass limited by the device or by kernel launches on the host: a p-norm, close to the larger one,
        and longer where they are similar, since each then waits for the other part of the time."""
        if not host_seconds:
            return device_seconds
        power, longest = self.efficiency.overlap_sharpness, max(device_seconds, host_seconds)
        return longest * ((device_seconds / longest) ** power + (host_seconds / longest) ** power) ** (1.0 / power)

    def memory_time(self, size: float, bulk: bool = False) -> float:
        """Seconds to move `size` bytes of device memory in elementwise operators; `bulk`: in one, as in the update."""
        share = (self.efficiency.bulk_memory if bulk else 0.0) or self.efficiency.memory
        return max(size / (self.device.bandwidth * max(share, 0.01)), MIN_KERNEL_SECONDS)

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bandwidth per rank of a group whose neighbours are `stride` devices apart."""
        c, e = self.cluster, self.efficiency
        inner = c.inner.bandwidth * e.inner
        if ranks * stride <= c.domain_size:
            dims = int(c.topology[-1]) if c.topology.startswith("torus") else 1
            return inner / dims if ranks <= 16 else inner  # a small group on a torus uses the links of one dimension
        ports = max(1, c.domain_size // stride)  # each rank of the group in a domain has its own port
        return min(inner, ports * c.outer.bandwidth * e.outer)

    def all_gather(self, total_bytes: float, ranks: int, stride: int, bucket: float = inf) -> float:
        """Seconds to all-gather or reduce-scatter `total_bytes` over `ranks`, in buckets of at most `bucket` bytes."""
        if ranks == 1 or not total_bytes:
            return 0.0
        c = self.cluster
        domains = max(1, ranks * stride // c.domain_size)
        ring_seconds = (ranks - domains) * c.inner.latency + (domains - 1) * c.outer.latency
        sent_bytes = total_bytes * (ranks - 1) / ranks
        latency = self.efficiency.collective_start + self.efficiency.latency * ring_seconds
        return sent_bytes / self.bandwidth(ranks, stride) + latency * max(1, ceil(total_bytes / bucket))

    def all_reduce(self, total_bytes: float, ranks: int, stride: int, bucket: float = inf) -> float:
        return 2.0 * self.all_gather(total_bytes, ranks, stride, bucket)

    def all_to_all(self, total_bytes: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all in which each rank sends `total_bytes`."""
        if ranks == 1:
            return 0.0
        c, e = self.cluster, self.efficiency
        ranks_in_domain = min(ranks, max(1, c.domain_size // stride))
        intra_domain = total_bytes * (ranks_in_domain - 1) / ranks / (c.inner.bandwidth * e.inner)
        inter_domain = total_bytes * (ranks - ranks_in_domain) / ranks / (c.outer.bandwidth * e.outer * e.all_to_all)
        return max(intra_domain, inter_domain) + c.inner.latency * 2 + (c.outer.latency if inter_domain else 0.0)

    def p2p(self, size: float, stride: int) -> float:
        """Seconds to send `size` bytes to a rank `stride` devices away."""
        c, e = self.cluster, self.efficiency
        link, share = (c.inner, e.inner) if stride < c.domain_size else (c.outer, e.outer)
        return size / (link.bandwidth * share) + link.latency


@dataclass(frozen=True)
class KernelProfile:
    """How modules are computed, beyond the layout."""

    precision: str  # of the matmuls; accumulation and norms have a wider one
    # Bytes moved per logit in forward and backward of the loss; 10 measured for our fused kernel on an H200.
    loss_bytes_per_logit: float = 10.0
    compiled: bool = False  # whether blocks are compiled
    adapter_features: float = 0.0  # inputs and outputs of a block's linear layers that have LoRA adapters

    @property
    def itemsize(self) -> int:
        """Bytes per element of an activation."""
        return {"float64": 8, "float32": 4}.get(self.precision, 2)


class ParallelDegrees(NamedTuple):
    """How a module is split, and its micro-batch size."""

    tensor: int
    context: int
    expert: int
    micro_batch: int
    expert_tensor: int = 1  # tensor ranks that split each expert; the other tensor ranks process other tokens


class ModuleTime(NamedTuple):
    """Seconds of one micro-batch through one module on one rank."""

    forward: float = 0.0
    backward: float = 0.0  # input and weight gradients, without recomputation
    weight_grad: float = 0.0  # the part of `backward` that computes weight gradients
    tensor: float = 0.0  # exposed tensor-parallel communication of a forward; a backward has the same
    context: float = 0.0
    expert: float = 0.0
    moved_bytes: float = 0.0  # bytes that elementwise operators move in a forward; a backward moves twice as many
    launch_seconds: float = 0.0  # host time to launch a third of the kernels of forward and backward
    not_recomputed: float = 0.0  # seconds of a forward that a compiled recomputation leaves out

    @property
    def traffic(self) -> float:
        """Exposed communication of a forward."""
        return self.tensor + self.context + self.expert

    @property
    def total(self) -> float:
        """Forward and backward with their communication."""
        return self.forward + self.backward + 2 * self.traffic


class BlockTimeModel:
    """Predicts module times of one model on one machine. The methods from `attention` on describe our kernels;
    `benchmarks/frameworks.py` overrides them for other software."""

    hidden_passes, head_passes = 12, 3  # reads and writes of the hidden state and of heads in a forward

    def __init__(self, machine: Machine, shape: ModelShape, kernel_profile: KernelProfile):
        self.machine, self.shape, self.kernel_profile = machine, shape, kernel_profile

    def block(self, degrees: ParallelDegrees, sparse: bool) -> ModuleTime:
        machine, shape, e = self.machine, self.shape, self.machine.efficiency
        size, precision, t = self.kernel_profile.itemsize, self.kernel_profile.precision, degrees.tensor
        tokens = degrees.micro_batch * shape.sequence / degrees.context
        hidden = shape.shared_expert_ffn if sparse else shape.ffn
        *inputs, (attention_width, width, _) = shape.projections
        products = [(k, n // t if colwise else n) for k, n, colwise in inputs] + [(attention_width // t, width)]
        if hidden:
            products += [(shape.width, (shape.ffn_matrices - 1) * hidden // t), (hidden // t, shape.width)]
        linears = [machine.linear(tokens, k, n, precision) for k, n in products]
        core, core_backward = self.attention(degrees)
        # Norms, residuals, dropout and rotary move the hidden state; activation functions move the FFN's hidden state.
        kv_width = 2 * shape.kv_heads * shape.head_dim
        heads_moved = self.head_passes * tokens * (shape.query_width + kv_width) / t
        moved = size * (self.hidden_passes * self.hidden_tokens(tokens, t) * shape.width + heads_moved)
        moved += size * tokens * hidden / t * (shape.ffn_matrices + 1)
        if precision in LOW_PRECISION:
            moved += e.low_precision_casts * tokens * (4 * shape.width + 2 * (shape.attention_width + hidden) / t)
        # Adapters are thin matmuls, bound by memory: six passes over inputs and outputs, forward and backward.
        moved += 2 * size * tokens * self.kernel_profile.adapter_features / t
        elementwise = machine.memory_time(moved)
        forward = sum(linear[0] for linear in linears) + core + elementwise
        backward = sum(seconds for linear in linears for seconds in linear[1:]) + core_backward + 2 * elementwise
        weight_grad, expert, kernels = sum(linear[2] for linear in linears), 0.0, self.kernels_per_block(degrees)
        if sparse:
            routed_tokens = tokens * shape.experts_per_token / t
            tokens_per_expert = routed_tokens * degrees.expert_tensor * degrees.expert / shape.experts
            inner = shape.expert_ffn // degrees.expert_tensor
            for k, n in ((shape.width, (shape.ffn_matrices - 1) * inner), (inner, shape.width)):
                linear = machine.linear(tokens_per_expert, k, n, precision, shape.experts / degrees.expert)
                forward, backward = forward + linear[0], backward + linear[1] + linear[2]
                weight_grad += linear[2]
            expert_moved = size * routed_tokens * (6 * shape.width + (shape.ffn_matrices + 1) * shape.expert_ffn)
            forward += machine.memory_time(expert_moved)
            backward += 2 * machine.memory_time(expert_moved)
            moved += expert_moved
            dispatch_bytes, stride = size * routed_tokens * shape.width, t if degrees.expert > 1 else 1
            expert = 2 * machine.all_to_all(dispatch_bytes, degrees.expert, stride) * (1.0 - e.overlap_expert)
            if not self.kernel_profile.compiled:  # which fuses routing, and calls one kernel for all experts
                kernels += ROUTING_KERNELS + e.expert_kernels * shape.experts / degrees.expert
        tensor = context = 0.0
        if t > 1:
            kernels += 2 * COLLECTIVE_LAUNCHES
            tensor = self.exposed_tensor_time(2 * machine.all_reduce(size * tokens * shape.width, t, 1))
        if degrees.context > 1:
            kv_bytes = size * 2 * degrees.micro_batch * shape.sequence * shape.kv_heads * shape.head_dim / t
            context = max(0.0, machine.all_gather(kv_bytes, degrees.context, t) - 0.5 * core)
        # Nothing needs the output of the last matmul, and elementwise operators are fused into those of the backward.
        not_recomputed = elementwise + linears[-1][0] if self.kernel_profile.compiled else 0.0
        times = ModuleTime(forward, backward, weight_grad, tensor, context, expert, moved, kernels * e.kernel_launch)
        return times._replace(not_recomputed=not_recomputed)

    def head(self, degrees: ParallelDegrees) -> ModuleTime:
        """Returns the time of the final norm, logits and loss. The logits' matmul runs in at least 16 bits."""
        machine, shape, t = self.machine, self.shape, degrees.tensor
        precision = "bf16" if self.kernel_profile.precision in LOW_PRECISION else self.kernel_profile.precision
        tokens = shape.logit_fraction * degrees.micro_batch * shape.sequence / degrees.context
        multiple = 1 if machine.device.family == "cpu" else 128  # on a GPU the vocabulary is padded
        padded_vocab = ceil(shape.vocab / t / multiple) * multiple
        forward, input_grad, weight_grad = machine.linear(tokens, shape.width, padded_vocab, precision)
        loss = machine.memory_time(tokens * shape.vocab / t * self.loss_bytes_per_logit(t) / 2, bulk=True)
        tensor = machine.all_reduce(self.kernel_profile.itemsize * tokens * shape.width, t, 1) / 2 if t > 1 else 0.0
        return ModuleTime(forward + loss, input_grad + weight_grad + loss, weight_grad, tensor)

    def embedding(self, degrees: ParallelDegrees) -> ModuleTime:
        size, t = self.kernel_profile.itemsize, degrees.tensor
        tokens = degrees.micro_batch * self.shape.sequence / degrees.context
        moved = self.machine.memory_time(size * tokens * self.shape.width * 4)
        tensor = self.machine.all_reduce(size * tokens * self.shape.width, t, 1) / 2 if t > 1 else 0.0
        return ModuleTime(moved, 3 * moved, 3 * moved, tensor)

    def attention(self, degrees: ParallelDegrees) -> tuple[float, float]:
        shape, heads = self.shape, degrees.micro_batch * self.shape.heads / degrees.tensor
        sizes = heads, shape.sequence / degrees.context, shape.sequence, shape.head_dim, shape.qk_rope_head_dim
        return self.machine.attention(*sizes, shape.causal, self.kernel_profile.precision)

    def kernels_per_block(self, degrees: ParallelDegrees) -> float:
        """Returns how many kernels a block's forward launches; learned positions need no rotary kernels. If compiled,
        they are as many either way: what learned positions and GELU save, biases and their gradients add."""
        if self.kernel_profile.compiled:
            return 24.0 / FUSION
        return 24.0 - (8 if self.shape.positions else 0) - (0 if self.shape.gated else 2)

    def hidden_tokens(self, tokens: float, tensor: int) -> float:
        return tokens / tensor  # sequence parallelism splits them between tensor-parallel regions

    def exposed_tensor_time(self, seconds: float) -> float:
        """Returns what remains of tensor-parallel communication after overlap with matmuls."""
        return seconds * (1.0 - self.machine.efficiency.overlap_tensor)

    def loss_bytes_per_logit(self, tensor: int) -> float:
        return self.kernel_profile.loss_bytes_per_logit
