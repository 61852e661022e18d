"""The engine: everything one rank needs for a training step, and how it runs the micro-batches of a step."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.comm.collectives import StepTimer
from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.job import Job
from shardwise.layout import BatchSplit
from shardwise.models.chain import IGNORE_INDEX, Chain
from shardwise.models.config import ModelConfig
from shardwise.optim.optimizer_factory import make_optimizer, make_user_optimizer
from shardwise.optim.param_shard import ParamShard
from shardwise.parallel import context
from shardwise.parallel.data_parallel import DataParallel
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import LossScale
from shardwise.parallel.torch_pipelining import Pipeline


@dataclass
class Engine:
    """One rank's part of a job: its modules, parameter shards, mesh and batch."""

    has_tables: ClassVar[bool] = False  # whether the model has sharded embedding tables

    model: ModelConfig
    mesh: Mesh
    batch: BatchSplit
    chains: list[Chain]
    data: DataParallel
    pipeline: Pipeline | None
    param_shards: list[ParamShard]
    scale: LossScale
    positions: Tensor | None = None  # sequence positions of this rank under context parallelism; None: all
    is_packed: bool = False  # whether samples hold several conversations (`Job.is_packed`)
    outer_optimizer: Any = None  # averages replicas that take local steps (`shardwise.parallel.local_sgd`)

    @property
    def dense_shards(self) -> list[ParamShard]:
        """The parameter shards without those of embedding tables."""
        return [shard for shard in self.param_shards if not shard.is_table]

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        task = job.family.task(job.model)
        if task is not None and task.optimizer is not None:
            return make_user_optimizer(task.optimizer, self.dense_shards, job.optimizer.lr)
        return make_optimizer(job.optimizer, self.dense_shards)

    def begin_stream(self, job: Job, stream: SampleStream) -> None:
        """Called before training on a stream; a subclass may sample it, for example to find hot rows."""

    @property
    def tied(self) -> list[ParamShard]:
        """The shards of tied weights, which the first and the last pipeline stage both hold."""
        if self.pipeline is None:
            return []
        tied_names = self.chains[0].sharding_plan.tied_parameters
        return [param_shard for param_shard in self.param_shards if param_shard.name in tied_names]

    @property
    def timer(self) -> StepTimer:
        return self.mesh.timer

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Runs forward and backward of all micro-batches and leaves the gradients in the parameters. Returns this
        rank's part of the loss: its sum over all ranks with the same tensor index is the batch's loss."""
        samples = self.prepare_samples(samples)
        if self.pipeline is not None:
            return self.pipeline.run(samples, scale)
        total = torch.zeros_like(scale)
        for number, m in enumerate(samples.split(self.batch.micro_batch), start=1):
            with self.data.micro_batch(last=number == self.batch.micro_batches):
                loss = self.data.modules[0](m.tokens, targets=m.targets, **m.forward_kwargs) * scale
                loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, samples: Samples) -> Tensor:
        """Returns this rank's part of the summed loss, forward only."""
        samples = self.prepare_samples(samples)
        if self.pipeline is not None:
            return self.pipeline.evaluate(samples)
        parts = samples.split(self.batch.micro_batch)
        return torch.stack([self.chains[0](m.tokens, targets=m.targets, **m.forward_kwargs) for m in parts]).sum()

    def logits(self, part: Samples) -> Tensor | None:
        """Returns a prepared micro-batch's logits for this rank's positions and vocabulary; None without the head."""
        if self.pipeline is not None:
            return self.pipeline.forward(part)
        return self.chains[0](part.tokens, **part.forward_kwargs)  # type: ignore[no-any-return]

    def divide_gradients(self, divisor: Tensor) -> None:
        for device in {param_shard.tensor.device for param_shard in self.param_shards}:
            gradients = [param_shard.grad for param_shard in self.param_shards if param_shard.tensor.device == device]
            torch._foreach_div_(gradients, divisor.to(device))

    def prepare_samples(self, samples: Samples) -> Samples:
        """Returns the samples at this rank's positions, with document ids if attention is masked by document."""
        separator = self.model.document_separator
        samples = samples.with_packed_ids() if self.is_packed else samples.with_document_ids(separator)
        samples = context.shard_samples(samples, self.positions)
        if self.model.passes_batch and not samples.inputs:
            counts = (samples.targets != IGNORE_INDEX).flatten(1).sum(1)
            samples = replace(samples, inputs=(samples.tokens, samples.targets), counts=counts)
        return samples

    def num_targets(self, samples: Samples) -> Tensor:
        """Returns what this rank's loss is a sum over."""
        if samples.preference is not None:
            return (samples.targets != IGNORE_INDEX).any(1).sum()
        if self.model.counts_samples and samples.counts is None:
            return torch.tensor(samples.ids.numel(), device=samples.ids.device)
        return samples.num_targets

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank counts the samples of its data-parallel index: it has index 0 on all other axes."""
        return all(self.mesh[axis].index == 0 for axis in ("pipeline", "context", "tensor"))
