"""Records the memory and collectives of one process while PyTorch runs, on real or fake tensors.

The role of a storage is often known only after its allocation (a matmul result becomes a gradient) and then applies
retroactively:

    weights      parameters, sharded or gathered
    copies       weights that modules compute with, if different (cast, or some rows)
    gradients    storages that are, were or become the `.grad` of a parameter
    optimizer    optimizer state
    activations  tensors saved for the backward, and temporaries of forward and backward
    buffers      communication buffers, samples, everything else

Every collective counts toward the mesh axis whose group it uses, with the bytes of its larger side. Bytes are those of
the tensors; the allocator adds its rounding. PyTorch's MemTracker supports neither tensor-parallel shards nor repeated
calls of a module, and CommDebugMode fails under PyTorch's pipeline schedules."""

import tomllib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

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
AXIS_NAMES = (*AXES, "shard x context", "replicate x context", "expert", "expert_replicas", "data", "tied_weights",
              "world", "other")  # fmt: skip


@dataclass(slots=True, eq=False)
class StorageRecord:
    """One storage: its size, its role, and the role it has until one is marked."""

    default_role: str
    size: int = 0
    role: str = ""
    ref: weakref.ref[torch.UntypedStorage] | None = None


CollectiveKind = tuple[str, str]  # mesh axis and collective
TrafficCounts = Counter[CollectiveKind]
Event = tuple[StorageRecord | CollectiveKind, int]  # a storage and its change in bytes; or a collective and its bytes
_TABLES = tomllib.loads((Path(__file__).parents[1] / "collectives.toml").read_text(encoding="utf-8"))


def by_axis(kind: CollectiveKind) -> tuple[int, str]:
    """The place of a kind in tables: axes in mesh order."""
    return AXIS_NAMES.index(kind[0]), kind[1]


class MemoryCommTracker(TorchDispatchMode):
    """Records storages and collectives while active. `axes` maps process group names to mesh axes."""

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[str, str] = {}
        self.default_role = "buffers"  # role of storages allocated from now on, unless marked
        self.events: list[Event] = []
        self._live_storages: dict[int, StorageRecord] = {}
        self._op_names: dict[Any, str] = {}

    def __enter__(self) -> Any:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._record_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # how FSDP frees and allocates
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # fast path: two thirds of all calls
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # their inner operators are recorded
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._record_tensor(tensor)
        name = self._op_names.get(func) or self._op_names.setdefault(func, str(func.overloadpacket))
        if name.startswith(("c10d.", "_c10d_functional.")):
            self._record_collective(name, args, result)
        elif name == "fsdp.chunk_cat":  # FSDP packs unsharded gradients for the reduce-scatter
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
        record = self._live_storages.get(key)
        if record is None:
            record = self._live_storages[key] = StorageRecord(self.default_role)
            record.ref = weakref.ref(storage, lambda _, key=key: self._record_resize(self._live_storages.pop(key), 0))  # type: ignore[misc]
        self._record_resize(record, storage.nbytes())
        return record

    def _record_resize(self, record: StorageRecord, size: int) -> None:
        if size != record.size:
            self.events.append((record, size - record.size))
            record.size = size

    def _record_collective(self, name: str, args: Any, result: Any) -> None:
        if name in _TABLES["ignored"]:
            return
        if name not in _TABLES["operators"]:
            raise RunError(f"the dry run cannot count the bytes of {name}; add the operator to collectives.toml.")
        kind, argument = _TABLES["operators"][name]
        tensors = result if argument < 0 else args[argument]
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tensors))
        self.events.append(((self._axis(args), kind), size))
        if name in _TABLES["buffered"]:
            self.mark(_tensors(args[:2]), "buffers", overwrite=False)

    def _axis(self, args: Any) -> str:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                arg = dist.ProcessGroup.unbox(arg)
            if isinstance(arg, dist.ProcessGroup):
                return self.axes.get(arg.group_name, "other")
            if isinstance(arg, str) and arg in self.axes:
                return self.axes[arg]
        return "other"

    def mark(self, tensors: Iterable[Tensor], role: str, overwrite: bool = True) -> None:
        """Sets the role of tensors; without `overwrite`, only of those that have none yet."""
        for tensor in tensors:
            record = self._record_tensor(tensor)
            if overwrite or not record.role:
                record.role = role

    def now(self) -> int:
        """Returns a point in the recording: the number of events so far."""
        return len(self.events)

    def bytes_at(self, event: int, since: int = 0) -> Counter[str]:
        """Returns the bytes in memory at a point, or their change since an earlier one, by role."""
        return _sum_by_role(self.events[since:event])

    def surviving_bytes(self, begin: int, end: int, event: int) -> Counter[str]:
        """Returns the bytes allocated between two points that are still in memory at a later one, by role."""
        before = {id(record) for record, _ in self.events[:begin]}
        allocated = {id(record) for record, _ in self.events[begin:end]} - before
        return _sum_by_role(entry for entry in self.events[begin:event] if id(entry[0]) in allocated)

    def peak_event(self, begin: int, end: int) -> int:
        """Returns the point between two others at which memory peaks first."""
        on_device = lambda record: isinstance(record, StorageRecord) and record.role != "host"  # noqa: E731
        changes = (size if on_device(record) else 0 for record, size in self.events[begin:end])
        totals = list(accumulate(changes, initial=0))
        return begin + totals.index(max(totals))

    def traffic_between(self, begin: int, end: int) -> tuple[TrafficCounts, TrafficCounts]:
        """Returns calls and bytes between two points, by kind of collective."""
        counts, sizes = TrafficCounts(), TrafficCounts()
        for kind, size in self.events[begin:end]:
            if not isinstance(kind, StorageRecord):
                counts[kind] += 1
                sizes[kind] += size
        return counts, sizes


def axis_by_group(mesh: Mesh) -> dict[str, str]:
    """Maps process group names to axis names; axes that share a group count as the outermost."""
    axes = [
        ("tied_weights", mesh.tied_stages), ("expert_replicas", mesh["expert_replicas"]),
        ("replicate x context", mesh["replicas"]), ("shard x context", mesh["fsdp"]),
        *((name, mesh[name]) for name in ("expert", "world", "data", *reversed(AXES)))]  # fmt: skip
    return {axis.group.group_name: name for name, axis in axes if axis.group is not None}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _sum_by_role(events: Iterable[Event]) -> Counter[str]:
    total: Counter[str] = Counter()
    for record, size in events:
        if isinstance(record, StorageRecord):
            total[record.role or record.default_role] += size
    del total["host"]  # offloaded: not in the memory of the device
    return total
