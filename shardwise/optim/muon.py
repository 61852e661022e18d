"""Muon (Jordan et al. 2024) for the matrices inside blocks, AdamW for all other parameters.

It computes what `torch.optim.Muon` computes, on shards. Orthogonalization needs full matrices: each matrix is gathered
on one of the ranks that shard it, orthogonalized there, and scattered back; replicas each take a part of the matrices.
Stacked expert weights are one matrix per expert; a fused QKV weight is one matrix, as in PyTorch. Updates have the RMS
of AdamW's (PyTorch's `match_rms_adamw`), so one learning rate serves both."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.comm.collectives import Axis, all_to_all
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ParamGroup, ShardedOptimizer

NS_COEFFICIENTS = 3.4445, -4.7750, 2.0315
NS_STEPS = 5
EPS = 1e-7


class Muon(ShardedOptimizer):
    def __init__(self, groups: list[ParamGroup], defaults: ParamGroup, shards: Sequence[ParamShard],
                 adamw: torch.optim.Optimizer):  # fmt: skip
        """`adamw` updates all other parameters; `param_groups` and `state` combine both optimizers."""
        super().__init__(groups, defaults, shards)
        self.adamw, self.muon_groups = adamw, self.param_groups
        self.param_groups = [*adamw.param_groups, *self.muon_groups]
        self.state = adamw.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for attribute in ("grad_scale", "found_inf"):
            setattr(self.adamw, attribute, getattr(self, attribute))
        self.adamw.step()
        members = [(self.shards[weight], group) for group in self.muon_groups for weight in group["params"]]
        updates = []
        for shard, group in members:
            grad = self.unscaled_grad(shard)
            average = self.lerp_state(self.state[shard.tensor], "momentum_buffer", grad, 1.0 - group["momentum"])
            updates.append(to_matmul_dtype(grad.lerp(average, group["momentum"])))
        updates = orthogonalize(updates, [shard for shard, _ in members])
        for (shard, group), update in zip(members, updates, strict=True):
            lr = group["lr"] * 0.2 * math.sqrt(max(shard.shape[-2:]))
            decayed = shard.tensor.detach() * (1.0 - group["lr"] * group["weight_decay"])
            self.update_weight(shard, decayed.sub_(update.to(decayed.dtype), alpha=lr))


def to_matmul_dtype(tensor: Tensor) -> Tensor:
    """Casts float32 to bf16 on GPUs, as PyTorch's Muon does; CPUs keep the dtype, since not all support bf16."""
    return tensor.bfloat16() if tensor.is_cuda and tensor.dtype == torch.float32 else tensor


def newton_schulz(x: Tensor) -> Tensor:
    """Returns approximately the nearest semi-orthogonal matrix, for one matrix or a batch."""
    if not x.numel():
        return x
    a, b, c = NS_COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalize(tensors: list[Tensor], shards: Sequence[ParamShard]) -> list[Tensor]:
    """Returns this rank's shard of each orthogonalized full matrix."""
    by_group: dict[tuple[int, ...], list[tuple[int, ParamShard]]] = {}
    for index, (tensor, shard) in enumerate(zip(tensors, shards, strict=True)):
        sharded_dims = tuple((dim, axis) for dim, axis in shard.sharded_dims if dim >= len(shard.shape) - 2)
        matrix_shard = replace(shard, tensor=tensor, sharded_dims=sharded_dims)
        # Matrices that are sharded and replicated over the same ranks share collectives.
        key = *(id(axis.group) for _, axis in sharded_dims), id(shard.replica_axis)
        by_group.setdefault(key, []).append((index, matrix_shard))
    results = list(tensors)
    for group in by_group.values():
        orthogonalized = _orthogonalize_on_owners([matrix_shard for _, matrix_shard in group])
        for (index, _), result in zip(group, orthogonalized, strict=True):
            results[index] = result
    return results


def _orthogonalize_on_owners(matrix_shards: list[ParamShard]) -> list[Tensor]:
    """Gathers each matrix on one rank, axis by axis from the innermost, orthogonalizes it and scatters it back."""
    if not matrix_shards or not matrix_shards[0].sharded_dims:
        return _orthogonalize_replicated(matrix_shards)
    axis = matrix_shards[0].sharded_dims[-1][1]
    dims = [shard.sharded_dims[-1][0] for shard in matrix_shards]
    sizes = [_split_sizes(shard.shape[dim], shard.sharded_dims) for shard, dim in zip(matrix_shards, dims)]
    assignment = _balance_by_cost(_costs(matrix_shards), axis.size)
    owned = assignment[axis.index]

    def shape_of(index: int, rank: int) -> list[int]:
        shape = list(matrix_shards[index].tensor.shape)
        shape[dims[index]] = sizes[index][rank]
        return shape

    to_send = [[matrix_shards[index].tensor for index in indices] for indices in assignment]
    shapes = [[shape_of(index, rank) for index in owned] for rank in range(axis.size)]
    received = _all_to_all_tensors(to_send, shapes, axis, matrix_shards[0].tensor)
    gathered = [torch.cat(parts, dims[index]) for parts, index in zip(zip(*received), owned)]
    outer = [replace(matrix_shards[n], tensor=tensor, sharded_dims=matrix_shards[n].sharded_dims[:-1])
             for n, tensor in zip(owned, gathered, strict=True)]  # fmt: skip
    chunks = [tensor.split(sizes[n], dims[n]) for tensor, n in zip(_orthogonalize_on_owners(outer), owned, strict=True)]
    to_return = [[parts[rank] for parts in chunks] for rank in range(axis.size)]
    shapes = [[shape_of(index, axis.index) for index in indices] for indices in assignment]
    return _restore_order(assignment, _all_to_all_tensors(to_return, shapes, axis, matrix_shards[0].tensor))


def _orthogonalize_replicated(matrix_shards: list[ParamShard]) -> list[Tensor]:
    """Divides replicated matrices among the replicas: each orthogonalizes some and sends the results to the others."""
    axis = matrix_shards[0].replica_axis if matrix_shards else None
    if axis is None:
        return [newton_schulz(shard.tensor) for shard in matrix_shards]
    assignment = _balance_by_cost(_costs(matrix_shards), axis.size)
    results = [newton_schulz(matrix_shards[index].tensor) for index in assignment[axis.index]]
    shapes = [[list(matrix_shards[index].tensor.shape) for index in indices] for indices in assignment]
    return _restore_order(assignment, _all_to_all_tensors([results] * axis.size, shapes, axis, matrix_shards[0].tensor))


def _restore_order(assignment: list[list[int]], results: list[list[Tensor]]) -> list[Tensor]:
    pairs = [pair for indices, tensors in zip(assignment, results) for pair in zip(indices, tensors, strict=True)]
    return [tensor for _, tensor in sorted(pairs, key=lambda pair: pair[0])]


def _all_to_all_tensors(tensors_by_rank: list[list[Tensor]], shapes: list[list[list[int]]], axis: Axis,
                        like: Tensor) -> list[list[Tensor]]:  # fmt: skip
    """All-to-all of lists of tensors; returns what each rank sent, in the given shapes and the dtype of `like`."""
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in tensors_by_rank for tensor in tensors)])
    input_split_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in tensors_by_rank]
    output_split_sizes = [sum(map(math.prod, rank_shapes)) for rank_shapes in shapes]
    output = flat.new_empty(sum(output_split_sizes))
    all_to_all(output, flat, output_split_sizes, input_split_sizes, axis=axis)
    parts = iter(output.split([math.prod(shape) for rank_shapes in shapes for shape in rank_shapes]))
    return [[next(parts).view(shape) for shape in rank_shapes] for rank_shapes in shapes]


def _split_sizes(length: int, sharded_dims: Sequence[tuple[int, Axis]]) -> list[int]:
    """Returns the sizes into which the innermost axis splits this dimension, after outer axes have split it."""
    *outer, (dim, axis) = sharded_dims
    for outer_dim, outer_axis in outer:
        if outer_dim == dim:
            length = outer_axis.span(length)[1]
    chunk_size = -(-length // axis.size)
    return [max(0, min(chunk_size, length - rank * chunk_size)) for rank in range(axis.size)]


def _costs(matrix_shards: list[ParamShard]) -> list[int]:
    return [shard.shape.numel() * min(shard.shape[-2:]) for shard in matrix_shards]


def _balance_by_cost(costs: list[int], ranks: int) -> list[list[int]]:
    """Assigns indices to ranks: the most expensive first, each to the rank with the least load."""
    loads, assignment = [0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = loads.index(min(loads))
        loads[rank] += costs[index]
        assignment[rank].append(index)
    return assignment
