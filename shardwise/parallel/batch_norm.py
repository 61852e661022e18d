"""Synchronized batch norm: statistics are summed over all data-parallel ranks, so every layout computes the same."""

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.models.chain import Chain
from shardwise.models.resnet import BatchNorm


def apply(chain: Chain, axis: Axis) -> None:
    """Resets the running statistics of batch norms and synchronizes the norms over an axis."""
    for module in chain.modules():
        if isinstance(module, BatchNorm):
            module.reset_buffers()
            if axis.size > 1:
                module.num_shards, module.all_reduce_sum = axis.size, lambda numbers: AllReduceSum.apply(numbers, axis)


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
