"""Collectives under one name for all PyTorch versions that we run on (2.13 renamed some of them), each measured: how
long a rank waits for it is told to the meter, by axis. Those that go on beside other work are not; nor are those in
compiled code."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from shardwise.comm.step_timer import STEP_TIMER

P2P_CHUNK_BYTES = 1 << 18  # bytes


def _first_available(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


def _timed(collective: Any) -> Any:
    def timed_collective(tensor: Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if async_op or torch.compiler.is_compiling():
            return collective(tensor, *args, group=group, async_op=async_op, **kwargs)
        with STEP_TIMER.waiting_for_group(group, tensor.device):
            return collective(tensor, *args, group=group, **kwargs)

    return timed_collective


all_reduce = _timed(dist.all_reduce)
all_gather = _timed(_first_available(dist, "all_gather_single", "all_gather_into_tensor"))
reduce_scatter = _timed(_first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor"))
all_to_all = _timed(dist.all_to_all_single)


def all_to_all_rows(output: Tensor, input: Tensor, group: Any) -> None:
    """Row i of `sent` goes to rank i, and what comes from it to row i of `came`; bytes. In pieces on CPUs: of long
    messages that meet on a slow link, gloo's arrive at half of its rate."""
    if input.device.type != "cpu":
        all_to_all(output, input.contiguous(), group=group)
        return
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    output[rank] = input[rank]
    in_flight: list[tuple[Any, Any]] = []
    with STEP_TIMER.waiting_for_group(group, input.device):
        for distance in range(1, ranks):
            dst, src = (rank + distance) % ranks, (rank - distance) % ranks
            for first in range(0, input.shape[1], P2P_CHUNK_BYTES):
                chunk = slice(first, first + P2P_CHUNK_BYTES)
                send = dist.isend(input[dst, chunk], group=group, group_dst=dst)
                in_flight.append((send, dist.irecv(output[src, chunk], group=group, group_src=src)))
                for work in in_flight.pop(0) if len(in_flight) > 1 else ():
                    work.wait()
        for work in in_flight.pop() if in_flight else ():
            work.wait()


def _synchronous(collective: Any) -> Any:
    """PyTorch hands out what is still on its way as a tensor that waits when it is used. One that is dropped before
    anyone used it is written to after its memory was freed (gloo), so we wait at once; a GPU's stream does anyway."""

    def wait_for_result(x: Tensor, *args: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return collective(x, *args)  # type: ignore[no-any-return]
        with STEP_TIMER.waiting_for_group(args[-1], x.device):
            output: Any = collective(x, *args)
            return output.wait() if isinstance(output, functional.AsyncCollectiveTensor) else output

    return wait_for_result


_all_gather_tensor = _synchronous(_first_available(functional, "all_gather_single", "all_gather_tensor"))
_reduce_scatter_tensor = _synchronous(_first_available(functional, "reduce_scatter_single", "reduce_scatter_tensor"))
_all_to_all_single = _synchronous(functional.all_to_all_single)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.comm_args = dim, group
        return _all_gather_tensor(x, dim, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dim, group = ctx.comm_args
        return _reduce_scatter_tensor(grads[0].contiguous(), "sum", dim, group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.comm_args = dim, group
        return _reduce_scatter_tensor(x, "sum", dim, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dim, group = ctx.comm_args
        return _all_gather_tensor(grads[0].contiguous(), dim, group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group: Any) -> Tensor:
        ctx.comm_args = input_split_sizes, output_split_sizes, group
        return _all_to_all_single(x, output_split_sizes, input_split_sizes, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_single(grads[0].contiguous(), *ctx.comm_args), None, None, None


# With a gradient: each of the first two is the other's backward, the third its own, with sizes the other way round.


def all_gather_with_grad(x: Tensor, dim: int, group: Any) -> Tensor:
    return _AllGather.apply(x, dim, group)  # type: ignore[no-any-return]


def reduce_scatter_with_grad(x: Tensor, dim: int, group: Any) -> Tensor:
    """The sum."""
    return _ReduceScatter.apply(x, dim, group)  # type: ignore[no-any-return]


def all_to_all_with_grad(x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group: Any) -> Tensor:
    return _AllToAll.apply(x, output_split_sizes, input_split_sizes, group)  # type: ignore[no-any-return]


__all__ = [
    "all_gather", "all_gather_with_grad", "all_reduce", "all_to_all", "all_to_all_with_grad", "reduce_scatter",
    "reduce_scatter_with_grad", "all_to_all_rows",
]  # fmt: skip
