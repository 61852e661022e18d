"""The doctor names the culprit of an injected hang: rank, operation, axis, place."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from test_guard import small_job, train

from shardwise.chaos.faulty_worker import Fault
from shardwise.errors import JobError, RunError
from shardwise.job import make_job
from shardwise.workers import diagnosis
from shardwise.workers.diagnosis import TERMINATED, Heartbeat, read_heartbeats
from shardwise.workers.fork_server import ForkServer


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("loop", "shard=2 tensor=2"), ("sleep", "shard=2"), ("stop", "shard=2"),
     *((kind, layout) for kind in ("skip", "mismatch") for layout in ("shard=2 tensor=2", "pipeline=2 replicate=2"))],
)  # fmt: skip
def test_the_culprit_is_named(kind: str, layout: str, fork_server: ForkServer, tmp_path: Path) -> None:
    job = small_job(tmp_path / "run", run={"hang_timeout": 2.0, "max_restarts": 0}, validation={"samples": 1})
    with pytest.raises(RunError, match="rank 1 "):
        train(fork_server, job, layout, Fault(kind, 1, 4, "forward"))
    (found,) = (tmp_path / "run" / "doctor").glob("*/diagnosis.json")
    assert json.loads(found.read_text())["culprits"] == [1], found.read_text()
    said = "\n".join(diagnosis.diagnose_run(tmp_path / "run"))
    print(said)
    expected = {
        "loop": r"rank 1 has been stuck in step 4 \(computing\) for .*planted_faults.py:.*trigger",
        "stop": "rank 1 is stopped",
        "sleep": r"rank 1 has been stuck in step 4 \(data\) for .*loader.py:.*__next__",
        "skip": r"rank 1 broke the common order .* instead of all_reduce #3 \(scalar\) on axis data",
        "mismatch": r"rank 1 broke the common order .* called all_reduce #4 \(77\) on axis data instead of",
    }[kind]  # fmt: skip
    assert re.search(expected, said)
    if kind == "mismatch":  # gloo ended rank 0 or 3 with a C++ exception: the victim, not the culprit
        assert any(TERMINATED in path.read_text() for path in found.parent.glob("rank-[03].stack"))
    assert kind == "mismatch" or re.search(r"ranks? 0.* been waiting in all_reduce #.* on axis", said)


def test_a_run_that_is_fine_has_no_findings(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(make_job({}).to_toml())
    assert diagnosis.diagnose_run(tmp_path) == [
        "no rank of this run is alive on this machine, and no fault was recorded."
    ]
    with pytest.raises(JobError, match="is not a run folder"):
        diagnosis.diagnose_run(tmp_path / "none")


@pytest.mark.cluster
def test_a_rank_that_aborts_or_crashes_is_to_blame_in_young_attempts_too(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """A survivor has no usual order of collectives yet, so everything it calls seems to break it."""
    faults = [
        Fault("abort", 1, 1, "data", 0), Fault("segfault", 0, 2, "forward", 1), Fault("abort", 3, 3, "backward", 2),
        Fault("abort", 0, 4, "optimizer", 3), Fault("native abort", 2, 5, "backward", 4),
    ]  # fmt: skip
    checkpoint = {"every": 0, "snapshot_every": 1}
    job = small_job(tmp_path / "run", run={"max_restarts": 9, "standby": False}, checkpoint=checkpoint, steps=6)
    events = list(train(fork_server, job, "replicate=2 tensor=2", *faults).events())
    assert [event["ranks"] for event in events if event["event"] == "killed"] == [[1], [0], [3], [0], [2]]


def test_a_stack_dump_does_not_crash_a_rank_whose_other_threads_run(tmp_path: Path) -> None:
    """From a signal handler, reading the frames of other threads crashes within a second if these come and go."""

    def churn() -> None:
        while True:
            thread = threading.Thread(target=exec, args=("def f(n): return n and f(n - 1)\nf(9)", {}))
            thread.start()
            thread.join()

    pid = os.fork()
    if not pid:
        Heartbeat(tmp_path, 0)
        threading.Thread(target=churn, daemon=True).start()
        time.sleep(60)
    while not read_heartbeats(tmp_path):
        time.sleep(0.01)
    for _ in range(300):
        time.sleep(0.003)
        os.kill(pid, signal.SIGUSR1)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the rank crashed"
    stack, deadline, size = tmp_path / "heartbeats" / "rank-0.stack", time.monotonic() + 20, 0
    while time.monotonic() < deadline and size != stack.stat().st_size:  # until the last dump is complete
        size = stack.stat().st_size
        time.sleep(0.4)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    frames, terminated = diagnosis._read_frames(stack)
    assert "in churn" in stack.read_text() and not terminated  # all threads, dumped by one that holds the GIL
    assert any(frame[2].startswith("test_a_stack_dump") for frame in frames)  # the main thread


def test_no_signal_reaches_a_process_that_is_no_rank(tmp_path: Path) -> None:
    """A damaged heartbeat may have the pid of any process, which SIGUSR1 would end."""
    (tmp_path / "job.toml").write_text(make_job({}).to_toml())
    (tmp_path / "heartbeats").mkdir()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        record = {"rank": 0, "pid": stranger.pid, "host": socket.gethostname(), "step": 3, "phase": "data"}
        path = tmp_path / "heartbeats" / "rank-0.json"
        path.write_text(json.dumps({**record, "since": 1.0, "heartbeat": time.time() + 60}))
        assert diagnosis.diagnose_run(tmp_path)[0].startswith("no rank of this run is alive")
        assert stranger.poll() is None
        stranger.kill()
