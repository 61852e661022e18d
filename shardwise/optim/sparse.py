"""Updates of the rows of a table that a step has touched, each once, where they live.

Row-wise AdaGrad keeps one number for a row, the sum over steps of the mean square of its gradient; Adam's two averages
are as large as the table and move only where a row is touched (`torch.optim.SparseAdam` does the same). Neither decays
weights: that would touch every row in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scatter_add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """As `index_add_` along rows, in half of its time on CPU."""
    table.scatter_add_(0, rows[:, None].expand_as(values), values)


def rowwise_adagrad_(
    table: Tensor, state_sum: Tensor, rows: Tensor, gradient: Tensor, mean_squares: Tensor, lr: float, eps: float
) -> None:
    """`squares`: the mean square of each touched row's whole gradient, of which `gradient` may be some columns."""
    state_sum.index_add_(0, rows, mean_squares)
    denominator = state_sum.index_select(0, rows).sqrt_().add_(eps)
    scatter_add_rows_(table, rows, (gradient / denominator[:, None]).mul_(-lr))


def sparse_adam_(
    table: Tensor, moments: tuple[Tensor, Tensor], rows: Tensor, gradient: Tensor, step: int, lr: float,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """`number`: of this step, from 1 on."""
    exp_avg, exp_avg_sq = (moment.index_select(0, rows) for moment in moments)
    exp_avg.lerp_(gradient, 1.0 - betas[0])
    exp_avg_sq.lerp_(gradient.square(), 1.0 - betas[1])
    moments[0].index_copy_(0, rows, exp_avg)
    moments[1].index_copy_(0, rows, exp_avg_sq)
    step_size = lr * (1.0 - betas[1] ** step) ** 0.5 / (1.0 - betas[0] ** step)
    scatter_add_rows_(table, rows, (exp_avg / exp_avg_sq.sqrt_().add_(eps)).mul_(-step_size))


class CombinedOptimizer(torch.optim.Optimizer):
    """An optimizer of dense weights, and tables beside it, as one: one learning rate to set, one state to save.

    `grad_scale` and `found_inf` mean what they mean to PyTorch's fused optimizers.
    """

    def __init__(self, dense: torch.optim.Optimizer, tables: Any, table_lr_scale: float):
        """`tables` has `states()`, by tensor, and `update(lr, scale)`; they learn at `factor` times the rate."""
        self.dense, self.tables, self.table_lr_scale = dense, tables, table_lr_scale
        self.table_group: dict[str, Any] = {"params": [], "lr": 0.0}
        self.defaults = dense.defaults
        self.param_groups = [
            *dense.param_groups,
            self.table_group,
        ]  # the same objects: whoever sets a rate sets it for both
        self.state = dense.state
        self.state.update(tables.optimizer_states())
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.dense.register_step_pre_hook(hook)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for attribute in ("grad_scale", "found_inf"):
            setattr(self.dense, attribute, getattr(self, attribute))
        self.dense.step()
        if self.found_inf is None or not bool(self.found_inf):
            scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
            self.tables.update(self.table_lr_scale * self.table_group["lr"], scale)
