"""What one rank needs for a step, and how it runs the micro-batches of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.step_timer import StepTimer
from shardwise.data.sample_stream import Samples
from shardwise.kinds import ModelConfig
from shardwise.layout import BatchSplit
from shardwise.models.chain import Chain
from shardwise.parallel import context
from shardwise.parallel.data_parallel import DataParallel
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.param_shard import ParamShard
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.precision import LossScale


@dataclass
class Engine:
    """What one rank needs for a step."""

    model: ModelConfig
    mesh: Mesh
    batch: BatchSplit
    chains: list[Chain]
    data: DataParallel
    pipeline: Pipeline | None
    param_shards: list[ParamShard]
    scale: LossScale
    positions: Tensor | None = None
    """Of each sequence, which this rank holds; None: all."""
    outer_optimizer: Any = None
    """Of replicas that train apart (`shardwise.parallel.local_sgd`)."""

    @property
    def tied(self) -> list[ParamShard]:
        """Holdings of weights that a stage elsewhere, or another stage of this rank, holds too."""
        if self.pipeline is None:
            return []
        return [
            param_shard
            for param_shard in self.param_shards
            if param_shard.name in self.chains[0].sharding_plan.tied_parameters
        ]

    @property
    def timer(self) -> StepTimer:
        return self.mesh.timer

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the gradients are left in the parameters.

        Returns this rank's share of the loss: summed over all ranks of one tensor index it is the loss of the batch.
        """
        samples = self.prepare_samples(samples)
        if self.pipeline is not None:
            return self.pipeline.run(samples, scale)
        total = torch.zeros_like(scale)
        for number, part in enumerate(samples.split(self.batch.micro_batch), start=1):
            with self.data.micro_batch(last=number == self.batch.micro_batches):
                loss = self.data.modules[0](part.tokens, targets=part.targets, **part.batch) * scale
                loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, samples: Samples) -> Tensor:
        """This rank's share of the summed loss, forward only."""
        samples = self.prepare_samples(samples)
        if self.pipeline is not None:
            return self.pipeline.evaluate(samples)
        parts = samples.split(self.batch.micro_batch)
        return torch.stack([self.chains[0](p.tokens, targets=p.targets, **p.batch) for p in parts]).sum()

    def divide_gradients(self, divisor: Tensor) -> None:
        """Divides all gradients."""
        for device in {param_shard.tensor.device for param_shard in self.param_shards}:
            gradients = [param_shard.grad for param_shard in self.param_shards if param_shard.tensor.device == device]
            torch._foreach_div_(gradients, divisor.to(device))

    def prepare_samples(self, samples: Samples) -> Samples:
        """This rank's positions, with documents told apart where the model asks for it."""
        return context.shard_samples(samples.with_document_ids(getattr(self.model, "eod_token_id", -1)), self.positions)

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank is the one of its data index that speaks for its samples."""
        return all(self.mesh[axis].index == 0 for axis in ("pipeline", "context", "tensor"))
