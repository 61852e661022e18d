"""Frozen weights in 8 or 4 bits beside adapters (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

A row of a weight is cut into blocks of 64 columns. Each value is rounded to one of 256 or 16 levels between plus and
minus the largest of its block; NF4's levels are the quantiles of a normal distribution (appendix E of the paper).
Blocks begin at columns of the whole weight, so a shard has the values of its part of it, whatever the layout.

`init_slice` rounds, so every model of a job has the same weights: references, exports, evaluation. Ranks that hold a
layer's weight whole, or its shard of the tensor axis, also keep it as codes, and decode it in forward and backward;
FSDP shards the rounded values."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.layers import subclass

BLOCK = 64
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FROZEN_BUFFERS = ("weight_codes", "weight_scales", "weight_levels")  # of a layer


def _levels(kind: str, device: torch.device) -> Tensor:
    if kind == "nf4":
        return torch.tensor(NF4_LEVELS, device=device)
    return torch.arange(-127, 128, dtype=torch.float32, device=device) / 127


def encode_blocks(matrix: Tensor, levels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns codes, the numbers of the levels nearest to each value relative to the largest of its block of a row
    (uint8), and the largest values of the blocks."""
    rows, columns = matrix.shape
    padded = F.pad(matrix.float(), (0, -columns % block)).view(rows, -1, block)
    scales = padded.abs().amax(2)
    relative = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).flatten(1)[:, :columns]
    codes = torch.bucketize(relative.contiguous(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return codes.to(torch.uint8), scales


def decode_blocks(codes: Tensor, scales: Tensor, levels: Tensor, block: int, offset: int = 0) -> Tensor:
    """Returns the values of codes, in float32; the first of a row is the `offset`th of its block."""
    return levels[codes.int()] * scales.repeat_interleave(block, 1)[:, offset : offset + codes.shape[1]]


def decode(codes: Tensor, scales: Tensor, levels: Tensor, columns: int, offset: int = 0) -> Tensor:
    """Returns the values of codes, in float32; those of NF4 are two in a byte if there are fewer than `columns`."""
    if codes.shape[1] < columns:
        codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, :columns]
    return decode_blocks(codes, scales, levels, BLOCK, offset)


def round_weight(weight: Tensor, kind: str) -> Tensor:
    """Returns the values that a weight has after rounding. Rounding them again changes nothing."""
    levels = _levels(kind, weight.device)
    return decode(*encode_blocks(weight, levels, BLOCK), levels, weight.shape[1])


@torch.no_grad()
def round_quantized(module: nn.Module, plan: Any) -> None:
    """Rounds the weights of a whole module that a sharding plan names."""
    for name in plan.quantized:
        weight = module.get_parameter(name)
        weight.copy_(round_weight(weight, plan.quantize))


def whole_blocks(column: int, columns: int, total: int) -> tuple[int, int]:
    """Returns the first and the last (exclusive) column of the blocks that some columns of `total` are in."""
    return column // BLOCK * BLOCK, min(total, -(-(column + columns) // BLOCK) * BLOCK)


def round_slice(fill: Callable[[Tensor, tuple[int, ...]], None], kind: str, out: Tensor, columns: int, at: Any) -> None:
    """Fills `out`, the slice at `at` of a weight with so many columns, with rounded values of what `fill` writes."""
    first, last = whole_blocks(at[1], out.shape[1], columns)
    blocks = torch.empty(out.shape[0], last - first, dtype=torch.float32, device=out.device)
    fill(blocks, (at[0], first))
    out.copy_(round_weight(blocks, kind)[:, at[1] - first :][:, : out.shape[1]])


class FrozenMatmul(torch.autograd.Function):
    """`x @ weight.T`; keeps only codes for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, levels: Tensor, columns: int, at: int) -> Tensor:
        ctx.save_for_backward(codes, scales, levels)
        ctx.place = columns, at
        return F.linear(x, decode(codes, scales, levels, columns, at).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = decode(*ctx.saved_tensors, *ctx.place).to(grads[0].dtype)
        return grads[0] @ weight, None, None, None, None, None


def drop_weight(module: Any, kind: str, offset: int) -> None:
    """Makes a linear layer on the meta device keep its weight as codes; its first column is a block's `offset`th."""
    rows, columns = module._parameters.pop("weight").shape
    codes = torch.empty(rows, columns if kind == "int8" else -(-columns // 2), dtype=torch.uint8, device="meta")
    scales = torch.empty(rows, -(-(offset + columns) // BLOCK), dtype=torch.float32, device="meta")
    levels = _levels(kind, torch.device("meta"))  # a buffer too: none is made while a CUDA graph is captured
    for name, buffer in zip(FROZEN_BUFFERS, (codes, scales, levels)):
        module.register_buffer(name, buffer, persistent=False)
    module.__dict__["frozen_form"] = kind, columns, offset
    module.__class__ = subclass(type(module), forward=_forward)  # type: ignore[arg-type]


@torch.no_grad()
def store_weight(module: Any, weight: Tensor) -> None:
    """Stores a weight whose first column begins a block, up to `frozen_form`'s offset beyond its own first column."""
    kind, columns, offset = module.frozen_form
    levels = _levels(kind, weight.device)
    codes, scales = encode_blocks(weight, levels, BLOCK)
    codes = codes[:, offset : offset + columns]
    if kind == "nf4":
        low, high = F.pad(codes, (0, columns % 2)).unflatten(1, (-1, 2)).unbind(2)
        codes = low | high << 4
    module.weight_codes.copy_(codes)
    module.weight_scales.copy_(scales)
    module.weight_levels.copy_(levels)


def _forward(module: Any, x: Tensor) -> Tensor:
    x = x if getattr(module, "scale", 1.0) == 1.0 else x * module.scale
    place = module.frozen_form[1:]
    y = FrozenMatmul.apply(x, module.weight_codes, module.weight_scales, module.weight_levels, *place)
    return y if module.bias is None else y + module.bias  # type: ignore[no-any-return]
