"""Parameters that a module reads through a function: a cast, some of the rows, a sum."""

from collections.abc import Callable
from functools import cache

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Parametrization = Callable[[Tensor], Tensor | None]


def parametrize(module: nn.Module, name: str, parametrization: Parametrization) -> None:
    """Makes `module.name` read as `parametrization(parameter)`. Several apply in order, until one returns None.

    Gradients flow through the function to the parameter. The parameter itself stays in `_parameters`, where FSDP swaps
    it; a property of the module's class reads it from there. Hooks could do the same, but the compiler cannot trace
    hooks that must also run after an error, and `torch.nn.utils.parametrize` moves and renames the parameter."""
    parametrizations: dict[str, list[Parametrization]] = module.__dict__.setdefault("_parametrizations", {})
    if name not in parametrizations:
        module.__class__ = _parametrized_class(type(module), name)  # type: ignore[assignment,arg-type]
    parametrizations.setdefault(name, []).append(parametrization)


@cache
def _parametrized_class(base: type, name: str) -> type:
    """Returns one class for all modules of a type, so that code compiled for one block serves the next."""

    def get_parameter(module: nn.Module) -> Tensor | None:
        value: Tensor | None = module._parameters.get(name)
        if isinstance(value, DTensor):
            return value  # outside of forward and backward the parameter is FSDP's sharded DTensor
        for parametrization in module.__dict__["_parametrizations"][name]:
            value = None if value is None else parametrization(value)
        return value

    return type(base.__name__, (base,), {name: property(get_parameter)})
