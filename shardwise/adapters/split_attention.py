"""Attention of a module that is not ours over a sequence that is split over the ranks of the context axis.

Each rank has the queries, keys and values of its own positions. `shardwise.attention` stands in a module where
`F.scaled_dot_product_attention` would, `shardwise.positions` where `torch.arange` would number the positions. On one
process they are just that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.collectives import Axis


@dataclass
class SplitSequence:
    """How the sequence is split in this process; without an axis, it is not."""

    axis: Axis | None = None
    all_positions: Tensor | None = None  # the positions of all ranks, in the order in which their keys are gathered
    attention_fn: Callable[..., Tensor] | None = None
    document_ids: Tensor | None = None
    """The document of each token of the whole sequence (B, S), in a forward whose samples hold several."""
    preference: Tensor | None = None  # in a forward whose samples are pairs of answers
    calls: int = 0  # how often our attention was called
    heads: int = 1  # number of heads in the last call

    @property
    def local_positions(self) -> Tensor | None:
        """This rank's positions; None: all of them."""
        if self.axis is None or self.all_positions is None:
            return None
        return self.all_positions.chunk(self.axis.size)[self.axis.index]


SPLIT = SplitSequence()  # modules call plain functions, which can only look here


def split_sequence(axis: Axis | None, all_positions: Tensor | None, attention_fn: Callable[..., Tensor] | None) -> None:
    """Makes `attention` and `positions` work on this rank's part of the sequence; an axis of None: on the whole."""
    SPLIT.axis, SPLIT.all_positions, SPLIT.attention_fn = axis, all_positions, attention_fn


def positions(length: int, device: Any = None) -> Tensor:
    """Returns the positions in the sequence of the `length` tokens that this process has."""
    if SPLIT.local_positions is None:
        return torch.arange(length, device=device)
    return SPLIT.local_positions.to(device)


def count_call(query: Tensor) -> None:
    if not torch.compiler.is_compiling():  # a counter would be a reason to compile anew
        SPLIT.calls, SPLIT.heads = SPLIT.calls + 1, query.shape[1]


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """Computes attention (batch, heads, sequence, features) over the whole sequence, whose keys and values may have
    fewer heads (grouped-query attention)."""
    count_call(query)
    if SPLIT.attention_fn is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
    width = max(query.shape[-1], value.shape[-1])  # latent attention has narrower values; zeros change nothing
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    padded = [F.pad(x, (0, width - x.shape[-1])) for x in (query * scale * width**0.5, key, value)]
    return SPLIT.attention_fn(*padded, causal)[..., : value.shape[-1]]
