"""The anatomy of a module, from one run on fake tensors: what can be split, sharded and cut, and what cannot.

The trunk is the largest run of blocks in a list that are called once each, in a row, every block on the output of the
one before (the stream), which keeps its shape. What runs before it is the prologue, what runs after it the epilogue. A
pipeline cuts between blocks, so nothing but the stream may cross: a tensor that was computed from weights in one part
and is used in another is reported by the names of both modules.

A forward that reads values cannot run on fake tensors. Such a module has no trunk, and every parameter counts as used.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from shardwise.adapters.function_modes import FunctionalDropoutFinder
from shardwise.errors import JobError
from shardwise.models.trace import to_fake, with_fake_tensors

# Operators that read the shape of a tensor and not its values.
_SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
TRACED_SAMPLES = 2


@dataclass(frozen=True)
class Anatomy:
    """What one run of a module showed. Part 0 is the prologue, parts 1 to n the blocks, part n + 1 the epilogue."""

    blocks: tuple[str, ...] = ()
    """Names of the trunk's blocks in the order of their calls; empty: no trunk was found."""
    stream: Tensor | None = None
    """What the blocks hand on, on the meta device, for the batch that was traced."""
    stream_dim: int = 0
    """Which dimension of the stream is the samples."""
    stream_key: int | str = 0
    """Which argument of a block is the stream: its position or its keyword."""
    outputs: tuple[int | str | None, ...] = ()
    """If a block returns a tuple: for each element after the stream, which argument it hands on; None: it computes it.
    Empty: a block returns the stream alone."""
    returns_tuple: bool = False
    parts_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By parameter: the parts that use it. Parameters that the forward does not use are missing."""
    called_once: frozenset[str] = frozenset()
    """Modules whose forward runs exactly once."""
    units: tuple[str, ...] = ()
    """Modules besides the blocks whose parameters nothing else uses, so that FSDP can shard them on their own."""
    altered: frozenset[str] = frozenset()
    """Modules whose output is changed in place after they have returned it."""
    in_place_blocks: frozenset[str] = frozenset()
    """Blocks that change activations in place."""
    changes_input: str = ""
    """A block that changes its input in place; empty if none does."""
    without_gradient: frozenset[str] = frozenset()
    """Parameters that the loss does not depend on."""
    reads_values: bool = False
    """Whether the forward reads values of tensors in Python, so that it may use other parameters in every step."""
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


Run = Callable[[nn.Module, Callable[[Tensor], Tensor], int], Tensor]
"""Returns a module's loss on an example batch of so many samples, whose tensors it converts with the given function."""


class _ReadsValues(JobError):
    """The forward reads the value of a tensor."""


def find_anatomy(module: nn.Module, run: Run, trunk: str = "") -> Anatomy:
    """Runs a module twice on fake tensors. `trunk` names the list of blocks instead of looking for it."""
    calls = _Calls(module, trunk)
    try:
        try:
            _run_fake(module, run, calls.hooks, nullcontext(), 2 * TRACED_SAMPLES)
        except JobError:
            # Layers that are dropped at random (OPT) ask for a random number even if the probability is 0.
            module.eval()
            calls = _Calls(module, trunk)
            _run_fake(module, run, calls.hooks, nullcontext(), 2 * TRACED_SAMPLES)
        blocks, stream_key = calls.find_trunk()
        if trunk and not blocks:
            raise JobError(
                f"{trunk!r} is not a list of blocks of which each runs once on the output of the one before."
            )
        tracker = _Tracker(module, blocks, stream_key)
        tracker.larger_stream = calls.outputs.get(module.get_submodule(blocks[-1])) if blocks else None
        if not module.training and any(getattr(part, "layerdrop", 0) for part in module.modules()):
            tracker.random_modules["layerdrop"] = None
        with FunctionalDropoutFinder(lambda: tracker.note_random(tracker.stack[-1])):
            loss = _run_fake(module, run, tracker.hooks, tracker, TRACED_SAMPLES)
    except _ReadsValues as error:
        used: dict[str, tuple[int, ...]] = {name: (0,) for name, _ in module.named_parameters()}
        norms = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        written = tuple(f"{name}.running_mean" for name in norms)
        return Anatomy(parts_of=used, reads_values=True, crossing=str(error), written_buffers=written, flops=(1.0, 1.0))
    finally:
        module.train()
    return tracker.anatomy(loss)


def _run_fake(
    module: nn.Module, run: Run, hooks: Callable[[], list[RemovableHandle]], mode: Any, samples: int
) -> Tensor:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fake, with_fake_tensors(module, fake), ExitStack() as registered:
            for hook in hooks():
                registered.enter_context(hook)
            with mode:
                return run(module, to_fake(fake), samples)
    except JobError:
        raise
    except Exception as error:
        raise _explain(module, error) from error


def _explain(module: nn.Module, error: Exception) -> JobError:
    frame, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/shardwise/" not in file:
            frame = trace
        trace = trace.tb_next
    place = "" if frame is None else f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    name, kind = type(module).__name__, type(error).__name__
    if "DataDependent" in kind or "DynamicOutput" in kind or "UnbackedSymInt" in kind:
        return _ReadsValues(
            f"{name}'s forward reads the value of a tensor in Python{place}, so it cannot be analysed without values; "
            "use torch.where or masks instead of `if`, `.item()` and `.nonzero()`, or use replicate and shard only"
        )
    first_line = (str(error).splitlines() or [""])[0]
    return JobError(f"{name} failed on the example batch{place}: {kind}: {first_line.rstrip('.')}.")


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
        self.count: dict[nn.Module, int] = {}
        self.inputs: dict[nn.Module, dict[int | str, Any]] = {}
        self.outputs: dict[nn.Module, Tensor | None] = {}

    def hooks(self) -> list[RemovableHandle]:
        return [child.register_forward_hook(self._record, with_kwargs=True) for child in self.names]

    def _record(self, child: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.count[child] = self.count.get(child, 0) + 1
        self.inputs[child] = {**dict(enumerate(args)), **kwargs}
        self.outputs[child] = _stream_of(out)

    def find_trunk(self) -> tuple[tuple[str, ...], int | str]:
        """Returns the names of the blocks, and which of their arguments is the stream."""
        size, stream_key = 0, cast("int | str", 0)
        best: list[nn.Module] = []
        for children in self.lists.values():
            for key in {key: None for child in children for key in self.inputs.get(child, {})}:
                run: list[nn.Module] = []
                for child in children:
                    if run and self.inputs.get(child, {}).get(key) is not self.outputs[run[-1]]:
                        run = []
                    run = [*run, child] if self._keeps_shape(child, key) else []
                    run_size = sum(p.numel() for block in run for p in block.parameters())
                    if len(run) > 1 and run_size > size:
                        size, best, stream_key = run_size, run, key
        return tuple(self.names[child] for child in best), stream_key

    def _keeps_shape(self, child: nn.Module, key: int | str) -> bool:
        before, after = self.inputs.get(child, {}).get(key), self.outputs.get(child)
        if self.count.get(child) != 1 or not isinstance(before, Tensor) or after is None:
            return False
        return after.is_floating_point() and (before.shape, before.dtype) == (after.shape, after.dtype)


def _stream_of(out: Any) -> Tensor | None:
    """Returns the stream in what a block returns: the tensor, or the first element of a tuple."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return first if isinstance(first, Tensor) else None


class _Tracker(TorchDispatchMode):
    """Follows which part of the module computes each tensor, and from which parameters."""

    def __init__(self, module: nn.Module, blocks: tuple[str, ...], stream_key: int | str):
        super().__init__()
        self.module, self.block_names = module, blocks
        self.block_index = {module.get_submodule(name): index for index, name in enumerate(blocks, start=1)}
        self.part, self.stack = 0, [""]
        self.calls: dict[str, int] = {}
        self.made: dict[int, tuple[Tensor, int, str]] = {}
        """By tensor that depends on weights: itself, the part that may use it, and the place where it was made."""
        self.returned: dict[int, tuple[Tensor, set[str]]] = {}
        """By storage: a tensor that modules returned, and their names."""
        self.altered: set[str] = set()
        self.in_place_blocks, self.changes_input = set[str](), ""
        self.inside_block = False
        self.parts_of: dict[str, set[int]] = {}
        self.enclosing: dict[str, set[str]] = {}
        self.crossing = self.second_path = ""
        self.off_stream: set[int] = set()
        """Tensors in `made` that depend on weights after the prologue, but not on the stream."""
        self.random_modules: dict[str, None] = {}
        self.written: dict[str, None] = {}
        self.flops = [0.0] * (len(blocks) + 2)
        self.stream: Tensor | None = None
        self.larger_stream: Tensor | None = None
        """The stream of twice as many samples."""
        self.stream_key = stream_key
        self.outputs: tuple[int | str | None, ...] | None = None
        self.stream_shapes: dict[tuple[int, ...], None] = {}

    def hooks(self) -> list[RemovableHandle]:
        names = list(self.module.named_modules())
        self.parameters = {id(p): name for name, p in self.module.named_parameters()}
        self.buffers = {id(b): name for name, b in self.module.named_buffers()}
        handles = [part.register_forward_pre_hook(self._enter(name), with_kwargs=True) for name, part in names]
        return handles + [part.register_forward_hook(self._leave(name), with_kwargs=True) for name, part in names]

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(name)
            self.calls[name] = self.calls.get(name, 0) + 1
            if module in self.block_index:
                self.part, self.inside_block = self.block_index[module], True
                self.stream = kwargs[self.stream_key] if isinstance(self.stream_key, str) else args[self.stream_key]
                self._hand_over(self.stream)
                self.stream_shapes[tuple(self.stream.shape)] = None

        return hook

    def _hand_over(self, stream: Any) -> None:
        """Lets the current part use the stream, and no other part any longer."""
        if id(stream) in self.made:
            self.made[id(stream)] = stream, self.part, self.made[id(stream)][2]

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.stack.pop()
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.returned.setdefault(_storage(leaf), (leaf, set()))[1].add(name)
            if module in self.block_index:
                self.stream, self.inside_block = _stream_of(out), False
                if isinstance(out, tuple | list):
                    self._note_outputs(out, {**dict(enumerate(args)), **kwargs}, name)
                if self.part == len(self.block_names):
                    self.part += 1
                    self._hand_over(self.stream)

        return hook

    def _note_outputs(self, out: Any, arguments: dict[int | str, Any], name: str) -> None:
        """Notes what a block returns besides the stream: an argument, or what no other block may use."""
        keys = {id(value): key for key, value in arguments.items() if value is not None}
        self.outputs = tuple(keys.get(id(value)) for value in out[1:])
        for value, key in zip(out[1:], self.outputs, strict=True):
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and key is None:
                    self.made[id(leaf)] = leaf, -1, self._place(self.part, name)

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
                _, part, place = self.made[id(tensor)]
                depends = True
                if part != self.part and not self.crossing:
                    self.crossing = (
                        f"a tensor made in {place} is used in {self._place(self.part, self.stack[-1])}, and only the "
                        "blocks' output may pass from one stage to the next"
                    )
        if depends and name not in _SHAPE_ONLY:
            self._note_second_path(inputs, outputs)
            for tensor in outputs:
                self.made[id(tensor)] = tensor, self.part, self._place(self.part, self.stack[-1])
        self._note_side_effects(func, name, args, kwargs)
        if func.overloadpacket in flop_registry:
            self.flops[self.part] += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        return out

    def _note_second_path(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        others = [id(x) for x in inputs if x.is_floating_point() and id(x) not in self.parameters]
        if self.part and self.off_stream.issuperset(others):
            self.off_stream.update(map(id, outputs))
            if others and any(id(tensor) in self.parameters for tensor in inputs):
                self.second_path = self.second_path or self.stack[-1]

    def _note_side_effects(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, Tensor):
                continue
            if id(value) in self.buffers:
                self.written[self.buffers[id(value)]] = None
            _, names = self.returned.get(_storage(value), (None, set()))
            self.altered |= names
            if self.inside_block and id(value) not in self.buffers:
                self.in_place_blocks.add(self.block_names[self.part - 1])
                if self.stream is not None and _storage(value) == _storage(self.stream):
                    self.changes_input = self.block_names[self.part - 1]
            blocks = [name for name in names if name in self.block_names]
            if blocks and not self.inside_block and self.part <= len(self.block_names) and not self.crossing:
                self.crossing = f"the output of {blocks[0]} is changed in place outside of the blocks"
        if name.endswith("batch_norm") and values.get("training") and id(values.get("running_mean")) in self.buffers:
            self.written[self.buffers[id(values["running_mean"])]] = None
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in name
        if is_random or values.get("dropout_p"):
            self.note_random(self.stack[-1])

    def note_random(self, name: str) -> None:
        self.random_modules[name or type(self.module).__name__] = None

    def _place(self, part: int, name: str) -> str:
        kind = "prologue" if part == 0 else "epilogue" if part > len(self.block_names) else f"block {part - 1}"
        return f"{name or type(self.module).__name__} ({kind})"

    def anatomy(self, loss: Tensor) -> Anatomy:
        stream = self.stream
        if self.block_names and stream is None:
            raise JobError(f"the blocks of {type(self.module).__name__} do not pass on a tensor.")
        return Anatomy(
            self.block_names, None if stream is None else torch.empty_like(stream, device="meta"), self._stream_dim(),
            self.stream_key, self.outputs or (), self.outputs is not None,
            {name: tuple(sorted(parts)) for name, parts in self.parts_of.items()},
            frozenset(name for name, count in self.calls.items() if count == 1),
            tuple(self._units(self.module, "")), frozenset(self.altered), frozenset(self.in_place_blocks),
            self.changes_input, self._without_gradient(loss), False, self._crossing_sentence(), self.second_path,
            tuple(self.random_modules), tuple(self.written), self._part_flops(),
        )  # fmt: skip

    def _part_flops(self) -> tuple[float, ...]:
        """Returns the FLOPs of each part; where no operator is known (LSTM), one product per parameter and sample."""
        flops, sizes = list(self.flops), {name: p.numel() for name, p in self.module.named_parameters()}
        for name, parts in self.parts_of.items():
            for part in parts:
                flops[part] += 0.0 if self.flops[part] else 2.0 * TRACED_SAMPLES * sizes[name]
        return tuple(max(1.0, part) for part in flops)

    def _stream_dim(self) -> int:
        if self.stream is None or self.larger_stream is None:
            return 0
        sizes = enumerate(zip(self.stream.shape, self.larger_stream.shape))
        dim = next((dim for dim, (few, many) in sizes if many == 2 * few), None)
        if dim is None and not self.crossing:
            self.crossing = f"the output of {self.block_names[-1]} has no dimension that grows with the samples"
        return dim or 0

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
        if not self.block_names:
            return (
                "no list of blocks was found of which each is called once, on the output of the one before, and keeps "
                "its shape; name it with `trunk`, or use shard instead of pipeline"
            )
        if self.crossing:
            return f"{self.crossing}; pass it through the blocks, or use shard instead of pipeline"
        if len(self.stream_shapes) > 1:
            first, second, *_ = self.stream_shapes
            return f"the inputs of the blocks have different shapes, such as {first} and {second}"
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
            is_own = is_own and name not in self.altered
            if is_own and self.calls.get(name) == 1 and all(len(self.parts_of.get(p, ())) == 1 for p in mine):
                yield name


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
