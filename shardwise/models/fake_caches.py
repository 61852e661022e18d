"""What a forward keeps for its next call, such as a table of rotary frequencies, must not stay fake after a trace."""

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_OURS = ("torch", "shardwise", "builtins")
_MISSING = object()
_MISSES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""By cached function: how often it had been computed when its results were last looked through."""
MAX_DEPTH = 20  # of lists in lists, a bound for those that contain themselves


@contextmanager
def caches_kept(module: nn.Module) -> Iterator[None]:
    """After it, no attribute, global variable or cached function of a module's code holds a fake tensor.

    An attribute or variable that was set to one gets back what it held before. New entries of a dictionary or list, and
    the results of a function with `functools.lru_cache`, are dropped: the next call computes them again."""
    before = [(owner, dict(vars(owner))) for owner in _owners(module)]
    try:
        yield
    finally:
        for owner, attributes in before:
            for name, value in list(vars(owner).items()):
                if not _holds_fake(value):
                    continue
                is_kept = value is attributes.get(name)
                if is_kept and isinstance(value, dict | list):
                    _drop_fake_entries(value)
                else:
                    _restore(owner, name, attributes.get(name, _MISSING))
        for function in _cached_functions([owner for owner, _ in before]):
            has_new_results = function.cache_info().misses != _MISSES.get(function)
            if has_new_results and any(map(_holds_fake, gc.get_referents(function))):
                function.cache_clear()
            _MISSES[function] = function.cache_info().misses


def _owners(module: nn.Module) -> list[Any]:
    """Returns the module's parts, their classes, and the Python modules that define these; not PyTorch's or ours."""
    owners: dict[int, Any] = {}
    for part in module.modules():
        if _is_theirs(type(part)):
            owners[id(part)] = part
        for kind in filter(_is_theirs, type(part).__mro__):
            owners[id(kind)] = kind
            source = sys.modules.get(kind.__module__)
            if source is not None:
                owners[id(source)] = source
    return list(owners.values())


def _is_theirs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _OURS


def _holds_fake(value: Any, depth: int = 0) -> bool:
    """Whether a value is a fake tensor, or a list, tuple or dictionary of some. Called for every global variable of a
    library, so it is not left to PyTorch's trees, which take ten times as long."""
    if isinstance(value, FakeTensor):
        return True
    if not isinstance(value, list | tuple | dict) or depth > MAX_DEPTH:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_fake(item, depth + 1) for item in items)


def _drop_fake_entries(entries: dict[Any, Any] | list[Any]) -> None:
    """Removes the fake tensors of a dictionary or list, and those of dictionaries in it, which stay."""
    if isinstance(entries, list):
        entries[:] = [item for item in entries if not _holds_fake(item)]
        return

    for key, value in list(entries.items()):
        if _holds_fake(value) and isinstance(value, dict):
            _drop_fake_entries(value)
        elif _holds_fake(value):
            del entries[key]


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _cached_functions(owners: list[Any]) -> Iterator[Any]:
    """Yields the functions with `functools.lru_cache` of these owners and of all Python modules but PyTorch and ours.

    The garbage collector cannot list them: it does not see what `gc.freeze` has put aside."""
    sources = [source for name, source in list(sys.modules.items()) if name.partition(".")[0] not in _OURS]
    for owner in (*owners, *sources):
        for value in list(getattr(owner, "__dict__", {}).values()):
            if type(value) is functools._lru_cache_wrapper:
                yield value
