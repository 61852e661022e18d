"""Replicas that train apart and meet now and then: the section `sync` of a job.

Each replica takes steps on its own share of the batch, with a gradient, a norm and an optimizer of its own. After every
`every` steps weights are averaged over the replicas (local SGD); or their mean change since the last meeting is the
gradient of an outer step, taken by Nesterov's momentum from where they met (DiLoCo, Douillard et al. 2023, arXiv
2311.08105). With `parts` the blocks meet in turn, some at a time, so that less travels at once (streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512). After the last step all meet.

What is inside of a replica (shard, tensor, pipeline, ...) knows nothing of this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce
from shardwise.comm.meter import METER
from shardwise.errors import LayoutError
from shardwise.job import Job, Sync
from shardwise.kinds import DLRM, MoE
from shardwise.layout import Layout
from shardwise.parallel.engine import Engine


def check(job: Job, layout: Layout) -> None:
    """Raises where there is nothing that could train apart, or where it would not mean what it says."""
    if job.sync.every == 1:
        return
    asked = f"sync.every = {job.sync.every}"
    if layout.replicate == 1:
        raise LayoutError(f"{asked} trains replicas apart, but layout '{layout}' has one; use replicate=2 or more.")
    if isinstance(job.model, DLRM) or (isinstance(job.model, MoE) and job.model.bias_rate):
        what = "a DLRM's tables are" if isinstance(job.model, DLRM) else "model.bias_rate is"
        raise LayoutError(f"{asked}: {what} kept for all samples at once, not by replica; use sync.every = 1.")
    if job.gradient.compress:
        raise LayoutError(f"{asked} and gradient.compress both make sums cheap; leave one of them out.")


def part_of(name: str, parts: int) -> int:
    """The part in which a weight meets: blocks in turn; the first also has what is in no block."""
    digits = "".join(filter(str.isdigit, name.partition(".")[0]))
    return (int(digits) + 1) % parts if digits else 0


def meets(sync: Sync, done: int, part: int, last: int) -> bool:
    """Whether a part meets after so many steps."""
    return done == last or done % sync.every == part * sync.every // sync.parts


class Meeting:
    """What a rank keeps for the meetings of its replica with the others."""

    def __init__(self, sync: Sync, engine: Engine):
        self.sync, self.engine, self.axis = sync, engine, engine.mesh["apart"]
        self.parts = {part_of(holding.name, sync.parts) for holding in engine.holdings}
        self.anchor: dict[int, Tensor] = {}
        self.momentum: dict[int, Tensor] = {}
        if sync.outer:
            for number, holding in enumerate(engine.holdings):
                self.anchor[number] = holding.tensor.detach().clone()
                self.momentum[number] = torch.zeros_like(self.anchor[number])

    def kept(self, number: int) -> dict[str, Tensor]:
        """By name, what is remembered of a holding from one meeting to the next."""
        return {"anchor": self.anchor[number], "momentum": self.momentum[number]} if self.sync.outer else {}

    @torch.no_grad()
    def after(self, done: int, last: int) -> None:
        """To be called after each step."""
        due = {part for part in self.parts if meets(self.sync, done, part, last)}
        if not due:
            return
        holdings = list(enumerate(self.engine.holdings))
        here = [(n, holding) for n, holding in holdings if part_of(holding.name, self.sync.parts) in due]
        means = self._means([holding.tensor.detach() for _, holding in here])
        for (number, holding), mean in zip(here, means, strict=True):
            if self.sync.outer:
                change = self.anchor[number] - mean
                momentum = self.momentum[number].mul_(self.sync.momentum).add_(change)
                mean = self.anchor[number].sub_(change + self.sync.momentum * momentum, alpha=self.sync.rate)
            holding.tensor.detach().copy_(mean)
            holding.current = False
        buffers = [b for chain in self.engine.chains for b in chain.buffers() if b.is_floating_point()]
        if 0 in due and buffers:
            for buffer, mean in zip(buffers, self._means(buffers), strict=True):
                buffer.copy_(mean)
        self.engine.data.publish()

    def _means(self, tensors: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        METER.sent["apart"] += 2 * (self.axis.size - 1) * flat.nbytes // self.axis.size
        all_reduce(flat, group=self.axis.group)
        parts = (flat / self.axis.size).split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
