"""Adafactor (Shazeer and Stern 2018) in the variant of `torch.optim.Adafactor`.

For a matrix it keeps the mean squared gradient of each row and column, where Adam keeps two numbers per element.
PyTorch's version does not support shards; here, means and norms are those of the full parameter, summed over the ranks
that shard it. The step size is the RMS of the parameter times min(lr, 1/sqrt(step)); there is no first moment.
"""

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ShardedOptimizer, sum_of_squares, sum_over_shards

BETA2_DECAY = -0.8  # 1 - beta2 at step t is t^BETA2_DECAY
EPS2 = 1e-3  # lower bound of a parameter's RMS in its step size
EPS1 = 2.0**-23  # PyTorch's value for float32; its smaller float64 value would turn rounding noise into an update

ShardWithState = tuple[ParamShard, dict[str, Tensor], dict[str, Any]]


class Adafactor(ShardedOptimizer):
    collapsed_dims = {"row_var": -1, "col_var": -2}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = list(self.iter_shards())
        shards = [shard for shard, _, _ in members]
        all_dims = [range(len(shard.shape)) for shard in shards]
        steps = [self.increment_step(shard, state) for shard, state, _ in members]
        weight_squares = sum_over_shards([sum_of_squares(shard.tensor.detach()) for shard in shards], shards, all_dims)
        row_means = self._update_variances(members, steps)
        update_squares = [sum_of_squares(self._normalized_update(member, row_means)) for member in members]
        update_squares = sum_over_shards(update_squares, shards, all_dims)
        for member, step_number, weight_square, update_square in zip(members, steps, weight_squares, update_squares):
            shard, _, group = member
            numel = shard.shape.numel()
            lr = (weight_square / numel).sqrt().clamp(min=EPS2) * step_number.rsqrt().clamp(max=group["lr"])
            lr = lr / (update_square / numel).sqrt().clamp(min=1.0)
            decayed = shard.tensor.detach() * (1.0 - group["lr"] * group["weight_decay"])
            self.update_weight(shard, decayed - self._normalized_update(member, row_means) * lr.to(decayed.dtype))

    def _update_variances(self, members: list[ShardWithState], steps: list[Tensor]) -> dict[int, Tensor]:
        """Updates the running variances. Returns the mean over rows of each matrix's `row_var`, by id of its shard."""
        shards = [shard for shard, _, _ in members if len(shard.shape) > 1]
        partial_sums, summed_dims = [], []
        for shard in shards:
            grad = self.unscaled_grad(shard)
            partial_sums += [sum_of_squares(grad, dim=-1), sum_of_squares(grad, dim=-2)]
            summed_dims += [[len(shard.shape) - 1], [len(shard.shape) - 2]]
        sums = iter(sum_over_shards(partial_sums, [shard for shard in shards for _ in range(2)], summed_dims))
        for (shard, state, _), step_number in zip(members, steps, strict=True):
            one_minus_beta2 = (step_number**BETA2_DECAY).to(shard.tensor.dtype)
            if len(shard.shape) < 2:
                self.lerp_state(state, "variance", self.unscaled_grad(shard).square(), one_minus_beta2)
                continue
            for key, dim in (("row_var", -1), ("col_var", -2)):
                self.lerp_state(state, key, (next(sums) / shard.shape[dim]).to(shard.tensor.dtype), one_minus_beta2)
        row_vars = [self.state[shard.tensor]["row_var"] for shard in shards]
        rows = [row_var.sum(-2, keepdim=True, dtype=torch.float64) for row_var in row_vars]
        rows = sum_over_shards(rows, shards, [[len(shard.shape) - 2] for shard in shards])
        return {id(p): (row / p.shape[-2]).to(p.tensor.dtype) for p, row in zip(shards, rows, strict=True)}

    def _normalized_update(self, member: ShardWithState, row_means: dict[int, Tensor]) -> Tensor:
        """Returns the gradient divided by the square root of its variance. Computed twice per step, to save memory."""
        shard, state, _ = member
        if id(shard) in row_means:
            variance = state["row_var"] @ state["col_var"] / row_means[id(shard)].clamp(min=EPS1)
        else:
            variance = state["variance"]
        return variance.clamp(min=EPS1**2).rsqrt_() * self.unscaled_grad(shard)
