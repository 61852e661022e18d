"""One optimizer step over what `parallelize` made.

Everything stays on the device: no value is read, so the same code runs on fake tensors. The order is fixed: count the
targets of the whole batch, run all micro-batches, sum gradients over samples, over the tensor axis, over tied stages;
one sum over the world gives loss and norm; the optimizer divides by clip and loss scale as it goes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.comm.collectives import all_reduce
from shardwise.data.sample_stream import Samples
from shardwise.models.chain import IGNORE_INDEX
from shardwise.optim.adamw import AdamW
from shardwise.parallel.data_parallel import SingleProcess
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert import update_expert_bias


@dataclass(frozen=True)
class StepResult:
    """What a step gives, the same on every rank."""

    loss: Tensor
    """Mean over the targets of the whole batch."""
    grad_norm: Tensor
    """Before clipping, over every parameter once."""
    skipped: Tensor
    """Whether the norm was not finite, so that nothing was updated."""

    def average_over(self, replicas: Axis) -> StepResult:
        """Of replicas that train apart; skipped where one of them did."""
        values = torch.stack((self.loss, self.grad_norm, self.skipped.to(self.loss.dtype)))
        all_reduce(values, axis=replicas)
        loss, norm, skipped = values / replicas.size
        return StepResult(loss, norm, skipped > 0)


def step(
    engine: Engine, optimizer: torch.optim.Optimizer, samples: Samples, clip: float,
    on_grads_ready: Callable[[StepResult], None] | None = None,
) -> StepResult:  # fmt: skip
    """Trains on this data rank's share of one global batch. `observe` is called when gradients and norm are ready."""
    loss = backward(engine, samples)
    outcome = reduce_loss_and_norm(engine, loss)
    if on_grads_ready is not None:
        on_grads_ready(outcome)
    clip_and_update(engine, optimizer, outcome, clip)
    update_expert_bias(engine.model, engine.chains, engine.mesh["world"], engine.mesh.device)
    return outcome


class CudaGraphStep:
    """Steps of one process on a GPU as one CUDA graph: recorded once what must be made is made, replayed from then on,
    so that nothing waits for the host to start its kernels."""

    def __init__(self, engine: Engine, optimizer: AdamW, clip: float, warmup_steps: int):
        """`before`: steps without it, in which blocks are compiled and states made."""
        self.engine, self.optimizer, self.clip, self.warmup_steps = engine, optimizer, clip, warmup_steps
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, samples: Samples) -> StepResult:
        if self.warmup_steps:
            self.warmup_steps -= 1
            return step(self.engine, self.optimizer, samples, self.clip)
        if self.graph is None:
            self._capture(samples)
        assert self.graph is not None
        for captured, new in zip(self._tensors(self.samples), self._tensors(samples), strict=True):
            captured.copy_(new)
        self.optimizer.copy_lr_to_device()
        self.graph.replay()
        return StepResult(self.outcome.loss.clone(), self.outcome.grad_norm.clone(), self.outcome.skipped.clone())

    @staticmethod
    def _tensors(samples: Samples) -> tuple[Tensor, ...]:
        return samples.tokens, samples.targets, samples.ids

    def _capture(self, samples: Samples) -> None:
        self.samples = Samples(*(tensor.clone() for tensor in self._tensors(samples)))
        gc.collect()
        torch.cuda.empty_cache()  # a graph has memory of its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outcome = step(self.engine, self.optimizer, self.samples, self.clip)


def make_step_fn(
    engine: Engine, optimizer: torch.optim.Optimizer, clip: float, compiled: bool, warmup_steps: int = 3,
    on_grads_ready: Callable[[StepResult], None] | None = None,
) -> Callable[[Samples], StepResult]:  # fmt: skip
    """What takes the steps of a run: recorded where the blocks are compiled and a step does the same every time, with
    no other process, no loss scale that moves, and no sizes of experts that the host must know."""
    is_static = (
        isinstance(engine.data, SingleProcess) and engine.mesh.device.type == "cuda" and not engine.scale.dynamic
    )
    if compiled and is_static and isinstance(optimizer, AdamW):
        return CudaGraphStep(engine, optimizer, clip, warmup_steps)
    return lambda samples: step(engine, optimizer, samples, clip, on_grads_ready)


def backward(engine: Engine, samples: Samples) -> Tensor:
    """Leaves the gradient of the mean loss, times the loss scale, in each holding. Returns this rank's share of it."""
    count = count_targets(engine, samples.targets)
    loss = engine.run(samples, engine.scale.value / count)
    engine.data.reduce_gradients()
    all_reduce_tensor_grads(engine)
    all_reduce_tied_grads(engine)
    return loss


def count_targets(engine: Engine, targets: Tensor) -> Tensor:
    """Targets that count, in the whole batch."""
    count = (targets != IGNORE_INDEX).sum().to(engine.scale.value.dtype)
    if engine.mesh["data"].size > 1:
        all_reduce(count, axis=engine.mesh["data"])
    return count.clamp(min=1.0)


def all_reduce_tensor_grads(engine: Engine) -> None:
    """Adds up the gradients of weights that every tensor rank holds but uses on its own positions or heads."""
    axis = engine.mesh["tensor"]
    if axis.size > 1:
        _all_reduce_coalesced([h.grad for h in engine.param_shards if h.tensor_dim is None], axis)


def all_reduce_tied_grads(engine: Engine) -> None:
    """Adds up the gradients of a weight that the first and the last stage use."""
    tied = [param_shard.grad for param_shard in engine.tied]
    if len(tied) > len({param_shard.name for param_shard in engine.tied}):  # a V: both stages are on this rank
        first, last = tied
        first.add_(last)
        last.copy_(first)
    elif engine.mesh.tied_stages.size > 1:
        _all_reduce_coalesced(tied, engine.mesh.tied_stages)


def _all_reduce_coalesced(gradients: list[Tensor], axis: Axis) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    all_reduce(flat, axis=axis)
    for gradient, chunk in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(chunk.view(gradient.shape))


def reduce_loss_and_norm(engine: Engine, loss: Tensor) -> StepResult:
    """Loss and gradient norm of the whole world, from one sum."""
    dtype = engine.scale.value.dtype
    squares = [torch.linalg.vector_norm(h.grad, dtype=dtype).square() / h.num_replicas for h in engine.param_shards]
    squares = [square.to(loss.device) for square in squares]  # tables' rows are in host memory
    local_loss = loss / engine.mesh["tensor"].size
    loss_and_square = torch.stack((local_loss.to(dtype), torch.stack(squares).sum()))
    if engine.mesh["world"].size > 1:
        # Gradients are summed by now: who waits here in a pipeline waits for a stage that ends later.
        with engine.timer.waiting("pipeline") if engine.pipeline is not None else nullcontext():
            all_reduce(loss_and_square, axis=engine.mesh["world"])
    norm = loss_and_square[1].sqrt() / engine.scale.value
    return StepResult(loss_and_square[0] / engine.scale.value, norm, ~norm.isfinite())


def clip_and_update(engine: Engine, optimizer: torch.optim.Optimizer, outcome: StepResult, clip: float) -> None:
    """Clips, unscales and updates, or does nothing if the norm is not finite."""
    engine.timer.begin_phase("optimizer")
    divisor = engine.scale.value
    if clip > 0.0:
        divisor = divisor * (outcome.grad_norm / clip).clamp(min=1.0)
    if divisor.dtype == torch.float32:
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # the fused kernel divides as it goes, in 32 bits
    else:
        engine.divide_gradients(divisor)
    # The word by which PyTorch's fused optimizers are told to do nothing, decided on the device.
    optimizer.found_inf = outcome.skipped.float()  # type: ignore[attr-defined]
    optimizer.step()
    engine.scale.update(outcome.skipped)
    engine.data.sync_weights()
