"""What a rank of any world holds and sends in a step, without that world.

A process here takes the place of one rank: a process group that talks to nobody, and tensors that have shapes but no
numbers. Through the same `parallelize` and the same `step` as training it takes one step, and a `MemoryCommTracker` sees every
storage and every collective. Each rank has a pass of its own, in a process of its own.

Not every micro-batch need be run. Once a pipeline is full, each period (a forward and a backward of one micro-batch; of
one round of them where the schedule works in rounds) holds and sends what the one before did. So a pass stops a little
after the pipeline is full, and the remaining micro-batches are added by arithmetic: traffic grows by one period's,
memory by what is held per micro-batch for the whole step (samples, and PyTorch's buffers for what is received) and by
what a period leaves behind. This is exact, not an estimate: tests compare it with passes over all micro-batches.

Tensors are those of PyTorch's kernels without compilation. Attention is the fused one, which keeps the same on CPU and
GPU; RMSNorm, one kernel on a GPU and several on a CPU, counts as one (`FusedRMSNorm`). The step is the first one, with
the optimizer's states made before it; later ones are alike, but for DDP (`replicate` alone), which then arranges its
buckets anew: calls may differ by a few, bytes do not.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.cluster import CLUSTERS
from shardwise.console import pluralize
from shardwise.data.make_sources import synthetic_source
from shardwise.data.objectives import make_objective
from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.errors import LayoutError, RunError
from shardwise.job import BatchConfig, Job
from shardwise.layout import AUTO_SCHEDULES, V_SHAPED, Layout, solve_batch
from shardwise.models import loss
from shardwise.optim import make_optimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import check_layout, parallelize
from shardwise.planner.dryrun.memory_comm_tracker import (
    ROLES,
    BytesByRole,
    MemoryCommTracker,
    TracePoint,
    axis_by_group,
)
from shardwise.planner.plan import auto_schedule_order
from shardwise.step import step


@dataclass(frozen=True)
class CollectiveTraffic:
    """What one rank sends and receives in a step along one axis by one kind of collective."""

    axis: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankReport:
    """One rank in one step."""

    layout: str
    rank: int
    stages: tuple[int, ...]
    """Of the pipeline, that it holds."""
    modules: tuple[tuple[str, ...], ...]
    """Of the chain, by stage."""
    memory: dict[str, int]
    """Bytes by role at the fullest moment of a step."""
    peak_phase: str
    """When that is: in a `forward or backward`, or in the `update` after them."""
    resident_memory: dict[str, int]
    """Bytes by role between two steps."""
    traffic: tuple[CollectiveTraffic, ...]
    micro_batches: int
    micro_batches_run: int
    """Micro-batches that the pass ran; the others were added by arithmetic."""
    seconds: float
    """That the pass took."""

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total": self.total}


def dry_run(
    job: Job,
    layout: Layout,
    ranks: Sequence[int] | None = None,
    on_report: Callable[[RankReport], None] = lambda _: None,
) -> list[RankReport]:
    """Reports of some ranks, by default of `typical_ranks`. `show` is called as each of them is ready."""
    check_layout(job, layout)
    rank_list = list(typical_ranks(layout) if ranks is None else ranks)
    for rank in rank_list:
        if not 0 <= rank < layout.world:
            last = layout.world - 1
            raise LayoutError(
                f"rank {rank}: layout '{layout}' has {pluralize(layout.world, 'rank')}, from 0 to {last}."
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reports: dict[int, RankReport] = {}
    with ProcessPoolExecutor(min(cores, len(rank_list)), get_context("fork"), _init_worker) as pool:
        futures = [pool.submit(_dry_run_rank, job, layout, rank) for rank in rank_list]
        try:
            for done in as_completed(futures):
                report = done.result()
                reports[report.rank] = report
                on_report(report)
        except BrokenProcessPool:
            raise RunError("a process of the dry run was killed; was there enough memory?") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [reports[rank] for rank in rank_list]


def typical_ranks(layout: Layout, all_stages: bool = False) -> list[int]:
    """Ranks of the first, second, middle and last place in the pipeline, or of every one.

    Of those with one place the first of each other axis is taken: where a cut is uneven, it holds most.
    """
    pipeline = layout.pipeline
    pipeline_ranks = set(range(pipeline)) if all_stages else {0, min(1, pipeline - 1), pipeline // 2, pipeline - 1}
    return [pipeline_rank * (layout.world // pipeline) for pipeline_rank in sorted(pipeline_ranks)]


# One pass


def _init_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a pass without a traceback
    torch.set_num_threads(1)


def _dry_run_rank(job: Job, layout: Layout, rank: int) -> RankReport:
    with fake_process_group(layout.world, rank):
        return measure_rank(job, layout)


@contextmanager
def fake_process_group(world: int, rank: int) -> Iterator[None]:
    """A world in which the others are not there: what is received is whatever was there before."""
    # The import makes the backend known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()


def micro_batches_to_run(layout: Layout, micro_batches: int) -> tuple[int, int]:
    """How many micro-batches fill the pipeline and show one more period, and how many make a period."""
    if layout.pipeline == 1:
        return 3, 1  # the first makes the gradients, the second adds to them
    if layout.schedule in ("gpipe", *AUTO_SCHEDULES):
        return micro_batches, 1  # never full, or of no period
    if layout.schedule == "1f1b":
        return layout.pipeline + 2, 1
    if layout.schedule in V_SHAPED:
        return 2 * layout.stage_count + 2, 1
    round_ = micro_batches // max(1, micro_batches // layout.pipeline)
    return 4 * round_, round_


def measure_rank(job: Job, layout: Layout, fake: bool = True, all_micro_batches: bool = False) -> RankReport:
    """This rank of the world that this process is in, be it real or not. `whole`: runs every micro-batch."""
    begin = time.perf_counter()
    batch = solve_batch(layout, job.samples)
    simulated, period = micro_batches_to_run(layout, batch.micro_batches)
    ran = batch.micro_batches if all_micro_batches else min(simulated, batch.micro_batches)
    batch_size = BatchConfig(samples=ran * batch.micro_batch * layout.data)
    job = job.model_copy(update={"batch": batch_size, "compile": False})
    layout = dataclasses.replace(layout, micro_batch=batch.micro_batch)
    recording = _record_step(job, layout, ran, fake)
    remaining = batch.micro_batches - ran
    memory, moment = recording.memory(remaining, period)
    return RankReport(
        layout=str(layout),
        rank=recording.engine.mesh.rank,
        stages=layout.stages_of(recording.engine.mesh["pipeline"].index),
        modules=tuple(tuple(name for name, _ in chain.named_children()) for chain in recording.engine.chains),
        memory=_by_role(memory),
        peak_phase=moment,
        resident_memory=_by_role(recording.held_after(recording.end.event, remaining, period)),
        traffic=recording.traffic(remaining, period),
        micro_batches=batch.micro_batches,
        micro_batches_run=ran,
        seconds=time.perf_counter() - begin,
    )


def _by_role(found: BytesByRole) -> dict[str, int]:
    return {role: found[role] for role in ROLES}


@dataclass
class StepRecording:
    """A step in the ledger."""

    engine: Engine
    tracker: MemoryCommTracker
    micro_batches_run: int
    before_batch: TracePoint
    """Before there was anything for its micro-batches."""
    begin: TracePoint
    forward_starts: list[TracePoint]
    """The begin of each forward of this rank's first stage."""
    update_start: TracePoint
    """All forwards and backwards are done."""
    end: TracePoint

    def memory(self, remaining: int, period: int) -> tuple[BytesByRole, str]:
        """At the fullest moment, had there been some more micro-batches; and which moment that is."""
        peak = self.tracker.bytes_at(self.tracker.peak_event(self.begin, self.update_start))
        _add_scaled(peak, self.tracker.growth_between(self.before_batch, self.begin), remaining, self.micro_batches_run)
        if remaining:
            growth = self.tracker.growth_between(*self._period(period))
            if growth.total() > 0:  # then the last period is the fullest
                _add_scaled(peak, growth, remaining, period)
        after = self.held_after(self.tracker.peak_event(self.update_start, self.end), remaining, period)
        return (peak, "forward or backward") if peak.total() >= after.total() else (after, "update")

    def held_after(self, event: int, remaining: int, period: int) -> BytesByRole:
        """Held at some time after the last backward."""
        held = self.tracker.bytes_at(event)
        if remaining:
            _add_scaled(
                held,
                self.tracker.surviving_bytes(self.before_batch, self.begin, event),
                remaining,
                self.micro_batches_run,
            )
            _add_scaled(held, self.tracker.surviving_bytes(*self._period(period), event), remaining, period)
        return held

    def traffic(self, remaining: int, period: int) -> tuple[CollectiveTraffic, ...]:
        counts, sizes = self.tracker.traffic_between(self.begin, self.end)
        if remaining:
            for total, steady in zip((counts, sizes), self.tracker.traffic_between(*self._period(period)), strict=True):
                _add_scaled(total, steady, remaining, period)
        order = sorted(counts, key=lambda transfer: transfer.sort_key)
        return tuple(CollectiveTraffic(*transfer, counts[transfer], sizes[transfer]) for transfer in order)

    def _period(self, length: int) -> tuple[TracePoint, TracePoint]:
        return self.forward_starts[-1 - length], self.forward_starts[-1]


def _add_scaled(total: Counter[Any], part: Counter[Any], times: int, divisor: int) -> None:
    for key, value in part.items():
        total[key] += value * times // divisor


def _record_step(job: Job, layout: Layout, micro_batches: int, fake: bool) -> StepRecording:
    tracker = MemoryCommTracker()
    modes = [FakeTensorMode(allow_non_fake_inputs=True), tracker] if fake else [tracker]
    order = auto_schedule_order(job, layout, CLUSTERS["h100"])
    sample = SampleStream(synthetic_source(job, 1), job.seed, objective=make_objective(job.model, job.seed)).read(
        np.arange(1)
    )
    sample_tensors = sample.tokens, sample.targets, sample.ids
    engine = parallelize(job, layout, torch.device("cpu"), _enter_all(modes), order)
    tracker.axes = axis_by_group(engine.mesh)
    forwards: list[TracePoint] = []
    engine.chains[0].register_forward_pre_hook(lambda *args: forwards.append(tracker.now()))
    update = _track_engine(engine, tracker)
    gc.disable()  # when it runs is chance
    try:
        with _enter_all(modes), _gpu_kernels():
            optimizer = make_optimizer(job.optimizer, engine.param_shards)
            _init_optimizer_states(engine, optimizer)
            tracker.mark((value for state in optimizer.state.values() for value in state.values()), "optimizer")
            before_batch = tracker.now()
            if engine.pipeline is not None:
                engine.pipeline.schedule.initialize()
            count = micro_batches * engine.batch.micro_batch
            samples = Samples(*(torch.zeros(count, *sample.shape[1:], dtype=sample.dtype) for sample in sample_tensors))
            begin = tracker.now()
            tracker.default_role = "activations"
            step(engine, optimizer, samples, job.optimizer.clip, lambda _: _mark_gradients(engine, tracker))
            end = tracker.now()
    finally:
        gc.enable()
    return StepRecording(engine, tracker, micro_batches, before_batch, begin, forwards, update[0], end)


class FusedRMSNorm(torch.autograd.Function):
    """What RMSNorm makes and keeps where it is one kernel, without its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_loss(logits: Tensor, targets: Tensor, vocab_shard: loss.VocabShard | None) -> tuple[Tensor, Tensor]:
    """What the loss makes where it is one kernel: the logits' gradient, in their place."""
    if vocab_shard is not None or logits.dtype == torch.float64:
        return softmax_loss(logits, targets, vocab_shard)
    return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32)), logits


softmax_loss = loss.cross_entropy_with_grad


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Operators that are one kernel on a GPU count as one."""
    norm, product = torch.nn.functional.rms_norm, loss.addmm_
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight)  # type: ignore
    loss.cross_entropy_with_grad = _fused_loss
    loss.addmm_ = lambda total, a, b: product(total, a, b) if a.dtype == total.dtype else None
    try:
        yield
    finally:
        torch.nn.functional.rms_norm = norm
        loss.cross_entropy_with_grad, loss.addmm_ = softmax_loss, product


@contextmanager
def _enter_all(modes: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _init_optimizer_states(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Makes the states, which otherwise the end of the first step does."""
    for param_shard in engine.param_shards:
        param_shard.tensor.grad = torch.zeros_like(param_shard.tensor)
    optimizer.step()
    for param_shard in engine.param_shards:
        param_shard.tensor.grad = None


def _track_engine(engine: Engine, tracker: MemoryCommTracker) -> list[TracePoint]:
    """Tells the ledger what is a weight and what a gradient. In the list will be the end of the last backward."""
    tracker.mark((param_shard.tensor for param_shard in engine.param_shards), "weights")
    for chain in engine.chains:
        has_copies = any(param_shard.compute_copy is not None for param_shard in engine.param_shards)
        tracker.mark(chain.parameters(), "copies" if has_copies else "weights")
        for module in chain.modules():
            if not has_copies:
                module.register_forward_pre_hook(_mark_weights_hook(tracker))
            for views in module.__dict__.get("_views", {}).values():
                views.append(_mark_copy_view(tracker))
    backward_ends: list[TracePoint] = []
    reduce_gradients = engine.data.reduce_gradients

    def tracked_reduce() -> None:
        backward_ends.append(tracker.now())
        tracker.default_role = "buffers"
        _mark_gradients(engine, tracker)
        reduce_gradients()

    engine.data.reduce_gradients = tracked_reduce  # type: ignore[method-assign]
    return backward_ends


def _mark_weights_hook(tracker: MemoryCommTracker) -> Callable[[nn.Module, Any], None]:
    def look(module: nn.Module, args: Any) -> None:
        for weight in module._parameters.values():
            if weight is not None:
                tracker.mark([weight], "weights")  # FSDP shows the whole one here

    return look


def _mark_copy_view(tracker: MemoryCommTracker) -> Callable[[Tensor], Tensor]:
    """The last view of a weight: what the module computes with."""

    def mark(view: Tensor) -> Tensor:
        tracker.mark([view], "copies", overwrite=False)
        return view

    return mark


def _mark_gradients(engine: Engine, tracker: MemoryCommTracker) -> None:
    tensors = [tensor for pair in engine.data.param_pairs for tensor in (pair[0], pair[1].tensor)]
    tracker.mark((tensor.grad for tensor in tensors if tensor.grad is not None), "gradients")
