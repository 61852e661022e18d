"""The projection to the vocabulary and its loss in one, a few positions at a time: the logits are never held whole.

The loss is the last thing a forward computes, so the gradient of a chunk's logits is known as soon as they are there,
but for one factor that comes with the backward. Both products of the backward follow at once, and the chunk is dropped.
What stays until the backward is the gradient of the input and of the weights. In a pipeline, where many micro-batches
wait for their backward, or for its second half, that would be too much: there the logits' gradient stays instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.models import fp8
from shardwise.models.chain import IGNORED

HELD = 1 << 29  # numbers of logits at once

Exchange = Callable[[Tensor], None]


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary whose logits this rank computes, and how ranks share what a softmax needs."""

    first: int
    highest: Exchange
    """Takes the maximum over the ranks, in place."""
    total: Exchange
    """Adds up over the ranks, in place."""


def rows_at_once(vocabulary: int) -> int:
    """Positions whose logits are computed together, a multiple of 128."""
    return max(128, HELD // vocabulary // 128 * 128)


def linear_loss(
    x: Tensor, weight: Tensor, targets: Tensor, part: Vocabulary | None, rows: int, narrow: bool = False
) -> Tensor:
    """Cross-entropy of `x @ weight.T` summed over the targets that count, `rows` positions at a time; 0: all at once,
    and the backward by itself. `narrow`: the gradient of `x` is a product in 8 bits."""
    if rows:
        return LinearLoss.apply(x, weight, targets, part, rows, narrow)  # type: ignore[no-any-return]
    return Loss.apply(torch.nn.functional.linear(x, weight), targets, part)  # type: ignore[no-any-return]


class LinearLoss(torch.autograd.Function):
    """Both in one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, part: Vocabulary | None, rows: int, narrow: bool
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        learns = any(ctx.needs_input_grad)
        grad_x = torch.empty_like(x) if learns else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if learns else None
        back = fp8.Back(weight) if narrow and learns and fp8.fits(x[:rows], weight) and fp8.fits(x, weight) else None
        for first in range(0, x.shape[0], rows):
            chunk = slice(first, first + rows)
            logits = logits_of(x[chunk], weight)
            own_loss, grad = softmax_loss(logits, targets[chunk], part)
            loss += own_loss
            if learns:
                assert grad_x is not None and grad_weight is not None
                if back is None:
                    torch.mm(grad, weight, out=grad_x[chunk])
                else:
                    grad_x[chunk] = back(grad)
                add_product(grad_weight, grad.t(), x[chunk])
            del logits, grad  # before the next ones are made
        if learns:
            ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        both = (_scaled(grad, grads[0], grad_x.dtype) for grad in (grad_x, grad_weight))
        return *both, None, None, None, None


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in rows that begin at multiples of 16 bytes on a GPU: where they do not, as with 50,257 words,
    products with it take five times as long."""
    columns, unit = weight.shape[0], 16 // x.element_size()
    if not x.is_cuda or columns % unit == 0:
        return x @ weight.t()
    wider = x.new_empty(x.shape[0], -(-columns // unit) * unit)
    return torch.mm(x, weight.t(), out=wider[:, :columns])


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, rounded once: a narrow type would round the scale itself, and with it every gradient alike."""
    return torch.mul(x, scale.view(1), out=torch.empty_like(x, dtype=dtype))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, in one kernel where a wide sum of narrow products is one."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class Loss(torch.autograd.Function):
    """The loss of logits that are there."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: Vocabulary | None) -> Tensor:
        loss, grad = softmax_loss(logits.detach(), targets, part)  # nobody needs the logits after this
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return _scaled(grad, grads[0], grad.dtype), None, None


def softmax_loss(logits: Tensor, targets: Tensor, part: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """The summed loss, and its gradient by the logits in their type. The logits are used up."""
    if logits.is_cuda and part is None and logits.dtype != torch.float64:
        from shardwise.models.kernels import softmax_loss_

        return softmax_loss_(logits, targets, IGNORED), logits
    share = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = share.max(-1).values
    if part is not None:
        part.highest(highest)
    share.sub_(highest.unsqueeze(-1))
    counted = targets != IGNORED
    own = targets - (part.first if part is not None else 0)
    here = counted & (own >= 0) & (own < logits.shape[-1])
    own = own.masked_fill(~here, 0).unsqueeze(-1)
    hit = share.gather(-1, own).squeeze(-1) * here
    share.exp_()
    sums = torch.stack((share.sum(-1), hit))
    if part is not None:
        part.total(sums)
    loss = ((sums[0].log() - sums[1]) * counted).sum()
    share.mul_((counted / sums[0]).unsqueeze(-1))
    share.scatter_add_(-1, own, -here.to(share.dtype).unsqueeze(-1))
    return loss, logits.copy_(share)
