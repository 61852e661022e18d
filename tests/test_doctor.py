"""The doctor names the planted culprit of a hang: rank, operation, axis, place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_guard import small_job, train

from shardwise.chaos.faulty_worker import Fault
from shardwise.errors import JobError, RunError
from shardwise.workers import diagnosis
from shardwise.workers.fork_server import ForkServer


@pytest.fixture(scope="module")
def nursery() -> Iterator[ForkServer]:
    one = ForkServer("shardwise.chaos.faulty_worker")
    yield one
    one.close()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "shard=2 tensor=2") for kind in ("loop", "sleep", "stop", "skip", "mismatch")),
     ("skip", "pipeline=2 replicate=2"), ("mismatch", "pipeline=2 replicate=2")],
)  # fmt: skip
def test_the_culprit_is_named(kind: str, layout: str, fork_server: ForkServer, tmp_path: Path) -> None:
    job = small_job(tmp_path / "run", run={"hang_timeout": 3.0, "max_restarts": 0}, validation={"samples": 1})
    with pytest.raises(RunError, match="rank 1 "):
        train(fork_server, job, layout, Fault(kind, 1, 4, "forward"))
    (found,) = (tmp_path / "run" / "doctor").glob("*/diagnosis.json")
    assert json.loads(found.read_text())["culprits"] == [1], found.read_text()
    said = "\n".join(diagnosis.diagnose_run(tmp_path / "run"))
    print(said)
    expected = {
        "loop": "rank 1 is stuck in step 4, computing, since .*chaos/victim.py:.*fire", "stop": "rank 1 is stopped",
        "sleep": "rank 1 is stuck in step 4, data, since .*loader.py:.*__next__",
        "skip": r"rank 1 left the order .* where all_reduce number 3 \(scalar\) over axis data used to be",
        "mismatch": r"rank 1 left the order .* with all_reduce number 4 \(77\) over axis data, where",
    }[kind]  # fmt: skip
    assert re.search(expected, said)
    assert kind == "mismatch" or re.search(r"ranks? 0.* waits? in all_reduce number .* over axis", said)


def test_a_run_that_is_fine_has_no_findings(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    assert diagnosis.diagnose_run(tmp_path) == ["no rank is alive here, and nothing was found wrong with this run."]
    with pytest.raises(JobError, match="is no run folder"):
        diagnosis.diagnose_run(tmp_path / "none")
