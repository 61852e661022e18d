"""The anatomy of a module, from one run on fake tensors: what can be split, sharded and cut, and what cannot.

The trunk is the longest list of blocks that are called once each, in a row, every block on the output of the one before
(the stream). What runs before it is the prologue, what runs after it the epilogue. A pipeline cuts between blocks, so
nothing but the stream may cross: a tensor that was computed from weights in one part and is used in another is reported
by the names of both modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from shardwise.errors import JobError
from shardwise.models.trace import to_fake, with_fake_tensors

# Operators that read the shape of a tensor and not its values.
_SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Anatomy:
    """What one run of a module showed. Part 0 is the prologue, parts 1 to n the blocks, part n + 1 the epilogue."""

    blocks: tuple[str, ...] = ()
    """Names of the trunk's blocks in the order of their calls; empty: no trunk was found."""
    stream: Tensor | None = None
    """What the blocks hand on, on the meta device, for the batch that was traced."""
    stream_key: int | str = 0
    """Which argument of a block is the stream: its position or its keyword."""
    tuple_length: int = 0
    """Length of the tuple that a block returns, whose first element is the stream; 0: it returns the stream."""
    parts_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By parameter: the parts that use it. Parameters that the forward does not use are missing."""
    called_once: frozenset[str] = frozenset()
    """Modules whose forward runs exactly once."""
    units: tuple[str, ...] = ()
    """Modules besides the blocks whose parameters nothing else uses, so that FSDP can shard them on their own."""
    crossing: str = ""
    """Why the trunk cannot be cut into pipeline stages; empty if it can."""
    second_path: str = ""
    """Module after the prologue that uses weights on a path which does not start at the stream, such as a decoder's."""
    random_modules: tuple[str, ...] = ()
    """Modules that draw random numbers by themselves, not through `nn.Dropout`."""
    written_buffers: tuple[str, ...] = ()
    """Buffers that the forward updates, such as the running statistics of a batch norm."""
    flops: tuple[float, ...] = (1.0,)
    """Forward FLOPs of each part, for the batch that was traced."""


Run = Callable[[nn.Module, Callable[[Tensor], Tensor]], Any]
"""Runs a module on an example batch, whose tensors it converts with the given function."""


def find_anatomy(module: nn.Module, run: Run, trunk: str = "") -> Anatomy:
    """Runs a module twice on fake tensors. `trunk` names the list of blocks instead of looking for it."""
    calls = _Calls(module, trunk)
    try:
        _run_fake(module, run, calls.hooks)
    except JobError:
        # Layers that are dropped at random (OPT) ask for a random number even if the probability is 0.
        module.eval()
        calls = _Calls(module, trunk)
        _run_fake(module, run, calls.hooks)
    blocks = calls.find_trunk()
    if trunk and not blocks:
        raise JobError(f"{trunk!r} is not a list of blocks of which each runs once on the output of the one before.")
    tracker = _Tracker(module, blocks)
    if not module.training and any(getattr(part, "layerdrop", 0) for part in module.modules()):
        tracker.random_modules["layerdrop"] = None
    try:
        with _FunctionalDropout(tracker):
            _run_fake(module, run, tracker.hooks, tracker)
    finally:
        module.train()
    return tracker.anatomy()


def _run_fake(module: nn.Module, run: Run, hooks: Callable[[], Any], *modes: Any) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fake, with_fake_tensors(module, fake), hooks():
            for mode in modes:
                with mode:
                    run(module, to_fake(fake))
            if not modes:
                run(module, to_fake(fake))
    except JobError:
        raise
    except Exception as error:
        raise JobError(_explain(module, error)) from error


def _explain(module: nn.Module, error: Exception) -> str:
    frame, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/shardwise/" not in file:
            frame = trace
        trace = trace.tb_next
    place = "" if frame is None else f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    name, kind = type(module).__name__, type(error).__name__
    if "DataDependent" in kind or "DynamicOutput" in kind or "UnbackedSymInt" in kind:
        return (
            f"{name}'s forward reads the value of a tensor in Python{place}; without values it cannot be analysed. "
            "Use torch.where or masks instead of `if`, `.item()` and `.nonzero()`, or train in one process."
        )
    return f"{name} failed on the example batch{place}: {kind}: {str(error).splitlines()[0] if str(error) else ''}."


class _Calls:
    """Records the calls of the children of all lists of modules, to find the trunk."""

    def __init__(self, module: nn.Module, trunk: str):
        self.module = module
        self.lists = {
            name: list(part.children()) for name, part in module.named_modules()
            if isinstance(part, nn.ModuleList | nn.Sequential) and len(list(part.children())) > 1
            and (not trunk or name == trunk)
        }  # fmt: skip
        self.names = {child: f"{name}.{key}" if name else key for name in self.lists
                      for key, child in module.get_submodule(name).named_children()}  # fmt: skip
        self.order: list[nn.Module] = []
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        self.outputs: dict[nn.Module, Tensor | None] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = [child.register_forward_hook(self._record, with_kwargs=True) for child in self.names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, child: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.order.append(child)
        self.inputs[child] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.outputs[child] = _stream_of(out)

    def find_trunk(self) -> tuple[str, ...]:
        best: tuple[int, list[nn.Module]] = (0, [])
        for children in self.lists.values():
            called = [child for child in self.order if child in children]
            if called != children or not all(map(self._is_linked, children, children[1:])):
                continue
            size = sum(p.numel() for child in children for p in child.parameters())
            best = max(best, (size, children), key=lambda found: found[0])
        return tuple(self.names[child] for child in best[1])

    def _is_linked(self, before: nn.Module, after: nn.Module) -> bool:
        return any(tensor is self.outputs[before] for tensor in self.inputs[after])


def _stream_of(out: Any) -> Tensor | None:
    """Returns the stream in what a block returns: the tensor, or the first element of a tuple."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return first if isinstance(first, Tensor) else None


class _Tracker(TorchDispatchMode):
    """Follows which part of the module computes each tensor, and from which parameters."""

    def __init__(self, module: nn.Module, blocks: tuple[str, ...]):
        super().__init__()
        self.module, self.block_names = module, blocks
        self.block_index = {module.get_submodule(name): index for index, name in enumerate(blocks, start=1)}
        self.part, self.stack = 0, [""]
        self.calls: dict[str, int] = {}
        self.made: dict[int, tuple[Tensor, int, str]] = {}
        """By tensor that depends on weights: itself, the part and the module that made it."""
        self.parts_of: dict[str, set[int]] = {}
        self.enclosing: dict[str, set[str]] = {}
        self.crossing = self.second_path = ""
        self.off_stream: set[int] = set()
        """Tensors in `made` that depend on weights after the prologue, but not on the stream."""
        self.random_modules: dict[str, None] = {}
        self.written: dict[str, None] = {}
        self.flops = [0.0] * (len(blocks) + 2)
        self.stream: Tensor | None = None
        self.stream_key: int | str = 0
        self.tuple_length = 0
        self.stream_shapes: dict[tuple[int, ...], None] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        names = list(self.module.named_modules())
        self.parameters = {id(p): name for name, p in self.module.named_parameters()}
        self.buffers = {id(b): name for name, b in self.module.named_buffers()}
        handles = [part.register_forward_pre_hook(self._enter(name), with_kwargs=True) for name, part in names]
        handles += [part.register_forward_hook(self._leave(name), with_kwargs=True) for name, part in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(name)
            self.calls[name] = self.calls.get(name, 0) + 1
            if module in self.block_index:
                self.part = self.block_index[module]
                entries = [*enumerate(args), *kwargs.items()]
                before = self.stream
                for key, value in entries:
                    if isinstance(value, Tensor) and (value is before or before is None) and value.is_floating_point():
                        self.stream, self.stream_key = value, key
                        self.stream_shapes[tuple(value.shape)] = None
                        self.made[id(value)] = value, self.part, name
                        break

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.stack.pop()
            if module in self.block_index:
                self.stream, self.tuple_length = _stream_of(out), len(out) if isinstance(out, tuple | list) else 0
                if self.part == len(self.block_names) and self.stream is not None:
                    self.part += 1
                    self.made[id(self.stream)] = self.stream, self.part, name

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        depends = False
        for tensor in inputs:
            if id(tensor) in self.parameters:
                parameter, depends = self.parameters[id(tensor)], True
                self.parts_of.setdefault(parameter, set()).add(self.part)
                self.enclosing.setdefault(parameter, set(self.stack)).intersection_update(self.stack)
            elif id(tensor) in self.made and name not in _SHAPE_ONLY:
                _, part, maker = self.made[id(tensor)]
                depends = True
                if part != self.part and not self.crossing:
                    self.crossing = f"{self._place(part, maker)} is used in {self._place(self.part, self.stack[-1])}"
        if depends and name not in _SHAPE_ONLY:
            self._note_second_path(inputs, outputs)
            for tensor in outputs:
                self.made[id(tensor)] = tensor, self.part, self.stack[-1]
        self._note_side_effects(func, name, args, kwargs)
        if func.overloadpacket in flop_registry:
            self.flops[self.part] += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        return out

    def _note_second_path(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        computed = [id(tensor) for tensor in inputs if id(tensor) in self.made]
        if self.part and self.off_stream.issuperset(computed):
            self.off_stream.update(map(id, outputs))
            if computed and any(id(tensor) in self.parameters for tensor in inputs):
                self.second_path = self.second_path or self.stack[-1]

    def _note_side_effects(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and id(value) in self.buffers:
                self.written[self.buffers[id(value)]] = None
        if name.endswith("batch_norm") and values.get("training") and id(values.get("running_mean")) in self.buffers:
            self.written[self.buffers[id(values["running_mean"])]] = None
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in name
        if is_random or values.get("dropout_p"):
            self.note_random(self.stack[-1])

    def note_random(self, name: str) -> None:
        module = self.module.get_submodule(name)
        if not isinstance(module, _DROPOUTS):
            self.random_modules[name or type(module).__name__] = None

    def _place(self, part: int, name: str) -> str:
        kind = "prologue" if part == 0 else "epilogue" if part > len(self.block_names) else f"block {part - 1}"
        return f"{name or type(self.module).__name__} ({kind})"

    def anatomy(self) -> Anatomy:
        stream = self.stream
        if self.block_names and stream is None:
            raise JobError(f"the blocks of {type(self.module).__name__} do not hand on a tensor.")
        return Anatomy(
            self.block_names, None if stream is None else torch.empty_like(stream, device="meta"), self.stream_key,
            self.tuple_length, {name: tuple(sorted(parts)) for name, parts in self.parts_of.items()},
            frozenset(name for name, count in self.calls.items() if count == 1),
            tuple(self._units(self.module, "")), self._crossing_sentence(), self.second_path, tuple(self.random_modules),
            tuple(self.written), tuple(max(1.0, flops) for flops in self.flops),
        )  # fmt: skip

    def _crossing_sentence(self) -> str:
        if not self.block_names:
            return "no list of blocks was found that are called in a row; name it with `trunk`"
        if self.crossing:
            return f"besides the blocks' output, a tensor crosses a cut: what {self.crossing}"
        if len(self.stream_shapes) > 1:
            first, second, *_ = self.stream_shapes
            return f"the blocks hand on tensors of different shapes, such as {first} and {second}"
        for name, parts in self.parts_of.items():
            inner = [part for part in parts if 0 < part <= len(self.block_names)]
            if len(parts) > 1 and inner:
                return f"the parameter {name} is used in block {inner[0] - 1} and elsewhere"
        return ""

    def _units(self, module: nn.Module, prefix: str) -> Iterator[str]:
        """Yields modules outside of the trunk whose parameters are used in their own forward only, which runs once."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if name in self.block_names or not any(True for _ in child.parameters()):
                continue
            if any(block.startswith(f"{name}.") for block in self.block_names):
                yield from self._units(child, f"{name}.")
                continue
            mine = [names.get(id(p), "") for p in child.parameters()]
            is_own = all(name in self.enclosing.get(parameter, set()) for parameter in mine)
            if is_own and self.calls.get(name) == 1 and all(len(self.parts_of.get(p, ())) == 1 for p in mine):
                yield name


class _FunctionalDropout(TorchFunctionMode):
    """Notes functional dropout, also in a module that is run without training."""

    def __init__(self, tracker: _Tracker):
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and (kwargs.get("p", 0.5) if len(args) < 2 else args[1]):
            self.tracker.note_random(self.tracker.stack[-1])
        return func(*args, **kwargs)


def stream_like(anatomy: Anatomy, samples: int, traced: int) -> tuple[int, ...]:
    """Returns the stream's shape for another number of samples, which scales its first dimension."""
    assert anatomy.stream is not None
    first, *rest = anatomy.stream.shape
    return (math.ceil(first * samples / traced), *rest)


def to_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), tree)
