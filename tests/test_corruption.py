"""Flipped bits are detected in the step where they happen, and the losses equal those of an undisturbed run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from test_guard import curve, events, small_job, train

from shardwise.chaos.faulty_worker import Fault, flip_tensor_bit
from shardwise.chaos.run import draw_faults
from shardwise.errors import RunError
from shardwise.integrity.checksums import COPY_KINDS, checksum, reference_ranks
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer

LAYOUTS = [
    "replicate=2", "shard=2 zero=2", "shard=2 tensor=2 zero=3", "pipeline=2 replicate=2",
]  # fmt: skip


def job_of(folder: Path, run: dict[str, object] | None = None, **changes: object) -> Job:
    return small_job(
        folder, run={"checksum_every": 1, "max_corruptions": 20, **(run or {})}, batch={"samples": 8}, **changes
    )


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunFolder]:
    """Returns a run in a layout, which no fault hits and which computes nothing twice to compare."""

    @cache
    def run_in(layout: str) -> RunFolder:
        folder = tmp_path_factory.mktemp("runs") / "run"
        return train(fork_server, job_of(folder, run={"checksum_every": 0, "redundant_compute_every": 0}), layout)

    return run_in


def label_of(run: RunFolder, fault: Fault) -> str:
    """The tensor that a fault has hit."""
    return (run.path / "faults" / f"tensor-{fault.number}").read_text()


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bits_are_named_and_leave_no_trace(
    layout: str, undisturbed: Callable[[str], RunFolder], fork_server: ForkServer, tmp_path: Path
) -> None:
    world, copied = Layout.parse(layout).world, "replicate" in layout
    faults = [
        Fault("weight", world - 1, 6, "data", 0), Fault("state", 0, 7, "forward", 1),
        Fault("weight", 0, 9, "backward", 2), Fault("state", world - 1, 10, "data", 3),
        *([Fault("gradient", 1, 11, "gradient", 4)] if copied else []),
    ]  # fmt: skip
    run = train(fork_server, job_of(tmp_path / "run", run={"redundant_compute_every": 4}), layout, *faults)
    assert curve(run) == curve(undisturbed(layout))
    told = events(run, "corruption")
    for fault in faults:
        (event,) = [e for e in told if e["step"] == fault.step and e["ranks"] == [fault.rank]]
        assert event["tensor"] == label_of(run, fault)
    assert len(events(run, "rollback")) == len(faults)
    unsettled = [event for event in told if len(event["ranks"]) > 1]  # type: ignore[arg-type]
    assert len(told) == len(faults) + len(unsettled) and len(unsettled) <= copied
    found = json.loads((run.path / "quarantine.json").read_text())
    assert {int(rank): len(finds) for rank, finds in found.items()} == {
        rank: sum(fault.rank == rank for fault in faults) for rank in {fault.rank for fault in faults}
    }


def test_in_parts_copies_that_differ_are_found_within_a_round(
    undisturbed: Callable[[str], RunFolder], fork_server: ForkServer, tmp_path: Path
) -> None:
    run = train(fork_server, job_of(tmp_path / "run", run={"checksum_every": 6}), "replicate=2", Fault("weight", 1, 6))
    assert curve(run) == curve(undisturbed("replicate=2"))
    first = events(run, "corruption")[0]
    assert 1 in first["ranks"] and 6 <= first["step"] <= 12  # type: ignore[operator]


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=3", "shard=2 tensor=2"])
def test_a_micro_batch_that_another_rank_computes_otherwise(
    layout: str, undisturbed: Callable[[str], RunFolder], fork_server: ForkServer, tmp_path: Path
) -> None:
    parsed = Layout.parse(layout)
    owner = random.Random("0 6").randrange(parsed.data) * parsed.tensor
    faults = [Fault("miscompute", owner, 6, "second", 0), Fault("miscompute", 0, 9, "first", 1)]
    run = train(fork_server, job_of(tmp_path / "run", run={"redundant_compute_every": 3}), layout, *faults)
    assert curve(run) == curve(undisturbed(layout))
    told = events(run, "corruption")
    assert [event["step"] for event in told] == [6, 9]
    for fault, event in zip(faults, told, strict=True):
        assert event["tensor"] == "micro-batch"
        first = fault.rank // parsed.tensor * parsed.tensor
        assert event["ranks"] == list(range(first, first + parsed.tensor))


def test_a_rank_that_is_found_too_often_ends_the_run(fork_server: ForkServer, tmp_path: Path) -> None:
    faults = [Fault("state", 1, step, "data", step) for step in (6, 7)]
    with pytest.raises(RunError, match=r"rank 1 on .* was corrupt 2 times, .* most recently: rank 1: optimizer state "):
        train(fork_server, job_of(tmp_path / "run", run={"max_corruptions": 1}), "shard=2", *faults)


def test_a_step_that_is_corrupt_each_time_ends_the_run(fork_server: ForkServer, tmp_path: Path) -> None:
    faults = [Fault("weight", 1, 6, "data", number) for number in range(6)]
    with pytest.raises(RunError, match="rank 1 in step 6 .* rolled back 3 times for this at step 6 and came to the"):
        train(fork_server, job_of(tmp_path / "run"), "shard=2", *faults)
    assert len(events(RunFolder.open(tmp_path / "run"), "rollback")) == 3


def test_without_a_checkpoint_all_begin_again(fork_server: ForkServer, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", checkpoint={"every": 0}, steps=6)
    run = train(fork_server, job, "shard=2", Fault("weight", 0, 3))
    other = train(fork_server, job_of(tmp_path / "other", checkpoint={"every": 0}, steps=6), "shard=2")
    assert curve(run) == curve(other)
    assert "there is no checkpoint to roll back to" in str(events(run, "failed")[0]["message"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("size", [1, 7, 64, 1001])
def test_any_single_flip_changes_a_checksum(dtype: torch.dtype, size: int) -> None:
    draw = random.Random(size)
    for offset in (0, 1):
        tensor = torch.randint(0, 100, (size + offset,)).to(dtype)[offset:]
        before, again = checksum(tensor), checksum(tensor.clone())
        assert before == again  # wherever it lies in memory
        for _ in range(20):
            flip_tensor_bit(tensor, draw)
            after = checksum(tensor)
            assert after != before
            before = after


def test_who_should_have_the_same() -> None:
    layout = Layout.parse("pipeline=2 replicate=2 shard=2 tensor=2")
    table = dict(
        zip((*COPY_KINDS, "second", "first"), reference_ranks(layout, local_sgd=False).T.tolist(), strict=True)
    )
    assert table["replicas"] == [0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11]
    assert table["full_weights"] == [0, 1] * 4 + [8, 9] * 4
    assert table["tensor"] == [rank // 2 * 2 for rank in range(16)]
    assert table["tied"] == list(range(8)) * 2
    assert table["first"] == table["full_weights"]


def test_chaos_draws_flips_only_where_they_can_be_found() -> None:
    job = small_job(Path("x"), steps=200)
    kinds = {layout: draw_faults(300, 0, Layout.parse(layout), job) for layout in ("shard=2", "replicate=2")}
    assert {fault.kind for fault in kinds["replicate=2"]} >= {"weight", "state", "gradient"}
    assert "gradient" not in {fault.kind for fault in kinds["shard=2"]}
