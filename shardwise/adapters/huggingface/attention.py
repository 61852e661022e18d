"""Attention of transformers' models over a sequence that is split over ranks.

Each rank has the queries of its own positions; keys and values are all-gathered, and the mask (causal, sliding window)
follows from the positions. It is registered with transformers as the attention implementation "shardwise".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_gather_with_grad
from shardwise.errors import LayoutError

NAME = "shardwise"


@dataclass
class SplitSequence:
    """How the sequence is split in this process."""

    axis: Axis | None = None
    positions: Tensor | None = None
    """The positions of all ranks, in the order in which their keys are gathered."""
    calls: int = 0


SPLIT = SplitSequence()  # transformers looks attention functions up in a table of the process


def register() -> None:
    """Adds our attention to transformers' tables."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention (B, H, S, D) as transformers' own implementations do; returns (B, S, H, D)."""
    SPLIT.calls += 1
    if kwargs.get("position_bias") is not None or attention_mask is not None:
        raise LayoutError("this model adds a bias or a mask to attention, which cannot be split over context ranks.")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    length = query.shape[2]
    query_positions = key_positions = torch.arange(length, device=query.device)
    if SPLIT.axis is not None and SPLIT.positions is not None:
        key = all_gather_with_grad(key.contiguous(), 2, SPLIT.axis)
        value = all_gather_with_grad(value.contiguous(), 2, SPLIT.axis)
        key_positions = SPLIT.positions.to(query.device)
        query_positions = key_positions.chunk(SPLIT.axis.size)[SPLIT.axis.index]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    distance = query_positions[:, None] - key_positions[None, :]
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if sliding_window is not None:
        visible = visible & (distance < sliding_window) & (causal | (distance > -sliding_window))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, visible, scale=scale)
        return out.transpose(1, 2).contiguous(), None
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1).to(scores.dtype)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None
