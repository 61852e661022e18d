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
from shardwise.layout import Layout, micro_batch_error
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.estimate import Estimator
from shardwise.planner.prediction import Prediction, StagePartition

MICRO_BATCHES = tuple(2**n for n in range(17))  # those above 32 only while they have no more than 65536 positions
STAGES_PER_RANK = (2, 3, 4, 6, 8)
RECOMPUTE_CHOICES = ("none", "selective", "full")
LAYOUT_FIELDS = tuple(each.name for each in fields(Layout))


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search."""

    best: tuple[Prediction, ...]
    """Layouts that fit, fastest first; where none fits, the one that needs least."""
    evaluated: int
    """Layouts that no bound ruled out."""
    seconds: float


def search(estimator: Estimator, devices: int, keep: int = 10) -> SearchResult:
    """The `keep` best layouts."""
    begin = time.perf_counter()
    classes = [(class_lower_bound(estimator, base), base) for base in layout_classes(estimator, devices)]
    if not classes:
        raise LayoutError(f"no layout of {devices} devices can serve a batch of {estimator.work.samples} samples.")
    classes.sort(key=lambda pair: pair[0])
    finalists, evaluated = _finalists(estimator, classes, keep)
    best: list[Prediction] = []
    for lower_bound, layout in finalists:
        if len(best) == keep and lower_bound >= best[-1].seconds:
            break
        insort(best, estimator.predict(layout), key=lambda found: found.seconds)
        del best[keep:]
    if not best:
        best = [estimator.predict(_smallest_memory_layout(estimator, classes))]
    return SearchResult(tuple(best), evaluated, time.perf_counter() - begin)


def _finalists(
    estimator: Estimator, classes: Sequence[tuple[float, Layout]], keep: int
) -> tuple[list[tuple[float, Layout]], int]:
    """Layouts that fit and can be among the best, with the time that they take at least, least first; and how many
    layouts were looked at."""
    limit, evaluated = estimator.machine.device.memory, 0
    jitter = estimator.jitter(classes[0][1].world)
    found: list[tuple[float, Layout]] = []
    schedules_by_shape: dict[tuple[int, int], list[tuple[str, int, StagePartition]]] = {}
    ceilings = [inf] * keep  # what the best so far take at most
    for lower_bound, base in classes:
        if lower_bound >= ceilings[-1]:
            break
        engine, micro_batches = estimator.work.engine, estimator.micro_batches(base)
        key = base.pipeline, micro_batches
        if key not in schedules_by_shape:
            schedules_by_shape[key] = [(*each, estimator.stages(replace(base, schedule=each[0], virtual=each[1])))
                           for each in _candidate_schedules(estimator, base)]  # fmt: skip
        for sharded in _data_shardings(estimator, base):
            for recompute in RECOMPUTE_CHOICES:
                candidate = _replace_unchecked(sharded, recompute=recompute)
                load = estimator.module_load(candidate)
                for schedule, virtual, stages in schedules_by_shape[key]:
                    evaluated += 1
                    busy = micro_batches * load.slowest_rank_time(stages) / estimator.efficiency.uncontended_speedup
                    floor = (busy + estimator.efficiency.fixed_seconds) * jitter
                    if floor > ceilings[-1] or (
                        engine is not None
                        and engine.min_memory(
                            candidate,
                            stages.distinct_ranks,
                            micro_batches,
                            estimator.work.framework_profile.optimizer_bytes,
                        )
                        > limit
                    ):
                        continue
                    layout = _replace_unchecked(candidate, schedule=schedule, virtual=virtual)
                    if not estimator.fits(layout):
                        continue
                    found.append((estimator.step_timing(layout).seconds, layout))
                    insort(ceilings, estimator.max_step_time(layout))
                    del ceilings[keep:]
    found.sort(key=lambda pair: pair[0])
    return found, evaluated


def _replace_unchecked(layout: Layout, **values: Any) -> Layout:
    """`replace`, without the checks of what was checked before."""
    copy = object.__new__(Layout)
    copy.__dict__.update({name: layout.__dict__[name] for name in LAYOUT_FIELDS}, **values)
    return copy


def _smallest_memory_layout(estimator: Estimator, classes: Sequence[tuple[float, Layout]]) -> Layout:
    """The layout that needs least: one with the smallest micro-batch, in which all is computed again."""
    layouts = (layout for _, base in classes if base.micro_batch == 1 for layout in class_layouts(estimator, base))
    return min((each for each in layouts if each.recompute == "full"), key=estimator.peak_memory)


def class_lower_bound(estimator: Estimator, base: Layout) -> float:
    """Seconds that no layout of a class can undercut, however it cuts its stages: the products of the slowest rank."""
    inner, first, last = estimator.module_times(estimator.parallel_degrees(base))
    layers, each = estimator.work.shape.layers, inner.forward + inner.backward
    ends = first.forward + first.backward, last.forward + last.backward
    mean, speedup = (layers * each + sum(ends)) / base.pipeline, estimator.efficiency.uncontended_speedup
    busy = max(-(-layers // base.pipeline) * each / speedup, mean, *(end / speedup for end in ends))
    return estimator.micro_batches(base) * busy


def layout_classes(estimator: Estimator, devices: int) -> Iterator[Layout]:
    """One layout per class: degrees and micro-batch; all data ranks replicate."""
    shape, samples = estimator.work.shape, estimator.work.samples
    for tensor in _divisors(devices):
        if tensor > shape.heads or shape.heads % tensor or shape.sequence % tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > shape.stages:
                continue
            rest = devices // tensor // pipeline
            for context in _context_degrees(shape, rest):
                data = rest // context
                if samples % data:
                    continue
                for micro_batch in MICRO_BATCHES:
                    if samples // data % micro_batch or (micro_batch > 32 and micro_batch * shape.sequence > 2**16):
                        break
                    for expert in _expert_degrees(shape, data * context) if shape.experts else [1]:
                        yield Layout(
                            pipeline=pipeline, replicate=data, context=context, tensor=tensor, expert=expert,
                            micro_batch=micro_batch,
                        )  # fmt: skip


def class_layouts(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    """Every layout of a class."""
    for sharded in _data_shardings(estimator, base):
        for recompute in RECOMPUTE_CHOICES:
            for schedule, virtual in _candidate_schedules(estimator, base):
                yield replace(sharded, schedule=schedule, virtual=virtual, recompute=recompute)


def _data_shardings(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    """How the data ranks share weights, gradients and optimizer state."""
    data, domain = base.data, estimator.machine.cluster.domain_size // (base.tensor * base.context)
    if base.context % base.expert == 0:
        yield base
    in_domain = max((n for n in _divisors(data) if n <= domain), default=1)
    for shard in {data, in_domain} - {1}:
        for zero in (1, 2, 3) if shard * base.context % base.expert == 0 else ():
            yield replace(base, replicate=data // shard, shard=shard, zero=zero)


def _candidate_schedules(estimator: Estimator, base: Layout) -> Iterator[tuple[str, int]]:
    """Schedules, with stages per rank, that can run the class's micro-batches."""
    layers, pipeline = estimator.work.shape.layers, base.pipeline
    schedules = [("1f1b", 0)]
    if pipeline > 1:
        schedules += [("interleaved", virtual) for virtual in STAGES_PER_RANK if pipeline * virtual <= layers]
        if 2 * pipeline <= layers + 2:
            schedules += [("zero-bubble", 2), ("zbv", 0), ("dualpipev", 0)]
    for schedule, virtual in schedules:
        layout = replace(base, schedule=schedule, virtual=virtual)
        if micro_batch_error(layout, estimator.micro_batches(base)) is None:
            yield schedule, virtual


def _context_degrees(shape: ModelShape, most: int) -> list[int]:
    """Parts of a sequence of at least 2048 tokens each."""
    return [
        n
        for n in _divisors(most)
        if n == 1 or (shape.context_positions % n == 0 and shape.context_positions // n >= 2048)
    ]


def _expert_degrees(shape: ModelShape, most: int) -> list[int]:
    return [n for n in _divisors(most) if shape.experts % n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0] if number < 10**5 else [1, number]
