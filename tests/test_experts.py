"""Mixtures of experts: against a plain loop over tokens, in every kind of layout, and with an expert nobody uses."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pairwise import Case, cover
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise.step as step_file
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.errors import LayoutError
from shardwise.job import Job, OptimizerConfig, make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.gpt import build_gpt
from shardwise.models.gpt_family import MoEConfig
from shardwise.models.moe import MoE, load_balancing_loss
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel import data_parallel, expert
from shardwise.parallel import parallelize as road
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import forward_flops, prepare
from shardwise.planner.dryrun.dry_run import fake_process_group, measure_rank
from shardwise.step import step
from shardwise.train.checkpoint import CheckpointManager
from shardwise.verify import parity
from shardwise.verify.parity import make_stream, verify

SHAPE = {
    "name": "moe", "layers": 3, "dense_layers": 1, "width": 16, "heads": 2, "vocab": 61, "sequence": 8, "experts": 5,
    "experts_per_token": 2, "expert_ffn": 24, "shared_expert_ffn": 8,
}  # fmt: skip


def small(samples: int = 8, **more: Any) -> Job:
    return make_job({"precision": "float64", "model": SHAPE | more, "batch": {"samples": samples}})


def experts(**more: Any) -> MoE:
    chain = build_gpt(small(**more).model, 0).double()
    init_weights(chain, 0)
    return next(module for module in chain.modules() if isinstance(module, MoE))


def one_by_one(module: MoE, x: torch.Tensor) -> torch.Tensor:
    """Each token through its experts, as a person would write it."""
    rows = []
    for token in x.flatten(0, 1):
        likely = (module.router @ token).softmax(0)
        best = likely.argsort(descending=True)[: module.top_k]
        total = torch.zeros_like(token)
        for one in best.tolist():
            hidden = module.bank.up[one] @ token
            if module.bank.gate is None:
                hidden = F.gelu(hidden, approximate="tanh")
            else:
                hidden = F.silu(module.bank.gate[one] @ token) * hidden
            total = total + likely[one] / likely[best].sum() * (module.bank.down[one] @ hidden)
        rows.append(total if module.shared is None else total + module.shared(token))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("more", [{}, {"activation": "gelu", "shared_expert_ffn": 0}, {"experts_per_token": 1}])
def test_it_is_what_one_token_at_a_time_gives(more: dict[str, Any]) -> None:
    module = experts(**more)
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    ours, right = module(x), one_by_one(module, x)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)
    weights = [x, *module.parameters()]
    for found, expected in zip(
        torch.autograd.grad(ours.square().sum(), weights),
        torch.autograd.grad(right.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_an_expert_that_nobody_uses() -> None:
    module = experts(router_aux_loss_coef=0.0)
    with torch.no_grad():
        module.router[3] = -100.0 * torch.ones(16, dtype=torch.float64)
    x = torch.rand(2, 8, 16, dtype=torch.float64)  # above zero, so the third is the last choice of all
    module(x).sum().backward()
    assert (
        module.bank.up.grad is not None
        and not bool(module.bank.up.grad[3].any())
        and bool(module.bank.up.grad[0].any())
    )


def test_balance_is_one_where_all_are_used_alike() -> None:
    likely = torch.full((12, 4), 0.25, dtype=torch.float64)
    chosen = torch.arange(24).view(12, 2) % 4
    assert float(load_balancing_loss(likely, chosen, 3)) == pytest.approx(3.0)
    assert float(load_balancing_loss(likely.roll(1, 0), torch.zeros(12, 2, dtype=torch.int64), 3)) == pytest.approx(3.0)
    skewed = torch.eye(4, dtype=torch.float64)[torch.zeros(12, dtype=torch.int64)]
    assert float(load_balancing_loss(skewed, torch.zeros(12, 2, dtype=torch.int64), 3)) == pytest.approx(12.0)


LAYOUTS = [
    "replicate=2", "shard=3 zero=3 micro_batch=1", "tensor=2 shard=2 zero=1", "pipeline=2 tensor=2 micro_batch=1",
    "pipeline=2 schedule=zbv recompute=full micro_batch=1", "pipeline=3 schedule=1f1b shard=2 zero=2 micro_batch=1",
]  # fmt: skip


CUT = [
    "shard=2 expert=2", "shard=4 expert=2 zero=2 micro_batch=1", "replicate=2 shard=2 expert=2 zero=3",
    "tensor=2 shard=2 expert=4", "tensor=2 expert=2 micro_batch=1", "context=2 tensor=2 expert=4",
    "pipeline=2 tensor=2 shard=2 expert=2 zero=3 recompute=full micro_batch=1",
    "pipeline=2 schedule=zbv shard=2 expert=2 micro_batch=1",
    "pipeline=2 schedule=zbv shard=4 expert=2 zero=3 micro_batch=1",
]  # fmt: skip


@pytest.mark.thin(4)
@pytest.mark.parametrize("text", CUT)
def test_experts_on_other_ranks_compute_what_one_process_computes(text: str) -> None:
    layout = Layout.parse(text)
    (record,) = verify(small(2 * layout.data, experts=4, tied="tensor" in text), [layout], steps=2)
    assert record.ok, record.describe()


CUT_LAYOUT = {
    "pipeline": ("", "1f1b", "zero-bubble", "zbv"), "shard": (1, 2, 4), "context": (1, 2), "tensor": (1, 2),
    "expert": (2, 4), "zero": (1, 2, 3), "recompute": ("none", "selective", "full", "0.5"),
}  # fmt: skip


MODEL_OF_FOUR = small(experts=4).model


@cache
def _cut_layout(*values: Any) -> Layout | None:
    case = dict(zip(CUT_LAYOUT, values))
    order = {"pipeline": 2, "schedule": case["pipeline"]} if case["pipeline"] else {}
    layout = Layout(**{key: case[key] for key in CUT_LAYOUT if key != "pipeline"} | {"micro_batch": 1} | order)
    if layout.world > 8 or (layout.zero > 1 and layout.shard == 1):
        return None
    with suppress(LayoutError):
        expert.check(MODEL_OF_FOUR, layout)
        return layout
    return None


def cut_layout(case: Case) -> Layout | None:
    """The layout of a case; None where its experts do not fit on its ranks, or one of its words would mean nothing."""
    return _cut_layout(*(case[key] for key in CUT_LAYOUT))


CUT_CASES = cover([[dict(zip(CUT_LAYOUT, values)) for values in product(*CUT_LAYOUT.values())]],
                  lambda case: cut_layout(case) is not None, lambda case: 1.0)  # fmt: skip
_cut_layout.cache_clear()  # every trace of a model looks through the results that cached functions hold


@pytest.mark.thin(12)
@pytest.mark.parametrize("case", CUT_CASES, ids=lambda case: str(cut_layout(case)))
def test_pairs_with_cut_experts(case: Case) -> None:
    """Where FSDP gathers the experts' weights inside of a block that is recomputed, among them."""
    layout = cut_layout(case)
    assert layout is not None
    (record,) = verify(small(2 * layout.data, experts=4, tied=layout.tensor > 1), [layout], steps=2)
    assert record.ok, record.describe()


FEWER = ["shard=4 zero=1", "shard=4 zero=2", "shard=4 expert=2 zero=1", "shard=4 expert=2 zero=3 micro_batch=1",
         "shard=3 zero=3", "tensor=2 shard=4 zero=3"]  # fmt: skip


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("text", FEWER)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fewer_experts_than_ranks(text: str, optimizer: str) -> None:
    """Two experts: the ranks shard another dimension of their weights, evenly, unless none divides (24 by 3 does)."""
    layout = Layout.parse(text)
    job = small(2 * layout.data, experts=2).model_copy(update={"optimizer": OptimizerConfig(name=optimizer)})
    (record,) = verify(job, [layout], steps=2)
    assert record.ok, record.describe()
    for found in run_world(expert_shares, layout.world, job, layout):
        assert found and set(found) == {layout.world}


def expert_shares(job: Job, layout: Layout) -> list[float]:
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    return [shard.shape.numel() / shard.tensor.numel() for shard in engine.param_shards if ".bank." in shard.name]


def test_weights_gathered_in_some_recomputations_only() -> None:
    (record,) = verify(small(experts=4), [Layout.parse("shard=2 expert=2 zero=3 recompute=selective")])
    assert record.ok, record.describe()


@pytest.mark.thin(4)
@pytest.mark.parametrize("text", LAYOUTS)
def test_layouts_compute_what_one_process_computes(text: str) -> None:
    layout = Layout.parse(text)
    (record,) = verify(small(4 * layout.data, tied="tensor" in text, router_z_loss_coef=0.01), [layout], steps=2)
    assert record.ok, record.describe()


def test_a_balance_loss_of_every_tensor_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each tensor rank adds the whole of it."""
    right = road.configure_modules

    def whole(*args: Any, **keys: Any) -> None:
        weigh = keys.pop("aux_loss_scale")
        right(*args, **keys, aux_loss_scale=lambda: 2 * weigh())

    monkeypatch.setattr(road, "configure_modules", whole)
    (record,) = verify(small(), [Layout.parse("tensor=2")], steps=2)
    first = record.first_difference
    assert first is not None and first.kind == "gradient" and "router" in first.name, record.describe()
    assert parity.TOLERANCE["float64"] == 1e-10


def test_a_dry_run_and_its_costs() -> None:
    with fake_process_group(2, 0):
        report = measure_rank(small(2, layers=1, dense_layers=0), Layout.parse("shard=2 zero=3"))
    assert report.total > 0
    for zero in (1, 3):
        with fake_process_group(4, 0):
            job = small(8, experts=4, layers=2, dense_layers=0)
            report = measure_rank(job, Layout.parse(f"shard=4 expert=2 zero={zero} micro_batch=1"))
        sent = {(entry.axis, entry.kind): entry.bytes for entry in report.traffic}
        # Two layers, two micro-batches of 8 tokens of which each goes to two experts, there and back, and their
        # gradients; and how many rows there are.
        assert sent["expert", "all-to-all"] == 2 * 2 * (4 * 8 * 2 * 16 * 8 + 4 * 8)
        # Half of the experts' gradients of two layers: up, gate and down of 2 experts.
        times = 1 if zero == 1 else 2
        assert sent["expert_replicas", "reduce-scatter"] == times * 2 * 3 * 2 * 24 * 16 * 8
    model = small().model
    sparse, plain = forward_flops(model)[2], forward_flops(model)[1]
    assert sparse != plain
    assert isinstance(model, MoEConfig)
    router = 2.0 * 8 * 16 * model.experts
    assert sparse - plain == 2.0 * 8 * 16 * 3 * (2 * 24 + 8 - model.ffn) + router


def test_what_does_not_divide_is_told() -> None:
    for text, words in {
        "shard=2 expert=2": "5 experts are not divisible by 2 ranks; use expert=1",
        "shard=3 expert=5": "tensor is 3 x 1 x 1; use shard=5",
    }.items():
        with pytest.raises(LayoutError, match=words):
            prepare(small(15), Layout.parse(text))
    with pytest.raises(LayoutError, match="'gpt' has no experts"):
        prepare(make_job({}), Layout.parse("shard=2 expert=2"))


# Checkpoints, and what may go wrong

RING = [
    "pipeline=1", "shard=2 expert=2", "shard=4 expert=2 zero=3", "tensor=2",
    "pipeline=2 shard=2 expert=2 micro_batch=1",
]  # fmt: skip


def losses_over_a_change(folder: Path, before: str, after: str, experts: int = 4) -> tuple[list[float], list[float]]:
    """Losses of steps 3 and 4 in the layout that saved the first two, and in the one that loaded them."""
    found = []
    for text, source in ((before, True), (after, False)):
        layout = Layout.parse(text)
        job = small(8, experts=experts)
        prepare(job, layout)  # once, for all ranks
        found.append(run_world(go_on, layout.world, folder, job, layout, source)[0])
    return found[0], found[1]


def go_on(folder: Path, job: Job, layout: Layout, source: bool) -> list[float]:
    """Losses of steps 3 and 4: after two steps of our own, which are saved, or after those of another layout."""
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    stream, ranks, checkpoints = make_stream(job), engine.mesh["data"], CheckpointManager(folder, 2, asynchronous=False)

    def train(numbers: range) -> list[float]:
        shares = (rank_positions(number, job.samples, ranks.size, ranks.index) for number in numbers)
        return [float(step(engine, optimizer, stream.read(each), 1.0).loss) for each in shares]

    if source:
        train(range(2))
        checkpoints.save(2, engine, optimizer, {})
        checkpoints.finish()
    else:
        assert checkpoints.load(engine, optimizer) is not None
    return train(range(2, 4))


@pytest.mark.thin(8)
@pytest.mark.parametrize("place", range(len(RING)))
def test_a_checkpoint_of_one_cut_loads_into_another(tmp_path: Path, place: int) -> None:
    saved, loaded = losses_over_a_change(tmp_path, RING[place - 1], RING[place])
    assert loaded == pytest.approx(saved, rel=1e-10, abs=0)


@pytest.mark.parametrize(("before", "after"), [("shard=4 expert=2 zero=3", "shard=4 zero=1"),
                                               ("shard=4 zero=1", "shard=2 zero=3")])  # fmt: skip
def test_so_does_one_of_fewer_experts_than_ranks(tmp_path: Path, before: str, after: str) -> None:
    saved, loaded = losses_over_a_change(tmp_path, before, after, experts=2)
    assert loaded == pytest.approx(saved, rel=1e-10, abs=0)


def gradients_of_other_experts_added(patch: pytest.MonkeyPatch) -> None:
    """Summed over the ranks that hold different experts, not over those that hold the same."""

    def crooked(self: data_parallel.Zero1) -> None:
        for axis, replicas, pairs in self.reduction_groups():
            self._reduce_pairs(self.mesh["expert"] if pairs[0][1].is_expert else axis, replicas, pairs)

    patch.setattr(data_parallel.Zero1, "sum_gradients", torch.no_grad()(crooked))


def experts_left_out_of_the_norm(patch: pytest.MonkeyPatch) -> None:
    right = step_file.reduce_loss_and_norm

    def without(engine: Any, loss: torch.Tensor) -> Any:
        dense = [param_shard for param_shard in engine.param_shards if not param_shard.is_expert]
        return right(dataclasses.replace(engine, param_shards=dense), loss)

    patch.setattr(step_file, "reduce_loss_and_norm", without)


def tokens_that_come_back_out_of_order(patch: pytest.MonkeyPatch) -> None:
    right = expert.TokenDispatcher.combine

    def crooked(self: Any, rows: torch.Tensor, state: Any) -> torch.Tensor:
        return right(self, rows, (state[0], state[0], *state[2:]))

    patch.setattr(expert.TokenDispatcher, "combine", crooked)


PLANTED = {
    experts_left_out_of_the_norm: ("shard=2 expert=2", "grad_norm"),
    tokens_that_come_back_out_of_order: ("shard=2 expert=2", "output"),
    gradients_of_other_experts_added: ("shard=4 expert=2 micro_batch=1", "gradient"),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, kind = PLANTED[plant]
    plant(monkeypatch)
    (record,) = verify(small(8, experts=4), [Layout.parse(text)], steps=2)
    assert not record.ok and record.failure is None, record.describe()
    first = record.first_difference
    assert first is not None and first.kind == kind, record.describe()


class Routing(NamedTuple):
    imbalance: float
    dropped_tokens: float
    sent: float
    waited: float
    expert_load: list[float]


CAPACITIES = (0.0, 0.75)


def loads_of(text: str) -> list[list[Routing]]:
    """By capacity."""
    return [load_of(text, capacity) for capacity in CAPACITIES]


def load_of(text: str, capacity: float) -> list[Routing]:
    """Of two steps; nothing has run since the second."""
    job = job_of_capacity(capacity)
    engine = parallelize(prepare(job, Layout.parse(text)), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    ranks, model, found = engine.mesh["data"], job.model, []
    assert isinstance(model, MoEConfig)
    for number in range(3):
        if number < 2:
            step(engine, optimizer, make_stream(job).read(rank_positions(number, 8, ranks.size, ranks.index)), 1.0)
        sent, waited = (counts.get("expert", 0.0) for counts in (engine.timer.bytes_sent, engine.timer.wait_seconds))
        engine.timer.bytes_sent.clear()
        engine.timer.begin_step()
        told = expert.routing_stats(model, engine.chains, engine.mesh["world"], torch.device("cpu"), sent, waited)
        found.append(Routing(*told.tolist()[:4], told.tolist()[4:]))
    return found


def job_of_capacity(capacity: float) -> Job:
    return small(8, experts=4, capacity_factor=capacity)


def test_the_load_of_experts_is_that_of_all_ranks() -> None:
    for capacity in CAPACITIES:
        forward_flops(job_of_capacity(capacity).model)  # once, for all ranks
    (alone,) = run_world(loads_of, 1, "micro_batch=2")
    for capacity, steps in zip(CAPACITIES, alone, strict=True):
        assert all(1.0 <= one.imbalance < 4.0 and sum(one.expert_load) == pytest.approx(1) for one in steps[:2])
        assert steps[2].imbalance == 0.0 and all((one.dropped_tokens > 0) == (capacity > 0) for one in steps[:2])
    for text in ("shard=2 expert=2", "pipeline=2 tensor=2 micro_batch=2 recompute=full"):
        for of_rank in run_world(loads_of, Layout.parse(text).world, text):
            for found, steps in zip(of_rank, alone, strict=True):
                for one, other in zip(found, steps, strict=True):
                    assert [one.imbalance, *one.expert_load] == pytest.approx([other.imbalance, *other.expert_load])
                    assert one.dropped_tokens == pytest.approx(other.dropped_tokens)
                # Whole rows of 16 numbers, there and back, in the forward and in the backward.
                row = 4 * 16 * 8
                assert all((one.sent > 0) == ("expert" in text) and one.sent % row == 0 for one in found[:2])
                assert found[2].sent == 0


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # what it wraps comes by itself
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_of(job: Job, layout: Layout) -> set[str]:
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    ranks = engine.mesh["data"]
    with Operators() as seen:
        step(engine, optimizer, make_stream(job).read(rank_positions(0, job.samples, ranks.size, ranks.index)), 1.0)
    return seen.names


@pytest.mark.parametrize("text", ["tensor=2 recompute=selective", "pipeline=2 tensor=2 micro_batch=1 recompute=full",
                                  "shard=2 expert=2 zero=3", "context=2"])  # fmt: skip
def test_no_gather_is_gloos_coalesced_one(text: str) -> None:
    """Two of them in flight corrupt its memory: a crash now and then, under load, that no repetition shows."""
    job, layout = small(4, experts=4), Layout.parse(text)
    prepare(job, layout)  # once, for all ranks
    for names in run_world(operators_of, layout.world, job, layout):
        assert ("all_gather_into_tensor_out" in names) == ("tensor" in text)
        assert not names & {"all_gather_into_tensor", "allgather_into_tensor_coalesced_", "allgather_coalesced_"}
