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
from shardwise.comm.meter import METER
from shardwise.errors import LayoutError
from shardwise.kinds import MoE, Named
from shardwise.layout import Layout
from shardwise.models.chain import Chain, Cut
from shardwise.models.experts import Experts, Permuted, is_fake, sizes_of
from shardwise.parallel.mesh import Axis, Mesh


def check(model: Named, layout: Layout) -> None:
    """Raises for a degree that model or layout do not allow."""
    degree = layout.expert
    if degree == 1:
        return
    if not isinstance(model, MoE):
        raise LayoutError(f"expert={degree}: {model.name!r} has no experts; leave expert at 1.")
    if model.experts % degree:
        near = max(n for n in range(1, degree) if model.experts % n == 0)
        raise LayoutError(
            f"expert={degree}: {model.experts} experts do not divide over {degree} ranks; use expert={near}."
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
    cut: set[str] = set()
    axis, between = mesh["expert"], layout.expert_ranks < layout.expert
    if between:
        chain.rules = replace(chain.rules, cuts=(Cut("block*.mlp.bank.*", 0), *chain.rules.cuts))
    for name, module in chain.named_modules():
        if not isinstance(module, Experts):
            continue
        if between:
            module.served = mesh["tensor"].span(module.router.shape[0])
        if axis.size == 1:
            continue
        for leaf, whole in module.bank.named_parameters():
            size = whole.shape[0] // axis.size, *whole.shape[1:]
            setattr(module.bank, leaf, nn.Parameter(torch.empty(size, dtype=whole.dtype, device=whole.device)))
            cut.add(f"{name}.bank.{leaf}")
        module.travel = Travel(axis)
    return cut


@dataclass
class Routing:
    """Where the tokens of a step went, in all layers and ranks."""

    imbalance: float
    """Rows of the busiest expert over the mean, in the mean over layers. 1: all were used alike."""
    dropped: float
    """Share of the choices that found no room."""
    sent: float
    """Bytes that left a rank for another."""
    waited: float
    """Seconds that a rank waited for them, in the mean over ranks."""
    load: list[float]
    """By expert, its share of all choices."""

    @classmethod
    def of(cls, values: list[float]) -> Routing:
        imbalance, dropped, sent, waited, *load = values
        return cls(imbalance, dropped, sent, waited, load)


def routing(
    model: MoE, chains: list[Chain], world: Axis, device: torch.device, sent: float = 0.0, waited: float = 0.0
) -> Tensor:
    """The numbers of a `Routing`, of what was done since the last call; `sent`, `waited`: of this rank."""
    loads = torch.zeros(model.layers, model.experts, device=device)
    rest = torch.zeros(3, device=device)
    for chain in chains:
        for name, module in chain.named_modules():
            if isinstance(module, Experts) and module.load is not None:
                loads[_layer(name)] = module.load.to(loads.dtype)
                module.load.zero_()
                if module.dropped is not None:
                    rest[0] += module.dropped
                    module.dropped.zero_()
    rest[1], rest[2] = sent, waited / world.size
    if world.size > 1:
        both = torch.cat((loads.flatten(), rest))
        all_reduce(both, group=world.group)
        loads, rest = both[:-3].view_as(loads), both[-3:]
    sparse, every = loads[model.dense_layers :], loads.sum().clamp(min=1e-9)
    busiest = (sparse.amax(1) / sparse.mean(1).clamp(min=1e-9)).mean()
    return torch.cat((torch.stack((busiest, rest[0] / every, rest[1], rest[2])), sparse.sum(0) / every))


def rebalance(model: Named, chains: list[Chain], world: Axis, device: torch.device) -> None:
    """After a step: experts that were chosen less than their share, by all ranks, become likelier. Ranks that see the
    same tokens count them as often as one another, which changes no sign."""
    if not isinstance(model, MoE) or not model.bias_rate:
        return
    every = (pair for chain in chains for pair in chain.named_modules())
    mixtures = {name: module for name, module in every if isinstance(module, Experts)}
    rows = torch.zeros(model.layers, model.experts, dtype=torch.float64, device=device)
    for name, module in mixtures.items():
        assert module.recent is not None
        rows[_layer(name)] = module.recent
    if world.size > 1:
        all_reduce(rows, group=world.group)
    for name, module in mixtures.items():
        module.rebalance(rows[_layer(name)].to(module.offset.dtype))


def _layer(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("block"))


class Travel:
    """Takes rows that lie by expert to the ranks that hold these, and what comes of them back."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def there(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Journey]:
        """The rows of this rank's experts, by expert, from all ranks; how many each has; and the way back."""
        ranks = self.axis.size
        theirs = torch.empty_like(counts)
        all_to_all(theirs, counts, group=self.axis.group)
        by_rank = theirs.view(ranks, -1)  # source, expert
        sent, received = sizes_of(counts.view(ranks, -1).sum(1), rows), sizes_of(by_rank.sum(1), rows)
        rows = Exchange.apply(rows, received, sent, self.axis)
        if is_fake(counts):
            order = torch.arange(rows.shape[0], device=rows.device)
        else:
            experts = torch.arange(by_rank.shape[1], device=rows.device).repeat(ranks)
            order = experts.repeat_interleave(theirs, output_size=sum(received)).argsort(stable=True)
        journey = Journey(order, order.argsort(), sent, received)
        return Permuted.apply(rows, journey.order, journey.back), by_rank.sum(0), journey

    def back(self, rows: Tensor, journey: Journey) -> Tensor:
        rows = Permuted.apply(rows, journey.back, journey.order)
        return Exchange.apply(rows, journey.sent, journey.received, self.axis)  # type: ignore[no-any-return]


class Exchange(torch.autograd.Function):
    """Runs of rows to other ranks, and as many from them; the gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
        ctx.sizes = sent, received, axis
        return _exchange(rows, received, sent, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0].contiguous(), *ctx.sizes), None, None, None


def _exchange(rows: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    leaving = (sum(sent) - sent[axis.index]) * rows.shape[1] * rows.element_size()
    METER.sent["expert"] += leaving
    all_to_all(found, rows, received, sent, group=axis.group)
    return found


class Journey(NamedTuple):
    """What is remembered of a way, for the way back."""

    order: Tensor
    back: Tensor
    sent: list[int]
    received: list[int]
