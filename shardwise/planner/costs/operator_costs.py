"""What a piece of any model costs, as lists: its products by shape, its attention, the bytes that it moves and keeps.

A list comes from a trace (`shardwise.planner.costs.module_trace`) or from a closed form (`shardwise.planner.costs.operator_list`); here is its
time on a machine. Bytes are those of one micro-batch, products too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.costs.block_time import BlockTimeModel, KernelProfile, ModuleTime, ParallelDegrees
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.costs.machine import Machine


@dataclass(frozen=True)
class MatMul:
    """`groups` products side by side, of (rows x inner) and (inner x columns) each; a convolution is one of them."""

    rows: int
    inner: int
    columns: int
    groups: int = 1
    kernel_numel: int = 0
    """Places of a convolution's window: so many times each number that it reads enters the product. 0: it is none."""

    def precision(self, requested: str) -> str:
        """PyTorch lets cuDNN round the convolutions of a float32 model to TF32, unless told otherwise."""
        return "tf32" if self.kernel_numel and requested == "float32" else requested

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.inner * self.columns

    @property
    def moved_numel(self) -> float:
        """That are read and written."""
        read = self.rows * self.inner / max(1, self.kernel_numel) + self.inner * self.columns
        return self.groups * (read + self.rows * self.columns)


@dataclass(frozen=True)
class AttentionOp:
    """Softmax attention over all heads of all samples; each head has `size` features to compare, `value` to mix."""

    heads: int
    queries: int
    keys: int
    qk_head_dim: int
    v_head_dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Half of the square where it is causal: what must be computed."""
        return (
            2.0
            * self.heads
            * self.queries
            * self.keys
            * (self.qk_head_dim + self.v_head_dim)
            * (0.5 if self.causal else 1.0)
        )


@dataclass(frozen=True, kw_only=True)
class OperatorCosts:
    """One child of a model in one forward; `backward` beside it."""

    name: str
    parameters: int
    parameter_bytes: int
    output_bytes: int
    """Bytes that it gives to the next."""
    saved_bytes: int
    """Bytes that stay for the backward, its input included, its parameters not."""
    moved_bytes: int
    """Bytes that all but products and attention read and write."""
    num_ops: int
    """Operators that do work."""
    products: tuple[MatMul, ...] = ()
    attention: tuple[AttentionOp, ...] = ()
    backward: float = 0.0
    """Floating-point operations of the backward, attention apart."""
    all_reduce_bytes: float = 0.0
    """Bytes that a forward sums over the tensor ranks, where there are some."""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + sum(one.flops for one in self.attention)


def operators_time(
    machine: Machine, kernel_profile: KernelProfile, costs: OperatorCosts, tensor: int = 1
) -> ModuleTime:
    """One forward and one backward of a piece on one rank, one of `tensor` that the piece was cut for."""
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
    """The mean of a row of pieces."""
    total = ModuleTime()
    for number, one in enumerate(seconds, start=1):
        total = total.lerp(one, 1 / number)
    return total
