"""Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for all else: `torch.optim.Muon` over pieces.

A matrix's averaged gradient is made orthogonal as a whole. Each matrix goes to one of the ranks that hold its pieces,
is made orthogonal there and goes back: work and memory are shared, nothing is done twice in a group. A stack of experts
is as many matrices; what is one weight (queries, keys and values in one) is one matrix, as PyTorch's would have it.
Steps have the length of AdamW's (PyTorch's `match_rms_adamw`), so one learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def orthogonal(parts: list[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Each piece of what its whole matrix becomes."""
    cuts = [[(dim, axis) for dim, axis in piece.cuts if dim >= len(piece.shape) - 2] for piece in pieces]
    alike: dict[tuple[int, ...], list[int]] = {}  # those that are cut over the same ranks travel together
    for number, own in enumerate(cuts):
        alike.setdefault(tuple(id(axis.group) for _, axis in own), []).append(number)
    found = list(parts)
    for numbers in alike.values():
        some = [(parts[n], pieces[n].shape, cuts[n]) for n in numbers]
        for number, done in zip(numbers, _by_owner(some, newton_schulz), strict=True):
            found[number] = done
    return found


def _by_owner(
    some: list[tuple[Tensor, torch.Size, list[tuple[int, Axis]]]], work: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Puts pieces together along their last cut, each on one rank of it, and so on for the cuts before; works; takes
    everything apart again."""
    if not some or not some[0][2]:
        return [work(part) for part, _, _ in some]
    axis = some[0][2][-1][1]
    dims = [cuts[-1][0] for _, _, cuts in some]
    sizes = [_sizes(shape[cuts[-1][0]], cuts) for _, shape, cuts in some]
    owners = _owners([shape.numel() * min(shape[-2:]) for _, shape, _ in some], axis.size)
    mine = [number for number, owner in enumerate(owners) if owner == axis.index]

    def shape_of(number: int, rank: int) -> list[int]:
        shape = list(some[number][0].shape)
        shape[dims[number]] = sizes[number][rank]
        return shape

    going = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(axis.size)]
    sent = [some[number][0] for numbers in going for number in numbers]
    there = [sum(some[number][0].numel() for number in numbers) for numbers in going]
    shapes = [shape_of(number, rank) for rank in range(axis.size) for number in mine]
    here = [sum(math.prod(shape_of(number, rank)) for number in mine) for rank in range(axis.size)]
    got = _travel(some[0][0], sent, shapes, there, here, axis)
    whole = [torch.cat(got[place :: len(mine)], dims[number]) for place, number in enumerate(mine)]

    outer = [(part, some[number][1], some[number][2][:-1]) for part, number in zip(whole, mine, strict=True)]
    done = [part.split(sizes[n], dims[n]) for part, n in zip(_by_owner(outer, work), mine, strict=True)]

    back = [parts[rank] for rank in range(axis.size) for parts in done]
    order = [number for numbers in going for number in numbers]
    returned = _travel(some[0][0], back, [list(some[number][0].shape) for number in order], here, there, axis)
    return [part for _, part in sorted(zip(order, returned), key=lambda pair: pair[0])]


def _travel(
    like: Tensor, sent: list[Tensor], shapes: list[list[int]], there: list[int], here: list[int], axis: Axis
) -> list[Tensor]:
    """Tensors of the given shapes, in the order of the ranks that they come from."""
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in sent)])
    got = flat.new_empty(sum(here))
    all_to_all(got, flat, here, there, group=axis.group)
    return [part.view(shape) for part, shape in zip(got.split([math.prod(s) for s in shapes]), shapes, strict=True)]


def _sizes(length: int, cuts: list[tuple[int, Axis]]) -> list[int]:
    """How the last cut parts what those before it, along the same side, leave of a length."""
    *before, (dim, axis) = cuts
    for other, earlier in before:
        if other == dim:
            length = earlier.span(length)[1]
    most = -(-length // axis.size)
    return [max(0, min(most, length - rank * most)) for rank in range(axis.size)]


def _owners(costs: list[int], ranks: int) -> list[int]:
    """Who works on each: the costliest first, to whom has least to do."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners
