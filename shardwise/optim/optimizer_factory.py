"""Builds the optimizer of a job for this rank's parameter shards: ours, or a class like those of `torch.optim`."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.errors import LayoutError
from shardwise.job import OptimizerConfig
from shardwise.optim.adamw import AdamW, AdamW8bit
from shardwise.optim.muon import Muon
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import LAMB, SGD, Adafactor

# PyTorch's optimizers in which the update of an element depends on that element's weight, gradient and state alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")


def make_optimizer(settings: OptimizerConfig, shards: Sequence[ParamShard]) -> Optimizer:
    """Builds the optimizer for this rank's shards; some communicate in each step to get full norms or matrices."""
    defaults = {key: getattr(settings, key) for key in ("lr", "momentum", "betas", "eps")}
    if (kind := {"sgd": SGD, "lamb": LAMB, "adafactor": Adafactor}.get(settings.name)) is not None:
        return kind(_param_groups(settings, shards), defaults, shards)
    matrices = [shard for shard in shards if shard.is_matrix]
    if settings.name == "muon" and matrices:
        adamw = _make_adamw(settings, [shard for shard in shards if not shard.is_matrix])
        return Muon(_param_groups(settings, matrices), defaults, matrices, adamw)
    return _make_adamw(settings, shards)


def _make_adamw(settings: OptimizerConfig, shards: Sequence[ParamShard]) -> Optimizer:
    """Returns PyTorch's fused AdamW, or ours for compute copies, low-precision and host moments. None communicates."""
    groups = _param_groups(settings, shards)
    defaults: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.state_dtype == "8bit":
        return AdamW8bit(groups, defaults, shards)
    state_dtype = torch.bfloat16 if settings.state_dtype == "bf16" else None
    if state_dtype is not None or settings.offload or any(shard.compute_copy is not None for shard in shards):
        return AdamW(groups, defaults, shards, state_dtype, settings.offload)
    return torch.optim.AdamW(groups, fused=True, **defaults)


def _param_groups(settings: OptimizerConfig, shards: Sequence[ParamShard]) -> list[dict[str, Any]]:
    """Groups the shards by weight decay."""
    groups: dict[float, list[Any]] = {}
    for shard in shards:
        default_decay = settings.weight_decay if shard.decays else 0.0
        overrides = settings.weight_decay_overrides.items()
        matching_decays = (decay for pattern, decay in overrides if fnmatchcase(shard.name, pattern))
        groups.setdefault(next(matching_decays, default_decay), []).append(shard.tensor)
    return [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]


def make_user_optimizer(factory: Callable[..., Optimizer], shards: Sequence[ParamShard], lr: float) -> Optimizer:
    """Builds the optimizer. It also clips, unscales and skips steps, which ours do in their kernels."""
    kind: Any = factory.func if isinstance(factory, partial) else factory
    name = getattr(kind, "__name__", type(kind).__name__)
    is_elementwise = getattr(kind, "elementwise", name in ELEMENTWISE and kind.__module__.startswith("torch."))
    split = next((shard for shard in shards if tuple(shard.tensor.shape) != tuple(shard.shape)), None)
    if split is not None and not is_elementwise:
        what = f"the optimizer {name} may use more of a parameter than a rank's part"
        remedy = "set `elementwise = True` on the class if the update of an element depends on that element alone"
        raise LayoutError(f"{what}, and this layout splits {split.name}; use replicate or pipeline, or {remedy}.")
    optimizer = factory([shard.tensor for shard in shards], lr=lr)
    update: Any = optimizer.step

    @torch.no_grad()
    def step(closure: None = None) -> None:
        if bool(optimizer.__dict__.pop("found_inf", 0.0)):
            return
        divisor = optimizer.__dict__.pop("grad_scale", None)
        for shard in shards:
            gradient = shard.tensor.grad
            if gradient is None and shard.compute_copy is not None and shard.compute_copy.grad is not None:
                gradient = shard.tensor.grad = shard.compute_copy.grad.to(shard.tensor.dtype)
            if divisor is not None and gradient is not None:
                gradient.div_(divisor)
        update()

    optimizer.step = step  # type: ignore[method-assign,assignment]
    return optimizer
