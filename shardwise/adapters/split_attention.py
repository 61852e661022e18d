"""Attention of a module that is not ours over a sequence that is split over the ranks of the context axis.

Each rank has the queries, keys and values of its own positions. `shardwise.attention` stands in a module where
`F.scaled_dot_product_attention` would, `shardwise.positions` where `torch.arange` would number the positions. On one
process they are just that. One run on fake tensors tells whether a module can be split (`context_refusal`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.adapters.anatomy import SHAPE_ONLY
from shardwise.comm.collectives import Axis
from shardwise.models.trace import tensors_in, with_fake_tensors

_VIEWS = ("view", "_unsafe_view", "slice", "select", "unsqueeze", "expand", "_to_copy", "alias", "detach")


@dataclass
class SplitSequence:
    """How the sequence is split in this process; without an axis, it is not."""

    axis: Axis | None = None
    all_positions: Tensor | None = None  # the positions of all ranks, in the order in which their keys are gathered
    attention_fn: Callable[..., Tensor] | None = None
    document_ids: Tensor | None = None  # of each token of the whole sequence (B, S), if samples hold several
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
    return torch.arange(length, device=device) if SPLIT.local_positions is None else SPLIT.local_positions.to(device)


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


class _TokenUses(TorchDispatchMode):
    """Finds lookups by numbers that are computed from the token ids, and convolutions."""

    def __init__(self, tokens: list[Tensor]):
        super().__init__()
        self.tokens, self.computed = tokens, list[Tensor]()  # kept alive, so that no id is used twice
        self.looks_up_computed = self.convolves = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.convolves |= name == "convolution"
        inputs = {id(leaf) for leaf in tensors_in((args, kwargs))}
        is_computed = not inputs.isdisjoint(map(id, self.computed))
        is_token = not inputs.isdisjoint(map(id, self.tokens))
        if name == "embedding":
            self.looks_up_computed |= is_computed
        elif (is_computed or is_token) and name not in SHAPE_ONLY:
            (self.tokens if is_token and name in _VIEWS else self.computed).extend(tensors_in(out))
        return out


def context_refusal(module: nn.Module, blocks: tuple[str, ...], batch: Any, run: Callable[[Any], Any], interface: str,
                    attending: AbstractContextManager[None] | None = None) -> str:  # fmt: skip
    """Returns why a module on the meta device cannot be split along the sequence; empty if it can.
    `run` computes a batch with the module, within `attending`; `interface` is what its attention must go through."""
    counts: list[int] = []  # calls of our attention, when each block has run
    note = lambda *args: counts.append(SPLIT.calls)  # noqa: E731
    handles = [module.get_submodule(name).register_forward_hook(note) for name in blocks]
    module.eval()  # nothing is drawn at random
    split_sequence(None, None, None)
    SPLIT.calls = 0
    try:
        with with_fake_tensors(module) as to_fake, attending or nullcontext():
            batch = tree_map_only(Tensor, to_fake, batch)
            uses = _TokenUses([leaf for leaf in tree_leaves(batch) if not leaf.is_floating_point()])
            with uses:
                run(batch)
    except Exception as error:
        if not SPLIT.calls:
            return f"it does not attend through {interface}"
        return f"it fails with our attention ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    finally:
        module.train()
        for handle in handles:
            handle.remove()
    missing = [name for name, before, after in zip(blocks, [0, *counts], counts, strict=False) if before == after]
    if missing or not SPLIT.calls:
        return f"{missing[0] if missing else 'it'} does not attend through {interface}"
    if uses.convolves:
        return "it convolves over positions"
    return "its positions depend on the tokens (padding)" if uses.looks_up_computed else ""
