"""A mode in which functions of PyTorch act otherwise within a module's forward."""

from typing import Any

import torch
from torch import Tensor
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
