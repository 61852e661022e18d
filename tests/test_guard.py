"""A run recovers from real faults: each fault is named, and the losses equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from shardwise.chaos import faulty_worker
from shardwise.chaos.faulty_worker import Fault, FaultInjector, inject_faults, trigger_times
from shardwise.chaos.run import run_chaos
from shardwise.cli import app
from shardwise.errors import RepeatedFailure, RunError, StoppedError
from shardwise.integrity.detectors import LossSpikeDetector
from shardwise.job import Job, make_job
from shardwise.launch.start import launch
from shardwise.layout import Layout
from shardwise.models.config import ModelConfig
from shardwise.models.registry import family_of
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer, snapshot_folders
from shardwise.workers.repeated_failures import RepeatedFailures, normalise
from shardwise.workers.snapshots import SnapshotStore, snapshot_key
from shardwise.workers.supervisor import Supervisor

SMALL = {
    "precision": "float64", "steps": 12, "model": {"layers": 2, "width": 16, "heads": 2, "vocab": 61, "sequence": 8},
    "data": {"source": "synthetic"}, "batch": {"samples": 4}, "checkpoint": {"every": 4}, "validation": {"samples": 4},
}  # fmt: skip
FAULTY_WORKER = "planted_faults:main"


def small_job(folder: Path, run: dict[str, object] | None = None, **changes: object) -> Job:
    return make_job(SMALL | changes | {"run": {"folder": str(folder), "device": "cpu", **(run or {})}})


@lru_cache(maxsize=8)
def forward_flops(config: ModelConfig) -> list[float]:
    return family_of(config).forward_flops(config)


def train(fork_server: ForkServer, job: Job, layout: str, *faults: Fault, one_by_one: bool = False) -> RunFolder:
    """Trains with faults; `one_by_one`: with one of them in each attempt, in the order of their numbers."""
    folder = RunFolder.create(job)
    inject_faults(folder.path, list(faults))
    if one_by_one:
        (folder.path / "faults" / "one-by-one").touch()
    (folder.path / "faults" / "flops.json").write_text(json.dumps([job.model.name, forward_flops(job.model)]))
    launch(folder, Layout.parse(layout), resume=False, entry=FAULTY_WORKER, fork_server=fork_server)
    return folder


def curve(folder: RunFolder) -> list[tuple[int, int, float, float]]:
    return [(r["step"], r["samples"], r["loss"], r["grad_norm"]) for r in folder.metrics()]


def events(folder: RunFolder, kind: str) -> list[dict[str, object]]:
    return [event for event in folder.events() if event["event"] == kind]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run waits long before its second restart without progress."""
    monkeypatch.setattr("shardwise.workers.supervisor.INITIAL_BACKOFF", 0.01)


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(fork_server, small_job(tmp_path_factory.mktemp("runs") / "run"), "shard=2")


def test_killed_and_stopped_ranks_are_named_and_the_curve_stays(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    faults = [
        Fault("kill", 1, 6, "backward", 0), Fault("stop", 0, 7, "forward", 1), Fault("kill", 0, 8, "save", 2),
        Fault("kill", 1, 0, "load", 3), Fault("kill", 0, 10, "optimizer", 4),
    ]  # fmt: skip
    job = small_job(tmp_path / "run", run={"max_restarts": 5})
    # A thread writes the checkpoint of step 8 beside the next steps, perhaps until step 10.
    run = train(fork_server, job, "shard=2", *faults, one_by_one=True)
    assert curve(run) == curve(undisturbed)
    told = [event for kind in ("killed", "suspended") for event in events(run, kind)]
    times = trigger_times(run.path)
    assert len(times) == len(told) == len(faults)
    at = {(fault.rank, times[fault.number]) for fault in faults}
    for event in told:
        assert any(rank in event["ranks"] and 0 < event["time"] - when < 5 for rank, when in at)  # type: ignore[operator]
        assert str(event["message"]).startswith(f"rank {event['ranks'][0]} ")
    assert "is stopped (SIGSTOP)" in str(events(run, "suspended")[0]["message"])
    assert events(run, "resumed")[-1]["step"] >= 4


def test_a_crash_loop_ends_with_its_cause(fork_server: ForkServer, tmp_path: Path) -> None:
    faults = [Fault("raise", 1, 2, "data", number) for number in range(3)]
    with pytest.raises(
        RunError, match="rank 1 failed(.|\n)*injected at step 2(.|\n)*second identical failure at step 2"
    ):
        train(fork_server, small_job(tmp_path / "run"), "shard=2", *faults)
    run = RunFolder.open(tmp_path / "run")
    assert len(events(run, "failed")) == 1 and len(trigger_times(run.path)) == 2
    found = json.loads(sorted((run.path / "doctor").glob("*/diagnosis.json"))[-1].read_text())
    assert found["culprits"] == [1]


def test_restarts_that_get_no_further_are_bounded(fork_server: ForkServer, tmp_path: Path) -> None:
    faults = [Fault("kill", 0, 3, "forward", number) for number in range(3)]
    with pytest.raises(
        RunError,
        match=r"rank 0 was killed by SIGKILL in step 3 \(computing\). Giving up after 1 restart without progress.",
    ):
        train(fork_server, small_job(tmp_path / "run", run={"max_restarts": 1}), "shard=2", *faults)


def test_a_signal_in_the_pause_before_a_restart_ends_the_run_at_once(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler gives half a minute; the pause may be longer."""
    monkeypatch.setattr("shardwise.workers.supervisor.INITIAL_BACKOFF", 1000.0)
    monkeypatch.setattr("shardwise.workers.supervisor.MAX_BACKOFF", 1000.0)

    def signal_in_the_pause(supervisor: Supervisor, seconds: float) -> None:
        if seconds:
            supervisor.forward_signal(signal.SIGTERM)
        pause(supervisor, seconds)

    pause = Supervisor._pause
    monkeypatch.setattr(Supervisor, "_pause", signal_in_the_pause)
    faults = [Fault("kill", 0, 3, "forward", number) for number in range(3)]
    with pytest.raises(StoppedError, match="stopped by SIGTERM in the pause before a restart; .* goes on from there"):
        train(fork_server, small_job(tmp_path / "run", run={"standby": False}), "shard=2", *faults)


def test_no_run_restarts_more_than_three_times_for_the_same_cause(fork_server: ForkServer, tmp_path: Path) -> None:
    """Whatever `run.max_restarts` is, and when a scheduler starts the launcher again; progress begins a new count."""
    faults = [Fault("kill", 1, 3 if number else 1, "forward", number) for number in range(6)]
    job = small_job(tmp_path / "run", run={"max_restarts": 99, "standby": False}, checkpoint={"every": 0}, steps=4)
    sentence = (
        r"was killed by SIGKILL in step 3 \(computing\)\. The run has restarted 3 times for this cause at step 3 and "
        r"got no further, so it ends: see `shardwise doctor \S+/run`, remove the cause, and continue the run with "
        r"`shardwise train --resume \S+/run`\.$"
    )
    with pytest.raises(RepeatedFailure, match=sentence) as ended:
        train(fork_server, job, "shard=2", *faults)
    assert ended.value.exit_code == 2  # what no scheduler starts again
    run = RunFolder.open(tmp_path / "run")
    assert len(events(run, "killed")) == 1 + 3

    with pytest.raises(RepeatedFailure, match=sentence):
        launch(run, Layout.parse("shard=2"), resume=True, entry=FAULTY_WORKER, fork_server=fork_server)
    assert len(trigger_times(run.path)) == 6 and len(events(run, "killed")) == 1 + 3

    launch(run, Layout.parse("shard=2"), resume=True, entry=FAULTY_WORKER, fork_server=fork_server)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    assert not RepeatedFailures(run.path).counts  # it got further


def test_workers_that_end_before_they_train_are_not_restarted_forever(fork_server: ForkServer, tmp_path: Path) -> None:
    """They leave neither a heartbeat nor an error: here, because a file that they read is cut."""
    run = RunFolder.create(small_job(tmp_path / "run", run={"max_restarts": 99, "standby": False}))
    inject_faults(run.path, [])
    (run.path / "faults" / "0").touch()
    with pytest.raises(RepeatedFailure, match="exited with code 1 .* restarted 3 times for this cause at step 0"):
        launch(run, Layout.parse("shard=2"), resume=False, entry=FAULTY_WORKER, fork_server=fork_server)
    assert len(events(run, "killed")) == 3


def test_failures_of_one_cause_are_counted_until_there_is_progress(tmp_path: Path) -> None:
    cause = normalise("out of memory: tried to allocate 20.5 MiB at 0x7f3a, rank 3")
    assert cause == normalise("out of memory: tried to allocate 3 MiB  at 0x9, rank 12") != normalise("out of disk")
    for count in (1, 2, 3):  # each in a launcher of its own
        assert RepeatedFailures(tmp_path).add(cause, 4, 5) == count
    repeated = RepeatedFailures(tmp_path)
    assert repeated.add("was killed by SIGKILL", 4, 5) == repeated.add(cause, 5, 5) == 1
    assert repeated.add(cause, 4, 5) == 4
    assert repeated.add(cause, 4, 6) == 1
    for damage in ("", "[]", '{"step": 6, "failures": [[1]]}', '{"step": null, "failures": []}'):
        (tmp_path / "restarts.json").write_text(damage)
        assert RepeatedFailures(tmp_path).add(cause, 4, 6) == 1


def test_progress_of_an_attempt_that_was_stopped_is_progress(tmp_path: Path) -> None:
    """A scheduler's signal ends most attempts of a long run; each may have begun with one failure."""
    for _ in range(3):
        RepeatedFailures(tmp_path).add("was killed by SIGKILL", 0, 5)
    RepeatedFailures(tmp_path).reached(5)
    assert RepeatedFailures(tmp_path).add("was killed by SIGKILL", 0, 5) == 4
    RepeatedFailures(tmp_path).reached(9)
    assert RepeatedFailures(tmp_path).add("was killed by SIGKILL", 0, 0) == 1

    other = tmp_path / "other"
    other.mkdir()
    RepeatedFailures(other).reached(9)
    assert not list(other.iterdir())  # a run without a failure has nothing to remember


def test_a_fault_that_is_killed_as_it_is_marked_is_marked_whole_or_not(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    injector = FaultInjector(tmp_path, None, [Fault("kill", 0, 1)])  # type: ignore[arg-type]
    injector.step = 1
    pid = os.fork()
    if not pid:
        faulty_worker.time.time = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
        injector.take_due("kill")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert trigger_times(tmp_path) == {}
    assert injector.take_due("kill") is not None
    assert injector.take_due("kill") is None
    assert list(trigger_times(tmp_path)) == [0]


def test_a_passing_nan_is_rolled_back_and_leaves_no_trace(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    run = train(fork_server, small_job(tmp_path / "run", run={"on_nan": "rollback"}), "shard=2", Fault("nan", 1, 7))
    assert curve(run) == curve(undisturbed)
    (event,) = events(run, "rollback")
    assert event["message"] == (
        "step 7 had a gradient norm of nan, so its update was skipped; a replay of the step is finite, so the fault "
        "was transient; rolling back to step 4."
    )


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ["shard=2", "pipeline=2", "tensor=2"])
def test_infinity_is_traced_to_its_module_and_rank(layout: str, fork_server: ForkServer, tmp_path: Path) -> None:
    job = small_job(tmp_path / "run", run={"on_nan": "stop"})
    with pytest.raises(
        RunError, match=r'step 3 .* update was skipped; non-finite .* in the output of [\w.]*up on rank 1. .*"stop"'
    ):
        train(fork_server, job, layout, Fault("inf", 1, 3, "up"))


def test_a_step_that_is_never_finite_is_skipped_after_a_second_try(fork_server: ForkServer, tmp_path: Path) -> None:
    run = train(
        fork_server, small_job(tmp_path / "run", run={"on_nan": "rollback"}), "shard=2", Fault("inf", 0, 6, "up")
    )
    assert len(events(run, "rollback")) == len(events(run, "step_skipped")) == 1
    assert [record["step"] for record in run.metrics()] == list(range(1, 13))


def test_a_spike_is_left_out_with_the_batches_since_the_checkpoint(fork_server: ForkServer, tmp_path: Path) -> None:
    changes = {"steps": 24, "checkpoint": {"every": 18}}
    job = small_job(tmp_path / "run", run={"loss_spike_threshold": 10.0}, **changes)
    run = train(fork_server, job, "shard=2", Fault("spike", 0, 20), Fault("spike", 1, 20, number=1))
    (event,) = events(run, "rollback")
    assert str(event["message"]).startswith("step 20 had a loss of 1000, ")
    assert str(event["message"]).endswith("rolling back to step 18 and skipping the 2 batches since.")
    assert run.skipped_batches() == [(18, 2)]
    other = small_job(tmp_path / "other", run={"folder": str(tmp_path / "other")}, **changes)
    RunFolder(tmp_path / "other").path.mkdir()
    RunFolder(tmp_path / "other").add_skip(18, 2)
    assert curve(train(fork_server, other, "shard=2")) == curve(run)


def test_spikes_are_told_from_noise() -> None:
    draw = random.Random(0)
    clean = [3.0 * 0.999**step + draw.gauss(0, 0.05) for step in range(10_000)]
    detector = LossSpikeDetector(10.0)
    assert not any(detector.evaluate(loss) for loss in clean)
    assert detector.evaluate(2.0) and detector.evaluate(2.0) and not detector.evaluate(clean[-1])


@pytest.mark.cluster
def test_chaos_in_short(tmp_path: Path) -> None:
    job = small_job(tmp_path, steps=16, checkpoint={"every": 3, "snapshot_every": 0}).to_toml()
    (tmp_path / "job.toml").write_text(job)
    report = run_chaos(tmp_path / "job.toml", ["layout=shard=2"], 6, 178, print)
    print(report.text())
    assert {outcome.fault.kind for outcome in report.outcomes} == {"kill", "stop", "flip", "nan", "weight", "state"}
    assert report.ok, report.text()
    assert report.corrupted_checkpoints == report.rejected_checkpoints == 1


def test_a_restart_goes_on_from_memory_and_the_curve_stays(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    job = small_job(tmp_path / "run", checkpoint={"every": 0, "snapshot_every": 1})
    run = train(fork_server, job, "shard=2", Fault("kill", 1, 8, "data"), Fault("kill", 0, 11, "forward", 1))
    assert curve(run) == curve(undisturbed)
    assert [event["source"] for event in events(run, "resumed")] == ["memory", "memory"]
    deadline = time.monotonic() + 10  # the fork server outlives the run, and removes it
    while snapshot_folders(snapshot_key(run.path, 0)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not snapshot_folders(snapshot_key(run.path, 0))


def test_a_snapshot_with_a_flipped_bit_is_not_loaded(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    job = small_job(tmp_path / "run", checkpoint={"every": 4, "snapshot_every": 3, "asynchronous": False})
    run = train(fork_server, job, "shard=2", Fault("flip memory", 1, 8, "data"))
    assert curve(run) == curve(undisturbed)
    assert [event["source"] for event in events(run, "resumed")] == ["disk"]


def test_snapshots_without_room_are_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4096))
    snapshots = SnapshotStore(tmp_path / "memory", "shard=2", lambda one: [one])
    problem = snapshots.check_space({"weights.a": torch.zeros(1024)})
    assert problem.startswith("snapshots are disabled: the ranks of this node need ") and "are available in" in problem


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path / "run"]
    if os.geteuid() != 0 or subprocess.run(small, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        job = small_job(tmp_path / "run", checkpoint={"every": 4, "snapshot_every": 0, "asynchronous": False})
        faults = Fault("fill", 0, 7), Fault("kill", 1, 8, "optimizer", 1), Fault("free", 0, 11, number=2)
        run = train(fork_server, job, "shard=2", *faults)
        assert curve(run) == curve(undisturbed)
        (event,) = events(run, "checkpoint_failed")
        said = str(event["message"])
        assert said.startswith("the checkpoint of step 8 could not be written to ") and "No space left" in said
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000004", "step-00000012"]
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


def test_a_place_that_is_given_up_leaves_fewer_processes_in_a_new_layout(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    job = small_job(
        tmp_path / "run", run={"max_restarts": 1, "elastic": True}, checkpoint={"every": 4, "snapshot_every": 0}
    )
    faults = [Fault("kill", 2, 6, "forward", number) for number in range(2)]
    run = train(fork_server, job, "pipeline=3", *faults)
    (event,) = events(run, "scaled_down")
    assert event["ranks"] == [2] and "continuing with " in str(event["message"])
    layout = Layout.parse(str(event["layout"]))
    assert layout.world < 3 and events(run, "resumed")[-1]["layout"] == str(layout)
    for ours, theirs in zip(curve(run), curve(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def test_a_run_goes_on_with_another_number_of_processes(
    undisturbed: RunFolder, fork_server: ForkServer, tmp_path: Path
) -> None:
    job = small_job(tmp_path / "run", run={"max_restarts": 0}, checkpoint={"every": 4, "asynchronous": False})
    with pytest.raises(RunError, match="injected at step 6"):
        train(fork_server, job, "replicate=2 tensor=2", Fault("raise", 3, 6))
    run = RunFolder(tmp_path / "run")
    resumed = CliRunner().invoke(app, ["train", "--resume", str(run.path), "--processes", "2"])
    assert resumed.exit_code == 0, resumed.output
    (event,) = events(run, "resumed")
    assert event["step"] == 4 and Layout.parse(str(event["layout"])).world == 2
    for ours, theirs in zip(curve(run), curve(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
