"""Checksums of the training state, and which ranks must agree on them.

A checksum is the wrapping 64-bit sum of a tensor's bits read as integers: exact, computed on the tensor's device, and
changed by any single flipped bit. Each rank has one per weight, optimizer state and gradient, in a fixed order. Ranks
exchange only one combined checksum per copy kind, that is per way in which a tensor is replicated."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.sample_stream import Samples
from shardwise.job import Job
from shardwise.layout import AXES, Layout
from shardwise.optim.param_shard import ParamShard
from shardwise.parallel.data_parallel import Zero1
from shardwise.parallel.engine import Engine
from shardwise.random import GOLDEN_GAMMA
from shardwise.step import count_targets

MAX_PARTS = 100  # of the tensors, of which each step checks one (see `CorruptionDetector`)
INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASH_MULTIPLIER = 0x5851F42D4C957F2D
COPY_KINDS = ("replicas", "expert_replicas", "full_weights", "tensor", "tied")
"""How a tensor is replicated: shards across data-parallel replicas; the same for expert shards; full weights under
ZeRO-1; parameters that tensor parallelism does not shard; weights tied between the first and the last stage."""
DATA_PARALLEL = "data_parallel"  # these ranks must agree on the results of a redundantly computed micro-batch


def checksum(tensor: Tensor) -> Tensor:
    """Returns the wrapping sum of the tensor's bits read as integers, as a scalar on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    is_multiple_of_8 = flat.numel() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if is_multiple_of_8 else INT_DTYPES[flat.element_size()]).sum()


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor of this rank with its name in messages, and how other ranks replicate it."""

    label: str
    tensor: Tensor
    copy_kinds: frozenset[str] = frozenset()


class Checksums(NamedTuple):
    values: Tensor
    labels: list[tuple[str, frozenset[str]]]  # and copy kinds


def compute_checksums(tracked: Sequence[TrackedTensor], device: torch.device) -> Checksums:
    values = [checksum(entry.tensor).to(device) for entry in tracked]
    stacked = torch.stack(values) if values else torch.zeros(0, dtype=torch.int64, device=device)
    return Checksums(stacked, [(entry.label, entry.copy_kinds) for entry in tracked])


class StateChecksums:
    """Lists the weights, optimizer states and gradients of this rank, with their copy kinds."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer):
        self.engine, self.optimizer = engine, optimizer
        tied = [param_shard.name for param_shard in engine.tied] if engine.mesh.tied_stages.size > 1 else []
        self.entries = [(w, shard, self._copy_kinds_of(shard, tied)) for w, shard in engine.data.param_pairs]
        self.keeps_full_weights = isinstance(engine.data, Zero1)  # of which each rank updates a shard

    def _copy_kinds_of(self, param_shard: ParamShard, tied: list[str]) -> frozenset[str]:
        is_whole = not param_shard.shape and self.engine.mesh["fsdp"].size > 1  # a scalar, which no rank shards
        is_copied = {"expert_replicas" if param_shard.is_expert else "replicas":
                         param_shard.replica_axis is not None and not is_whole,
                     "full_weights": is_whole,
                     "tensor": param_shard.tensor_dim is None and self.engine.mesh["tensor"].size > 1,
                     # It is 2 in a V-shaped schedule, where one rank has both stages.
                     "tied": tied.count(param_shard.name) == 1}  # fmt: skip
        return frozenset(kind for kind, has_copies in is_copied.items() if has_copies)

    def weights(self) -> list[TrackedTensor]:
        """Returns the weights, and the low-precision copies that modules compute with. Embedding tables
        are left out: they are too large to read in every step."""
        tracked = []
        has_full_copies = self.keeps_full_weights and self.engine.mesh["fsdp"].size > 1
        for weight, param_shard, kinds in self.entries:
            if param_shard.compute_copy is not None:
                tracked.append(TrackedTensor(f"compute copy of weight {param_shard.name}", param_shard.compute_copy))
            if has_full_copies and not param_shard.is_expert:
                kinds = kinds - {"replicas"} | {"full_weights"}
            tensor = weight if self.keeps_full_weights else param_shard.tensor
            tracked.append(TrackedTensor(f"weight {param_shard.name}", tensor, kinds))
        return tracked

    def states(self) -> list[TrackedTensor]:
        """Returns the optimizer states. The step counts come last as one tensor."""
        tracked, scalars = [], list[Tensor]()
        for _, param_shard, kinds in self.entries:
            for key, value in self.optimizer.state.get(param_shard.tensor, {}).items():
                if value.dim() or (not param_shard.shape and key != "step"):
                    tracked.append(TrackedTensor(f"optimizer state {key} of {param_shard.name}", value, kinds))
                else:
                    scalars.append(value)
        return [*tracked, TrackedTensor("optimizer step counts", torch.stack(scalars))] if scalars else tracked

    def gradients(self) -> list[TrackedTensor]:
        """Returns the reduced gradients of weights that other ranks hold too."""
        entries = [(shard, kinds) for _, shard, kinds in self.entries if kinds]
        return [TrackedTensor(f"gradient of {shard.name}", shard.grad, kinds) for shard, kinds in entries]


@lru_cache(maxsize=2 * MAX_PARTS)
def mixing_factors(kinds: tuple[frozenset[str], ...], device: torch.device) -> Tensor:
    """Returns a factor per copy kind and checksum for their weighted sum; odd, so that no bit is lost."""
    factors = torch.zeros(len(COPY_KINDS), len(kinds), dtype=torch.int64)
    for row, kind in enumerate(COPY_KINDS):
        members = [column for column, tensor_kinds in enumerate(kinds) if kind in tensor_kinds]
        for index, column in enumerate(members):
            factors[row, column] = (GOLDEN_GAMMA * (2 * index + 1) % 2**64) - 2**63 | 1
    return factors.to(device)


def reference_ranks(layout: Layout, local_sgd: bool) -> Tensor:
    """Returns, for each rank and copy kind, the lowest rank that should have the same checksum (the rank itself if it
    has no copies). The last two columns are for the two results of a redundantly computed micro-batch."""
    grid = torch.arange(layout.world).reshape([getattr(layout, axis) for axis in AXES])
    replicate = [] if local_sgd else ["replicate"]
    axes_by_kind = {"replicas": [*replicate, *(["context"] if layout.shard == 1 else [])], "expert_replicas": replicate,
                    "full_weights": [*replicate, "shard", "context"], "tensor": ["tensor"],
                    DATA_PARALLEL: [*replicate, "shard"]}  # fmt: skip
    columns = []
    for kind in (*COPY_KINDS, DATA_PARALLEL, DATA_PARALLEL):
        reference = grid.clone()
        for axis in axes_by_kind.get(kind, []):
            reference = reference.narrow(AXES.index(axis), 0, 1).expand_as(grid)
        if kind == "tied":
            reference[-1] = reference[0]
        columns.append(reference.reshape(-1))
    return torch.stack(columns, 1)


class RedundantCompute:
    """Before some steps, all data-parallel ranks compute a micro-batch that one of them, the owner, trains on. They
    compare its loss and the gradient with respect to the output of the first module; the owner computes both again in
    the step itself. All results are bitwise equal, and the majority is right: even two ranks give three results. On a
    GPU only the loss is compared, because attention backward kernels sum in no fixed order."""

    def __init__(self, job: Job, engine: Engine):
        self.job, self.engine, self.data = job, engine, engine.mesh["data"]
        # With batch norm, experts or sharded tables, another rank cannot compute a micro-batch alone.
        is_recomputable = job.model.is_recomputable_elsewhere and engine.pipeline is None
        has_replicas = self.data.size > 1 and engine.mesh["local_sgd"].size == 1
        self.every = job.run.redundant_compute_every if is_recomputable and has_replicas else 0
        self.checks_gradients = engine.mesh.device.type == "cpu"
        self.redundant_result = self.step_result = torch.zeros((), dtype=torch.int64, device=engine.mesh.device)
        self.owner = 0
        self._hooks: list[Any] = []

    def before_step(self, step: int, samples: Samples) -> None:
        """Does the redundant computation if it is due; call it before each step with the samples of the step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.redundant_result = self.step_result = torch.zeros_like(self.redundant_result)
        if not self.every or step % self.every:
            return
        rng = random.Random(f"{self.job.seed} {step}")
        self.owner, micro_batch_index = rng.randrange(self.data.size), rng.randrange(self.engine.batch.micro_batches)
        micro_batch = list(samples.split(self.engine.batch.micro_batch))[micro_batch_index]
        scale = self.engine.scale.value / count_targets(self.engine, samples)
        tensors = [tensor.clone() for tensor in micro_batch.tensors]
        for tensor in tensors:
            dist.broadcast(tensor, group=self.data.group, group_src=self.owner)
        owners_batch = self.engine.prepare_samples(Samples.from_tensors(tensors))
        self.redundant_result = self.step_result = self._compute(owners_batch, scale)
        if self.data.index == self.owner:
            self._record_step(micro_batch_index)

    def find_outliers(self, votes: list[tuple[int, int]]) -> list[int]:
        """Returns the ranks whose votes (redundant and step result) differ from the majority; all if there is none."""
        results = [vote[0] for vote in votes] + [votes[self.owner][1]]
        value, count = Counter(results).most_common(1)[0]
        if 2 * count <= len(results):
            return list(range(len(votes)))
        return [rank for rank, vote in enumerate(votes) if vote != (value, value)]

    def _compute(self, micro_batch: Samples, scale: Tensor) -> Tensor:
        chain, first_outputs = self.engine.chains[0], list[Tensor]()
        first = next(chain.children())
        with first.register_forward_hook(lambda module, inputs, output: first_outputs.append(output)):
            loss = chain(micro_batch.tokens, targets=micro_batch.targets, **micro_batch.forward_kwargs)
        result = checksum(loss)
        if self.checks_gradients:
            result = result * HASH_MULTIPLIER + checksum(torch.autograd.grad(loss * scale, first_outputs[0])[0])
        return result

    def _record_step(self, micro_batch_index: int) -> None:
        """Hooks the chain to record the results that the step itself computes for a micro-batch."""
        chain, micro_batches_left = self.engine.chains[0], micro_batch_index

        def on_first_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if micro_batches_left == 0 and self.checks_gradients and output.requires_grad:
                output.register_hook(on_gradient)

        def on_loss(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal micro_batches_left
            if micro_batches_left == 0:
                self.step_result = checksum(output)
            micro_batches_left -= 1

        def on_gradient(gradient: Tensor) -> None:
            self.step_result = self.step_result * HASH_MULTIPLIER + checksum(gradient)

        first = next(chain.children())
        self._hooks = [first.register_forward_hook(on_first_output), chain.register_forward_hook(on_loss)]
