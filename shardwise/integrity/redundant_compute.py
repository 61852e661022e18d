"""Redundant computation: before some steps, all data-parallel ranks compute a micro-batch that one of them trains on.

Checksums detect changes in memory, but not a device that computes wrong results before gradients are reduced. Every
`run.redundant_compute_every` steps, all data-parallel ranks compute the loss of one micro-batch, drawn at random from
the seed and the step, and its gradient with respect to the output of the first module. The owner, the rank that trains
on it, computes both again in the step itself. Dropout depends on the sample and not on the rank, so all results are
bitwise equal. The majority is right: even two ranks give three results. On a GPU only the loss is compared, because
attention backward kernels sum in no fixed order.
"""

import random
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.sample_stream import Samples
from shardwise.integrity.checksums import checksum
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.step import count_targets

HASH_MULTIPLIER = 0x5851F42D4C957F2D


class RedundantCompute:
    """Holds the checksums of the redundant computation and of the step, which only the owner computes."""

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
        self.redundant_result = self.step_result = self._compute(self._broadcast_owner_batch(micro_batch), scale)
        if self.data.index == self.owner:
            self._record_step(micro_batch_index)

    def find_outliers(self, votes: list[tuple[int, int]]) -> list[int]:
        """Returns the ranks whose votes (redundant and step result) differ from the majority; all without a
        majority."""
        results = [vote[0] for vote in votes] + [votes[self.owner][1]]
        value, count = Counter(results).most_common(1)[0]
        if 2 * count <= len(results):
            return list(range(len(votes)))
        return [rank for rank, vote in enumerate(votes) if vote != (value, value)]

    def _broadcast_owner_batch(self, micro_batch: Samples) -> Samples:
        """Broadcasts the owner's micro-batch to all data-parallel ranks."""
        tensors = [tensor.clone() for tensor in micro_batch.tensors]
        for tensor in tensors:
            dist.broadcast(tensor, group=self.data.group, group_src=self.owner)
        return self.engine.prepare_samples(Samples.from_tensors(tensors))

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
