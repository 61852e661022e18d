"""Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for all else: `torch.optim.Muon` over pieces.

A matrix's averaged gradient is made orthogonal as a whole. Each matrix goes to one of the ranks that hold its pieces,
is made orthogonal there and goes back; ranks that hold copies do each a part of them. So work and memory are shared. A
stack of experts is as many matrices; what is one weight (queries, keys and values in one) is one matrix, as it would be
for PyTorch. Steps have the length of AdamW's (PyTorch's `match_rms_adamw`), so one learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import all_to_all
from shardwise.optim.pieces import Axis, Piece, Pieced

FACTORS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
SMALLEST = 1e-7


class Muon(Pieced):
    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], pieces: Sequence[Piece],
        rest: torch.optim.Optimizer,
    ):  # fmt: skip
        """`rest`: the optimizer of all other weights. To those who set rates and save states both are one."""
        super().__init__(groups, defaults, pieces)
        self.rest, self.own = rest, self.param_groups
        self.param_groups = [*rest.param_groups, *self.own]
        self.state = rest.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for word in ("grad_scale", "found_inf"):
            setattr(self.rest, word, getattr(self, word))
        self.rest.step()
        members = [(self.pieces[weight], group) for group in self.own for weight in group["params"]]
        updates = []
        for piece, group in members:
            grad = self.gradient(piece)
            average = self.state[piece.tensor].setdefault("momentum_buffer", torch.zeros_like(grad))
            self.put(average, average.lerp(grad, 1.0 - group["momentum"]))
            updates.append(rounded(grad.lerp(average, group["momentum"])))
        for (piece, group), update in zip(members, orthogonal(updates, [piece for piece, _ in members]), strict=True):
            rate = group["lr"] * 0.2 * math.sqrt(max(piece.shape[-2:]))
            kept = piece.tensor.detach() * (1.0 - group["lr"] * group["weight_decay"])
            self.put_weight(piece, kept.sub_(update.to(kept.dtype), alpha=rate))


def rounded(tensor: Tensor) -> Tensor:
    """As it goes into the products: on a GPU in bf16, as in PyTorch's; on a CPU, which may not know it, unchanged."""
    return tensor.bfloat16() if tensor.is_cuda and tensor.dtype == torch.float32 else tensor


def newton_schulz(x: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrix, of one or of each in a stack."""
    if not x.numel():
        return x
    a, b, c = FACTORS
    flip = x.shape[-2] > x.shape[-1]
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    x = x.mT if flip else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if flip else x


@dataclass(frozen=True)
class Part:
    """Of a matrix, or of a stack of them: what is held here, and how the rest lies."""

    tensor: Tensor
    shape: torch.Size
    cuts: tuple[tuple[int, Axis], ...]
    same: Axis | None

    @property
    def cost(self) -> int:
        return self.shape.numel() * min(self.shape[-2:])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are cut and copied over the same ranks travel together."""
        return *(id(axis.group) for _, axis in self.cuts), id(self.same)


def orthogonal(tensors: list[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Each piece of what its whole matrix becomes."""
    alike: dict[tuple[int, ...], list[tuple[int, Part]]] = {}
    for number, (tensor, piece) in enumerate(zip(tensors, pieces, strict=True)):
        cuts = tuple((dim, axis) for dim, axis in piece.cuts if dim >= len(piece.shape) - 2)
        part = Part(tensor, piece.shape, cuts, piece.same)
        alike.setdefault(part.ranks, []).append((number, part))
    found = list(tensors)
    for group in alike.values():
        for (number, _), done in zip(group, _by_owner([part for _, part in group]), strict=True):
            found[number] = done
    return found


def _by_owner(some: list[Part]) -> list[Tensor]:
    """Puts pieces together along their last cut, each on one rank of it, and so on for the cuts before; works; takes
    everything apart again."""
    if not some or not some[0].cuts:
        return _by_copies(some)
    axis = some[0].cuts[-1][1]
    dims = [part.cuts[-1][0] for part in some]
    sizes = [_sizes(part.shape[dim], part.cuts) for part, dim in zip(some, dims)]
    going = _shares([part.cost for part in some], axis.size)
    mine = going[axis.index]

    def shape_of(number: int, rank: int) -> list[int]:
        shape = list(some[number].tensor.shape)
        shape[dims[number]] = sizes[number][rank]
        return shape

    sent = [[some[number].tensor for number in numbers] for numbers in going]
    shapes = [[shape_of(number, rank) for number in mine] for rank in range(axis.size)]
    got = _travel(sent, shapes, axis, some[0].tensor)
    whole = [torch.cat(parts, dims[number]) for parts, number in zip(zip(*got), mine)]
    outer = [replace(some[n], tensor=tensor, cuts=some[n].cuts[:-1]) for n, tensor in zip(mine, whole, strict=True)]
    done = [tensor.split(sizes[n], dims[n]) for tensor, n in zip(_by_owner(outer), mine, strict=True)]
    back = [[parts[rank] for parts in done] for rank in range(axis.size)]
    shapes = [[shape_of(number, axis.index) for number in numbers] for numbers in going]
    return _in_order(going, _travel(back, shapes, axis, some[0].tensor))


def _by_copies(some: list[Part]) -> list[Tensor]:
    """Works on this rank's share of what all ranks of an axis have, and hands around what comes of it."""
    axis = some[0].same if some else None
    if axis is None:
        return [newton_schulz(part.tensor) for part in some]
    going = _shares([part.cost for part in some], axis.size)
    done = [newton_schulz(some[number].tensor) for number in going[axis.index]]
    shapes = [[list(some[number].tensor.shape) for number in numbers] for numbers in going]
    return _in_order(going, _travel([done] * axis.size, shapes, axis, some[0].tensor))


def _in_order(places: list[list[int]], found: list[list[Tensor]]) -> list[Tensor]:
    pairs = [pair for numbers, some in zip(places, found) for pair in zip(numbers, some, strict=True)]
    return [tensor for _, tensor in sorted(pairs, key=lambda pair: pair[0])]


def _travel(sent: list[list[Tensor]], shapes: list[list[list[int]]], axis: Axis, like: Tensor) -> list[list[Tensor]]:
    """Sends each rank its tensors; gives those from each, which are of the given shapes. `like`: of their type."""
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    there = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    here = [sum(map(math.prod, each)) for each in shapes]
    got = flat.new_empty(sum(here))
    all_to_all(got, flat, here, there, group=axis.group)
    return [
        [tensor.view(shape) for tensor, shape in zip(run.split([*map(math.prod, each)]), each, strict=True)]
        for run, each in zip(got.split(here), shapes, strict=True)
    ]


def _sizes(length: int, cuts: Sequence[tuple[int, Axis]]) -> list[int]:
    """How the last cut parts what those before it, along the same side, leave of a length."""
    *before, (dim, axis) = cuts
    for other, earlier in before:
        if other == dim:
            length = earlier.span(length)[1]
    most = -(-length // axis.size)
    return [max(0, min(most, length - rank * most)) for rank in range(axis.size)]


def _shares(costs: list[int], ranks: int) -> list[list[int]]:
    """What each rank works on: the costliest is given out first, to whom has least to do."""
    loads, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        rank = loads.index(min(loads))
        loads[rank] += costs[number]
        shares[rank].append(number)
    return shares
