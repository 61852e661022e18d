"""Checksums of tensors, and which ranks must have the same ones.

A checksum is the sum of a tensor's raw bits as 64-bit integers that wrap around: exact, on the tensor's own device, and
different after any single flipped bit. Of all that a rank keeps from one step to the next there is one each, in a fixed
order; those that other ranks have copies of are mixed to one number for each kind of copies, which is what travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout import AXES, Layout
from shardwise.parallel.data_parallel import Zero1
from shardwise.parallel.engine import Engine
from shardwise.parallel.param_shard import ParamShard

INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COPY_KINDS = ("replicas", "expert_replicas", "full_weights", "tensor", "tied")
READERS = "readers"  # the kind of what all ranks should have that read different samples
"""Of copies: of pieces; of pieces of experts that are cut; of weights that are kept whole though their updates are
shared; of what the tensor axis does not cut; of weights that the first and the last stage share."""


def checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    is_multiple_of_8 = flat.numel() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if is_multiple_of_8 else INT_DTYPES[flat.element_size()]).sum()


@dataclass(frozen=True)
class TrackedTensor:
    """One tensor of this rank."""

    label: str
    tensor: Tensor
    copy_kinds: frozenset[str] = frozenset()


def compute_checksums(tracked: Sequence[TrackedTensor], device: torch.device) -> Tensor:
    found = [checksum(one.tensor).to(device) for one in tracked]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


class StateChecksums:
    """What there is on this rank, with its kinds of copies."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer):
        self.engine, self.optimizer = engine, optimizer
        tied = [one.name for one in engine.tied] if engine.mesh.tied_stages.size > 1 else []
        self.copy_kinds = [self._copy_kinds_of(param_shard, tied) for _, param_shard in engine.data.param_pairs]
        self.keeps_full_weights = isinstance(engine.data, Zero1)
        """Whether a weight is kept whole, and a holding is the part of it that is updated here."""

    def _copy_kinds_of(self, param_shard: ParamShard, tied: list[str]) -> frozenset[str]:
        found = (
            {"expert_replicas" if param_shard.is_expert else "replicas"}
            if param_shard.replica_axis is not None
            else set()
        )
        if param_shard.tensor_dim is None and self.engine.mesh["tensor"].size > 1:
            found.add("tensor")
        if tied.count(param_shard.name) == 1:  # in a V both are here
            found.add("tied")
        return frozenset(found)

    def weights(self) -> list[TrackedTensor]:
        """What modules compute with, and the pieces that are updated where these are tensors of their own. Tables in
        host memory are not among them: they are too large to be read in every step."""
        found = []
        shared = self.keeps_full_weights and self.engine.mesh["fsdp"].size > 1
        for (weight, param_shard), kinds in zip(self.engine.data.param_pairs, self.copy_kinds, strict=True):
            if param_shard.compute_copy is not None:
                found.append(TrackedTensor(f"the rounded weight {param_shard.name}", param_shard.compute_copy))
            if shared and not param_shard.is_expert:
                kinds = kinds - {"replicas"} | {"full_weights"}
            found.append(
                TrackedTensor(
                    f"the weight {param_shard.name}", weight if self.keeps_full_weights else param_shard.tensor, kinds
                )
            )
        return found

    def states(self) -> list[TrackedTensor]:
        """Those of the optimizer. Counts of steps, which have one number each, are looked at together, last."""
        found, numbers = [], list[Tensor]()
        for (_, param_shard), kinds in zip(self.engine.data.param_pairs, self.copy_kinds, strict=True):
            for key, value in self.optimizer.state.get(param_shard.tensor, {}).items():
                if value.dim():
                    found.append(TrackedTensor(f"the state {key} of {param_shard.name}", value, kinds))
                else:
                    numbers.append(value)
        return [*found, TrackedTensor("the optimizer's counts of steps", torch.stack(numbers))] if numbers else found

    def gradients(self) -> list[TrackedTensor]:
        """Sums, of weights that other ranks hold too."""
        pairs = zip(self.engine.data.param_pairs, self.copy_kinds, strict=True)
        return [TrackedTensor(f"the gradient of {one.name}", one.grad, kinds) for (_, one), kinds in pairs if kinds]


def mixing_factors(kinds: Sequence[frozenset[str]]) -> Tensor:
    """For each kind of copies a factor for each checksum; the sum of the products stands for all of the kind."""
    factors = torch.zeros(len(COPY_KINDS), len(kinds), dtype=torch.int64)
    for row, kind in enumerate(COPY_KINDS):
        members = [number for number, tensor_kinds in enumerate(kinds) if kind in tensor_kinds]
        for index, number in enumerate(members):
            factors[row, number] = (0x9E3779B97F4A7C15 * (2 * index + 1) % 2**64) - 2**63 | 1
    return factors


def reference_ranks(layout: Layout, local_sgd: bool) -> Tensor:
    """For each rank the first one that should have the same, by kind of copies, and twice of those that read; a rank
    without others is its own."""
    grid = torch.arange(layout.world).reshape([getattr(layout, axis) for axis in AXES])
    replicate = [] if local_sgd else ["replicate"]
    axes_by_kind = {
        "replicas": [*replicate, *(["context"] if layout.shard == 1 else [])], "expert_replicas": replicate,
        "full_weights": [*replicate, "shard", "context"], "tensor": ["tensor"], READERS: [*replicate, "shard"],
    }  # fmt: skip
    found = []
    for kind in (*COPY_KINDS, READERS, READERS):
        reference = grid.clone()
        for axis in axes_by_kind.get(kind, []):
            reference = reference.narrow(AXES.index(axis), 0, 1).expand_as(grid)
        if kind == "tied":
            reference[-1] = reference[0]
        found.append(reference.reshape(-1))
    return torch.stack(found, 1)
