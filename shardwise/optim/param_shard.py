"""The shard of a parameter that one rank updates.

After the backward, everything works on parameter shards: gradient reduction, norm, clipping, optimizer, checkpoint,
verify. A parameter is split over the tensor axis along `tensor_dim`, or replicated there, and the result may be sharded
over the fsdp axis, along its first dimension or, of a stack of matrices, one that divides evenly. All splits are those
of `torch.chunk`. A parameter without dimensions is whole on every rank. `offset_and_shape` locates a shard in the full
parameter, which is how shards are initialized, saved, loaded and compared."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardwise.comm.collectives import Axis
from shardwise.models.chain import Chain, init_slice


@dataclass(eq=False)
class ParamShard:
    """A plain local tensor. `tensor.grad` is set between gradient reduction and the optimizer step."""

    is_table: ClassVar[bool] = False  # whether it is a shard of an embedding table

    name: str
    tensor: Tensor
    shape: torch.Size  # shape of the full parameter
    sharded_dims: tuple[tuple[int, Axis], ...] = ()
    """The (dimension, axis) splits of the full parameter, in the order in which they apply; without axes of size 1."""
    num_replicas: int = 1  # ranks with this same shard; each contributes 1/num_replicas of its squared norm
    tensor_dim: int | None = None  # the dimension split over the tensor axis; None if replicated there
    is_expert: bool = False  # whether the first dimension is split over the expert axis first
    replica_axis: Axis | None = None  # data-parallel ranks with this same shard; None if there are none
    is_matrix: bool = False  # whether it is a weight matrix of a block, or a stack of them: what Muon updates
    compute_copy: Tensor | None = None  # the weight as modules see it, if `SingleProcess` keeps it; may have the grad
    is_compute_copy_current: bool = False  # whether the optimizer has cast the updated weight into it already

    @property
    def grad(self) -> Tensor:
        gradient = self.tensor.grad
        if gradient is None and self.compute_copy is not None:
            gradient = self.compute_copy.grad
        assert gradient is not None, f"{self.name} has no gradient at this point of the step"
        return gradient

    @property
    def full_grad(self) -> Tensor:
        """The gradient of all rows; `grad` of a table shard has the touched rows only."""
        return self.grad

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and tables, not to norms and biases."""
        return len(self.shape) > 1

    @property
    def offset_and_shape(self) -> tuple[tuple[int, ...], list[int]]:
        """Offset and shape of this shard in the full parameter."""
        start, size = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.sharded_dims:
            first, size[dim] = axis.span(size[dim])
            start[dim] += first
        return tuple(start), size


def init_param_shard(param_shard: ParamShard, chain: Chain, seed: int) -> None:
    """Fills a shard with its slice of the initial parameter, which depends on the seed alone."""
    offset, _ = param_shard.offset_and_shape
    init_slice(chain, param_shard.name, param_shard.tensor.detach(), param_shard.shape, offset, seed)
