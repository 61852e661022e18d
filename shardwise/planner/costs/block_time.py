"""Predicted seconds of a decoder's embedding, blocks and head on one rank of our engine, for one micro-batch."""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from shardwise.planner.costs.machine import LOW_PRECISION, Machine
from shardwise.planner.costs.model_shape import ModelShape

COLLECTIVE_LAUNCHES = 5  # kernels the host could launch in the time it takes to launch one collective


@dataclass(frozen=True)
class KernelProfile:
    """How modules are computed, beyond the layout."""

    precision: str  # of the matmuls; accumulation and norms have a wider one
    # Bytes moved per logit in forward and backward of the loss; 10 measured for our fused kernel on an H200.
    loss_bytes_per_logit: float = 10.0

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
    launch_seconds: float = 0.0  # host time to launch a forward's kernels; a backward takes twice as long

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

    def __init__(self, machine: Machine, shape: ModelShape, kernel_profile: KernelProfile):
        self.machine, self.shape, self.kernel_profile = machine, shape, kernel_profile

    def block(self, degrees: ParallelDegrees, sparse: bool) -> ModuleTime:
        """Returns the time of a dense block, or of one with experts."""
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
        heads_moved = 3 * tokens * (shape.query_width + kv_width) / t
        moved = size * (12 * self.hidden_tokens(tokens, t) * shape.width + heads_moved)
        moved += size * tokens * hidden / t * (shape.ffn_matrices + 1)
        if precision in LOW_PRECISION:  # casts
            moved += tokens * (4 * shape.width + 2 * (shape.attention_width + hidden) / t)
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
            kernels += e.routing_kernels
        tensor = context = 0.0
        if t > 1:
            kernels += 2 * COLLECTIVE_LAUNCHES
            tensor = self.exposed_tensor_time(2 * machine.all_reduce(size * tokens * shape.width, t, 1))
        if degrees.context > 1:
            kv_bytes = size * 2 * degrees.micro_batch * shape.sequence * shape.kv_heads * shape.head_dim / t
            context = max(0.0, machine.all_gather(kv_bytes, degrees.context, t) - 0.5 * core)
        return ModuleTime(forward, backward, weight_grad, tensor, context, expert, moved, kernels * e.kernel_launch)

    def head(self, degrees: ParallelDegrees) -> ModuleTime:
        """Returns the time of the final norm, logits and loss. The logits' matmul runs in at least 16 bits."""
        machine, shape, t = self.machine, self.shape, degrees.tensor
        precision = "bf16" if self.kernel_profile.precision in LOW_PRECISION else self.kernel_profile.precision
        tokens = shape.logit_fraction * degrees.micro_batch * shape.sequence / degrees.context
        forward, input_grad, weight_grad = machine.linear(tokens, shape.width, ceil(shape.vocab / t), precision)
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
        """Returns how many kernels a block's forward launches; learned positions need no rotary kernels."""
        return 24.0 - (8 if self.shape.positions else 0) - (0 if self.shape.gated else 2)

    def hidden_tokens(self, tokens: float, tensor: int) -> float:
        """Returns the tokens a rank holds between tensor-parallel regions: sequence parallelism splits them."""
        return tokens / tensor

    def exposed_tensor_time(self, seconds: float) -> float:
        """Returns what remains of tensor-parallel communication after overlap with matmuls."""
        return seconds * (1.0 - self.machine.efficiency.overlap_tensor)

    def loss_bytes_per_logit(self, tensor: int) -> float:
        return self.kernel_profile.loss_bytes_per_logit
