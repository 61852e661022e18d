"""FP8 matmuls: `y = x @ weight.T` and both matmuls of its backward.

Operands are quantized per row: each row's scale is amax(row) / 448, the largest e4m3 value, so rows of small numbers
keep their precision. A scale must be constant along the dimension that a matmul sums over. The weight gradient sums
over positions, which are the rows of both operands. So the row scales of x are multiplied into the gradient of y, which
is quantized with a single scale, and the forward's quantized x is reused. So the forward saves x in FP8, one byte per
element; the weight is saved in its own dtype and quantized again.

On a GPU, matmuls use fast accumulation, which on Hopper is less precise than float32. Without a GPU, operands are
rounded the same way and multiplied in float32."""

from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E5M2 = torch.float8_e5m2
E5M2_MAX = 57344.0
DIM_MULTIPLE = 16  # every dimension of an FP8 matmul must be a multiple of this
MIN_WEIGHTS = 3 << 20
"""On a GPU, matmuls with fewer weights stay in the dtype of `x`: quantizing their operands takes longer than FP8 saves.
On an H200, a GPT-2 of width 768 (at most 2.4 million weights) lost 21%, a Llama of width 2048 gained 25%."""


def can_use_fp8(x: Tensor, weight: Tensor) -> bool:
    """Whether FP8 pays, and all dimensions of `x @ weight.T` are multiples of 16, as FP8 kernels require."""
    if x.is_cuda and weight.numel() < MIN_WEIGHTS:
        return False
    rows = x.numel() // x.shape[-1]
    return not (rows % DIM_MULTIPLE or weight.shape[0] % DIM_MULTIPLE or weight.shape[1] % DIM_MULTIPLE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in FP8, or in the dtype of `x` if the shapes do not allow FP8."""
    if not can_use_fp8(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    y: Tensor = FP8Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class FP8Linear(torch.autograd.Function):
    """`x @ weight.T` of 2D tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantize_rows(x)
        weight8, weight_scale = quantize_rows(weight)
        ctx.save_for_backward(x8, x_scale, weight)
        return scaled_mm(x8, x_scale, weight8, weight_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, weight = ctx.saved_tensors
        grad = grads[0]
        grad8, grad_scale = quantize_rows(grad)
        grad_x = scaled_mm(grad8, grad_scale, *quantize_columns(weight), grad.dtype)
        # amax(grad * x_scale) / E4M3_MAX, from the row scales.
        scale = (grad_scale * x_scale).amax()
        scaled_grad8 = transpose_to_fp8(grad, x_scale / scale)
        one = torch.ones((), dtype=torch.float32, device=grad.device)
        grad_weight = scaled_mm(scaled_grad8, scale.view(1, 1), transpose_to_fp8(x8), one.view(1, 1), weight.dtype)
        return grad_x, grad_weight


@torch.library.custom_op("shardwise::transpose_to_fp8", mutates_args=())
def transpose_to_fp8(x: Tensor, factor: Tensor | None = None) -> Tensor:
    """Returns `(x * factor).T` in e4m3, contiguous; `factor`: of each row (rows, 1) or of each column (1, columns).

    An operator of its own, because the compiler would fuse it into reductions over rows, whose writes to a transposed
    matrix are scattered: of a Llama-3-8B step of 583 ms, one such kernel took 55."""
    if x.is_cuda:
        from shardwise.models.kernels import transpose_to_fp8_triton

        return transpose_to_fp8_triton(x, factor)
    return (x if factor is None else x.float() * factor).t().to(E4M3, copy=True, memory_format=torch.contiguous_format)


@transpose_to_fp8.register_fake
def _(x: Tensor, factor: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[::-1], dtype=E4M3)


def grad_input_matmul(grad: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
    """`grad @ weight` for gradients of logits and the quantized `weight.T`. Gradients are quantized to e5m2, because a
    few likely tokens dominate each row, and the range of e4m3 would round all others to zero."""
    if grad.is_cuda:
        from shardwise.models.kernels import quantize_rows_triton

        return scaled_mm(*quantize_rows_triton(grad, E5M2, E5M2_MAX), weight8, weight_scale, grad.dtype)
    return scaled_mm(*quantize_rows(grad, E5M2, E5M2_MAX), weight8, weight_scale, grad.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype = E4M3, dtype_max: float = E4M3_MAX) -> tuple[Tensor, Tensor]:
    """Returns a matrix in FP8 and the scale of each row (rows, 1)."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / dtype_max
    return (x.float() / scale).to(dtype).contiguous(), scale


def quantize_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `quantize_rows(x.T)`."""
    scale = torch.linalg.vector_norm(x, torch.inf, 0, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return transpose_to_fp8(x, 1.0 / scale), scale.t()


def scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `a @ b.T` of FP8 matrices, both with one scale per row or both with a single scale."""
    if a.is_cuda:
        if a_scale.numel() == 1 or b_scale.numel() == 1:
            a_scale, b_scale = a_scale.view(()), b_scale.view(())
        return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=True)
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)
