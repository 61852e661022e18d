"""Modes in which functions of PyTorch act otherwise within a module's forward, or are noticed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Within it, a module of transformers runs in float64 throughout: its casts to float32 are ignored."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            casts = func in (Tensor.to, Tensor.type) and any(arg is torch.float32 for arg in args[1:])
            if func is Tensor.float or casts:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class FunctionalDropoutFinder(TorchFunctionMode):
    """Calls `note` for functional dropout, also where it runs without training and nothing is drawn."""

    def __init__(self, note: Callable[[], None]):
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and (kwargs.get("p", 0.5) if len(args) < 2 else args[1]):
            self.note()
        return func(*args, **kwargs)
