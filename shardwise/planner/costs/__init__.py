"""What models, devices and the engine cost in time and memory; results are cached by what they depend on."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_by(key: Callable[[Any, Any], Hashable]) -> Callable[[Method], Method]:
    """Caches a method of one argument, per object: arguments with the same `key(self, argument)` share a result."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def cached(self: Any, argument: Any) -> Any:
            results = self.__dict__.setdefault(f"cached {method.__qualname__}", {})
            if (found := key(self, argument)) not in results:
                results[found] = method(self, argument)
            return results[found]

        return cached  # type: ignore[return-value]

    return decorate
