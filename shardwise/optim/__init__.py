"""Optimizers over holdings, and the schedules of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.job import Optimizer


class Piece(Protocol):
    """What an optimizer needs to know of a part of a weight (see `shardwise.parallel.holding`)."""

    @property
    def tensor(self) -> Tensor: ...

    @property
    def decays(self) -> bool: ...


def make_optimizer(settings: Optimizer, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
    """AdamW on the local pieces: it works element by element, so pieces are all it needs."""
    groups: list[dict[str, Any]] = [
        {"params": [piece.tensor for piece in pieces if piece.decays], "weight_decay": settings.weight_decay},
        {"params": [piece.tensor for piece in pieces if not piece.decays], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def learning_rate(settings: Optimizer, step: int, total: int) -> float:
    """For step 0, 1, ... of `total`."""
    warmup = settings.warmup * total if settings.warmup < 1 else settings.warmup
    if step < warmup:
        return settings.lr * (step + 1) / (math.floor(warmup) + 1)
    if settings.schedule == "constant":
        return settings.lr
    decay = settings.decay * total if settings.decay < 1 else settings.decay
    begin = warmup if settings.schedule != "wsd" else max(warmup, total - decay)
    progress = min(1.0, max(0.0, (step - begin) / max(1.0, total - begin)))
    if settings.schedule == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.lr * (1.0 - (1.0 - settings.final) * progress)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
