"""Collectives under one name for all PyTorch versions that we run on (2.13 renamed some of them), each measured: how
long a rank waits for it is told to the meter, by axis. Those that go on beside other work are not; nor are those in
compiled code."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from shardwise.comm.meter import METER

PIECE = 1 << 18  # bytes


def _either(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


def _metered(collective: Any) -> Any:
    def call(tensor: Tensor, *args: Any, group: Any = None, async_op: bool = False, **more: Any) -> Any:
        if async_op or torch.compiler.is_compiling():
            return collective(tensor, *args, group=group, async_op=async_op, **more)
        with METER.waiting(group, tensor.device):
            return collective(tensor, *args, group=group, **more)

    return call


all_reduce = _metered(dist.all_reduce)
all_gather = _metered(_either(dist, "all_gather_single", "all_gather_into_tensor"))
reduce_scatter = _metered(_either(dist, "reduce_scatter_single", "reduce_scatter_tensor"))
all_to_all = _metered(dist.all_to_all_single)


def rows_to_all(came: Tensor, sent: Tensor, group: Any) -> None:
    """Row i of `sent` goes to rank i, and what comes from it to row i of `came`; bytes. In pieces on CPUs: of long
    messages that meet on a slow link, gloo's arrive at half of its rate."""
    if sent.device.type != "cpu":
        all_to_all(came, sent.contiguous(), group=group)
        return
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    came[own] = sent[own]
    under_way: list[tuple[Any, Any]] = []
    with METER.waiting(group, sent.device):
        for turn in range(1, ranks):
            to, of = (own + turn) % ranks, (own - turn) % ranks
            for first in range(0, sent.shape[1], PIECE):
                part = slice(first, first + PIECE)
                out = dist.isend(sent[to, part], group=group, group_dst=to)
                under_way.append((out, dist.irecv(came[of, part], group=group, group_src=of)))
                for one in under_way.pop(0) if len(under_way) > 1 else ():
                    one.wait()
        for one in under_way.pop() if under_way else ():
            one.wait()


def _waited(collective: Any) -> Any:
    """PyTorch hands out what is still on its way as a tensor that waits when it is used. One that is dropped before
    anyone used it is written to after its memory was freed (gloo), so we wait at once; a GPU's stream does anyway."""

    def wait(x: Tensor, *args: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return collective(x, *args)  # type: ignore[no-any-return]
        with METER.waiting(args[-1], x.device):
            found: Any = collective(x, *args)
            return found.wait() if isinstance(found, functional.AsyncCollectiveTensor) else found

    return wait


_gather = _waited(_either(functional, "all_gather_single", "all_gather_tensor"))
_scatter = _waited(_either(functional, "reduce_scatter_single", "reduce_scatter_tensor"))
_exchange = _waited(functional.all_to_all_single)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.way = dim, group
        return _gather(x, dim, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dim, group = ctx.way
        return _scatter(grads[0].contiguous(), "sum", dim, group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.way = dim, group
        return _scatter(x, "sum", dim, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dim, group = ctx.way
        return _gather(grads[0].contiguous(), dim, group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.way = sent, received, group
        return _exchange(x, received, sent, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0].contiguous(), *ctx.way), None, None, None


# With a gradient: each of the first two is the other's backward, the third its own, with sizes the other way round.


def all_gather_with_grad(x: Tensor, dim: int, group: Any) -> Tensor:
    return _Gather.apply(x, dim, group)  # type: ignore[no-any-return]


def reduce_scatter_with_grad(x: Tensor, dim: int, group: Any) -> Tensor:
    """The sum."""
    return _Scatter.apply(x, dim, group)  # type: ignore[no-any-return]


def all_to_all_with_grad(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    return _Exchange.apply(x, received, sent, group)  # type: ignore[no-any-return]


__all__ = [
    "all_gather", "all_gather_with_grad", "all_reduce", "all_to_all", "all_to_all_with_grad", "reduce_scatter",
    "reduce_scatter_with_grad", "rows_to_all",
]  # fmt: skip
