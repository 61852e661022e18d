"""SGD with momentum, equal to `torch.optim.SGD`; weight decay is added to the gradient."""

import torch

from shardwise.optim.sharded_optimizer import ShardedOptimizer


class SGD(ShardedOptimizer):
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
