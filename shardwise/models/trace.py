"""Traces what any module computes, moves and saves, by running it on fake tensors.

Each child runs on detached outputs of the children before it. Work outside of any child goes into a last, unnamed
entry; a module without children is its own entry.

The kernels are those of PyTorch on a CPU: an operator that is one kernel on a GPU (RMSNorm) may be several here, and
then moves and saves more. Matmuls, attention, parameters and outputs are the same everywhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.models.fake_caches import caches_kept
from shardwise.models.fake_tensors import fake_tensor_mode
from shardwise.models.operator_costs import AttentionOp, MatMul, OperatorCosts

aten = torch.ops.aten
LOOKUPS = ("embedding", "index", "index_select", "gather")


def trace_module(
    module: nn.Module, *inputs: Any, parts: Any = None, has_equal_children: bool = False, **kwargs: Any
) -> tuple[OperatorCosts, ...]:
    """Returns the costs of a module's children, or of other `parts` of it, in order of first call.
    `has_equal_children`: children that print the same and have the same shapes compute the same; one of them runs."""
    recorder = _OpTracer(has_equal_children)
    with with_fake_tensors(module) as to_fake, _isolate_children(module, recorder, parts):
        inputs, kwargs = tree_map_only(Tensor, to_fake, (inputs, kwargs))
        with recorder:
            recorder.enter("", module._parameters.values() if any(module.children()) else ())
            with _record_saved(recorder.records[""], module):
                recorder.leave(module(*inputs, **kwargs))
    return tuple(costs for costs in recorder.operator_costs() if costs.num_ops or costs.parameters)


@lru_cache(maxsize=8)
def trace_family(family: Any, config: Any, itemsize: int) -> Callable[[int], tuple[OperatorCosts, ...]]:
    """Returns a function from a micro-batch size to the costs of each module of a family's model."""
    dtype = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}[itemsize]
    return interpolate_traces(lambda samples: family.trace_costs(config, samples, dtype))


def interpolate_traces(trace: Callable[[int], tuple[OperatorCosts, ...]]) -> Callable[[int], tuple[OperatorCosts, ...]]:
    """Returns the costs for any micro-batch size from traces of 2 and 4 samples: all counts are affine in the size."""
    trace = lru_cache(trace)
    return lru_cache(maxsize=64)(lambda samples: _interpolate(trace(2), trace(4), samples))


def _interpolate(at_2: Any, at_4: Any, samples: int) -> Any:
    if isinstance(at_2, tuple):
        return tuple(_interpolate(a, b, samples) for a, b in zip(at_2, at_4, strict=True))
    if is_dataclass(at_2) and not isinstance(at_2, type):
        values = {f.name: _interpolate(getattr(at_2, f.name), getattr(at_4, f.name), samples) for f in fields(at_2)}
        return replace(at_2, **values)
    return at_2 if at_2 == at_4 else at_2 + (at_4 - at_2) * (samples - 2) // 2


class _OpTracer(TorchDispatchMode):
    """Records each operator's costs under the child that is running."""

    def __init__(self, has_equal_children: bool):
        super().__init__()
        self.current, self.has_equal_children = "", has_equal_children
        self.traced: dict[Any, tuple[str, Any]] = {}  # by what makes children equal: the one that ran, and its output
        self.records: dict[str, dict[str, Any]] = {}

    def enter(self, name: str, parameters: Iterable[Tensor | None]) -> None:
        numel = sum(weight.numel() for weight in parameters if weight is not None)
        counts = dict.fromkeys(("output_bytes", "saved_bytes", "moved_bytes", "num_ops"), 0)
        self.records.setdefault(name, {"name": name, "parameters": numel, **counts, "products": (), "attention": ()})

    def leave(self, output: Any) -> None:
        self.records[self.current]["output_bytes"] += sum(tensor.nbytes for tensor in tensors_in(output))

    def operator_costs(self) -> Iterator[OperatorCosts]:
        first, *children = self.records.values()
        yield from (OperatorCosts(**values) for values in (*children, first))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        record, name = self.records[self.current], func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name in ("_unsafe_view", "detach", "promote_types"):
            return out
        products = tuple(_matmuls(func.overloadpacket, args, out))
        record["num_ops"] += 1
        record["products"] += products
        if name.startswith("_scaled_dot_product"):
            record["attention"] += (_attention_op(func, args, kwargs or {}),)
        elif not products:
            reads = args[1:] + (out,) if name in LOOKUPS else args  # a lookup reads only the rows it returns
            record["moved_bytes"] += sum(tensor.nbytes for tensor in tensors_in((reads, kwargs, out)))
        return out


def _matmuls(packet: Any, args: Any, out: Any) -> Iterator[MatMul]:
    if packet is aten.addmm or packet is aten.baddbmm:
        args = args[1:]
    if packet in (aten.mm, aten.addmm):
        (rows, inner), columns = args[0].shape, args[1].shape[1]
        yield MatMul(rows, inner, columns)
    elif packet in (aten.bmm, aten.baddbmm):
        (groups, rows, inner), columns = args[0].shape, args[1].shape[2]
        yield MatMul(rows, inner, columns, groups)
    elif packet is aten.convolution:
        weight, groups = args[1], args[-1]
        kernel_numel, output_positions = prod(weight.shape[2:]), out.shape[0] * prod(out.shape[2:])
        inner, columns = weight.shape[1] * kernel_numel, weight.shape[0] // groups
        yield MatMul(output_positions, inner, columns, groups, kernel_numel)


def _attention_op(func: Any, args: Any, kwargs: Any) -> AttentionOp:
    q, k, v = args[:3]
    names = [argument.name for argument in func._schema.arguments]
    causal = {**dict(zip(names, args)), **kwargs}.get("is_causal", False)
    return AttentionOp(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], causal)


@contextmanager
def _isolate_children(module: nn.Module, recorder: _OpTracer, parts: Mapping[str, nn.Module] | None) -> Iterator[None]:
    """Makes each child run isolated from the others."""
    children = parts or dict(module.named_children()) or {type(module).__name__: module}
    before = [(child, child.__dict__.get("forward")) for child in children.values()]
    for name, child in children.items():
        child.forward = _traced_forward(name, child, recorder)
    try:
        yield
    finally:
        for child, forward in before:
            del child.forward
            if forward is not None:
                child.forward = forward


def _traced_forward(name: str, child: nn.Module, recorder: _OpTracer) -> Callable[..., Any]:
    forward = child.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = [(tensor.shape, tensor.dtype) for tensor in (*child.parameters(), *tensors_in((args, kwargs)))]
        key = repr(child) if recorder.has_equal_children else name, tuple(shapes)
        if key in recorder.traced and name not in recorder.records:
            equal_child, out = recorder.traced[key]
            recorder.records[name] = {**recorder.records[equal_child], "name": name}
            return out
        before, recorder.current = recorder.current, name
        recorder.enter(name, child.parameters())
        args, kwargs = tree_map_only(Tensor, _detached_leaf, (args, kwargs))
        with _record_saved(recorder.records[name], child) as saved:
            out = forward(*args, **kwargs)
            for tensor in tensors_in(out):
                saved.pop(storage_key(tensor), None)  # whoever uses it next saves it
        recorder.leave(out)
        recorder.current = before
        recorder.traced[key] = name, tree_map_only(Tensor, _detached_leaf, out)
        return recorder.traced[key][1]

    return run


@contextmanager
def _record_saved(record: dict[str, Any], module: nn.Module) -> Iterator[dict[int, int]]:
    """Adds the bytes that autograd saves within it, by storage, except the module's parameters and buffers."""
    own_storages = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in own_storages:
            saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
    record["saved_bytes"] += sum(saved.values())


@contextmanager
def with_fake_tensors(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Replaces the module's parameters and buffers by fake tensors; yields what makes a tensor fake."""
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (container, name, tensor) for part in module.modules() for container in (part._parameters, part._buffers)
        for name, tensor in container.items() if tensor is not None
    ]  # fmt: skip
    fakes: dict[int, Tensor] = {}

    def to_fake(tensor: Tensor) -> Tensor:
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return new.requires_grad_(tensor.requires_grad and new.is_floating_point())

    with caches_kept(module), fake_tensor_mode():
        for container, name, tensor in slots:
            if id(tensor) not in fakes:  # tied weights stay tied
                new = to_fake(tensor)
                fakes[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            container[name] = fakes[id(tensor)]
        try:
            yield to_fake
        finally:
            for container, name, tensor in slots:
                container[name] = tensor


def _detached_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
