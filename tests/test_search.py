"""Is the quick search as good as simulating everything, and are its bounds what they say?"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import find_cluster
from shardwise.job import make_job
from shardwise.layout import Layout, micro_batch_error
from shardwise.parallel.prepare import cut_stages, forward_flops
from shardwise.planner.estimate import Estimator
from shardwise.planner.plan import make_estimator
from shardwise.planner.search import class_layouts, class_lower_bound, layout_classes, search
from shardwise.schedules.simulate import StageCosts, lower_bound, named_program, simulate, step_seconds

GIB = 2**30


def judge(layers: int, samples: int, memory: float, cluster: str = "a100-80g", **model: Any) -> Estimator:
    """Of a job of our own engine, on devices of some GiB."""
    sizes = {"width": 4096, "heads": 32, "ffn": 16384, "vocab": 51200, "sequence": 2048, "layers": layers}
    job = make_job({"model": sizes | model, "batch": {"samples": samples}, "precision": "bf16"})
    machine = find_cluster(cluster)
    return make_estimator(job, replace(machine, device=replace(machine.device, memory=memory * GIB)))


# 20 spaces: of 2, 4, 6 and 8 devices with much and with little memory, of an odd number of layers, with other widths.
SPACES = [
    *product((5, 8), (8, 24), (40, 96), (4, 8)),
    *((7, 12, 64, 6), (6, 36, 64, 6), (3, 16, 200, 4), (9, 16, 30, 2)),
]


@pytest.mark.thin(7)
@pytest.mark.parametrize(("layers", "samples", "memory", "devices"), SPACES)
def test_the_search_finds_what_simulating_everything_finds(
    layers: int, samples: int, memory: float, devices: int
) -> None:
    estimator = judge(layers, samples, memory)
    times: dict[Layout, float] = {}
    for base in layout_classes(estimator, devices):
        for layout in class_layouts(estimator, base):
            if estimator.predict(layout).peak_memory <= estimator.memory_limit:
                times[layout] = estimator.step_time(layout, simulated(estimator, layout))
    found = search(estimator, devices, keep=5)
    if times:
        best = sorted(times, key=lambda layout: times[layout])
        assert [one.seconds for one in found.best] == pytest.approx([times[layout] for layout in best[:5]], rel=1e-12)
        assert times[found.best[0].layout] == times[best[0]]
    else:
        assert found.best[0].peak_memory > estimator.memory_limit


def simulated(estimator: Estimator, layout: Layout) -> float:
    """Every action of every micro-batch."""
    count = estimator.micro_batches(layout)
    if layout.pipeline == 1:
        return count * estimator.slowest_rank_time(layout)
    program = named_program(layout.schedule, layout.pipeline, layout.stages_per_rank, count)
    return simulate(program, estimator.stage_costs(layout)).seconds


def test_no_bound_is_above_what_a_layout_takes() -> None:
    estimator = judge(14, 64, 80)
    for base in layout_classes(estimator, 16):
        for layout in list(class_layouts(estimator, base))[::5]:
            seconds = estimator.predict(layout).seconds * (1 + 1e-12)
            assert class_lower_bound(estimator, base) <= estimator.min_seconds(layout) <= seconds


shapes = st.builds(
    lambda schedule, ranks, virtual, rounds: (
        schedule, ranks, {"1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule, virtual), ranks * rounds
    ),
    st.sampled_from(["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]),
    st.integers(2, 4), st.integers(2, 3), st.integers(2, 16),
)  # fmt: skip


@settings(max_examples=40)
@given(shapes, st.randoms(use_true_random=False), st.booleans())
def test_few_micro_batches_stand_in_for_many(shape: tuple[str, int, int, int], random: Any, even: bool) -> None:
    schedule, ranks, virtual, count = shape
    if micro_batch_error(Layout(pipeline=ranks, schedule=schedule, virtual=virtual), count):
        return
    stages = ranks * virtual
    times = [[1.0 if even else random.uniform(0.5, 1.5) for _ in range(stages)] for _ in range(3)]
    costs = StageCosts(*times)
    whole = simulate(named_program(*shape), costs).seconds
    assert step_seconds(*shape, costs) == pytest.approx(whole, rel=1e-12)
    assert lower_bound(*shape, costs) <= whole * (1 + 1e-12)


def test_stages_are_those_of_the_engine() -> None:
    estimator = judge(10, 16, 80, vocab=128000)
    model = make_job({"model": {"width": 4096, "heads": 32, "ffn": 16384, "vocab": 128000, "sequence": 2048,
                                "layers": 10}}).model  # fmt: skip
    for text in ("pipeline=2", "pipeline=4", "pipeline=3 schedule=zbv", "pipeline=2 schedule=interleaved virtual=3"):
        layout = Layout.parse(f"{text} micro_batch=1")
        spans = cut_stages(layout, forward_flops(model))
        assert [sum(part) for part in estimator.stages(layout).stages] == [last - first for first, last in spans]
    ranks = estimator.stages(Layout.parse("pipeline=4 micro_batch=1")).ranks
    assert [rank.blocks for rank in ranks] == [3, 3, 3, 1]  # the head is worth two blocks
