"""The best layouts of a job on a cluster: every layout of a stated space, or a proof that it cannot be among the best.

The space: every product of pipeline, context, tensor and data degrees that gives the number of devices; experts over
the data and context ranks; micro-batches of 1, 2, 4, ... up to 32 samples, more where they are short; whole replicas,
or sharding (ZeRO 1, 2, 3) over all data ranks or over those of one domain; every schedule with up to 8 stages a rank;
no, selective or full recomputation.

Three bounds keep most of it from being looked at closely. Classes of layouts that compute the same products are sorted
by the products alone, without traffic, bubble, update or anything computed again; a layout has a quick bound, the work
of its slowest rank, and a closed form, which is exact for even stages and never too long for others. Each is held
against what the best so far take at most. What is left is simulated, the least bound first, until no other can be
better: the answer is that of simulating all.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from shardwise.errors import LayoutError
from shardwise.layout import Layout, micro_batch_rule
from shardwise.planner.predict import Estimator, Prediction, Stages
from shardwise.planner.shape import Shape

MICRO_BATCHES = tuple(2**n for n in range(17))  # those above 32 only while they have no more than 65536 positions
VIRTUAL = (2, 3, 4, 6, 8)
RECOMPUTE = ("none", "selective", "full")
FIELDS = tuple(each.name for each in fields(Layout))


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Prediction, ...]
    """Layouts that fit, fastest first; where none fits, the one that needs least."""
    evaluated: int
    """Layouts that no bound ruled out."""
    seconds: float


def search(estimator: Estimator, devices: int, keep: int = 10) -> Found:
    """The `keep` best layouts."""
    begin = time.perf_counter()
    every = [(bound(estimator, base), base) for base in bases(estimator, devices)]
    if not every:
        raise LayoutError(f"no layout of {devices} devices can serve a batch of {estimator.work.samples} samples.")
    every.sort(key=lambda pair: pair[0])
    finalists, evaluated = _finalists(estimator, every, keep)
    best: list[Prediction] = []
    for least, layout in finalists:
        if len(best) == keep and least >= best[-1].seconds:
            break
        insort(best, estimator.predict(layout), key=lambda found: found.seconds)
        del best[keep:]
    if not best:
        best = [estimator.predict(_smallest(estimator, every))]
    return Found(tuple(best), evaluated, time.perf_counter() - begin)


def _finalists(
    estimator: Estimator, classes: Sequence[tuple[float, Layout]], keep: int
) -> tuple[list[tuple[float, Layout]], int]:
    """Layouts that fit and can be among the best, with the time that they take at least, least first; and how many
    layouts were looked at."""
    limit, evaluated = estimator.machine.device.memory, 0
    jitter = estimator.jitter(classes[0][1].world)
    found: list[tuple[float, Layout]] = []
    orders: dict[tuple[int, int], list[tuple[str, int, Stages]]] = {}
    ceilings = [inf] * keep  # what the best so far take at most
    for least, base in classes:
        if least >= ceilings[-1]:
            break
        own, micro_batches = estimator.work.own, estimator.micro_batches(base)
        key = base.pipeline, micro_batches
        if key not in orders:
            orders[key] = [(*each, estimator.stages(replace(base, schedule=each[0], virtual=each[1])))
                           for each in _schedules(estimator, base)]  # fmt: skip
        for cut in _cuts(estimator, base):
            for recompute in RECOMPUTE:
                part = _but(cut, recompute=recompute)
                load = estimator.load(part)
                for schedule, virtual, stages in orders[key]:
                    evaluated += 1
                    busy = micro_batches * load.busiest(stages) / estimator.efficiency.shared
                    floor = (busy + estimator.efficiency.fixed) * jitter
                    if floor > ceilings[-1] or (
                        own is not None
                        and own.least(part, stages.parts, micro_batches, estimator.work.habit.state) > limit
                    ):
                        continue
                    layout = _but(part, schedule=schedule, virtual=virtual)
                    if not estimator.fits(layout):
                        continue
                    found.append((estimator.time(layout).seconds, layout))
                    insort(ceilings, estimator.ceiling(layout))
                    del ceilings[keep:]
    found.sort(key=lambda pair: pair[0])
    return found, evaluated


def _but(layout: Layout, **values: Any) -> Layout:
    """`replace`, without the checks of what was checked before."""
    made = object.__new__(Layout)
    made.__dict__.update({name: layout.__dict__[name] for name in FIELDS}, **values)
    return made


def _smallest(estimator: Estimator, classes: Sequence[tuple[float, Layout]]) -> Layout:
    """The layout that needs least: one with the smallest micro-batch, in which all is computed again."""
    layouts = (layout for _, base in classes if base.micro_batch == 1 for layout in variants(estimator, base))
    return min((each for each in layouts if each.recompute == "full"), key=estimator.peak)


def bound(estimator: Estimator, base: Layout) -> float:
    """Seconds that no layout of a class can undercut, however it cuts its stages: the products of the slowest rank."""
    inner, first, last = estimator.pieces(estimator.cut(base))
    layers, each = estimator.work.shape.layers, inner.forward + inner.backward
    ends = first.forward + first.backward, last.forward + last.backward
    mean, shared = (layers * each + sum(ends)) / base.pipeline, estimator.efficiency.shared
    busy = max(-(-layers // base.pipeline) * each / shared, mean, *(end / shared for end in ends))
    return estimator.micro_batches(base) * busy


def bases(estimator: Estimator, devices: int) -> Iterator[Layout]:
    """One layout per class: degrees and micro-batch; all data ranks replicate."""
    shape, samples = estimator.work.shape, estimator.work.samples
    for tensor in _divisors(devices):
        if tensor > shape.heads or shape.heads % tensor or shape.sequence % tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > shape.stages:
                continue
            rest = devices // tensor // pipeline
            for context in _contexts(shape, rest):
                data = rest // context
                if samples % data:
                    continue
                for micro_batch in MICRO_BATCHES:
                    if samples // data % micro_batch or (micro_batch > 32 and micro_batch * shape.sequence > 2**16):
                        break
                    for expert in _experts(shape, data * context) if shape.experts else [1]:
                        yield Layout(
                            pipeline=pipeline, replicate=data, context=context, tensor=tensor, expert=expert,
                            micro_batch=micro_batch,
                        )  # fmt: skip


def variants(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    """Every layout of a class."""
    for cut in _cuts(estimator, base):
        for recompute in RECOMPUTE:
            for schedule, virtual in _schedules(estimator, base):
                yield replace(cut, schedule=schedule, virtual=virtual, recompute=recompute)


def _cuts(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    """How the data ranks share weights, gradients and optimizer state."""
    data, domain = base.data, estimator.machine.cluster.domain // (base.tensor * base.context)
    if base.context % base.expert == 0:
        yield base
    near = max((n for n in _divisors(data) if n <= domain), default=1)
    for shard in {data, near} - {1}:
        for zero in (1, 2, 3) if shard * base.context % base.expert == 0 else ():
            yield replace(base, replicate=data // shard, shard=shard, zero=zero)


def _schedules(estimator: Estimator, base: Layout) -> Iterator[tuple[str, int]]:
    """Schedules, with stages per rank, that can run the class's micro-batches."""
    layers, pipeline = estimator.work.shape.layers, base.pipeline
    every = [("1f1b", 0)]
    if pipeline > 1:
        every += [("interleaved", virtual) for virtual in VIRTUAL if pipeline * virtual <= layers]
        if 2 * pipeline <= layers + 2:
            every += [("zero-bubble", 2), ("zbv", 0), ("dualpipev", 0)]
    for schedule, virtual in every:
        layout = replace(base, schedule=schedule, virtual=virtual)
        if micro_batch_rule(layout, estimator.micro_batches(base)) is None:
            yield schedule, virtual


def _contexts(shape: Shape, most: int) -> list[int]:
    """Parts of a sequence of at least 2048 tokens each."""
    return [n for n in _divisors(most) if n == 1 or (shape.contexts % n == 0 and shape.contexts // n >= 2048)]


def _experts(shape: Shape, most: int) -> list[int]:
    return [n for n in _divisors(most) if shape.experts % n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0] if number < 10**5 else [1, number]
