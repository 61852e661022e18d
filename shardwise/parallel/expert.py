"""Expert parallelism: each rank of the expert axis holds some of the experts, and tokens travel to theirs and back.

The axis is folded over shard x context: it needs no ranks of its own, and what is not an expert knows nothing of it.
Where these ranks do not suffice, the tensor axis cuts between experts too, instead of each of them within. Its ranks
see the same tokens, so each serves the choices of its own experts, and the sum at the end of a region joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import all_reduce, all_to_all
from shardwise.comm.step_timer import STEP_TIMER
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.models.chain import Chain, ShardDim
from shardwise.models.config import ModelConfig
from shardwise.models.moe import MoE, Permute, group_sizes, is_fake
from shardwise.parallel.mesh import Axis, Mesh


def check(model: ModelConfig, layout: Layout) -> None:
    """Raises for a degree that model or layout do not allow."""
    degree = layout.expert
    if degree == 1:
        return
    if model.num_experts % degree:
        nearest = max(n for n in range(1, degree) if model.num_experts % n == 0)
        raise LayoutError(
            f"expert={degree}: {model.num_experts} experts do not divide over {degree} ranks; use expert={nearest}."
        )
    ranks = layout.shard * layout.context
    if ranks % degree and (degree % layout.tensor or ranks % (degree // layout.tensor)):
        raise LayoutError(
            f"expert={degree} lies on ranks of shard x context, and with all of the tensor axis where these do not "
            f"suffice, but {layout.shard} x {layout.context} x {layout.tensor} cannot be cut so; use shard={degree} or "
            "a multiple of it."
        )


def apply(chain: Chain, layout: Layout, mesh: Mesh) -> set[str]:
    """Cuts the experts of a chain on the meta device. Returns the names of the parameters that were cut over ranks of
    shard x context; what the tensor axis cuts is told to it."""
    sharded_names: set[str] = set()
    axis, tensor_splits_experts = mesh["expert"], layout.expert_ranks < layout.expert
    if tensor_splits_experts:
        chain.sharding_plan = replace(
            chain.sharding_plan, shard_dims=(ShardDim("block*.mlp.bank.*", 0), *chain.sharding_plan.shard_dims)
        )
    for name, module in chain.named_modules():
        if not isinstance(module, MoE):
            continue
        if tensor_splits_experts:
            module.local_experts = mesh["tensor"].span(module.router.shape[0])
        if axis.size == 1:
            continue
        for leaf, weight in module.bank.named_parameters():
            size = weight.shape[0] // axis.size, *weight.shape[1:]
            setattr(module.bank, leaf, nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device)))
            sharded_names.add(f"{name}.bank.{leaf}")
        module.dispatcher = TokenDispatcher(axis)
    return sharded_names


@dataclass
class RoutingStats:
    """Where the tokens of a step went, in all layers and ranks."""

    imbalance: float
    """Rows of the busiest expert over the mean, in the mean over layers. 1: all were used alike."""
    dropped_tokens: float
    """Share of the choices that found no room."""
    sent: float
    """Bytes that left a rank for another."""
    waited: float
    """Seconds that a rank waited for them, in the mean over ranks."""
    expert_load: list[float]
    """By expert, its share of all choices."""

    @classmethod
    def from_values(cls, values: list[float]) -> RoutingStats:
        imbalance, dropped, sent, waited, *load = values
        return cls(imbalance, dropped, sent, waited, load)


def routing_stats(
    model: Any, chains: list[Chain], world: Axis, device: torch.device, sent: float = 0.0, waited: float = 0.0
) -> Tensor:
    """The numbers of a `RoutingStats`, of what was done since the last call; `sent`, `waited`: of this rank."""
    loads = torch.zeros(model.layers, model.experts, device=device)
    scalars = torch.zeros(3, device=device)
    for chain in chains:
        for name, module in chain.named_modules():
            if isinstance(module, MoE) and module.expert_load is not None:
                loads[_layer_index(name)] = module.expert_load.to(loads.dtype)
                module.expert_load.zero_()
                if module.dropped_tokens is not None:
                    scalars[0] += module.dropped_tokens
                    module.dropped_tokens.zero_()
    scalars[1], scalars[2] = sent, waited / world.size
    if world.size > 1:
        packed = torch.cat((loads.flatten(), scalars))
        all_reduce(packed, group=world.group)
        loads, scalars = packed[:-3].view_as(loads), packed[-3:]
    sparse, total_load = loads[model.dense_layers :], loads.sum().clamp(min=1e-9)
    imbalance = (sparse.amax(1) / sparse.mean(1).clamp(min=1e-9)).mean()
    return torch.cat(
        (torch.stack((imbalance, scalars[0] / total_load, scalars[1], scalars[2])), sparse.sum(0) / total_load)
    )


def update_expert_bias(model: Any, chains: list[Chain], world: Axis, device: torch.device) -> None:
    """After a step, raises the routing bias of experts that got less than their share of tokens over all ranks.

    Ranks that see the same tokens count them equally often, which changes no sign.
    """
    if not model.num_experts or not model.router_bias_update_rate:
        return
    modules = (pair for chain in chains for pair in chain.named_modules())
    moe_layers = {name: module for name, module in modules if isinstance(module, MoE)}
    load = torch.zeros(model.layers, model.experts, dtype=torch.float64, device=device)
    for name, module in moe_layers.items():
        assert module.tokens_per_expert is not None
        load[_layer_index(name)] = module.tokens_per_expert
    if world.size > 1:
        all_reduce(load, group=world.group)
    for name, module in moe_layers.items():
        module.update_expert_bias(load[_layer_index(name)].to(module.expert_bias.dtype))


def _layer_index(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("block"))


class TokenDispatcher:
    """Takes rows that lie by expert to the ranks that hold these, and what comes of them back."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, DispatchState]:
        """The rows of this rank's experts, by expert, from all ranks; how many each has; and the way back."""
        ranks = self.axis.size
        received_counts = torch.empty_like(counts)
        all_to_all(received_counts, counts, group=self.axis.group)
        by_rank = received_counts.view(ranks, -1)  # source, expert
        sent, received = group_sizes(counts.view(ranks, -1).sum(1), rows), group_sizes(by_rank.sum(1), rows)
        rows = TokenAllToAll.apply(rows, received, sent, self.axis)
        if is_fake(counts):
            permutation = torch.arange(rows.shape[0], device=rows.device)
        else:
            experts = torch.arange(by_rank.shape[1], device=rows.device).repeat(ranks)
            permutation = experts.repeat_interleave(received_counts, output_size=sum(received)).argsort(stable=True)
        state = DispatchState(permutation, permutation.argsort(), sent, received)
        return Permute.apply(rows, state.permutation, state.inverse_permutation), by_rank.sum(0), state

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        rows = Permute.apply(rows, state.inverse_permutation, state.permutation)
        return TokenAllToAll.apply(rows, state.sent, state.received, self.axis)  # type: ignore[no-any-return]


class TokenAllToAll(torch.autograd.Function):
    """Runs of rows to other ranks, and as many from them; the gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
        ctx.sizes = sent, received, axis
        return _all_to_all_tokens(rows, received, sent, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_tokens(grads[0].contiguous(), *ctx.sizes), None, None, None


def _all_to_all_tokens(rows: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    received_rows = rows.new_empty(sum(received), *rows.shape[1:])
    sent_bytes = (sum(sent) - sent[axis.index]) * rows.shape[1] * rows.element_size()
    STEP_TIMER.bytes_sent["expert"] += sent_bytes
    all_to_all(received_rows, rows, received, sent, group=axis.group)
    return received_rows


class DispatchState(NamedTuple):
    """What is remembered of a way, for the way back."""

    permutation: Tensor
    inverse_permutation: Tensor
    sent: list[int]
    received: list[int]
