"""The piece of a parameter that one rank holds and updates.

After the backward passes everything speaks of holdings: gradient sums, norm, clipping, optimizer, checkpoint, verify.
A whole parameter is cut over the tensor axis along `tensor_dim` (or kept whole there), and the part may be shared over
the shard axis along its first dimension. Both cuts are PyTorch's chunks; `place` says where a piece lies in the whole,
which is how it is started, saved, loaded and compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.models.chain import Init
from shardwise.parallel.mesh import Axis, Mesh
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
    """Whether the first dimension is shared over the shard axis; of experts that are cut, over those with the same."""
    copies: int
    """Ranks that hold this very piece; each counts for 1/copies in a norm."""
    expert: bool = False
    """Whether the first dimension is cut over the expert axis before that."""
    rounded: Tensor | None = None
    """What modules compute with, where it is kept beside the piece in the compute type (`shardwise.parallel.data`); the
    gradient may be its own."""
    current: bool = False
    """Whether the optimizer has rounded the updated piece already."""
    cuts: tuple[tuple[int, Axis], ...] = ()
    """How the parameter is cut (see `cuts_of`), over axes of more than one rank."""
    same: Axis | None = None
    """Ranks of other samples that hold this very piece, where there are any."""
    matrix: bool = False
    """Whether it is a product's matrix in a block, or a stack of them: what Muon is for."""
    where: tuple[tuple[int, ...], list[int]] | None = None
    """Start and size of the piece, where no axis cuts it (`shardwise.parallel.placement`)."""

    @property
    def grad(self) -> Tensor:
        found = self.tensor.grad
        if found is None and self.rounded is not None:
            found = self.rounded.grad
        assert found is not None, f"{self.name} has no gradient at this point of the step"
        return found

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and tables, not for norms and biases."""
        return len(self.shape) > 1


def place(holding: Holding, mesh: Mesh) -> tuple[tuple[int, ...], list[int]]:
    """Start and size of this rank's piece inside its parameter."""
    if holding.where is not None:
        return holding.where
    start, size = [0] * len(holding.shape), list(holding.shape)
    for dim, axis in cuts_of(holding, mesh):
        first, size[dim] = axis.span(size[dim])
        start[dim] += first
    return tuple(start), size


def cuts_of(holding: Holding, mesh: Mesh) -> list[tuple[int, Axis]]:
    """How its parameter is cut, one cut after the other: along which dimension, over which axis."""
    cuts = [] if holding.tensor_dim is None else [(holding.tensor_dim, mesh["tensor"])]
    if holding.expert:
        cuts.append((0, mesh["expert"]))
    if holding.sharded:
        cuts.append((0, mesh["alike" if holding.expert else "shared"]))
    return cuts


def start(holding: Holding, init: Init, seed: int, mesh: Mesh) -> None:
    """Fills a piece with what the whole parameter has there at the start of the run."""
    if init.kind == "normal":
        where, _ = place(holding, mesh)
        normal_(holding.tensor.detach(), key_of("init", seed, holding.name), holding.shape, where, init.std)
    else:
        holding.tensor.detach().fill_(1.0 if init.kind == "ones" else 0.0)
