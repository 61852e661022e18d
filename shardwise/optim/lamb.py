"""LAMB (You et al. 2020): Adam's step, for each weight as long as the weight is.

PyTorch has none. The ratio of the two norms is that of the whole weight: its pieces' squares are summed over the ranks
that hold them, for all weights at once. Weights that are not decayed (norms, biases) take Adam's step as it is, as in
the authors' code. No bound on the ratio; it is 1 where either norm is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.pieces import Piece, Pieced, squares, total


class LAMB(Pieced):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = list(self.members())
        counts = [self._average(*member) for member in members]
        adapted = [(member, count) for member, count in zip(members, counts) if member[0].decays]
        parts = [
            torch.stack((squares(member[0].tensor.detach()), squares(self._direction(*member, count))))
            for member, count in adapted
        ]
        pieces = [member[0] for member, _ in adapted]
        sums = total(parts, pieces, [range(len(piece.shape)) for piece in pieces])
        ratios = {piece: _ratio(*both.sqrt()) for piece, both in zip(map(id, pieces), sums, strict=True)}
        for (piece, state, group), count in zip(members, counts):
            weight = piece.tensor.detach()
            update = self._direction(piece, state, group, count) * group["lr"]
            if id(piece) in ratios:
                update *= ratios[id(piece)].to(weight.dtype)
            self.put_weight(piece, weight - update)

    def _average(self, piece: Piece, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        grad = self.gradient(piece)
        for key, beta, value in zip(("exp_avg", "exp_avg_sq"), group["betas"], (grad, grad.square())):
            average = state.setdefault(key, torch.zeros_like(piece.tensor))
            self.put(average, average.lerp(value, 1.0 - beta))
        return self.count(piece, state)

    def _direction(self, piece: Piece, state: dict[str, Tensor], group: dict[str, Any], count: Tensor) -> Tensor:
        """Adam's step with decay. Made twice, once for its norm: keeping it would take the memory of the weights."""
        dtype = piece.tensor.dtype
        first, second = ((1.0 - beta**count).to(dtype) for beta in group["betas"])
        root = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / first).div_(root).add_(piece.tensor.detach(), alpha=group["weight_decay"])


def _ratio(weight: Tensor, update: Tensor) -> Tensor:
    return torch.where((weight > 0.0) & (update > 0.0), weight / update, torch.ones_like(weight))
