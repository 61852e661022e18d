"""AdamW for parameter shards with features that PyTorch's fused AdamW lacks.

It takes gradients in the compute dtype, writes the compute copy of the updated weights in the same pass over memory,
and can keep its moments in bf16 or in host memory. It updates one parameter at a time: float32 weights on a GPU with a
Triton kernel (`shardwise.optim.adamw_kernel`), all others with PyTorch's fused kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.offload import StateStream, host_zeros
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ParamGroup, ShardedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(ShardedOptimizer):
    """AdamW with compute copies and an optional dtype for its moments. State names are PyTorch's."""

    def __init__(
        self, groups: list[ParamGroup], defaults: ParamGroup, shards: Sequence[ParamShard],
        state_dtype: torch.dtype | None, offload: bool = False,
    ):  # fmt: skip
        """`offload`: keep the moments of weights on a GPU in host memory; others are there already."""
        super().__init__(groups, defaults, shards)
        self.state_dtype = state_dtype
        weights = [weight for group in groups for weight in group["params"]]
        self.offload = offload and weights[0].is_cuda
        self.stream: StateStream | None = None
        self.host_moments: dict[tuple[Tensor, str], Tensor] = {}
        if self.offload:
            owners = [(weight, key) for weight in weights for key in MOMENTS]
            shapes, dtype = [weight.shape for weight, _ in owners], state_dtype or weights[0].dtype
            zeros, self.host_buffer = host_zeros(shapes, dtype)
            self.host_moments = dict(zip(owners, zeros))
        self.lr_tensors = [torch.zeros((), device=group["params"][0].device) for group in self.param_groups]

    def copy_lr_to_device(self) -> None:
        """Copies the learning rates to the device, where a CUDA graph of the step reads them."""
        for group, lr_tensor in zip(self.param_groups, self.lr_tensors, strict=True):
            lr_tensor.fill_(group["lr"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.lr_tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            self.copy_lr_to_device()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            if not self.state[weight]:
                dtype = self.state_dtype or weight.dtype
                moments = {key: self.state_zeros(weight, key, weight.shape, dtype) for key in MOMENTS}
                self.state[weight] = {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **moments}
        if self.offload and weights[0].dtype == torch.float32:
            moment = self.state[weights[0]]["exp_avg"]
            self.stream = self.stream or StateStream(weights[0].device, moment.dtype, 2)
            self.stream.begin()
        steps = [self.state[weight]["step"] for weight in weights]
        increment = torch.ones_like(steps[0]) if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(steps, [increment] * len(steps))
        for group, lr_tensor in zip(self.param_groups, self.lr_tensors, strict=True):
            for weight in group["params"]:
                shard, state = self.shards[weight], self.state[weight]
                if weight.is_cuda and weight.dtype == torch.float32:
                    self._kernel_step(shard, state, group, lr_tensor)
                else:
                    torch_adamw_(shard, state, group, self.grad_scale, self.found_inf)
                shard.is_compute_copy_current = shard.compute_copy is not None
        if self.stream is not None:
            self.stream.end()

    def state_zeros(self, weight: Tensor, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        if (weight, key) in self.host_moments and self.host_moments[weight, key].dtype == dtype:
            return self.host_moments[weight, key]
        return torch.zeros_like(weight, dtype=dtype)

    def _kernel_step(self, shard: ParamShard, state: dict[str, Tensor], group: dict[str, Any], lr: Tensor) -> None:
        from shardwise.optim.adamw_kernel import fused_adamw_

        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        weight, grad, copy, step = shard.tensor.detach(), shard.grad, shard.compute_copy, state["step"]
        scale_and_inf = self.grad_scale, self.found_inf
        if self.stream is None:
            fused_adamw_(weight, grad, exp_avg, exp_avg_sq, copy, step, lr, group, *scale_and_inf)
            return
        weight, grad = weight.view(-1), grad.contiguous().view(-1)
        copy = None if copy is None else copy.detach().view(-1)
        for part, (first, second) in self.stream.parts(exp_avg.view(-1), exp_avg_sq.view(-1)):
            part_copy = None if copy is None else copy[part]
            fused_adamw_(weight[part], grad[part], first, second, part_copy, step, lr, group, *scale_and_inf)


def torch_adamw_(
    shard: ParamShard, state: dict[str, Tensor], group: dict[str, Any], grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Updates one shard with PyTorch's fused kernel, converting moments of another dtype or device for the call."""
    weight, moments = shard.tensor.detach(), (state["exp_avg"], state["exp_avg_sq"])
    exp_avg, exp_avg_sq = (moment.to(weight) for moment in moments)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [weight], [shard.grad.to(weight.dtype)], [exp_avg], [exp_avg_sq], [], [state["step"]], lr=group["lr"],
        beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
        grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    for moment, updated in zip(moments, (exp_avg, exp_avg_sq)):
        if moment is not updated:
            moment.copy_(updated)
    if shard.compute_copy is not None:
        shard.compute_copy.copy_(weight)
