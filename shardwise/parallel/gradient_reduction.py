"""How gradients are reduced over data-parallel ranks: the `[gradient]` section of a job.

Gradients are summed by PyTorch, or compressed with error feedback (`gradient.compress`): the error of a step is added
to the next. docs/explanation/compression.md has the encodings, what is sent over each axis, and what is never
compressed. Each weight is compressed separately for each destination rank, so the result does not depend on bucketing.
Where fp16, bf16 and int8 are reduce-scattered over `replicate`, the sums are compressed again and all-gathered.
PowerSGD (Vogels et al. 2019, arXiv 1905.13727) all-reduces its two factors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.collectives import Axis, StepTimer, all_reduce_coalesced, all_to_all_rows
from shardwise.errors import LayoutError
from shardwise.job import GradientConfig
from shardwise.layout import Layout
from shardwise.random import hash_key, normal_


def check(gradient: GradientConfig, layout: Layout) -> None:
    """Raises LayoutError if the layout cannot use the compression of the job."""
    for axis in ("context", "expert"):  # gradients are then partial sums before the data-parallel reduction
        if gradient.compress and getattr(layout, axis) > 1:
            rule = f"gradient.compress with {axis}={getattr(layout, axis)}: only data-parallel sums can be compressed"
            raise LayoutError(f"{rule}; leave gradient.compress out or use {axis}=1.")


# Elements that share a scale, or among which topk selects. Small, because the rows of a weight differ in scale: a sign
# carries no magnitude of its own, and a global topk would starve small rows. 256: an index fits in a byte.
BLOCK_SIZES = {"int8": 1024, "onebit": 64, "topk": 256}
INT8_MAX = 127.0


@dataclass(frozen=True)
class CompressionSpec:
    """A parsed `gradient.compress`, such as `topk:0.01`."""

    kind: str
    ratio: float = 0.0
    rank: int = 0

    @classmethod
    def parse(cls, text: str) -> "CompressionSpec":
        """Parses a text that the job has validated."""
        kind, _, argument = text.partition(":")
        if kind == "topk":
            return cls(kind, ratio=float(argument))
        return cls(kind, rank=int(argument.removeprefix("rank=") or 4) if kind == "powersgd" else 0)

    @property
    def uses_all_gather(self) -> bool:
        """Whether gradients are all-gathered over replicas and summed on every rank."""
        return self.kind in ("topk", "onebit")


def encode(spec: CompressionSpec, rows: Tensor) -> Tensor:
    """Returns rows (n, size) as bytes (n, `encoded_bytes`)."""
    if spec.kind in ("fp16", "bf16"):
        return rows.to(torch.float16 if spec.kind == "fp16" else torch.bfloat16).view(torch.uint8)
    block = BLOCK_SIZES[spec.kind]
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))
    if spec.kind == "topk":
        indices = blocks.abs().topk(_topk_count(spec), 2).indices
        values = blocks.gather(2, indices).flatten(1)
        return torch.cat((values.view(torch.uint8), indices.flatten(1).to(torch.uint8)), 1)
    if spec.kind == "int8":
        scale = (blocks.abs().amax(2) / INT8_MAX).float()
        quantized = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).to(rows.dtype).unsqueeze(2)
        return torch.cat((scale.view(torch.uint8), quantized.round().to(torch.int8).flatten(1).view(torch.uint8)), 1)
    scale = blocks.abs().mean(2).float()
    bits = (blocks >= 0).flatten(1).unflatten(1, (-1, 8)).to(torch.uint8)
    return torch.cat((scale.view(torch.uint8), (bits << _bit_shifts(bits.device)).sum(2, dtype=torch.uint8)), 1)


def decode(spec: CompressionSpec, encoded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns rows (n, size) from their bytes."""
    if spec.kind in ("fp16", "bf16"):
        return _contiguous_view(encoded, torch.float16 if spec.kind == "fp16" else torch.bfloat16).to(dtype)
    block = BLOCK_SIZES[spec.kind]
    count = -(-size // block)
    if spec.kind == "topk":
        index_bytes = count * _topk_count(spec)
        values = _contiguous_view(encoded[:, :-index_bytes], dtype).unflatten(1, (count, -1))
        indices = encoded[:, -index_bytes:].unflatten(1, (count, -1))
        dense = torch.zeros(encoded.shape[0], count, block, dtype=dtype, device=encoded.device)
        return dense.scatter_(2, indices.long(), values).flatten(1)[:, :size]
    scale_bytes = 4 * count
    scale = _contiguous_view(encoded[:, :scale_bytes], torch.float32).to(dtype).unsqueeze(2)
    if spec.kind == "int8":
        blocks = _contiguous_view(encoded[:, scale_bytes:], torch.int8).to(dtype).unflatten(1, (-1, block))
    else:
        bits = (encoded[:, scale_bytes:].unsqueeze(2) >> _bit_shifts(encoded.device)) & 1
        blocks = (2.0 * bits.to(dtype) - 1.0).flatten(1).unflatten(1, (-1, block))
    return (blocks * scale).flatten(1)[:, :size]


def encoded_bytes(spec: CompressionSpec, size: int, dtype: torch.dtype) -> int:
    """Returns the encoded bytes of a row of `size` elements."""
    if spec.kind not in BLOCK_SIZES:
        return 2 * size
    block = BLOCK_SIZES[spec.kind]
    block_bytes = {"int8": 4 + block, "onebit": 4 + block // 8, "topk": _topk_count(spec) * (dtype.itemsize + 1)}
    return -(-size // block) * block_bytes[spec.kind]


def _topk_count(spec: CompressionSpec) -> int:
    return math.ceil(spec.ratio * BLOCK_SIZES["topk"])


def _bit_shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _contiguous_view(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    return encoded.clone(memory_format=torch.contiguous_format).view(dtype)  # `view(dtype)` needs contiguous rows


class Compressor:
    """Compressed collectives of one rank, with their state: the residual and PowerSGD's Q matrix of each weight."""

    def __init__(self, spec: CompressionSpec, seed: int, timer: StepTimer):
        self.spec, self.seed, self.timer = spec, seed, timer
        self.residual: dict[str, Tensor] = {}
        self.q_matrices: dict[str, Tensor] = {}

    def reduce_scatter(self, names: Sequence[str], rows: Sequence[Tensor], shapes: Sequence[torch.Size],
                       axis: Axis) -> list[Tensor]:  # fmt: skip
        """Returns this rank's row of each weight, summed over ranks. `rows` are (ranks, size), zero-padded."""
        self.timer.bytes_sent["whole"] += sum(row.nbytes for row in rows) * (axis.size - 1) // axis.size
        if self.spec.kind == "powersgd":
            matrices = [row.reshape(-1, math.prod(shape[1:])) for row, shape in zip(rows, shapes, strict=True)]
            return [sums.view(axis.size, -1)[axis.index].clone() for sums in self._powersgd(names, matrices, axis)]
        encoded = [self._encode_with_feedback(*args) for args in zip(names, rows, map(math.prod, shapes), strict=True)]
        received = self._all_to_all(torch.cat(encoded, 1), axis)
        return [part.sum(0) for part in self._decode_parts(received, [row.shape[1] for row in rows], rows[0].dtype)]

    def all_reduce(self, names: Sequence[str], values: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """Returns the sum of each gradient over the axis, on every rank."""
        self.timer.bytes_sent["whole"] += 2 * sum(value.nbytes for value in values) * (axis.size - 1) // axis.size
        if self.spec.kind == "powersgd":
            sums = self._powersgd(names, [value.view(value.shape[0], -1) for value in values], axis)
            return [totals.view(value.shape) for totals, value in zip(sums, values, strict=True)]
        rank_rows = 1 if self.spec.uses_all_gather else axis.size
        numels, dtype = [value.numel() for value in values], values[0].dtype
        sizes = [-(-numel // rank_rows) for numel in numels]
        rows = [flatten_and_pad(v, rank_rows * n).view(rank_rows, n) for v, n in zip(values, sizes, strict=True)]
        encoded = torch.cat([self._encode_with_feedback(*args) for args in zip(names, rows, numels, strict=True)], 1)
        if self.spec.uses_all_gather:
            totals = [part.sum(0) for part in self._decode_parts(self._all_gather(encoded, axis), sizes, dtype)]
        else:
            parts = self._decode_parts(self._all_to_all(encoded, axis), sizes, dtype)
            reencoded = torch.cat([encode(self.spec, part.sum(0, keepdim=True)) for part in parts], 1)
            totals = [part.flatten() for part in self._decode_parts(self._all_gather(reencoded, axis), sizes, dtype)]
        return [total[: value.numel()].view(value.shape) for total, value in zip(totals, values, strict=True)]

    def _add_residual(self, name: str, rows: Tensor) -> Tensor:
        residual = self.residual.get(name)
        return rows if residual is None else rows + flatten_and_pad(residual, rows.numel()).view(rows.shape)

    def _encode_with_feedback(self, name: str, rows: Tensor, numel: int) -> Tensor:
        """Encodes rows plus the residual; keeps the error of the first `numel` elements as the new residual."""
        total = self._add_residual(name, rows)
        encoded = encode(self.spec, total)
        error = total - decode(self.spec, encoded, rows.shape[1], rows.dtype)
        # A NaN in a skipped step must not persist.
        self.residual[name] = error.flatten()[:numel].nan_to_num_(0.0, 0.0, 0.0)
        return encoded

    def _decode_parts(self, received: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        lengths = [encoded_bytes(self.spec, size, dtype) for size in sizes]
        return [decode(self.spec, *part, dtype) for part in zip(received.split(lengths, 1), sizes, strict=True)]

    def _all_to_all(self, encoded: Tensor, axis: Axis) -> Tensor:
        received = encoded.new_empty(encoded.shape)
        self.timer.bytes_sent["data"] += encoded.numel() * (axis.size - 1) // axis.size
        all_to_all_rows(received, encoded, axis)
        return received

    def _all_gather(self, encoded: Tensor, axis: Axis) -> Tensor:
        return self._all_to_all(encoded.expand(axis.size, -1), axis)

    def _powersgd(self, names: Sequence[str], matrices: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """Returns the low-rank sums P Qᵀ of the matrices over the axis."""
        totals = [self._add_residual(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        qs = [self._initial_q(name, total) for name, total in zip(names, totals, strict=True)]
        ps = self._all_reduce([total @ q for total, q in zip(totals, qs, strict=True)], axis)
        ps = [torch.linalg.qr(p).Q for p in ps]
        local_qs = [total.mT @ p for total, p in zip(totals, ps, strict=True)]
        for name, total, p, q in zip(names, totals, ps, local_qs, strict=True):
            self.residual[name] = (total - p @ q.mT).nan_to_num_(0.0, 0.0, 0.0)
        qs = self._all_reduce(local_qs, axis)
        self.q_matrices.update((name, q.nan_to_num(0.0, 0.0, 0.0)) for name, q in zip(names, qs, strict=True))
        return [p @ q.mT for p, q in zip(ps, qs, strict=True)]

    def _initial_q(self, name: str, matrix: Tensor) -> Tensor:
        q = self.q_matrices.get(name)
        size = (matrix.shape[1], min(self.spec.rank, *matrix.shape))
        if q is None or q.shape != size:
            q = matrix.new_empty(size)
            normal_(q, hash_key("powersgd", self.seed, name), torch.Size(size), (0, 0), 1.0)
        return q

    def _all_reduce(self, parts: list[Tensor], axis: Axis) -> list[Tensor]:
        """Sums the parts over the axis, in place."""
        self.timer.bytes_sent["data"] += 2 * (axis.size - 1) * sum(part.nbytes for part in parts) // axis.size
        all_reduce_coalesced(parts, axis)
        return parts


def flatten_and_pad(tensor: Tensor, size: int) -> Tensor:
    """Returns the elements as a vector, zero-padded to `size` elements."""
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))
