"""Checksums of tensors, and which ranks must have the same ones.

A checksum is the sum of a tensor's raw bits as 64-bit integers that wrap around: exact, on the tensor's own device, and
different after any single flipped bit. Of all that a rank keeps from one step to the next there is one each, in a fixed
order; those that other ranks have copies of are mixed to one number for each kind of copies, which is what travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout import AXES, Layout
from shardwise.parallel.data import Whole
from shardwise.parallel.engine import Engine
from shardwise.parallel.holding import Holding

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = ("copies", "experts", "whole", "tensor", "ends")
READ = "read"  # the kind of what all ranks should have that read different samples
"""Of copies: of pieces; of pieces of experts that are cut; of weights that are kept whole though their updates are
shared; of what the tensor axis does not cut; of weights that the first and the last stage share."""


def checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    whole = flat.numel() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if whole else INTEGER[flat.element_size()]).sum()


@dataclass(frozen=True)
class Kept:
    """One tensor of this rank."""

    label: str
    tensor: Tensor
    kinds: frozenset[str] = frozenset()


def sums_of(kept: Sequence[Kept], device: torch.device) -> Tensor:
    found = [checksum(one.tensor).to(device) for one in kept]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


class Books:
    """What there is on this rank, with its kinds of copies."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer):
        self.engine, self.optimizer = engine, optimizer
        tied = [one.name for one in engine.tied] if engine.mesh.ends.size > 1 else []
        self.kinds = [self._kinds(holding, tied) for _, holding in engine.data.pairs]
        self.whole = isinstance(engine.data, Whole)
        """Whether a weight is kept whole, and a holding is the part of it that is updated here."""

    def _kinds(self, holding: Holding, tied: list[str]) -> frozenset[str]:
        found = {"experts" if holding.expert else "copies"} if holding.same is not None else set()
        if holding.tensor_dim is None and self.engine.mesh["tensor"].size > 1:
            found.add("tensor")
        if tied.count(holding.name) == 1:  # in a V both are here
            found.add("ends")
        return frozenset(found)

    def weights(self) -> list[Kept]:
        """What modules compute with, and the pieces that are updated where these are tensors of their own. Tables in
        host memory are not among them: they are too large to be read in every step."""
        found = []
        shared = self.whole and self.engine.mesh["shared"].size > 1
        for (weight, holding), kinds in zip(self.engine.data.pairs, self.kinds, strict=True):
            if holding.rounded is not None:
                found.append(Kept(f"the rounded weight {holding.name}", holding.rounded))
            if shared and not holding.expert:
                kinds = kinds - {"copies"} | {"whole"}
            found.append(Kept(f"the weight {holding.name}", weight if self.whole else holding.tensor, kinds))
        return found

    def states(self) -> list[Kept]:
        """Those of the optimizer. Counts of steps, which have one number each, are looked at together, last."""
        found, numbers = [], list[Tensor]()
        for (_, holding), kinds in zip(self.engine.data.pairs, self.kinds, strict=True):
            for key, value in self.optimizer.state.get(holding.tensor, {}).items():
                if value.dim():
                    found.append(Kept(f"the state {key} of {holding.name}", value, kinds))
                else:
                    numbers.append(value)
        return [*found, Kept("the optimizer's counts of steps", torch.stack(numbers))] if numbers else found

    def gradients(self) -> list[Kept]:
        """Sums, of weights that other ranks hold too."""
        pairs = zip(self.engine.data.pairs, self.kinds, strict=True)
        return [Kept(f"the gradient of {one.name}", one.grad, kinds) for (_, one), kinds in pairs if kinds]


def mixer(kinds: Sequence[frozenset[str]]) -> Tensor:
    """For each kind of copies a factor for each checksum; the sum of the products stands for all of the kind."""
    factors = torch.zeros(len(KINDS), len(kinds), dtype=torch.int64)
    for row, kind in enumerate(KINDS):
        members = [number for number, own in enumerate(kinds) if kind in own]
        for place, number in enumerate(members):
            factors[row, number] = (0x9E3779B97F4A7C15 * (2 * place + 1) % 2**64) - 2**63 | 1
    return factors


def firsts(layout: Layout, apart: bool) -> Tensor:
    """For each rank the first one that should have the same, by kind of copies, and twice of those that read; a rank
    without others is its own."""
    grid = torch.arange(layout.world).reshape([getattr(layout, axis) for axis in AXES])
    replicate = [] if apart else ["replicate"]
    over = {
        "copies": [*replicate, *(["context"] if layout.shard == 1 else [])], "experts": replicate,
        "whole": [*replicate, "shard", "context"], "tensor": ["tensor"], READ: [*replicate, "shard"],
    }  # fmt: skip
    found = []
    for kind in (*KINDS, READ, READ):
        first = grid.clone()
        for axis in over.get(kind, []):
            first = first.narrow(AXES.index(axis), 0, 1).expand_as(grid)
        if kind == "ends":
            first[-1] = first[0]
        found.append(first.reshape(-1))
    return torch.stack(found, 1)
