"""What a module sees of its parameters.

`present` lets a parameter read as a function of itself: cast to the precision of the computation, or narrowed to the
heads of this rank. Gradients flow through the function to the parameter. The parameter stays where PyTorch keeps it
(in `_parameters`, where FSDP exchanges it); a property of the module's class reads it from there and shows the view.
Hooks would do the same, but a compiler cannot look through those that must run after an error too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

View = Callable[[Tensor], Tensor | None]


def present(module: nn.Module, name: str, view: View) -> None:
    """`module.name` is `view(parameter)` from now on; views of one apply in order, until one gives None."""
    views: dict[str, list[View]] = module.__dict__.setdefault("_views", {})
    if name not in views:
        module.__class__ = _showing(type(module), name)  # type: ignore[assignment,arg-type]
    views.setdefault(name, []).append(view)


@cache
def _showing(kind: type, name: str) -> type:
    """One class for all modules of a kind, so that what is compiled for one block serves the next."""

    def show(module: nn.Module) -> Tensor | None:
        value: Tensor | None = module._parameters.get(name)
        if isinstance(value, DTensor):
            return value  # a piece, as FSDP leaves it when the module does not run
        for view in module.__dict__["_views"][name]:
            value = None if value is None else view(value)
        return value

    return type(kind.__name__, (kind,), {name: property(show)})
