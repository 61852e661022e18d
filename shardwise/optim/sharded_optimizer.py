"""Base class of our optimizers, which update parameter shards and sum statistics over all shards of a parameter.

A step never synchronizes with the host: the device decides whether to skip it, identically on every rank. Sums over
ranks use float64, so that replicas of a shard, which sum in different groups and maybe in another order, still get the
same number in the dtype of the weights.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce_coalesced
from shardwise.optim.param_shard import ParamShard

ParamGroup = dict[str, Any]


class ShardedOptimizer(torch.optim.Optimizer):
    """As in PyTorch's fused optimizers, `found_inf` = 1 skips a step and gradients are divided by `grad_scale`."""

    collapsed_dims: dict[str, int] = {}  # dimensions, counted from the last, in which a state tensor has size 1

    def __init__(self, groups: list[ParamGroup], defaults: ParamGroup, shards: Sequence[ParamShard]):
        super().__init__(groups, {"fused": True, **defaults})
        self.shards = {shard.tensor: shard for shard in shards}
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def state_for_checkpoint(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a shard in the form that checkpoints store."""
        return self.state.get(weight, {})

    def state_zeros(self, weight: Tensor, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates a state of a shard."""
        return weight.new_zeros(size, dtype=dtype)

    def after_load(self) -> None:
        """Called after a checkpoint has filled the states."""

    def iter_shards(self) -> Iterator[tuple[ParamShard, dict[str, Tensor], dict[str, Any]]]:
        """Yields each shard with its state and its param group."""
        for group in self.param_groups:
            for weight in group["params"]:
                yield self.shards[weight], self.state[weight], group

    def unscaled_grad(self, shard: ParamShard) -> Tensor:
        grad = shard.grad.to(shard.tensor.dtype)
        return grad if self.grad_scale is None else grad / self.grad_scale

    def assign_unless_skipped(self, old: Tensor, new: Tensor) -> None:
        """Copies `new` into `old` unless this step is skipped."""
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0.0, old, new))

    def lerp_state(self, state: dict[str, Tensor], key: str, new: Tensor, weight: float | Tensor) -> Tensor:
        """Moves a running average towards `new` unless this step is skipped; returns it."""
        average = state.setdefault(key, torch.zeros_like(new))
        self.assign_unless_skipped(average, average.lerp(new, weight))
        return average

    def update_weight(self, shard: ParamShard, new: Tensor) -> None:
        self.assign_unless_skipped(shard.tensor.detach(), new)
        if shard.compute_copy is not None:
            shard.compute_copy.detach().copy_(shard.tensor)
            shard.is_compute_copy_current = True

    def increment_step(self, shard: ParamShard, state: dict[str, Tensor]) -> Tensor:
        """Increments the step count unless the step is skipped; returns it in float64."""
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.tensor.device)
        self.assign_unless_skipped(state["step"], state["step"] + 1.0)
        return state["step"].double()


class SGD(ShardedOptimizer):
    """SGD with momentum, equal to `torch.optim.SGD`; weight decay is added to the gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for shard, state, group in self.iter_shards():
            weight = shard.tensor.detach()
            update = self.unscaled_grad(shard).add(weight, alpha=group["weight_decay"])
            if group["momentum"]:
                momentum_buffer = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                self.assign_unless_skipped(momentum_buffer, update.add(momentum_buffer, alpha=group["momentum"]))
                update = momentum_buffer
            self.update_weight(shard, weight.sub(update, alpha=group["lr"]))


def sum_of_squares(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Returns the float64 sum of squares of all elements, or along one dimension, which is kept with size 1."""
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None, dtype=torch.float64).square()


def sum_over_shards(
    partial_sums: Sequence[Tensor], shards: Sequence[ParamShard], summed_dims: Sequence[Collection[int]]
) -> list[Tensor]:
    """All-reduces each shard's partial sums over the axes that shard it; one collective per axis. `summed_dims` are the
    dimensions that the sums reduce: axes that shard other dimensions are left alone."""
    sums = [partial_sum.double() for partial_sum in partial_sums]
    axes = {id(axis.group): axis for shard in shards for _, axis in shard.sharded_dims}
    for axis in axes.values():
        indices = [
            index for index, (shard, dims) in enumerate(zip(shards, summed_dims, strict=True))
            if any(other.group is axis.group and dim in dims for dim, other in shard.sharded_dims)
        ]  # fmt: skip
        all_reduce_coalesced([sums[index] for index in indices], axis)
    return sums
