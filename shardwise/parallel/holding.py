"""The piece of a parameter that one rank holds and updates.

After the backward passes everything speaks of holdings: gradient sums, norm, clipping, optimizer, checkpoint, verify.
A whole parameter is cut over the tensor axis along `tensor_dim` (or kept whole there), and the part may be shared over
the shard axis along its first dimension. Both cuts are PyTorch's chunks, so `distributed` shows a holding as a DTensor
over (tensor, shard), which is how it is saved, loaded and compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.models.chain import Init
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor import span
from shardwise.random import key_of, normal_


@dataclass(eq=False)
class Holding:
    """A piece, plain and local. `tensor.grad` is set between the gradients' sum and the optimizer's step."""

    name: str
    tensor: Tensor
    shape: torch.Size
    """Of the whole parameter."""
    tensor_dim: int | None
    """The dimension cut over the tensor axis; None: every rank of the axis holds the same."""
    sharded: bool
    """Whether the first dimension is shared over the shard axis."""
    copies: int
    """Ranks that hold this very piece; each counts for 1/copies in a norm."""

    @property
    def grad(self) -> Tensor:
        assert self.tensor.grad is not None, f"{self.name} has no gradient at this point of the step"
        return self.tensor.grad

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and tables, not for norms and biases."""
        return len(self.shape) > 1


def place(shape: torch.Size, tensor_dim: int | None, sharded: bool, mesh: Mesh) -> tuple[tuple[int, ...], list[int]]:
    """Start and size of this rank's piece inside a parameter of `shape`."""
    start, size = [0] * len(shape), list(shape)
    if tensor_dim is not None:
        start[tensor_dim], size[tensor_dim] = span(shape[tensor_dim], mesh["tensor"].size, mesh["tensor"].index)
    if sharded:
        first, size[0] = span(size[0], mesh["shard"].size, mesh["shard"].index)
        start[0] += first
    return tuple(start), size


def distributed(holding: Holding, value: Tensor, mesh: Mesh) -> Tensor:
    """`value`, which lies as the holding does, as a DTensor over the whole parameter; plain in a world of one."""
    if mesh.home is None:
        return value
    home: DeviceMesh = mesh.home
    placements = [
        Replicate() if holding.tensor_dim is None else Shard(holding.tensor_dim),
        Shard(0) if holding.sharded else Replicate(),
    ]
    stride = torch.empty(holding.shape, device="meta").stride()
    return DTensor.from_local(value, home, placements, run_check=False, shape=holding.shape, stride=stride)


def start(holding: Holding, init: Init, seed: int, mesh: Mesh) -> None:
    """Fills a piece with what the whole parameter has there at the start of the run."""
    if init.kind == "normal":
        where, _ = place(holding.shape, holding.tensor_dim, holding.sharded, mesh)
        normal_(holding.tensor.detach(), key_of("init", seed, holding.name), holding.shape, where, init.std)
    else:
        holding.tensor.detach().fill_(1.0 if init.kind == "ones" else 0.0)
