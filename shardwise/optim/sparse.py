"""Updates of the rows of a table that a step has touched, each once, where they live.

Row-wise AdaGrad keeps one number for a row, the sum over steps of the mean square of its gradient; Adam's two averages
are as large as the table and move only where a row is touched (`torch.optim.SparseAdam` does the same). Neither decays
weights: that would touch every row in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_rows_(table: Tensor, rows: Tensor, more: Tensor) -> None:
    """As `index_add_` along rows, in half of its time on CPU."""
    table.scatter_add_(0, rows[:, None].expand_as(more), more)


def adagrad_(
    table: Tensor, sums: Tensor, rows: Tensor, gradient: Tensor, squares: Tensor, lr: float, eps: float
) -> None:
    """`squares`: the mean square of each touched row's whole gradient, of which `gradient` may be some columns."""
    sums.index_add_(0, rows, squares)
    divisor = sums.index_select(0, rows).sqrt_().add_(eps)
    add_rows_(table, rows, (gradient / divisor[:, None]).mul_(-lr))


def adam_(
    table: Tensor, averages: tuple[Tensor, Tensor], rows: Tensor, gradient: Tensor, number: int, lr: float,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """`number`: of this step, from 1 on."""
    first, second = (average.index_select(0, rows) for average in averages)
    first.lerp_(gradient, 1.0 - betas[0])
    second.lerp_(gradient.square(), 1.0 - betas[1])
    averages[0].index_copy_(0, rows, first)
    averages[1].index_copy_(0, rows, second)
    rate = lr * (1.0 - betas[1] ** number) ** 0.5 / (1.0 - betas[0] ** number)
    add_rows_(table, rows, (first / second.sqrt_().add_(eps)).mul_(-rate))


class Joined(torch.optim.Optimizer):
    """An optimizer of dense weights, and tables beside it, as one: one learning rate to set, one state to save.

    `grad_scale` and `found_inf` mean what they mean to PyTorch's fused optimizers.
    """

    def __init__(self, dense: torch.optim.Optimizer, tables: Any, factor: float):
        """`tables` has `states()`, by tensor, and `update(lr, scale)`; they learn at `factor` times the rate."""
        self.dense, self.tables, self.factor = dense, tables, factor
        self.group: dict[str, Any] = {"params": [], "lr": 0.0}
        self.defaults = dense.defaults
        self.param_groups = [*dense.param_groups, self.group]  # the same objects: whoever sets a rate sets it for both
        self.state = dense.state
        self.state.update(tables.states())
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.dense.register_step_pre_hook(hook)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for word in ("grad_scale", "found_inf"):
            setattr(self.dense, word, getattr(self, word))
        self.dense.step()
        if self.found_inf is None or not bool(self.found_inf):
            scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
            self.tables.update(self.factor * self.group["lr"], scale)
