"""Builds a module without memory for its parameters, and computes any parameter's initial value later, on its own.

The constructor runs as its author wrote it. Each parameter becomes a fake tensor when a module registers it; buffers
stay real. What the constructor does to parameters from then on (`reset_parameters`, `nn.init`, `copy_`) is recorded,
and `DeferredInit.value` replays it for one parameter. Random operators draw from a generator that is seeded by the
job's seed, the number of the parameter and the number of the operator, so a value does not depend on which others a
process computes. Where the constructor reads a value (`nn.init.trunc_normal_` does), that value is replayed at once,
and so is what it copies into a buffer.
Meta tensors would not do instead of fake ones: `nn.init.orthogonal_` and others skip them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.adapters.gradient_hooks import carry_hooks, copy_with_hooks
from shardwise.errors import JobError
from shardwise.models.chain import InitialValues
from shardwise.models.fake_tensors import fake_tensor_mode
from shardwise.models.trace import storage_key, tensors_in
from shardwise.random import generators_kept, hash_key, seed_generators

# Operators that replace every element of their first argument: what it held before is not needed.
_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "log_normal_", "exponential_", "bernoulli_", "random_")


@dataclass(frozen=True)
class _View:
    """A tensor of the recording: a view of a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        return cls(
            storage_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )


@dataclass(frozen=True)
class _Operation:
    func: Any
    args: Any
    kwargs: Any
    outputs: Any
    reads: set[int]
    seed: int


class _Numbering:
    """Numbers the operators that act on parameters, which gives each of them a seed of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._parameters = 0
        self._operations = 0
        self._counts: dict[int, tuple[int, int]] = {}
        """By storage: the number of the parameter, and operators so far. 0: storages that are no parameter's."""

    def add_parameter(self, storage: int) -> None:
        self._counts[storage] = self._parameters, 0
        self._parameters += 1

    def seed_of(self, written: set[int]) -> int:
        """Returns the seed of the next operator; `written`: the storages that it writes to."""
        parameter, count = self._counts.get(self._owner(written), (-1, self._operations))
        return hash_key("module init", self.seed, parameter, count) & (2**63 - 1)

    def count(self, written: set[int]) -> None:
        """Counts an operator that has run."""
        owner = self._owner(written)
        parameter, count = self._counts.get(owner, (-1, self._operations))
        self._counts[owner] = parameter, count + 1
        self._operations += 1

    def _owner(self, written: set[int]) -> int:
        parameters = [storage for storage in written if storage in self._counts]
        return min(parameters, key=lambda storage: self._counts[storage], default=0)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the arguments that an operator changes, such as `self` of `mul_` and `out`."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([values.get(name) for name in changed])


class DeferredInit(TorchDispatchMode, InitialValues):
    """Records the operators that act on fake tensors, and gives the initial values of parameters, one at a time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.views: dict[str, _View] = {}  # of the parameters, once the module is built
        self._writers: dict[int, list[int]] = {}  # by storage: the operators that write to it
        self.fake_mode = fake_tensor_mode()
        self._originals: dict[int, Tensor] = {}  # by storage: what a parameter held when it was registered
        self._numbering = _Numbering(seed)
        self._moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._alive: list[Tensor] = []  # a storage that was freed could be mistaken for a new one at its address

    def to_fake(self, parameter: nn.Parameter) -> nn.Parameter:
        if _is_fake(parameter):
            return parameter
        if isinstance(parameter, nn.UninitializedParameter):
            raise JobError("the model has lazy modules, whose shapes are unknown; give them their sizes.")
        if id(parameter) not in self._moved:
            with _disable_current_modes(), self.fake_mode:
                new = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            moved = nn.Parameter(new, parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            carry_hooks(parameter, moved)
            storage = _View.of(moved).storage
            self._originals[storage] = parameter.detach()
            self._numbering.add_parameter(storage)
            self._moved[id(parameter)] = parameter, moved
        return self._moved[id(parameter)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        if not any(map(_is_fake, inputs)):
            return func(*args, **kwargs)
        try:
            writes_to_real = not all(map(_is_fake, _written_arguments(func, args, kwargs)))
            if writes_to_real or torch.Tag.data_dependent_output in func.tags:
                raise DataDependentOutputException(func)
            out = func(*args, **kwargs)
        except (DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
            storages: dict[int, Any] = {}
            real = lambda tensor: self.replay(_View.of(tensor), storages) if _is_fake(tensor) else tensor  # noqa: E731
            with _disable_current_modes():
                args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
                return func(*args, **kwargs)
        self._record(func, args, kwargs, out, inputs)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor]) -> None:
        outputs = tensors_in(out)
        reads = {storage_key(tensor) for tensor in inputs if _is_fake(tensor)}
        writes = {storage_key(tensor) for tensor in outputs} - reads
        writes |= {storage_key(tensor) for tensor in _written_arguments(func, args, kwargs)}
        if not writes:
            return  # a view
        self._alive += [*inputs, *outputs]
        if func.overloadpacket.__name__ in _OVERWRITES:
            original = self._originals.get(_View.of(args[0]).storage)
            if original is not None and original.numel() == args[0].numel():
                self._originals[_View.of(args[0]).storage] = torch.empty(0, dtype=original.dtype)
        seed = self._numbering.seed_of(writes)
        self._numbering.count(writes)
        freeze = lambda tensor: _View.of(tensor) if _is_fake(tensor) else tensor.clone()  # noqa: E731
        args, kwargs, out = tree_map_only(Tensor, freeze, (args, kwargs, out))
        for storage in writes:
            self._writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(_Operation(func, args, kwargs, out, reads, seed))

    def value(self, name: str) -> Tensor:
        return self.replay(self.views[name], {}).clone()

    def replay(self, target: _View, storages: dict[int, Any]) -> Tensor:
        """Returns the real value of a view, by running every recorded operator that it depends on."""
        chosen: set[int] = set()
        needed = [(target.storage, len(self.operations))]  # storages, each with the operator that reads it
        while needed:
            storage, reader = needed.pop()
            for index in self._writers.get(storage, ()):
                if index < reader and index not in chosen:
                    chosen.add(index)
                    needed += [(read, index) for read in self.operations[index].reads]

        def thaw(view: _View) -> Tensor:
            if view.storage not in storages:
                original = self._originals[view.storage]
                spanned = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")
                end = spanned.untyped_storage().nbytes() + view.offset * view.dtype.itemsize
                size = max(original.untyped_storage().nbytes(), end)
                storages[view.storage] = torch.empty(size, dtype=torch.uint8).untyped_storage()
                if original.numel():
                    real = torch.empty(0, dtype=original.dtype)
                    real.set_(storages[view.storage], 0, original.shape, original.stride()).copy_(original)
            real = torch.empty(0, dtype=view.dtype)
            return real.set_(storages[view.storage], view.offset, view.shape, view.stride)

        if target.storage in storages:
            return thaw(target)
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for operation in (self.operations[index] for index in sorted(chosen)):
                # Not `torch.manual_seed`: that seeds every kind of device, which takes longer than most operators.
                torch.default_generator.manual_seed(operation.seed)
                args, kwargs = tree_map_only(_View, thaw, (operation.args, operation.kwargs))
                out = operation.func(*args, **kwargs)
                for view, real in zip(tree_leaves(operation.outputs), tree_leaves(out), strict=True):
                    if isinstance(view, _View) and view.storage not in storages:
                        # A kernel may choose other strides than its fake implementation.
                        laid_out = torch.empty_strided(view.shape, view.stride, dtype=view.dtype).copy_(real)
                        storages[view.storage] = laid_out.untyped_storage()
            return thaw(target)


class PlainInit(TorchDispatchMode):
    """Within it, a constructor runs on real parameters, and sees the random numbers that it sees in `DeferredInit`.

    There, what is drawn for a parameter has a seed of its own, and leaves PyTorch's generator where it is. A buffer
    that is drawn next must have the same values here."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._numbering = _Numbering(seed)
        self._dependent: dict[int, Tensor] = {}  # by storage: parameters and what was computed from them, kept alive

    def add_parameter(self, parameter: nn.Parameter) -> None:
        if storage_key(parameter) not in self._dependent:
            self._dependent[storage_key(parameter)] = parameter.detach()
            self._numbering.add_parameter(storage_key(parameter))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        written = {storage_key(tensor) for tensor in _written_arguments(func, args, kwargs)}
        is_recorded = not _needs_values(func) and written <= self._dependent.keys()
        if reads.isdisjoint(self._dependent) or not is_recorded:
            return func(*args, **kwargs)

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._numbering.seed_of(written))
            out = func(*args, **kwargs)

        made = {storage_key(tensor): tensor for tensor in tensors_in(out) if storage_key(tensor) not in reads}
        if written or made:  # else it is a view
            self._numbering.count(written)
        self._dependent |= made
        return out


def _needs_values(func: Any) -> bool:
    """Whether an operator cannot run on fake tensors."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) or (isinstance(tensor, nn.Parameter) and isinstance(tensor.data, FakeTensor))


def _copy_prebuilt(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies what existed before the constructor ran, such as a module that was given, so that it stays as it is."""
    fakes = [_is_fake(parameter) for parameter in module.parameters()]
    if fakes and not any(fakes):
        return copy_with_hooks(module, memo)
    if not all(fakes):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _copy_prebuilt(child, memo)
    return module


@contextmanager
def _numbers_of_build(seed: int) -> Iterator[None]:
    """Within it, a constructor draws the same numbers in every process and in the reference."""
    key = hash_key("module build", seed) & (2**63 - 1)
    with generators_kept():
        seed_generators(key)
        torch.manual_seed(key)  # of the device, too
        yield


def build_plain(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Returns the module as its author wrote it, with the random numbers of `build_deferred`."""
    mode = PlainInit(seed)
    note: Any = lambda module, name, parameter: mode.add_parameter(parameter)  # noqa: E731
    with _numbers_of_build(seed), register_module_parameter_registration_hook(note), mode:
        return build()


def _refuse_compiled(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"the module {name or type(module).__name__} is compiled by torch.jit"
            raise JobError(f"{what}, so its parameters cannot be replaced; leave out torch.jit.")


def _compute_copies(module: nn.Module, recorder: DeferredInit) -> None:
    """Gives a value to the buffers and attributes that the constructor has computed from parameters."""
    owners = {view.storage: name for name, view in recorder.views.items()}
    for place, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or not _is_fake(buffer):
                continue
            if storage_key(buffer) in owners:
                raise JobError(
                    f"the buffer {f'{place}.{name}'.removeprefix('.')} shares the memory of the parameter "
                    f"{owners[storage_key(buffer)]}, which a run replaces; register a clone, or use the parameter."
                )
            part._buffers[name] = recorder.replay(_View.of(buffer), {}).clone()

        for name, value in part.__dict__.items():
            is_computed = isinstance(value, Tensor) and _is_fake(value) and storage_key(value) not in owners
            if is_computed:
                part.__dict__[name] = recorder.replay(_View.of(value), {}).clone()


def build_deferred(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, DeferredInit]:
    """Returns the module with its parameters on the meta device, and their initial values."""
    recorder = DeferredInit(seed)
    make_fake: Any = lambda module, name, parameter: recorder.to_fake(parameter)  # noqa: E731
    registering = register_module_parameter_registration_hook(make_fake)
    with warnings.catch_warnings(), _numbers_of_build(seed), registering, recorder:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # copy.deepcopy does
        module = build()
    _refuse_compiled(module)
    module = _copy_prebuilt(module, {})
    all_slots = ((part._parameters, name) for part in module.modules() for name in part._parameters)
    slots: list[Any] = [(parameters, name) for parameters, name in all_slots if parameters[name] is not None]
    for parameters, name in slots:
        parameters[name] = recorder.to_fake(parameters[name])  # if it was assigned without registering it
    recorder.views = {name: _View.of(p) for name, p in module.named_parameters(remove_duplicate=False)}
    _compute_copies(module, recorder)
    on_meta: dict[int, nn.Parameter] = {}
    for parameters, name in slots:
        fake = parameters[name]
        new = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        if id(fake) not in on_meta:  # tied ones stay tied
            on_meta[id(fake)] = nn.Parameter(new, fake.requires_grad)
            carry_hooks(fake, on_meta[id(fake)])
        parameters[name] = on_meta[id(fake)]
    return module, recorder
