"""Optimizers of the single-process reference: PyTorch's own, plus plain LAMB and Muon for unsharded weights.

PyTorch has no LAMB, and its Muon computes in bf16, whose rounding would hide the errors that `verify` looks for, so
Muon is written here in the dtype of the weights.
"""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from shardwise.job import Job


def make_reference_optimizers(job: Job, weights: dict[str, Any]) -> list[torch.optim.Optimizer]:
    settings, task = job.optimizer, job.family.task(job.model)
    if task is not None and task.optimizer is not None:
        return [task.optimizer(list(weights.values()), lr=settings.lr)]
    default_groups: list[dict[str, Any]] = []
    muon_groups: list[dict[str, Any]] = []
    for name, weight in weights.items():
        decay = settings.weight_decay if weight.dim() > 1 else 0.0
        for pattern, value in reversed(settings.weight_decay_overrides.items()):
            decay = value if fnmatchcase(name, pattern) else decay
        is_in_block = name.startswith(("block", "encoder", "decoder"))
        is_matrix = is_in_block and (weight.dim() == 3 or (weight.dim() == 2 and name.endswith(".weight")))
        target_groups = muon_groups if is_matrix and settings.name == "muon" else default_groups
        target_groups.append({"params": [weight], "weight_decay": decay})
    adam_options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    if settings.name == "sgd":
        return [torch.optim.SGD(default_groups, momentum=settings.momentum, foreach=False)]
    if settings.name == "adafactor":
        return [torch.optim.Adafactor(default_groups, eps=(2.0**-23, 1e-3), foreach=False)]
    if settings.name == "lamb":
        return [ReferenceLAMB(default_groups, adam_options)]
    adamw = torch.optim.AdamW(default_groups, **adam_options, foreach=False)
    return [adamw, ReferenceMuon(muon_groups, {"momentum": settings.momentum})] if muon_groups else [adamw]


class ReferenceLAMB(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (weight,), (beta1, beta2) = group["params"], group["betas"]
            state = self.state[weight]
            state["t"] = state.get("t", 0) + 1
            m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * weight.grad
            v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * weight.grad**2
            m, v = m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"])
            update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * weight
            weight_norm, update_norm = float(weight.norm()), float(update.norm())
            trust_ratio = weight_norm / update_norm if weight.dim() > 1 and weight_norm > 0 and update_norm > 0 else 1.0
            weight -= group["lr"] * trust_ratio * update


class ReferenceMuon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (weight,), momentum = group["params"], group["momentum"]
            state = self.state[weight]
            momentum_buffer = state["average"] = momentum * state.get("average", 0.0) + (1 - momentum) * weight.grad
            update = momentum * momentum_buffer + (1 - momentum) * weight.grad
            matrices = [_newton_schulz(matrix) for matrix in (update if update.dim() == 3 else [update])]
            update = torch.stack(matrices).view(weight.shape)
            weight *= 1 - group["lr"] * group["weight_decay"]
            weight -= group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5 * update


def _newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        polynomial = -4.7750 * gram + 2.0315 * gram @ gram
        x = 3.4445 * x + (polynomial @ x if x.shape[0] <= x.shape[1] else x @ polynomial)
    return x
