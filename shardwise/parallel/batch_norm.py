"""Synchronized batch norm: statistics are summed over all data-parallel ranks, so every layout computes the same."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.comm.collectives import Axis, all_reduce
from shardwise.models.chain import Chain
from shardwise.models.layers import is_standard_batch_norm, subclass
from shardwise.models.resnet import BatchNorm


def apply(chain: Chain, axis: Axis) -> None:
    """Synchronizes all batch norms over an axis, but those with a forward of their own, which nobody knows. A norm may
    be a block by itself, so this comes before whatever wraps the forward of a block."""
    for module in chain.modules():
        if is_standard_batch_norm(module):
            module.__class__ = subclass(type(module), forward=_forward)  # type: ignore[assignment,arg-type]
            module.axis = axis  # type: ignore[assignment]


def reset_statistics(chain: Chain) -> None:
    """Resets the running statistics of our batch norms, once their memory is allocated."""
    for module in chain.modules():
        if isinstance(module, BatchNorm):
            module.reset_buffers()


def _forward(norm: Any, x: Tensor) -> Tensor:
    """Computes the statistics over all ranks of the norm's axis, each with as many samples, and in float32 at least:
    PyTorch's kernels do not take half-precision weights next to float32 statistics."""
    axis, dtype = norm.axis, torch.promote_types(x.dtype, torch.float32)
    weight, bias = (norm.weight.to(dtype), norm.bias.to(dtype)) if norm.affine else (None, None)
    statistics = norm.running_mean, norm.running_var
    if not norm.training and norm.running_mean is not None:
        return F.batch_norm(x, *statistics, weight, bias, eps=norm.eps)
    if axis.size == 1 and norm.momentum is not None and x.numel() > x.shape[1]:
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        return F.batch_norm(x, *statistics, weight, bias, training=True, momentum=norm.momentum, eps=norm.eps)
    dims, shape, wide = [0, *range(2, x.dim())], (-1, *[1] * (x.dim() - 2)), x.to(dtype)
    count = axis.size * x.numel() // x.shape[1]
    mean = AllReduceSum.apply(wide.sum(dims), axis) / count
    variance = AllReduceSum.apply((wide - mean.view(shape)).square().sum(dims), axis) / count
    if norm.running_mean is not None:
        _update_running_statistics(norm, mean.detach(), variance.detach() * (count / max(1, count - 1)))
    factor = (variance + norm.eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * factor
    return (wide * factor.view(shape) + shift.view(shape)).to(x.dtype)


@torch.no_grad()
def _update_running_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert running is not None
        if norm.momentum is None:
            assert norm.num_batches_tracked is not None
            weight = 1.0 / norm.num_batches_tracked.to(running)
        else:
            weight = torch.as_tensor(norm.momentum, dtype=running.dtype, device=running.device)
        running.lerp_(new.to(running.dtype), weight)


class AllReduceSum(torch.autograd.Function):
    """All-reduce (sum), whose backward is an all-reduce too."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_reduce_sum(numbers, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce_sum(grads[0], ctx.axis), None


def _all_reduce_sum(numbers: Tensor, axis: Axis) -> Tensor:
    numbers = numbers.clone(memory_format=torch.contiguous_format)
    all_reduce(numbers, axis=axis)
    return numbers
