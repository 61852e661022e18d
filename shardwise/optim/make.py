"""The optimizer that a job asks for, over the pieces that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardwise.job import Optimizer
from shardwise.optim.adafactor import Adafactor
from shardwise.optim.adamw import AdamW
from shardwise.optim.eight import AdamW8
from shardwise.optim.lamb import LAMB
from shardwise.optim.muon import Muon
from shardwise.optim.pieces import Piece
from shardwise.optim.sgd import SGD


def make_optimizer(settings: Optimizer, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
    """Every rank makes one; what it needs to know of whole weights it asks the other ranks for, in its steps."""
    common: dict[str, Any] = {"lr": settings.lr}
    groups = _groups(settings, pieces)
    if settings.name == "sgd":
        return SGD(groups, {**common, "momentum": settings.momentum}, pieces)
    if settings.name == "lamb":
        return LAMB(groups, {**common, "betas": settings.betas, "eps": settings.eps}, pieces)
    if settings.name == "adafactor":
        return Adafactor(groups, common, pieces)
    matrices = [piece for piece in pieces if piece.matrix]
    if settings.name == "muon" and matrices:
        rest = _adamw(settings, [piece for piece in pieces if not piece.matrix])
        return Muon(_groups(settings, matrices), {**common, "momentum": settings.momentum}, matrices, rest)
    return _adamw(settings, pieces)


def _adamw(settings: Optimizer, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
    """It works element by element, so pieces are all it needs: PyTorch's own where it can."""
    groups = _groups(settings, pieces)
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.states == "8bit":
        return AdamW8(groups, common, pieces)
    if settings.states == "bf16" or any(piece.rounded is not None for piece in pieces):
        states = torch.bfloat16 if settings.states == "bf16" else None
        return AdamW(groups, common, pieces, states)
    return torch.optim.AdamW(groups, fused=True, **common)


def _groups(settings: Optimizer, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Pieces by their weight decay."""
    groups: dict[float, list[Any]] = {}
    for piece in pieces:
        usual = settings.weight_decay if piece.decays else 0.0
        named = [decay for pattern, decay in settings.decays.items() if fnmatchcase(piece.name, pattern)]
        groups.setdefault(named[0] if named else usual, []).append(piece.tensor)
    return [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]
