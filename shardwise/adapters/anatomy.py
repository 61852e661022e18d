"""The anatomy of a module, from one run on fake tensors: what can be split, sharded and cut, and what cannot.

The trunk is the largest run of blocks in a list that are called once each, in a row, every block on the output of the
one before (the stream), which keeps its shape. What runs before it is the prologue, what runs after it the epilogue. A
pipeline cuts between blocks, so nothing but the stream may cross: a tensor that was computed from weights in one part
and is used in another is reported by the names of both modules.

A forward that reads values cannot run on fake tensors. One that draws from Python's generator, or that took another
path in the second of two runs, may take yet another one in a step. Such a module has no trunk, and all of its
parameters count as used."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from shardwise.errors import JobError
from shardwise.models.trace import storage_key, tensors_in, with_fake_tensors
from shardwise.random import generator_states_outside_torch

# Operators that read the shape of a tensor and not its values.
SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
TRACED_SAMPLES = 2
Run = Callable[[nn.Module, Callable[[Tensor], Tensor], int], Tensor]
"""Returns a module's loss on an example batch of so many samples, whose tensors it converts with the given function."""


@dataclass
class Anatomy:
    """What one run of a module showed. Part 0 is the prologue, parts 1 to n the blocks, part n + 1 the epilogue."""

    blocks: tuple[str, ...] = ()  # names of the trunk's blocks in the order of their calls; empty: no trunk was found
    stream: Tensor | None = None  # what the blocks hand on, on the meta device, for the batch that was traced
    stream_dim: int = 0  # which dimension of the stream is the samples
    stream_key: int | str = 0  # which argument of a block is the stream: its position or its keyword
    outputs: tuple[int | str | None, ...] = ()
    """If a block returns a tuple: for each element after the stream, which argument it hands on; None: it computes it.
    Empty: a block returns the stream alone."""
    returns_tuple: bool = False
    parts_of: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by parameter: the parts that use it, if any
    called: frozenset[str] = frozenset()  # modules whose forward runs
    called_once: frozenset[str] = frozenset()  # modules whose forward runs exactly once
    units: tuple[str, ...] = ()  # modules besides blocks whose parameters nothing else uses: FSDP can shard them
    altered: set[str] = field(default_factory=set)  # modules whose output is changed in place after they returned it
    in_place_blocks: set[str] = field(default_factory=set)  # blocks that change activations in place
    changes_input: str = ""  # a block that changes its input in place; empty if none does
    without_gradient: frozenset[str] = frozenset()  # parameters that the loss does not depend on
    varies: bool = False  # the forward may use other parameters in each step, for example since it reads values
    crossing: str = ""  # why the trunk cannot be cut into pipeline stages; empty if it can
    second_path: str = ""  # module that uses weights on a path not from the stream, such as a decoder's
    random_module: str = ""  # the first module that draws random numbers by itself, not through `nn.Dropout`
    written_buffers: list[str] = field(default_factory=list)  # that the forward updates, such as a batch norm's
    written_weights: set[str] = field(default_factory=set)  # parameters that the forward changes, such as a teacher's
    flops: list[float] = field(default_factory=lambda: [1.0, 1.0])  # of each part's forward, for the traced batch


class _ForwardVaries(JobError):
    """The forward may take another path in each step: it reads the value of a tensor, for example."""


def find_anatomy(module: nn.Module, run: Run, trunk: str = "") -> Anatomy:
    """Runs a module twice on fake tensors. `trunk` names the list of blocks instead of looking for it."""
    calls = _Calls(module, trunk)
    generators_before = generator_states_outside_torch()
    try:
        try:
            _run_fake(module, run, calls.hooks, calls.used_parameters, 2 * TRACED_SAMPLES)
        except JobError:
            module.eval()  # layers that are dropped at random (OPT) ask for a random number even with probability 0
            calls = _Calls(module, trunk)
            _run_fake(module, run, calls.hooks, calls.used_parameters, 2 * TRACED_SAMPLES)
        blocks, stream_key, larger_stream = calls.find_trunk()
        if trunk and not blocks:
            raise JobError(f"{trunk!r} is no list of blocks of which each runs once on the output of the one before.")
        tracker = _Tracker(module, Anatomy(blocks, stream_key=stream_key, flops=[0.0] * (len(blocks) + 2)))
        if not module.training and any(getattr(part, "layerdrop", 0) for part in module.modules()):
            tracker.found.random_module = "layerdrop"
        with _DropoutFinder(tracker):
            loss = _run_fake(module, run, tracker.hooks, tracker, TRACED_SAMPLES)
        if generator_states_outside_torch() != generators_before:
            return _anatomy_of_varying(module, _draws_in_python(module), random_module=type(module).__name__)
        _check_same_path(module, calls.used_parameters.names, set(tracker.found.parts_of))
    except _ForwardVaries as error:
        return _anatomy_of_varying(module, str(error))
    finally:
        module.train()
    return tracker.anatomy(loss, larger_stream)


def _anatomy_of_varying(module: nn.Module, reason: str, random_module: str = "") -> Anatomy:
    """Returns what is true of a module whose forward may take another path in each step."""
    norms = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return Anatomy(
        parts_of={name: (0,) for name, _ in module.named_parameters()},
        varies=True,
        crossing=reason,
        random_module=random_module,
        written_buffers=[f"{name}.running_mean" for name in norms],
        written_weights={name for name, _ in module.named_parameters()},  # nobody can tell
    )


def _check_same_path(module: nn.Module, first: set[str], second: set[str]) -> None:
    """Raises `_ForwardVaries` unless two runs used the same parameters; a forward may count its calls, for example."""
    if first != second:
        name = min(first ^ second)
        raise _ForwardVaries(
            f"{type(module).__name__}'s forward used the parameter {name} in one of two runs only, "
            "so it cannot be analysed; use replicate and shard only"
        )


def _draws_in_python(module: nn.Module) -> str:
    return (
        f"{type(module).__name__}'s forward draws random numbers with Python's or NumPy's generator, "
        "so it cannot be analysed; use torch's generator, or use one process"
    )


def _run_fake(module: nn.Module, run: Run, hooks: Callable[[], Any], mode: Any, samples: int) -> Tensor:
    try:
        with with_fake_tensors(module) as to_fake, ExitStack() as registered:
            for hook in hooks():
                registered.enter_context(hook)
            with mode:
                return run(module, to_fake, samples)
    except JobError:
        raise
    except Exception as error:
        raise _explain(module, error) from error


def _explain(module: nn.Module, error: Exception) -> JobError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename and "/shardwise/" not in frame.filename]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    name, kind = type(module).__name__, type(error).__name__
    if "DataDependent" in kind or "DynamicOutput" in kind or "UnbackedSymInt" in kind:
        what = f"{name}'s forward reads the value of a tensor in Python{place}, so it cannot be analysed without values"
        remedy = "use torch.where or masks instead of `if`, `.item()` and `.nonzero()`, or use replicate and shard only"
        return _ForwardVaries(f"{what}; {remedy}")
    first_line = (str(error).splitlines() or [""])[0]
    return JobError(f"{name} failed on the example batch{place}: {kind}: {first_line.rstrip('.')}.")


class _UsedParameters(TorchDispatchMode):
    """Records the names of the parameters that operators get."""

    def __init__(self) -> None:
        super().__init__()
        self.name_of: dict[int, str] = {}
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.name_of:
                self.names.add(self.name_of[id(tensor)])
        return func(*args, **(kwargs or {}))


class _Calls:
    """Records the calls of the children of all lists of modules, to find the trunk."""

    def __init__(self, module: nn.Module, trunk: str):
        lists = {name: dict(part.named_children()) for name, part in module.named_modules()
                 if isinstance(part, nn.ModuleList | nn.Sequential) and (not trunk or name == trunk)}  # fmt: skip
        self.lists = [list(children.values()) for children in lists.values()]
        self.names = {child: f"{name}.{key}".removeprefix(".") for name, children in lists.items()
                      for key, child in children.items()}  # fmt: skip
        self.calls: dict[nn.Module, list[tuple[dict[int | str, Any], Tensor | None]]] = {}
        """By child of a list: the arguments of each call, and the stream in what it returned."""
        self.module = module
        self.used_parameters = _UsedParameters()

    def hooks(self) -> list[RemovableHandle]:
        # Only now are the parameters those that the run will use: fake ones.
        self.used_parameters.name_of = {id(p): name for name, p in self.module.named_parameters()}
        return [child.register_forward_hook(self._record, with_kwargs=True) for child in self.names]

    def _record(self, child: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.calls.setdefault(child, []).append(({**dict(enumerate(args)), **kwargs}, _stream_of(out)))

    def find_trunk(self) -> tuple[tuple[str, ...], int | str, Tensor | None]:
        """Returns the names of the blocks, which of their arguments is the stream, and the stream after the last."""
        size, stream_key, stream = 0, cast("int | str", 0), None
        best: list[nn.Module] = []
        for children in self.lists:
            for key in {key: None for child in children for inputs, _ in self.calls.get(child, ()) for key in inputs}:
                run: list[nn.Module] = []
                last = None
                for child in children:
                    before, after = self._stream_through(child, key)
                    run = [] if after is None else [*run, child] if before is last else [child]
                    last = after
                    run_size = sum(p.numel() for block in run for p in block.parameters())
                    if len(run) > 1 and run_size > size:
                        size, best, stream_key, stream = run_size, run, key, after
        return tuple(self.names[child] for child in best), stream_key, stream

    def _stream_through(self, child: nn.Module, key: int | str) -> tuple[Tensor | None, Tensor | None]:
        """Returns what goes in and what comes out of a child; None if it is not called once or changes the shape."""
        calls = self.calls.get(child, ())
        before, after = (calls[0][0].get(key), calls[0][1]) if len(calls) == 1 else (None, None)
        if not isinstance(before, Tensor) or after is None or not after.is_floating_point():
            return None, None
        return (before, after) if (before.shape, before.dtype) == (after.shape, after.dtype) else (None, None)


def _stream_of(out: Any) -> Tensor | None:
    """Returns the stream in what a block returns: the tensor, or the first element of a tuple."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return first if isinstance(first, Tensor) else None


class _Tracker(TorchDispatchMode):
    """Follows which part of the module computes each tensor, and from which parameters."""

    def __init__(self, module: nn.Module, found: Anatomy):
        super().__init__()
        self.module, self.found = module, found
        self.block_index = {module.get_submodule(name): index for index, name in enumerate(found.blocks, start=1)}
        self.part, self.stack, self.inside_block = 0, [""], False
        self.calls = Counter[str]()
        self.made: dict[int, tuple[Tensor, int, str]] = {}  # the tensor, the part that may use it, where it was made
        self.returned: dict[int, tuple[Tensor, set[str]]] = {}  # by storage: a tensor, and which modules returned it
        self.enclosing: dict[str, set[str]] = {}
        self.off_stream: set[int] = set()  # in `made`: depending on weights after the prologue, not on the stream
        self.stream_shapes: dict[tuple[int, ...], None] = {}

    def hooks(self) -> list[RemovableHandle]:
        self.names = {part: name for name, part in self.module.named_modules()}
        self.parameters = {id(p): name for name, p in self.module.named_parameters()}
        # By storage: a forward may write through a view, as `buffer[0] = x` and instance norms do.
        self.buffers = {storage_key(buffer): name for name, buffer in self.module.named_buffers()}
        self.buffers_before = dict(self.module.named_buffers())
        self.weight_storages = {name: storage_key(weight) for name, weight in self.module.named_parameters()}
        self.weights = {storage: name for name, storage in self.weight_storages.items()}
        handles = [part.register_forward_pre_hook(self._enter, with_kwargs=True) for part in self.names]
        return handles + [part.register_forward_hook(self._leave, with_kwargs=True) for part in self.names]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(self.names[module])
        self.calls[self.names[module]] += 1
        if module in self.block_index:
            self.part, self.inside_block = self.block_index[module], True
            stream = {**dict(enumerate(args)), **kwargs}[self.found.stream_key]
            self._hand_over(stream)
            self.stream_shapes[tuple(stream.shape)] = None

    def _hand_over(self, stream: Any) -> None:
        """Lets the current part use the stream, and no other part any longer."""
        self.found.stream = stream
        if id(stream) in self.made:
            self.made[id(stream)] = stream, self.part, self.made[id(stream)][2]

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        name = self.stack.pop()
        for leaf in tensors_in(out):
            self.returned.setdefault(storage_key(leaf), (leaf, set()))[1].add(name)
        if module is self.module:
            self._note_replaced_buffers()
            self._note_replaced_weights()
        if module in self.block_index:
            self.found.stream, self.inside_block = _stream_of(out), False
            if isinstance(out, tuple | list):
                self._note_outputs(out, {**dict(enumerate(args)), **kwargs}, name)
            if self.part == len(self.found.blocks):
                self.part += 1
                self._hand_over(self.found.stream)

    def _note_replaced_buffers(self) -> None:
        """Notes the buffers that the forward has set to new tensors, as in `self.mean = 0.9 * self.mean + ...`.

        One that is not saved with the module is a cache, such as a mask of the batch's size. If it is more than that,
        the proof sees what it does to the next step."""
        for name, buffer in self.module.named_buffers():
            owner, _, key = name.rpartition(".")
            is_saved = key not in self.module.get_submodule(owner)._non_persistent_buffers_set
            if is_saved and buffer is not self.buffers_before.get(name):
                self.found.written_buffers.append(name)

    def _note_replaced_weights(self) -> None:
        """Notes the parameters whose data the forward has set to another tensor, as in `weight.data = ...`."""
        now = dict(self.module.named_parameters())
        for name, storage in self.weight_storages.items():
            if name in now and storage_key(now[name]) != storage:
                self.found.written_weights.add(name)

    def _note_outputs(self, out: Any, arguments: dict[int | str, Any], name: str) -> None:
        """Notes what a block returns besides the stream: an argument, or what no other block may use."""
        keys = {id(value): key for key, value in arguments.items() if value is not None}
        self.found.outputs, self.found.returns_tuple = tuple(keys.get(id(value)) for value in out[1:]), True
        for value, key in zip(out[1:], self.found.outputs, strict=True):
            for leaf in tensors_in(value) if key is None else ():
                self.made[id(leaf)] = leaf, -1, self._place(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        name = func.overloadpacket.__name__
        depends = False
        for tensor in inputs:
            if id(tensor) in self.parameters:
                parameter, depends = self.parameters[id(tensor)], True
                parts = self.found.parts_of.get(parameter, ())
                self.found.parts_of[parameter] = parts if self.part in parts else (*parts, self.part)
                self.enclosing.setdefault(parameter, set(self.stack)).intersection_update(self.stack)
            elif id(tensor) in self.made and name not in SHAPE_ONLY:
                _, part, place = self.made[id(tensor)]
                depends = True
                if part != self.part and not self.found.crossing:
                    places = f"a tensor made in {place} is used in {self._place(self.stack[-1])}"
                    self.found.crossing = f"{places}, and only the blocks' output may pass from one stage to the next"
        if depends and name not in SHAPE_ONLY:
            self._note_second_path(inputs, outputs)
            for tensor in outputs:
                self.made[id(tensor)] = tensor, self.part, self._place(self.stack[-1])
        self._note_side_effects(func, name, args, kwargs)
        if func.overloadpacket in flop_registry:
            self.found.flops[self.part] += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        return out

    def _note_second_path(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        others = [id(x) for x in inputs if x.is_floating_point() and id(x) not in self.parameters]
        if self.part and self.off_stream.issuperset(others):
            self.off_stream.update(map(id, outputs))
            if others and any(id(tensor) in self.parameters for tensor in inputs):
                self.found.second_path = self.found.second_path or self.stack[-1]

    def _note_side_effects(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        found, values = self.found, dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, Tensor):
                continue
            if storage_key(value) in self.buffers:
                found.written_buffers.append(self.buffers[storage_key(value)])
            if storage_key(value) in self.weights:
                found.written_weights.add(self.weights[storage_key(value)])
            _, names = self.returned.get(storage_key(value), (None, set()))
            found.altered |= names
            if self.inside_block and storage_key(value) not in self.buffers:
                found.in_place_blocks.add(found.blocks[self.part - 1])
                if found.stream is not None and storage_key(value) == storage_key(found.stream):
                    found.changes_input = found.blocks[self.part - 1]
            blocks = [name for name in names if name in found.blocks]
            if blocks and not self.inside_block and self.part <= len(found.blocks) and not found.crossing:
                found.crossing = f"the output of {blocks[0]} is changed in place outside of the blocks"
        running_mean = values.get("running_mean")
        is_updated = name.endswith("batch_norm") and values.get("training") and isinstance(running_mean, Tensor)
        if is_updated and storage_key(running_mean) in self.buffers:
            found.written_buffers.append(self.buffers[storage_key(running_mean)])
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in name
        if is_random or values.get("dropout_p"):
            self.note_random()

    def note_random(self) -> None:
        self.found.random_module = self.found.random_module or self.stack[-1] or type(self.module).__name__

    def _place(self, name: str) -> str:
        is_after = self.part > len(self.found.blocks)
        kind = "prologue" if self.part == 0 else "epilogue" if is_after else f"block {self.part - 1}"
        return f"{name or type(self.module).__name__} ({kind})"

    def anatomy(self, loss: Tensor, larger_stream: Tensor | None) -> Anatomy:
        """Completes what the run has shown; `larger_stream`: the stream of twice as many samples."""
        found = self.found
        if found.blocks and (found.stream is None or larger_stream is None):
            raise JobError(f"the blocks of {type(self.module).__name__} do not pass on a tensor.")
        if found.stream is not None and larger_stream is not None:
            sizes = enumerate(zip(found.stream.shape, larger_stream.shape))
            dim = next((dim for dim, (few, many) in sizes if many == 2 * few), None)
            if dim is None and not found.crossing:
                found.crossing = f"the output of {found.blocks[-1]} has no dimension that grows with the samples"
            found.stream, found.stream_dim = torch.empty_like(found.stream, device="meta"), dim or 0
        found.called = frozenset(self.calls)
        found.called_once = frozenset(name for name, count in self.calls.items() if count == 1)
        found.units = tuple(self._units(self.module, ""))
        found.without_gradient = self._without_gradient(loss)
        found.crossing = self._crossing_sentence()
        numel, counted = {name: p.numel() for name, p in self.module.named_parameters()}, list(found.flops)
        for name, parts in found.parts_of.items():
            for part in parts:  # where no operator is known (LSTM), one product per parameter and sample
                found.flops[part] += 0.0 if counted[part] else 2.0 * TRACED_SAMPLES * numel[name]
        found.flops = [max(1.0, flops) for flops in found.flops]
        return found

    def _without_gradient(self, loss: Tensor) -> frozenset[str]:
        """Returns the parameters that the graph of the loss does not reach."""
        if loss.grad_fn is None:
            raise JobError("the loss depends on no trainable parameter; is it detached, or is every parameter frozen?")
        reached, seen, nodes = set[int](), set[Any](), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() == "CheckpointFunctionBackward":
                return frozenset()  # what it recomputes is not in the graph
            reached.add(id(getattr(node, "variable", None)))
            nodes += [following for following, _ in node.next_functions if following is not None]
        return frozenset(name for identity, name in self.parameters.items() if identity not in reached)

    def _crossing_sentence(self) -> str:
        if not self.found.blocks:
            missing = "no list of blocks was found of which each is called once, on the output of the one before, and"
            return f"{missing} keeps its shape; name it with `trunk`, or use shard instead of pipeline"
        if self.found.crossing:
            return f"{self.found.crossing}; pass it through the blocks, or use shard instead of pipeline"
        if len(self.stream_shapes) > 1:
            first, second, *_ = self.stream_shapes
            return f"the inputs of the blocks have different shapes, such as {first} and {second}"
        for name, parts in self.found.parts_of.items():
            inner = [part for part in parts if 0 < part <= len(self.found.blocks)]
            if len(parts) > 1 and inner:
                return f"the parameter {name} is used in block {inner[0] - 1} and elsewhere"
        return ""

    def _units(self, module: nn.Module, prefix: str) -> Iterator[str]:
        """Yields modules outside of the trunk whose parameters are used in their own forward only, which runs once."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if name in self.found.blocks or not any(True for _ in child.parameters()):
                continue
            if any(block.startswith(f"{name}.") for block in self.found.blocks):
                yield from self._units(child, f"{name}.")
                continue
            mine = [names.get(id(p), "") for p in child.parameters()]
            is_own = name not in self.found.altered and all(name in self.enclosing.get(p, ()) for p in mine)
            if is_own and self.calls.get(name) == 1 and all(len(self.found.parts_of.get(p, ())) == 1 for p in mine):
                yield name


class _DropoutFinder(TorchFunctionMode):
    """Notes functional dropout, also where it runs without training and nothing is drawn."""

    def __init__(self, tracker: _Tracker):
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and (kwargs.get("p", 0.5) if len(args) < 2 else args[1]):
            self.tracker.note_random()
        return func(*args, **kwargs)
