"""What one rank needs for a step, and how it runs the micro-batches of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.data.stream import Samples
from shardwise.kinds import Named
from shardwise.layout import Batch
from shardwise.models.chain import Chain
from shardwise.parallel import context
from shardwise.parallel.data import DataParallel
from shardwise.parallel.holding import Holding
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.precision import LossScale


@dataclass
class Engine:
    """What one rank needs for a step."""

    model: Named
    mesh: Mesh
    batch: Batch
    chains: list[Chain]
    data: DataParallel
    pipeline: Pipeline | None
    holdings: list[Holding]
    scale: LossScale
    positions: Tensor | None = None
    """Of each sequence, which this rank holds; None: all."""
    meeting: Any = None
    """Of replicas that train apart (`shardwise.parallel.sync`)."""

    @property
    def tied(self) -> list[Holding]:
        """Holdings of weights that a stage elsewhere, or another stage of this rank, holds too."""
        if self.pipeline is None:
            return []
        return [holding for holding in self.holdings if holding.name in self.chains[0].rules.tied]

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the gradients are left in the parameters.

        Returns this rank's share of the loss: summed over all ranks of one tensor index it is the loss of the batch.
        """
        samples = self._prepared(samples)
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
        samples = self._prepared(samples)
        if self.pipeline is not None:
            return self.pipeline.evaluate(samples)
        parts = samples.split(self.batch.micro_batch)
        return torch.stack([self.chains[0](p.tokens, targets=p.targets, **p.batch) for p in parts]).sum()

    def divide(self, by: Tensor) -> None:
        """Divides all gradients."""
        for device in {holding.tensor.device for holding in self.holdings}:
            here = [holding.grad for holding in self.holdings if holding.tensor.device == device]
            torch._foreach_div_(here, by.to(device))

    def _prepared(self, samples: Samples) -> Samples:
        """This rank's positions, with documents told apart where the model asks for it."""
        return context.cut(samples.apart(getattr(self.model, "document_end", -1)), self.positions)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank is the one of its data index that speaks for its samples."""
        return all(self.mesh[axis].index == 0 for axis in ("pipeline", "context", "tensor"))
