"""Any module as a chain: it runs its own forward, whole or cut into pipeline stages by substitution.

A stage keeps the module's tree and runs its forward, so masks, positions and whatever else the author computes from the
batch is computed on every stage. Blocks of other stages are passed over: those before hand on what they are given, the
last of them the stream that the stage received; the first block after the stage's own ends the forward by an exception
that carries the stream. Parameters of other stages are zeros without memory."""

import copy
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

from shardwise.adapters.anatomy import Anatomy
from shardwise.adapters.gradient_hooks import carry_hooks, check_changes
from shardwise.adapters.split_attention import SPLIT, split_sequence
from shardwise.adapters.task import Task
from shardwise.adapters.tensor_plan import scale_head_counts
from shardwise.errors import LayoutError
from shardwise.models.chain import Chain, InitialValues
from shardwise.models.layers import is_standard_batch_norm
from shardwise.models.sharding import ShardingPlan
from shardwise.random import Dropout, random_numbers_of

SHAPE_ERROR = re.compile(r"must match the size|cannot be multiplied|invalid for input|multiply up to|have the same")


class KeepFloat64(TorchFunctionMode):
    """Within it, a module runs in float64 throughout: what it casts to or makes in float32 is in float64.

    That includes what it makes of whole numbers, such as positions, which meet float64 frequencies next, and what is
    no part of the module and so was not cast with it: the class weights of a loss, a table in a list."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names_float32 = any(_is_float32(arg) for arg in (*args[1:], kwargs.get("dtype")))
        if func is Tensor.float or (func is Tensor.type and names_float32):
            return tensors[0].double()

        # Such as a softmax that is asked to compute in float32, or a cast, which may be to another device, too.
        if tensors and names_float32:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        if {torch.float32, torch.float64} <= {tensor.dtype for tensor in tensors} and not _writes(func, kwargs):
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        result = func(*args, **kwargs)

        # Such as `torch.zeros(4)`, or the quotient of whole numbers, which is in PyTorch's default dtype.
        is_float32 = isinstance(result, Tensor) and result.dtype is torch.float32
        if is_float32 and not any(tensor.dtype is torch.float32 for tensor in tensors):
            return result.double()
        return result


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes into one of its arguments, which must then be that very tensor."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__matmul__", "__rmatmul__"):
        return False
    # Other operators with underscores, such as `__add__`, take two dtypes; and `__setitem__` writes.
    return name.endswith(("_", "batch_norm", "instance_norm")) or "out" in kwargs


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def _is_float32(dtype: Any) -> bool:
    """Whether an argument names float32, as a dtype or in the words of old code."""
    is_name = isinstance(dtype, str) and dtype == "torch.FloatTensor"  # an array would compare its elements
    return dtype is torch.float32 or dtype is torch.FloatTensor or is_name


def keep_float64_in_backward(output: Tensor) -> Tensor:
    """Makes the backward of a module's own autograd functions keep float64, too; returns the output.

    Only of these: what PyTorch and the engine do in the backward is as it is."""
    seen: set[Any] = set()
    pending = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(parent for parent, _ in node.next_functions)

        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__.partition(".")[0] not in ("torch", "shardwise"):
            mode = KeepFloat64()
            node.register_prehook(partial(_enter, mode))
            node.register_hook(partial(_leave, mode))
    return output


def _enter(mode: KeepFloat64, grads: Any) -> None:
    mode.__enter__()


def _leave(mode: KeepFloat64, grad_inputs: Any, grad_outputs: Any) -> None:
    mode.__exit__(None, None, None)


class StageEnd(Exception):
    """Ends the forward of a stage; its argument is the stream, which the next stage receives."""


class _EndsStage(nn.Module):
    """A block that ends the forward once all of its hooks have run: the last one, if another stage has the epilogue."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        raise StageEnd(out[0] if isinstance(out, tuple | list) else out)


class KeyedDropout(nn.Module):
    """`nn.Dropout` whose mask depends on the seed, its place in the model, the sample and the element alone."""

    def __init__(self, p: float, site: str, seed: int, chain_state: dict[str, Any], drops_channels: bool = False):
        super().__init__()
        self.p, self.chain_state, self.drops_channels = p, chain_state, drops_channels
        self.mask = Dropout(p, site, seed)

    def forward(self, x: Tensor) -> Tensor:
        if "shapes" in self.chain_state:  # the module is traced
            self.chain_state["shapes"].setdefault(self.mask.site, []).append(x.shape)
            return x.clone()
        if not self.training or self.p == 0.0:
            return x
        ids, dim = self.chain_state["ids"], self.chain_state.get("sample_dims", {}).get(self.mask.site, 0)
        if dim is None or x.shape[dim] % ids.shape[0] or (self.drops_channels and x.shape[0] != ids.shape[0]):
            what = f"dropout at {self.mask.site} gets a tensor {tuple(x.shape)} without a dimension of samples"
            raise LayoutError(f"{what}, so its mask cannot be the same in every layout; use p = 0 there.")
        if self.drops_channels:
            channels = self.mask(x.new_ones(ids.shape[0], 1, x.shape[1]), ids)
            return x * channels.reshape(*x.shape[:2], *[1] * (x.dim() - 2))
        rows = x.movedim(dim, 0)
        flat = rows.reshape(ids.shape[0], -1, rows.shape[-1] if x.dim() > 1 else 1)
        return self.mask(flat, ids).reshape(rows.shape).movedim(0, dim)


def find_sample_dims(shapes: dict[int, dict[str, list[torch.Size]]]) -> dict[str, int | None]:
    """Returns by dropout which dimension grows with the samples. `shapes`: by number of samples, what each got."""
    if len(shapes) < 2:
        return {}
    few, many = min(shapes), max(shapes)

    def growing(small: torch.Size, large: torch.Size) -> int | None:
        return next((dim for dim, (a, b) in enumerate(zip(small, large)) if a * many == b * few), None)

    pairs = {site: zip(sizes, shapes[many].get(site, ())) for site, sizes in shapes[few].items()}
    found = {site: {growing(*pair) for pair in of_site} for site, of_site in pairs.items()}
    return {site: dims.pop() if len(dims) == 1 else None for site, dims in found.items()}


class _EveryGradient(torch.autograd.Function):
    """Returns a loss; its backward gives every parameter a gradient, zero if the forward did not use it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(grads[0].new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.shapes)


class ModuleChain(Chain):
    """A chain of three kinds of parts: prologue, blocks, epilogue. Its parameters keep the module's own names."""

    root: nn.Module

    def __init__(self, root: nn.Module, task: Task, spec: TreeSpec, anatomy: Anatomy, sharding_plan: ShardingPlan,
                 initial: InitialValues | None, state: dict[str, Any] | None = None,
                 parts: tuple[int, int] | None = None):  # fmt: skip
        nn.Module.__init__(self)
        self.is_taken, self.sharding_plan = False, sharding_plan
        self.task, self.spec, self.anatomy, self.initial = task, spec, anatomy, initial
        self.num_parts = len(anatomy.blocks) + 2
        self.parts = parts or (0, self.num_parts)
        self.state: dict[str, Any] = {"ids": None, "stream": None} if state is None else state
        self.placeholders: list[tuple[nn.Module, str, torch.Size]] = []
        self.tensor_degree = 1
        self.metric_sums: dict[str, float] = {}
        self.compute_dtype: torch.dtype | None = None
        self.__dict__["root"] = root  # not as a child, which would prefix every name
        for slot in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[slot] = root.__dict__[slot]

    @property
    def has_batch_statistics(self) -> bool:
        """Whether the result depends on which samples run together, or the forward updates buffers."""
        has_batch_norm = any(isinstance(module, _BatchNorm) and module.training for module in self.root.modules())
        return has_batch_norm or bool(self.anatomy.written_buffers)

    @property
    def unsynchronized_buffer(self) -> str:
        """A buffer that the forward updates and that no synchronized batch norm has; empty if there is none."""
        owners = ((name, self.root.get_submodule(name.rpartition(".")[0])) for name in self.anatomy.written_buffers)
        return next((name for name, owner in owners if not is_standard_batch_norm(owner)), "")

    @property
    def written_weights(self) -> frozenset[str]:
        return frozenset(self.anatomy.written_weights)

    @property
    def differs_between_calls(self) -> bool:
        return bool(self.anatomy.random_module) or self.anatomy.varies

    def slice(self, first: int, last: int) -> Chain:
        if (first, last) == (0, self.num_parts):
            return self
        state = self.state | {"ids": None, "stream": None}
        memo: dict[int, Any] = {id(self.state): state}
        chain = ModuleChain(copy.deepcopy(self.root, memo), self.task, self.spec, self.anatomy, self.sharding_plan,
                            self.initial, state, (first, last))  # fmt: skip
        chain._pass_over_blocks()
        chain._drop_parameters()
        return chain

    def _pass_over_blocks(self) -> None:
        first, last = self.parts
        for part, name in enumerate(self.anatomy.blocks, start=1):
            if first <= part < last:
                continue
            block = self.root.get_submodule(name)  # keeps the attributes that the module's forward may read
            for inner in block.modules():
                inner.__dict__.update(inner._buffers)  # not a part of this stage's state
                inner._buffers = {}
            block.forward = self._end_stage if part >= last else self._hand_on(is_last=part == first - 1)
            block.__dict__["is_passed_over"] = True
        if last == self.num_parts - 1:
            block = self.root.get_submodule(self.anatomy.blocks[-1])
            block.__class__ = type(type(block).__name__, (_EndsStage, type(block)), {})
        if first == 1:
            block = self.root.get_submodule(self.anatomy.blocks[0])
            block.register_forward_pre_hook(self._replace_stream, with_kwargs=True)

    def _hand_on(self, is_last: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict[int | str | None, Any](enumerate(args)) | kwargs | {None: None}
            stream = self._received_stream() if is_last else arguments[self.anatomy.stream_key]
            others = tuple(arguments[key] for key in self.anatomy.outputs)
            return (stream, *others) if self.anatomy.returns_tuple else stream

        return forward

    def _received_stream(self) -> Tensor:
        stream: Tensor = self.state["stream"]
        return stream.clone() if self.anatomy.altered else stream  # a leaf must not be changed in place

    def _end_stage(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd((dict[int | str, Any](enumerate(args)) | kwargs)[self.anatomy.stream_key])

    def _replace_stream(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self.anatomy.stream_key
        if isinstance(key, str):
            return args, {**kwargs, key: self._received_stream()}
        return (*args[:key], self._received_stream(), *args[key + 1 :]), kwargs

    def _drop_parameters(self) -> None:
        """Replaces parameters that only other stages use by zeros."""
        first, last = self.parts
        canonical = {id(p): name for name, p in self.root.named_parameters()}
        for module in self.root.modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                parts = self.anatomy.parts_of.get(canonical[id(parameter)], (0,))
                if not any(first <= part < last for part in parts):
                    del module._parameters[leaf]
                    self.placeholders.append((module, leaf, parameter.shape))
                    module.__dict__[leaf] = parameter

    def computing_modules(self) -> Iterator[nn.Module]:
        return self.root.modules()

    def get_submodule(self, target: str) -> nn.Module:
        return self.root.get_submodule(target) if target else self  # a child may be called like a method of the chain

    def blocks(self) -> list[nn.Module]:
        first, last = self.parts
        names = [name for part, name in enumerate(self.anatomy.blocks, start=1) if first <= part < last]
        return [self.root.get_submodule(name) for name in names]

    def in_place_blocks(self) -> set[nn.Module]:
        traced = {self.root.get_submodule(name) for name in self.anatomy.in_place_blocks}
        # Kernels of an LSTM work in place, and the traced ones may be others.
        return traced | {b for b in self.blocks() if any(isinstance(part, nn.RNNBase) for part in b.modules())}

    def fsdp_units(self) -> Sequence[nn.Module]:
        own = {name for name, _ in self.root.named_modules()}
        units = [self.root.get_submodule(name) for name in self.anatomy.units if name in own]
        uses = [parts for parts in self.anatomy.parts_of.values() if len(parts) > 1]
        shares_block_parameters = any(0 < part <= len(self.anatomy.blocks) for parts in uses for part in parts)
        can_shard_blocks = not shares_block_parameters and self.anatomy.altered.isdisjoint(self.anatomy.blocks)
        units += self.blocks() if can_shard_blocks else []
        units = [unit for unit in units if not getattr(unit, "stacks_experts", False)]
        return [unit for unit in units if any(True for _ in unit.parameters())]

    def to(self, dtype: torch.dtype) -> Self:  # type: ignore[override]
        """Casts the parameters; buffers, such as rotary frequencies, keep their precision unless it is exceeded."""
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and dtype is torch.float64:
                    module._buffers[name] = buffer.to(dtype)
                if buffer is not None and buffer.is_complex() and dtype is torch.float64:
                    module._buffers[name] = buffer.to(torch.complex128)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Allocates parameters, which keep their hooks; buffers keep their values, if they have any."""
        slots = [(part, name, weight) for part in self.modules() for name, weight in part._parameters.items()]
        named = [(part, name, buffer) for part in self.modules() for name, buffer in part._buffers.items()]
        buffers = [(part, name, buffer) for part, name, buffer in named if buffer is not None and not buffer.is_meta]
        super().to_empty(device=device)
        for part, name, buffer in buffers:
            part._buffers[name] = buffer.to(device)
        for part, name, weight in slots:
            allocated = part._parameters[name]
            if weight is not None and allocated is not None:
                carry_hooks(weight, allocated)
        for name, parameter in self.named_parameters():
            check_changes(parameter, name)
        return self

    def configure(self, device: torch.device, dtype: torch.dtype, tensor_degree: int) -> None:
        """Called once the parameters have memory, with the dtype of activations."""
        self.compute_dtype, self.tensor_degree = dtype, tensor_degree
        split_sequence(None, None, None)
        if tensor_degree > 1:
            scale_head_counts(self.root, self.sharding_plan, tensor_degree)
        if self.task.configure is not None:
            self.task.configure(self.root, device, dtype)
        for module, leaf, shape in self.placeholders:
            module.__dict__[leaf] = torch.zeros((), dtype=dtype, device=device).expand(shape)
        cast = lambda x: x.to(dtype) if x.dtype is torch.float32 else x  # noqa: E731
        cast_inputs = lambda _, args, kwargs: tree_map_only(Tensor, cast, (args, kwargs))  # noqa: E731
        for module in self.root.modules():
            if isinstance(module, nn.RNNBase):  # keeps a list of its weights, past casts and placeholders
                module.register_forward_pre_hook(_refresh_flat_weights)
            if self.task.casts_inputs and dtype.itemsize == 2 and module._parameters and module is not self.root:
                module.register_forward_pre_hook(cast_inputs, with_kwargs=True)

    def dispatch_tokens(self, experts: nn.Module, dispatcher: Any) -> None:
        assert self.task.dispatch_tokens is not None, "refused before"
        self.task.dispatch_tokens(experts, dispatcher)

    def split_sequence(self, axis: Any, positions: Tensor, attention_fn: Any) -> None:
        split_sequence(axis, positions, attention_fn)
        if self.task.split_sequence is not None:
            self.task.split_sequence(self.root)

    def pass_sample_ids(self) -> None:
        """Makes sample ids an argument of the blocks, so that a block recomputed later draws the same dropout masks."""
        add_ids = lambda module, args, kwargs: (args, {**kwargs, "shardwise_ids": self.state["ids"]})  # noqa: E731
        if any(isinstance(module, KeyedDropout) for module in self.modules()):
            for block in self.blocks():
                block.forward = _with_ids(block.forward, self.state)
                block.register_forward_pre_hook(add_ids, with_kwargs=True)

    def recomputable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward of a block so that it keeps float64 by itself.

        The backward recomputes a block outside of the module's forward, where nothing else would keep it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.compute_dtype is not torch.float64:
                return forward(*args, **kwargs)

            with KeepFloat64():
                return forward(*args, **kwargs)

        return run

    def take_metrics(self) -> dict[str, float]:
        sums, self.metric_sums = self.metric_sums, {}
        return sums

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.root.train(mode)  # its author may keep some modules in evaluation mode
        return self

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None, **extra: Tensor) -> Tensor:
        """Returns the loss summed over the targets; on another than the last stage, the stream."""
        leaves = [extra[f"input_{number}"] for number in range(self.spec.num_leaves)]
        dtype = self.compute_dtype
        leaves = [leaf.to(dtype) if dtype and leaf.is_floating_point() else leaf for leaf in leaves]
        self.state.update(ids=ids, stream=x if self.parts[0] else None)
        SPLIT.document_ids, SPLIT.preference = extra.get("document_ids"), extra.get("preference")
        try:
            with self._numbers_of(ids), KeepFloat64() if dtype is torch.float64 else nullcontext():
                measured: dict[str, float] | None = None if self.training else {}
                loss = self.task.call(self.root, tree_unflatten(leaves, self.spec), measured)
                for name, value in (measured or {}).items():
                    self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value * leaves[0].shape[0]
        except StageEnd as end:
            stream: Tensor = end.args[0]
            if dtype is torch.float64:
                keep_float64_in_backward(stream)
            return stream if dtype is None else stream.to(dtype)
        except RuntimeError as error:
            if self.tensor_degree == 1 or type(error) is not RuntimeError or not SHAPE_ERROR.search(str(error)):
                raise
            problem = f"shapes do not fit in {self._name_of_failing(error)} ({error})"
            raise LayoutError(f"tensor_plan: {problem}; check its style and those around it.") from error
        finally:
            SPLIT.document_ids = SPLIT.preference = None
        if dtype is torch.float64:
            keep_float64_in_backward(loss)
        if self.anatomy.varies:
            loss = _EveryGradient.apply(loss, *(p for p in self.root.parameters() if p.requires_grad))
        if self.task.count is None:
            loss = loss * leaves[0].shape[0]  # a mean over the samples
        if self.tensor_degree > 1:  # every tensor rank has the whole loss; the ranks' gradients are summed
            loss = loss / self.tensor_degree + (loss - loss / self.tensor_degree).detach()
        return loss

    def _numbers_of(self, ids: Tensor | None) -> AbstractContextManager[None]:
        """Returns a context in which the forward draws the same random numbers whenever it gets these samples, so that
        a run that was interrupted continues as if it had not been."""
        if ids is None or is_fake(ids) or not self.differs_between_calls:
            return nullcontext()
        return random_numbers_of(self.state["seed"], int(ids[0]), ids.device)

    def _name_of_failing(self, error: BaseException) -> str:
        """Returns the name of the innermost module in whose forward an error was raised."""
        names, name = {id(module): name for name, module in self.root.named_modules()}, ""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = names.get(id(frame.f_locals.get("self")), name)
        return name or type(self.root).__name__


def _with_ids(forward: Callable[..., Any], state: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, shardwise_ids: Tensor, **kwargs: Any) -> Any:
        before, state["ids"] = state["ids"], shardwise_ids
        try:
            return forward(*args, **kwargs)
        finally:
            state["ids"] = before

    return run


def _refresh_flat_weights(module: nn.RNNBase, args: Any) -> None:
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def replace_dropout(root: nn.Module, seed: int, state: dict[str, Any]) -> None:
    """Replaces every dropout module by one whose mask is the same in every layout."""
    for name, module in list(root.named_modules()):
        for key, child in list(module.named_children()):
            if type(child) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
                site = f"{name}.{key}" if name else key
                module._modules[key] = KeyedDropout(child.p, site, seed, state, type(child) is not nn.Dropout)
