"""Optimizers that need whole weights, over pieces of them: against one process, against PyTorch's own, over a change of
layout, and with bugs planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.cluster import find_cluster
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.errors import JobError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.quantize import decode_blocks, encode_blocks
from shardwise.optim import muon
from shardwise.optim import sharded_optimizer as sharded
from shardwise.optim.adamw import dynamic_map
from shardwise.optim.lr_schedule import set_learning_rate
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.optim.sharded_optimizer import sum_over_shards
from shardwise.parallel.parallelize import Engine, parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.dryrun.dry_run import fake_process_group, measure_rank
from shardwise.planner.plan import make_estimator
from shardwise.step import step
from shardwise.train.checkpoint import CheckpointManager
from shardwise.verify.parity import VerifyResult, make_stream, verify

NAMES = ("lamb", "adafactor", "muon", "sgd")
# Uneven over 2 and 3 ranks: vocabulary, hidden features, heads.
DENSE = {"layers": 3, "vocab": 61, "ffn": 50, "heads": 6, "kv_heads": 3, "positions": "learned", "norm": "layer"}
GPT2 = {**DENSE, "activation": "gelu", "bias": True, "heads": 4, "kv_heads": 4}
MOE = {"name": "moe", "layers": 2, "vocab": 61, "heads": 4, "experts": 4, "experts_per_token": 2, "expert_ffn": 10}
WORLDS = [
    ("pipeline=2 shard=2 tensor=2 zero=1 micro_batch=1", 4, GPT2),
    ("shard=3 zero=3", 3, DENSE | {"tied": False}),
    ("shard=2 tensor=2 expert=2 zero=2", 4, MOE),
]


def job_of(name: str, samples: int, model: dict[str, Any], **keys: Any) -> Job:
    shape = {"width": 24, "head_dim": 4, "sequence": 8, "dropout": 0.1}
    optimizer = {"name": name, "lr": 0.01, **keys}
    values = {"precision": "float64", "model": shape | model, "batch": {"samples": samples}, "optimizer": optimizer}
    return make_job(values)


def assert_exact(record: VerifyResult) -> None:
    assert record.ok and max(record.loss, record.grad_norm, record.grad, record.weight) <= 1e-10, record.describe()


# SGD works element by element, so one world is enough.
EXACT = [("sgd", WORLDS[1]), *((name, world) for name in NAMES if name != "sgd" for world in WORLDS)]


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(("name", "world"), EXACT, ids=[f"{name} {world[0]}" for name, world in EXACT])
def test_exact(name: str, world: tuple[str, int, dict[str, Any]]) -> None:
    layout, samples, model = world
    assert_exact(*verify(job_of(name, samples, model), [Layout.parse(layout)], steps=2))


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["replicate=2 shard=2 zero=2", "pipeline=2 schedule=zbv micro_batch=1"])
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_other_axes_and_decays_by_name(name: str, layout: str) -> None:
    decays = {"embed.*": 0.3, "*.bias": 0.2, "*.norm1.*": 0.1}
    job = job_of(name, 4, GPT2, weight_decay_overrides=decays)
    assert_exact(*verify(job, [Layout.parse(layout)], steps=2))


# Bugs that must be seen


def _local(parts: Any, *_: Any) -> list[Tensor]:
    return [part.double() for part in parts]


def _total_without(*sides: int) -> Callable[..., list[Tensor]]:
    """Sums over all sides of a matrix but these."""

    def wrong(parts: Any, some: Any, over: Any) -> list[Tensor]:
        less = [[d for d in dims if d - len(piece.shape) not in sides] for piece, dims in zip(some, over)]
        return sum_over_shards(parts, some, less)

    return wrong


def _doubled(parts: Any, some: Any, over: Any) -> list[Tensor]:
    """Counts the pieces that every tensor rank has once for each of them."""
    sums = sum_over_shards(parts, some, over)
    return [whole if piece.sharded_dims else 2 * whole for whole, piece in zip(sums, some, strict=True)]


def _orthogonal(parts: Any, _: Any) -> list[Tensor]:
    return [muon.newton_schulz(part) for part in parts]


PLANTED = {
    "the norm of a piece": ("lamb", "shard=2", sharded, "sum_over_shards", _local),
    "a norm not summed over tensor ranks": ("lamb", "tensor=2", sharded, "sum_over_shards", _total_without(-1)),
    "copies counted twice": ("adafactor", "tensor=2", sharded, "sum_over_shards", _doubled),
    "column means of a piece": ("adafactor", "shard=2 zero=3", sharded, "sum_over_shards", _total_without(-2)),
    "row means of a piece": ("adafactor", "tensor=2", sharded, "sum_over_shards", _total_without(-1)),
    "a piece made orthogonal": ("muon", "shard=2", muon, "orthogonalize", _orthogonal),
    "a part made orthogonal": ("muon", "tensor=2", muon, "orthogonalize", _orthogonal),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, layout, module, function, wrong = PLANTED[bug]
    monkeypatch.setattr(module, function, wrong)
    (record,) = verify(job_of(name, 2, GPT2), [Layout.parse(layout)], steps=1)
    assert record.first_difference is not None and record.first_difference.kind == "weight", record.describe()


# Over a change of layout


def start(job: Job, text: str) -> tuple[Engine, torch.optim.Optimizer]:
    engine = parallelize(prepare(job, Layout.parse(text)), torch.device("cpu"))
    return engine, make_optimizer(job.optimizer, engine.param_shards)


def train(job: Job, engine: Engine, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    stream, data, losses = make_stream(job), engine.mesh["data"], []
    for number in range(first, last):
        set_learning_rate(optimizer, 0.01)
        samples = stream.read(rank_positions(number, job.samples, data.size, data.index))
        losses.append(float(step(engine, optimizer, samples, 1.0).loss))
    return losses


def go_on(job: Job, text: str, folder: Path, loads: bool) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Two steps, the first two of the run or the next; the state that was saved or loaded, and after them."""
    engine, optimizer = start(job, text)
    checkpoints = CheckpointManager(folder, 2, asynchronous=False)

    def states() -> list[Tensor]:
        return [v.clone() for h in engine.param_shards for _, v in sorted(optimizer.state[h.tensor].items())]

    if loads:
        assert checkpoints.load(engine, optimizer) is not None
        return train(job, engine, optimizer, 2, 4), states(), []
    train(job, engine, optimizer, 0, 2)
    checkpoints.save(2, engine, optimizer, {})
    held = states()
    return train(job, engine, optimizer, 2, 4), states(), held


@pytest.mark.thin(8)
@pytest.mark.parametrize("name", NAMES[:3])
def test_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    job = job_of(name, 6, DENSE)
    prepare(job, Layout())  # once, for all ranks
    here = run_world(go_on, 4, job, "shard=2 tensor=2 zero=3", tmp_path, False)[0]
    there = run_world(go_on, 3, job, "shard=3 zero=1", tmp_path, True)[0]
    assert there[0] == pytest.approx(here[0], rel=1e-10)


def test_8_bit_states_come_back(tmp_path: Path) -> None:
    """The same codes in the same layout; within their rounding in another."""
    job = job_of("adamw", 4, DENSE | {"width": 96, "heads": 4, "kv_heads": 2}, state_dtype="8bit")
    job = job.model_copy(update={"precision": "float32"})
    prepare(job, Layout())  # once, for all ranks
    losses, end, _ = run_world(go_on, 2, job, "shard=2 zero=2", tmp_path, False)[0]
    assert sum(state.dtype == torch.uint8 for state in end) >= 12
    again = run_world(go_on, 2, job, "shard=2 zero=2", tmp_path, True)[0]
    assert losses == again[0] and all(map(torch.equal, end, again[1]))
    other = run_world(go_on, 2, job, "tensor=2", tmp_path, True)[0]
    assert other[0] == pytest.approx(losses, rel=1e-3)


# Against PyTorch's own, in one process


@dataclass
class Part:
    """A holding, as far as an optimizer sees it."""

    name: str
    tensor: Tensor
    is_matrix: bool
    grad: Any = None
    compute_copy: Tensor | None = None
    is_compute_copy_current: bool = False
    sharded_dims: tuple[Any, ...] = ()
    replica_axis: None = None

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def decays(self) -> bool:
        return self.tensor.dim() > 1


def parts() -> list[Part]:
    make = torch.Generator().manual_seed(0)
    shapes = [("block0.up.weight", (70, 64)), ("block0.down.weight", (64, 70)), ("block0.bias", (70,))]
    return [Part(name, torch.randn(shape, generator=make), len(shape) > 1) for name, shape in shapes]


def theirs(name: str, weights: list[Tensor]) -> list[torch.optim.Optimizer]:
    groups: list[Any] = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=0.01, momentum=0.95)]
    if name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=0.01)]
    adamw = torch.optim.AdamW(groups[1:] if name == "muon" else groups, lr=0.01, betas=(0.9, 0.95))
    return [adamw, torch.optim.Muon(groups[0]["params"], 0.01, adjust_lr_fn="match_rms_adamw")][: 1 + (name == "muon")]


LIMITS = {("sgd", "float32"): 1e-5, ("adafactor", "float32"): 1e-5, ("muon", "float32"): 1e-4, ("adamw", "8bit"): 3e-2}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # this processor may know no bf16
@pytest.mark.parametrize(("name", "state_dtype"), LIMITS)
def test_takes_the_steps_of_pytorchs(name: str, state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "to_matmul_dtype", Tensor.bfloat16)  # as on a GPU, and as PyTorch's does everywhere
    ours = parts()
    truth = [part.tensor.clone() for part in ours]
    begin = [weight.clone() for weight in truth]
    for part in ours:
        part.compute_copy = part.tensor.bfloat16()
    optimizer: Any = make_optimizer(
        make_job({"optimizer": {"name": name, "lr": 0.01, "state_dtype": state_dtype}}).optimizer, ours
    )
    other = theirs(name, truth)
    make = torch.Generator().manual_seed(1)
    for number in range(8):
        skipped = number == 4
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(skipped))
        for part, weight in zip(ours, truth, strict=True):
            weight.grad = torch.randn(weight.shape, generator=make)
            part.grad = weight.grad * (float("nan") if skipped else 8.0)
        optimizer.step()
        for one in other if not skipped else ():
            one.step()
    for part, weight, first in zip(ours, truth, begin, strict=True):
        assert float((part.tensor - weight).norm() / (weight - first).norm()) < LIMITS[name, state_dtype]
        assert part.is_compute_copy_current and torch.equal(part.compute_copy, part.tensor.bfloat16())


@pytest.mark.parametrize("name", [*NAMES, "adamw"])
def test_does_nothing_where_the_norm_is_not_finite(name: str) -> None:
    pieces_ = parts()
    states = "8bit" if name == "adamw" else "float32"
    optimizer: Any = make_optimizer(make_job({"optimizer": {"name": name, "state_dtype": states}}).optimizer, pieces_)

    def take(grad: float, skip: float) -> list[Tensor]:
        optimizer.found_inf = torch.tensor(skip)
        for part in pieces_:
            part.grad = part.tensor.grad = torch.full_like(part.tensor, grad)
        optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        return [value.clone() for value in [*kept, *(part.tensor for part in pieces_)]]

    before = take(1.0, 0.0)
    assert all(map(torch.equal, before, take(float("inf"), 1.0)))
    assert not all(map(torch.equal, before, take(1.0, 0.0)))


def test_8_bits_rounded_again_stay() -> None:
    wide = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 700)
    for values, signed in ((wide, True), (wide.square(), False)):
        table = torch.tensor(dynamic_map(signed))
        assert len(table.unique()) == 256
        codes, scale = encode_blocks(values, table, 256)
        back = decode_blocks(codes, scale, table, 256)
        again = encode_blocks(back, table, 256)
        assert torch.equal(codes, again[0]) and torch.equal(scale, again[1]) and scale.shape == (5, 3)
        assert float((back - values).norm() / values.norm()) < 0.02


def test_work_goes_to_who_has_least() -> None:
    assert muon._balance_by_cost([5, 1, 1, 1, 4], 2) == [[0, 2], [4, 1, 3]]
    axis = replace(_Axis(), size=3)
    assert muon._split_sizes(7, [(0, axis)]) == [3, 3, 1] and muon._split_sizes(4, [(0, axis)]) == [2, 2, 0]


@dataclass(frozen=True)
class _Axis:
    size: int = 1
    index: int = 0
    group: None = None


def planned() -> dict[str, tuple[float, float]]:
    """By optimizer: bytes of its states in a dry run, and as the planner has them, over those of AdamW."""
    layout, found = Layout.parse("shard=2 tensor=2 micro_batch=1"), {}
    model = {"layers": 1, "width": 256, "heads": 4, "vocab": 512, "sequence": 16}
    for text in ("adamw float32", "adamw 8bit", "adafactor float32", "muon float32"):
        name, states = text.split()
        optimizer = {"name": name, "state_dtype": states}
        job = make_job({"model": model, "batch": {"samples": 4}, "optimizer": optimizer})
        with fake_process_group(layout.world, 0):
            held = measure_rank(job, layout).memory["optimizer"]
        found[text] = float(held), make_estimator(job, find_cluster("cpu")).memory(layout, 0).optimizer
    return found


def test_states_are_as_large_as_planned() -> None:
    found = run_world(planned, 1)[0]
    all_of_them = found["adamw float32"][0]
    for text, (held, expected) in found.items():
        assert abs(held - expected) < 0.1 * all_of_them, text
        assert held < 0.7 * all_of_them or text == "adamw float32"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"optimizer": {"name": "lamb", "state_dtype": "bf16"}}, "state_dtype = 'bf16' works with adamw only"),
        ({"optimizer": {"name": "muon"}, "model": {"name": "resnet"}}, "'muon' needs matrices of transformer blocks"),
        ({"optimizer": {"name": "sgd"}, "model": {"mup_base_width": 64}}, "mup_base_width works with adamw only"),
        ({"optimizer": {"weight_decay_overrides": {"embed.*": -1.0}}}, "optimizer.weight_decay_overrides.embed"),
        ({"optimizer": {"name": "adam"}}, "optimizer.name = 'adam'"),
    ],
)
def test_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(JobError, match=word):
        make_job(values)
