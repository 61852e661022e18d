"""Sharded embedding tables and the DLRM: against one process with torch.nn.EmbeddingBag, in every cut; planted bugs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.comm.world import run_world
from shardwise.data.criteo import ClickBatch, CriteoClicks, SyntheticClicks, index_criteo_file
from shardwise.data.input_files import DataFile
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.errors import DataError, JobError, LayoutError
from shardwise.job import Job, load_job, make_job
from shardwise.layout import Layout
from shardwise.models.dlrm import DenseDLRM, DotInteraction
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.optim import sparse
from shardwise.parallel.mesh import SINGLE_RANK, Mesh
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.parallel.tables import sharded_tables, table_engine
from shardwise.parallel.tables.sharded_tables import (
    Bags,
    HotRowCache,
    ShardedTables,
    TableShard,
    TableSpec,
    most_frequent_ids,
    place_tables,
)
from shardwise.parallel.tables.table_engine import check_host_memory
from shardwise.step import step
from shardwise.train.checkpoint import CheckpointManager
from shardwise.verify.parity import make_stream, verify

ROOT = Path(__file__).parent.parent
SHAPE = {
    "name": "dlrm",
    "tables": 5,
    "rows": 23,
    "width": 8,
    "lookups": 3,
    "dense_features": 4,
    "bottom": [7],
    "top": [9, 5],
}


def small(samples: int = 24, settings: dict[str, Any] | None = None, **more: Any) -> Job:
    return make_job(
        {
            "precision": "float64", "model": SHAPE | more, "batch": {"samples": samples},
            "data": {"source": "synthetic"}, "embedding_tables": settings or {}, "optimizer": {"clip": 0.5},
        }
    )  # fmt: skip


def prove(job: Job, *layouts: str, steps: int = 2) -> None:
    for record in verify(job, [Layout.parse(text) for text in layouts], steps=steps):
        assert record.ok, record.describe()
        assert max(record.loss, record.grad_norm, record.grad, record.weight) <= 1e-10


@pytest.fixture(autouse=True)
def few_samples_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are used most is read off a few epochs of these small logs, instead of hundreds."""
    monkeypatch.setattr(table_engine, "HOT_ROW_SAMPLES", 96)


# Where rows live


MIX = [
    TableSpec("large", 1000, 8, 1.0),
    *(TableSpec(f"t{i}", 50 + i, 8, 1.0) for i in range(6)),
    TableSpec("hot", 10, 8, 40.0),
]


@pytest.mark.parametrize("way", sharded_tables.SHARDING_TYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_every_number_lives_once(way: str, ranks: int) -> None:
    shards = place_tables(MIX, ranks, way)
    assert shards == sorted(shards) and all(0 <= shard.rank < ranks for shard in shards)
    for number, table in enumerate(MIX):
        held = torch.zeros(table.rows, table.width)
        pieces = [shard for shard in shards if shard.table == number]
        for shard in pieces:
            held[shard.rows[0] : shard.rows[1]] += 1
        assert bool((held == 1).all())
        assert len({shard.rank for shard in pieces}) == len(pieces), "a rank has one piece of a table"


def test_the_mix_cuts_what_is_large_or_hot() -> None:
    shards = place_tables(MIX, 4)
    assert all(len([s for s in shards if s.table == number]) > 1 for number in (0, len(MIX) - 1))
    assert all(len([s for s in shards if s.table == number]) == 1 for number in range(1, 7))
    sizes = [sum(shard.num_rows for shard in shards if shard.rank == rank) for rank in range(4)]
    assert max(sizes) <= 1.3 * sum(sizes) / 4


def test_equal_tables_are_dealt_evenly() -> None:
    shards = place_tables([TableSpec(f"t{i}", 100, 4) for i in range(26)], 8)
    held = [sum(shard.num_rows for shard in shards if shard.rank == rank) for rank in range(8)]
    assert max(held) - min(held) <= 100 and len(shards) == 26


# One process


def test_bags_are_weighted_sums_with_empty_ones_zero() -> None:
    table = [TableSpec("a", 7, 3), TableSpec("b", 5, 3)]
    tables = ShardedTables(table, place_tables(table, 1), SINGLE_RANK, torch.float64)
    tables.init_weights(0)
    ids = torch.tensor([[[1, 1, -1], [-1, -1, -1]], [[6, -1, 0], [4, 2, 4]]])
    weights = torch.tensor([[[0.5, 2.0, 9.0], [9.0, 9.0, 9.0]], [[1.0, 9.0, 3.0], [1.0, -1.0, 0.25]]])
    route = tables.route(Bags.from_padded(ids, weights), torch.arange(2))
    found = sharded_tables.sum_bags(tables.fetch(route), route.inverse_indices, route.offsets, route.weights).view(
        2, 2, 3
    )
    a, b = tables.storage[:7], tables.storage[7:]
    expected = [[2.5 * a[1], torch.zeros(3)], [a[6] + 3 * a[0], 1.25 * b[4] - b[2]]]
    for sample in range(2):
        for number in range(2):
            torch.testing.assert_close(found[sample, number], expected[sample][number].double())
    assert len(route.positions) == 5


@pytest.mark.parametrize("wrong", [7, -2])
def test_an_id_outside_of_its_table_is_told_with_sample_and_field(wrong: int) -> None:
    table = [TableSpec("user", 7, 3), TableSpec("item", 5, 3)]
    tables = ShardedTables(table, place_tables(table, 1), SINGLE_RANK, torch.float64)
    ids = torch.tensor([[[6], [4]], [[wrong], [0]]])
    with pytest.raises(DataError, match=rf"^sample 41, user: id {wrong} is outside of its table, .* rows 0 to 6;"):
        tables.route(Bags.from_padded(ids, torch.ones(2, 2, 1)), torch.tensor([40, 41]))


def test_updates_are_those_of_torch() -> None:
    torch.manual_seed(0)
    table, start = torch.randn(9, 4, dtype=torch.float64), None
    bag = nn.EmbeddingBag(9, 4, mode="sum", sparse=True, dtype=torch.float64)
    bag.weight.data.copy_(table)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    averages = torch.zeros_like(table), torch.zeros_like(table)
    for number, ids in enumerate(([0, 3, 3], [3, 8], [1]), start=1):
        bag(torch.tensor(ids), torch.tensor([0])).square().sum().backward()
        assert bag.weight.grad is not None
        gradient = bag.weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        sparse.sparse_adam_(table, averages, rows, values, number, 0.1, (0.9, 0.95), 1e-8)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(table, bag.weight.data, rtol=1e-13, atol=1e-15)
        assert start is None or not torch.equal(start, table)
        start = table.clone()


def test_the_dense_part_is_what_a_person_would_write() -> None:
    model = DenseDLRM(DLRMConfig(**SHAPE)).double()
    numbers, vectors = torch.randn(3, 4).double(), torch.randn(3, 5, 8).double()
    own = numbers
    for layer in model.bottom.layers:
        own = F.relu(layer(own))
    for sample in range(3):
        everything = [own[sample], *vectors[sample]]
        dots = [everything[i] @ everything[j] for i in range(6) for j in range(i)]
        x = torch.cat((own[sample], torch.stack(dots)))
        for layer in model.top.layers[:-1]:
            x = F.relu(layer(x))
        logit = model.top.layers[-1](x)[0]
        torch.testing.assert_close(model(numbers, vectors)[sample], logit)
    labels = torch.tensor([1, -100, 0])
    logits = model(numbers, vectors)
    expected = F.softplus(-logits[0]) + F.softplus(logits[2])
    torch.testing.assert_close(model(numbers, vectors, labels), expected)


def test_the_gradient_of_the_meeting() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DotInteraction.apply, (x,))


# Many processes against one


CUTS = [(sharding, optimizer) for sharding in sharded_tables.SHARDING_TYPES for optimizer in ("adagrad", "adam")]


LAYOUTS = ["shard=1", "replicate=3", "shard=4 zero=3 micro_batch=2"]


@pytest.mark.thin(12)
@pytest.mark.parametrize(
    ("sharding", "optimizer", "layout"),
    [(*cut, layout) for cut in CUTS for layout in [*LAYOUTS, *(["shard=8"] if cut[0] == "row" else [])]],
)
def test_every_cut_computes_what_one_process_computes(sharding: str, optimizer: str, layout: str) -> None:
    prove(small(24, {"sharding": sharding, "optimizer": optimizer, "lr_multiplier": 3.0}), layout)


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("sharding", "layout", "rows"),
    [
        *((sharding, layout, 30) for sharding in sharded_tables.SHARDING_TYPES for layout in LAYOUTS),
        ("row", "shard=2", 1000),
    ],
)
def test_rows_that_every_device_keeps(sharding: str, layout: str, rows: int) -> None:
    """Of 5 x 23 rows some, or all."""
    settings = {"sharding": sharding, "optimizer": "adagrad", "lr_multiplier": 3.0, "cached_rows": rows}
    prove(small(24, settings), layout)


def test_the_rows_that_are_used_most() -> None:
    ids = torch.tensor([7, 3, 3, 9, 9, 9, 4, 4, 8])
    assert most_frequent_ids(ids, 2).tolist() == [3, 9]  # of 3 and 4 the smaller number
    assert most_frequent_ids(ids, 10).tolist() == [3, 4, 9]  # what comes once is not used much


@pytest.mark.thin(14)
@pytest.mark.parametrize("layout", ["shard=1", "shard=4", "replicate=2 shard=2 zero=2"])
@pytest.mark.parametrize("sharding", sharded_tables.SHARDING_TYPES)
def test_tables_of_many_sizes(sharding: str, layout: str) -> None:
    job = small(24, {"sharding": sharding, "cached_rows": 9 if sharding == "auto" else 0}, rows=[41, 1, 100, 3, 23])
    prove(job, layout)


@pytest.mark.thin(6)
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("replicate=2 shard=2 zero=2", {}), ("shard=2 micro_batch=3", {}), ("replicate=4", {"tables": 1, "rows": 3}),
        ("shard=3", {"rows": 1}), ("shard=4", {"tables": 2, "width": 3}), ("replicate=2", {"lookups": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sharding", ["row", "auto"])
def test_odd_shapes(layout: str, more: dict[str, Any], sharding: str) -> None:
    """Ranks without rows of a table, tables of one row, more ranks than rows."""
    prove(small(24, {"sharding": sharding}, **more), layout)


@pytest.mark.thin(2)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_mix_of_cuts(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables in uneven shards, in another order on each rank, or whole."""

    def mixed(tables: Any, ranks: int, way: str) -> list[TableShard]:
        return sorted(
            [TableShard(rank, 0, run) for rank, run in enumerate([(0, 5), (5, 20), (20, 23)])]
            + [TableShard(rank, 1, run) for rank, run in ((2, (0, 1)), (0, (1, 6)), (1, (6, 23)))]
            + [TableShard(1, 2, (0, 23)), TableShard(1, 3, (0, 23))]
            + [TableShard(0, 4, (8, 23)), TableShard(2, 4, (0, 8))]
        )

    monkeypatch.setattr(table_engine, "place_tables", mixed)
    prove(small(24, {"optimizer": optimizer}), "shard=3")


def test_a_batch_without_any_id() -> None:
    """Nothing is looked up, no rank gets an id, and the step is taken all the same."""
    for first, second in run_world(two_empty_steps, 2):
        assert first == second


def two_empty_steps() -> list[float]:
    return [empty_step(), empty_step()]


def empty_step() -> float:
    job = small(8, {"sharding": "row"})
    engine = parallelize(prepare(job, Layout.parse("shard=2")), torch.device("cpu"))
    optimizer = engine.make_optimizer(job)
    samples = make_stream(job).read(rank_positions(0, 8, 2, engine.mesh.rank))
    size = engine.model.tables * engine.model.lookups
    samples.tokens[:, :size] = -1
    before = [held.tensor.clone() for held in engine.tables.local_shards]
    outcome = step(engine, optimizer, samples, 1.0)
    assert all(torch.equal(held.tensor, rows) for held, rows in zip(engine.tables.local_shards, before, strict=True))
    return float(outcome.loss)


# Checkpoints


def half(folder: str, text: str, sharding: str, optimizer: str, first: int, last: int) -> list[float]:
    cache = 0 if sharding == "table" else 10 + first
    job = small(12, {"sharding": sharding, "optimizer": optimizer, "cached_rows": cache})
    layout = Layout.parse(text)
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    taken, stream = engine.make_optimizer(job), make_stream(job)
    checkpoints = CheckpointManager(Path(folder), keep=2, asynchronous=True)
    if first:
        state = checkpoints.load(engine, taken)
        assert state is not None and state["step"] == first
    engine.begin_stream(job, stream)
    found = []
    for number in range(first, last):
        for group in taken.param_groups:
            group["lr"] = 0.05
        samples = stream.read(rank_positions(number, 12, layout.data, engine.mesh["data"].index))
        found.append(float(step(engine, taken, samples, 1.0).loss))
    checkpoints.save(last, engine, taken, {})
    checkpoints.finish()
    return found


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("adagrad", ("shard=2", "row"), ("shard=4 zero=3", "table")),
        ("adagrad", ("replicate=3", "row"), ("shard=1", "auto")),
        ("adam", ("shard=1", "table"), ("replicate=3", "row")),
        ("adam", ("shard=4", "auto"), ("shard=2", "row")),
    ],
)
def test_a_checkpoint_is_cut_anew(optimizer: str, before: Any, after: Any, tmp_path: Path) -> None:
    def run(where: str, how: tuple[str, str], first: int, last: int) -> list[float]:
        text, sharding = how
        prepare(small(12), Layout.parse(text))  # once, for all ranks
        found: list[list[float]] = run_world(
            half, Layout.parse(text).world, str(tmp_path / where), text, sharding, optimizer, first, last
        )
        return found[0]

    straight = run("straight", ("shard=1", "table"), 0, 4)
    resumed = run("sharding", before, 0, 2) + run("sharding", after, 2, 4)
    assert resumed == pytest.approx(straight, rel=1e-12)


# Planted bugs


def plant_duplicate_once(patch: pytest.MonkeyPatch) -> None:
    """Of several gradients for one row, the last wins."""
    patch.setattr(sharded_tables, "scatter_add_rows_", lambda table, rows, more: table.index_copy_(0, rows, more))


def plant_scaled_by_world(patch: pytest.MonkeyPatch) -> None:
    real = ShardedTables.push_gradients
    patch.setattr(ShardedTables, "push_gradients", lambda self, route, grad: real(self, route, grad / self.axis.size))


def plant_weights_ignored(patch: pytest.MonkeyPatch) -> None:
    real = sharded_tables.sum_bags
    patch.setattr(table_engine, "sum_bags", lambda r, p, o, weights: real(r, p, o, torch.ones_like(weights)))


def plant_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    """A piece's rows are counted from the neighbour's first: another row than the one that was asked for is used."""
    first = ShardedTables.locate

    def locate(self: ShardedTables, rows: torch.Tensor) -> Any:
        owners, local_rows = first(self, rows)
        return owners, (local_rows - 23).clamp(min=0)

    patch.setattr(ShardedTables, "locate", locate)


def plant_left_out_of_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sharded_tables.TableParamShard,
        "num_replicas",
        property(lambda self: 1e30, lambda self, value: None),
        raising=False,
    )


def plant_unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardedTables, "divide_gradients", lambda self, by: None)


def plant_start_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Every rank starts its piece as if it were the first."""
    first = property(lambda self: ((0, 0), list(self.tensor.shape)))
    patch.setattr(sharded_tables.TableParamShard, "offset_and_shape", first)


def plant_stale_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that were fetched once are used again after their update."""
    real: Any = ShardedTables.fetch
    kept: list[Any] = []

    def fetch(self: ShardedTables, route: Any) -> Any:
        kept.append(self.storage.clone())
        now, self.storage = self.storage, kept[0]
        try:
            return real(self, route)
        finally:
            self.storage = now

    patch.setattr(ShardedTables, "fetch", fetch)


def plant_steps_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Adam's averages are corrected as if every step were the first."""
    real = sparse.sparse_adam_
    patch.setattr(sharded_tables, "sparse_adam_", lambda t, a, r, g, number, *rest: real(t, a, r, g, 1, *rest))


def plant_kept_alone(patch: pytest.MonkeyPatch) -> None:
    """Every rank updates the rows that it keeps by its own samples."""
    patch.setattr("shardwise.parallel.tables.sharded_tables.all_reduce", lambda *args, **more: None)


def plant_kept_left_out(patch: pytest.MonkeyPatch) -> None:
    """The norm does not know of them."""
    real = ShardedTables.gradient_of

    def gradient_of(self: ShardedTables, local: sharded_tables.TableParamShard) -> Any:
        hot, self.hot_rows = self.hot_rows, None
        try:
            return real(self, local)
        finally:
            self.hot_rows = hot

    patch.setattr(ShardedTables, "gradient_of", gradient_of)


def plant_kept_not_written(patch: pytest.MonkeyPatch) -> None:
    real = HotRowCache.update

    def update(self: HotRowCache, lr: float) -> None:
        self.local_rows = torch.full_like(self.local_rows, -1)
        real(self, lr)

    patch.setattr(HotRowCache, "update", update)


# Bug: cut, optimizer, what differs first.
PLANTED: dict[Any, tuple[str, str, str]] = {
    plant_duplicate_once: ("row", "adagrad", "gradient"),
    plant_scaled_by_world: ("table", "adagrad", "gradient"),
    plant_weights_ignored: ("auto", "adam", "output"),
    plant_wrong_rank: ("table", "adagrad", "output"),
    plant_left_out_of_norm: ("auto", "adagrad", "grad_norm"),
    plant_unclipped: ("row", "adam", "weight"),
    plant_start_by_rank: ("row", "adagrad", "output"),
    plant_stale_rows: ("row", "adagrad", "output"),
    plant_steps_not_counted: ("row", "adam", "weight"),
    plant_kept_alone: ("row", "adagrad", "gradient"),
    plant_kept_left_out: ("row", "adagrad", "gradient"),
    plant_kept_not_written: ("row", "adam", "weight"),
}


@pytest.mark.thin(8)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sharding, optimizer, kind = PLANTED[plant]
    cache = 30 if plant.__name__.startswith("plant_kept") else 0
    job = small(24, {"sharding": sharding, "optimizer": optimizer, "lr_multiplier": 30.0, "cached_rows": cache})
    plant(monkeypatch)
    (record,) = verify(job, [Layout.parse("shard=2")], steps=3)
    assert not record.ok and record.failure is None, record.describe()
    first = record.first_difference
    assert record.failure is None and first is not None, record.describe()
    assert first.kind == kind, record.describe()


# Layouts and sizes that cannot be


@pytest.mark.parametrize("text", ["tensor=2", "pipeline=2", "context=2", "shard=2 expert=2"])
def test_other_axes_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"=2: a DLRM supports data parallelism and sharded tables only; use shard"):
        prepare(small(), Layout.parse(text))


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(LayoutError, match="no blocks to recompute"):
        prepare(small(), Layout.parse("shard=2 recompute=full"))
    job = small()
    with pytest.raises(JobError, match="no blocks to compile"):
        prepare(job.model_copy(update={"compile": True}), Layout.parse("shard=2"))
    with pytest.raises(JobError, match="bf16, float32 or float64"):
        prepare(job.model_copy(update={"precision": "fp8"}), Layout.parse("shard=2"))
    with pytest.raises(JobError, match="does not generate text"):
        job.require_decoder()


def test_a_table_that_no_rank_can_hold() -> None:
    job = small(
        24, {"sharding": "table"}, tables=1, rows=1024, width=128
    )  # a mebibyte in float64, and a state for a row
    check_host_memory(prepare(job, Layout.parse("shard=4")), 2 << 20)
    with pytest.raises(LayoutError, match=r'rank 0 would hold .* use embedding_tables.sharding = "auto"'):
        check_host_memory(prepare(job, Layout.parse("shard=4")), 1 << 19)
    with pytest.raises(LayoutError, match=r"use at least 11 ranks with that much memory each"):
        check_host_memory(prepare(job, Layout.parse("shard=4")), 100_000)
    check_host_memory(prepare(small(24, {}, tables=1, rows=1024, width=128), Layout.parse("shard=4")), 1 << 19)


# Click logs


def test_the_generated_log_depends_on_seed_and_index_alone() -> None:
    model = DLRMConfig(**SHAPE | {"rows": 1000})
    log = SyntheticClicks(model, 0, 100, seed=3)
    later = SyntheticClicks(model, 40, 60, seed=3)
    together = log.rows(np.arange(100))
    for index in (40, 41, 99):
        assert (log[index] == together[index]).all() and (later[index - 40] == together[index]).all()
    assert (SyntheticClicks(model, 0, 100, seed=4).rows(np.arange(100)) != together).any()
    clicks = ClickBatch.unpack(SampleStream(log, 0, shuffle=False).read(np.arange(100)), model)
    there = clicks.sparse_ids >= 0
    assert int(clicks.sparse_ids.max()) < 1000 and int(clicks.sparse_ids.min()) == -1
    assert bool((clicks.weights[there] >= 0.5).all()) and not bool(clicks.weights[~there].any())
    assert set(there.sum(2).unique().tolist()) == {0, 1, 2, 3}
    assert set(clicks.labels.tolist()) == {0, 1}


def test_the_generated_log_is_skewed_as_a_power_law() -> None:
    model = DLRMConfig(**SHAPE | {"rows": 100_000, "tables": 1, "lookups": 1})
    log = SyntheticClicks(model, 0, 20_000, seed=0)
    ids = ClickBatch.unpack(log.samples(np.arange(20_000), np.arange(20_000)), model).sparse_ids.flatten()
    counts = np.sort(np.bincount(ids[ids >= 0].numpy()))[::-1]
    # The share of the ten most frequent rows is that of a power law of exponent 1.05 over so many rows.
    power = 1 - SyntheticClicks.zipf_exponent
    expected = (11.0**power - 1) / (100_001.0**power - 1)
    assert counts[:10].sum() / counts.sum() == pytest.approx(expected, rel=0.05)


LINE = "1\t5\t\t-1\t" + "\t".join("7" for _ in range(10)) + "\t" + "\t".join(f"{n:08x}" for n in range(100, 125)) + "\t"


def test_a_criteo_file(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_text("\n".join([LINE.replace("1\t5", f"{i % 2}\t{i}", 1) for i in range(53)]))  # the last has no end
    job = make_job(
        {
            "model": {"name": "dlrm", "rows": 64, "width": 4, "lookups": 2}, "batch": {"samples": 4},
            "data": {"source": "criteo", "path": str(path), "validation_fraction": 0.1},
        }
    )  # fmt: skip
    training, held, _ = make_sources(job)
    assert (len(training), len(held)) == (48, 5)
    assert isinstance(training, CriteoClicks) and isinstance(held, CriteoClicks) and isinstance(job.model, DLRMConfig)
    for source, first, count in ((training, 0, 48), (held, 48, 5)):
        clicks = ClickBatch.unpack(source.samples(np.arange(count), np.arange(count)), job.model)
        assert clicks.labels.tolist() == [i % 2 for i in range(first, first + count)]
        assert clicks.dense_features[:, 0].tolist() == pytest.approx([np.log1p(i) for i in range(first, first + count)])
        assert not bool(clicks.dense_features[:, 1:3].any())  # missing, and below zero
        assert clicks.sparse_ids[0, :25, 0].tolist() == [n % 64 for n in range(100, 125)]
        assert clicks.sparse_ids[0, 25].tolist() == [-1, -1] and not bool(clicks.weights[:, 25].any())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LINE.rpartition("\t")[0], "row 18: it has 39 fields, but a Criteo row has 40"),
        (LINE.replace("1", "2", 1), r"row 18, field 1 \(label\): '2' is neither 0 nor 1"),
        (LINE.replace("-1", "x"), r"row 18, field 4 \(integer 3\): 'x' is not an integer"),
        (LINE.replace("00000064", "pear"), r"row 18, field 15 \(category 1\): 'pear' is not a hexadecimal number"),
        ("", "row 18: it has 1 fields"),
    ],
)
def test_a_malformed_row_is_told_with_file_row_and_field(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_text("\n".join([LINE] * 17 + [line] + [LINE] * 3) + "\n")
    offsets, lines = index_criteo_file(DataFile.of(path))
    source = CriteoClicks(DLRMConfig(rows=64, width=4), path, offsets, 0, lines)
    assert lines == 21 and source[16].shape == source[20].shape
    with pytest.raises(DataError, match=f"day.tsv, {words}"):
        SampleStream(source, 0, shuffle=False).read(np.arange(21))


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ({"source": "stdlib"}, {}, "is not a click log"),
        ({"source": "criteo"}, {}, "set data.path to it"),
        ({"source": "criteo", "path": "none.tsv"}, {}, "cannot be read"),
        ({"source": "criteo", "path": "none.tsv"}, {"tables": 3}, "model.tables = 26 and model.dense_features = 13"),
    ],
)
def test_sources_that_do_not_fit(data: Any, more: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_sources(make_job({"model": {"name": "dlrm", **more}, "data": data}))
    with pytest.raises(DataError, match="reads tokens"):
        make_sources(make_job({"data": {"source": "criteo"}}))


# The commands


def shardwise(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *words]
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=paths)


@pytest.mark.cluster
def test_the_example_trains_learns_and_goes_on_elsewhere(tmp_path: Path) -> None:
    quick = ["--set", "batch.samples=64", "--set", "data.samples=2048", "--set", "run.folder=r", "--set", "steps=20"]
    quick += ["--set", "embedding_tables.cached_rows=5000"]
    done = shardwise("train", str(ROOT / "examples/dlrm.toml"), *quick, "--layout", "shard=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = shardwise("train", "--resume", "r", "--layout", "replicate=1", "--set", "steps=40", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    with pytest.raises(LayoutError, match="tensor=2: a DLRM supports data parallelism"):
        prepare(load_job(ROOT / "examples/dlrm.toml"), Layout.parse("tensor=2"))


def test_a_world_of_one_has_no_process_group() -> None:
    job = small()
    engine = parallelize(prepare(job, Layout()), torch.device("cpu"))
    assert engine.tables.axis.group is None and isinstance(engine.mesh, Mesh) and not torch.distributed.is_initialized()
