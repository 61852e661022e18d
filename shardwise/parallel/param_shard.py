"""The shard of a parameter that one rank updates.

After the backward, everything works on parameter shards: gradient reduction, norm, clipping, optimizer, checkpoint,
verify. A parameter is split over the tensor axis along `tensor_dim`, or replicated there, and the result may be sharded
along its first dimension over the fsdp axis. Both splits are those of `torch.chunk`. `offset_and_shape` locates a shard
in the full parameter, which is how shards are initialized, saved, loaded and compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.models.chain import Chain, init_slice
from shardwise.parallel.mesh import Mesh


@dataclass(eq=False)
class ParamShard:
    """A plain local tensor. `tensor.grad` is set between gradient reduction and the optimizer step."""

    name: str
    tensor: Tensor
    shape: torch.Size  # shape of the full parameter
    tensor_dim: int | None  # the dimension split over the tensor axis; None if replicated there
    is_sharded: bool  # whether dimension 0 is sharded over fsdp, or over expert_replicas for split experts
    num_replicas: int  # ranks with this same shard; each contributes 1/num_replicas of its squared norm
    is_expert: bool = False  # whether the first dimension is split over the expert axis first
    compute_copy: Tensor | None = None
    """The weight in compute precision that modules use, if kept next to the master weight (`SingleProcess`). The
    gradient may be on it."""
    is_compute_copy_current: bool = False  # whether the optimizer has cast the updated weight into it already
    sharded_dims: tuple[tuple[int, Axis], ...] = ()  # `sharded_dims_of` it, over axes larger than 1
    replica_axis: Axis | None = None  # data-parallel ranks with this same shard; None if there are none
    is_matrix: bool = False  # whether it is a weight matrix of a block, or a stack of them: what Muon updates
    fixed_offset_and_shape: tuple[tuple[int, ...], list[int]] | None = None
    """Offset and shape of a table shard, which no axis defines (`shardwise.parallel.tables.table_storage`)."""

    @property
    def grad(self) -> Tensor:
        gradient = self.tensor.grad
        if gradient is None and self.compute_copy is not None:
            gradient = self.compute_copy.grad
        assert gradient is not None, f"{self.name} has no gradient at this point of the step"
        return gradient

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and tables, not to norms and biases."""
        return len(self.shape) > 1


def offset_and_shape(param_shard: ParamShard, mesh: Mesh) -> tuple[tuple[int, ...], list[int]]:
    """Returns offset and shape of this rank's shard in the full parameter."""
    if param_shard.fixed_offset_and_shape is not None:
        return param_shard.fixed_offset_and_shape
    start, size = [0] * len(param_shard.shape), list(param_shard.shape)
    for dim, axis in sharded_dims_of(param_shard, mesh):
        first, size[dim] = axis.span(size[dim])
        start[dim] += first
    return tuple(start), size


def sharded_dims_of(param_shard: ParamShard, mesh: Mesh) -> list[tuple[int, Axis]]:
    """Returns the (dimension, axis) splits of its parameter, in the order in which they apply."""
    sharded_dims = [] if param_shard.tensor_dim is None else [(param_shard.tensor_dim, mesh["tensor"])]
    if param_shard.is_expert:
        sharded_dims.append((0, mesh["expert"]))
    if param_shard.is_sharded:
        sharded_dims.append((0, mesh["expert_replicas" if param_shard.is_expert else "fsdp"]))
    return sharded_dims


def init_param_shard(param_shard: ParamShard, chain: Chain, seed: int, mesh: Mesh) -> None:
    """Fills a shard with its slice of the initial parameter, which depends on the seed alone."""
    offset, _ = offset_and_shape(param_shard, mesh)
    init_slice(chain, param_shard.name, param_shard.tensor.detach(), param_shard.shape, offset, seed)
