"""The learning rate of each step: warm-up, then constant, cosine, linear, or stable with a decay at the end (wsd)."""

from __future__ import annotations

import math

import torch

from shardwise.job import Optimizer


def learning_rate(settings: Optimizer, step: int, total: int) -> float:
    """For step 0, 1, ... of `total`; the last one has `final` times the highest rate."""
    warmup = round(settings.warmup * total if settings.warmup < 1 else settings.warmup)
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    if settings.schedule == "constant":
        return settings.lr
    decay = settings.decay * total if settings.decay < 1 else settings.decay
    begin = warmup if settings.schedule != "wsd" else max(warmup, round(total - 1 - decay))
    progress = min(1.0, max(0.0, (step - begin) / max(1, total - 1 - begin)))
    if settings.schedule == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.lr * (1.0 - (1.0 - settings.final) * progress)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
