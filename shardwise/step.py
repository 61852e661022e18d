"""One optimizer step of an engine.

Everything stays on the device: no value is read, so the same code runs on fake tensors. ARCHITECTURE.md has the order
of a step."""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.collectives import Axis, all_reduce, all_reduce_coalesced
from shardwise.data.sample_stream import Samples
from shardwise.optim.adamw import AdamW
from shardwise.optim.sharded_optimizer import SGD
from shardwise.parallel.data_parallel import SingleProcess
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert import update_expert_bias

OnFailure = Callable[[str], None]


@dataclass(frozen=True)
class StepResult:
    """The results of a step, the same on every rank."""

    loss: Tensor  # mean over the targets of the global batch
    grad_norm: Tensor  # norm of the full gradient, before clipping
    skipped: Tensor  # whether the update was skipped because the norm was not finite

    def average_over(self, replicas: Axis) -> "StepResult":
        """Returns the mean over the replicas of local SGD; skipped if any replica skipped."""
        values = torch.stack((self.loss, self.grad_norm, self.skipped.to(self.loss.dtype)))
        all_reduce(values, axis=replicas)
        loss, norm, skipped = values / replicas.size
        return StepResult(loss, norm, skipped > 0)


def step(engine: Engine, optimizer: torch.optim.Optimizer, samples: Samples, clip: float,
         on_grads_ready: Callable[[StepResult], None] | None = None) -> StepResult:  # fmt: skip
    """Trains on this rank's samples of one global batch. Calls `on_grads_ready` before the update."""
    outcome = reduce_loss_and_norm(engine, backward(engine, samples))
    if on_grads_ready is not None:
        on_grads_ready(outcome)
    clip_and_update(engine, optimizer, outcome, clip)
    update_expert_bias(engine.model, engine.chains, engine.mesh["world"], engine.mesh.device)
    return outcome


class CudaGraphStep:
    """Steps of a single process on a GPU as one CUDA graph: captured after the warm-up steps, replayed from then on, so
    that no kernel waits for the host to launch it. If the capture fails, all steps run without a graph."""

    def __init__(self, engine: Engine, optimizer: AdamW | SGD, clip: float, warmup: int, on_failure: OnFailure):
        """`warmup`: eager steps first, which compile blocks and create state. `on_failure` gets a sentence."""
        self.engine, self.optimizer, self.clip, self.warmup_steps = engine, optimizer, clip, warmup
        self.on_failure = on_failure
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def __call__(self, samples: Samples) -> StepResult:
        if self.warmup_steps or self.failed:
            self.warmup_steps = max(0, self.warmup_steps - 1)
            return step(self.engine, self.optimizer, samples, self.clip)
        if self.graph is None:
            self._capture(samples)
        if self.graph is None:
            self.failed = True
            return self(samples)
        for captured, new in zip(self.samples.tensors, samples.tensors, strict=True):
            captured.copy_(new)
        self.optimizer.copy_lr_to_device()
        self.engine.timer.begin_phase("")
        self.graph.replay()
        self.engine.timer.add_replay(self.spans)
        return StepResult(self.outcome.loss.clone(), self.outcome.grad_norm.clone(), self.outcome.skipped.clone())

    def _capture(self, samples: Samples) -> None:
        """Captures a step and sets `graph`, or calls `on_failure`."""
        self.samples = Samples.from_tensors(tensor.clone() for tensor in samples.tensors)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # a graph has a memory pool of its own
        graph, pool, cause = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), ""
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                # Meanwhile the loader's thread pins batches; in the default mode, that would make the capture fail.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                self.engine.timer.begin_capture()
                self.outcome = step(self.engine, self.optimizer, self.samples, self.clip)
                self.spans = self.engine.timer.end_capture()
            except Exception as error:  # noqa: BLE001 - without a graph, the step raises it again or succeeds
                cause = f"{type(error).__name__}: {error}"
            try:
                graph.capture_end()
            except RuntimeError as error:
                cause = cause or f"{type(error).__name__}: {error}"
        if not cause:
            self.graph = graph
            gc.freeze()  # garbage collections no longer visit the compiler's many objects
            return
        self._clean_up(pool)
        reason = cause.splitlines()[0].rstrip(".")
        self.on_failure(f"a step cannot be captured as a CUDA graph, so steps run without one: {reason}.")

    def _clean_up(self, pool: tuple[int, int]) -> None:
        """Frees the gradients and the memory of a failed capture. None of its kernels has run."""
        self.engine.timer.cancel_capture()
        self.engine.data.sync_weights()
        with suppress(RuntimeError):  # PyTorch has released the pool already if the capture failed at its very end
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            self.samples.ids.zero_()  # a capture that succeeds ends the capture mode of PyTorch's random generator
        gc.collect()
        torch.cuda.empty_cache()


def make_step_fn(engine: Engine, optimizer: torch.optim.Optimizer, clip: float, compiled: bool, warmup_steps: int = 3,
                 on_grads_ready: Callable[[StepResult], None] | None = None,
                 on_capture_failure: OnFailure = warnings.warn) -> Callable[[Samples], StepResult]:  # fmt: skip
    """Returns the step function; a CUDA graph if compiled, single-process and static, that is if every step launches
    the same kernels: no dynamic loss scale, no embedding tables, and a forward that is the same in every step."""
    is_static = isinstance(engine.data, SingleProcess) and not engine.scale.dynamic and not engine.has_tables
    is_static = is_static and not any(chain.differs_between_calls for chain in engine.chains)
    if compiled and is_static and engine.mesh.device.type == "cuda" and isinstance(optimizer, AdamW | SGD):
        return CudaGraphStep(engine, optimizer, clip, warmup_steps, on_capture_failure)
    return lambda samples: step(engine, optimizer, samples, clip, on_grads_ready)


def backward(engine: Engine, samples: Samples) -> Tensor:
    """Sets the gradients of all parameter shards, times the loss scale. Returns this rank's share of the loss."""
    loss = engine.run(samples, engine.scale.value / count_targets(engine, samples))
    engine.data.reduce_gradients()
    all_reduce_tensor_grads(engine)
    all_reduce_tied_grads(engine)
    return loss


def count_targets(engine: Engine, samples: Samples) -> Tensor:
    """Returns the number of targets in the global batch, without ignored ones."""
    count = engine.num_targets(samples).to(engine.scale.value.dtype)
    all_reduce(count, axis=engine.mesh["data"])
    return count.clamp(min=1.0)


def all_reduce_tensor_grads(engine: Engine) -> None:
    """All-reduces gradients of weights replicated over the tensor axis, each used on a rank's positions or heads."""
    replicated = [shard.grad for shard in engine.param_shards if shard.tensor_dim is None]
    all_reduce_coalesced(replicated, engine.mesh["tensor"])


def all_reduce_tied_grads(engine: Engine) -> None:
    """Sums the gradients of a tied weight over the first and the last pipeline stage."""
    tied = [param_shard.grad for param_shard in engine.tied]
    if len(tied) > len({shard.name for shard in engine.tied}):  # a V-shaped schedule has both stages on one rank
        first, last = tied
        first.add_(last)
        last.copy_(first)
    else:
        all_reduce_coalesced(tied, engine.mesh.tied_stages)


def reduce_loss_and_norm(engine: Engine, loss: Tensor) -> StepResult:
    """Returns global loss and gradient norm, from one all-reduce."""
    dtype = engine.scale.value.dtype
    norms = torch._foreach_norm([shard.grad for shard in engine.param_shards], dtype=dtype)
    num_replicas = [float(shard.num_replicas) for shard in engine.param_shards]
    squares = torch._foreach_div(torch._foreach_mul(norms, norms), num_replicas)
    total = torch.stack([square.to(loss.device) for square in squares]).sum()  # table rows may be in host memory
    loss_and_square = torch.stack(((loss / engine.mesh["tensor"].size).to(dtype), total))
    # Gradients are reduced by now, so a rank that waits here in a pipeline waits for a slower stage.
    with engine.timer.waiting("pipeline") if engine.pipeline is not None else nullcontext():
        all_reduce(loss_and_square, axis=engine.mesh["world"])
    norm = loss_and_square[1].sqrt() / engine.scale.value
    return StepResult(loss_and_square[0] / engine.scale.value, norm, ~norm.isfinite())


def clip_and_update(engine: Engine, optimizer: torch.optim.Optimizer, outcome: StepResult, clip: float) -> None:
    """Clips, unscales and updates; skips the update if the norm is not finite."""
    engine.timer.begin_phase("optimizer")
    divisor = engine.scale.value
    if clip > 0.0:
        divisor = divisor * (outcome.grad_norm / clip).clamp(min=1.0)
    if divisor.dtype == torch.float32:
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # the fused kernel divides by it, in float32
    else:
        engine.divide_gradients(divisor)
    # PyTorch's fused optimizers skip the update if `found_inf` is set; the device decides.
    optimizer.found_inf = outcome.skipped.float()  # type: ignore[attr-defined]
    optimizer.step()
    engine.scale.update(outcome.skipped)
    engine.data.sync_weights()
