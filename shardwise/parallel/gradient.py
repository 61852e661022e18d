"""How whole gradients are summed over the ranks that see different samples: the section `gradient` of a job."""

from __future__ import annotations

import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import allreduce
from shardwise.comm.collectives import all_reduce
from shardwise.comm.meter import METER
from shardwise.errors import LayoutError
from shardwise.job import Gradient
from shardwise.layout import AXES, Layout
from shardwise.parallel import compress


def check(gradient: Gradient, layout: Layout) -> None:
    """Raises for a way of summing that the layout has no use for, or whose nodes it does not fill evenly."""
    compress.check(gradient.compress, layout)
    if gradient.reduce == "library":
        return
    if layout.shard > 1 and layout.zero > 1:
        raise LayoutError(
            f'gradient.reduce = "{gradient.reduce}" sums whole gradients, but with zero={layout.zero} PyTorch\'s FSDP '
            'reduces pieces of them; use zero=1 or gradient.reduce = "library".'
        )
    if gradient.reduce == "two-level":
        for ranks in _sums(layout):
            on_a_node(ranks, node_of(gradient, layout.world))


def _sums(layout: Layout) -> list[list[int]]:
    """The ranks of each sum over samples and positions."""
    grid = torch.arange(layout.world).reshape([getattr(layout, axis) for axis in AXES])
    dims = [(1,), (2, 3)] if layout.shard > 1 else [(1, 3)]
    found: list[list[int]] = []
    for over in dims:
        last = grid.movedim(over, tuple(range(-len(over), 0))).flatten(-len(over))
        found += last.flatten(0, -2).tolist()
    return found


def node_of(gradient: Gradient, world: int) -> int:
    """Processes on a node."""
    return gradient.node or int(os.environ.get("LOCAL_WORLD_SIZE", world))


def on_a_node(ranks: list[int], node: int) -> int:
    """How many of these ranks share a node of `node` processes; as many on each."""
    counts = set(Counter(rank // node for rank in ranks).values())
    if len(counts) > 1:
        raise LayoutError(
            f'gradient.reduce = "two-level" needs as many ranks of a sum on each node, but nodes of {node} processes '
            f"cut ranks {', '.join(map(str, ranks))} unevenly; use another gradient.node, another layout or "
            'gradient.reduce = "ring".'
        )
    return counts.pop()


class Sum:
    """Sums a tensor over a group, in place."""

    def __init__(self, gradient: Gradient):
        self.gradient = gradient
        self.library = gradient.reduce == "library"

    def __call__(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        if self.library:
            all_reduce(tensor, group=group)
            return
        node = 1
        if self.gradient.reduce == "two-level":
            node = on_a_node(dist.get_process_group_ranks(group), node_of(self.gradient, dist.get_world_size()))
        with METER.waiting(group, tensor.device):
            allreduce.all_reduce(tensor, self.gradient.reduce, group, node)
