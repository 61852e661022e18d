"""Costs of a module as lists of operators (matmuls, attention, bytes moved and saved), and their time on a machine.

The lists come from a trace (`shardwise.planner.costs.module_trace`) or are written by hand
(`shardwise.planner.costs.operator_list`). All counts are for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.costs.block_time import BlockTimeModel, KernelProfile, ModuleTime, ParallelDegrees
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.costs.machine import Machine


@dataclass(frozen=True)
class MatMul:
    """`groups` batched (rows x inner) @ (inner x columns) matmuls; also stands for a convolution."""

    rows: int
    inner: int
    columns: int
    groups: int = 1
    kernel_numel: int = 0
    """Positions of a convolution's kernel, each of which reads the input once; 0: not a convolution."""

    def precision(self, requested: str) -> str:
        """Returns the precision it runs in: by default PyTorch lets cuDNN run float32 convolutions in TF32."""
        return "tf32" if self.kernel_numel and requested == "float32" else requested

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.inner * self.columns

    @property
    def moved_numel(self) -> float:
        """Elements read and written; a convolution reads each input element once."""
        read = self.rows * self.inner / max(1, self.kernel_numel) + self.inner * self.columns
        return self.groups * (read + self.rows * self.columns)


@dataclass(frozen=True)
class AttentionOp:
    """Softmax attention over all heads of all samples."""

    heads: int
    queries: int
    keys: int
    qk_head_dim: int
    v_head_dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of a forward; causal attention counts half of the scores."""
        flops = 2.0 * self.heads * self.queries * self.keys * (self.qk_head_dim + self.v_head_dim)
        return flops * (0.5 if self.causal else 1.0)


@dataclass(frozen=True, kw_only=True)
class OperatorCosts:
    """Costs of one module for one micro-batch, of the forward unless stated otherwise."""

    name: str
    parameters: int
    parameter_bytes: int
    output_bytes: int
    """Bytes passed to the next module."""
    saved_bytes: int
    """Bytes saved for the backward, including the input but not parameters."""
    moved_bytes: int
    """Bytes read and written by operators other than matmuls and attention."""
    num_ops: int
    """Operators, not counting views."""
    products: tuple[MatMul, ...] = ()
    attention: tuple[AttentionOp, ...] = ()
    backward: float = 0.0
    """FLOPs of the backward without attention."""
    all_reduce_bytes: float = 0.0
    """Bytes that a forward all-reduces over tensor ranks; a gather or reduce-scatter counts half."""

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.products) + sum(op.flops for op in self.attention)


def operators_time(
    machine: Machine, kernel_profile: KernelProfile, costs: OperatorCosts, tensor: int = 1
) -> ModuleTime:
    """Returns the time of a module on one of the `tensor` ranks that its costs were computed for."""
    forward = backward = weight = 0.0
    for p in costs.products:
        shapes = (p.rows, p.inner, p.columns), (p.rows, p.columns, p.inner), (p.inner, p.rows, p.columns)
        moved = p.moved_numel * kernel_profile.itemsize
        precision = p.precision(kernel_profile.precision)
        product_forward, input_grad, weight_grad = (
            machine.matmul(*side, precision, p.groups, moved) for side in shapes
        )
        forward, backward, weight = forward + product_forward, backward + input_grad + weight_grad, weight + weight_grad
    for a in costs.attention:
        attention_forward, attention_backward = _attention_op_time(machine, kernel_profile, a)
        forward, backward = forward + attention_forward, backward + attention_backward
    elementwise = machine.memory_time(costs.moved_bytes) if costs.moved_bytes else 0.0
    return ModuleTime(
        forward=forward + elementwise,
        backward=backward + 2 * elementwise,
        weight_grad=weight,
        moved_bytes=costs.moved_bytes,
        launch_seconds=costs.num_ops * machine.efficiency.kernel_launch,
        tensor=machine.all_reduce(costs.all_reduce_bytes, tensor, 1) * (1.0 - machine.efficiency.overlap_tensor),
    )


def _attention_op_time(machine: Machine, kernel_profile: KernelProfile, a: AttentionOp) -> tuple[float, float]:
    square = ModelShape(
        layers=1,
        width=a.qk_head_dim,
        heads=a.heads,
        kv_heads=a.heads,
        head_dim=a.v_head_dim,
        qk_rope_head_dim=a.qk_head_dim - a.v_head_dim,
        ffn=0,
        vocab=0,
        sequence=a.keys,
        causal=a.causal,
    )
    forward, backward = BlockTimeModel(machine, square, kernel_profile).attention(ParallelDegrees(1, 1, 1, 1))
    return forward * a.queries / a.keys, backward * a.queries / a.keys


def mean_module_time(seconds: Sequence[ModuleTime]) -> ModuleTime:
    """Returns the mean of several modules; zero if there are none."""
    mean = ModuleTime()
    for number, time in enumerate(seconds, start=1):
        mean = mean.lerp(time, 1 / number)
    return mean
