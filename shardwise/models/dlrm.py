"""DLRM (Naumov et al. 2019, arXiv:1906.00091): numbers through a bottom of products, categories as rows of tables; each
pair of vectors meets in a dot product; what they give and the numbers' own vector go through a top of products to one
logit: the click.

`Dense` is all but the tables, written for one device. A sample's rows come in as one summed vector a table.
"""

from __future__ import annotations

import math
from itertools import pairwise

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
        dots = everything @ everything.transpose(1, 2)
        first, second = torch.tril_indices(dots.shape[1], dots.shape[1], -1, device=dots.device)
        logits: Tensor = self.top(torch.cat((own, dots[:, first, second]), dim=1))[:, 0]
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
