"""AdamW over the local pieces of weights, with PyTorch's fused kernels."""

from __future__ import annotations

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
