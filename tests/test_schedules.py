"""Pipeline schedules: simulated as PyTorch executes them, bounded in closed form, and made for uneven stages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _Action, _ComputationType

from shardwise.cluster import GIB, find_cluster
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import AUTO_SCHEDULES, FULL_BACKWARD, Layout, micro_batch_error
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.parallel.torch_pipelining import SCHEDULE_CLASSES, Pipeline, schedule_actions
from shardwise.planner.plan import auto_schedule_order, make_plan
from shardwise.schedules.simulate import Action, StageCosts, build_program, lower_bound, named_program, simulate
from shardwise.schedules.synthesize import SchedulingProblem, synthesize
from shardwise.step import backward, reduce_loss_and_norm
from shardwise.verify.parity import make_stream

SINGLE = [name for name in SCHEDULE_CLASSES if issubclass(SCHEDULE_CLASSES[name], PipelineScheduleSingle)]
MULTI = [name for name in SCHEDULE_CLASSES if name not in SINGLE]


def runs(schedule: str, ranks: int, virtual: int, count: int) -> bool:
    return micro_batch_error(Layout(pipeline=ranks, schedule=schedule, virtual=virtual), count) is None


# Schedules with a name, their ranks, stages per rank and micro-batches: few, enough, many, and no multiple.
SHAPES = [
    (schedule, ranks, virtual, count)
    for schedule, stages in {
        "gpipe": (1,), "1f1b": (1,), "interleaved": (1, 2, 3), "zero-bubble": (1, 2, 3), "zbv": (2,), "dualpipev": (2,),
    }.items()
    for virtual in stages
    for ranks in (2, 3, 4, 6)
    for count in (1, 2, 3, 4, 5, 6, 8, 9, 12, 14)
    if runs(schedule, ranks, virtual, count)
]  # fmt: skip


# The order is PyTorch's


class Recorder:
    """A stage that notes what a schedule asks of it."""

    def __init__(self, index: int, ranks: int):
        self.stage_index, self.num_stages, self.is_last, self.seen = index, ranks, index == ranks - 1, []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []  # no transfers, nothing to prepare

    def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append((self.stage_index, "F", number))

    def backward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append((self.stage_index, "B", number))


@pytest.mark.thin(5)
@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9)])
def test_order_is_executed_single(schedule: str, ranks: int, count: int) -> None:
    """By running the classes that have no list of their own to run by."""
    order = schedule_actions(schedule, ranks, 1, count)
    for rank in range(ranks):
        stage = Recorder(rank, ranks)
        running: Any = SCHEDULE_CLASSES[schedule](stage, count)  # type: ignore[operator]
        running._initialize_stage = lambda *args: None
        running._step_microbatches([()] * count, [{}] * count)
        assert stage.seen == [tuple(action)[:3] for action in order[rank]]


@pytest.mark.thin(5)
@pytest.mark.parametrize("schedule", MULTI)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12)])
def test_order_is_executed_multi(schedule: str, ranks: int, count: int) -> None:
    """By the list, with transfers, that PyTorch's runtime goes through."""
    stage = SimpleNamespace(num_stages=2 * ranks, group_size=ranks, group_rank=0, submod=None)
    running: Any = SCHEDULE_CLASSES[schedule]([stage, stage], count)  # type: ignore[operator]
    order = schedule_actions(schedule, ranks, 2, count)
    for rank, actions in running.pipeline_order_with_comms.items():
        assert [action for action in actions if action.is_compute_op] == order[rank]


@pytest.mark.parametrize("schedule", SINGLE)
def test_what_computes_nothing_is_no_part_of_an_order(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's orders hold more kinds of actions with every version; 2.15 ends GPipe's and 1F1B's with one."""
    torch_schedule: Any = SCHEDULE_CLASSES[schedule]
    order = schedule_actions(schedule, 2, 1, 4)

    class Gathering(torch_schedule):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for rank, actions in self.pipeline_order.items():
                unshard = _Action(rank, _ComputationType.UNSHARD, None)
                self.pipeline_order[rank] = [unshard, *actions, unshard]

    monkeypatch.setitem(SCHEDULE_CLASSES, schedule, Gathering)
    assert schedule_actions(schedule, 2, 1, 4) == order
    assert build_program(order).ranks == 2


# Simulated time


def even(stages: int, *times: float) -> StageCosts:
    return StageCosts(*((seconds,) * stages for seconds in times))


def uneven(random: Any, stages: int) -> StageCosts:
    return StageCosts(*(tuple(random.uniform(0.1, 2.0) for _ in range(stages)) for _ in range(3)))


def test_timeline_by_hand() -> None:
    costs = StageCosts(forward=(1.0, 2.0), backward_input=(1.0, 1.0), backward_weight=(1.0, 2.0))
    result = simulate(named_program("1f1b", 2, 1, 2), costs)
    spans = {(event.rank, event.kind, event.micro_batch): (event.start, event.end) for event in result.timeline}
    assert spans == {
        (0, "F", 0): (0.0, 1.0), (0, "F", 1): (1.0, 2.0), (1, "F", 0): (1.0, 3.0), (1, "B", 0): (3.0, 6.0),
        (0, "B", 0): (6.0, 8.0), (1, "F", 1): (6.0, 8.0), (1, "B", 1): (8.0, 11.0), (0, "B", 1): (11.0, 13.0),
    }  # fmt: skip
    assert result.seconds == 13.0


def test_pair_is_sent_together() -> None:
    """A forward inside PyTorch's overlapped pair is sent when the backward beside it is done."""
    pair = Action(-1, "OVERLAP_F_B", None, (Action(0, "F", 1), Action(0, "B", 0)))
    order = {0: [Action(0, "F", 0), pair, Action(0, "B", 1)], 1: [Action(1, k, m) for m in (0, 1) for k in "FB"]}
    costs = even(2, 1.0, 1.0, 1.0)
    starts = {event[1:4]: event.start for event in simulate(build_program(order), costs).timeline}
    assert starts["F", 0, 1] == 1.0 and starts["B", 0, 0] == 4.0 and starts["F", 1, 1] == 6.0
    apart = build_program(build_program(order).order)
    assert simulate(apart, costs).seconds < simulate(build_program(order), costs).seconds


@settings(max_examples=20)
@given(st.sampled_from(SHAPES), st.randoms(use_true_random=False))
def test_nothing_runs_too_early(shape: tuple[str, int, int, int], random: Any) -> None:
    schedule, ranks, virtual, count = shape
    program, costs = named_program(*shape), uneven(random, ranks * virtual)
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * ranks
    for event in simulate(program, costs).timeline:
        assert event.start >= free[event.rank]
        free[event.rank] = event.end
        ends[event.kind, event.stage, event.micro_batch] = event.end
    for (kind, stage, number), end in ends.items():
        near = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= near < ranks * virtual:
            continue
        before = ends.get((kind, near, number)) or ends.get(("I", near, number)) or ends["B", near, number]
        own = {"F": costs.forward, "I": costs.backward_input}.get(kind)
        seconds = own[stage] if own else costs.backward_input[stage] + costs.backward_weight[stage]
        assert end - seconds >= before - 1e-9


def test_live_activations() -> None:
    assert named_program("gpipe", 3, 1, 5).peak_memory([1.0] * 3) == (5.0, 5.0, 5.0)
    assert named_program("1f1b", 4, 1, 8).peak_memory([1.0] * 4) == (4.0, 3.0, 2.0, 1.0)
    zero_bubble = named_program("zero-bubble", 4, 1, 8)
    assert zero_bubble.peak_memory([1.0] * 4) == (4.0, 4.0, 4.0, 4.0)
    assert zero_bubble.peak_memory([1.0] * 4, retained_fraction=0.0) == (4.0, 3.0, 2.0, 1.0)
    by_stage = [named_program("zbv", 2, 2, 4).peak_memory([float(n == stage) for n in range(4)]) for stage in range(4)]
    assert [sum(ranks) for ranks in by_stage] == [4.0, 3.0, 2.0, 1.0]
    assert named_program("zbv", 2, 2, 4).peak_memory([1.0] * 4) == (4.0, 4.0)
    with pytest.raises(LayoutError, match="the pipeline order deadlocks"):
        build_program({0: [Action(0, "B", 0), Action(0, "F", 0)]})


# The bound

TIMES = st.floats(0.1, 3.0)


@settings(max_examples=80)
@given(st.sampled_from(SHAPES), TIMES, TIMES, TIMES)
def test_bound_of_even_stages(shape: Any, forward: float, input: float, weight: float) -> None:
    costs = even(shape[1] * shape[2], forward, input, weight)
    seconds, least = simulate(named_program(*shape), costs).seconds, lower_bound(*shape, costs)
    assert least <= seconds * (1 + 1e-9)
    if shape[0] in FULL_BACKWARD and shape[3] >= shape[1]:
        assert least == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=80)
@given(st.sampled_from(SHAPES), st.randoms(use_true_random=False))
def test_bound_of_uneven_stages(shape: Any, random: Any) -> None:
    costs = uneven(random, shape[1] * shape[2])
    seconds, least = simulate(named_program(*shape), costs).seconds, lower_bound(*shape, costs)
    assert 0.4 * seconds <= least <= seconds * (1 + 1e-9)


# Made for uneven stages


NAMED = {1: ("gpipe", "1f1b", "zero-bubble"), 2: ("interleaved", "zero-bubble"), "v": ("zbv", "dualpipev")}


def named_seconds(task: SchedulingProblem) -> list[float]:
    """The times of the schedules with a name that fit."""
    names = NAMED["v" if task.is_v_shaped else task.virtual]
    shapes = [(name, task.ranks, task.virtual, task.micro_batches) for name in names]
    programs = [named_program(*shape) for shape in shapes if runs(*shape)]
    return [simulate(program, task.costs).seconds for program in programs if task.fits(program)]


@settings(max_examples=12)
@given(
    st.sampled_from([(2, 1, 3), (3, 1, 4), (4, 1, 8), (2, 2, 4), (3, 2, 6)]), st.randoms(use_true_random=False),
    st.sampled_from([1.0, 2.5, 100.0]), st.booleans(),
)  # fmt: skip
def test_synthesis(shape: tuple[int, int, int], random: Any, room: float, is_v: bool) -> None:
    ranks, virtual, count = shape
    sizes = tuple(random.uniform(0.5, 1.5) for _ in range(ranks * virtual))
    limits = (room * virtual * 1.5,) * ranks
    task = SchedulingProblem(
        uneven(random, ranks * virtual), ranks, count, sizes, limits, is_v_shaped=is_v and virtual == 2
    )
    made = synthesize(task, effort=2000)
    assert all(made.seconds <= seconds * (1 + 1e-9) for seconds in named_seconds(task))
    assert all(peak <= limit * (1 + 1e-6) for peak, limit in zip(made.program.peak_memory(sizes), limits))
    assert {action.kind for actions in made.program.order.values() for action in actions} <= {"F", "I", "W", "B"}
    assert made.program.order == synthesize(task, effort=2000).program.order


def test_synthesis_gains() -> None:
    """Memory for 1f1b but not for zero-bubble: a split backward that needs no more memory than 1f1b is faster."""
    task = SchedulingProblem(even(4, 1.0, 1.2, 0.8), 4, 8, memory_limits=(4.0, 3.0, 3.0, 3.0))
    made = synthesize(task, effort=10_000)
    assert made.seconds < 0.9 * min(named_seconds(task))


def test_synthesis_without_room() -> None:
    with pytest.raises(LayoutError, match="use a smaller micro-batch"):
        synthesize(SchedulingProblem(even(2, 1.0, 1.0, 1.0), 2, 4, memory_limits=(1.0, 0.5)))


# Through the runtime


def small(samples: int) -> Job:
    shape = {"layers": 2, "width": 16, "heads": 2, "head_dim": 4, "vocab": 32, "sequence": 8, "dropout": 0.1}
    return make_job({"precision": "float64", "seed": 1, "model": shape, "batch": {"samples": samples}})


def gradients(engine: Engine, job: Job) -> list[torch.Tensor]:
    """Of one batch; the loss first."""
    outcome = reduce_loss_and_norm(
        engine, backward(engine, make_stream(job).read(rank_positions(0, job.samples, 1, 0)))
    )
    found = [outcome.loss, *(param_shard.grad.clone() for param_shard in engine.param_shards)]
    engine.data.sync_weights()
    return found


def compare(job: Job, layout: Layout, order: dict[int, list[Action]]) -> float:
    """The largest error of the order against the layout's own schedule, on this rank."""
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    expected = gradients(engine, job)
    size, length = engine.batch.micro_batch, job.model.sequence
    engine.pipeline = Pipeline(
        engine.data.modules, layout, engine.mesh, engine.batch.micro_batches,
        torch.empty(size, length, dtype=torch.long, device="meta"), (size, length, job.model.width), torch.float64,
        order=order,
    )  # fmt: skip
    for _ in range(2):
        found = gradients(engine, job)
    typical = max(float(tensor.norm()) for tensor in expected)
    return max(float((a - b).norm()) / typical for a, b in zip(found, expected, strict=True))


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(("schedule", "ranks", "virtual"), [("1f1b", 2, 1), ("1f1b", 4, 1), ("zbv", 2, 2)])
def test_runtime_runs_it(schedule: str, ranks: int, virtual: int) -> None:
    stages, count = ranks * virtual, 6
    costs = StageCosts((0.7, *(1.0,) * (stages - 2), 1.3), (0.8, *(1.1,) * (stages - 2), 1.2), (0.5,) * stages)
    task = SchedulingProblem(costs.as_executed(), ranks, count, is_v_shaped=schedule == "zbv")
    made = synthesize(task, effort=5000).program
    assert simulate(made, task.costs).seconds < min(named_seconds(task))
    assert {action.kind for actions in made.order.values() for action in actions} >= {"F", "I", "W"}
    torch_order: Any = schedule_actions(schedule, ranks, virtual, count)
    layout = Layout(pipeline=ranks, schedule=schedule, micro_batch=1)
    assert {rank: {a.stage for a in made.order[rank]} for rank in range(ranks)} == {
        rank: {a.stage_index for a in torch_order[rank]} for rank in range(ranks)
    }
    assert max(run_world(compare, ranks, small(count), layout, made.order)) <= 1e-10


def test_a_layout_with_an_order_of_its_own() -> None:
    """Beside every schedule with a name that fits, in the very memory model that says so."""
    model = {"layers": 11, "width": 1024, "heads": 16, "vocab": 100_000, "sequence": 4096}
    job = make_job({"precision": "bf16", "model": model, "batch": {"samples": 8}})
    cluster, limit = find_cluster("v100-16g"), 8.15 * GIB
    cluster = replace(cluster, device=replace(cluster.device, memory=limit))
    plan = make_plan(job, cluster, layout="pipeline=4 schedule=auto micro_batch=1")
    named = [one for one in plan.layouts if one.layout.schedule not in AUTO_SCHEDULES]
    assert len(named) == 5 and plan.best.layout.schedule in AUTO_SCHEDULES and plan.best.layout.virtual
    assert plan.best.peak_memory <= limit < max(one.peak_memory for one in named)
    assert plan.best.seconds < min(one.seconds for one in named if one.peak_memory <= limit)
    again = make_plan(job, cluster, layout=str(plan.best.layout))
    assert again.best == plan.best
    order = auto_schedule_order(job, plan.best.layout, plan.cluster)
    assert order is not None and len(order) == 4
    assert auto_schedule_order(job, Layout.parse("pipeline=4"), plan.cluster) is None


def test_an_order_must_be_given() -> None:
    with pytest.raises(LayoutError, match="needs an `order`"):
        run_world(without_order, 2)
    mixture = make_job({"model": {"name": "mixtral-8x7b", "layers": 4}, "batch": {"samples": 64}})
    with pytest.raises(LayoutError, match="only available for dense decoders"):
        make_plan(mixture, find_cluster("h100"), layout="pipeline=4 schedule=auto")


def without_order() -> None:
    parallelize(prepare(small(4), Layout.parse("pipeline=2 schedule=auto micro_batch=1")), torch.device("cpu"))
