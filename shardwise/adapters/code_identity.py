"""What a function, a class or an object of the user's is, so that another one is noticed.

`describe` gives its name, a digest of its code and the values that it was made with. The digest is of instructions, not
of text: line numbers, comments, docstrings and names of local variables do not count. It follows the functions and
classes that the code names, within the user's own files; what libraries do is known by name alone. Values are numbers,
texts, tensors and the like, and lists, dicts and sets of them, that a closure, a default, a `functools.partial`, a
constructor, a class or a global name holds. What the code reads elsewhere (files, the environment, attributes that
change) is not known. Parameters of modules are not compared: they are trained, or begin with other random values."""

import argparse
import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.content import describe_content
from shardwise.errors import shorten

MAX_DEPTH = 40  # of values within values, a bound for those that contain themselves
MAX_VALUES = 200  # that are recorded one by one; a digest stands for the others
MAX_VISITS = 20_000  # values that are looked at, so that a list of millions costs no time
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # whose instructions are compared
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
FIXED_TYPES = (torch.dtype, torch.layout, torch.memory_format, np.dtype, range, slice)  # known by their `repr`
# Methods that change the list, dict or set that they belong to.
CHANGING_METHODS = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert"),
    *("pop", "popitem", "popleft", "remove", "setdefault", "update"),
)
# Methods that a dataclass gets.
DATACLASS_METHODS = (
    *("__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__replace__", "__setattr__", "__delattr__"),
)


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Returns the folders whose code is known by name alone: Python's, those of installed packages, and ours."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [Path(torch.__file__).parent.parent, Path(__file__).parent.parent]
    return tuple(str(folder.resolve()) for folder in folders)


def describe(value: Any) -> dict[str, Any] | None:
    """Returns what a callable is, as JSON; None for None."""
    if value is None:
        return None
    found = _Found()
    found.add("", value, 0)
    code = hashlib.sha256("\n".join(found.codes).encode()).hexdigest()[:32] if found.codes else ""
    return {"name": _name_of(value), "code": code, "values": found.compact_values()}


def differences(what: str, old: dict[str, Any] | None, new: dict[str, Any] | None, same_python: bool,
                compare_values: bool = True) -> list[str]:  # fmt: skip
    """Returns how a callable differs from what it was, in words. Code is comparable within a version of Python."""
    if old is None and new is None:
        return []
    if old is None or new is None or old["name"] != new["name"]:
        names = [one["name"] if one is not None else "none" for one in (new, old)]
        return [f"its {what} is {names[0]} instead of {names[1]}"]

    found = []
    if compare_values:
        for key in old["values"].keys() | new["values"].keys():
            before, now = (one["values"].get(key, "nothing") for one in (old, new))
            if before != now:
                found.append(f"its {what} {new['name']} has {key} = {now} instead of {before}")
    if same_python and old["code"] != new["code"] and not found:
        found.append(f"the code of its {what} {new['name']} has changed")
    return sorted(found)


@dataclass
class _Found:
    """What has been found of a callable so far."""

    codes: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    visits: int = 0

    def compact_values(self) -> dict[str, str]:
        """Returns the values for the record: a digest stands for those beyond the first ones."""
        names = list(self.values)
        compact = {name: self.values[name] for name in names[:MAX_VALUES]}
        others = [f"{name} = {self.values[name]}" for name in names[MAX_VALUES:]]
        if others:
            compact["(others)"] = f"{len(others)} more values of digest {_digest(chr(10).join(sorted(others)))}"
        return compact

    def add(self, name: str, value: Any, depth: int) -> None:
        """Adds a value that is called `name`; empty for the callable itself."""
        self.visits += 1
        if depth > MAX_DEPTH or self.visits > MAX_VISITS:
            return
        if isinstance(value, np.generic):
            value = value.item()

        if isinstance(value, enum.Enum):
            self.values[name or "value"] = f"{type(value).__qualname__}.{value.name} of {_plain_text(value.value)}"
        elif isinstance(value, PLAIN_TYPES):
            self.values[name or "value"] = _plain_text(value)
        elif isinstance(value, FIXED_TYPES):
            self.values[name or "value"] = shorten(value)
        elif isinstance(value, nn.Parameter):
            self.values[name or "value"] = "a parameter"
        elif isinstance(value, Tensor | np.ndarray):
            self.values[name or "value"] = str(describe_content(value, digits=3))
        elif isinstance(value, dict | MappingProxyType):
            self._add_items(name, value, [(_key_text(key), item) for key, item in value.items()], depth)
        elif isinstance(value, list | tuple):
            self._add_items(name, value, [(str(number), item) for number, item in enumerate(value)], depth)
        elif isinstance(value, set | frozenset):
            self.values[name or "value"] = _set_text(value)
        elif isinstance(value, functools.partial):
            self.add(name, value.func, depth)
            self.add(name, value.args, depth)
            self.add(name, value.keywords, depth)
        elif isinstance(value, MethodType):
            self.add(name, value.__func__, depth)
            self.add(name, value.__self__, depth)
        elif isinstance(value, FunctionType):
            self._add_function(name, value, depth)
        elif isinstance(value, BuiltinFunctionType):
            self.values[name or "value"] = _name_of(value)
        elif isinstance(value, type):
            self._add_class(name, value, depth)
        elif not isinstance(value, ModuleType):
            self._add_object(name, value, depth)

    def _add_items(self, name: str, container: Any, items: list[tuple[str, Any]], depth: int) -> None:
        if len(items) > MAX_VALUES:
            self.values[name or "value"] = f"{type(container).__name__} of {len(items)} values"
        for key, item in items:
            if self.visits > MAX_VISITS:
                return
            self.add(_joined(name, key), item, depth + 1)

    def _add_function(self, name: str, function: FunctionType, depth: int) -> None:
        """Adds a function, and the one that it wraps, if a decorator has made it."""
        if name:
            self.values[name] = _name_of(function)
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.add(_joined(name, "__wrapped__"), wrapped, depth + 1)
        if not _is_own_function(function):
            return

        code = function.__code__
        self.codes.append(_instructions(code))
        for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
            if parameter.default is not parameter.empty:
                self.add(_joined(name, parameter.name), parameter.default, depth + 1)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if variable == "__class__":  # of `super()`: the class that the function belongs to
                continue
            try:
                self.add(_joined(name, variable), cell.cell_contents, depth + 1)
            except ValueError:  # an empty cell: the variable is not bound yet
                continue
        self._add_globals(name, function, depth)

    def _add_globals(self, name: str, function: FunctionType, depth: int) -> None:
        """Adds what a function names outside of itself: values, and the user's own functions and classes. What it
        changes itself, such as a list that it appends to, is no property of it."""
        code = function.__code__
        read, written = _global_names(code)
        attributes = _all_names(code)
        for variable in sorted(read - written - _changed_names(code)):
            if variable not in function.__globals__:
                continue
            value = function.__globals__[variable]
            if isinstance(value, ModuleType):
                if not _is_own(getattr(value, "__file__", None) or ""):
                    continue
                for attribute in sorted(attributes & vars(value).keys()):
                    self._add_global(_joined(name, attribute), vars(value)[attribute], depth, code)
            else:
                self._add_global(_joined(name, variable), value, depth, code)

    def _add_global(self, name: str, value: Any, depth: int, code: CodeType) -> None:
        """Adds what a global name holds. Settings are often one object or dict for a whole script, such as the parsed
        command line; then those count that the code names."""
        if value is None or value is sys.argv or value is sys.path:
            return
        if isinstance(value, dict):
            texts = _text_constants(code)
            named = {key: item for key, item in value.items() if isinstance(key, str) and key in texts}
            self.add(name, named or value, depth + 1)
        elif isinstance(value, argparse.Namespace | SimpleNamespace) or _holds_settings(value):
            names = _all_names(code) | _text_constants(code)
            for attribute in sorted(names & vars(value).keys()):
                self.add(_joined(name, attribute), vars(value)[attribute], depth + 1)
        else:
            self.add(name, value, depth + 1)

    def _add_class(self, name: str, kind: type, depth: int) -> None:
        if name:
            self.values[name] = _name_of(kind)
        for own in kind.__mro__:
            if id(own) in self.seen or not _is_own_class(own):
                continue
            self.seen.add(id(own))
            for attribute, value in sorted(vars(own).items()):
                function = _function_of(value)
                if function is not None:
                    if not _is_generated(own, attribute, function):
                        self._add_function(_joined(name, attribute), function, depth + 1)
                elif value is not None and not attribute.startswith("__") and not _is_internal(attribute):
                    self.add(_joined(name, attribute), value, depth + 1)

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        """Adds an object: its class, and what its constructor was given, where it kept that under the same name. Other
        attributes may change while it is used."""
        kind = type(value)
        if name:
            self.values[name] = _name_of(kind)
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        # Of `functools.lru_cache`, for example. Statically: a class of the user's may answer for any name, or raise.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            self.add(_joined(name, "__wrapped__"), wrapped, depth + 1)
        if depth > 0 and not _is_own_class(kind) and not isinstance(value, nn.Module):
            return
        self._add_class("", kind, depth)

        kept = dict(getattr(value, "__dict__", {}))
        if isinstance(value, nn.Module):
            kept |= value._buffers | value._modules
            for child_name, child in value._modules.items():
                if child is not None:
                    self.add(_joined(name, child_name), child, depth + 1)
        for parameter in _constructor_parameters(kind):
            if parameter in kept:
                self.add(_joined(name, parameter), kept[parameter], depth + 1)
            elif isinstance(value, nn.Module) and parameter in value._parameters:
                # Such as `bias` of nn.Linear: whether there is one was chosen, its values are trained or random.
                has_parameter = value._parameters[parameter] is not None
                self.values[_joined(name, parameter)] = "a parameter" if has_parameter else "None"


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _name_of(value: Any) -> str:
    """Returns the name of a callable, without the functions that it was defined in."""
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _is_own(file: str) -> bool:
    """Whether a file is the user's, not that of a library."""
    if not file or file.startswith("<"):
        return False
    path = str(Path(file).resolve())
    return not any(path.startswith(f"{folder}/") for folder in library_folders())


def _is_own_module(name: str | None) -> bool:
    """Whether code of a module is the user's. What is known under no name was made by a script that has been run."""
    module = sys.modules.get(name or "__main__")
    if name == "__main__" or module is None:
        return True
    return _is_own(getattr(module, "__file__", None) or "")


def _is_own_function(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen"):  # generated, as the methods of a dataclass are
        return _is_own_module(function.__globals__.get("__name__"))
    return _is_own(file)


def _is_own_class(kind: type) -> bool:
    """Whether a class is the user's: by its module, since its methods may be a library's or generated."""
    if kind.__module__ in sys.modules:
        return _is_own_module(kind.__module__)
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return any(_is_own_function(function) for function in functions)


def _function_of(attribute: Any) -> FunctionType | None:
    """Returns the function of a method, a property or the like in a class."""
    for name in ("__func__", "fget", "func"):  # of static and class methods, properties and cached properties
        inner = getattr(attribute, name, None)
        if isinstance(inner, FunctionType) and not isinstance(attribute, functools.partial):
            return inner
    return attribute if isinstance(attribute, FunctionType) else None


def _is_generated(kind: type, name: str, function: FunctionType) -> bool:
    """Whether Python has made a method, as other versions of it make others: the fields or members say it all."""
    if issubclass(kind, enum.Enum):
        return not _is_own_function(function)
    return is_dataclass(kind) and name in DATACLASS_METHODS and not _is_own(function.__code__.co_filename)


def _is_internal(attribute: str) -> bool:
    """Whether Python has put an attribute into a class: `_member_map_` of an enum, `_abc_impl` of an abstract one."""
    return attribute == "_abc_impl" or (attribute.startswith("_") and attribute.endswith("_"))


def _holds_settings(value: Any) -> bool:
    """Whether a value is an object of a dataclass without methods of its own, which could read any of its fields."""
    kind = type(value)
    if not is_dataclass(kind) or not hasattr(value, "__dict__"):
        return False
    functions = {name: _function_of(attribute) for name, attribute in vars(kind).items()}
    return all(function is None or _is_generated(kind, name, function) for name, function in functions.items())


def _constructor_parameters(kind: type) -> Iterable[str]:
    try:
        return list(inspect.signature(kind.__init__).parameters)[1:]  # type: ignore[misc]
    except (TypeError, ValueError):  # written in C
        return []


def _plain_text(value: Any) -> str:
    """Returns a value for the record. Another machine may have other paths and devices, so these do not count."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        return "a path"
    if isinstance(value, str) and DEVICE.fullmatch(value):
        return "a device"
    text = shorten(value)
    if text.endswith("...") and isinstance(value, str | bytes):  # others of the same beginning are other values
        content = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return f"{text} of digest {_digest(content)}"
    if isinstance(value, int) and text == "a huge integer":
        return f"{text} of digest {_digest(hex(value))}"
    return text


def _digest(content: str | bytes) -> str:
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:12]


def _key_text(key: Any) -> str:
    """Returns a key of a dict; of an object its name, because its `repr` is another in each process."""
    if isinstance(key, str):
        return key
    return shorten(key) if isinstance(key, PLAIN_TYPES + FIXED_TYPES) else _name_of(key)


def _set_text(values: Iterable[Any]) -> str:
    """Returns a set as text, whose order is another in each process."""
    items = sorted(repr(item) if isinstance(item, PLAIN_TYPES) else _name_of(item) for item in values)
    text = ", ".join(items)
    return _plain_text("{" + text + "}")


def _instructions(code: CodeType) -> str:
    """Returns what the instructions of a function do; the same code on other lines is the same text."""
    flags = code.co_flags & 0xFFFF  # without the one that says whether there is a docstring
    lines = [f"{code.co_argcount} {code.co_kwonlyargcount} {flags}"]
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, CodeType):
            lines.append(_instructions(instruction.argval))
        elif instruction.opcode in dis.hasconst:
            lines.append(f"{instruction.opname} {_constant_text(instruction.argval)}")
        elif instruction.opcode in dis.hasname or instruction.opcode in dis.hascompare:
            lines.append(f"{instruction.opname} {instruction.argval}")
        elif instruction.opname not in ("RESUME", "NOP"):
            lines.append(f"{instruction.opname} {instruction.arg}")
    return "\n".join(lines)


def _constant_text(value: Any) -> str:
    if isinstance(value, frozenset):  # whose order is another in each process
        return f"frozenset {sorted(map(repr, value))}"
    if isinstance(value, str) and "<locals>" in value:
        return value.rpartition("<locals>.")[2]
    return repr(value)


def _codes_in(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _global_names(code: CodeType) -> tuple[set[str], set[str]]:
    """Returns the global names that a function reads, and those that it writes."""
    read, written = set(), set()
    for part in _codes_in(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                written.add(instruction.argval)
    return read, written


def _changed_names(code: CodeType) -> set[str]:
    """Returns the names whose contents a function changes: `cache[key] = ...`, `state.count += 1`, `seen.append(x)`.
    A name and the target that begins with it stand at the same place in the source."""
    changed = set()
    for part in _codes_in(code):
        places: dict[tuple[int | None, int | None], str] = {}
        for instruction in dis.get_instructions(part):
            positions = instruction.positions
            if positions is None or positions.col_offset is None:
                continue
            place = (positions.lineno, positions.col_offset)
            is_method = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in CHANGING_METHODS
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                places[place] = instruction.argval
            elif instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_ATTR", "DELETE_ATTR") or is_method:
                changed.add(places.get(place, ""))
    return changed


def _text_constants(code: CodeType) -> set[str]:
    return {value for part in _codes_in(code) for value in part.co_consts if isinstance(value, str)}


def _all_names(code: CodeType) -> set[str]:
    return {name for part in _codes_in(code) for name in part.co_names}
