"""Finds the fastest layouts of a job on a cluster: exact over a stated space of layouts.

The space: every product of pipeline, context, tensor and data degrees that uses all devices; experts over the data and
context ranks; micro-batches of 1, 2, 4, ... up to 32 samples, more if samples are short; data ranks that replicate, or
shard (ZeRO 1, 2, 3) over all of them or within one domain; every schedule with up to 8 stages per rank; no, selective
or full recomputation. Of these, `Estimator.check` leaves those that training accepts.

Lower bounds of the step time prune it: of a class (the same degrees and micro-batch size), of the slowest rank, of the
schedule. The rest is simulated, so the result equals that of simulating everything."""

import time
from bisect import insort
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf, prod
from typing import Any

from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.layout import MAX_WORLD, Layout, divisors, micro_batch_error
from shardwise.planner.estimate import Estimator, Prediction, StagePartition

MICRO_BATCHES = sorted((*(2**n for n in range(17)), 3))  # above 32 only with at most 65,536 positions
STAGES_PER_RANK = (2, 3, 4, 6, 8)
RECOMPUTE_CHOICES = ("none", "selective", "full")
TimedLayouts = list[tuple[float, Layout]]  # each with its step time, or with a lower bound of it
LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))


@dataclass(frozen=True)
class SearchResult:
    best: tuple[Prediction, ...]  # layouts that fit, fastest first; if none fits, the one that needs the least memory
    evaluated: int  # layouts examined individually, not ruled out by the bound of their class
    seconds: float


def search(
    estimator: Estimator, devices: int, keep: int = 10, max_pipeline: int = MAX_WORLD, below: float = inf
) -> SearchResult:
    """`below`: only layouts whose steps take fewer seconds are of interest; there may be none then."""
    begin = time.perf_counter()
    bases = [base for base in layout_classes(estimator, devices) if base.pipeline <= max_pipeline]
    classes = sorted(((class_lower_bound(estimator, base), base) for base in bases), key=lambda pair: pair[0])
    if not any(any(_candidate_schedules(estimator, base)) for _, base in classes):
        raise LayoutError(_no_layout_error(estimator, devices))
    fastest, evaluated = _fastest_layouts(estimator, classes, keep, below)
    best = [estimator.predict(layout) for _, layout in fastest]
    if not best:  # micro-batch 1 and full recomputation need the least memory, where they are possible
        bases = [base for _, base in classes if base.micro_batch == 1 or estimator.shape.single_micro_batch]
        layouts = [layout for base in bases for layout in class_layouts(estimator, base)]
        by_choice = [[layout for layout in layouts if layout.recompute == choice] for choice in ("full", "none")]
        if below == inf or not any(map(estimator.fits, by_choice[0])):
            candidates = (layout for group in by_choice for layout in sorted(group, key=estimator.peak_memory))
            smallest = next((layout for layout in candidates if can_run(estimator, layout)), layouts[0])
            estimator.check(smallest)  # raises what is wrong if none can run
            best = [estimator.predict(smallest)]
    return SearchResult(tuple(best), evaluated, time.perf_counter() - begin)


def _no_layout_error(estimator: Estimator, devices: int) -> str:
    """Returns the sentence with the nearest batch and number of devices that some layout can run."""
    (other := copy(estimator)).samples = devices  # which all degrees of data ranks divide

    def runs(devices: int, samples: int) -> bool:
        other.samples = samples
        return any(any(_candidate_schedules(other, base)) for base in layout_classes(other, devices))

    def nearest(sizes: set[int], given: int) -> list[int]:
        return sorted(sizes, key=lambda size: (abs(size - given), size))

    # A schedule runs some count of micro-batches in any range of twice as many as it has stages.
    given, degrees = estimator.samples, {(base.data, base.pipeline) for base in layout_classes(other, devices)}
    ranges = ((data, given // data, 2 * pipeline + 1) for data, pipeline in degrees)
    batches = {data * n for data, count, reach in ranges for n in range(max(1, count - reach), count + reach + 1)}
    samples = next(size for size in nearest(batches, given) if runs(devices, size))
    splits = product(*_model_degrees(estimator), range(1, estimator.shape.stages + 1), divisors(given))
    worlds = {world for split in splits if (world := prod(split)) <= MAX_WORLD}
    count = next(size for size in nearest(worlds, devices) if size == 1 or runs(size, given))
    problem = f"no layout of {devices} devices can run a batch of {pluralize(given, 'sample')}"
    return f"{problem}; the nearest that work: batch.samples={samples}, or {pluralize(count, 'device')}."


def _fastest_layouts(estimator: Estimator, classes: TimedLayouts, keep: int, below: float) -> tuple[TimedLayouts, int]:
    """Returns the fastest layouts that fit, with their step times, and how many layouts it examined."""
    limit, evaluated = estimator.memory_limit, 0
    optimizer_bytes = estimator.framework_profile.optimizer_bytes
    jitter = estimator.jitter(classes[0][1].world)
    fastest: TimedLayouts = []
    schedules_by_shape: dict[tuple[int, int], list[tuple[str, int, StagePartition]]] = {}
    slowest = below  # seconds of the last of the `keep` fastest so far
    for lower_bound, base in classes:
        if lower_bound >= slowest:
            break
        engine, micro_batches = estimator.engine, estimator.micro_batches(base)
        key = base.pipeline, micro_batches
        if key not in schedules_by_shape:
            schedules_by_shape[key] = [
                (schedule, virtual, estimator.stages(replace(base, schedule=schedule, virtual=virtual)))
                for schedule, virtual in _candidate_schedules(estimator, base)
            ]
        for sharded in _data_shardings(estimator, base):
            for recompute in RECOMPUTE_CHOICES:
                candidate = _replace_unchecked(sharded, recompute=recompute)
                load = estimator.module_load(candidate)
                for schedule, virtual, stages in schedules_by_shape[key]:
                    evaluated += 1
                    busy = micro_batches * stages.largest_sum(*load) / estimator.efficiency.uncontended_speedup
                    if (busy + estimator.efficiency.fixed_seconds) * jitter > slowest:
                        continue
                    sizes = candidate, stages.distinct_ranks, micro_batches, optimizer_bytes
                    if engine and engine.min_memory(*sizes) > limit:
                        continue
                    layout = _replace_unchecked(candidate, schedule=schedule, virtual=virtual)
                    if not estimator.fits(layout) or estimator.min_seconds(layout) >= slowest:
                        continue
                    seconds = estimator.predict_seconds(layout)
                    if seconds < slowest and can_run(estimator, layout):
                        insort(fastest, (seconds, layout), key=lambda pair: pair[0])
                        del fastest[keep:]
                        slowest = min(below, fastest[-1][0]) if len(fastest) == keep else below
    return fastest, evaluated


def can_run(estimator: Estimator, layout: Layout) -> bool:
    with suppress(LayoutError):
        estimator.check(layout)
        return True
    return False


def _replace_unchecked(layout: Layout, **values: Any) -> Layout:
    """Like `replace`, but skips the validation of fields that were validated before."""
    copy = object.__new__(Layout)
    copy.__dict__.update({name: layout.__dict__[name] for name in LAYOUT_FIELDS}, **values)
    return copy


def class_lower_bound(estimator: Estimator, base: Layout) -> float:
    """Returns a lower bound for all layouts of a class and all stage splits: the slowest rank's compute."""
    inner, first, last = estimator.module_times(estimator.parallel_degrees(base))
    layers, block = estimator.shape.layers, inner.forward + inner.backward
    ends = first.forward + first.backward, last.forward + last.backward
    mean, speedup = (layers * block + sum(ends)) / base.pipeline, estimator.efficiency.uncontended_speedup
    busy = max(-(-layers // base.pipeline) * block / speedup, mean, *(end / speedup for end in ends))
    return estimator.micro_batches(base) * busy


def layout_classes(estimator: Estimator, devices: int) -> Iterator[Layout]:
    """Yields one layout per class (degrees and micro-batch size): the one whose data ranks all replicate."""
    shape, samples = estimator.shape, estimator.samples
    tensors, contexts = _model_degrees(estimator)
    for tensor in tensors:
        if devices % tensor:
            continue
        for pipeline in divisors(devices // tensor):
            if pipeline > shape.stages:
                continue
            rest = devices // tensor // pipeline
            for context in contexts:
                if rest % context:
                    continue
                data = rest // context
                degrees = divisors(rest) if shape.experts else [1]
                if samples % data:
                    continue
                for micro_batch in [samples // data] if shape.single_micro_batch else MICRO_BATCHES:
                    if samples // data % micro_batch or (micro_batch > 32 and micro_batch * shape.sequence > 2**16):
                        continue
                    for expert in [n for n in degrees if shape.experts % n == 0]:
                        yield Layout(
                            pipeline=pipeline, replicate=data, context=context, tensor=tensor, expert=expert,
                            micro_batch=micro_batch)  # fmt: skip


def _model_degrees(estimator: Estimator) -> tuple[list[int], list[int]]:
    """Returns the degrees of tensor and context that the model can be split into."""
    shape, positions = estimator.shape, estimator.shape.context_positions
    tensors = [n for n in divisors(shape.heads) if shape.sequence % n == 0]
    return tensors, [n for n in divisors(positions) if n == 1 or positions // n >= 2048]  # long enough per rank


def class_layouts(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    for sharded in _data_shardings(estimator, base):
        for recompute in RECOMPUTE_CHOICES:
            for schedule, virtual in _candidate_schedules(estimator, base):
                yield replace(sharded, schedule=schedule, virtual=virtual, recompute=recompute)


def _data_shardings(estimator: Estimator, base: Layout) -> Iterator[Layout]:
    """Yields the ways in which data ranks replicate or shard weights, gradients and optimizer state."""
    data, domain = base.data, estimator.machine.cluster.domain_size // (base.tensor * base.context)
    if base.context % base.expert == 0:
        yield base
    in_domain = max((n for n in divisors(data) if n <= domain), default=1)
    for shard in {data, in_domain} - {1}:
        for zero in (1, 2, 3) if shard * base.context % base.expert == 0 else ():
            yield replace(base, replicate=data // shard, shard=shard, zero=zero)


def _candidate_schedules(estimator: Estimator, base: Layout) -> Iterator[tuple[str, int]]:
    """Yields the schedules, with stages per rank, that can run the class's micro-batches."""
    layers, pipeline = estimator.shape.layers, base.pipeline
    schedules = [("1f1b", 0)]
    if pipeline > 1:
        schedules += [("interleaved", virtual) for virtual in STAGES_PER_RANK if pipeline * virtual <= layers]
        if 2 * pipeline <= layers + 2:
            schedules += [("zero-bubble", 2), ("zbv", 0), ("dualpipev", 0)]
    for schedule, virtual in schedules:
        layout = replace(base, schedule=schedule, virtual=virtual)
        if micro_batch_error(layout, estimator.micro_batches(base)) is None:
            yield schedule, virtual
