"""What a rank of any world holds and sends in a step, without that world.

A process here takes the place of one rank: a process group that talks to nobody, and tensors that have shapes but no
numbers. Through the same `parallelize` and the same `step` as training it takes one step, and a `Ledger` sees every
storage and every collective. Each rank has a pass of its own, in a process of its own.

Not every micro-batch need be run. Once a pipeline is full, each period (a forward and a backward of one micro-batch; of
one round of them where the schedule works in rounds) holds and sends what the one before did. So a pass stops a little
after the pipeline is full, and the remaining micro-batches are added by arithmetic: traffic grows by one period's,
memory by what is held per micro-batch for the whole step (samples, and PyTorch's buffers for what is received) and by
what a period leaves behind. This is exact, not an estimate: tests compare it with passes over all micro-batches.

Tensors are those of PyTorch's kernels without compilation. Attention is the fused one, which keeps the same on CPU and
GPU; RMSNorm, one kernel on a GPU and several on a CPU, counts as one (`OneKernelNorm`). The step is the first one, with
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
from shardwise.data.make import made_up
from shardwise.data.objectives import objective_of
from shardwise.data.stream import Samples, Stream
from shardwise.errors import LayoutError, RunError
from shardwise.job import BatchSize, Job
from shardwise.layout import MADE, V_SHAPED, Layout, solve_batch
from shardwise.models import loss
from shardwise.optim import make_optimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import check, parallelize
from shardwise.planner.ledger import ROLES, Bytes, Ledger, Moment, axes_of
from shardwise.planner.plan import order_of
from shardwise.step import step
from shardwise.words import counted


@dataclass(frozen=True)
class Traffic:
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
    pieces: tuple[tuple[str, ...], ...]
    """Of the chain, by stage."""
    memory: dict[str, int]
    """Bytes by role at the fullest moment of a step."""
    moment: str
    """When that is: in a `forward or backward`, or in the `update` after them."""
    kept: dict[str, int]
    """Bytes by role between two steps."""
    traffic: tuple[Traffic, ...]
    micro_batches: int
    ran: int
    """Micro-batches that the pass ran; the others were added by arithmetic."""
    seconds: float
    """That the pass took."""

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total": self.total}


def dry_run(
    job: Job, layout: Layout, ranks: Sequence[int] | None = None, show: Callable[[RankReport], None] = lambda _: None
) -> list[RankReport]:
    """Reports of some ranks, by default of `typical_ranks`. `show` is called as each of them is ready."""
    check(job, layout)
    chosen = list(typical_ranks(layout) if ranks is None else ranks)
    for rank in chosen:
        if not 0 <= rank < layout.world:
            last = layout.world - 1
            raise LayoutError(f"rank {rank}: layout '{layout}' has {counted(layout.world, 'rank')}, from 0 to {last}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[int, RankReport] = {}
    with ProcessPoolExecutor(min(cores, len(chosen)), get_context("fork"), _start) as pool:
        passes = [pool.submit(_pass, job, layout, rank) for rank in chosen]
        try:
            for done in as_completed(passes):
                report = done.result()
                found[report.rank] = report
                show(report)
        except BrokenProcessPool:
            raise RunError("a process of the dry run was killed; was there enough memory?") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [found[rank] for rank in chosen]


def typical_ranks(layout: Layout, every: bool = False) -> list[int]:
    """Ranks of the first, second, middle and last place in the pipeline, or of every one.

    Of those with one place the first of each other axis is taken: where a cut is uneven, it holds most.
    """
    pipeline = layout.pipeline
    places = set(range(pipeline)) if every else {0, min(1, pipeline - 1), pipeline // 2, pipeline - 1}
    return [place * (layout.world // pipeline) for place in sorted(places)]


# One pass


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a pass without a traceback
    torch.set_num_threads(1)


def _pass(job: Job, layout: Layout, rank: int) -> RankReport:
    with nobody(layout.world, rank):
        return measure(job, layout)


@contextmanager
def nobody(world: int, rank: int) -> Iterator[None]:
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


def enough(layout: Layout, micro_batches: int) -> tuple[int, int]:
    """How many micro-batches fill the pipeline and show one more period, and how many make a period."""
    if layout.pipeline == 1:
        return 3, 1  # the first makes the gradients, the second adds to them
    if layout.schedule in ("gpipe", *MADE):
        return micro_batches, 1  # never full, or of no period
    if layout.schedule == "1f1b":
        return layout.pipeline + 2, 1
    if layout.schedule in V_SHAPED:
        return 2 * layout.stage_count + 2, 1
    round_ = micro_batches // max(1, micro_batches // layout.pipeline)
    return 4 * round_, round_


def measure(job: Job, layout: Layout, fake: bool = True, whole: bool = False) -> RankReport:
    """This rank of the world that this process is in, be it real or not. `whole`: runs every micro-batch."""
    begin = time.perf_counter()
    batch = solve_batch(layout, job.samples)
    few, period = enough(layout, batch.micro_batches)
    ran = batch.micro_batches if whole else min(few, batch.micro_batches)
    small = BatchSize(samples=ran * batch.micro_batch * layout.data)
    job = job.model_copy(update={"batch": small, "compile": False})
    layout = dataclasses.replace(layout, micro_batch=batch.micro_batch)
    notes = _watched_step(job, layout, ran, fake)
    more = batch.micro_batches - ran
    memory, moment = notes.memory(more, period)
    return RankReport(
        layout=str(layout), rank=notes.engine.mesh.rank, stages=layout.stages_of(notes.engine.mesh["pipeline"].index),
        pieces=tuple(tuple(name for name, _ in chain.named_children()) for chain in notes.engine.chains),
        memory=_plain(memory), moment=moment, kept=_plain(notes.after(notes.end.event, more, period)),
        traffic=notes.traffic(more, period),
        micro_batches=batch.micro_batches, ran=ran, seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _plain(found: Bytes) -> dict[str, int]:
    return {role: found[role] for role in ROLES}


@dataclass
class Notes:
    """A step in the ledger."""

    engine: Engine
    ledger: Ledger
    ran: int
    bare: Moment
    """Before there was anything for its micro-batches."""
    begin: Moment
    forwards: list[Moment]
    """The begin of each forward of this rank's first stage."""
    update: Moment
    """All forwards and backwards are done."""
    end: Moment

    def memory(self, more: int, period: int) -> tuple[Bytes, str]:
        """At the fullest moment, had there been some more micro-batches; and which moment that is."""
        inside = self.ledger.held(self.ledger.fullest(self.begin, self.update))
        _add(inside, self.ledger.change(self.bare, self.begin), more, self.ran)
        if more:
            growth = self.ledger.change(*self._period(period))
            if growth.total() > 0:  # then the last period is the fullest
                _add(inside, growth, more, period)
        after = self.after(self.ledger.fullest(self.update, self.end), more, period)
        return (inside, "forward or backward") if inside.total() >= after.total() else (after, "update")

    def after(self, event: int, more: int, period: int) -> Bytes:
        """Held at some time after the last backward."""
        held = self.ledger.held(event)
        if more:
            _add(held, self.ledger.left(self.bare, self.begin, event), more, self.ran)
            _add(held, self.ledger.left(*self._period(period), event), more, period)
        return held

    def traffic(self, more: int, period: int) -> tuple[Traffic, ...]:
        counts, sizes = self.ledger.travelled(self.begin, self.end)
        if more:
            for total, steady in zip((counts, sizes), self.ledger.travelled(*self._period(period)), strict=True):
                _add(total, steady, more, period)
        order = sorted(counts, key=lambda transfer: transfer.place)
        return tuple(Traffic(*transfer, counts[transfer], sizes[transfer]) for transfer in order)

    def _period(self, length: int) -> tuple[Moment, Moment]:
        return self.forwards[-1 - length], self.forwards[-1]


def _add(total: Counter[Any], part: Counter[Any], times: int, over: int) -> None:
    for key, value in part.items():
        total[key] += value * times // over


def _watched_step(job: Job, layout: Layout, micro_batches: int, fake: bool) -> Notes:
    ledger = Ledger()
    modes = [FakeTensorMode(allow_non_fake_inputs=True), ledger] if fake else [ledger]
    order = order_of(job, layout, CLUSTERS["h100"])
    one = Stream(made_up(job, 1), job.seed, objective=objective_of(job.model, job.seed)).read(np.arange(1))
    like = one.tokens, one.targets, one.ids
    engine = parallelize(job, layout, torch.device("cpu"), _all(modes), order)
    ledger.axes = axes_of(engine.mesh)
    forwards: list[Moment] = []
    engine.chains[0].register_forward_pre_hook(lambda *args: forwards.append(ledger.now()))
    update = _watch(engine, ledger)
    gc.disable()  # when it runs is chance
    try:
        with _all(modes), _kernels_of_a_gpu():
            optimizer = make_optimizer(job.optimizer, engine.holdings)
            _fill_states(engine, optimizer)
            ledger.mark((value for state in optimizer.state.values() for value in state.values()), "optimizer")
            bare = ledger.now()
            if engine.pipeline is not None:
                engine.pipeline.prepare()
            count = micro_batches * engine.batch.micro_batch
            samples = Samples(*(torch.zeros(count, *one.shape[1:], dtype=one.dtype) for one in like))
            begin = ledger.now()
            ledger.default = "activations"
            step(engine, optimizer, samples, job.optimizer.clip, lambda _: _mark_gradients(engine, ledger))
            end = ledger.now()
    finally:
        gc.enable()
    return Notes(engine, ledger, micro_batches, bare, begin, forwards, update[0], end)


class OneKernelNorm(torch.autograd.Function):
    """What RMSNorm makes and keeps where it is one kernel, without its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _one_kernel_loss(logits: Tensor, targets: Tensor, part: loss.Vocabulary | None) -> tuple[Tensor, Tensor]:
    """What the loss makes where it is one kernel: the logits' gradient, in their place."""
    if part is not None or logits.dtype == torch.float64:
        return softmax_loss(logits, targets, part)
    return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32)), logits


softmax_loss = loss.softmax_loss


@contextmanager
def _kernels_of_a_gpu() -> Iterator[None]:
    """Operators that are one kernel on a GPU count as one."""
    norm, product = torch.nn.functional.rms_norm, loss.add_product
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: OneKernelNorm.apply(x, weight)  # type: ignore
    loss.softmax_loss = _one_kernel_loss
    loss.add_product = lambda total, a, b: product(total, a, b) if a.dtype == total.dtype else None
    try:
        yield
    finally:
        torch.nn.functional.rms_norm = norm
        loss.softmax_loss, loss.add_product = softmax_loss, product


@contextmanager
def _all(modes: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _fill_states(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Makes the states, which otherwise the end of the first step does."""
    for holding in engine.holdings:
        holding.tensor.grad = torch.zeros_like(holding.tensor)
    optimizer.step()
    for holding in engine.holdings:
        holding.tensor.grad = None


def _watch(engine: Engine, ledger: Ledger) -> list[Moment]:
    """Tells the ledger what is a weight and what a gradient. In the list will be the end of the last backward."""
    ledger.mark((holding.tensor for holding in engine.holdings), "weights")
    for chain in engine.chains:
        beside = any(holding.rounded is not None for holding in engine.holdings)
        ledger.mark(chain.parameters(), "copies" if beside else "weights")
        for module in chain.modules():
            if not beside:
                module.register_forward_pre_hook(_look(ledger))
            for views in module.__dict__.get("_views", {}).values():
                views.append(_mark_copy(ledger))
    ended: list[Moment] = []
    reduce = engine.data.reduce

    def watched() -> None:
        ended.append(ledger.now())
        ledger.default = "buffers"
        _mark_gradients(engine, ledger)
        reduce()

    engine.data.reduce = watched  # type: ignore[method-assign]
    return ended


def _look(ledger: Ledger) -> Callable[[nn.Module, Any], None]:
    def look(module: nn.Module, args: Any) -> None:
        for weight in module._parameters.values():
            if weight is not None:
                ledger.mark([weight], "weights")  # FSDP shows the whole one here

    return look


def _mark_copy(ledger: Ledger) -> Callable[[Tensor], Tensor]:
    """The last view of a weight: what the module computes with."""

    def mark(shown: Tensor) -> Tensor:
        ledger.mark([shown], "copies", anew=False)
        return shown

    return mark


def _mark_gradients(engine: Engine, ledger: Ledger) -> None:
    tensors = [tensor for pair in engine.data.pairs for tensor in (pair[0], pair[1].tensor)]
    ledger.mark((tensor.grad for tensor in tensors if tensor.grad is not None), "gradients")
