"""A micro-batch computed twice: once in a step, by the rank whose turn it is, and once before it, by all data ranks.

Checksums see what changes in memory, not a device that computes wrongly before gradients are summed. So now and then a
micro-batch is drawn by the step's number, and all data ranks compute its loss and the gradient that reaches the first
piece; then the step is taken, and the rank that the micro-batch belongs to has computed both for good. Dropout depends
on the sample alone, so all are the same bits; what most have is right, and even of two ranks there are three results.
On a GPU, where gradients of attention are summed in any order, it is the loss alone.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.stream import Samples
from shardwise.guard.sums import checksum
from shardwise.job import Job
from shardwise.kinds import DLRM, MoE, ResNet
from shardwise.parallel.engine import Engine
from shardwise.step import count_targets

FACTOR = 0x5851F42D4C957F2D


class Again:
    """`second` and `first` are this rank's results; on ranks that have none of the first, both are the second."""

    def __init__(self, job: Job, engine: Engine):
        self.job, self.engine, self.data = job, engine, engine.mesh["data"]
        # Where samples of several ranks are mixed, a rank's result depends on what the others have.
        alone = not isinstance(job.model, DLRM | MoE | ResNet) and engine.pipeline is None
        self.every = job.run.rerun if alone and self.data.size > 1 and engine.mesh["apart"].size == 1 else 0
        self.turns_back = engine.mesh.device.type == "cpu"
        self.second = self.first = torch.zeros((), dtype=torch.int64, device=engine.mesh.device)
        self.owner = 0
        self._hooks: list[Any] = []

    def ahead(self, done: int, samples: Samples) -> None:
        """To be called before step `done` is taken with `samples`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.second = self.first = torch.zeros_like(self.second)
        if not self.every or done % self.every:
            return
        draw = random.Random(f"{self.job.seed} {done}")
        self.owner, place = draw.randrange(self.data.size), draw.randrange(self.engine.batch.micro_batches)
        part = list(samples.split(self.engine.batch.micro_batch))[place]
        scale = self.engine.scale.value / count_targets(self.engine, samples.targets)
        self.second = self.first = self._compute(self._spread(part), scale)
        if self.data.index == self.owner:
            _Listener(self, place)

    def wrong(self, votes: list[tuple[int, int]]) -> list[int]:
        """Of data ranks with their second and first results, those that differ from most; all where none are most."""
        every = [vote[0] for vote in votes] + [votes[self.owner][1]]
        value, count = Counter(every).most_common(1)[0]
        if 2 * count <= len(every):
            return list(range(len(votes)))
        return [rank for rank, vote in enumerate(votes) if vote != (value, value)]

    def _spread(self, part: Samples) -> Samples:
        """The owner's."""
        tensors = [tensor.clone() for tensor in part.parts]
        for tensor in tensors:
            dist.broadcast(tensor, group=self.data.group, group_src=self.owner)
        return self.engine._prepared(Samples(*tensors))

    def _compute(self, part: Samples, scale: Tensor) -> Tensor:
        chain, reached = self.engine.chains[0], list[Tensor]()
        hook = _first(chain).register_forward_hook(lambda module, given, output: reached.append(output))
        try:
            loss = chain(part.tokens, targets=part.targets, **part.batch)
        finally:
            hook.remove()
        found = [checksum(loss)]
        if self.turns_back:
            found.append(checksum(torch.autograd.grad(loss * scale, reached[0])[0]))
        return _mixed(found)


class _Listener:
    """Has a step's own results of a micro-batch."""

    def __init__(self, again: Again, place: int):
        self.again, self.left, self.loss = again, place, torch.zeros((), dtype=torch.int64)
        chain = again.engine.chains[0]
        again._hooks = [
            _first(chain).register_forward_hook(self.begun), chain.register_forward_hook(self.done)
        ]  # fmt: skip

    def begun(self, module: nn.Module, given: Any, output: Tensor) -> None:
        if self.left == 0 and self.again.turns_back and output.requires_grad:
            output.register_hook(self.reached)

    def done(self, module: nn.Module, given: Any, output: Tensor) -> None:
        if self.left == 0:
            self.loss = checksum(output)
            self.again.first = _mixed([self.loss])
        self.left -= 1

    def reached(self, gradient: Tensor) -> None:
        self.again.first = _mixed([self.loss, checksum(gradient)])


def _first(chain: nn.Module) -> nn.Module:
    return next(chain.children())


def _mixed(sums: list[Tensor]) -> Tensor:
    total = sums[0]
    for one in sums[1:]:
        total = total * FACTOR + one
    return total
