"""What a module sees of its parameters while it runs.

`present` lets a parameter read as a function of itself: cast to the precision of the computation, or narrowed to the
heads of this rank. Gradients flow through the function to the parameter. The parameter stays where PyTorch keeps it
(FSDP exchanges it there), the view shadows it in the instance for the time of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

View = Callable[[Tensor], Tensor | None]


def present(module: nn.Module, name: str, view: View) -> None:
    """While `module` runs, `module.name` is `view(parameter)`; views of one apply in order, until one gives None."""
    views: dict[str, list[View]] = module.__dict__.setdefault("_views", {})
    if not views:
        # First of the pre-hooks, so that hooks which use the parameter find its view; last of the post-hooks.
        module.register_forward_pre_hook(_show)
        module.register_forward_hook(_hide, always_call=True)
    views.setdefault(name, []).append(view)


def _show(module: nn.Module, args: Any) -> None:
    for name, views in module.__dict__["_views"].items():
        value: Tensor | None = module._parameters.get(name)
        for view in views:
            value = None if value is None else view(value)
        module.__dict__[name] = value


def _hide(module: nn.Module, args: Any, output: Any) -> None:
    for name in module.__dict__["_views"]:
        module.__dict__.pop(name, None)
