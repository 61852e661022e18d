"""Finds functional dropout in a module's forward, also where it runs without training and nothing is drawn."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class FunctionalDropoutFinder(TorchFunctionMode):
    def __init__(self, note: Callable[[], None]):
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and (kwargs.get("p", 0.5) if len(args) < 2 else args[1]):
            self.note()
        return func(*args, **kwargs)
