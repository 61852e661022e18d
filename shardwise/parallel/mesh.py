"""The process mesh: the axes of a layout, this rank's index on each, and their process groups.

Beside the axes of the layout there are derived ones:

    data             ranks with different samples: replicate x shard
    fsdp             ranks that shard parameters and optimizer state: shard x context if shard > 1, otherwise size 1
    replicas         ranks with the same parameters: replicate, and context unless it is part of fsdp
    fsdp_context     shard x context
    expert           ranks over which experts are split, without the tensor axis: neighbours in fsdp_context
    expert_replicas  ranks of fsdp_context with the same experts, whose weights they shard
    local_sgd        the replicas that local SGD averages; replicate then has size 1, data and world cover one replica
    loader           data, over all replicas

A world of size 1 has no process groups, and every collective is skipped: one device runs the same code. All processes
create the same groups in the same order. The mesh owns the step timer, which every axis with a group reports to."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.collectives import SINGLE_RANK, Axis, StepTimer
from shardwise.layout import AXES, Layout

DERIVED_AXES = ("data", "fsdp", "replicas", "fsdp_context", "world", "expert", "expert_replicas", "local_sgd", "loader")


class Mesh:
    def __init__(self, layout: Layout, device: torch.device, local_sgd: bool = False):
        self.layout, self.device, self.timer = layout, device, StepTimer(device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        assert world == layout.world, f"layout '{layout}' needs {layout.world} processes, this world has {world}"
        sizes = tuple(getattr(layout, axis) for axis in AXES)
        grid = torch.arange(world).reshape(sizes)
        self._axes = dict.fromkeys((*AXES, *DERIVED_AXES), SINGLE_RANK)
        self.all_ranks = SINGLE_RANK  # all ranks of the run; under local SGD `world` is one replica
        self.tied_stages = SINGLE_RANK  # the first and the last pipeline rank, which share tied weights
        self.device_mesh: DeviceMesh | None = None
        self.fsdp_context_mesh: DeviceMesh | None = None  # shard and context as one dimension, if both exceed 1
        self.expert_mesh: DeviceMesh | None = None
        if world == 1:
            return
        self.device_mesh = DeviceMesh(device.type, grid, mesh_dim_names=AXES)
        for axis, size in zip(AXES, sizes, strict=True):
            if size > 1:
                self._axes[axis] = self._axis(axis, self.device_mesh.get_group(axis))
        assert dist.group.WORLD is not None
        self.all_ranks = self._axis("world", dist.group.WORLD)
        sole_axis = next((axis for axis, size in zip(AXES, sizes, strict=True) if size == world), None)
        self._axes["world"] = replace(self.all_ranks, name=sole_axis or "world")
        if layout.data > 1:
            flat = self.device_mesh["replicate", "shard"]._flatten("data")
            self._axes["data"] = self._axis(sole_axis or "data", flat.get_group())
        for ranks in grid.flatten(1)[[0, -1]].T.tolist() if layout.pipeline > 1 else ():
            group = dist.new_group(ranks, group_desc="tied stages")
            if self.rank in ranks:
                self.tied_stages = self._axis("pipeline", group)
        self._axes["fsdp"], self._axes["replicas"] = self["shard"], self["replicate"]
        if layout.context > 1 and layout.shard > 1:
            names = ("pipeline", "replicate", "fsdp", "tensor")
            self.fsdp_context_mesh = DeviceMesh(device.type, grid.flatten(2, 3), mesh_dim_names=names)
            self._axes["fsdp"] = self._axis("shard", self.fsdp_context_mesh.get_group("fsdp"))
        elif layout.context > 1:
            flat = self.device_mesh["replicate", "context"]._flatten("replicas")
            self._axes["replicas"] = self._axis(sole_axis or "replicate", flat.get_group())
        self._axes["fsdp_context"] = self["fsdp"] if layout.shard > 1 else self["context"]
        self._axes["expert_replicas"] = self["fsdp"]
        if layout.expert_ranks > 1:
            self._make_expert_axes(grid)
        self._axes["loader"] = self["data"]
        if local_sgd:
            self._isolate_replicas(grid)

    def _axis(self, name: str, group: dist.ProcessGroup) -> Axis:
        """Returns the axis over the ranks of a group, of which this is one; they are in ascending order."""
        return Axis(group.size(), group.rank(), group, name, self.timer)

    def _isolate_replicas(self, grid: torch.Tensor) -> None:
        """Makes each replica a world of its own."""
        self._axes["local_sgd"] = replace(self["replicate"], name="local_sgd")
        self._axes["replicate"] = SINGLE_RANK
        self._axes["data"] = self["shard"]
        self._axes["replicas"] = SINGLE_RANK if self.layout.shard > 1 else self["context"]
        self._axes["world"] = SINGLE_RANK
        if self.layout.world > self.layout.replicate:
            group, _ = dist.new_subgroups_by_enumeration(grid.movedim(1, 0).flatten(1).tolist())
            self._axes["world"] = self._axis("world", group)

    def _make_expert_axes(self, grid: torch.Tensor) -> None:
        names = ("pipeline", "replicate", "expert_replicas", "expert", "tensor")
        split_grid = grid.flatten(2, 3).unflatten(2, (-1, self.layout.expert_ranks))
        self.expert_mesh = DeviceMesh(self.device.type, split_grid, mesh_dim_names=names)
        for axis in ("expert", "expert_replicas"):
            group = self.expert_mesh.get_group(axis)
            self._axes[axis] = self._axis("expert", group) if group.size() > 1 else SINGLE_RANK

    def __getitem__(self, axis: str) -> Axis:
        return self._axes[axis]

    def fsdp_mesh(self, experts: bool = False) -> DeviceMesh:
        """Returns the mesh for `fully_shard`, or that of split experts: (replicate, fsdp) for HSDP, else fsdp alone."""
        mesh, dim = (self.expert_mesh, "expert_replicas") if experts else (self.device_mesh, "shard")
        if self.fsdp_context_mesh is not None and not experts:
            mesh, dim = self.fsdp_context_mesh, "fsdp"
        assert mesh is not None
        return mesh["replicate", dim] if self["replicate"].size > 1 else mesh[dim]
