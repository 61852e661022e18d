"""The base class of our optimizers, which update shards and sum over all shards of a parameter; SGD, LAMB, Adafactor.

A step never synchronizes with the host: the device decides whether to skip it, identically on every rank. Sums over
ranks use float64, so that replicas of a shard, which sum in other groups or orders, get the same number."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce_coalesced
from shardwise.optim.param_shard import ParamShard

ParamGroup = dict[str, Any]
ShardWithState = tuple[ParamShard, dict[str, Tensor], ParamGroup]
BETA2_DECAY = -0.8  # of Adafactor: 1 - beta2 at step t is t^BETA2_DECAY
EPS2 = 1e-3  # of Adafactor: lower bound of a parameter's RMS in its step size
EPS1 = 2.0**-23  # PyTorch's value for float32; its smaller float64 value would turn rounding noise into an update


class ShardedOptimizer(torch.optim.Optimizer):
    """As in PyTorch's fused optimizers, `found_inf` = 1 skips a step and gradients are divided by `grad_scale`."""

    collapsed_dims: dict[str, int] = {}  # dimensions, counted from the last, in which a state tensor has size 1

    def __init__(self, groups: list[ParamGroup], defaults: ParamGroup, shards: Sequence[ParamShard]):
        super().__init__(groups, {"fused": True, **defaults})
        self.shards = {shard.tensor: shard for shard in shards}
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.lr_tensors = [torch.zeros((), device=group["params"][0].device) for group in self.param_groups]

    def copy_lr_to_device(self) -> None:
        """Copies the learning rates to the device, where a step, or its CUDA graph once captured, reads them."""
        if self.lr_tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            for group, lr_tensor in zip(self.param_groups, self.lr_tensors, strict=True):
                lr_tensor.fill_(group["lr"])

    def state_for_checkpoint(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a shard in the form that checkpoints store."""
        return self.state.get(weight, {})

    def state_zeros(self, weight: Tensor, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates a state of a shard."""
        return weight.new_zeros(size, dtype=dtype)

    def after_load(self) -> None:
        """Called after a checkpoint has filled the states."""

    def iter_shards(self) -> Iterator[ShardWithState]:
        for group in self.param_groups:
            for weight in group["params"]:
                yield self.shards[weight], self.state[weight], group

    def unscaled_grad(self, shard: ParamShard) -> Tensor:
        grad = shard.grad.to(shard.tensor.dtype)
        return grad if self.grad_scale is None else grad / self.grad_scale

    def assign_unless_skipped(self, old: Tensor, new: Tensor) -> None:
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0.0, old, new))

    def lerp_state(self, state: dict[str, Tensor], key: str, new: Tensor, weight: float | Tensor) -> Tensor:
        """Moves a running average towards `new` unless this step is skipped; returns it."""
        average = state.setdefault(key, torch.zeros_like(new))
        self.assign_unless_skipped(average, average.lerp(new, weight))
        return average

    def update_weight(self, shard: ParamShard, new: Tensor) -> None:
        self.assign_unless_skipped(shard.tensor.detach(), new)
        self.update_compute_copy(shard)

    def update_compute_copy(self, shard: ParamShard) -> None:
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
        self.copy_lr_to_device()
        for group, lr_tensor in zip(self.param_groups, self.lr_tensors, strict=True):
            shards, momentum = [self.shards[weight] for weight in group["params"]], group["momentum"]
            pairs = [(self.state[shard.tensor], shard.tensor) for shard in shards if momentum]
            torch._fused_sgd_(
                [shard.tensor.detach() for shard in shards], [shard.grad.to(shard.tensor.dtype) for shard in shards],
                [state.setdefault("momentum_buffer", torch.zeros_like(weight)) for state, weight in pairs],
                lr=lr_tensor if lr_tensor.is_cuda else group["lr"], momentum=momentum, dampening=0.0,
                weight_decay=group["weight_decay"], nesterov=False, maximize=False, is_first_step=False,
                grad_scale=self.grad_scale, found_inf=self.found_inf,
            )  # fmt: skip
            for shard in shards:
                self.update_compute_copy(shard)


class LAMB(ShardedOptimizer):
    """LAMB (You et al. 2020): Adam's update, scaled per parameter by the trust ratio |weight| / |update|. Both norms
    are those of the full parameter, summed over the ranks that shard it. As in the authors' code, parameters without
    weight decay (norms, biases) take Adam's plain update. The ratio has no bound; it is 1 if a norm is zero."""

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


class Adafactor(ShardedOptimizer):
    """Adafactor (Shazeer and Stern 2018) in the variant of `torch.optim.Adafactor`. For a matrix it keeps the mean
    squared gradient of each row and column, not two numbers per element. PyTorch's version does not support shards;
    here, means and norms are those of the full parameter, summed over the ranks that shard it. The step size is the RMS
    of the parameter times min(lr, 1/sqrt(step)); there is no first moment."""

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


def sum_of_squares(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Returns the float64 sum of squares of all elements, or along one dimension, which is kept with size 1."""
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None, dtype=torch.float64).square()


def sum_over_shards(partial_sums: Sequence[Tensor], shards: Sequence[ParamShard],
                    summed_dims: Sequence[Collection[int]]) -> list[Tensor]:  # fmt: skip
    """All-reduces each shard's partial sums over the axes that shard it; one collective per axis. `summed_dims` are the
    dimensions that the sums reduce: axes that shard other dimensions are left alone."""
    sums = [partial_sum.double() for partial_sum in partial_sums]
    for axis in {id(axis.group): axis for shard in shards for _, axis in shard.sharded_dims}.values():
        indices = [index for index, (shard, dims) in enumerate(zip(shards, summed_dims, strict=True))
                   if any(other.group is axis.group and dim in dims for dim, other in shard.sharded_dims)]  # fmt: skip
        all_reduce_coalesced([sums[index] for index in indices], axis)
    return sums
