"""The best layouts of a job on a cluster: every layout of a stated space, or a proof that it cannot be among the best.

The space: every product of pipeline, context, tensor and data degrees that gives the number of devices; experts over
the data and context ranks; micro-batches of 1, 2, 4, ... up to 32 samples, more where they are short; whole replicas,
or sharding (ZeRO 1, 2, 3) over all data ranks or over those of one domain; every schedule with up to 8 stages a rank;
no, selective or full recomputation.

Classes of layouts that compute the same products are sorted by a bound: the products alone, without traffic, bubble,
update or anything computed again. Once the bound of a class is above the slowest of the best found, no later class can
hold a better layout. Closed forms judge all of them; nothing is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.errors import LayoutError
from shardwise.layout import Layout, micro_batch_rule
from shardwise.planner.predict import Estimator, Prediction, even
from shardwise.planner.shape import Shape

MICRO_BATCHES = tuple(2**n for n in range(17))  # those above 32 only while they have no more than 65536 positions
VIRTUAL = (2, 3, 4, 6, 8)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Prediction, ...]
    """Layouts that fit, fastest first; where none fits, the one that needs least."""
    evaluated: int
    """Layouts that no bound ruled out."""
    seconds: float


def search(estimator: Estimator, devices: int, keep: int = 10, runnable: bool = False) -> Found:
    """The `keep` best layouts. `runnable`: only such as `train` can run today (no context, no expert axis)."""
    begin = time.perf_counter()
    limit = estimator.machine.device.memory
    classes = sorted(
        ((bound(estimator, base), base) for base in bases(estimator, devices, runnable)), key=lambda pair: pair[0]
    )
    best: list[tuple[float, Layout]] = []
    smallest: tuple[float, Layout] | None = None
    evaluated = 0
    for least, base in classes:
        if len(best) == keep and least >= best[-1][0]:
            break
        counts = estimator.counts(base)
        for layout in variants(estimator, base):
            evaluated += 1
            peak = estimator.peak(layout, counts)
            if peak > limit:
                smallest = min(smallest or (peak, layout), (peak, layout), key=lambda pair: pair[0])
                continue
            seconds = estimator.time(layout, counts).seconds
            if len(best) < keep or seconds < best[-1][0]:
                best.append((seconds, layout))
                best.sort(key=lambda pair: pair[0])
                del best[keep:]
    if not best:
        if smallest is None:
            raise LayoutError(f"no layout of {devices} devices can serve a batch of {estimator.work.samples} samples.")
        best = [smallest]
    found = tuple(estimator.predict(layout) for _, layout in best)
    return Found(found, evaluated, time.perf_counter() - begin)


def bound(estimator: Estimator, base: Layout) -> float:
    """Seconds that no layout of a class can undercut: the products of the slowest rank."""
    inner, first, last = estimator.pieces(estimator.cut(base))
    counts = even(estimator.work.shape.layers, base.pipeline)
    each = inner.forward + inner.backward
    ends = first.forward + first.backward, last.forward + last.backward
    busy = max(counts[0] * each + ends[0], counts[-1] * each + ends[1], max(counts) * each)
    if base.pipeline == 1:
        busy = counts[0] * each + sum(ends)
    return max(1, round(estimator.work.samples / base.data / base.micro_batch)) * busy


def bases(estimator: Estimator, devices: int, runnable: bool) -> Iterator[Layout]:
    """One layout per class: degrees and micro-batch; all data ranks replicate."""
    shape, samples = estimator.work.shape, estimator.work.samples
    for tensor in _divisors(devices):
        if tensor > shape.heads or shape.heads % tensor or shape.sequence % tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > shape.stages:
                continue
            rest = devices // tensor // pipeline
            for context in [1] if runnable else _contexts(shape, rest):
                data = rest // context
                if samples % data:
                    continue
                for micro_batch in MICRO_BATCHES:
                    if samples // data % micro_batch or (micro_batch > 32 and micro_batch * shape.sequence > 2**16):
                        break
                    for expert in [1] if runnable or not shape.experts else _experts(shape, data * context):
                        yield Layout(
                            pipeline=pipeline, replicate=data, context=context, tensor=tensor, expert=expert,
                            micro_batch=micro_batch,
                        )  # fmt: skip


def variants(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    """Every layout of a class."""
    domain = estimator.machine.cluster.domain // (base.tensor * base.context)
    count = estimator.work.samples // base.data // base.micro_batch
    for cut in _cuts(base, domain):
        for schedule, virtual in _schedules(base.pipeline, estimator.work.shape.layers):
            for recompute in RECOMPUTE:
                layout = replace(cut, schedule=schedule, virtual=virtual, recompute=recompute)
                if micro_batch_rule(layout, count) is None:
                    yield layout


def _cuts(base: Layout, domain: int) -> Iterator[Layout]:
    """How the data ranks share weights, gradients and optimizer state."""
    data = base.data
    yield base
    near = max((n for n in _divisors(data) if n <= domain), default=1)
    for shard in {data, near} - {1}:
        for zero in (1, 2, 3):
            yield replace(base, replicate=data // shard, shard=shard, zero=zero)


def _schedules(pipeline: int, layers: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 0
    if pipeline == 1:
        return
    for virtual in VIRTUAL:
        if pipeline * virtual <= layers:
            yield "interleaved", virtual
    if 2 * pipeline <= layers + 2:
        yield from (("zero-bubble", 2), ("zbv", 0), ("dualpipev", 0))


def _contexts(shape: Shape, most: int) -> list[int]:
    """Parts of a sequence of at least 2048 tokens each."""
    return [n for n in _divisors(most) if n == 1 or (shape.sequence % n == 0 and shape.sequence // n >= 2048)]


def _experts(shape: Shape, most: int) -> list[int]:
    return [n for n in _divisors(most) if shape.experts % n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0] if number < 10**5 else [1, number]
