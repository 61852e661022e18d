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
BytesByRole = Counter[str]  # by role
AXIS_NAMES = (
    *AXES,
    "shard x context",
    "replicate x context",
    "expert",
    "expert_replicas",
    "data",
    "tied_weights",
    "world",
    "other",
)


class StorageRecord:
    """One storage: its size, its role where that is known, and the one it has where not."""

    __slots__ = ("size", "role", "default_role", "ref")

    def __init__(self, default_role: str):
        self.size, self.role, self.default_role = 0, "", default_role
        self.ref: weakref.ref[torch.UntypedStorage] | None = None


class TracePoint(NamedTuple):
    """A place in the book."""

    event: int
    transfer: int


class CollectiveKind(NamedTuple):
    axis: str
    kind: str

    @property
    def sort_key(self) -> tuple[int, str]:
        """In a table."""
        return AXIS_NAMES.index(self.axis), self.kind


# By operator: what it is, and which argument is its larger side, or -1 for its result.
_COLLECTIVE_OPS = {
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
_IGNORED_OPS = (
    "c10d.barrier", "c10d.monitored_barrier_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"
)  # fmt: skip
# These work on tensors made for the purpose; other collectives are a part of the model and carry activations.
_BUFFER_OPS = ("c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.recv_")


class MemoryCommTracker(TorchDispatchMode):
    """Sees what is computed while it is entered. `axes`: by name of a process group, what it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[str, str] = {}
        self.default_role = "buffers"  # the role of what is born from now on, if it finds no other
        self.events: list[tuple[StorageRecord, int]] = []  # a storage, and by how many bytes it grew
        self.collectives: list[tuple[CollectiveKind, int]] = []
        self._live_storages: dict[int, StorageRecord] = {}
        self._op_names: dict[Any, str] = {}

    # What is seen

    def __enter__(self) -> Any:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._record_storage(storage)
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
            self._record_tensor(tensor)
        name = self._op_names.get(func) or self._op_names.setdefault(func, str(func.overloadpacket))
        if name.startswith(("c10d.", "_c10d_functional.")):
            self._record_collective(name, args, result)
        elif name == "fsdp.chunk_cat":  # FSDP packs whole gradients to be summed
            self.mark(_tensors(args[0]), "gradients")
        return result

    def _record_tensor(self, tensor: Tensor) -> StorageRecord:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        elif isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        return self._record_storage(tensor.untyped_storage())

    def _record_storage(self, storage: torch.UntypedStorage) -> StorageRecord:
        key = storage._cdata
        block = self._live_storages.get(key)
        if block is None:
            block = self._live_storages[key] = StorageRecord(self.default_role)
            block.ref = weakref.ref(storage, lambda _, key=key: self._record_resize(self._live_storages.pop(key), 0))  # type: ignore[misc]
        self._record_resize(block, storage.nbytes())
        return block

    def _record_resize(self, block: StorageRecord, size: int) -> None:
        if size != block.size:
            self.events.append((block, size - block.size))
            block.size = size

    def _record_collective(self, name: str, args: Any, result: Any) -> None:
        if name in _IGNORED_OPS:
            return
        if name not in _COLLECTIVE_OPS:
            raise RunError(f"the operator {name} moves bytes, but there is no rule for counting them.")
        kind, argument = _COLLECTIVE_OPS[name]
        tensors = result if argument < 0 else args[argument]
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tensors))
        self.collectives.append((CollectiveKind(self._axis(args), kind), size))
        if name in _BUFFER_OPS:
            self.mark(_tensors(args[:2]), "buffers", overwrite=False)

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

    def mark(self, tensors: Iterable[Tensor], role: str, overwrite: bool = True) -> None:
        """Says what some tensors are for. `anew`: also where that was said before."""
        for tensor in tensors:
            block = self._record_tensor(tensor)
            if overwrite or not block.role:
                block.role = role

    # What is asked

    def now(self) -> TracePoint:
        return TracePoint(len(self.events), len(self.collectives))

    def bytes_at(self, event: int) -> BytesByRole:
        """Bytes by role at some time."""
        return _sum_by_role(self.events[:event])

    def growth_between(self, begin: TracePoint, end: TracePoint) -> BytesByRole:
        """By how many bytes each role grew."""
        return _sum_by_role(self.events[begin.event : end.event])

    def surviving_bytes(self, begin: TracePoint, end: TracePoint, event: int) -> BytesByRole:
        """Bytes of what was born between two moments and is still there at a later time."""
        before = {id(block) for block, _ in self.events[: begin.event]}
        born = {id(block) for block, _ in self.events[begin.event : end.event]} - before
        return _sum_by_role(entry for entry in self.events[begin.event : event] if id(entry[0]) in born)

    def peak_event(self, begin: TracePoint, end: TracePoint) -> int:
        """The first time between two moments at which most is held."""
        best, now, most = begin.event, 0, 0
        for event, (_, size) in enumerate(self.events[begin.event : end.event], start=begin.event + 1):
            now += size
            if now > most:
                best, most = event, now
        return best

    def traffic_between(
        self, begin: TracePoint, end: TracePoint
    ) -> tuple[Counter[CollectiveKind], Counter[CollectiveKind]]:
        """By kind of transfer, how often and how many bytes."""
        counts: Counter[CollectiveKind] = Counter()
        sizes: Counter[CollectiveKind] = Counter()
        for transfer, sent in self.collectives[begin.transfer : end.transfer]:
            counts[transfer] += 1
            sizes[transfer] += sent
        return counts, sizes


def axis_by_group(mesh: Mesh) -> dict[str, str]:
    """By name of its process group, each axis; where axes share a group, the first of them in the mesh."""
    axes = [
        ("tied_weights", mesh.tied_stages),
        ("expert_replicas", mesh["expert_replicas"]),
        ("replicate x context", mesh["replicas"]),
        ("shard x context", mesh["fsdp"]),
        *((name, mesh[name]) for name in ("expert", "world", "data", *reversed(AXES))),
    ]
    return {axis.group.group_name: name for name, axis in axes if axis.group is not None}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _sum_by_role(events: Iterable[tuple[StorageRecord, int]]) -> BytesByRole:
    total: BytesByRole = Counter()
    for block, size in events:
        total[block.role or block.default_role] += size
    return total
