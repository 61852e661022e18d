"""The update of AdamW in one pass over memory. Imported only where there is a GPU; twin: `shardwise.optim.adamw`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def adamw_(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, rounded: Tensor | None, count: Tensor,
    rate: Tensor, group: dict[str, Any], scale: Tensor | None, skip: Tensor | None,
) -> None:  # fmt: skip
    """Updates weight and averages in place, and what is rounded of the weight. `count` is that of this step."""
    none = torch.zeros((), device=weight.device) if scale is None or skip is None else None
    _adamw[(triton.cdiv(weight.numel(), BLOCK),)](
        weight, grad.contiguous(), first, second, weight if rounded is None else rounded.detach(), count,
        none if scale is None else scale, none if skip is None else skip, rate, *group["betas"],
        group["eps"], group["weight_decay"], weight.numel(), SCALED=scale is not None, ROUNDED=rounded is not None,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, grad, first, second, rounded, count, scale, skip, rate, beta1, beta2, eps, decay, size,
    SCALED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0.0:
        lr = tl.load(rate)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = place < size
        g = tl.load(grad + place, mask=here).to(tl.float32)
        if SCALED:
            g = g / tl.load(scale)
        w = tl.load(weight + place, mask=here)
        m = tl.load(first + place, mask=here).to(tl.float32)
        v = tl.load(second + place, mask=here).to(tl.float32)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        steps = tl.load(count)
        # 1 - beta^n, of which only an exponential is at hand; with few steps it loses no more than a float's digits
        one = 1.0 - tl.exp(steps * tl.log(beta1))
        two = 1.0 - tl.exp(steps * tl.log(beta2))
        w = w * (1.0 - lr * decay) - lr * (m / one) / (tl.sqrt(v / two) + eps)
        tl.store(weight + place, w, mask=here)
        tl.store(first + place, m.to(first.dtype.element_ty), mask=here)
        tl.store(second + place, v.to(second.dtype.element_ty), mask=here)
        if ROUNDED:
            tl.store(rounded + place, w.to(rounded.dtype.element_ty), mask=here)
