"""Stochastic gradient descent with momentum, as `torch.optim.SGD` takes its steps; decay is part of the gradient."""

from __future__ import annotations

import torch

from shardwise.optim.pieces import Pieced


class SGD(Pieced):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for piece, state, group in self.members():
            weight = piece.tensor.detach()
            update = self.gradient(piece).add(weight, alpha=group["weight_decay"])
            if group["momentum"]:
                average = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                self.put(average, update.add(average, alpha=group["momentum"]))
                update = average
            self.put_weight(piece, weight.sub(update, alpha=group["lr"]))
