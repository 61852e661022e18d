"""DLRM (Naumov et al. 2019, arXiv:1906.00091), written for one device, without its embedding tables.

The bottom MLP embeds the dense features. The dot products of all pairs of embeddings (the dense one and one per table,
summed over its lookups) and the dense embedding go through the top MLP to one logit, the click."""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.chain import Chain
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.models.sharding import InitSpec, ShardingPlan


class MLP(nn.Module):
    """Linear layers with ReLU; after the last one only if `final_relu`."""

    def __init__(self, sizes: list[int], final_relu: bool):
        super().__init__()
        self.final_relu = final_relu
        self.layers = nn.ModuleList(nn.Linear(size, out_size) for size, out_size in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if self.final_relu or number < len(self.layers):
                x = torch.relu(x)
        return x


class DotInteraction(torch.autograd.Function):
    """Dot products of all pairs of a sample's vectors: (B, n, width) to (B, pairs).

    Its backward is a single matmul. PyTorch's multiplies by a transposed batch, which can be 100 times slower on ARM
    (2048 of 27 x 64 on one core: 2 to 6 s; 0.05 s with a contiguous transpose)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return (x @ x.transpose(1, 2).contiguous()).flatten(1).index_select(1, _lower_triangle(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        count = x.shape[1]
        square = gradient.new_zeros(x.shape[0], count * count).index_copy_(1, _lower_triangle(x), gradient)
        square = square.view(-1, count, count)
        return (square + square.transpose(1, 2)) @ x


def _lower_triangle(x: Tensor) -> Tensor:
    """Returns the indices of the lower triangle, without the diagonal, in a flattened square matrix."""
    first, second = torch.tril_indices(x.shape[1], x.shape[1], -1, device=x.device)
    return first * x.shape[1] + second


class DenseDLRM(Chain):
    """Maps dense features (B, features) and embeddings (B, tables, width) to logits (B,) or, given labels, to their
    summed binary cross-entropy. Negative labels are ignored."""

    bottom: MLP
    top: MLP

    def __init__(self, config: DLRMConfig, seed: int = 0):
        """Nothing is random in its forward, so `seed` has no effect."""
        num_pairs = config.tables * (config.tables + 1) // 2  # of the tables' embeddings and the dense one
        bottom = MLP([config.dense_features, *config.bottom, config.width], final_relu=True)
        top = MLP([config.width + num_pairs, *config.top, 1], final_relu=False)
        init_specs = [(f"{part}.{name}", InitSpec("normal", math.sqrt(2.0 / sum(weight.shape))))
                      for part, mlp in (("bottom", bottom), ("top", top)) for name, weight in mlp.named_parameters()
                      if weight.dim() == 2]  # fmt: skip
        plan = ShardingPlan(shard_dims=(), modules=(), init=(*init_specs, ("*.bias", InitSpec("zeros"))),
                            compared_modules=("bottom", "top"))  # fmt: skip
        super().__init__([("bottom", bottom), ("top", top)], plan)

    def forward(self, numbers: Tensor, vectors: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        dense_vector = self.bottom(numbers)
        all_vectors = torch.cat((dense_vector[:, None], vectors.to(dense_vector.dtype)), dim=1)
        logits: Tensor = self.top(torch.cat((dense_vector, DotInteraction.apply(all_vectors)), dim=1))[:, 0]
        if labels is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits.dtype), reduction="none")
        return (losses * (labels >= 0)).sum()
