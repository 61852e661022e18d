"""Norms over a batch that lies on several ranks: sums over all of them, so that every layout computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.errors import LayoutError
from shardwise.kinds import ModelConfig, ResNetConfig
from shardwise.layout import AXES, BatchSplit, Layout
from shardwise.models.chain import Chain
from shardwise.models.resnet import BatchNorm


def check(model: ModelConfig, layout: Layout) -> None:
    """Raises for what a model with norms over the batch cannot have."""
    if not isinstance(model, ResNetConfig):
        return
    for axis in (*AXES, "expert"):
        degree = getattr(layout, axis)
        if axis not in ("replicate", "shard") and degree > 1:
            raise LayoutError(
                f"{axis}={degree}: {model.description} is cut along its samples only (its norms need the whole batch at once, "
                f"its images are small); use replicate or shard."
            )
    if layout.recompute != "none":
        raise LayoutError(
            f"recompute={layout.recompute}: the norms of {model.description} would remember a batch twice; use recompute=none."
        )


def check_batch(model: ModelConfig, batch: BatchSplit) -> None:
    if isinstance(model, ResNetConfig) and batch.micro_batches > 1:
        raise LayoutError(
            f"{batch.micro_batches} micro-batches: the norms of {model.description} take the whole batch at once; leave "
            "micro_batch out, or use more ranks or a smaller batch."
        )


def apply(chain: Chain, axis: Axis) -> None:
    for module in chain.modules():
        if isinstance(module, BatchNorm):
            module.reset_buffers()
            if axis.size > 1:
                module.num_shards, module.all_reduce_sum = axis.size, lambda numbers: AllReduceSum.apply(numbers, axis)


class AllReduceSum(torch.autograd.Function):
    """The sum over ranks; so is its gradient."""

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
