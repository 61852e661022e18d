"""Local SGD and DiLoCo: replicas train independently and synchronize every N steps (`[local_sgd]` of a job).

Each replica trains on its share of the batch, with its own gradient, norm and optimizer. Every `every` steps weights
are averaged over replicas (local SGD), or their negative mean change since the last synchronization is the gradient of
an outer step with Nesterov momentum (DiLoCo, Douillard et al. 2023, arXiv 2311.08105). With `fragments`, groups of
blocks synchronize in turn, which lowers peak bandwidth (streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512). All
fragments synchronize after the last step.

The axes inside a replica (shard, tensor, pipeline, ...) are unaffected."""

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce
from shardwise.errors import LayoutError
from shardwise.job import Job, LocalSGDConfig
from shardwise.layout import Layout
from shardwise.models.quantize import FROZEN_BUFFERS
from shardwise.parallel.engine import Engine


def check(job: Job, layout: Layout) -> None:
    """Raises LayoutError if local SGD is on but the layout has one replica or gradients are compressed."""
    if job.local_sgd.every == 1:
        return
    setting = f"local_sgd.every = {job.local_sgd.every}"
    if layout.replicate == 1:
        raise LayoutError(f"{setting} trains several replicas, but layout '{layout}' has one; use replicate=2 or more.")
    if job.gradient.compress:
        raise LayoutError(f"{setting} cannot be combined with gradient.compress; remove one of them.")


def fragment_of(name: str, fragments: int) -> int:
    """Returns the fragment of a weight: blocks round-robin, everything outside of blocks in fragment 0."""
    digits = "".join(filter(str.isdigit, name.partition(".")[0]))
    return (int(digits) + 1) % fragments if digits else 0


def is_sync_due(sync: LocalSGDConfig, done: int, fragment: int, last: int) -> bool:
    """Whether a fragment synchronizes after `done` steps."""
    return done == last or done % sync.every == fragment * sync.every // sync.fragments


class OuterOptimizer:
    """Synchronizes this rank's parameter shards with the other replicas."""

    def __init__(self, sync: LocalSGDConfig, engine: Engine):
        self.local_sgd, self.engine, self.axis = sync, engine, engine.mesh["local_sgd"]
        self.fragments = {fragment_of(param_shard.name, sync.fragments) for param_shard in engine.param_shards}
        self.state: list[dict[str, Tensor]] = [{} for _ in engine.param_shards]
        """By parameter shard: `anchor`, its value at the last synchronization, and `momentum`; empty for local SGD."""
        for state, param_shard in zip(self.state, engine.param_shards) if sync.outer_optimizer else ():
            weight = param_shard.tensor.detach()
            state.update(anchor=weight.clone(), momentum=torch.zeros_like(weight))

    @torch.no_grad()
    def after_step(self, done: int, last: int) -> None:
        """Synchronizes the fragments that are due; call it after each step."""
        due = {fragment for fragment in self.fragments if is_sync_due(self.local_sgd, done, fragment, last)}
        if not due:
            return
        pairs, fragments = zip(self.engine.param_shards, self.state), self.local_sgd.fragments
        due_shards = [pair for pair in pairs if fragment_of(pair[0].name, fragments) in due]
        means = self._average([param_shard.tensor.detach() for param_shard, _ in due_shards])
        for (param_shard, state), mean in zip(due_shards, means, strict=True):
            if self.local_sgd.outer_optimizer:
                outer_gradient = state["anchor"] - mean
                momentum = state["momentum"].mul_(self.local_sgd.outer_momentum).add_(outer_gradient)
                nesterov = outer_gradient + self.local_sgd.outer_momentum * momentum
                mean = state["anchor"].sub_(nesterov, alpha=self.local_sgd.outer_lr)
            param_shard.tensor.detach().copy_(mean)
            param_shard.is_compute_copy_current = False
        named = [pair for chain in self.engine.chains for pair in chain.named_buffers()]
        buffers = [b for name, b in named if b.is_floating_point() and not name.endswith(FROZEN_BUFFERS)]
        if 0 in due and buffers:
            for buffer, mean in zip(buffers, self._average(buffers), strict=True):
                buffer.copy_(mean)
        self.engine.data.sync_weights()

    def _average(self, tensors: list[Tensor]) -> list[Tensor]:
        """Averages tensors over replicas with one all-reduce."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.engine.timer.bytes_sent["local_sgd"] += 2 * (self.axis.size - 1) * flat.nbytes // self.axis.size
        all_reduce(flat, axis=self.axis)
        means = (flat / self.axis.size).split([tensor.numel() for tensor in tensors])
        return [mean.view(tensor.shape) for mean, tensor in zip(means, tensors, strict=True)]
