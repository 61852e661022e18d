"""A model as a chain of pieces, and the words in which it says how it may be cut.

A `Chain` runs its children in order, each on what the one before gave. On one device the chain is the model; a
pipeline stage is the same chain with fewer pieces (`Chain.part`), under the same parameter names. The chain knows
nothing of devices: `rules` tells how its parameters may be cut, as data that `shardwise.parallel` applies, the
planner costs and `verify` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise.random import hash_key, normal_

IGNORE_INDEX = -100  # targets with this value do not count


@dataclass(frozen=True)
class ShardDim:
    """The parameters that match `parameter` are cut along `dim`, in runs of `unit` rows that stay together.

    Where the units do not divide over the ranks, every rank holds the parameter whole and uses the rows `uneven` gives.
    """

    parameter: str
    dim: int
    unit: int = 1
    uneven: UnevenHeads | None = None


@dataclass(frozen=True)
class UnevenHeads:
    """A finer cut for units that do not divide: `parts` single parts, each of them the given rows (one list a part)."""

    unit_name: str
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SequenceRegion:
    """A module that works on whole sequences with cut weights.

    What enters is gathered along the sequence; what leaves is a partial sum, added up over the ranks and cut along the
    sequence again. `row` names what makes the partial sum; if it is a submodule, its bias is added once, after the sum.
    `uneven` are attributes that the module gets where its cuts do not divide.
    """

    module: str
    rowwise: str
    uneven: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class VocabEmbedding:
    """An embedding whose rows are cut: a token that lives elsewhere gives zero; the sum is cut along the sequence."""

    module: str


@dataclass(frozen=True)
class VocabHead:
    """A projection to a cut vocabulary with the loss on it: gathers what enters, shares maxima and sums of the loss."""

    module: str


@runtime_checkable
class PositionAware(Protocol):
    """A module whose work depends on where in the sequence the positions lie that it is given."""

    position_ids: Tensor | None
    """Each one's place; None: from the first on."""


@dataclass(frozen=True)
class InitSpec:
    """How a parameter starts: `normal` with a standard deviation, `ones` or `zeros`."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class ShardingPlan:
    """All that is known about cutting a chain."""

    shard_dims: tuple[ShardDim, ...]
    modules: tuple[SequenceRegion | VocabEmbedding | VocabHead, ...]
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs (other name, name) of parameters that are one and the same."""
    init: tuple[tuple[str, InitSpec], ...] = ()
    """Pattern and start, first match wins."""
    block_pattern: str = "block*"
    """Pattern of the pieces that repeat."""
    compared_modules: tuple[str, ...] = ()
    """Patterns of modules whose output is (sample, position, feature), compared by `verify` in forward order."""

    def shard_dim_of(self, parameter: str) -> ShardDim | None:
        return next((cut for cut in self.shard_dims if fnmatchcase(parameter, cut.parameter)), None)

    def init_spec_of(self, parameter: str) -> InitSpec:
        return next(init for pattern, init in self.init if fnmatchcase(parameter, pattern))

    def is_matrix(self, parameter: str, dims: int) -> bool:
        """Whether it is the matrix of a product in a block, or a stack of them; a router or a table is none."""
        module, _, leaf = parameter.partition(".")
        product = (dims == 2 and leaf.endswith(".weight")) or (dims == 3 and ".bank." in leaf)
        return product and fnmatchcase(module, self.block_pattern)

    @property
    def tied_parameters(self) -> set[str]:
        """Parameters that both ends of the chain use."""
        return {name for _, name in self.ties}

    def canonical_name(self, parameter: str) -> str:
        """The one name of a parameter that has two."""
        return dict(self.ties).get(parameter, parameter)


class Chain(nn.Module):
    """Pieces run in order. Each takes what the one before gave and, by keyword, what belongs to the whole batch."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], sharding_plan: ShardingPlan):
        super().__init__()
        self.sharding_plan = sharding_plan
        for name, module in modules:
            self.add_module(name, module)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes tied parameters one object where the chain holds both."""
        weights = dict(self.named_parameters(remove_duplicate=False))
        for alias, name in self.sharding_plan.ties:
            if name in weights and alias in weights:
                owner, _, leaf = alias.rpartition(".")
                # Not by its attribute, which may show a view of it.
                self.get_submodule(owner)._parameters[leaf] = weights[name]

    def slice(self, first: int, last: int) -> Chain:
        """The pieces from `first` up to `last` as a chain of their own, sharing the modules."""
        modules = list(self.named_children())
        return self if (first, last) == (0, len(modules)) else Chain(modules[first:last], self.sharding_plan)

    def named_unique_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its one name."""
        for name, parameter in self.named_parameters():
            yield self.sharding_plan.canonical_name(name), parameter

    def blocks(self) -> list[nn.Module]:
        """The repeated pieces, which are recomputed and compiled one by one."""
        return [module for name, module in self.named_children() if fnmatchcase(name, self.sharding_plan.block_pattern)]

    def forward(
        self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None, **extra_inputs: Tensor
    ) -> Tensor:  # fmt: skip
        """Tokens in; out comes the summed loss where targets are given, the logits where not. `more`: what only some
        kinds of models know."""
        for module in self.children():
            x = module(x, ids=ids, targets=targets, **extra_inputs)
        return x


def init_weights(chain: Chain, seed: int) -> None:
    """Starts a whole chain on one device: what every layout must start from."""
    for name, parameter in chain.named_unique_parameters():
        init = chain.sharding_plan.init_spec_of(name)
        with torch.no_grad():
            if init.kind == "normal":
                key = hash_key("init", seed, name)
                normal_(parameter, key, parameter.shape, (0,) * parameter.dim(), init.std)
            else:
                parameter.fill_(1.0 if init.kind == "ones" else 0.0)
