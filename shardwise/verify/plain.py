"""The truth's optimizers: PyTorch's own, and LAMB and Muon written out for whole weights in one process.

PyTorch has no LAMB; its Muon computes in bf16, where rounding would hide what `verify` looks for, so its formulas are
here in the type of the weights. Nothing here knows of pieces.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from shardwise.job import Job


def optimizers_of(job: Job, weights: dict[str, Any]) -> list[torch.optim.Optimizer]:
    settings = job.optimizer
    groups: list[dict[str, Any]] = []
    hidden: list[dict[str, Any]] = []
    for name, weight in weights.items():
        decay = settings.weight_decay if weight.dim() > 1 else 0.0
        for pattern, value in reversed(settings.decays.items()):
            decay = value if fnmatchcase(name, pattern) else decay
        inside = name.startswith(("block", "encoder", "decoder"))
        matrix = inside and (weight.dim() == 3 or (weight.dim() == 2 and name.endswith(".weight")))
        place = hidden if matrix and settings.name == "muon" else groups
        place.append({"params": [weight], "weight_decay": decay})
    adam: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    if settings.name == "sgd":
        return [torch.optim.SGD(groups, momentum=settings.momentum, foreach=False)]
    if settings.name == "adafactor":
        return [torch.optim.Adafactor(groups, eps=(2.0**-23, 1e-3), foreach=False)]
    if settings.name == "lamb":
        return [LAMB(groups, adam)]
    adamw = torch.optim.AdamW(groups, **adam, foreach=False)
    return [adamw, Muon(hidden, {"momentum": settings.momentum})] if hidden else [adamw]


class LAMB(torch.optim.Optimizer):
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
            long, short = float(weight.norm()), float(update.norm())
            ratio = long / short if weight.dim() > 1 and long > 0 and short > 0 else 1.0
            weight -= group["lr"] * ratio * update


class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (weight,), momentum = group["params"], group["momentum"]
            state = self.state[weight]
            average = state["average"] = momentum * state.get("average", 0.0) + (1 - momentum) * weight.grad
            update = momentum * average + (1 - momentum) * weight.grad
            matrices = [_orthogonal(matrix) for matrix in (update if update.dim() == 3 else [update])]
            update = torch.stack(matrices).view(weight.shape)
            weight *= 1 - group["lr"] * group["weight_decay"]
            weight -= group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5 * update


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        square = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        odd = -4.7750 * square + 2.0315 * square @ square
        x = 3.4445 * x + (odd @ x if x.shape[0] <= x.shape[1] else x @ odd)
    return x
