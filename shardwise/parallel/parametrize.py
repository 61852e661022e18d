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

Parametrization = Callable[[Tensor], Tensor | None]


def parametrize(module: nn.Module, name: str, parametrization: Parametrization) -> None:
    """`module.name` is `view(parameter)` from now on; views of one apply in order, until one gives None."""
    parametrizations: dict[str, list[Parametrization]] = module.__dict__.setdefault("_parametrizations", {})
    if name not in parametrizations:
        module.__class__ = _parametrized_class(type(module), name)  # type: ignore[assignment,arg-type]
    parametrizations.setdefault(name, []).append(parametrization)


@cache
def _parametrized_class(base: type, name: str) -> type:
    """One class for all modules of a kind, so that what is compiled for one block serves the next."""

    def get_parameter(module: nn.Module) -> Tensor | None:
        value: Tensor | None = module._parameters.get(name)
        if isinstance(value, DTensor):
            return value  # a piece, as FSDP leaves it when the module does not run
        for parametrization in module.__dict__["_parametrizations"][name]:
            value = None if value is None else parametrization(value)
        return value

    return type(base.__name__, (base,), {name: property(get_parameter)})
