"""Hardware-independent costs of a module: its matmuls, attention, and the bytes that it moves and saves.

All numbers are for one micro-batch on one rank. They come from a trace (`shardwise.models.trace`) or from a family's
hand-written list; the planner turns them into time and memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class MatMul:
    """`groups` batched (rows x inner) @ (inner x columns) matmuls; also stands for a convolution."""

    rows: int
    inner: int
    columns: int
    groups: int = 1
    kernel_numel: int = 0  # spatial size of a convolution's kernel (9 for 3 x 3); 0: not a convolution

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
    output_bytes: int  # bytes passed to the next module
    saved_bytes: int  # bytes saved for the backward, including the input but not parameters
    moved_bytes: int  # bytes read and written by operators other than matmuls and attention
    num_ops: int  # operators, not counting views
    products: tuple[MatMul, ...] = ()
    attention: tuple[AttentionOp, ...] = ()
    all_reduce_bytes: float = 0.0  # bytes that a forward all-reduces over tensor ranks; a gather counts half

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.products) + sum(op.flops for op in self.attention)


def costs_of_parameters(shapes: Iterable[tuple[int, ...]], rows: int, itemsize: int) -> OperatorCosts:
    """Returns a rough estimate for a module that cannot be traced: every parameter of two or more dimensions is
    multiplied once with `rows` rows, whose inputs are saved, and two operators between matmuls move what they return.
    """
    shapes = tuple(shapes)
    products = tuple(MatMul(rows, inner=prod(shape[1:]), columns=shape[0]) for shape in shapes if len(shape) > 1)
    input_bytes = sum(product.rows * product.inner * itemsize for product in products)
    output_bytes = sum(product.rows * product.columns * itemsize for product in products)
    return OperatorCosts(
        name="module",
        parameters=sum(prod(shape) for shape in shapes),
        output_bytes=itemsize,  # the loss
        saved_bytes=input_bytes,
        moved_bytes=4 * output_bytes,
        num_ops=3 * len(products),
        products=products,
    )
