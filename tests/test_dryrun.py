"""Does a rank of a world that is not there hold and send what it would in a real one?

The same ledger is kept in real gloo worlds and in fake ones. In real ones it must agree with the garbage collector,
which knows nothing of it; and what is sent is worked out by hand.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_held_bytes import Census
from torch.distributed.pipelining import PipelineStage

import shardwise.planner.dryrun as dryrun
from shardwise.comm.world import run_world
from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.planner.dryrun import RankReport, Traffic, dry_run, measure, nobody, typical_ranks
from shardwise.planner.dryrun_command import describe
from shardwise.planner.ledger import ROLES, Ledger

LAYERS, WIDTH, SEQUENCE, VOCAB = 2, 16, 4, 32
MODEL = {
    "layers": LAYERS, "width": WIDTH, "heads": 2, "ffn": 32, "vocab": VOCAB, "sequence": SEQUENCE,
    "positions": "learned", "activation": "gelu",
}  # fmt: skip


def make(text: str, micro_batches: int, **keys: Any) -> tuple[Job, Layout]:
    layout = Layout.parse(f"{text} micro_batch=1")
    return make_job({"model": MODEL, "batch": {"samples": layout.data * micro_batches}} | keys), layout


def profile(job: Job, layout: Layout, fake: bool) -> tuple[Any, ...]:
    """What this rank sends; what it keeps at the begin of each forward, after the last backward and at the end."""
    notes = dryrun._watched_step(job, layout, job.samples // layout.data, fake)
    held = [notes.ledger.held(moment.event) for moment in (*notes.forwards, notes.update, notes.end)]
    return notes.traffic(0, 1), [[each[role] for role in ("weights", "gradients", "optimizer")] for each in held]


def profiles(job: Job, layout: Layout) -> dict[int, tuple[Any, ...]]:
    """Some ranks of a world that is not there, in one process."""
    found = {}
    for rank in {0, layout.world // 2, layout.world - 1}:
        with nobody(layout.world, rank):
            found[rank] = profile(job, layout, fake=True)
    return found


@pytest.mark.parametrize("text", [
    "replicate=2",
    "replicate=2 shard=2 zero=3",
    "pipeline=2 tensor=2 shard=2 zero=1",
    "pipeline=2 tensor=2 shard=2 zero=3",
    "pipeline=2 shard=2 zero=2 schedule=interleaved",
    "pipeline=2 shard=2 zero=3 schedule=zero-bubble",
    "pipeline=2 tensor=2 schedule=zbv",
])  # fmt: skip
def test_a_fake_world_is_like_a_real_one(text: str) -> None:
    job, layout = make(text, 4)
    real = run_world(profile, layout.world, job, layout, False)
    for rank, fake in run_world(profiles, 1, job, layout)[0].items():
        assert fake == real[rank]


@pytest.mark.parametrize(("recompute", "precision"), [("none", "float32"), ("selective", "bf16"), ("full", "bf16")])
def test_one_process_holds_the_same_with_and_without_numbers(recompute: str, precision: str) -> None:
    job, layout = make(f"recompute={recompute}", 3, precision=precision)
    real, fake = (run_world(measure, 1, job, layout, numberless)[0] for numberless in (False, True))
    assert (fake.memory, fake.moment, fake.kept) == (real.memory, real.moment, real.kept)
    assert fake.memory["activations"] > 0 and (fake.memory["copies"] > 0) == (precision == "bf16")


def censuses(job: Job, layout: Layout) -> list[tuple[dict[str, int], dict[str, int], int]]:
    """After each forward and backward: what the garbage collector finds, what the ledger says, number of states."""
    census = Census()
    books: list[Ledger] = []
    counts: list[tuple[dict[str, int], int]] = []
    make_optimizer = dryrun.make_optimizer

    class Book(Ledger):
        def __init__(self) -> None:
            super().__init__()
            books.append(self)

    def noted(*args: Any) -> Any:
        optimizer = make_optimizer(*args)
        census.states = optimizer.state
        return optimizer

    def after(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            counts.append((census.count(), books[0].now().event))
            return result

        return counted

    dryrun.Ledger, dryrun.make_optimizer = Book, noted  # type: ignore[misc]
    PipelineStage.forward_one_chunk = after(PipelineStage.forward_one_chunk)
    PipelineStage.backward_one_chunk = after(PipelineStage.backward_one_chunk)
    notes = dryrun._watched_step(job, layout, job.samples // layout.data, fake=False)
    return [(count, notes.ledger.held(event), len(census.states)) for count, event in counts]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_ledger_agrees_with_the_garbage_collector(zero: int) -> None:
    job, layout = make(f"pipeline=2 shard=2 zero={zero}", 3)
    for rank in run_world(censuses, layout.world, job, layout):
        assert len(rank) == 6
        for count, held, states in rank:
            assert held["weights"] == count["weights"] > 0
            assert held["gradients"] == count["gradients"]
            assert held["optimizer"] == count["states"] + 4 * states  # each state has a number of its step


@pytest.mark.parametrize(("text", "micro_batches", "rank"), [
    ("recompute=full", 6, 0),
    ("shard=2 zero=2", 6, 1),
    ("pipeline=3", 8, 0),
    ("pipeline=3", 8, 2),
    ("pipeline=2 shard=2 zero=3 recompute=full", 7, 3),
    ("pipeline=2 schedule=interleaved", 12, 1),
    ("pipeline=2 schedule=zero-bubble", 12, 0),
    ("pipeline=2 schedule=zbv", 13, 1),
    ("pipeline=2 schedule=dualpipev", 13, 0),
])  # fmt: skip
def test_arithmetic_stands_in_for_micro_batches(text: str, micro_batches: int, rank: int) -> None:
    job, layout = make(text, micro_batches)
    part, whole = run_world(part_and_whole, 1, job, layout, rank)[0]
    assert part.ran < whole.ran == part.micro_batches == micro_batches
    for key in ("memory", "moment", "kept", "traffic"):
        assert getattr(part, key) == getattr(whole, key), key


def part_and_whole(job: Job, layout: Layout, rank: int) -> tuple[RankReport, RankReport]:
    with nobody(layout.world, rank):
        part = measure(job, layout)
    with nobody(layout.world, rank):
        return part, measure(job, layout, whole=True)


def test_what_is_sent() -> None:
    """In float32, 5 micro-batches; rank 0 holds the embedding and half of the layers, cut over two tensor ranks."""
    job, layout = make("pipeline=2 shard=2 tensor=2", 5)
    first = dry_run(job, layout, [0])[0]
    stream = SEQUENCE * WIDTH * 4
    layers = sum(name.startswith("block") for name in first.pieces[0])
    weights = first.kept["weights"]
    # Forward: a gather and a sum for attention and mlp each, a sum for the embedding. The backward mirrors them.
    edges = 5 * (4 * layers + 1)
    expected = {
        ("pipeline", "send"): (5, 5 * stream // 2),
        ("pipeline", "receive"): (5, 5 * stream // 2),
        ("shard", "reduce-scatter"): (1, weights),
        ("shard", "all-gather"): (1, weights),
        ("tensor", "all-gather"): (edges, edges * stream),
        ("tensor", "reduce-scatter"): (edges, edges * stream),
    }
    found = {(entry.axis, entry.kind): (entry.count, entry.bytes) for entry in first.traffic}
    assert {key: found[key] for key in expected} == expected


def test_a_world_of_thousands() -> None:
    layout = Layout.parse("pipeline=64 tensor=8 shard=6 micro_batch=1")
    model = MODEL | {"layers": 62, "width": 64, "heads": 8, "ffn": 64, "sequence": 8}
    job = make_job({"model": model, "batch": {"samples": 6 * 512}, "precision": "bf16"})
    assert typical_ranks(layout) == [0, 48, 1536, 3024]
    report = dry_run(job, layout, [3024])[0]
    assert report.stages == (63,) and report.pieces == (("head",),) and report.ran == 66
    assert Traffic("pipeline", "receive", 512, 512 * 64 * 2) in report.traffic


def test_reports_as_text_and_json() -> None:
    job, layout = make("pipeline=2 tensor=2", 4)
    shown: list[RankReport] = []
    reports = dry_run(job, layout, show=shown.append)
    assert [report.rank for report in reports] == [0, 2] and len(shown) == 2
    record = json.loads(json.dumps(reports[0].as_dict()))
    assert record["total"] == sum(record["memory"].values()) and list(record["memory"]) == list(ROLES)
    lines = describe(reports).splitlines()
    assert lines[0] == "Layout 'pipeline=2 tensor=2 schedule=1f1b micro_batch=1': 4 processes, 4 micro-batches a step."
    assert lines[4].split()[:5] == ["0", "0", "embed,", "1", "layer"]
    assert any(line.startswith("pipeline  send") for line in lines)


def test_a_rank_that_is_not_in_the_world() -> None:
    job, layout = make("tensor=2", 2)
    with pytest.raises(LayoutError, match="rank 2: layout 'tensor=2 micro_batch=1' has 2 ranks, from 0 to 1"):
        dry_run(job, layout, [2])
