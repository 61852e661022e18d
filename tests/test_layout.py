"""Layouts as text, their rules, the arithmetic of batches and the balance of stages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.layout import SCHEDULES, BatchSplit, Layout, kept_activation_fraction, micro_batch_error, solve_batch
from shardwise.parallel.prepare import balance, cut_stages

degrees = st.integers(1, 6)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout that can be made."""
    words = {axis: draw(degrees) for axis in ("pipeline", "replicate", "shard", "tensor")}
    words["schedule"] = draw(st.sampled_from(SCHEDULES))
    words["virtual"] = draw(st.integers(0, 3))
    words["micro_batch"] = draw(st.integers(0, 5))
    words["zero"] = draw(st.integers(1, 3))
    words["recompute"] = draw(st.sampled_from(["none", "selective", "full", "0.25", "1"]))
    try:
        layout = Layout(**words)
        if draw(st.booleans()):
            layout = Layout(**words, stages=tuple(draw(st.integers(0, 9)) for _ in range(layout.stage_count)))
    except LayoutError:
        assume(False)
    return layout


# Text


@given(layouts())
def test_text_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "pipeline=1"),
        ("tensor=2 pipeline=2", "pipeline=2 tensor=2 schedule=1f1b"),
        ("shard=2", "shard=2 zero=1"),
        ("zero=3  recompute=0.5 shard=2", "shard=2 zero=3 recompute=0.5"),
        ("pipeline=2 stages=3,5", "pipeline=2 schedule=1f1b stages=3,5"),
        ("schedule=zbv", "schedule=zbv"),
    ],
)
def test_text_form(text: str, shown: str) -> None:
    assert str(Layout.parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipline=2", "did you mean 'pipeline'"),
        ("dp=2", r"did you mean replicate=2 \(DDP\) or shard=2 \(ZeRO\)\?"),
        ("tp=4", r"unknown key 'tp'; did you mean tensor=4\?"),
        ("pp=2", r"did you mean pipeline=2\?"),
        ("cp=2", r"did you mean context=2\?"),
        ("sp=2", r"did you mean tensor=2 .* or context=2\?"),
        ("ep=2", r"did you mean expert=2\?"),
        ("fsdp=2", r"did you mean shard=2 zero=3\?"),
        ("fsdp", r"'fsdp' is not of the form key=value; did you mean shard=N zero=3\?"),
        ("hsdp=4", r"did you mean replicate=N shard=4 zero=3\?"),
        ("dp_shard=-1", r"did you mean shard=N zero=3"),
        ("tensor-model-parallel-size=2", r"did you mean tensor=2\?"),
        ("ulysses=2", r"did you mean context=2 context_method=ulysses\?"),
        ("zero_stage=3", r"did you mean zero=3\?"),
        ("mbs=4", r"did you mean micro_batch=4\?"),
        ("gradient_checkpointing=true", r"did you mean recompute=full or recompute=selective\?"),
        ("gradient_accumulation_steps=4", "gradient accumulation follows"),
        ("pipeline", "not of the form key=value"),
        ("pipeline=two", "not a whole number"),
        ("pipeline=2,2", "takes one number"),
        ("tensor=2 tensor=4", "set twice"),
        ("tensor=0", "at least 1"),
        ("shard=-2", "at least 1"),
        ("pipeline=2 schedule=1f2b", "did you mean '1f1b'"),
        ("zero=4", "1, 2 or 3"),
        ("micro_batch=-1", "at least 1 sample"),
        ("recompute=some", "none, selective, full"),
        ("recompute=1.5", "from 0 to 1"),
        ("recompute=nan", "from 0 to 1"),
        ("virtual=2", "set pipeline above 1"),
        ("pipeline=2 virtual=2", "schedule=interleaved"),
        ("pipeline=2 schedule=zbv virtual=3", "exactly 2"),
        ("pipeline=2 virtual=-1", "at least 1 stage"),
        ("pipeline=2 stages=1,2,3", "lists 3 stages, but the pipeline has 2"),
        ("pipeline=2 stages=4", "lists 1 stage, but the pipeline has 2"),
        ("pipeline=2 stages=-1,3", "fewer than 0"),
    ],
)
def test_what_cannot_be_is_told_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        Layout.parse(text)
    assert str(caught.value).count("\n") == 0


# Derived facts


@given(layouts())
def test_stages_of_all_ranks_are_all_stages_once(layout: Layout) -> None:
    held = [stage for rank in range(layout.pipeline) for stage in layout.stages_of(rank)]
    assert sorted(held) == list(range(layout.stage_count))
    assert all(len(layout.stages_of(rank)) == layout.stages_per_rank for rank in range(layout.pipeline))
    assert layout.world == layout.pipeline * layout.data * layout.tensor


def test_a_loop_goes_round_and_a_v_comes_back() -> None:
    assert Layout(pipeline=4, schedule="interleaved").stages_of(1) == (1, 5)
    assert Layout(pipeline=4, schedule="zbv").stages_of(1) == (1, 6)
    assert Layout(pipeline=4, schedule="dualpipev").stages_of(3) == (3, 4)


@pytest.mark.parametrize(("text", "share"), [("none", None), ("full", None), ("0.25", 0.25), ("0", 0.0), ("1", 1.0)])
def test_keep_share(text: str, share: float | None) -> None:
    assert kept_activation_fraction(text) == share


# Batches


@given(layouts(), st.integers(1, 200))
def test_a_batch_is_served_whole_or_refused_with_one_that_can(layout: Layout, samples: int) -> None:
    try:
        batch = solve_batch(layout, samples)
    except LayoutError as error:
        assert "\n" not in str(error)
        if "The nearest valid sizes" in str(error):
            tail = str(error).rpartition(": ")[2].rstrip(".")
            for near in map(int, tail.split(" and ")):
                assert solve_batch(layout, near).samples == near
        return
    assert batch.samples == samples == layout.data * batch.micro_batch * batch.micro_batches
    assert micro_batch_error(layout, batch.micro_batches) is None
    assert layout.micro_batch in (0, batch.micro_batch)


@pytest.mark.parametrize(
    ("text", "samples", "message"),
    [
        ("shard=3", 8, "Change the layout, or the batch; the nearest valid sizes: 6 and 9."),
        (
            "shard=2 micro_batch=4",
            12,
            "6 samples are not divisible by micro_batch=4. Change the layout, or the batch; the nearest",
        ),
        (
            "pipeline=4 micro_batch=2",
            6,
            "batches as stages (4). Change the layout, or the batch; the nearest valid sizes: 8 and 10.",
        ),
        (
            "pipeline=2 schedule=dualpipev",
            3,
            "as stages (4). Change the layout, or the batch; the nearest valid sizes: 4",
        ),
        ("pipeline=2 schedule=interleaved micro_batch=1", 5, "in max(1, n // pipeline) equal rounds"),
        ("pipeline=1", 0, "at least 1"),
    ],
)
def test_batches_that_cannot_be_served(text: str, samples: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        solve_batch(Layout.parse(text), samples)
    assert message in str(caught.value)


def test_the_nearest_below_and_above_are_both_nearest() -> None:
    """No batch between the given one and those named can be served."""
    layout = Layout(pipeline=2, shard=2, schedule="interleaved", micro_batch=3)
    servable = []
    for samples in range(1, 80):
        try:
            servable.append(solve_batch(layout, samples).samples)
        except LayoutError:
            continue
    for samples in set(range(20, 60)) - set(servable):
        with pytest.raises(LayoutError) as caught:
            solve_batch(layout, samples)
        named = [int(word.rstrip(".")) for word in str(caught.value).rpartition(": ")[2].split(" and ")]
        assert named == sorted(sorted(servable, key=lambda other: (abs(other - samples), other))[:2])


def test_micro_batches_are_chosen() -> None:
    assert solve_batch(Layout(), 32) == BatchSplit(32, 32, 1)
    assert solve_batch(Layout(shard=2, micro_batch=4), 32) == BatchSplit(32, 4, 4)
    assert solve_batch(Layout(pipeline=2), 32) == BatchSplit(32, 4, 8)
    assert solve_batch(Layout(pipeline=4), 4) == BatchSplit(4, 1, 4)


# Stage balance


def uneven(costs: list[float], spans: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """The slowest stage; then how unequal all of them are."""
    stages = [sum(costs[first:last]) for first, last in spans]
    return max(stages), sum(stage**2 for stage in stages)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_balance_is_as_good_as_trying_everything(costs: list[int], count: int) -> None:
    assume(count <= len(costs))
    spans = balance(tuple(map(float, costs)), count)
    ends = [last for _, last in spans]
    assert spans == list(zip([0, *ends[:-1]], ends)) and ends[-1] == len(costs)
    assert all(first < last for first, last in spans)
    cuts = combinations(range(1, len(costs)), count - 1)
    assert uneven(costs, spans) == min(uneven(costs, zip((0, *cut), (*cut, len(costs)))) for cut in cuts)


def test_a_heavy_head_leaves_the_blocks_evenly_cut() -> None:
    assert balance((0.5, *[1.0] * 12, 40.0), 4) == [(0, 5), (5, 9), (9, 13), (13, 14)]


def test_embedding_and_head_count() -> None:
    costs = [1.0, 10.0, 10.0, 10.0, 10.0, 20.0]
    assert cut_stages(Layout(pipeline=2), costs) == [(0, 4), (4, 6)]  # three blocks, then one and the head
    assert cut_stages(Layout(pipeline=2, stages=(1, 3)), costs) == [(0, 2), (2, 6)]
    assert cut_stages(Layout(pipeline=2, stages=(0, 4)), costs) == [(0, 1), (1, 6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline=7", "use at most 6 stages"),
        ("pipeline=2 stages=2,3", "holds 5 layers, but the model has 4"),
        ("pipeline=3 stages=2,0,2", "may hold no layer"),
    ],
)
def test_stages_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        cut_stages(Layout.parse(text), [1.0] * 6)
