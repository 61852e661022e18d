"""Measures the memory and communication of one rank of any world size, without that world.

A process acts as one rank, with a fake process group and fake tensors, and runs one step as in training while a
`MemoryCommTracker` records every storage and every collective. Once the pipeline is full, every period (of one
micro-batch, or of one round of them) is like the previous one: a dry run stops shortly after, and adds the traffic and
memory of a period for each that remains, plus what each micro-batch needs for the whole step.

Tensors are those of PyTorch's eager kernels, but RMSNorm counts as fused, as on a GPU. The step is the first one, with
optimizer state. In later ones DDP (`replicate` alone) rebuilds its buckets: the number of calls may differ slightly."""

import dataclasses
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.cluster import CLUSTERS
from shardwise.console import align_columns, fill_in, fit_columns, format_ranks, pluralize
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import Samples, job_stream
from shardwise.errors import JobError, LayoutError, RunError
from shardwise.job import BatchConfig, Job, load_job
from shardwise.layout import AUTO_SCHEDULES, V_SHAPED, Layout, solve_batch
from shardwise.models import loss
from shardwise.models.fake_tensors import fake_tensor_mode
from shardwise.parallel import activation_offload
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.dryrun.memory_comm_tracker import ROLES, MemoryCommTracker, axis_by_group, by_axis
from shardwise.planner.plan import auto_schedule_order
from shardwise.step import step

MAX_DRYRUN_WORLD = 2**16  # PyTorch lists every rank of every group


@dataclass(frozen=True)
class CollectiveTraffic:
    """Calls and bytes of one kind of collective on one mesh axis, for one rank and step."""

    axis: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankReport:
    layout: str
    rank: int
    stages: tuple[int, ...]  # pipeline stages on this rank
    modules: tuple[tuple[str, ...], ...]  # names of the model's top-level modules, by stage
    memory: dict[str, int]  # peak bytes, by role
    peak_phase: str  # `forward or backward`, or `update`: gradient reduction and optimizer step
    resident_memory: dict[str, int]  # bytes between two steps, by role
    traffic: tuple[CollectiveTraffic, ...]
    micro_batches: int
    micro_batches_run: int  # micro-batches that were run; the others are extrapolated
    seconds: float  # wall time of the dry run

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total": self.total}


def dry_run(job: Job, layout: Layout, ranks: Sequence[int] | None = None) -> list[RankReport]:
    """Measures the given ranks; default `typical_ranks`."""
    if prepare(job, layout).tables:
        raise JobError(f"{job.model.name}: a dry run does not simulate embedding tables; use `shardwise plan`.")
    rank_list = list(typical_ranks(layout) if ranks is None else ranks)
    for rank in rank_list:
        if not 0 <= rank < layout.world:
            count = pluralize(layout.world, "rank")
            raise LayoutError(f"rank {rank}: layout '{layout}' has {count}, from 0 to {layout.world - 1}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(min(cores, len(rank_list)), get_context("fork"), _init_worker) as pool:
        futures = [pool.submit(_dry_run_rank, job, layout, rank) for rank in rank_list]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise RunError("a process of the dry run was killed, probably out of memory; use fewer ranks.") from None
        finally:
            pool.shutdown(cancel_futures=True)


def typical_ranks(layout: Layout, all_stages: bool = False) -> list[int]:
    """Returns the rank with index 0 on all other axes for the first, second, middle and last (or every) stage."""
    pipeline = layout.pipeline
    pipeline_ranks = set(range(pipeline)) if all_stages else {0, min(1, pipeline - 1), pipeline // 2, pipeline - 1}
    return [pipeline_rank * (layout.world // pipeline) for pipeline_rank in sorted(pipeline_ranks)]


def _init_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    torch.set_num_threads(1)


def _dry_run_rank(job: Job, layout: Layout, rank: int) -> RankReport:
    with fake_process_group(layout.world, rank):
        return measure_rank(job, layout)


@contextmanager
def fake_process_group(world: int, rank: int) -> Iterator[None]:
    """Initializes a fake process group: collectives return uninitialized data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend

    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()


def micro_batches_to_run(layout: Layout, micro_batches: int) -> tuple[int, int]:
    """Returns how many micro-batches fill the pipeline and complete one more period, and the length of a period."""
    if layout.pipeline == 1:
        return 3, 1  # the first allocates the gradients, the second accumulates into them
    if layout.schedule in ("gpipe", *AUTO_SCHEDULES):
        return micro_batches, 1  # no steady state, or not periodic
    if layout.schedule == "1f1b":
        return layout.pipeline + 2, 1
    if layout.schedule in V_SHAPED:
        return 2 * layout.stage_count + 2, 1
    round_size = micro_batches // max(1, micro_batches // layout.pipeline)
    return 4 * round_size, round_size


def measure_rank(job: Job, layout: Layout, fake: bool = True, all_micro_batches: bool = False) -> RankReport:
    """Measures this process's rank in the current process group, real or fake."""
    begin = time.perf_counter()
    batch = solve_batch(layout, job.samples)
    needed, period = micro_batches_to_run(layout, batch.micro_batches)
    count = batch.micro_batches if all_micro_batches else min(needed, batch.micro_batches)
    batch_config = BatchConfig(samples=count * batch.micro_batch * layout.data)
    job = job.model_copy(update={"batch": batch_config, "compile": False})
    layout = dataclasses.replace(layout, micro_batch=batch.micro_batch)
    recording = _record_step(job, layout, count, fake)
    remaining = batch.micro_batches - count
    memory, peak_phase = recording.memory(remaining, period)
    held = recording.held_after(recording.end, remaining, period)
    return RankReport(
        layout=str(layout), rank=recording.engine.mesh.rank,
        stages=layout.stages_of(recording.engine.mesh["pipeline"].index),
        modules=tuple(tuple(name for name, _ in chain.named_children()) for chain in recording.engine.chains),
        memory={role: memory[role] for role in ROLES}, peak_phase=peak_phase,
        resident_memory={role: held[role] for role in ROLES},
        traffic=recording.traffic(remaining, period), micro_batches=batch.micro_batches, micro_batches_run=count,
        seconds=time.perf_counter() - begin)  # fmt: skip


@dataclass
class StepRecording:
    """A recorded step: the tracker, and the points of its recording at which phases begin and end."""

    engine: Engine
    tracker: MemoryCommTracker
    micro_batches_run: int
    before_batch: int  # before samples and receive buffers were allocated
    begin: int
    forward_starts: list[int]  # start of each forward of this rank's first stage
    update_start: int  # after the last backward
    end: int

    def memory(self, remaining: int, period: int) -> tuple[Counter[str], str]:
        """Returns the peak bytes, with `remaining` more micro-batches extrapolated, and the phase of the peak."""
        peak = self.tracker.bytes_at(self.tracker.peak_event(self.begin, self.update_start))
        batch_bytes = self.tracker.bytes_at(self.begin, since=self.before_batch)
        _add_scaled(peak, batch_bytes, remaining, self.micro_batches_run)
        first, last = self._period(period)
        growth = self.tracker.bytes_at(last, since=first)
        if growth.total() > 0:  # the peak is then in the last period
            _add_scaled(peak, growth, remaining, period)
        after = self.held_after(self.tracker.peak_event(self.update_start, self.end), remaining, period)
        return (peak, "forward or backward") if peak.total() >= after.total() else (after, "update")

    def held_after(self, event: int, remaining: int, period: int) -> Counter[str]:
        """Returns the bytes at an event after the last backward, with `remaining` more micro-batches extrapolated."""
        held = self.tracker.bytes_at(event)
        batch_bytes = self.tracker.surviving_bytes(self.before_batch, self.begin, event)
        _add_scaled(held, batch_bytes, remaining, self.micro_batches_run)
        _add_scaled(held, self.tracker.surviving_bytes(*self._period(period), event), remaining, period)
        return held

    def traffic(self, remaining: int, period: int) -> tuple[CollectiveTraffic, ...]:
        counts, sizes = self.tracker.traffic_between(self.begin, self.end)
        for total, steady in zip((counts, sizes), self.tracker.traffic_between(*self._period(period)), strict=True):
            _add_scaled(total, steady, remaining, period)
        return tuple(CollectiveTraffic(*kind, counts[kind], sizes[kind]) for kind in sorted(counts, key=by_axis))

    def _period(self, length: int) -> tuple[int, int]:
        return self.forward_starts[-1 - length :][0], self.forward_starts[-1]


def _add_scaled(total: Counter[Any], part: Counter[Any], times: int, divisor: int) -> None:
    for key, value in part.items():
        total[key] += value * times // divisor


def _record_step(job: Job, layout: Layout, micro_batches: int, fake: bool) -> StepRecording:
    tracker = MemoryCommTracker()
    fake_mode = fake_tensor_mode() if fake else nullcontext()
    order = auto_schedule_order(job, layout, CLUSTERS["h100"])
    example = job_stream(job, synthetic_source(job, 1)).read(np.arange(1))
    engine = parallelize(prepare(job, layout), torch.device("cpu"), _recorded(tracker, fake_mode), order)
    tracker.axes = axis_by_group(engine.mesh)
    forward_starts: list[int] = []
    engine.chains[0].register_forward_pre_hook(lambda *args: forward_starts.append(tracker.now()))
    backward_ends = _track_engine(engine, tracker)
    gc.disable()  # collections at random times would make the trace nondeterministic
    try:
        with _recorded(tracker, fake_mode):
            optimizer = engine.make_optimizer(job)
            # Initializes the optimizer state, which otherwise happens at the end of the first step.
            for param_shard in engine.param_shards:
                param_shard.tensor.grad = torch.zeros_like(param_shard.tensor)
            optimizer.step()
            for param_shard in engine.param_shards:
                param_shard.tensor.grad = None
            states = (value for state in optimizer.state.values() for value in state.values())
            tracker.mark(states, "host" if job.optimizer.offload else "optimizer")
            before_batch = tracker.now()
            if engine.pipeline is not None:
                engine.pipeline.initialize()
            count = micro_batches * engine.batch.micro_batch
            zeros = (torch.zeros(count, *tensor.shape[1:], dtype=tensor.dtype) for tensor in example.tensors)
            samples = Samples.from_tensors(zeros)
            begin = tracker.now()
            tracker.default_role = "activations"
            step(engine, optimizer, samples, job.optimizer.clip, lambda _: _mark_gradients(engine, tracker))
            end = tracker.now()
    finally:
        gc.enable()
    return StepRecording(engine, tracker, micro_batches, before_batch, begin, forward_starts, backward_ends[0], end)


class FusedRMSNorm(torch.autograd.Function):
    """Allocates and saves what the fused RMSNorm kernel does, without computing values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_loss(
    padded_logits: Tensor, targets: Tensor, vocab_shard: loss.VocabShard | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """Allocates what the fused loss kernel does: the gradient overwrites the logits."""
    if vocab_shard is not None or padded_logits.dtype == torch.float64:
        return softmax_loss(padded_logits, targets, vocab_shard, vocab)
    dtype = torch.promote_types(padded_logits.dtype, torch.float32)
    return padded_logits.new_zeros(len(targets), dtype=dtype), padded_logits


softmax_loss = loss.cross_entropy_with_grad


@contextmanager
def _recorded(tracker: MemoryCommTracker, fake_mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Records, with operators that are fused on a GPU replaced by ones that allocate like the fused kernel."""
    addmm_ = loss.addmm_
    rms_norm = patch.object(nn.functional, "rms_norm", lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight))
    products = patch.object(loss, "addmm_", lambda sum, a, b: addmm_(sum, a, b) if a.dtype == sum.dtype else None)

    def host_buffer(tensor: Tensor) -> Tensor:
        tracker.mark([buffer := torch.empty_like(tensor)], "host")
        return buffer

    offload = patch.object(activation_offload, "host_buffer", host_buffer)
    fused_loss = patch.object(loss, "cross_entropy_with_grad", _fused_loss)
    with fake_mode, tracker, rms_norm, products, fused_loss, offload:
        yield


def _track_engine(engine: Engine, tracker: MemoryCommTracker) -> list[int]:
    """Marks weights and gradients in the tracker. The returned list receives the end of the last backward."""

    def mark_weights(module: nn.Module, args: Any) -> None:
        # When this hook runs, FSDP has unsharded the parameters.
        tracker.mark((weight for weight in module._parameters.values() if weight is not None), "weights")

    def mark_copy(view: Tensor) -> Tensor:
        """The last parametrization: marks the weight a module computes with."""
        tracker.mark([view], "copies", overwrite=False)
        return view

    tracker.mark((param_shard.tensor for param_shard in engine.param_shards), "weights")
    for chain in engine.chains:
        has_copies = any(param_shard.compute_copy is not None for param_shard in engine.param_shards)
        tracker.mark(chain.parameters(), "copies" if has_copies else "weights")
        for module in chain.modules():
            if not has_copies:
                module.register_forward_pre_hook(mark_weights)
            for views in module.__dict__.get("_parametrizations", {}).values():
                views.append(mark_copy)
    backward_ends: list[int] = []
    reduce_gradients = engine.data.reduce_gradients

    def tracked_reduce() -> None:
        backward_ends.append(tracker.now())
        tracker.default_role = "buffers"
        _mark_gradients(engine, tracker)
        reduce_gradients()

    engine.data.reduce_gradients = tracked_reduce  # type: ignore[method-assign]
    return backward_ends


def _mark_gradients(engine: Engine, tracker: MemoryCommTracker) -> None:
    tensors = [tensor for pair in engine.data.param_pairs for tensor in (pair[0], pair[1].tensor)]
    tracker.mark((tensor.grad for tensor in tensors if tensor.grad is not None), "gradients")


def dryrun_job(
    job_file: Path | None, settings: list[str], layout: str | None, ranks: list[int], every_stage: bool
) -> list[RankReport]:
    """Dry-runs the given ranks, plus one rank per pipeline stage with `every_stage`; by default `typical_ranks`."""
    job = load_job(job_file, settings)
    layout_text = layout or job.layout
    if layout_text == "auto":
        raise JobError('layout = "auto": a dry run needs a fixed layout, e.g. --layout "pipeline=2 tensor=4".')
    parsed = Layout.parse(layout_text)
    if parsed.world > MAX_DRYRUN_WORLD:
        raise LayoutError(f"layout '{parsed}': a dry run simulates at most {MAX_DRYRUN_WORLD:,} processes.")
    rank_list = sorted({*ranks, *(typical_ranks(parsed, every_stage) if every_stage or not ranks else ())})
    return dry_run(job, parsed, rank_list)


def describe_reports(reports: Sequence[RankReport]) -> str:
    """Formats two tables: peak memory with one row per rank, communication with one column per rank."""
    rows = [["rank", "stage", "modules", *ROLES, "total", "peak in"]]
    for report in reports:
        kinds = [name.rstrip("0123456789") for stage in report.modules for name in stage]
        groups = [(kind, len(list(group))) for kind, group in groupby(kinds)]
        contents = ", ".join(pluralize(count, "layer") if kind == "block" else kind for kind, count in groups)
        sizes = [_format_gib(size) for size in (*(report.memory[role] for role in ROLES), report.total)]
        rows.append([str(report.rank), " ".join(map(str, report.stages)), contents, *sizes, report.peak_phase])
    memory, traffic = fit_columns(rows, left=(1, 2, len(ROLES) + 4)), align_columns(_traffic_rows(reports), left=(0, 1))
    values = {"layout": Layout.parse(reports[0].layout), "micro_batches": reports[0].micro_batches}
    return fill_in(Path(__file__).with_name("reports.txt"), {**values, "memory": memory, "traffic": traffic})


def _traffic_rows(reports: Sequence[RankReport]) -> list[list[str]]:
    """Formats the communication table; ranks with equal traffic share a column."""
    columns: dict[tuple[CollectiveTraffic, ...], list[int]] = {}
    for report in reports:
        columns.setdefault(report.traffic, []).append(report.rank)
    names = [f"{len(r)} ranks, {r[0]}-{r[-1]}" if len(r) > 3 else format_ranks(r) for r in columns.values()]
    rows = [
        ["", "", *(text for name in names for text in ("", name))],
        ["axis", "collective", *(["calls", "GiB"] * len(columns))],
    ]
    by_kind = [{(entry.axis, entry.kind): entry for entry in traffic} for traffic in columns]
    for kind in sorted({kind for entries in by_kind for kind in entries}, key=by_axis):
        found = [entries.get(kind) for entries in by_kind]
        cells = ((f"{entry.count:,}", _format_gib(entry.bytes)) if entry else ("-", "-") for entry in found)
        rows.append([*kind, *(text for pair in cells for text in pair)])
    return rows


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size >= 2**30 // 100 or not size else "<0.01"
