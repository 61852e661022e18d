"""What our optimizers share: steps over pieces of weights, and sums over all pieces of a weight.

A step reads no value: whether it does nothing is decided on the device, and alike on every rank. What is summed over
ranks travels in float64, so that ranks with copies of a piece, which sum in groups of their own and maybe in another
order, still come to the same number in the type of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import all_reduce


class Axis(Protocol):
    """Ranks that hold pieces of one weight (see `shardwise.parallel.mesh`)."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def span(self, total: int) -> tuple[int, int]: ...


class Piece(Protocol):
    """What an optimizer needs to know of a part of a weight (see `shardwise.parallel.holding`)."""

    current: bool

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def cuts(self) -> Sequence[tuple[int, Axis]]: ...

    @property
    def same(self) -> Axis | None: ...

    @property
    def matrix(self) -> bool: ...

    @property
    def tensor(self) -> Tensor: ...

    @property
    def rounded(self) -> Tensor | None: ...

    @property
    def grad(self) -> Tensor: ...

    @property
    def decays(self) -> bool: ...


class Pieced(torch.optim.Optimizer):
    """Of a step that must do nothing `found_inf` is 1; `grad_scale` is what gradients are to be divided by."""

    collapsed: dict[str, int] = {}
    """Of states that have one number where the weight has a whole dimension: which one, from the last."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], pieces: Sequence[Piece]):
        super().__init__(groups, {"fused": True, **defaults})
        self.pieces = {piece.tensor: piece for piece in pieces}
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def saved(self, weight: Tensor) -> dict[str, Tensor]:
        """The state of a piece as a checkpoint has it."""
        return self.state.get(weight, {})

    def loaded(self) -> None:
        """To be called when a checkpoint has filled the states."""

    def members(self) -> Iterator[tuple[Piece, dict[str, Tensor], dict[str, Any]]]:
        """Each piece with its state and its settings."""
        for group in self.param_groups:
            for weight in group["params"]:
                yield self.pieces[weight], self.state[weight], group

    def gradient(self, piece: Piece) -> Tensor:
        grad = piece.grad.to(piece.tensor.dtype)
        return grad if self.grad_scale is None else grad / self.grad_scale

    def put(self, old: Tensor, new: Tensor) -> None:
        """Makes `old` the new one, unless this step does nothing."""
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0.0, old, new))

    def put_weight(self, piece: Piece, new: Tensor) -> None:
        self.put(piece.tensor.detach(), new)
        if piece.rounded is not None:
            piece.rounded.detach().copy_(piece.tensor)
            piece.current = True

    def count(self, piece: Piece, state: dict[str, Tensor]) -> Tensor:
        """The number of this step, from 1 on, for arithmetic."""
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=piece.tensor.device)
        self.put(state["step"], state["step"] + 1.0)
        return state["step"].double()


def squares(tensor: Tensor, dim: int | None = None) -> Tensor:
    """The sum of squares, of all or along one dimension, which is kept."""
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None, dtype=torch.float64).square()


def total(parts: Sequence[Tensor], pieces: Sequence[Piece], over: Sequence[Collection[int]]) -> list[Tensor]:
    """Sums what each rank has of its pieces over the ranks that hold the others, one collective for an axis.

    `over`: the dimensions that were summed; cuts along others part what is summed on its own.
    """
    sums = [part.double() for part in parts]
    axes = {id(axis.group): axis for piece in pieces for _, axis in piece.cuts}
    for axis in axes.values():
        here = [
            number for number, (piece, dims) in enumerate(zip(pieces, over, strict=True))
            if any(other.group is axis.group and dim in dims for dim, other in piece.cuts)
        ]  # fmt: skip
        if here:
            flat = torch.cat([sums[number].reshape(-1) for number in here])
            all_reduce(flat, group=axis.group)
            for number, whole in zip(here, flat.split([sums[number].numel() for number in here]), strict=True):
                sums[number] = whole.view(sums[number].shape)
    return sums
