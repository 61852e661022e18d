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

from shardwise.comm.axis import Axis
from shardwise.models.chain import InitSpec
from shardwise.parallel.mesh import Mesh
from shardwise.random import hash_key, normal_


@dataclass(eq=False)
class ParamShard:
    """A piece, plain and local. `tensor.grad` is set between the gradients' sum and the optimizer's step."""

    name: str
    tensor: Tensor
    shape: torch.Size
    """Of the whole parameter."""
    tensor_dim: int | None
    """The dimension cut over the tensor axis; None: every rank of the axis holds the same."""
    is_sharded: bool
    """Whether the first dimension is shared over the shard axis; of experts that are cut, over those with the same."""
    num_replicas: int
    """Ranks that hold this very piece; each counts for 1/copies in a norm."""
    is_expert: bool = False
    """Whether the first dimension is cut over the expert axis before that."""
    compute_copy: Tensor | None = None
    """What modules compute with, where it is kept beside the piece in the compute type (`shardwise.parallel.data_parallel`); the
    gradient may be its own."""
    is_compute_copy_current: bool = False
    """Whether the optimizer has rounded the updated piece already."""
    sharded_dims: tuple[tuple[int, Axis], ...] = ()
    """How the parameter is cut (see `sharded_dims_of`), over axes of more than one rank."""
    replica_axis: Axis | None = None
    """Ranks of other samples that hold this very piece, where there are any."""
    is_matrix: bool = False
    """Whether it is a product's matrix in a block, or a stack of them: what Muon is for."""
    fixed_offset_and_shape: tuple[tuple[int, ...], list[int]] | None = None
    """Start and size of the piece, where no axis cuts it (`shardwise.parallel.tables.table_placement`)."""

    @property
    def grad(self) -> Tensor:
        gradient = self.tensor.grad
        if gradient is None and self.compute_copy is not None:
            gradient = self.compute_copy.grad
        assert gradient is not None, f"{self.name} has no gradient at this point of the step"
        return gradient

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and tables, not for norms and biases."""
        return len(self.shape) > 1


def offset_and_shape(param_shard: ParamShard, mesh: Mesh) -> tuple[tuple[int, ...], list[int]]:
    """Start and size of this rank's piece inside its parameter."""
    if param_shard.fixed_offset_and_shape is not None:
        return param_shard.fixed_offset_and_shape
    start, size = [0] * len(param_shard.shape), list(param_shard.shape)
    for dim, axis in sharded_dims_of(param_shard, mesh):
        first, size[dim] = axis.span(size[dim])
        start[dim] += first
    return tuple(start), size


def sharded_dims_of(param_shard: ParamShard, mesh: Mesh) -> list[tuple[int, Axis]]:
    """How its parameter is cut, one cut after the other: along which dimension, over which axis."""
    sharded_dims = [] if param_shard.tensor_dim is None else [(param_shard.tensor_dim, mesh["tensor"])]
    if param_shard.is_expert:
        sharded_dims.append((0, mesh["expert"]))
    if param_shard.is_sharded:
        sharded_dims.append((0, mesh["expert_replicas" if param_shard.is_expert else "fsdp"]))
    return sharded_dims


def init_param_shard(param_shard: ParamShard, init: InitSpec, seed: int, mesh: Mesh) -> None:
    """Fills a piece with what the whole parameter has there at the start of the run."""
    if init.kind == "normal":
        offset, _ = offset_and_shape(param_shard, mesh)
        normal_(
            param_shard.tensor.detach(), hash_key("init", seed, param_shard.name), param_shard.shape, offset, init.std
        )
    else:
        param_shard.tensor.detach().fill_(1.0 if init.kind == "ones" else 0.0)
