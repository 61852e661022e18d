"""Triton kernels that replace several memory-bound PyTorch operators by one.

Each has a PyTorch equivalent that runs on any device and that it is tested against. Import this module only on a GPU:
CPU builds of PyTorch come without Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ADAMW_BLOCK = 2048


def cross_entropy_with_grad_(logits: Tensor, targets: Tensor, ignore_index: int, size: int) -> Tensor:
    """Returns the cross-entropy of each row's first `size` columns; overwrites all with their gradient. In PyTorch:
    `shardwise.models.loss.cross_entropy_with_grad`."""
    rows, padded_size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(4096, triton.next_power_of_2(size))
    _cross_entropy_kernel[(rows,)](
        logits, logits.stride(0), targets, losses, size, padded_size, ignore_index, BLOCK=block, num_warps=8
    )
    return losses


@triton.jit
def _cross_entropy_kernel(logits, stride, targets, losses, size, padded_size, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    row_max = float("-inf")
    exp_sum = 0.0
    for first in range(0, size, BLOCK):
        in_bounds = first + offsets < size
        x = tl.load(logits + first + offsets, mask=in_bounds, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x))
        exp_sum = exp_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max))
        row_max = new_max
    is_counted = target != ignore_index
    target_logit = tl.load(logits + tl.where(is_counted, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(is_counted, tl.log(exp_sum) + row_max - target_logit, 0.0))
    factor = tl.where(is_counted, 1.0 / exp_sum, 0.0)
    for first in range(0, padded_size, BLOCK):
        x = tl.load(logits + first + offsets, mask=first + offsets < size, other=float("-inf")).to(tl.float32)
        grad = tl.exp(x - row_max) * factor  # zero beyond `size`
        grad -= tl.where(is_counted & (first + offsets == target), 1.0, 0.0)
        tl.store(logits + first + offsets, grad.to(logits.dtype.element_ty), mask=first + offsets < padded_size)


def scale_to_dtype_triton(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x * scale`, rounded once to `dtype`. In PyTorch: `shardwise.models.loss.scale_to_dtype`."""
    x = x.contiguous()
    scaled = torch.empty_like(x, dtype=dtype)
    _scale_kernel[(triton.cdiv(x.numel(), 4096),)](x, scale, scaled, x.numel(), BLOCK=4096, num_warps=8)
    return scaled


@triton.jit
def _scale_kernel(x, scale, scaled, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < numel).to(tl.float32) * tl.load(scale).to(tl.float32)
    tl.store(scaled + offsets, values.to(scaled.dtype.element_ty), mask=offsets < numel)


def quantize_rows_triton(x: Tensor, fp8_dtype: torch.dtype, dtype_max: float) -> tuple[Tensor, Tensor]:
    """Returns a matrix in FP8 and the scale of each row. In PyTorch: `shardwise.models.fp8.quantize_rows`."""
    rows, size = x.shape
    quantized = torch.empty_like(x, dtype=fp8_dtype)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(size))
    _quantize_rows_kernel[(rows,)](x, x.stride(0), quantized, scale, size, dtype_max, BLOCK=block, num_warps=8)
    return quantized, scale


@triton.jit
def _quantize_rows_kernel(x, stride, quantized, scale, size, dtype_max, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    quantized += row * size
    offsets = tl.arange(0, BLOCK)
    row_max = 1e-12
    for first in range(0, size, BLOCK):
        values = tl.load(x + first + offsets, mask=first + offsets < size, other=0.0).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(tl.abs(values)))
    tl.store(scale + row, row_max / dtype_max)
    for first in range(0, size, BLOCK):
        in_bounds = first + offsets < size
        values = tl.load(x + first + offsets, mask=in_bounds, other=0.0).to(tl.float32)
        scaled = values / row_max * dtype_max
        tl.store(quantized + first + offsets, scaled.to(quantized.dtype.element_ty), mask=in_bounds)


def transpose_to_fp8_triton(x: Tensor, factor: Tensor | None) -> Tensor:
    """Returns `(x * factor).T` in e4m3. In PyTorch: `shardwise.models.fp8.transpose_to_fp8`."""
    rows, columns = x.shape
    transposed = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=x.device)
    out = transposed if factor is not None else transposed.view(torch.uint8)
    x = x.contiguous() if factor is not None else x.contiguous().view(torch.uint8)
    _transpose_kernel[(triton.cdiv(rows, 64), triton.cdiv(columns, 128))](
        x, out if factor is None else factor.contiguous(), out, rows, columns, HAS_FACTOR=factor is not None,
        PER_ROW=factor is not None and factor.shape[1] == 1, ROWS=64, COLUMNS=128, num_warps=4,
    )  # fmt: skip
    return transposed


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    x, factor, transposed, rows, columns, HAS_FACTOR: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_bounds = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=in_bounds, other=0)
    if HAS_FACTOR:
        if PER_ROW:
            values = values.to(tl.float32) * tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
        else:
            values = values.to(tl.float32) * tl.load(factor + column, mask=column < columns, other=0.0)[None, :]
    values = tl.trans(values.to(transposed.dtype.element_ty))
    tl.store(transposed + column[:, None] * rows + row[None, :], values, mask=tl.trans(in_bounds))


def fused_adamw_(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, compute_param: Tensor | None,
                 step: Tensor, lr_tensor: Tensor, group: dict[str, Any], grad_scale: Tensor | None,
                 found_inf: Tensor | None) -> None:  # fmt: skip
    """Updates weight, moments and, if given, the compute copy in place. `step` counts from 1. In
    PyTorch: `shardwise.optim.adamw.torch_adamw_`."""
    zero = torch.zeros((), device=weight.device) if grad_scale is None or found_inf is None else None
    _adamw_kernel[(triton.cdiv(weight.numel(), ADAMW_BLOCK),)](
        weight, grad.contiguous(), exp_avg, exp_avg_sq, weight if compute_param is None else compute_param.detach(),
        step, zero if grad_scale is None else grad_scale, zero if found_inf is None else found_inf, lr_tensor,
        *group["betas"], group["eps"], group["weight_decay"], weight.numel(), HAS_GRAD_SCALE=grad_scale is not None,
        HAS_COMPUTE_PARAM=compute_param is not None, BLOCK=ADAMW_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight, grad, exp_avg, exp_avg_sq, compute_param, step, grad_scale, found_inf, lr_tensor, beta1, beta2, eps,
    weight_decay, numel, HAS_GRAD_SCALE: tl.constexpr, HAS_COMPUTE_PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0.0:
        lr = tl.load(lr_tensor)
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < numel
        g = tl.load(grad + offsets, mask=mask).to(tl.float32)
        if HAS_GRAD_SCALE:
            g = g / tl.load(grad_scale)
        w = tl.load(weight + offsets, mask=mask)
        m = tl.load(exp_avg + offsets, mask=mask).to(tl.float32)
        v = tl.load(exp_avg_sq + offsets, mask=mask).to(tl.float32)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        steps = tl.load(step)
        # 1 - beta^n by exp and log: Triton has no power function
        bias_correction1 = 1.0 - tl.exp(steps * tl.log(beta1))
        bias_correction2 = 1.0 - tl.exp(steps * tl.log(beta2))
        w = w * (1.0 - lr * weight_decay) - lr * (m / bias_correction1) / (tl.sqrt(v / bias_correction2) + eps)
        tl.store(weight + offsets, w, mask=mask)
        tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty), mask=mask)
        tl.store(exp_avg_sq + offsets, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
        if HAS_COMPUTE_PARAM:
            tl.store(compute_param + offsets, w.to(compute_param.dtype.element_ty), mask=mask)
