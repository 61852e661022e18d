"""AdamW as one Triton kernel. Imported only on GPUs; `shardwise.optim.adamw` has the version for CPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def fused_adamw_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, compute_param: Tensor | None, step: Tensor,
    lr_tensor: Tensor, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Updates weight, moments and, if given, the compute copy in place. `step` counts from 1."""
    zero = torch.zeros((), device=weight.device) if grad_scale is None or found_inf is None else None
    _adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
        weight, grad.contiguous(), exp_avg, exp_avg_sq, weight if compute_param is None else compute_param.detach(),
        step, zero if grad_scale is None else grad_scale, zero if found_inf is None else found_inf, lr_tensor,
        *group["betas"], group["eps"], group["weight_decay"], weight.numel(), HAS_GRAD_SCALE=grad_scale is not None,
        HAS_COMPUTE_PARAM=compute_param is not None, BLOCK=BLOCK, num_warps=8,
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
