"""Timed collectives over one axis of the mesh, and exchanges of small values.

The names are the same for every supported PyTorch version (2.13 renamed some collectives). Except in asynchronous
calls and compiled code, the axis's step timer records how long this rank waits in each collective. Functional
collectives live in a private module of PyTorch and are the only ones that compile.

Small values are exchanged as JSON. PyTorch's `all_gather_object` and `broadcast_object_list` unpickle what they
receive, so whoever can send to a rank can run code on it. JSON is only data. Tuples arrive as lists, and dictionaries
must have strings as keys.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from shardwise.comm.axis import Axis

T = TypeVar("T")
P2P_CHUNK_BYTES = 1 << 18  # bytes per message of `all_to_all_rows`


def _first_available(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


functional_all_gather = _first_available(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = _first_available(functional, "reduce_scatter_single", "reduce_scatter_tensor")


def _timed(collective: Any) -> Any:
    def timed_collective(tensor: Tensor, *args: Any, axis: Axis, async_op: bool = False) -> Any:
        if async_op or torch.compiler.is_compiling():
            return collective(tensor, *args, group=axis.group, async_op=async_op)
        with axis.waiting(tensor.device):
            return collective(tensor, *args, group=axis.group)

    return timed_collective


all_reduce = _timed(dist.all_reduce)
all_gather = _timed(_first_available(dist, "all_gather_single", "all_gather_into_tensor"))
reduce_scatter = _timed(_first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor"))
all_to_all = _timed(dist.all_to_all_single)


def all_reduce_coalesced(tensors: Sequence[Tensor], axis: Axis) -> None:
    """All-reduces several tensors in place, in one collective."""
    if tensors:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        all_reduce(flat, axis=axis)
        for tensor, chunk in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(chunk.view(tensor.shape))


def all_to_all_rows(output: Tensor, input: Tensor, axis: Axis) -> None:
    """Sends row i of `input` to rank i and receives row i of `output` from it; both are uint8 (ranks, bytes).

    On CPUs, rows are sent in chunks, because gloo reaches only half its bandwidth when long messages in both
    directions share a slow link."""
    if input.device.type != "cpu":
        all_to_all(output, input.contiguous(), axis=axis)
        return
    ranks, rank, group = axis.size, axis.index, axis.group
    output[rank] = input[rank]
    in_flight: list[tuple[Any, Any]] = []
    with axis.waiting(input.device):
        for offset in range(1, ranks):  # with at most two chunks in flight in each direction
            dst, src = (rank + offset) % ranks, (rank - offset) % ranks
            for first in range(0, input.shape[1], P2P_CHUNK_BYTES):
                chunk = slice(first, first + P2P_CHUNK_BYTES)
                send = dist.isend(input[dst, chunk], group=group, group_dst=dst)
                in_flight.append((send, dist.irecv(output[src, chunk], group=group, group_src=src)))
                for work in in_flight.pop(0) if len(in_flight) > 1 else ():
                    work.wait()
        for work in in_flight.pop() if in_flight else ():
            work.wait()


# Collectives with a gradient. All-gather and reduce-scatter are each other's backward; all-to-all is its own, with the
# split sizes swapped. In compiled code, `axis` of all-gather and reduce-scatter is None: waits are not timed, and the
# compiler decides where to wait.


def _gather_or_scatter(x: Tensor, dim: int, group: Any, axis: Axis | None, scatters: bool) -> Tensor:
    """Runs a functional all-gather or, if `scatters`, reduce-scatter, and waits for its result.

    PyTorch returns a tensor that waits on first use. If it is garbage-collected before, gloo still writes into its
    freed memory. So we wait immediately; on a GPU only the stream waits, not the host."""
    collective = functional_reduce_scatter if scatters else functional_all_gather
    args = (x, "sum", dim, group) if scatters else (x, dim, group)
    if axis is None:
        return collective(*args)  # type: ignore[no-any-return]
    with axis.waiting(x.device):
        output = collective(*args)
        return output.wait() if isinstance(output, functional.AsyncCollectiveTensor) else output


class _GatherOrScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, axis: Axis | None, scatters: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.axis, ctx.scatters = dim, group, axis, scatters
        return _gather_or_scatter(x, dim, group, axis, scatters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = _gather_or_scatter(grads[0].contiguous(), ctx.dim, ctx.group, ctx.axis, not ctx.scatters)
        return grad, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
        ctx.received, ctx.sent, ctx.axis = received, sent, axis
        return _exchange_rows(x, received, sent, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grads[0].contiguous(), ctx.sent, ctx.received, ctx.axis), None, None, None


def _exchange_rows(x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    if axis.timer is not None:
        row_bytes = math.prod(x.shape[1:]) * x.element_size()
        axis.timer.bytes_sent[axis.name] += (sum(sent) - sent[axis.index]) * row_bytes
    all_to_all(output, x, received, sent, axis=axis)
    return output


def all_gather_with_grad(x: Tensor, dim: int, axis: Axis) -> Tensor:
    timed_axis = None if torch.compiler.is_compiling() else axis
    return _GatherOrScatter.apply(x, dim, axis.group, timed_axis, False)  # type: ignore[no-any-return]


def reduce_scatter_with_grad(x: Tensor, dim: int, axis: Axis) -> Tensor:
    timed_axis = None if torch.compiler.is_compiling() else axis
    return _GatherOrScatter.apply(x, dim, axis.group, timed_axis, True)  # type: ignore[no-any-return]


def all_to_all_with_grad(x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    """Sends `sent[i]` rows to rank i and receives `received[i]` from it; counts the bytes sent."""
    return _AllToAll.apply(x, received, sent, axis)  # type: ignore[no-any-return]


def ping_pong(tensor: Tensor, first: int, second: int, group: dist.ProcessGroup | None = None) -> None:
    """Sends a tensor from one rank to another and back; other ranks do nothing."""
    if dist.get_rank() in (first, second):
        is_first = dist.get_rank() == first
        for transfer in (dist.send, dist.recv) if is_first else (dist.recv, dist.send):
            transfer(tensor, second if is_first else first, group)


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    encoded = _encode(value, group)
    size = torch.tensor([len(encoded)], device=encoded.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.nn.functional.pad(encoded, (0, int(max(sizes)) - len(encoded)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the value of the group's first rank, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return json.loads(json.dumps(value))
    encoded = _encode(value if dist.get_rank(group) == 0 else None, group)
    size = torch.tensor([len(encoded)], device=encoded.device)
    dist.broadcast(size, group=group, group_src=0)
    encoded = encoded if dist.get_rank(group) == 0 else encoded.new_empty(int(size))
    dist.broadcast(encoded, group=group, group_src=0)
    return _decode(encoded)


def forbid_pickles() -> None:
    """Makes PyTorch's object collectives fail in this process instead of unpickling what other ranks send."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("collectives of Python objects are disabled: they would unpickle what other ranks send.")

    dist.distributed_c10d._tensor_to_object = refuse


def _encode(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = "cuda" if dist.get_backend(group) != "gloo" and torch.cuda.is_available() else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(encoded: Tensor) -> Any:
    return json.loads(bytes(encoded.cpu().numpy()))
