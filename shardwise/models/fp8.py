"""Matrix products in 8-bit floating point: `y = x @ weight.T` and both products of its backward.

Each row of a factor has a scale of its own, its largest number over the largest that e4m3 holds, so rows keep their
digits whatever the others are. A scale must not change along the sum of a product. The gradient of the weights sums
over positions, which are the rows of both factors; so the scales of x go into the gradient of y before that is rounded,
with one scale for all of it, and x is used as the forward rounded it. Only that, a byte a number, is kept for the
backward.

Sums are of 32 bits. Where there is no GPU the same roundings are made and the products are PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E5M2 = torch.float8_e5m2
E5M2_MAX = 57344.0
DIM_MULTIPLE = 16  # sides of a product must be multiples of it


def can_use_fp8(x: Tensor, weight: Tensor) -> bool:
    """Whether a product can be had in 8 bits."""
    rows = x.numel() // x.shape[-1]
    return not (rows % DIM_MULTIPLE or weight.shape[0] % DIM_MULTIPLE or weight.shape[1] % DIM_MULTIPLE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`; in the type of `x` where its sides do not allow for 8 bits."""
    if not can_use_fp8(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    y: Tensor = FP8Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class FP8Linear(torch.autograd.Function):
    """`x @ weight.T` of matrices."""

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
        grad_x = scaled_mm(grad8, grad_scale, *quantize_rows(weight.t()), grad.dtype)
        # Rows of the gradient times the scales of x: its largest number is known from the rows' own.
        scale = (grad_scale * x_scale).amax()
        both8 = (grad.float() * (x_scale / scale)).t().contiguous().to(E4M3)
        one = torch.ones((), dtype=torch.float32, device=grad.device)
        grad_weight = scaled_mm(both8, scale.view(1, 1), x8.t().contiguous(), one.view(1, 1), weight.dtype)
        return grad_x, grad_weight


class GradInputMatmul:
    """`grad @ weight` for many gradients. These are of logits: the likely words are far above all others, which only
    the wider range of e5m2 keeps from becoming zero."""

    def __init__(self, weight: Tensor):
        self.weight = quantize_rows(weight.t())

    def __call__(self, grad: Tensor) -> Tensor:
        if grad.is_cuda:
            from shardwise.models.kernels import quantize_rows_triton

            return scaled_mm(*quantize_rows_triton(grad, E5M2, E5M2_MAX), *self.weight, grad.dtype)
        return scaled_mm(*quantize_rows(grad, E5M2, E5M2_MAX), *self.weight, grad.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype = E4M3, dtype_max: float = E4M3_MAX) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and the scale of each row (rows, 1)."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / dtype_max
    return (x.float() / scale).to(dtype).contiguous(), scale


def scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b.T`, of rows with scales or with one for all."""
    if a.is_cuda:
        if a_scale.numel() == 1 or b_scale.numel() == 1:
            a_scale, b_scale = a_scale.view(()), b_scale.view(())
        return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=True)
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)
