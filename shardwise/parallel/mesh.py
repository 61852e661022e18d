"""The processes of a run as a grid of axes, and this process's place in it.

Beside the axes of the layout there are some that follow from them:

    data    ranks that see different samples: replicate x shard
    shared  ranks that share weights and states: shard x context where there is `shard`, otherwise none
    same    ranks that hold the same weights: replicate, and context where nothing is shared
    joint   ranks over which anything but a matrix's sides is cut: shard x context
    expert  ranks that share the experts, but for those of the tensor axis: neighbours in it
    alike   ranks of it with the same experts, which share those
    apart   replicas that train apart (`shardwise.parallel.sync`), where they do: then replicate is an axis of one, and
            data and world are those of a replica
    reads   data, over all replicas

A world of one has no process group at all: every group is None and every collective is skipped, so that one device
walks the same road. All processes build the same groups in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.meter import METER
from shardwise.layout import AXES, Layout


@dataclass(frozen=True)
class Axis:
    """One axis as this process sees it: how many there are along it, which one we are, and the group that talks."""

    size: int
    index: int
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), "an axis of one talks to nobody"

    def span(self, total: int) -> tuple[int, int]:
        """First row and length of this rank's part when PyTorch cuts `total` rows into chunks along the axis."""
        size = -(-total // self.size)
        first = min(self.index * size, total)
        return first, min(size, total - first)


ALONE = Axis(1, 0, None)
DERIVED = ("data", "shared", "same", "joint", "world", "expert", "alike", "apart", "reads")


class Mesh:
    """The axes of a layout over the processes of the default group."""

    def __init__(self, layout: Layout, device: torch.device, apart: bool = False):
        self.layout, self.device = layout, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        assert world == layout.world, f"layout '{layout}' needs {layout.world} processes, this world has {world}"
        sizes = tuple(getattr(layout, axis) for axis in AXES)
        grid = torch.arange(world).reshape(sizes)
        place = [int(index) for index in (grid == self.rank).nonzero()[0]]
        self._axes = dict.fromkeys((*AXES, *DERIVED), ALONE)
        self.devices: DeviceMesh | None = None
        self.joined: DeviceMesh | None = None
        """With shard and context as one axis, where there are both."""
        self.folded: DeviceMesh | None = None
        self.ends: Axis = ALONE
        if world == 1:
            return
        self.devices = DeviceMesh(device.type, grid, mesh_dim_names=AXES)
        for axis, size, index in zip(AXES, sizes, place, strict=True):
            if size > 1:
                self._axes[axis] = Axis(size, index, self.devices.get_group(axis))
        self._axes["world"] = Axis(world, self.rank, dist.group.WORLD)
        if layout.data > 1:
            flat = self.devices["replicate", "shard"]._flatten("data")
            self._axes["data"] = Axis(layout.data, place[1] * layout.shard + place[2], flat.get_group())
        self.ends = self._end_groups(grid, place)
        self._axes["shared"], self._axes["same"] = self["shard"], self["replicate"]
        joint = place[2] * layout.context + place[3]  # in shard x context
        if layout.context > 1:
            if layout.shard > 1:
                names = ("pipeline", "replicate", "shared", "tensor")
                self.joined = DeviceMesh(device.type, grid.flatten(2, 3), mesh_dim_names=names)
                self._axes["shared"] = Axis(layout.shard * layout.context, joint, self.joined.get_group("shared"))
            else:
                flat = self.devices["replicate", "context"]._flatten("same")
                self._axes["same"] = Axis(flat.size(), place[1] * layout.context + place[3], flat.get_group())
        self._axes["joint"] = self["shared"] if layout.shard > 1 else self["context"]
        self._axes["alike"] = self["shared"]
        if layout.expert_ranks > 1:
            self._fold(grid, joint)
        self._axes["reads"] = self["data"]
        if apart:
            self._part(grid, place)
        METER.device = device
        METER.axes.clear()
        spoken = {"alike": "expert", "shared": "shard", "same": "replicate", "joint": "context", "reads": "data"}
        for name in (*DERIVED, *AXES):
            if self[name].group is not None:
                METER.axes[self[name].group.group_name] = spoken.get(name, name)  # type: ignore[union-attr]
        if self.ends.group is not None:
            METER.axes[self.ends.group.group_name] = "pipeline"

    def _part(self, grid: torch.Tensor, place: list[int]) -> None:
        """Makes a replica a world of its own."""
        self._axes["apart"], self._axes["replicate"] = self["replicate"], ALONE
        self._axes["data"] = self["shard"]
        self._axes["same"] = ALONE if self.layout.shard > 1 else self["context"]
        for index, ranks in enumerate(grid.movedim(1, 0).flatten(1).tolist()):
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if index == place[1]:
                self._axes["world"] = Axis(len(ranks), ranks.index(self.rank), group)

    def _fold(self, grid: torch.Tensor, joint: int) -> None:
        """Makes `expert` and `alike`."""
        expert = self.layout.expert_ranks
        self.folded = DeviceMesh(
            self.device.type, grid.flatten(2, 3).unflatten(2, (-1, expert)),
            mesh_dim_names=("pipeline", "replicate", "alike", "expert", "tensor"),
        )  # fmt: skip
        self._axes["expert"] = Axis(expert, joint % expert, self.folded.get_group("expert"))
        alike = self.layout.shard * self.layout.context // expert
        self._axes["alike"] = Axis(alike, joint // expert, self.folded.get_group("alike")) if alike > 1 else ALONE

    def _end_groups(self, grid: torch.Tensor, place: list[int]) -> Axis:
        """The first and the last pipeline rank with the same other coordinates: they share tied weights."""
        if self.layout.pipeline == 1:
            return ALONE
        ends = ALONE
        columns = grid.flatten(1)
        for column in range(columns.shape[1]):
            ranks = [int(columns[0, column]), int(columns[-1, column])]
            group = dist.new_group(ranks, group_desc="tied stages")
            if self.rank in ranks:
                ends = Axis(2, ranks.index(self.rank), group)
        return ends

    def __getitem__(self, axis: str) -> Axis:
        return self._axes[axis]

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The mesh that FSDP shards over: (replicate, shared), or shared alone."""
        mesh, shared = (self.devices, "shard") if self.joined is None else (self.joined, "shared")
        assert mesh is not None
        return mesh["replicate", shared] if self["replicate"].size > 1 else mesh[shared]

    @cached_property
    def fsdp_experts(self) -> DeviceMesh:
        """The same for experts that are cut."""
        assert self.folded is not None
        return self.folded["replicate", "alike"] if self["replicate"].size > 1 else self.folded["alike"]
