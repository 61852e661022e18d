"""What one process holds and sends: a book that is written while PyTorch computes, on real tensors or on fake ones.

Memory: every storage is noted when it is born, when it changes its size and when it goes, so that the fullest moment
can be found afterwards. What a storage is for is often known only later (a product becomes a gradient), and then holds
from its birth on:

    weights      parameters, and what is gathered of them
    copies       weights as modules compute with them, where that differs (rounded, some rows)
    gradients    what is, was or will be the `.grad` of a parameter
    optimizer    its states
    activations  what forwards keep for backwards, and what either is working on
    buffers      what waits for or comes from a transfer, samples, all else

Traffic: every collective is counted under the axis whose group it uses, with the bytes of its larger side: what goes
into an all-reduce, a reduce-scatter or an all-to-all, what comes out of an all-gather, what is sent or received.

Bytes are those of the tensors; an allocator adds its rounding. PyTorch's own MemTracker knows neither cut weights nor
more than one call of a module, and CommDebugMode fails under its pipeline.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import RunError
from shardwise.layout import AXES
from shardwise.parallel.mesh import Mesh

ROLES = ("weights", "copies", "gradients", "optimizer", "activations", "buffers")
Bytes = Counter[str]  # by role
AXIS_NAMES = (*AXES, "shard x context", "replicate x context", "expert", "alike", "data", "ties", "world", "other")


class Block:
    """One storage: its size, its role where that is known, and the one it has where not."""

    __slots__ = ("size", "role", "default", "watch")

    def __init__(self, default: str):
        self.size, self.role, self.default = 0, "", default
        self.watch: weakref.ref[torch.UntypedStorage] | None = None


class Moment(NamedTuple):
    """A place in the book."""

    event: int
    transfer: int


class Transfer(NamedTuple):
    axis: str
    kind: str

    @property
    def place(self) -> tuple[int, str]:
        """In a table."""
        return AXIS_NAMES.index(self.axis), self.kind


# By operator: what it is, and which argument is its larger side, or -1 for its result.
_KINDS = {
    "c10d.allreduce_": ("all-reduce", 0),
    "c10d.allreduce_coalesced_": ("all-reduce", 0),
    "c10d._allgather_base_": ("all-gather", 0),
    "c10d.allgather_": ("all-gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d._reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d.alltoall_base_": ("all-to-all", 1),
    "c10d.alltoall_": ("all-to-all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.send": ("send", 0),
    "c10d.recv_": ("receive", 0),
    "_c10d_functional.all_reduce": ("all-reduce", 0),
    "_c10d_functional.all_reduce_": ("all-reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all-gather", -1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional.all_to_all_single": ("all-to-all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
}
_SILENT = (
    "c10d.barrier", "c10d.monitored_barrier_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"
)  # fmt: skip
# These work on tensors made for the purpose; other collectives are a part of the model and carry activations.
_BUFFERED = ("c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.recv_")


class Ledger(TorchDispatchMode):
    """Sees what is computed while it is entered. `axes`: by name of a process group, what it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[str, str] = {}
        self.default = "buffers"  # the role of what is born from now on, if it finds no other
        self.events: list[tuple[Block, int]] = []  # a storage, and by how many bytes it grew
        self.transfers: list[tuple[Transfer, int]] = []
        self._live: dict[int, Block] = {}
        self._names: dict[Any, str] = {}

    # What is seen

    def __enter__(self) -> Any:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # FSDP frees and takes so
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls ask for it
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # what these compute inside is seen
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor)
        name = self._names.get(func) or self._names.setdefault(func, str(func.overloadpacket))
        if name.startswith(("c10d.", "_c10d_functional.")):
            self._count(name, args, result)
        elif name == "fsdp.chunk_cat":  # FSDP packs whole gradients to be summed
            self.mark(_tensors(args[0]), "gradients")
        return result

    def _note(self, tensor: Tensor) -> Block:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        elif isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        return self._note_storage(tensor.untyped_storage())

    def _note_storage(self, storage: torch.UntypedStorage) -> Block:
        key = storage._cdata
        block = self._live.get(key)
        if block is None:
            block = self._live[key] = Block(self.default)
            block.watch = weakref.ref(storage, lambda _, key=key: self._grown(self._live.pop(key), 0))  # type: ignore[misc]
        self._grown(block, storage.nbytes())
        return block

    def _grown(self, block: Block, size: int) -> None:
        if size != block.size:
            self.events.append((block, size - block.size))
            block.size = size

    def _count(self, name: str, args: Any, result: Any) -> None:
        if name in _SILENT:
            return
        if name not in _KINDS:
            raise RunError(f"the operator {name} moves bytes, but there is no rule for counting them.")
        kind, place = _KINDS[name]
        side = result if place < 0 else args[place]
        sent = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(side))
        self.transfers.append((Transfer(self._axis(args), kind), sent))
        if name in _BUFFERED:
            self.mark(_tensors(args[:2]), "buffers", anew=False)

    def _axis(self, args: Any) -> str:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                arg = dist.ProcessGroup.unbox(arg)
            if isinstance(arg, dist.ProcessGroup):
                return self.axes.get(arg.group_name, "other")  # other objects follow
            if isinstance(arg, str) and arg in self.axes:
                return self.axes[arg]
        return "other"

    # What is told

    def mark(self, tensors: Iterable[Tensor], role: str, anew: bool = True) -> None:
        """Says what some tensors are for. `anew`: also where that was said before."""
        for tensor in tensors:
            block = self._note(tensor)
            if anew or not block.role:
                block.role = role

    # What is asked

    def now(self) -> Moment:
        return Moment(len(self.events), len(self.transfers))

    def held(self, event: int) -> Bytes:
        """Bytes by role at some time."""
        return _sum(self.events[:event])

    def change(self, begin: Moment, end: Moment) -> Bytes:
        """By how many bytes each role grew."""
        return _sum(self.events[begin.event : end.event])

    def left(self, begin: Moment, end: Moment, event: int) -> Bytes:
        """Bytes of what was born between two moments and is still there at a later time."""
        before = {id(block) for block, _ in self.events[: begin.event]}
        born = {id(block) for block, _ in self.events[begin.event : end.event]} - before
        return _sum(entry for entry in self.events[begin.event : event] if id(entry[0]) in born)

    def fullest(self, begin: Moment, end: Moment) -> int:
        """The first time between two moments at which most is held."""
        best, now, most = begin.event, 0, 0
        for event, (_, size) in enumerate(self.events[begin.event : end.event], start=begin.event + 1):
            now += size
            if now > most:
                best, most = event, now
        return best

    def travelled(self, begin: Moment, end: Moment) -> tuple[Counter[Transfer], Counter[Transfer]]:
        """By kind of transfer, how often and how many bytes."""
        counts: Counter[Transfer] = Counter()
        sizes: Counter[Transfer] = Counter()
        for transfer, sent in self.transfers[begin.transfer : end.transfer]:
            counts[transfer] += 1
            sizes[transfer] += sent
        return counts, sizes


def axes_of(mesh: Mesh) -> dict[str, str]:
    """By name of its process group, each axis; where axes share a group, the first of them in the mesh."""
    axes = [
        ("ties", mesh.ends),
        ("alike", mesh["alike"]),
        ("replicate x context", mesh["same"]),
        ("shard x context", mesh["shared"]),
        *((name, mesh[name]) for name in ("expert", "world", "data", *reversed(AXES))),
    ]
    return {axis.group.group_name: name for name, axis in axes if axis.group is not None}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _sum(events: Iterable[tuple[Block, int]]) -> Bytes:
    total: Bytes = Counter()
    for block, size in events:
        total[block.role or block.default] += size
    return total
