"""What any module computes, moves and keeps, found by running it on tensors that have shapes and no numbers.

Each child is run on its own, forward and then backward, on what the children before it gave. What the module does
outside of its children is a last piece without a name, whose backward is not looked at; a module without children is
a piece itself.

Kernels are those of PyTorch's CPU: an operator that is one kernel on a GPU may be several here (RMSNorm), and then it
moves and keeps more. Products, attention, parameters and outputs are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.planner.pieces import Attention, Piece, Product

aten = torch.ops.aten
LOOKUPS = ("embedding", "index", "index_select", "gather")


def trace(module: nn.Module, *inputs: Any, **more: Any) -> tuple[Piece, ...]:
    """The pieces of a module in the order of their first use. Inputs and weights may be real, on `meta` or fake."""
    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        inputs, more = tree_map_only(Tensor, _faked(fake), (inputs, more))
        with _on_fakes(module, fake), _alone(module, recorder), recorder:
            recorder.enter("", module._parameters.values() if any(module.children()) else ())
            recorder.leave(module(*inputs, **more))
    return tuple(piece for piece in recorder.pieces() if piece.calls or piece.parameters)


class _Recorder(TorchDispatchMode):
    """Writes down the work of each operator, to the piece that is being run."""

    def __init__(self) -> None:
        super().__init__()
        self.piece = ""
        self.back = False
        self.found: dict[str, dict[str, Any]] = {}

    def enter(self, name: str, parameters: Iterable[Tensor | None]) -> None:
        weights = [weight for weight in parameters if weight is not None]
        self.found.setdefault(name, {
            "name": name, "parameters": sum(weight.numel() for weight in weights),
            "parameter_bytes": sum(_bytes(weight) for weight in weights), "output": 0, "saved": 0, "moved": 0,
            "calls": 0, "products": (), "attention": (), "backward": 0.0,
        })  # fmt: skip

    def leave(self, output: Any) -> None:
        self.found[self.piece]["output"] += sum(map(_bytes, _tensors(output)))

    def pieces(self) -> Iterator[Piece]:
        first, *children = self.found.values()
        yield from (Piece(**values) for values in (*children, first))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        note, name = self.found[self.piece], func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name in ("_unsafe_view", "detach", "promote_types"):
            return out
        products = tuple(_products(func.overloadpacket, args, out))
        if self.back:
            note["backward"] += sum(product.flops for product in products)
        else:
            note["calls"] += 1
            note["products"] += products
            if name.startswith("_scaled_dot_product"):
                note["attention"] += (_attention(func, args, kwargs or {}),)
            elif not products:
                read = args[1:] + (out,) if name in LOOKUPS else args  # of a table, only the rows that are asked for
                note["moved"] += sum(map(_bytes, _tensors((read, kwargs, out))))
        return out


def _products(packet: Any, args: Any, out: Any) -> Iterator[Product]:
    if packet is aten.addmm or packet is aten.baddbmm:
        args = args[1:]
    if packet in (aten.mm, aten.addmm):
        (rows, inner), columns = args[0].shape, args[1].shape[1]
        yield Product(rows, inner, columns)
    elif packet in (aten.bmm, aten.baddbmm):
        (groups, rows, inner), columns = args[0].shape, args[1].shape[2]
        yield Product(rows, inner, columns, groups)
    elif packet is aten.convolution:
        yield _convolution(out, args[1], args[-1])
    elif packet is aten.convolution_backward:
        for _ in filter(None, args[-1][:2]):  # gradients of its input, of its weight
            yield _convolution(args[0], args[2], args[-2])


def _convolution(out: Tensor, weight: Tensor, groups: int) -> Product:
    window = prod(weight.shape[2:])
    places = out.shape[0] * prod(out.shape[2:])
    return Product(places, weight.shape[1] * window, weight.shape[0] // groups, groups, window)


def _attention(func: Any, args: Any, kwargs: Any) -> Attention:
    q, k, v = args[:3]
    names = [argument.name for argument in func._schema.arguments]
    causal = {**dict(zip(names, args)), **kwargs}.get("is_causal", False)
    return Attention(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], causal)


@contextmanager
def _alone(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Within it, each child of the module that is called runs forward and backward on its own."""
    children = dict(module.named_children()) or {type(module).__name__: module}
    before = [(child, child.__dict__.get("forward")) for child in children.values()]
    for name, child in children.items():
        child.forward = _watched(name, child, child.forward, recorder)
    try:
        yield
    finally:
        for child, forward in before:
            del child.forward
            if forward is not None:
                child.forward = forward


def _watched(name: str, child: nn.Module, forward: Callable[..., Any], recorder: _Recorder) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before, recorder.piece = recorder.piece, name
        recorder.enter(name, child.parameters())
        args, kwargs = tree_map_only(Tensor, _leaf, (args, kwargs))
        owned = {_storage(tensor) for tensor in (*child.parameters(), *child.buffers())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in owned:
                kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        recorder.leave(out)
        recorder.found[name]["saved"] += sum(kept.values())
        ends = [tensor for tensor in _tensors(out) if tensor.requires_grad]
        recorder.back = True
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        recorder.back, recorder.piece = False, before
        return tree_map_only(Tensor, _leaf, out)

    return run


@contextmanager
def _on_fakes(module: nn.Module, fake: FakeTensorMode) -> Iterator[None]:
    """Within it, the module's parameters and buffers are fake ones."""
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, tensor) for part in module.modules() for held in (part._parameters, part._buffers)
        for name, tensor in held.items() if tensor is not None
    ]  # fmt: skip
    made: dict[int, Tensor] = {}
    for held, name, tensor in places:
        if id(tensor) not in made:  # tied ones stay tied
            new = _faked(fake)(tensor)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _faked(fake: FakeTensorMode) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        with fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad and made.is_floating_point())

    return make


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
