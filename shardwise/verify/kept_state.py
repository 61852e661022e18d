"""What a step leaves behind beside the weights that the optimizer updates: frozen weights and buffers.

A forward may change them: a teacher that follows its student, a running mean, a counter. A layout that loses such a
change, or makes it once per micro-batch, trains another model from the next step on, or exports one."""

import math

import torch
from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are part of a module's state dict.

    Others are caches, which may hold whatever a rank computed last: what they change shows in the loss."""
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def frozen_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}


def copy_changed(current: dict[str, Tensor], previous: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the current values; one that has not changed since the previous step is not copied again."""
    copies = {}
    for name, value in current.items():
        before = previous.get(name)
        is_unchanged = before is not None and before.shape == value.shape and torch.equal(before, value)
        copies[name] = before if is_unchanged and before is not None else value.detach().clone()
    return copies


def kept_difference(value: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference. Elements that are the same do not differ, also infinite ones and NaNs, which
    masks and unused statistics hold."""
    if value.shape != expected.shape:
        return math.inf

    value, expected = _as_float64(value), _as_float64(expected)
    is_same = (value == expected) | (value.isnan() & expected.isnan())
    return float((value - expected).masked_fill(is_same, 0.0).norm())


def finite_norm(values: Tensor) -> float:
    """Returns the norm of the finite elements."""
    values = _as_float64(values)
    return float(values.masked_fill(~values.isfinite(), 0.0).norm())


def _as_float64(values: Tensor) -> Tensor:
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.to(torch.float64)
