"""From a killed rank to the next step, what a save costs, and what watching costs, on CPU processes.

    python benchmarks/recovery.py                     all three
    python benchmarks/recovery.py recovery --kills 9  one of: recovery, stall, watch

Recovery: rank 1 is killed by SIGKILL in the middle of a step, again and again. By phase: *detect* until the event that
names it, *restart* until all ranks have joined and built the model, *load* until the state is there, *first step* until
a step is done. Beside it a cold start: the same command with `--resume`, to its first step.

Stall: how long a save holds up training, by torch.save, by ours, and as a snapshot in memory. Watch: what signs of life
cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.chaos import faulty_worker
from shardwise.chaos.faulty_worker import Fault, inject_faults, trigger_times
from shardwise.job import Job, make_job
from shardwise.launch import worker
from shardwise.launch.launch import launch
from shardwise.layout import Layout
from shardwise.train import checkpoint
from shardwise.train.loop import Trainer
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.heartbeat import Heartbeat

MODEL = {"layers": 4, "width": 128, "heads": 4, "vocab": 512, "sequence": 64}
PHASES = ("detect", "restart", "load", "first step")


def job_of(folder: Path, steps: int, model: dict[str, int] = MODEL, **changes: Any) -> Job:
    run = {"folder": str(folder), "device": "cpu", "max_restarts": 100} | changes.pop("run", {})
    given = {"steps": steps, "model": model, "data": {"source": "synthetic"}, "batch": {"samples": 8},
             "validation": {"samples": 8}, "checkpoint": {"every": 5}} | changes  # fmt: skip
    return make_job(given | {"run": run})


def main_of_a_worker(arguments: list[str]) -> None:
    """A worker that also writes down when it came where."""
    times = Path(arguments[0]) / f"times-{os.getpid()}"
    begin = Trainer.run

    def run(trainer: Trainer) -> None:
        mark, measure = trainer.set_phase, trainer.metrics.log_step

        def note(phase: str, step: int) -> None:
            mark(phase, step)
            _write(times, phase)

        def take(*args: Any) -> Any:
            told = measure(*args)
            _write(times, "done")
            return told

        trainer.set_phase, trainer.metrics.log_step = note, take  # type: ignore[method-assign]
        begin(trainer)

    Trainer.run = run  # type: ignore[method-assign]
    faulty_worker.main(arguments)


def _write(path: Path, what: str) -> None:
    with path.open("a") as file:
        file.write(f"{time.time()} {what}\n")


def _firsts(run: Path) -> list[dict[str, float]]:
    """For each process that a world had, when it first came where."""
    found = []
    for path in run.glob("times-*"):
        first: dict[str, float] = {}
        for line in path.read_text().splitlines():
            when, what = line.split()
            first.setdefault(what, float(when))
        found.append(first)
    return found


def recovery(kills: int, layout: str, changes: list[str]) -> None:
    world = Layout.parse(layout).world
    settings: dict[str, Any] = {}
    for change in changes:
        section, _, rest = change.partition(".")
        key, _, value = rest.partition("=")
        settings.setdefault(section, {})[key] = json.loads(value)
    with tempfile.TemporaryDirectory() as scratch:
        every = 20
        folder = RunFolder.create(job_of(Path(scratch) / "run", every * (kills + 1), **settings))
        faults = [Fault("kill", 1, every * (number + 1) + 1, "backward", number) for number in range(kills)]
        inject_faults(folder.path, faults)
        fork_server = ForkServer("recovery")
        try:
            launch(folder, Layout.parse(layout), False, entry="recovery:main_of_a_worker", fork_server=fork_server)
        finally:
            fork_server.close()
        found = [_phases(folder, when, world) for when in sorted(trigger_times(folder.path).values())]
        cold = _cold(folder, layout)
    print(f"\nkill -9 to the next step, {world} processes, '{layout}', {len(found)} kills; seconds")
    print(f"{'':12s} {'median':>8s} {'most':>8s}")
    for name in PHASES:
        values = [one[name] for one in found]
        print(f"{name:12s} {statistics.median(values):8.2f} {max(values):8.2f}")
    whole = [sum(one[name] for name in PHASES) for one in found]
    print(f"{'all':12s} {statistics.median(whole):8.2f} {max(whole):8.2f}")
    print(f"{'cold start':12s} {cold:8.2f}  the command itself, to its first step")


def _phases(folder: RunFolder, killed: float, world: int) -> dict[str, float]:
    named = next(event["time"] for event in folder.events() if event["event"] == "killed" and event["time"] > killed)
    later = [first for first in _firsts(folder.path) if first.get("loading", 0.0) > killed]
    attempt = sorted(later, key=lambda first: first["loading"])[:world]
    moments = [killed, named, *(max(first[what] for first in attempt) for what in ("loading", "data", "done"))]
    return {name: later - earlier for name, earlier, later in zip(PHASES, moments, moments[1:])}


def _cold(folder: RunFolder, layout: str) -> float:
    """Seconds of `shardwise train --resume` until its first step is done."""
    steps = folder.job().total_steps
    command = [sys.executable, "-m", "shardwise", "train", "--resume", str(folder.path), "--set", f"steps={steps + 2}"]
    begin = time.time()
    process = subprocess.Popen([*command, "--layout", layout], stdout=subprocess.DEVNULL)
    while process.poll() is None and not any(record["step"] > steps for record in folder.metrics()):
        time.sleep(0.01)
    seconds = time.time() - begin
    process.wait()
    return seconds


STATE = {"layers": 3, "width": 640, "heads": 8, "vocab": 1024, "sequence": 8}


def main_of_a_saver(arguments: list[str]) -> None:
    """A worker that writes down how long saves hold up training; with PLAIN, by torch.save instead of ours."""
    stalls = Path(arguments[0]) / f"stalls-{os.environ['RANK']}"
    if os.environ.get("PLAIN"):
        checkpoint.CheckpointManager.save = plain_save  # type: ignore[method-assign]
        checkpoint.CheckpointManager.finish = lambda self: None  # type: ignore[method-assign]

    def timed(name: str) -> None:
        real = getattr(checkpoint.CheckpointManager, name)

        def both(*args: Any) -> Any:
            begin = time.perf_counter()
            result = real(*args)
            with stalls.open("a") as file:
                file.write(f"{name} {time.perf_counter() - begin}\n")
            return result

        setattr(checkpoint.CheckpointManager, name, both)

    timed("save")
    timed("snapshot")
    worker.main(arguments)


def plain_save(self: Any, step: int, engine: Any, optimizer: Any, state: Any) -> None:
    """What many write: a file of each rank, in place of the last one."""
    tensors = {name: piece.tensor for name, piece in checkpoint.collect_pieces(engine, optimizer).items()}
    torch.save({"step": step, "tensors": tensors}, self.folder / f"rank-{engine.mesh.rank}.pt")


def stall(layout: str = "shard=2") -> None:
    rows, size = {}, 0
    for name, settings in {
        "torch.save": {"asynchronous": False}, "ours, blocking": {"asynchronous": False},
        "ours, asynchronous": {"asynchronous": True}, "snapshot in memory": {"asynchronous": True, "snapshot_every": 3},
    }.items():  # fmt: skip
        os.environ["PLAIN"] = "1" if name == "torch.save" else ""
        with tempfile.TemporaryDirectory() as scratch:
            every = 0 if "snapshot_every" in settings else 4
            given = {"every": every, "keep": 1, "snapshot_every": 0} | settings
            job = job_of(Path(scratch) / "run", 17, STATE, checkpoint=given, run={"standby": False})
            folder, fork_server = RunFolder.create(job), ForkServer("recovery")
            try:
                launch(folder, Layout.parse(layout), False, entry="recovery:main_of_a_saver", fork_server=fork_server)
            finally:
                fork_server.close()
            wanted = "snapshot" if "snapshot_every" in settings else "save"
            lines = [line.split() for line in (folder.path / "stalls-0").read_text().splitlines()]
            size = sum(path.stat().st_size for path in folder.checkpoints.rglob("*.distcp")) or size
            rows[name] = [float(seconds) for what, seconds in lines if what == wanted][1 : -1 if every else None]
    print(f"\nstall of a save, {size / 1e6:.0f} MB over 2 processes, '{layout}'; seconds, the first of each left out")
    print(f"{'':20s} {'median':>8s} {'most':>8s}  saves")
    for name, values in rows.items():
        print(f"{name:20s} {statistics.median(values):8.3f} {max(values):8.3f}  {len(values)}")


def watch(marks: int = 20_000) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        begin, used = time.perf_counter(), time.process_time()
        heartbeat = Heartbeat(Path(scratch), 0)
        time.sleep(2.0)
        idle = (time.process_time() - used) / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for number in range(marks):
            heartbeat.set_phase("computing", number)
        each = (time.perf_counter() - begin) / marks
    print(f"\na sign of life: {1e6 * each:.0f} us, twice a step; its thread: {100 * idle:.2f}% of a core;")
    print(f"together {100 * (2 * each / 0.1 + idle):.2f}% of a step of 0.1 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", help="recovery, stall, watch; without it all")
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--layout", default="replicate=2 tensor=2")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the job; JSON")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    if not given.what or "recovery" in given.what:
        recovery(given.kills, given.layout, given.set)
    if not given.what or "stall" in given.what:
        stall()
    if not given.what or "watch" in given.what:
        watch()


if __name__ == "__main__":
    main()
