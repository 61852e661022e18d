"""Compressed sums of gradients as one process would write them: the ranks one after the other, in plain numbers.

Knows from `shardwise/parallel/compress.py` only what a unit is: of a weight that a tensor rank holds, the rows that one
shard rank gets; or, where replicas sum, the numbers that one of them adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.models.chain import Chain
from shardwise.random import key_of, normal_

Unit = Callable[[Tensor], Tensor]


class Sums:
    """The sums of a run, with what is owed."""

    def __init__(self, job: Job, layout: Layout, chain: Chain):
        self.layout, self.rules, self.seed = layout, chain.rules, job.seed
        kind, _, more = job.gradient.compress.partition(":")
        self.rank = int(more.removeprefix("rank=") or 4) if kind == "powersgd" else 0
        self.at_once = kind in ("topk", "onebit")
        self.unit: Unit = {
            "fp16": lambda x: x.half().to(x.dtype), "bf16": lambda x: x.bfloat16().to(x.dtype), "int8": eighths,
            "onebit": signs, "topk": lambda x: largest(x, float(more)), "powersgd": lambda x: x,
        }[kind]  # fmt: skip
        self.owed: dict[tuple[str, int, int, int], Tensor] = {}
        self.thin: dict[tuple[str, int, int], Tensor] = {}

    def __call__(self, name: str, gradients: list[Tensor]) -> Tensor:
        """The sum of a weight's gradients, one of each data rank."""
        shape, total = gradients[0].shape, torch.zeros_like(gradients[0])
        cut = self.rules.cut_of(name)
        tensor = self.layout.tensor
        ends = self.layout.pipeline > 1 and name in self.rules.tied
        partial = tensor > 1 and (
            cut is None or (cut.uneven is not None and shape[cut.dim] // cut.unit % tensor != 0)
        )  # fmt: skip
        if len(shape) < 2 or ends or partial:
            return torch.stack(gradients).sum(0)
        dim = cut.dim if cut is not None else 0
        pieces = zip(*(gradient.chunk(tensor, dim) for gradient in [*gradients, total]), strict=True)
        for index, (*parts, into) in enumerate(pieces):
            into.copy_(self._piece(name, index, [part.contiguous() for part in parts]))
        return total

    def _piece(self, name: str, index: int, parts: list[Tensor]) -> Tensor:
        shard, replicate = self.layout.shard, self.layout.replicate
        if replicate == 1:
            if self.rank:
                return self._low_rank(name, index, 0, parts)
            size = -(-parts[0].shape[0] // shard) * parts[0][0].numel()
            return torch.cat([self._sum(name, index, number, rows, size)
                              for number, rows in enumerate(_rows(parts, shard))])  # fmt: skip
        near = [torch.stack(parts[n * shard : (n + 1) * shard]).sum(0) for n in range(replicate)]
        return torch.cat([self._far(name, index, number, list(rows)) for number, rows in enumerate(_rows(near, shard))])

    def _far(self, name: str, index: int, number: int, rows: list[Tensor]) -> Tensor:
        """The sum over replicas of the rows that shard rank `number` holds."""
        if not rows[0].numel():
            return rows[0]
        if self.rank:
            return self._low_rank(name, index, number, rows)
        size = rows[0].numel() if self.at_once else -(-rows[0].numel() // len(rows))
        sums = []
        for place, units in enumerate(zip(*(row.flatten().split(size) for row in rows), strict=True)):
            found = self._sum(name, index, 1000 * number + place, units, size)
            sums.append(found if self.at_once else self._through(found, size))
        return torch.cat(sums).view(rows[0].shape)

    def _through(self, x: Tensor, size: int) -> Tensor:
        """A unit as it arrives; zeros fill it up."""
        filled = torch.nn.functional.pad(x.flatten(), (0, size - x.numel()))
        return self.unit(filled)[: x.numel()].view(x.shape)

    def _sum(self, name: str, index: int, number: int, units: tuple[Tensor, ...], size: int) -> Tensor:
        total = torch.zeros_like(units[0])
        for rank, one in enumerate(units):
            due = one + self.owed.get((name, index, number, rank), torch.zeros_like(one))
            sent = self._through(due, size)
            self.owed[name, index, number, rank] = due - sent
            total += sent
        return total

    def _low_rank(self, name: str, index: int, number: int, parts: list[Tensor]) -> Tensor:
        """As Vogels et al. write it: one turn of power iteration, from where the last one ended."""
        height, width = parts[0].shape[0], parts[0].flatten(1).shape[1]
        due = [part.flatten(1) + self.owed.get((name, index, number, rank), torch.zeros(height, width))
               for rank, part in enumerate(parts)]  # fmt: skip
        rows = -(-height // self.layout.shard) * (self.layout.shard if self.layout.replicate == 1 else 1)
        size = torch.Size((width, min(self.rank, rows, width)))
        if (name, index, number) not in self.thin:
            self.thin[name, index, number] = torch.empty(size, dtype=parts[0].dtype)
            normal_(self.thin[name, index, number], key_of("powersgd", self.seed, name), size, (0, 0), 1.0)
        thin = self.thin[name, index, number]
        tall = torch.stack([one @ thin for one in due]).sum(0)
        tall = torch.linalg.qr(torch.nn.functional.pad(tall, (0, 0, 0, max(0, size[1] - height))))[0][:height]
        wide = [one.mT @ tall for one in due]
        for rank, (one, own) in enumerate(zip(due, wide, strict=True)):
            self.owed[name, index, number, rank] = one - tall @ own.mT
        self.thin[name, index, number] = torch.stack(wide).sum(0)
        return (tall @ self.thin[name, index, number].mT).view(parts[0].shape)


def _rows(parts: list[Tensor], ranks: int) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each rank, of all parts; some may be none."""
    size = -(-parts[0].shape[0] // ranks)
    for rank in range(ranks):
        yield tuple(part[rank * size : (rank + 1) * size] for part in parts)


def eighths(x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    for first in range(0, len(x), 1024):
        block = x[first : first + 1024]
        scale = (block.abs().max() / 127).float().to(x.dtype)
        if scale > 0:
            found[first : first + 1024] = (block / scale).round() * scale
    return found


def signs(x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    for first in range(0, len(x), 64):
        block = x[first : first + 64]
        size = (block.abs().sum() / 64).float().to(x.dtype)  # zeros fill up the last block
        found[first : first + 64] = torch.where(block >= 0, size, -size)
    return found


def largest(x: Tensor, share: float) -> Tensor:
    found = torch.zeros_like(x)
    for first in range(0, len(x), 256):
        order = x[first : first + 256].abs().argsort(descending=True, stable=True)
        for place in first + order[: math.ceil(share * 256)]:
            found[place] = x[place]
    return found
