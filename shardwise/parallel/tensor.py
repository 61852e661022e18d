"""Tensor parallelism with sequence parallelism, from a model's sharding plan.

Weights are split into plain local tensors, and modules compute on them unchanged; collectives run at the modules that
the plan names. Between those, activations are split along the sequence.

    SequenceRegion  all-gather along the sequence -> module on split weights -> reduce-scatter along the sequence
    VocabEmbedding  look up this rank's rows, zero for others -> reduce-scatter along the sequence
    VocabHead       all-gather along the sequence -> logits of this rank's vocabulary -> loss over the full vocabulary

A replicated parameter sees only some tokens or heads on each rank: its gradient is a partial sum, which a step sums up.

DTensor's parallel styles compute the same. We do not use them because uneven heads crash or need weights of another
shape, plain tensors and DTensors do not mix in norms and fused optimizers, and every operator pays for dispatch."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.collectives import Axis, all_gather_with_grad, all_reduce, reduce_scatter_with_grad
from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.models import sharding
from shardwise.models.chain import Chain
from shardwise.models.layers import parametrize
from shardwise.models.loss import VocabShard
from shardwise.parallel.batch_norm import AllReduceSum

SEQUENCE_DIM = 1  # of (batch, sequence, hidden)
Reduction = Callable[[Tensor, Axis], Tensor]


def splits_evenly(shard_dim: sharding.ShardDim, shape: torch.Size, degree: int) -> bool:
    """Whether the weight is chunked. If the degree does not divide its heads, each rank has it all and selects rows."""
    return not shard_dim.head_rows or shape[shard_dim.dim] // shard_dim.unit % degree == 0


def _shard_dim_of(plan: sharding.ShardingPlan, name: str, shape: torch.Size) -> sharding.ShardDim | None:
    """Returns how a parameter is split. A number that a split layer learns beside its weight cannot be: every rank
    keeps it, applies it to its own part, and its gradients are summed over the ranks."""
    return plan.shard_dim_of(name) if shape else None


def check(plan: sharding.ShardingPlan, shapes: dict[str, torch.Size], sequence: int, degree: int) -> None:
    """Raises LayoutError if the tensor degree does not divide the sequence or the heads, or leaves a rank empty."""
    if degree == 1:
        return
    if plan.splits_sequence and sequence % degree:
        nearest = max(degree, round(sequence / degree) * degree)
        problem = f"the sequence length {sequence} is not divisible by {degree}; the nearest valid length is {nearest}"
        raise LayoutError(f"tensor={degree} splits activations along the sequence, but {problem}.")
    shard_dims: dict[str, sharding.ShardDim] = {}
    for name, shape in shapes.items():
        shard_dim = _shard_dim_of(plan, name, shape)
        if shard_dim is not None:
            shard_dims[name] = shard_dim
    for name, shard_dim in shard_dims.items():
        units = shapes[name][shard_dim.dim] // shard_dim.unit
        if not shard_dim.head_rows and shard_dim.unit > 1 and units % degree:
            raise LayoutError(f"tensor={degree} does not divide the {units} heads of {name}; use a degree that does.")
    for name, shard_dim in shard_dims.items():
        if splits_evenly(shard_dim, shapes[name], degree):
            count, unit_name = shapes[name][shard_dim.dim], "row"
            is_rank_empty = -(-count // degree) * (degree - 1) >= count
        else:
            count, unit_name = len(shard_dim.head_rows), "head"
            is_rank_empty = count < degree
        if is_rank_empty:
            found = pluralize(count, unit_name)
            raise LayoutError(f"tensor={degree} leaves a rank without any of the {found} of {name}; lower it.")


def apply(chain: Chain, axis: Axis) -> dict[str, int | None]:
    """Splits a chain on the meta device for this rank. Returns the split dimension of each parameter, or None."""
    sharded_dims: dict[str, int | None] = {name: None for name, _ in chain.named_unique_parameters()}
    if axis.size == 1:
        return sharded_dims
    shapes = {name: parameter.shape for name, parameter in chain.named_parameters(remove_duplicate=False)}
    for name, shape in shapes.items():
        shard_dim = _shard_dim_of(chain.sharding_plan, name, shape)
        if shard_dim is not None:
            _shard_parameter(chain, name, shape, shard_dim, axis)
            dim = shard_dim.dim if splits_evenly(shard_dim, shape, axis.size) else None
            sharded_dims[chain.sharding_plan.canonical_name(name)] = dim
    chain.tie_weights()
    for name, module in chain.named_modules():
        rule = next((rule for rule in chain.sharding_plan.modules if fnmatchcase(name, rule.module)), None)
        if not any(True for _ in module.parameters()):
            continue  # the weights are on another stage
        if isinstance(rule, sharding.SequenceRegion):
            row = getattr(module, rule.rowwise, None)
            _apply_sequence_region(module, row if isinstance(row, nn.Module) else None, axis)
            weight = f"{name}.{rule.rowwise}.weight"
            shard_dim = chain.sharding_plan.shard_dim_of(weight) if weight in shapes else None
            if shard_dim is not None and not splits_evenly(shard_dim, shapes[weight], axis.size):
                for attribute, value in rule.uneven:
                    setattr(module, attribute, value)
        elif isinstance(rule, sharding.VocabEmbedding):
            _look_up_rows(module, axis, reduce_scatter_sequence)
        elif isinstance(rule, sharding.VocabHead):
            _apply_vocab_head(module, axis)
        elif isinstance(rule, sharding.AllReduceOutput):
            _apply_all_reduce(module, axis, rule.splits_input)
        elif isinstance(rule, sharding.GatherOutput):
            _apply_gather(module, axis)
        elif isinstance(rule, sharding.VocabLookup):
            _apply_vocab_lookup(module, axis)
    return sharded_dims


def _shard_parameter(chain: Chain, name: str, shape: torch.Size, shard_dim: sharding.ShardDim, axis: Axis) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = chain.get_submodule(owner_name)
    full_weight = owner._parameters[leaf]
    assert full_weight is not None
    if splits_evenly(shard_dim, shape, axis.size):
        first, length = axis.span(shape[shard_dim.dim])
        size = list(shape)
        size[shard_dim.dim] = length
        local = torch.empty(size, dtype=full_weight.dtype, device=full_weight.device)
        setattr(owner, leaf, nn.Parameter(local, full_weight.requires_grad))
        if shard_dim.dim == 0:
            owner.__dict__["first_row"] = first  # offset in the full tensor, for lookups
    else:
        rows = torch.tensor(shard_dim.head_rows).tensor_split(axis.size)[axis.index]
        parametrize(owner, leaf, RowSelector(shard_dim.dim, rows.flatten()))


class RowSelector:
    """Selects the given rows of a tensor along one dimension; moves the indices to its device once."""

    def __init__(self, dim: int, rows: Tensor):
        self.dim, self.rows = dim, rows

    def __call__(self, full_weight: Tensor) -> Tensor:
        if self.rows.device != full_weight.device:
            self.rows = self.rows.to(full_weight.device)
        return full_weight.index_select(self.dim, self.rows)


def all_gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """All-gathers along the sequence; the backward is a reduce-scatter."""
    return all_gather_with_grad(x.contiguous(), SEQUENCE_DIM, axis)


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatters along the sequence; the backward is an all-gather."""
    return reduce_scatter_with_grad(x.contiguous(), SEQUENCE_DIM, axis)


def _gather_input(module: nn.Module, axis: Axis) -> None:
    module.register_forward_pre_hook(lambda _, args: (all_gather_sequence(args[0], axis), *args[1:]))


def _sum_output(module: nn.Module, row: nn.Module | None, axis: Axis, reduce: Reduction) -> None:
    if row is not None:
        parametrize(row, "bias", lambda bias: None)  # the matmul gives a partial sum; the bias is added once, below

    def post_hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        y, bias = reduce(y, axis), row._parameters.get("bias") if row is not None else None
        return y if bias is None else y + bias.to(y.dtype)

    module.register_forward_hook(post_hook)


def _apply_sequence_region(module: nn.Module, row: nn.Module | None, axis: Axis) -> None:
    _gather_input(module, axis)
    _sum_output(module, row, axis, reduce_scatter_sequence)


def _apply_all_reduce(row: nn.Module, axis: Axis, splits_input: bool) -> None:
    def pre_hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, length = axis.span(args[0].shape[-1])
        return args[0].narrow(-1, first, length), *args[1:]

    if splits_input:
        row.register_forward_pre_hook(pre_hook)
    _sum_output(row, row, axis, AllReduceSum.apply)


def _apply_gather(module: Any, axis: Axis) -> None:
    features: int = module.out_features

    def post_hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        padded = F.pad(y, (0, -(-features // axis.size) - y.shape[-1]))  # the last rank may have fewer
        return all_gather_with_grad(padded.contiguous(), y.dim() - 1, axis).narrow(-1, 0, features)

    module.register_forward_hook(post_hook)


def _look_up_rows(module: Any, axis: Axis, reduce: Reduction) -> None:
    """Makes an embedding look up this rank's rows, zero for others, and sums them over ranks."""
    lookup = module.forward

    def forward(tokens: Tensor) -> Tensor:
        row = tokens - module.first_row
        is_remote = (row < 0) | (row >= module.weight.shape[0])
        return reduce(lookup(row.masked_fill(is_remote, 0)).masked_fill(is_remote.unsqueeze(-1), 0.0), axis)

    module.forward = forward


def _apply_vocab_lookup(module: Any, axis: Axis) -> None:
    padding = -1 if module.padding_idx is None else module.padding_idx - module.first_row
    module.padding_idx = padding if 0 <= padding < module.weight.shape[0] else None
    _look_up_rows(module, axis, AllReduceSum.apply)


def _apply_vocab_head(module: Any, axis: Axis) -> None:
    _gather_input(module, axis)
    module.loss_chunk_size *= axis.size  # each rank computes only its part of the logits
    module.vocab_shard = VocabShard(module.first_row,
                                    all_reduce_max=lambda numbers: all_reduce(numbers, dist.ReduceOp.MAX, axis=axis),
                                    all_reduce_sum=lambda numbers: all_reduce(numbers, axis=axis))  # fmt: skip
