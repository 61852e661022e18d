"""The processes of a run as a grid of axes, and this process's place in it.

Beside the axes of the layout there are some that follow from them:

    data    ranks that see different samples: replicate x shard
    shared  ranks that share weights and states: shard x context where there is `shard`, otherwise none
    same    ranks that hold the same weights: replicate, and context where nothing is shared
    joint   ranks over which anything but a matrix's sides is cut: shard x context
    expert  ranks that share the experts, but for those of the tensor axis: neighbours in it
    alike   ranks of it with the same experts, which share those
    apart   replicas that train apart (`shardwise.parallel.local_sgd`), where they do: then replicate is an axis of one, and
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

from shardwise.comm.step_timer import STEP_TIMER
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


SINGLE_RANK = Axis(1, 0, None)
DERIVED_AXES = ("data", "fsdp", "replicas", "fsdp_context", "world", "expert", "expert_replicas", "local_sgd", "loader")


class Mesh:
    """The axes of a layout over the processes of the default group."""

    def __init__(self, layout: Layout, device: torch.device, local_sgd: bool = False):
        self.layout, self.device = layout, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        assert world == layout.world, f"layout '{layout}' needs {layout.world} processes, this world has {world}"
        sizes = tuple(getattr(layout, axis) for axis in AXES)
        grid = torch.arange(world).reshape(sizes)
        coordinates = [int(index) for index in (grid == self.rank).nonzero()[0]]
        self._axes = dict.fromkeys((*AXES, *DERIVED_AXES), SINGLE_RANK)
        self.device_mesh: DeviceMesh | None = None
        self.fsdp_context_mesh: DeviceMesh | None = None
        """With shard and context as one axis, where there are both."""
        self.expert_mesh: DeviceMesh | None = None
        self.tied_stages: Axis = SINGLE_RANK
        if world == 1:
            return
        self.device_mesh = DeviceMesh(device.type, grid, mesh_dim_names=AXES)
        for axis, size, index in zip(AXES, sizes, coordinates, strict=True):
            if size > 1:
                self._axes[axis] = Axis(size, index, self.device_mesh.get_group(axis))
        self._axes["world"] = Axis(world, self.rank, dist.group.WORLD)
        if layout.data > 1:
            flat = self.device_mesh["replicate", "shard"]._flatten("data")
            self._axes["data"] = Axis(layout.data, coordinates[1] * layout.shard + coordinates[2], flat.get_group())
        self.tied_stages = self._make_tied_stages(grid, coordinates)
        self._axes["fsdp"], self._axes["replicas"] = self["shard"], self["replicate"]
        fsdp_context_index = coordinates[2] * layout.context + coordinates[3]  # in shard x context
        if layout.context > 1:
            if layout.shard > 1:
                names = ("pipeline", "replicate", "fsdp", "tensor")
                self.fsdp_context_mesh = DeviceMesh(device.type, grid.flatten(2, 3), mesh_dim_names=names)
                self._axes["fsdp"] = Axis(
                    layout.shard * layout.context, fsdp_context_index, self.fsdp_context_mesh.get_group("fsdp")
                )
            else:
                flat = self.device_mesh["replicate", "context"]._flatten("replicas")
                self._axes["replicas"] = Axis(
                    flat.size(), coordinates[1] * layout.context + coordinates[3], flat.get_group()
                )
        self._axes["fsdp_context"] = self["fsdp"] if layout.shard > 1 else self["context"]
        self._axes["expert_replicas"] = self["fsdp"]
        if layout.expert_ranks > 1:
            self._make_expert_axes(grid, fsdp_context_index)
        self._axes["loader"] = self["data"]
        if local_sgd:
            self._isolate_replicas(grid, coordinates)
        STEP_TIMER.device = device
        STEP_TIMER.axis_of_group.clear()
        display_names = {
            "expert_replicas": "expert",
            "fsdp": "shard",
            "replicas": "replicate",
            "fsdp_context": "context",
            "loader": "data",
        }
        for name in (*DERIVED_AXES, *AXES):
            if self[name].group is not None:
                STEP_TIMER.axis_of_group[self[name].group.group_name] = display_names.get(name, name)  # type: ignore[union-attr]
        if self.tied_stages.group is not None:
            STEP_TIMER.axis_of_group[self.tied_stages.group.group_name] = "pipeline"

    def _isolate_replicas(self, grid: torch.Tensor, coordinates: list[int]) -> None:
        """Makes a replica a world of its own."""
        self._axes["local_sgd"], self._axes["replicate"] = self["replicate"], SINGLE_RANK
        self._axes["data"] = self["shard"]
        self._axes["replicas"] = SINGLE_RANK if self.layout.shard > 1 else self["context"]
        for index, ranks in enumerate(grid.movedim(1, 0).flatten(1).tolist()):
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if index == coordinates[1]:
                self._axes["world"] = Axis(len(ranks), ranks.index(self.rank), group)

    def _make_expert_axes(self, grid: torch.Tensor, fsdp_context_index: int) -> None:
        """Makes `expert` and `alike`."""
        expert = self.layout.expert_ranks
        self.expert_mesh = DeviceMesh(
            self.device.type, grid.flatten(2, 3).unflatten(2, (-1, expert)),
            mesh_dim_names=("pipeline", "replicate", "expert_replicas", "expert", "tensor"),
        )  # fmt: skip
        self._axes["expert"] = Axis(expert, fsdp_context_index % expert, self.expert_mesh.get_group("expert"))
        expert_replicas = self.layout.shard * self.layout.context // expert
        self._axes["expert_replicas"] = (
            Axis(expert_replicas, fsdp_context_index // expert, self.expert_mesh.get_group("expert_replicas"))
            if expert_replicas > 1
            else SINGLE_RANK
        )

    def _make_tied_stages(self, grid: torch.Tensor, coordinates: list[int]) -> Axis:
        """The first and the last pipeline rank with the same other coordinates: they share tied weights."""
        if self.layout.pipeline == 1:
            return SINGLE_RANK
        tied_stages = SINGLE_RANK
        columns = grid.flatten(1)
        for column in range(columns.shape[1]):
            ranks = [int(columns[0, column]), int(columns[-1, column])]
            group = dist.new_group(ranks, group_desc="tied stages")
            if self.rank in ranks:
                tied_stages = Axis(2, ranks.index(self.rank), group)
        return tied_stages

    def __getitem__(self, axis: str) -> Axis:
        return self._axes[axis]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards over: (replicate, shared), or shared alone."""
        mesh, fsdp_dim = (
            (self.device_mesh, "shard") if self.fsdp_context_mesh is None else (self.fsdp_context_mesh, "fsdp")
        )
        assert mesh is not None
        return mesh["replicate", fsdp_dim] if self["replicate"].size > 1 else mesh[fsdp_dim]

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The same for experts that are cut."""
        assert self.expert_mesh is not None
        return (
            self.expert_mesh["replicate", "expert_replicas"]
            if self["replicate"].size > 1
            else self.expert_mesh["expert_replicas"]
        )
