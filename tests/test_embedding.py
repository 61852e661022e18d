"""Sharded embedding tables and the DLRM: against one process with torch.nn.EmbeddingBag, in every cut; planted bugs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.comm.world import run_world
from shardwise.data.criteo import Clicks, Criteo, Generated, open_criteo
from shardwise.data.make import make_sources
from shardwise.data.stream import Stream, share
from shardwise.errors import DataError, JobError, LayoutError
from shardwise.job import Job, make_job
from shardwise.kinds import DLRM
from shardwise.layout import Layout
from shardwise.models.dlrm import Meeting, dlrm
from shardwise.optim import sparse
from shardwise.parallel import bags, embedding, placement, recommender
from shardwise.parallel.bags import Bags
from shardwise.parallel.embedding import Tables
from shardwise.parallel.hot import Hot, most_used
from shardwise.parallel.mesh import ALONE, Mesh
from shardwise.parallel.parallelize import check, parallelize
from shardwise.parallel.placement import Shard, Table, place_tables
from shardwise.parallel.recommender import Recommender, check_room, optimizer_of
from shardwise.step import step
from shardwise.train.checkpoint import Checkpoints
from shardwise.verify.clicks import make_stream
from shardwise.verify.parity import verify

ROOT = Path(__file__).parent.parent
SHAPE = {
    "name": "dlrm", "tables": 5, "rows": 23, "width": 8, "lookups": 3, "features": 4, "bottom": [7], "top": [9, 5],
}  # fmt: skip


def small(samples: int = 24, settings: dict[str, Any] | None = None, **more: Any) -> Job:
    return make_job(
        {
            "precision": "float64", "model": SHAPE | more, "batch": {"samples": samples},
            "data": {"source": "synthetic"}, "embedding": settings or {}, "optimizer": {"clip": 0.5},
        }
    )  # fmt: skip


def prove(job: Job, *layouts: str, steps: int = 2) -> None:
    for record in verify(job, [Layout.parse(text) for text in layouts], steps=steps):
        assert record.ok, record.sentence()
        assert max(record.loss, record.grad_norm, record.grad, record.weight) <= 1e-10


# Where rows live


MIX = [Table("large", 1000, 8, 1.0), *(Table(f"t{i}", 50 + i, 8, 1.0) for i in range(6)), Table("hot", 10, 8, 40.0)]


@pytest.mark.parametrize("way", placement.WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_every_number_lives_once(way: str, ranks: int) -> None:
    shards = place_tables(MIX, ranks, way)
    assert shards == sorted(shards) and all(0 <= shard.rank < ranks for shard in shards)
    for number, table in enumerate(MIX):
        held = torch.zeros(table.rows, table.width)
        pieces = [shard for shard in shards if shard.table == number]
        for shard in pieces:
            held[shard.rows[0] : shard.rows[1], shard.columns[0] : shard.columns[1]] += 1
        assert bool((held == 1).all())
        assert len({shard.rank for shard in pieces}) == len(pieces), "a rank has one piece of a table"


def test_the_mix_cuts_what_is_large_by_rows_and_what_is_hot_by_columns() -> None:
    shards = place_tables(MIX, 4)
    large = [shard for shard in shards if shard.table == 0]
    hot = [shard for shard in shards if shard.table == len(MIX) - 1]
    assert len(large) > 1 and all(shard.columns == (0, 8) for shard in large)
    assert len(hot) > 1 and all(shard.rows == (0, 10) for shard in hot)
    assert all(len([s for s in shards if s.table == number]) == 1 for number in range(1, 7))
    sizes = [sum(shard.size for shard in shards if shard.rank == rank) for rank in range(4)]
    assert max(sizes) <= 1.3 * sum(sizes) / 4


def test_equal_tables_are_dealt_evenly() -> None:
    shards = place_tables([Table(f"t{i}", 100, 4) for i in range(26)], 8)
    held = [sum(shard.size for shard in shards if shard.rank == rank) for rank in range(8)]
    assert max(held) - min(held) <= 400 and all(shard.columns == (0, 4) for shard in shards)


# One process


def test_bags_are_weighted_sums_with_empty_ones_zero() -> None:
    table = [Table("a", 7, 3), Table("b", 5, 3)]
    tables = Tables(table, place_tables(table, 1), ALONE, torch.float64)
    tables.start(0, [1.0, 1.0])
    ids = torch.tensor([[[1, 1, -1], [-1, -1, -1]], [[6, -1, 0], [4, 2, 4]]])
    weights = torch.tensor([[[0.5, 2.0, 9.0], [9.0, 9.0, 9.0]], [[1.0, 9.0, 3.0], [1.0, -1.0, 0.25]]])
    route = tables.route(Bags.of(ids, weights), torch.arange(2))
    found = bags.sum_bags(tables.fetch(route), route.places, route.offsets, route.weights).view(2, 2, 3)
    a, b = tables.memory[0][:7], tables.memory[0][7:]
    expected = [[2.5 * a[1], torch.zeros(3)], [a[6] + 3 * a[0], 1.25 * b[4] - b[2]]]
    for sample in range(2):
        for number in range(2):
            torch.testing.assert_close(found[sample, number], expected[sample][number].double())
    assert route.distinct == 5


@pytest.mark.parametrize("wrong", [7, -2])
def test_an_id_outside_of_its_table_is_told_with_sample_and_field(wrong: int) -> None:
    table = [Table("user", 7, 3), Table("item", 5, 3)]
    tables = Tables(table, place_tables(table, 1), ALONE, torch.float64)
    ids = torch.tensor([[[6], [4]], [[wrong], [0]]])
    with pytest.raises(DataError, match=rf"^sample 41, user: id {wrong} is outside of its table, .* rows 0 to 6;"):
        tables.route(Bags.of(ids, torch.ones(2, 2, 1)), torch.tensor([40, 41]))


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
        sparse.adam_(table, averages, rows, values, number, 0.1, (0.9, 0.95), 1e-8)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(table, bag.weight.data, rtol=1e-13, atol=1e-15)
        assert start is None or not torch.equal(start, table)
        start = table.clone()


def test_the_dense_part_is_what_a_person_would_write() -> None:
    model = dlrm(DLRM(**SHAPE)).double()
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
    assert torch.autograd.gradcheck(Meeting.apply, (x,))


# Many processes against one


CUTS = [(cut, optimizer) for cut in placement.WAYS for optimizer in ("adagrad", "adam")]


@pytest.mark.parametrize(("cut", "optimizer"), CUTS)
def test_every_cut_computes_what_one_process_computes(cut: str, optimizer: str) -> None:
    job = small(24, {"cut": cut, "optimizer": optimizer, "rate": 3.0})
    prove(job, "shard=1", "replicate=3", "shard=4 zero=3 micro_batch=2", *(["shard=8"] if cut == "row" else []))


@pytest.mark.parametrize(("cut", "optimizer"), CUTS[::3] + CUTS[4:5])
def test_rows_that_every_device_keeps(cut: str, optimizer: str) -> None:
    """Of 5 x 23 rows some, or all."""
    job = small(24, {"cut": cut, "optimizer": optimizer, "rate": 3.0, "cache": 30})
    prove(job, "shard=1", "replicate=3", "shard=4 zero=3 micro_batch=2")
    if cut == "row":
        prove(small(24, {"cut": cut, "optimizer": optimizer, "cache": 1000}), "shard=2")


def test_the_rows_that_are_used_most() -> None:
    ids = torch.tensor([7, 3, 3, 9, 9, 9, 4, 4, 8])
    assert most_used(ids, 2).tolist() == [3, 9]  # of 3 and 4 the smaller number
    assert most_used(ids, 10).tolist() == [3, 4, 9]  # what comes once is not used much


@pytest.mark.parametrize("cut", placement.WAYS)
def test_tables_of_many_sizes(cut: str) -> None:
    job = small(24, {"cut": cut, "cache": 9 if cut == "auto" else 0}, rows=[41, 1, 100, 3, 23])
    prove(job, "shard=1", "shard=4", "replicate=2 shard=2 zero=2")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("replicate=2 shard=2 zero=2", {}), ("shard=2 micro_batch=3", {}), ("replicate=4", {"tables": 1, "rows": 3}),
        ("shard=3", {"rows": 1}), ("shard=4", {"tables": 2, "width": 3}), ("replicate=2", {"lookups": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", ["row", "column"])
def test_odd_shapes(layout: str, more: dict[str, Any], cut: str) -> None:
    """Ranks without rows of a table, tables of one row, more ranks than columns."""
    prove(small(24, {"cut": cut}, **more), layout)


def test_a_mix_of_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one large, one hot and some small tables, each is cut another way."""

    def mixed(tables: Any, ranks: int, way: str) -> list[Shard]:
        return sorted(
            [Shard(rank, 0, run, (0, 8)) for rank, run in enumerate([(0, 5), (5, 20), (20, 23)])]
            + [Shard(rank, 1, (0, 23), run) for rank, run in ((2, (0, 1)), (0, (1, 6)), (1, (6, 8)))]
            + [Shard(1, 2, (0, 23), (0, 8)), Shard(1, 3, (0, 23), (0, 8))]
            + [Shard(0, 4, (0, 23), (0, 3)), Shard(2, 4, (0, 23), (3, 8))]
        )

    monkeypatch.setattr(recommender, "place_tables", mixed)
    for optimizer in ("adagrad", "adam"):
        prove(small(24, {"optimizer": optimizer}), "shard=3")


def test_a_batch_without_any_id() -> None:
    """Nothing is looked up, no rank gets an id, and the step is taken all the same."""
    assert run_world(empty_step, 2) == run_world(empty_step, 2) != []


def empty_step() -> float:
    job = small(8, {"cut": "row"})
    engine = parallelize(job, Layout.parse("shard=2"), torch.device("cpu"))
    optimizer = optimizer_of(job, engine)
    samples = make_stream(job).read(share(0, 8, 2, engine.mesh.rank))
    size = engine.model.tables * engine.model.lookups
    samples.tokens[:, :size] = -1
    before = [held.rows.clone() for held in engine.tables.held]
    outcome = step(engine, optimizer, samples, 1.0)
    assert all(torch.equal(held.rows, rows) for held, rows in zip(engine.tables.held, before, strict=True))
    return float(outcome.loss)


def trained(ahead: bool, optimizer: str, cut: str) -> list[float]:
    job = small(16, {"cut": cut, "optimizer": optimizer})
    engine = parallelize(job, Layout.parse("shard=2"), torch.device("cpu"))
    assert isinstance(engine, Recommender)
    taken, stream = optimizer_of(job, engine), make_stream(job)
    for group in taken.param_groups:
        group["lr"] = 0.05
    batches = iter([(n, stream.read(share(n, 16, 2, engine.mesh.rank))) for n in range(6)])
    found = []
    for _, samples in engine.coming(batches, 6) if ahead else batches:
        found.append(float(step(engine, taken, samples, 1.0).loss))
        if ahead and len(found) < 6:
            assert engine.ahead is not None and len(engine.ahead.pending) == 1
    return found


@pytest.mark.parametrize(("optimizer", "cut"), [("adagrad", "row"), ("adam", "column"), ("adagrad", "table")])
def test_fetching_ahead_changes_no_bit(optimizer: str, cut: str) -> None:
    plain = run_world(trained, 2, False, optimizer, cut)
    assert run_world(trained, 2, True, optimizer, cut) == plain
    assert len(set(plain[0])) == 6 and plain[0] == plain[1]


def test_rows_that_are_not_refreshed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_world(trained, 2, False, "adagrad", "row")
    late = Tables.update

    def update(self: Tables, *args: Any) -> None:
        time.sleep(0.2)  # so that the next batch's rows are there before
        late(self, *args)

    monkeypatch.setattr(Tables, "update", update)
    assert run_world(trained, 2, True, "adagrad", "row") == plain
    monkeypatch.setattr(Tables, "refresh", lambda self, route, rows: None)
    assert run_world(trained, 2, True, "adagrad", "row") != plain


# Checkpoints


def half(folder: str, text: str, cut: str, optimizer: str, first: int, last: int) -> list[float]:
    cache = 0 if cut == "table" else 10 + first
    job = small(12, {"cut": cut, "optimizer": optimizer, "cache": cache})
    layout = Layout.parse(text)
    engine = parallelize(job, layout, torch.device("cpu"))
    taken, stream = optimizer_of(job, engine), make_stream(job)
    checkpoints = Checkpoints(Path(folder), keep=2, asynchronous=True)
    if first:
        state = checkpoints.load(engine, taken)
        assert state is not None and state["step"] == first
    engine.keep(stream, cache)
    found = []
    for number in range(first, last):
        for group in taken.param_groups:
            group["lr"] = 0.05
        samples = stream.read(share(number, 12, layout.data, engine.mesh["data"].index))
        found.append(float(step(engine, taken, samples, 1.0).loss))
    checkpoints.save(last, engine, taken, {})
    checkpoints.finish()
    return found


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("adagrad", ("shard=2", "row"), ("shard=4 zero=3", "column")),
        ("adagrad", ("replicate=3", "column"), ("shard=1", "auto")),
        ("adam", ("shard=1", "table"), ("replicate=3", "row")),
        ("adam", ("shard=4", "auto"), ("shard=2", "column")),
    ],
)
def test_a_checkpoint_is_cut_anew(optimizer: str, before: Any, after: Any, tmp_path: Path) -> None:
    def run(where: str, how: tuple[str, str], first: int, last: int) -> list[float]:
        text, cut = how
        found: list[list[float]] = run_world(
            half, Layout.parse(text).world, str(tmp_path / where), text, cut, optimizer, first, last
        )
        return found[0]

    straight = run("straight", ("shard=1", "table"), 0, 6)
    resumed = run("cut", before, 0, 3) + run("cut", after, 3, 6)
    assert resumed == pytest.approx(straight, rel=1e-12)


# Planted bugs


def plant_duplicate_once(patch: pytest.MonkeyPatch) -> None:
    """Of several gradients for one row, the last wins."""
    patch.setattr(embedding, "add_rows_", lambda table, rows, more: table.index_copy_(0, rows, more))


def plant_scaled_by_world(patch: pytest.MonkeyPatch) -> None:
    real = Tables.give_back
    patch.setattr(Tables, "give_back", lambda self, route, grad: real(self, route, grad / self.axis.size))


def plant_weights_ignored(patch: pytest.MonkeyPatch) -> None:
    real = bags.sum_bags
    patch.setattr(recommender, "sum_bags", lambda r, p, o, weights: real(r, p, o, torch.ones_like(weights)))


def plant_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    """A piece's rows are counted from the neighbour's first: another row than the one that was asked for is used."""
    real = embedding.banks_of

    def banks_of(shards: Any, rank: int) -> Any:
        banks = real(shards, rank)
        for bank in banks:
            bank.shards.sort(key=lambda shard: -shard.table)
        return banks

    first = Tables.route

    def route(self: Tables, *args: Any) -> Any:
        banks, self.banks = self.banks, [banks_of(self.shards, rank) for rank in range(self.axis.size)]
        try:
            return first(self, *args)
        finally:
            self.banks = banks

    patch.setattr(Tables, "route", route)


def plant_left_out_of_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        recommender.TablePiece, "copies", property(lambda self: 1e30, lambda self, value: None), raising=False
    )


def plant_unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tables, "divide", lambda self, by: None)


def plant_start_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Every rank starts its piece as if it were the first."""
    patch.setattr(Shard, "start", property(lambda self: (0, 0)))


def plant_column_squares(patch: pytest.MonkeyPatch) -> None:
    """Row-wise AdaGrad over the columns at hand instead of the whole row."""
    patch.setattr(Tables, "_whole_sums", lambda self, sums: sums)


def plant_stale_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that were fetched once are used again after their update."""
    real: Any = Tables.fetch
    kept: list[Any] = []

    def fetch(self: Tables, route: Any) -> Any:
        kept.append([rows.clone() for rows in self.memory])
        now, self.memory = self.memory, kept[0]
        try:
            return real(self, route)
        finally:
            self.memory = now

    patch.setattr(Tables, "fetch", fetch)


def plant_steps_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Adam's averages are corrected as if every step were the first."""
    real = sparse.adam_
    patch.setattr(embedding, "adam_", lambda t, a, r, g, number, *rest: real(t, a, r, g, 1, *rest))


def plant_kept_alone(patch: pytest.MonkeyPatch) -> None:
    """Every rank updates the rows that it keeps by its own samples."""
    patch.setattr("shardwise.parallel.hot.all_reduce", lambda *args, **more: None)


def plant_kept_left_out(patch: pytest.MonkeyPatch) -> None:
    """The norm does not know of them."""
    real = Tables.gradient_of

    def gradient_of(self: Tables, shard: Shard) -> Any:
        hot, self.hot = self.hot, None
        try:
            return real(self, shard)
        finally:
            self.hot = hot

    patch.setattr(Tables, "gradient_of", gradient_of)


def plant_kept_not_written(patch: pytest.MonkeyPatch) -> None:
    real = Hot.update

    def update(self: Hot, lr: float) -> None:
        self.home = [torch.full_like(home, -1) for home in self.home]
        real(self, lr)

    patch.setattr(Hot, "update", update)


# Bug: cut, optimizer, what differs first.
PLANTED: dict[Any, tuple[str, str, str]] = {
    plant_duplicate_once: ("row", "adagrad", "gradient"),
    plant_scaled_by_world: ("table", "adagrad", "gradient"),
    plant_weights_ignored: ("column", "adam", "output"),
    plant_wrong_rank: ("table", "adagrad", "output"),
    plant_left_out_of_norm: ("auto", "adagrad", "grad_norm"),
    plant_unclipped: ("row", "adam", "weight"),
    plant_start_by_rank: ("row", "adagrad", "output"),
    plant_column_squares: ("column", "adagrad", "weight"),
    plant_stale_rows: ("row", "adagrad", "output"),
    plant_steps_not_counted: ("row", "adam", "weight"),
    plant_kept_alone: ("row", "adagrad", "gradient"),
    plant_kept_left_out: ("row", "adagrad", "gradient"),
    plant_kept_not_written: ("row", "adam", "weight"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, optimizer, kind = PLANTED[plant]
    cache = 30 if plant.__name__.startswith("plant_kept") else 0
    job = small(24, {"cut": cut, "optimizer": optimizer, "rate": 30.0, "cache": cache})
    plant(monkeypatch)
    (record,) = verify(job, [Layout.parse("shard=2")], steps=3)
    assert not record.ok and record.problem is None, record.sentence()
    first = record.first_difference
    assert record.problem is None and first is not None, record.sentence()
    assert first.kind == kind, record.sentence()


# Layouts and sizes that cannot be


@pytest.mark.parametrize("text", ["tensor=2", "pipeline=2", "context=2", "shard=2 expert=2"])
def test_other_axes_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"=2: a DLRM is cut by its tables and its samples alone; use shard=2"):
        check(small(), Layout.parse(text))


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(LayoutError, match="no blocks to compute again"):
        check(small(), Layout.parse("shard=2 recompute=full"))
    job = small()
    with pytest.raises(JobError, match="no blocks to compile"):
        check(job.model_copy(update={"compile": True}), Layout.parse("shard=2"))
    with pytest.raises(JobError, match="bf16, float32 or float64"):
        check(job.model_copy(update={"precision": "fp8"}), Layout.parse("shard=2"))
    with pytest.raises(JobError, match="can be planned, trained and verified"):
        job.decoder()


def test_a_table_that_no_rank_can_hold() -> None:
    job = small(24, {"cut": "table"}, tables=1, rows=1024, width=128)  # a mebibyte in float64, and a state for a row
    check_room(job, Layout.parse("shard=4"), 2 << 20)
    with pytest.raises(LayoutError, match=r'rank 0 would hold .* use embedding.cut = "auto"'):
        check_room(job, Layout.parse("shard=4"), 1 << 19)
    with pytest.raises(LayoutError, match=r"use at least 11 ranks with as much each"):
        check_room(job, Layout.parse("shard=4"), 100_000)
    check_room(small(24, {}, tables=1, rows=1024, width=128), Layout.parse("shard=4"), 1 << 19)


# Click logs


def test_the_generated_log_depends_on_seed_and_index_alone() -> None:
    model = DLRM(**SHAPE | {"rows": 1000})
    log = Generated(model, 0, 100, seed=3)
    later = Generated(model, 40, 60, seed=3)
    together = log.rows(np.arange(100))
    for index in (40, 41, 99):
        assert (log[index] == together[index]).all() and (later[index - 40] == together[index]).all()
    assert (Generated(model, 0, 100, seed=4).rows(np.arange(100)) != together).any()
    clicks = Clicks.of(Stream(log, 0, shuffle=False).read(np.arange(100)), model)
    there = clicks.categories >= 0
    assert int(clicks.categories.max()) < 1000 and int(clicks.categories.min()) == -1
    assert bool((clicks.weights[there] >= 0.5).all()) and not bool(clicks.weights[~there].any())
    assert set(there.sum(2).unique().tolist()) == {0, 1, 2, 3}
    assert set(clicks.labels.tolist()) == {0, 1}


def test_the_generated_log_is_skewed_as_a_power_law() -> None:
    model = DLRM(**SHAPE | {"rows": 100_000, "tables": 1, "lookups": 1})
    log = Generated(model, 0, 20_000, seed=0)
    ids = Clicks.of(log.samples(np.arange(20_000), np.arange(20_000)), model).categories.flatten()
    counts = np.sort(np.bincount(ids[ids >= 0].numpy()))[::-1]
    # The share of the ten most frequent rows is that of a power law of exponent 1.05 over so many rows.
    power = 1 - Generated.skew
    expected = (11.0**power - 1) / (100_001.0**power - 1)
    assert counts[:10].sum() / counts.sum() == pytest.approx(expected, rel=0.05)


LINE = "1\t5\t\t-1\t" + "\t".join("7" for _ in range(10)) + "\t" + "\t".join(f"{n:08x}" for n in range(100, 125)) + "\t"


def test_a_criteo_file(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_text("\n".join([LINE.replace("1\t5", f"{i % 2}\t{i}", 1) for i in range(53)]))  # the last has no end
    job = make_job(
        {
            "model": {"name": "dlrm", "rows": 64, "width": 4, "lookups": 2}, "batch": {"samples": 4},
            "data": {"source": "criteo", "path": str(path), "validation": 0.1},
        }
    )  # fmt: skip
    training, held, _ = make_sources(job)
    assert (len(training), len(held)) == (48, 5)
    assert isinstance(training, Criteo) and isinstance(held, Criteo) and isinstance(job.model, DLRM)
    for source, first, count in ((training, 0, 48), (held, 48, 5)):
        clicks = Clicks.of(source.samples(np.arange(count), np.arange(count)), job.model)
        assert clicks.labels.tolist() == [i % 2 for i in range(first, first + count)]
        assert clicks.numbers[:, 0].tolist() == pytest.approx([np.log1p(i) for i in range(first, first + count)])
        assert not bool(clicks.numbers[:, 1:3].any())  # missing, and below zero
        assert clicks.categories[0, :25, 0].tolist() == [n % 64 for n in range(100, 125)]
        assert clicks.categories[0, 25].tolist() == [-1, -1] and not bool(clicks.weights[:, 25].any())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LINE.rpartition("\t")[0], "row 18: it has 39 fields, but a Criteo row has 40"),
        (LINE.replace("1", "2", 1), r"row 18, field 1 \(label\): '2' is neither 0 nor 1"),
        (LINE.replace("-1", "x"), r"row 18, field 4 \(count 3\): 'x' is no whole number"),
        (LINE.replace("00000064", "pear"), r"row 18, field 15 \(category 1\): 'pear' is no hexadecimal number"),
        ("", "row 18: it has 1 fields"),
    ],
)
def test_a_malformed_row_is_told_with_file_row_and_field(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_text("\n".join([LINE] * 17 + [line] + [LINE] * 3) + "\n")
    offsets, lines = open_criteo(path)
    source = Criteo(DLRM(rows=64, width=4), path, offsets, 0, lines)
    assert lines == 21 and source[16].shape == source[20].shape
    with pytest.raises(DataError, match=f"day.tsv, {words}"):
        Stream(source, 0, shuffle=False).read(np.arange(21))


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ({"source": "stdlib"}, {}, "has no clicks"),
        ({"source": "criteo"}, {}, "give it as data.path"),
        ({"source": "criteo", "path": "none.tsv"}, {}, "cannot be read"),
        ({"source": "criteo", "path": "none.tsv"}, {"tables": 3}, "26 categories and 13 counts"),
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


def test_the_example_trains_learns_and_goes_on_elsewhere(tmp_path: Path) -> None:
    quick = ["--set", "batch.samples=64", "--set", "data.samples=2048", "--set", "run.folder=r", "--set", "steps=20"]
    quick += ["--set", "embedding.ahead=true", "--set", "embedding.cache=5000"]
    done = shardwise("train", str(ROOT / "examples/dlrm.toml"), *quick, "--layout", "shard=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = shardwise("train", "--resume", "r", "--layout", "replicate=1", "--set", "steps=40", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    done = shardwise("train", str(ROOT / "examples/dlrm.toml"), "--layout", "tensor=2", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "tensor=2: a DLRM is cut by" in done.stderr


def test_a_world_of_one_has_no_process_group() -> None:
    job = small()
    engine = recommender.parallelize(job, Layout(), torch.device("cpu"))
    assert engine.tables.group is None and isinstance(engine.mesh, Mesh) and not torch.distributed.is_initialized()
