"""Gradients that travel compressed, with feedback: what was lost in a step is added to the next (`gradient.compress`).

    fp16, bf16       rounded
    int8             127 steps up and down to the largest of each 1024 numbers
    onebit           the sign, and the mean size of each 64 numbers
    topk:0.01        the largest hundredth of each 256 numbers (3 of them), with its places
    powersgd:rank=4  a matrix as a product of two thin ones (Vogels et al. 2019, arXiv 1905.13727)

A unit of compression is what one rank sends another of one weight, so buckets and other weights change nothing. A sum
over `shard` is a reduce-scatter: units go to those who need them and are added up there, in the wide type. A sum over
`replicate` sends rounded numbers twice, to who adds them up and, rounded again, back; few numbers (topk, onebit) go to
everyone at once. With both axes only the sum over `replicate`, the far one, is compressed.

Not compressed, as they are small or only a part of a sum: weights of one dimension, weights that several tensor ranks
or both ends of a pipeline hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import all_reduce, rows_to_all
from shardwise.comm.meter import METER
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.parallel.mesh import Axis
from shardwise.random import key_of, normal_

# Numbers that share a scale, or of which the largest are sent. A weight has rows of very different sizes: signs have
# nothing but the scale to tell them by, and among all numbers the small ones would wait long. 256: a place is a byte.
BLOCK = {"int8": 1024, "onebit": 64, "topk": 256}
STEPS = 127.0


@dataclass(frozen=True)
class Way:
    """A text such as `topk:0.01`, understood."""

    kind: str
    share: float = 0.0
    rank: int = 0

    @classmethod
    def parse(cls, text: str) -> Way:
        """Of a text that the job has checked."""
        kind, _, more = text.partition(":")
        if kind == "topk":
            return cls(kind, share=float(more))
        return cls(kind, rank=int(more.removeprefix("rank=") or 4) if kind == "powersgd" else 0)

    @property
    def at_once(self) -> bool:
        """Whether a sum over replicas goes to everyone at once."""
        return self.kind in ("topk", "onebit")


def check(text: str, layout: Layout) -> None:
    """Raises for layouts in which gradients are partial sums before they travel."""
    for axis in ("context", "expert"):
        if text and getattr(layout, axis) > 1:
            raise LayoutError(
                f"gradient.compress beside {axis}={getattr(layout, axis)}: only sums over samples are compressed; "
                f"leave gradient.compress out or use {axis}=1."
            )


# Rows of numbers as bytes


def encode(way: Way, rows: Tensor) -> Tensor:
    """Rows (n, size) as bytes (n, as many for all)."""
    if way.kind in ("fp16", "bf16"):
        return rows.to(torch.float16 if way.kind == "fp16" else torch.bfloat16).view(torch.uint8)
    block = BLOCK[way.kind]
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))
    if way.kind == "topk":
        places = blocks.abs().topk(_kept(way), 2).indices
        values = blocks.gather(2, places).flatten(1)
        return torch.cat((values.view(torch.uint8), places.flatten(1).to(torch.uint8)), 1)
    if way.kind == "int8":
        scale = (blocks.abs().amax(2) / STEPS).float()
        steps = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).to(rows.dtype).unsqueeze(2)
        return torch.cat((scale.view(torch.uint8), steps.round().to(torch.int8).flatten(1).view(torch.uint8)), 1)
    scale = blocks.abs().mean(2).float()
    bits = (blocks >= 0).flatten(1).unflatten(1, (-1, 8)).to(torch.uint8)
    return torch.cat((scale.view(torch.uint8), (bits << _bit(bits.device)).sum(2, dtype=torch.uint8)), 1)


def decode(way: Way, sent: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Rows (n, `size`) from their bytes."""
    if way.kind in ("fp16", "bf16"):
        return _view(sent, torch.float16 if way.kind == "fp16" else torch.bfloat16).to(dtype)
    block = BLOCK[way.kind]
    count = -(-size // block)
    if way.kind == "topk":
        kept = count * _kept(way)
        values, places = (part.unflatten(1, (count, -1)) for part in (_view(sent[:, :-kept], dtype), sent[:, -kept:]))
        found = torch.zeros(sent.shape[0], count, block, dtype=dtype, device=sent.device)
        return found.scatter_(2, places.long(), values).flatten(1)[:, :size]
    scales = 4 * count
    scale = _view(sent[:, :scales], torch.float32).to(dtype).unsqueeze(2)
    if way.kind == "int8":
        blocks = _view(sent[:, scales:], torch.int8).to(dtype).unflatten(1, (-1, block))
    else:
        bits = (sent[:, scales:].unsqueeze(2) >> _bit(sent.device)) & 1
        blocks = (2.0 * bits.to(dtype) - 1.0).flatten(1).unflatten(1, (-1, block))
    return (blocks * scale).flatten(1)[:, :size]


def length(way: Way, size: int, dtype: torch.dtype) -> int:
    """Bytes of a row."""
    if way.kind not in BLOCK:
        return 2 * size
    block = BLOCK[way.kind]
    each = {"int8": 4 + block, "onebit": 4 + block // 8, "topk": _kept(way) * (dtype.itemsize + 1)}
    return -(-size // block) * each[way.kind]


def _kept(way: Way) -> int:
    return math.ceil(way.share * BLOCK["topk"])


def _bit(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _view(sent: Tensor, dtype: torch.dtype) -> Tensor:
    return sent.clone(memory_format=torch.contiguous_format).view(dtype)  # with strides of its own


# Sums


class Compressor:
    """The sums of one rank over one axis, and what they owe: `residual` by weight, and the thin matrices of
    powersgd."""

    def __init__(self, way: Way, seed: int):
        self.way, self.seed = way, seed
        self.residual: dict[str, Tensor] = {}
        self.thin: dict[str, Tensor] = {}

    def scatter(
        self, names: Sequence[str], rows: Sequence[Tensor], shapes: Sequence[torch.Size], axis: Axis
    ) -> list[Tensor]:  # fmt: skip
        """Of each weight's rows (ranks, size), which zeros may fill up, the sum of the row of this rank; `shapes`: of
        the weights."""
        METER.sent["whole"] += sum(one.nbytes for one in rows) * (axis.size - 1) // axis.size
        if self.way.kind == "powersgd":
            matrices = [one.reshape(-1, math.prod(shape[1:])) for one, shape in zip(rows, shapes, strict=True)]
            return [sums.view(axis.size, -1)[axis.index].clone() for sums in self._thin(names, matrices, axis)]
        sent = [self._with_feedback(*one) for one in zip(names, rows, map(math.prod, shapes), strict=True)]
        came = self._exchange(torch.cat(sent, 1), axis)
        return [part.sum(0) for part in self._parts(came, [one.shape[1] for one in rows], rows[0].dtype)]

    def everywhere(self, names: Sequence[str], values: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """The sum of each weight's numbers, in its shape, on every rank."""
        METER.sent["whole"] += 2 * sum(value.nbytes for value in values) * (axis.size - 1) // axis.size
        if self.way.kind == "powersgd":
            sums = self._thin(names, [value.view(value.shape[0], -1) for value in values], axis)
            return [found.view(value.shape) for found, value in zip(sums, values, strict=True)]
        rank_rows = 1 if self.way.at_once else axis.size
        rows = [_rows(value, rank_rows) for value in values]
        sizes, dtype = [one.shape[1] for one in rows], rows[0].dtype
        numbers = [value.numel() for value in values]
        sent = torch.cat([self._with_feedback(*one) for one in zip(names, rows, numbers, strict=True)], 1)
        if self.way.at_once:
            found = [part.sum(0) for part in self._parts(self._gathered(sent, axis), sizes, dtype)]
        else:
            own = [part.sum(0, keepdim=True) for part in self._parts(self._exchange(sent, axis), sizes, dtype)]
            again = torch.cat([encode(self.way, one) for one in own], 1)
            found = [part.flatten() for part in self._parts(self._gathered(again, axis), sizes, dtype)]
        return [one[: value.numel()].view(value.shape) for one, value in zip(found, values, strict=True)]

    def _with_feedback(self, name: str, rows: Tensor, numbers: int) -> Tensor:
        """Rows as they are sent; what their first `numbers` numbers lose is owed."""
        owed = self.residual.get(name)
        total = rows if owed is None else rows + _like(owed, rows)
        sent = encode(self.way, total)
        lost = total - decode(self.way, sent, rows.shape[1], rows.dtype)
        self.residual[name] = lost.flatten()[:numbers].nan_to_num_(0.0, 0.0, 0.0)  # of a step that is skipped
        return sent

    def _parts(self, came: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        lengths = [length(self.way, size, dtype) for size in sizes]
        parts = zip(came.split(lengths, 1), sizes, strict=True)
        return [decode(self.way, part, size, dtype) for part, size in parts]

    @staticmethod
    def _exchange(sent: Tensor, axis: Axis) -> Tensor:
        came = torch.empty_like(sent)
        METER.sent["data"] += sent.numel() * (axis.size - 1) // axis.size
        rows_to_all(came, sent, axis.group)
        return came

    @staticmethod
    def _gathered(sent: Tensor, axis: Axis) -> Tensor:
        came = sent.new_empty(axis.size, sent.shape[1])
        METER.sent["data"] += sent.numel() * (axis.size - 1)
        rows_to_all(came, sent.expand(axis.size, -1), axis.group)
        return came

    def _thin(self, names: Sequence[str], matrices: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """The summed matrices, each as a product of two thin ones."""
        totals = []
        for name, matrix in zip(names, matrices, strict=True):
            owed = self.residual.get(name)
            totals.append(matrix if owed is None else matrix + _like(owed, matrix))
        right = [self._start(name, total) for name, total in zip(names, totals, strict=True)]
        left = self._summed([total @ thin for total, thin in zip(totals, right, strict=True)], axis)
        left = [torch.linalg.qr(one).Q for one in left]
        own = [total.mT @ one for total, one in zip(totals, left, strict=True)]
        for name, total, one, thin in zip(names, totals, left, own, strict=True):
            self.residual[name] = (total - one @ thin.mT).nan_to_num_(0.0, 0.0, 0.0)
        right = self._summed(own, axis)
        self.thin.update((name, thin.nan_to_num(0.0, 0.0, 0.0)) for name, thin in zip(names, right, strict=True))
        return [one @ thin.mT for one, thin in zip(left, right, strict=True)]

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        thin = self.thin.get(name)
        size = (matrix.shape[1], min(self.way.rank, *matrix.shape))
        if thin is None or thin.shape != size:
            thin = matrix.new_empty(size)
            normal_(thin, key_of("powersgd", self.seed, name), torch.Size(size), (0, 0), 1.0)
        return thin

    @staticmethod
    def _summed(parts: list[Tensor], axis: Axis) -> list[Tensor]:
        flat = torch.cat([part.reshape(-1) for part in parts])
        moved = 2 * (axis.size - 1) * flat.numel() * flat.element_size() // axis.size
        METER.sent["data"] += moved
        all_reduce(flat, dist.ReduceOp.SUM, group=axis.group)
        found = flat.split([part.numel() for part in parts])
        return [one.view(part.shape) for one, part in zip(found, parts, strict=True)]


def _rows(values: Tensor, count: int) -> Tensor:
    """Numbers in `count` rows of one length, the last ones filled up with zeros."""
    flat = values.reshape(-1)
    size = -(-flat.numel() // count)
    return torch.nn.functional.pad(flat, (0, count * size - flat.numel())).view(count, size)


def _like(values: Tensor, rows: Tensor) -> Tensor:
    """Numbers in the shape of others, filled up with zeros."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, rows.numel() - flat.numel())).view(rows.shape)
