"""AdamW over the local pieces of weights: PyTorch's fused kernels, or our own where they cannot.

Ours takes gradients in the compute type, rounds the updated weights for the next step in the same pass over memory, and
may keep its averages in bf16. On a GPU it is one kernel (`shardwise.optim.kernels`); elsewhere PyTorch's, a weight at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.pieces import Piece, Pieced


class AdamW(Pieced):
    """Our own. States have PyTorch's names."""

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], pieces: Sequence[Piece],
        states: torch.dtype | None,
    ):  # fmt: skip
        super().__init__(groups, defaults, pieces)
        self.states = states
        self.rates = [torch.zeros((), device=group["params"][0].device) for group in self.param_groups]

    def set_rates(self) -> None:
        """Takes the learning rates to the device: a recorded step reads them there."""
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            rate.fill_(group["lr"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.rates[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            self.set_rates()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            self._start(weight)
        counts = [self.state[weight]["step"] for weight in weights]
        one = torch.ones_like(counts[0]) if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(counts, [one] * len(counts))
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            for weight in group["params"]:
                piece, state = self.pieces[weight], self.state[weight]
                if weight.is_cuda and weight.dtype == torch.float32:
                    self._kernel(piece, state, group, rate)
                else:
                    plain_(piece, state, group, self.grad_scale, self.found_inf)
                piece.current = piece.rounded is not None

    def _kernel(self, piece: Piece, state: dict[str, Tensor], group: dict[str, Any], rate: Tensor) -> None:
        from shardwise.optim.kernels import adamw_

        averages = state["exp_avg"], state["exp_avg_sq"]
        adamw_(
            piece.tensor.detach(), piece.grad, *averages, piece.rounded, state["step"], rate, group, self.grad_scale,
            self.found_inf,
        )  # fmt: skip

    def _start(self, weight: Tensor) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=self.states)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=self.states)


def plain_(
    piece: Piece, state: dict[str, Tensor], group: dict[str, Any], scale: Tensor | None, skip: Tensor | None
) -> None:
    weight, averages = piece.tensor.detach(), (state["exp_avg"], state["exp_avg_sq"])
    first, second = (average.to(weight.dtype) for average in averages)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [weight], [piece.grad.to(weight.dtype)], [first], [second], [], [state["step"]], lr=group["lr"], beta1=beta1,
        beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
        grad_scale=scale, found_inf=skip,
    )  # fmt: skip
    for average, wide in zip(averages, (first, second)):
        if average is not wide:
            average.copy_(wide)
    if piece.rounded is not None:
        piece.rounded.copy_(weight)
