"""How whole gradients are summed over the ranks that see different samples: the section `gradient` of a job."""

from __future__ import annotations

import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import allreduce
from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.errors import LayoutError
from shardwise.job import GradientConfig
from shardwise.layout import AXES, Layout
from shardwise.parallel import gradient_compression


def check(gradient: GradientConfig, layout: Layout) -> None:
    """Raises for a way of summing that the layout has no use for, or whose nodes it does not fill evenly."""
    gradient_compression.check(gradient.compress, layout)
    if gradient.all_reduce == "library":
        return
    if layout.shard > 1 and layout.zero > 1:
        raise LayoutError(
            f'gradient.all_reduce = "{gradient.all_reduce}" sums whole gradients, but with zero={layout.zero} PyTorch\'s FSDP '
            'reduces pieces of them; use zero=1 or gradient.all_reduce = "library".'
        )
    if gradient.all_reduce == "two-level":
        for ranks in _reduction_groups(layout):
            group_ranks_per_node(ranks, ranks_per_node(gradient, layout.world))


def _reduction_groups(layout: Layout) -> list[list[int]]:
    """The ranks of each sum over samples and positions."""
    grid = torch.arange(layout.world).reshape([getattr(layout, axis) for axis in AXES])
    dims = [(1,), (2, 3)] if layout.shard > 1 else [(1, 3)]
    groups: list[list[int]] = []
    for over in dims:
        last = grid.movedim(over, tuple(range(-len(over), 0))).flatten(-len(over))
        groups += last.flatten(0, -2).tolist()
    return groups


def ranks_per_node(gradient: GradientConfig, world: int) -> int:
    """Processes on a node."""
    return gradient.nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))


def group_ranks_per_node(ranks: list[int], node_size: int) -> int:
    """How many of these ranks share a node of `node` processes; as many on each."""
    counts = set(Counter(rank // node_size for rank in ranks).values())
    if len(counts) > 1:
        raise LayoutError(
            f'gradient.all_reduce = "two-level" needs as many ranks of a sum on each node, but nodes of {node_size} processes '
            f"cut ranks {', '.join(map(str, ranks))} unevenly; use another gradient.nproc_per_node, another layout or "
            'gradient.all_reduce = "ring".'
        )
    return counts.pop()


class GradientReducer:
    """Sums a tensor over a group, in place."""

    def __init__(self, gradient: GradientConfig):
        self.gradient = gradient
        self.uses_library = gradient.all_reduce == "library"

    def __call__(self, tensor: Tensor, axis: Axis) -> None:
        if self.uses_library:
            all_reduce(tensor, axis=axis)
            return
        group_node_size = 1
        if self.gradient.all_reduce == "two-level":
            group_node_size = group_ranks_per_node(
                dist.get_process_group_ranks(axis.group), ranks_per_node(self.gradient, dist.get_world_size())
            )
        with axis.waiting(tensor.device):
            allreduce.all_reduce(tensor, self.gradient.all_reduce, axis.group, group_node_size)
