"""Kills the launcher of a run in an object store again and again, each time on a "machine" of its own, whose disk is
lost with it. The run must end with the losses of an undisturbed run, bit by bit, and after each kill the store must
have what it had: every checkpoint that counts as complete matches its hashes, and none is older than the one before.

    python benchmarks/store_kills.py --kills 100                     a store in the file system
    python benchmarks/store_kills.py --kills 100 --url s3://bucket/kills     any other; it must be empty

Launchers are forked from one process that has imported everything, so that a start takes a second.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import shardwise.launch.start
from shardwise.errors import ShardwiseError
from shardwise.job import make_job
from shardwise.train.checkpoint_folder import file_problem, parse_manifest, save_order
from shardwise.train.run_folder import RunFolder
from shardwise.train.run_store import RunStore, local_folder

JOB = {
    "precision": "float64", "layout": "replicate=2", "steps": 60,
    "model": {"layers": 2, "width": 16, "heads": 2, "vocab": 61, "sequence": 8}, "batch": {"samples": 4},
    "data": {"source": "synthetic"}, "validation": {"samples": 4},
    "optimizer": {"schedule": "constant", "warmup": 0},  # the number of steps grows
    "checkpoint": {"every": 1, "keep": 2, "snapshot_every": 0}, "run": {"device": "cpu", "standby": False},
}  # fmt: skip


def launch(job_file: Path, folder: str, steps: int, cache: Path) -> int:
    """Starts a launcher; returns its process id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        os.environ["SHARDWISE_CACHE"] = str(cache)
        quiet = os.open(cache.parent / "launchers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        settings = [f"run.folder={folder}", f"steps={steps}"]
        shardwise.launch.start.start_training(job_file, settings, None, lambda text: print(text, flush=True), True)
        code = 0
    except ShardwiseError as error:
        print(f"shardwise: {error}", flush=True)
        code = error.exit_code
    finally:
        os._exit(code)


def in_child(function: object, *arguments: object) -> None:
    """Calls a function in a forked process, because a store may start threads, which do not survive a fork."""
    sys.stdout.flush()
    if not (pid := os.fork()):
        code = 1
        try:
            function(*arguments)  # type: ignore[operator]
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def check_store(url: str, scratch: Path) -> None:
    """Checks every checkpoint that counts as complete, and that the newest is none older than the last time."""
    os.environ["SHARDWISE_CACHE"] = str(scratch / "check")
    store, last = RunStore(local_folder(url, "check")), scratch / "newest"
    names = []
    for name, content in store.complete().items():
        path = store.checkpoints / name
        shutil.rmtree(path, ignore_errors=True)
        store.fetch(name, content)
        assert not [
            p for file, info in parse_manifest(content)["files"].items() if (p := file_problem(path, file, info))
        ], name
        names.append(name)
    before = last.read_text() if last.exists() else ""
    if before:
        assert names and save_order(names[0]) >= save_order(before), (names, before)
    if names:
        last.write_text(names[0])
        store.download()
        metrics = [record["step"] for record in RunFolder(store.folder).metrics()]
        assert metrics == list(range(1, len(metrics) + 1)) and len(metrics) >= save_order(names[0])[0]
    print(f"complete: {', '.join(names) or 'none'}")


def curve(folder: RunFolder) -> list[tuple[int, int, float, float]]:
    return [(record["step"], record["samples"], record["loss"], record["grad_norm"]) for record in folder.metrics()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="the longest life of a launcher")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no more launchers are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    scratch, chance = Path(tempfile.mkdtemp(prefix="store-kills-")), random.Random(options.seed)
    url, steps, kills, idle = options.url or f"file://{scratch}/store/run", JOB["steps"], 0, 0
    job_file = scratch / "job.toml"
    job_file.write_text(make_job(JOB).to_toml())
    last = time.monotonic() + 60 * options.minutes
    while kills < options.kills and time.monotonic() < last:
        cache = scratch / f"machine-{kills}-{idle}"
        pid, code = launch(job_file, url, steps, cache), None
        # One in four is killed while it starts, the others some time after their first step.
        is_early = chance.random() < 0.25
        end = time.monotonic() + chance.uniform(0.2, 3.0) if is_early else None
        while code is None and (end is None or time.monotonic() < end):
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            beats = list(cache.glob("runs/*/heartbeats/rank-0.json"))
            if end is None and beats and "computing" in beats[0].read_text():
                end = time.monotonic() + chance.uniform(0.0, options.seconds)
            time.sleep(0.01)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
            print(f"kill {kills} of {options.kills}, at most {steps} steps; ", end="")
        else:
            assert code == 0, f"a launcher ended with {code}; see {scratch / 'launchers.log'}"
            steps += JOB["steps"]  # it has come to its end: it goes on to the next
            idle += 1
            print("at its end; ", end="")
        in_child(check_store, url, scratch)
        shutil.rmtree(cache, ignore_errors=True)
    for folder in (url, str(scratch / "plain")):
        pid = launch(job_file, folder, steps, scratch / "last")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.environ["SHARDWISE_CACHE"] = str(scratch / "last")
    run, plain = RunFolder.open(Path(url)), RunFolder(scratch / "plain")
    losses = curve(plain)
    assert curve(run) == losses and len(losses) == steps
    resumed = sum(event["event"] == "resumed" for event in run.events())
    print(f"{kills} kills, {resumed} resumes from the store: {steps} losses and norms are those of an undisturbed run.")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
