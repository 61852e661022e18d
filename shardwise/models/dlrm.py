"""DLRM (Naumov et al. 2019, arXiv:1906.00091): numbers through a bottom of products, categories as rows of tables; each
pair of vectors meets in a dot product; what they give and the numbers' own vector go through a top of products to one
logit: the click.

`Dense` is all but the tables, written for one device. A sample's rows come in as one summed vector a table.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kinds import DLRM
from shardwise.models.chain import Chain, Init, Rules


class Products(nn.Module):
    """Linear layers with a ReLU after each; after the last one where `ends`."""

    def __init__(self, sizes: list[int], ends: bool):
        super().__init__()
        self.sizes, self.ends = sizes, ends
        self.layers = nn.ModuleList(nn.Linear(size, after) for size, after in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if self.ends or number < len(self.layers):
                x = torch.relu(x)
        return x


class Meeting(torch.autograd.Function):
    """The dot product of each pair of a sample's vectors, (B, n, width) to (B, pairs).

    With a gradient of its own, which is one product. PyTorch's would multiply by a transposed batch, which on ARM can
    take a hundred times as long (2048 of 27 x 64 on one core: 2 to 6 s; with the transpose written out first 0.05 s).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return (x @ x.transpose(1, 2).contiguous()).flatten(1).index_select(1, _pairs(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        count = x.shape[1]
        square = gradient.new_zeros(x.shape[0], count * count).index_copy_(1, _pairs(x), gradient)
        square = square.view(-1, count, count)
        product: Tensor = (square + square.transpose(1, 2)) @ x
        return product


def _pairs(x: Tensor) -> Tensor:
    """Below the diagonal, as places in a flat square."""
    first, second = torch.tril_indices(x.shape[1], x.shape[1], -1, device=x.device)
    return first * x.shape[1] + second


class Dense(Chain):
    """Numbers (B, features) and vectors (B, tables, width) in; out come the logits (B,) or, with labels, their summed
    binary cross-entropy. A label below zero does not count."""

    bottom: Products
    top: Products

    def __init__(self, model: DLRM):
        met = model.tables * (model.tables + 1) // 2  # pairs of the tables' vectors and the numbers'
        bottom = Products([model.features, *model.bottom, model.width], ends=True)
        top = Products([model.width + met, *model.top, 1], ends=False)
        starts = [
            (f"{part}.layers.{number}.weight", Init("normal", math.sqrt(2.0 / sum(pair))))
            for part, products in (("bottom", bottom), ("top", top))
            for number, pair in enumerate(pairwise(products.sizes))
        ]
        rules = Rules(cuts=(), modules=(), init=(*starts, ("*.bias", Init("zeros"))), watched=("bottom", "top"))
        super().__init__([("bottom", bottom), ("top", top)], rules)

    def forward(self, numbers: Tensor, vectors: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        own = self.bottom(numbers)
        everything = torch.cat((own[:, None], vectors.to(own.dtype)), dim=1)
        logits: Tensor = self.top(torch.cat((own, Meeting.apply(everything)), dim=1))[:, 0]
        if labels is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.binary_cross_entropy_with_logits(wide, labels.clamp(min=0).to(wide.dtype), reduction="none")
        return (each * (labels >= 0)).sum()


def dlrm(model: DLRM) -> Dense:
    return Dense(model)


def table_std(rows: int) -> float:
    """Of a table's initial numbers: that of Naumov's uniform ones, between -1 and 1 over the root of the rows."""
    return 1.0 / math.sqrt(3.0 * rows)


def cost(model: DLRM) -> float:
    """Floating-point operations of a sample's forward."""
    met = model.tables * (model.tables + 1) // 2
    bottom = [model.features, *model.bottom, model.width]
    top = [model.width + met, *model.top, 1]
    products = sum(2 * size * after for sizes in (bottom, top) for size, after in pairwise(sizes))
    return products + 2.0 * model.width * (model.tables + 1) ** 2
