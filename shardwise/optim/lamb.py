"""LAMB (You et al. 2020): Adam's update, scaled per parameter by the trust ratio |weight| / |update|.

Both norms are those of the full parameter, summed over the ranks that shard it. As in the authors' code, parameters
without weight decay (norms, biases) take Adam's plain update. The ratio is unbounded, and 1 if either norm is zero.
"""

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ShardedOptimizer, sum_of_squares, sum_over_shards


class LAMB(ShardedOptimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = list(self.iter_shards())
        steps = [self._update_moments(*member) for member in members]
        scaled_members = [(member, step_number) for member, step_number in zip(members, steps) if member[0].decays]
        partial_sums = []
        for member, step_number in scaled_members:
            both = member[0].tensor.detach(), self._adam_update(*member, step_number)
            partial_sums.append(torch.stack([sum_of_squares(tensor) for tensor in both]))
        shards = [member[0] for member, _ in scaled_members]
        sums = sum_over_shards(partial_sums, shards, [range(len(shard.shape)) for shard in shards])
        norms = [both.sqrt() for both in sums]  # of weight and update
        ratios = [torch.where((both > 0.0).all(), both[0] / both[1], 1.0) for both in norms]
        trust_ratios = {id(shard): ratio for shard, ratio in zip(shards, ratios, strict=True)}
        for (shard, state, group), step_number in zip(members, steps):
            weight = shard.tensor.detach()
            update = self._adam_update(shard, state, group, step_number) * group["lr"]
            if id(shard) in trust_ratios:
                update *= trust_ratios[id(shard)].to(weight.dtype)
            self.update_weight(shard, weight - update)

    def _update_moments(self, shard: ParamShard, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        grad = self.unscaled_grad(shard)
        for key, beta, value in zip(("exp_avg", "exp_avg_sq"), group["betas"], (grad, grad.square())):
            self.lerp_state(state, key, value, 1.0 - beta)
        return self.increment_step(shard, state)

    def _adam_update(self, shard: ParamShard, state: dict[str, Tensor], group: Any, step: Tensor) -> Tensor:
        """Returns Adam's update with decay. Computed twice per step, since storing it would cost memory."""
        dtype = shard.tensor.dtype
        bias_correction1, bias_correction2 = ((1.0 - beta**step).to(dtype) for beta in group["betas"])
        denominator = (state["exp_avg_sq"] / bias_correction2).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / bias_correction1).div_(denominator)
        return update.add_(shard.tensor.detach(), alpha=group["weight_decay"])
