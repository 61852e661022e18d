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
