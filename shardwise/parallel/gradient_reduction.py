"""How full gradients are reduced over data-parallel ranks: the `[gradient]` section of a job."""

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
    """Raises LayoutError if the layout cannot use the all-reduce algorithm or compression of the job."""
    gradient_compression.check(gradient.compress, layout)
    if gradient.all_reduce == "library":
        return
    if layout.shard > 1 and layout.zero > 1:
        raise LayoutError(
            f'gradient.all_reduce = "{gradient.all_reduce}" reduces full gradients, but with zero={layout.zero} FSDP '
            'reduce-scatters them; use zero=1 or gradient.all_reduce = "library".'
        )
    if gradient.all_reduce == "two-level":
        for ranks in _reduction_groups(layout):
            group_ranks_per_node(ranks, ranks_per_node(gradient, layout.world))


def _reduction_groups(layout: Layout) -> list[list[int]]:
    """Returns the ranks of each group that gradients are reduced over."""
    grid = torch.arange(layout.world).reshape([getattr(layout, axis) for axis in AXES])
    dims = [(1,), (2, 3)] if layout.shard > 1 else [(1, 3)]
    by_group = [grid.movedim(over, tuple(range(-len(over), 0))).flatten(-len(over)) for over in dims]
    return [ranks for groups in by_group for ranks in groups.flatten(0, -2).tolist()]


def ranks_per_node(gradient: GradientConfig, world: int) -> int:
    """Returns the number of processes per node."""
    return gradient.nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))


def group_ranks_per_node(ranks: list[int], node_size: int) -> int:
    """Returns how many of these ranks share a node of `node_size` processes; raises LayoutError if nodes differ."""
    counts = set(Counter(rank // node_size for rank in ranks).values())
    if len(counts) > 1:
        raise LayoutError(
            f'gradient.all_reduce = "two-level" needs equally many ranks of a group per node, but nodes of {node_size} '
            f"processes split ranks {', '.join(map(str, ranks))} unevenly; use another gradient.nproc_per_node, "
            'another layout or gradient.all_reduce = "ring".'
        )
    return counts.pop()


class GradientReducer:
    """Sums a tensor over an axis in place, with the algorithm of the job."""

    def __init__(self, gradient: GradientConfig):
        self.gradient = gradient
        self.uses_library = gradient.all_reduce == "library"

    def __call__(self, tensor: Tensor, axis: Axis) -> None:
        if self.uses_library:
            all_reduce(tensor, axis=axis)
            return
        ranks_on_node = 1
        if self.gradient.all_reduce == "two-level":
            node_size = ranks_per_node(self.gradient, dist.get_world_size())
            ranks_on_node = group_ranks_per_node(dist.get_process_group_ranks(axis.group), node_size)
        with axis.waiting(tensor.device):
            allreduce.all_reduce(tensor, self.gradient.all_reduce, axis.group, ranks_on_node)
