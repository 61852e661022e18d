"""Expert parallelism: each rank of the expert axis owns some experts; tokens are dispatched and combined.

The expert axis folds over shard x context: it needs no ranks of its own, and other modules are unaffected. If those
ranks do not suffice, the tensor axis also distributes whole experts instead of splitting each one. Tensor ranks see the
same tokens, so each computes its own experts and the reduce-scatter at the end of the module sums the outputs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import Axis, all_reduce, all_to_all, all_to_all_with_grad
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.models.chain import Chain
from shardwise.models.config import ModelConfig
from shardwise.models.moe import MoE, group_sizes
from shardwise.models.sharding import ShardDim
from shardwise.parallel.mesh import Mesh

DispatchState = tuple[Tensor, Tensor, list[int], list[int]]  # permutation of rows, its inverse, rows sent and received


def check(model: ModelConfig, layout: Layout) -> None:
    """Raises LayoutError if the expert degree does not fit the model or the layout."""
    degree = layout.expert
    if degree == 1:
        return
    if model.num_experts % degree:
        nearest = max(n for n in range(1, degree) if model.num_experts % n == 0)
        count = f"{model.num_experts} experts"
        raise LayoutError(f"expert={degree}: {count} are not divisible by {degree} ranks; use expert={nearest}.")
    ranks = layout.shard * layout.context
    if ranks % degree and model.passes_batch:
        raise LayoutError(f"expert={degree} must divide shard x context, {ranks}; use shard={degree} or a multiple.")
    if ranks % degree and (degree % layout.tensor or ranks % (degree // layout.tensor)):
        sizes = f"shard x context x tensor is {layout.shard} x {layout.context} x {layout.tensor}"
        rule = f"expert={degree} must divide shard x context, or be tensor times a divisor of it"
        raise LayoutError(f"{rule}, but {sizes}; use shard={degree} or a multiple of it.")


def apply(chain: Chain, layout: Layout, mesh: Mesh) -> set[str]:
    """Splits the experts of a chain on the meta device; returns the names of parameters split over the expert axis."""
    sharded_names: set[str] = set()
    axis, tensor_splits_experts = mesh["expert"], layout.expert_ranks < layout.expert
    if tensor_splits_experts:
        plan = chain.sharding_plan
        chain.sharding_plan = replace(plan, shard_dims=(ShardDim("block*.mlp.bank.*", 0), *plan.shard_dims))
    dispatcher = TokenDispatcher(axis) if axis.size > 1 else None
    for module in chain.modules():
        if isinstance(module, MoE):
            module.dispatcher = dispatcher
            if tensor_splits_experts:
                module.local_experts = mesh["tensor"].span(module.router.shape[0])
    for name, experts in chain.stacked_experts().items() if dispatcher else ():
        for leaf, weight in experts.named_parameters():
            size = weight.shape[0] // axis.size, *weight.shape[1:]
            part = nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device), weight.requires_grad)
            setattr(experts, leaf, part)
            sharded_names.add(f"{name}.{leaf}")
        chain.dispatch_tokens(experts, dispatcher)
    return sharded_names


def routing_stats(model: Any, chains: list[Chain], world: Axis, device: torch.device, sent: float,
                  waited: float) -> Tensor:  # fmt: skip
    """Returns figures over all layers and ranks since the last call; `sent` and `waited` are this rank's:
    - tokens of the busiest expert over the mean of all experts, averaged over layers; 1 is balanced;
    - the fraction of the routing choices dropped for lack of capacity;
    - bytes sent between ranks, and seconds a rank waited for them, averaged over ranks;
    - by expert, its fraction of all routing choices."""
    loads = torch.zeros(model.layers, model.experts, device=device)
    scalars = torch.zeros(3, device=device)
    for layer, module in _moe_layers(chains).items():
        if module.expert_load is not None:
            loads[layer] = module.expert_load.to(loads.dtype)
            module.expert_load.zero_()
            if module.dropped_tokens is not None:
                scalars[0] += module.dropped_tokens
                module.dropped_tokens.zero_()
    scalars[1], scalars[2] = sent, waited / world.size
    packed = torch.cat((loads.flatten(), scalars))
    all_reduce(packed, axis=world)
    loads, scalars = packed[:-3].view_as(loads), packed[-3:]
    sparse, total_load = loads[model.dense_layers :], loads.sum().clamp(min=1e-9)
    imbalance = (sparse.amax(1) / sparse.mean(1).clamp(min=1e-9)).mean()
    figures = torch.stack((imbalance, scalars[0] / total_load, scalars[1], scalars[2]))
    return torch.cat((figures, sparse.sum(0) / total_load))


def update_expert_bias(model: Any, chains: list[Chain], world: Axis, device: torch.device) -> None:
    """After a step, raises the routing bias of experts that got less than their share of tokens over all ranks. Only
    the sign of the difference matters, so it does no harm that several ranks count the same tokens."""
    if not model.reports_routing or not model.router_bias_update_rate:
        return
    moe_layers = _moe_layers(chains)
    load = torch.zeros(model.layers, model.experts, dtype=torch.float64, device=device)
    for layer, module in moe_layers.items():
        assert module.tokens_per_expert is not None
        load[layer] = module.tokens_per_expert
    all_reduce(load, axis=world)
    for layer, module in moe_layers.items():
        module.update_expert_bias(load[layer].to(module.expert_bias.dtype))


def _moe_layers(chains: list[Chain]) -> dict[int, MoE]:
    modules = (pair for chain in chains for pair in chain.named_modules())
    return {int(name.partition(".")[0].removeprefix("block")): m for name, m in modules if isinstance(m, MoE)}


class TokenDispatcher:
    """Sends tokens, sorted by expert, to the ranks that own the experts, and their outputs back."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, DispatchState]:
        """Returns the tokens of this rank's experts, their count by expert, and the state for `combine`."""
        ranks = self.axis.size
        received_counts = torch.empty_like(counts)
        all_to_all(received_counts, counts, axis=self.axis)
        by_rank = received_counts.view(ranks, -1)  # (source rank, expert)
        sent, received = group_sizes(counts.view(ranks, -1).sum(1), rows), group_sizes(by_rank.sum(1), rows)
        rows = all_to_all_with_grad(rows, received, sent, self.axis)
        if isinstance(counts, FakeTensor):
            permutation = torch.arange(rows.shape[0], device=rows.device)
        else:
            experts = torch.arange(by_rank.shape[1], device=rows.device).repeat(ranks)
            permutation = experts.repeat_interleave(received_counts, output_size=sum(received)).argsort(stable=True)
        inverse = permutation.argsort()
        return Permute.apply(rows, permutation, inverse), by_rank.sum(0), (permutation, inverse, sent, received)

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        permutation, inverse, sent, received = state
        return all_to_all_with_grad(Permute.apply(rows, inverse, permutation), sent, received, self.axis)


class Permute(torch.autograd.Function):
    """Permutes rows; the backward uses the inverse permutation instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None
