"""Hooks that a module's author has registered on its parameters, which copies of a parameter do not have."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.errors import RunError


def carry_hooks(source: Tensor, target: Tensor) -> None:
    """Registers the hooks of one parameter on another, which takes its place."""
    if source is target or not target.requires_grad:
        return

    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (source._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        target.register_post_accumulate_grad_hook(hook)


def copy_with_hooks(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a deep copy whose parameters have the hooks of the module's."""
    copied = copy.deepcopy(module, memo)
    for source, target in zip(module.parameters(), copied.parameters(), strict=True):
        carry_hooks(source, target)
    return copied


def check_changes(parameter: Tensor, name: str) -> None:
    """Lets each hook that runs once the gradient is there end the run if it updates the parameter by itself."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    for key, hook in hooks.items():
        hooks[key] = partial(_run_checked, hook, name)


def _run_checked(hook: Callable[[Tensor], None], name: str, parameter: Tensor) -> None:
    version = parameter._version
    hook(parameter)
    if parameter._version != version:
        raise RunError(
            f"the gradient hook {_name_of(hook)} changes the parameter {name}, and the optimizer of the run, which has "
            "its own weights, would undo that; let the hook change the gradient only, and update by `optimizer`."
        )


def first_hook(module: nn.Module) -> tuple[str, str]:
    """Returns the names of a hook and of the parameter that it is registered on; empty if there is none."""
    for name, parameter in module.named_parameters():
        post_hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        for hook in (*(parameter._backward_hooks or {}).values(), *(post_hooks or {}).values()):
            if parameter.requires_grad:
                return _name_of(hook), name
    return "", ""


def _name_of(hook: Any) -> str:
    inner = hook.func if isinstance(hook, partial) else hook
    return getattr(inner, "__qualname__", type(inner).__name__)
