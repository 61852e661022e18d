"""Kernels for GPUs where PyTorch's own operators move memory more often than needed. Each has a plain twin that runs
anywhere and that it is tested against. Imported only where there is a GPU: Triton comes with PyTorch there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def softmax_loss_(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The summed cross-entropy; the logits become its gradient, in place. Twin: `shardwise.models.loss`."""
    rows, size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(size))
    _softmax_loss[(rows,)](logits, logits.stride(0), targets, losses, size, ignored, BLOCK=block, num_warps=8)
    return losses.sum()


@triton.jit
def _softmax_loss(logits, stride, targets, losses, size, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    place = tl.arange(0, BLOCK)
    highest = float("-inf")
    total = 0.0
    for first in range(0, size, BLOCK):
        here = first + place < size
        x = tl.load(logits + first + place, mask=here, other=float("-inf")).to(tl.float32)
        now = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(x - now))
        highest = now
    counts = target != ignored
    hit = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, tl.log(total) + highest - hit, 0.0))
    factor = tl.where(counts, 1.0 / total, 0.0)
    for first in range(0, size, BLOCK):
        here = first + place < size
        x = tl.load(logits + first + place, mask=here, other=float("-inf")).to(tl.float32)
        grad = tl.exp(x - highest) * factor
        grad -= tl.where(counts & (first + place == target), 1.0, 0.0)
        tl.store(logits + first + place, grad.to(logits.dtype.element_ty), mask=here)


def rounded_rows(x: Tensor, kind: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and the scale of each row. Twin: `shardwise.models.fp8.rounded`."""
    rows, size = x.shape
    narrow = torch.empty_like(x, dtype=kind)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(size))
    _rounded_rows[(rows,)](x, x.stride(0), narrow, scale, size, largest, BLOCK=block, num_warps=8)
    return narrow, scale


@triton.jit
def _rounded_rows(x, stride, narrow, scale, size, largest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    narrow += row * size
    place = tl.arange(0, BLOCK)
    highest = 1e-12
    for first in range(0, size, BLOCK):
        values = tl.load(x + first + place, mask=first + place < size, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.max(tl.abs(values)))
    tl.store(scale + row, highest / largest)
    for first in range(0, size, BLOCK):
        here = first + place < size
        values = tl.load(x + first + place, mask=here, other=0.0).to(tl.float32)
        tl.store(narrow + first + place, (values / highest * largest).to(narrow.dtype.element_ty), mask=here)
