"""Measures recovery time, checkpoint stalls and heartbeat overhead on CPU processes.

    python benchmarks/recovery.py                     all three
    python benchmarks/recovery.py recovery --kills 9  one of: recovery, stall, heartbeat

Recovery: rank 1 is repeatedly killed with SIGKILL in the middle of a step. Phases: *detect* until the event that names
the rank, *restart* until all ranks have joined and built the model, *load* until the state is loaded, *first step*
until a step is done. For comparison, a cold start: the same command with `--resume`, until its first step.

Stall: how long a save blocks training, with torch.save, with Shardwise's checkpoints and with in-memory snapshots.
Heartbeat: the cost of heartbeats per step.
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
from shardwise.launch.start import launch
from shardwise.layout import Layout
from shardwise.train import checkpoint
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.workers.diagnosis import Heartbeat
from shardwise.workers.fork_server import ForkServer

MODEL = {"layers": 4, "width": 128, "heads": 4, "vocab": 512, "sequence": 64}
PHASES = ("detect", "restart", "load", "first step")


def job_of(folder: Path, steps: int, model: dict[str, int] = MODEL, **changes: Any) -> Job:
    run = {"folder": str(folder), "device": "cpu", "max_restarts": 100} | changes.pop("run", {})
    settings = {"steps": steps, "model": model, "data": {"source": "synthetic"}, "batch": {"samples": 8},
                "validation": {"samples": 8}, "checkpoint": {"every": 5}} | changes  # fmt: skip
    return make_job(settings | {"run": run})


def timed_worker(arguments: list[str], **options: Any) -> None:
    """A worker that also records when it enters each phase."""
    times = Path(arguments[0]) / f"times-{os.getpid()}"
    train = TrainingLoop.run

    def run(trainer: TrainingLoop) -> None:
        set_phase, log_step = trainer.set_phase, trainer.metrics.log_step

        def timed_set_phase(phase: str, step: int) -> None:
            set_phase(phase, step)
            _append_time(times, phase)

        def timed_log_step(*args: Any) -> Any:
            result = log_step(*args)
            _append_time(times, "done")
            return result

        trainer.set_phase, trainer.metrics.log_step = timed_set_phase, timed_log_step  # type: ignore[method-assign]
        train(trainer)

    TrainingLoop.run = run  # type: ignore[method-assign]
    faulty_worker.main(arguments, **options)


def _append_time(path: Path, phase: str) -> None:
    with path.open("a") as file:
        file.write(f"{time.time()} {phase}\n")


def _first_times(run: Path) -> list[dict[str, float]]:
    """Returns, for each worker process of a run, when it first entered each phase."""
    processes = []
    for path in run.glob("times-*"):
        first: dict[str, float] = {}
        for line in path.read_text().splitlines():
            seconds, phase = line.split()
            first.setdefault(phase, float(seconds))
        processes.append(first)
    return processes


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
            launch(folder, Layout.parse(layout), False, entry="recovery:timed_worker", fork_server=fork_server)
        finally:
            fork_server.close()
        recoveries = [_phase_seconds(folder, killed, world) for killed in sorted(trigger_times(folder.path).values())]
        cold = _cold_start_seconds(folder, layout)
    print(f"\nkill -9 to the next step, {world} processes, '{layout}', {len(recoveries)} kills; seconds")
    print(f"{'':12s} {'median':>8s} {'max':>8s}")
    for name in PHASES:
        values = [phases[name] for phases in recoveries]
        print(f"{name:12s} {statistics.median(values):8.2f} {max(values):8.2f}")
    totals = [sum(phases.values()) for phases in recoveries]
    print(f"{'total':12s} {statistics.median(totals):8.2f} {max(totals):8.2f}")
    print(f"{'cold start':12s} {cold:8.2f}  from running the command to its first step")


def _phase_seconds(folder: RunFolder, killed: float, world: int) -> dict[str, float]:
    detected = next(event["time"] for event in folder.events() if event["event"] == "killed" and event["time"] > killed)
    restarted = [first for first in _first_times(folder.path) if first.get("loading", 0.0) > killed]
    attempt = sorted(restarted, key=lambda first: first["loading"])[:world]
    times = [killed, detected, *(max(first[phase] for first in attempt) for phase in ("loading", "data", "done"))]
    return {name: end - begin for name, begin, end in zip(PHASES, times, times[1:])}


def _cold_start_seconds(folder: RunFolder, layout: str) -> float:
    """Returns the seconds from running `shardwise train --resume` until its first step is done."""
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


def timed_saver(arguments: list[str], **options: Any) -> None:
    """A worker that records how long saves block training; with PLAIN set, it saves with torch.save."""
    stalls = Path(arguments[0]) / f"stalls-{os.environ['RANK']}"
    if os.environ.get("PLAIN"):
        checkpoint.CheckpointManager.save = plain_save  # type: ignore[method-assign]
        checkpoint.CheckpointManager.finish = lambda self: None  # type: ignore[method-assign]

    def timed(name: str) -> None:
        method = getattr(checkpoint.CheckpointManager, name)

        def timed_method(*args: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args)
            with stalls.open("a") as file:
                file.write(f"{name} {time.perf_counter() - begin}\n")
            return result

        setattr(checkpoint.CheckpointManager, name, timed_method)

    timed("save")
    timed("snapshot")
    worker.main(arguments, **options)


def plain_save(self: Any, step: int, engine: Any, optimizer: Any, state: Any) -> None:
    """A common hand-written checkpoint: one file per rank, overwritten each time."""
    tensors = {name: piece.tensor for name, piece in checkpoint.collect_pieces(engine, optimizer).items()}
    torch.save({"step": step, "tensors": tensors}, self.folder / f"rank-{engine.mesh.rank}.pt")


def stall(layout: str = "shard=2") -> None:
    rows, size = {}, 0
    for name, settings in {
        "torch.save": {"asynchronous": False}, "blocking": {"asynchronous": False},
        "asynchronous": {"asynchronous": True}, "in-memory snapshot": {"asynchronous": True, "snapshot_every": 3},
    }.items():  # fmt: skip
        os.environ["PLAIN"] = "1" if name == "torch.save" else ""
        with tempfile.TemporaryDirectory() as scratch:
            every = 0 if "snapshot_every" in settings else 4
            config = {"every": every, "keep": 1, "snapshot_every": 0} | settings
            job = job_of(Path(scratch) / "run", 17, STATE, checkpoint=config, run={"standby": False})
            folder, fork_server = RunFolder.create(job), ForkServer("recovery")
            try:
                launch(folder, Layout.parse(layout), False, entry="recovery:timed_saver", fork_server=fork_server)
            finally:
                fork_server.close()
            method = "snapshot" if "snapshot_every" in settings else "save"
            lines = [line.split() for line in (folder.path / "stalls-0").read_text().splitlines()]
            size = sum(path.stat().st_size for path in folder.checkpoints.rglob("*.distcp")) or size
            rows[name] = [float(seconds) for name, seconds in lines if name == method][1 : -1 if every else None]
    print(f"\nstall per save, {size / 1e6:.0f} MB on 2 processes, '{layout}'; seconds, without each first save")
    print(f"{'':20s} {'median':>8s} {'max':>8s}  saves")
    for name, values in rows.items():
        print(f"{name:20s} {statistics.median(values):8.3f} {max(values):8.3f}  {len(values)}")


def heartbeat_cost(beats: int = 20_000) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        heartbeat = Heartbeat(Path(scratch), 0)
        time.sleep(2.0)
        thread = (time.process_time() - cpu_begin) / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for number in range(beats):
            heartbeat.set_phase("computing", number)
        seconds = (time.perf_counter() - begin) / beats
    print(f"\na heartbeat takes {1e6 * seconds:.0f} us, twice per step; its thread uses {100 * thread:.2f}% of a core;")
    print(f"together {100 * (2 * seconds / 0.1 + thread):.2f}% of a step of 0.1 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["recovery", "stall", "heartbeat"], help="default: all")
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--layout", default="replicate=2 tensor=2")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a job setting; the value is JSON"
    )
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    if "recovery" in options.parts:
        recovery(options.kills, options.layout, options.set)
    if "stall" in options.parts:
        stall()
    if "heartbeat" in options.parts:
        heartbeat_cost()


if __name__ == "__main__":
    main()
