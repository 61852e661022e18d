"""Builds the optimizer of a job for this rank's parameter shards."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardwise.job import OptimizerConfig
from shardwise.optim.adafactor import Adafactor
from shardwise.optim.adamw import AdamW
from shardwise.optim.adamw8bit import AdamW8bit
from shardwise.optim.lamb import LAMB
from shardwise.optim.muon import Muon
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sgd import SGD


def make_optimizer(settings: OptimizerConfig, shards: Sequence[ParamShard]) -> torch.optim.Optimizer:
    """Builds the optimizer for this rank's shards; some communicate in each step to get full norms or matrices."""
    defaults: dict[str, Any] = {"lr": settings.lr}
    groups = _param_groups(settings, shards)
    if settings.name == "sgd":
        return SGD(groups, {**defaults, "momentum": settings.momentum}, shards)
    if settings.name == "lamb":
        return LAMB(groups, {**defaults, "betas": settings.betas, "eps": settings.eps}, shards)
    if settings.name == "adafactor":
        return Adafactor(groups, defaults, shards)
    matrices = [shard for shard in shards if shard.is_matrix]
    if settings.name == "muon" and matrices:
        adamw = _make_adamw(settings, [shard for shard in shards if not shard.is_matrix])
        return Muon(_param_groups(settings, matrices), {**defaults, "momentum": settings.momentum}, matrices, adamw)
    return _make_adamw(settings, shards)


def _make_adamw(settings: OptimizerConfig, shards: Sequence[ParamShard]) -> torch.optim.Optimizer:
    """Returns PyTorch's fused AdamW, or ours for compute copies and moments in low precision or host memory. Neither
    communicates."""
    groups = _param_groups(settings, shards)
    defaults: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.state_dtype == "8bit":
        return AdamW8bit(groups, defaults, shards)
    is_ours = settings.state_dtype == "bf16" or settings.offload
    if is_ours or any(shard.compute_copy is not None for shard in shards):
        state_dtype = torch.bfloat16 if settings.state_dtype == "bf16" else None
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
