"""Measures corruption detection on CPU processes in several layouts: detection rate, false alarms and overhead.

    flips     runs with bit flips in signs and exponents of weights, optimizer state and reduced gradients: how many are
              detected in the same step, with the right rank and tensor; and whether the loss curve is bitwise equal to
              that of an undisturbed run
    clean     runs without bit flips: number of false alarms
    overhead  steps with and without checksums, alternating in the same processes; medians

Run: python benchmarks/corruption.py [--flips 100] [--clean 10000] [--turns 40] [--device cpu]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.chaos.faulty_worker import Fault, inject_faults, trigger_times
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream, SyntheticTokens, rank_positions
from shardwise.integrity.detectors import CorruptionDetector
from shardwise.job import Job, make_job
from shardwise.launch.start import launch
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import forward_flops, prepare
from shardwise.step import make_step_fn
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer

LAYOUTS = (
    "replicate=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "shard=2 tensor=2", "pipeline=2 replicate=2",
)  # fmt: skip
FAULTY_WORKER = "shardwise.chaos.faulty_worker"
SMALL = {
    "precision": "float32", "model": {"layers": 2, "width": 32, "heads": 2, "vocab": 101, "sequence": 16},
    "data": {"source": "synthetic"}, "batch": {"samples": 8},
}  # fmt: skip
EVERY = 4
WARMUP_STEPS = 5  # steps of each kind that are not timed: they initialize state, compile and capture


def train(fork_server: ForkServer, folder: Path, layout: str, steps: int, faults: list[Fault]) -> RunFolder:
    run = {"folder": str(folder), "device": "cpu", "max_corruptions": 1000, "checksum_every": 1,
           "redundant_compute_every": 20}  # fmt: skip
    job = make_job(SMALL | {"steps": steps, "checkpoint": {"every": EVERY if steps < 1000 else 0}, "run": run})
    run_folder = RunFolder.create(job)
    inject_faults(run_folder.path, faults)
    launch(run_folder, Layout.parse(layout), resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
    return run_folder


def curve(run: RunFolder) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in run.metrics()]


def flips(fork_server: ForkServer, folder: Path, layout: str, count: int, seed: int) -> str:
    """Runs with and without bit flips; returns a table row."""
    rng, world = random.Random(seed), Layout.parse(layout).world
    kinds = ["weight", "state", *(["gradient"] if "replicate" in layout else [])]
    faults = []
    for number in range(count):
        kind = rng.choice(kinds)
        phase = "gradient" if kind == "gradient" else rng.choice(["data", "forward", "backward"])
        faults.append(Fault(kind, rng.randrange(world), EVERY + 2 + 2 * number, phase, 1000 * seed + number))
    steps = EVERY + 2 * count + 4
    base = train(fork_server, folder / f"base-{seed}", layout, steps, [])
    run = train(fork_server, folder / f"flips-{seed}", layout, steps, faults)
    events = [event for event in run.events() if event["event"] == "corruption"]
    times, detected, attributed = trigger_times(run.path), 0, 0
    for fault in faults:
        label = (run.path / "faults" / f"number-{fault.number}").read_text()
        matches = [event for event in events if (event["step"], event["tensor"]) == (fault.step, label)]
        detected += bool(matches)
        attributed += any(event["ranks"] == [fault.rank] for event in matches)
    same = "bitwise equal" if curve(run) == curve(base) else "DIFFERS"
    return f"| `{layout}` | {len(times)} | {detected} | {attributed} | {same} |"


def compare(job: Job, layout: Layout, turns: int, device: str) -> list[float]:
    """Returns medians: seconds per step with and without checksums, CPU seconds without and of the checksums."""
    engine = parallelize(prepare(job, layout), torch.device(device))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    flops = 3 * sum(forward_flops(job.model)) * job.samples / layout.world
    detector = CorruptionDetector(job, engine, optimizer, Path(), flops, print)
    check_seconds = 0.0

    def timed(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal check_seconds
        begin = time.thread_time()
        result = function(*args)
        check_seconds += time.thread_time() - begin
        return result

    compiled = job.should_compile(device, layout)
    plain = make_step_fn(engine, optimizer, job.optimizer.clip, compiled)
    checked = make_step_fn(
        engine, optimizer, job.optimizer.clip, compiled, on_grads_ready=lambda outcome: timed(detector.before_update)
    )
    stream, data = (
        SampleStream(SyntheticTokens(4096, job.require_decoder().sequence, job.require_decoder().vocab, 0), 0),
        engine.mesh["data"],
    )
    batches = [
        stream.read(rank_positions(n, job.samples, data.size, data.index)).to(torch.device(device)) for n in range(4)
    ]
    times: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for turn in range(2 * (turns + WARMUP_STEPS)):
        with_checks, check_seconds = bool(turn % 2) ^ bool(turn // 2 % 2), 0.0
        if with_checks:
            detector.reset()
        if layout.world > 1:
            dist.barrier()
        begin = time.perf_counter(), time.process_time()
        outcome = (checked if with_checks else plain)(batches[turn % 4])
        if with_checks:
            timed(detector.after_step)
            flags = torch.stack([outcome.loss, *timed(detector.reduce_flags, 0)]).tolist()
            assert not flags[2], "false alarm"
        else:
            flag = torch.zeros((), device=device)
            if layout.world > 1:
                dist.all_reduce(flag, dist.ReduceOp.MAX)
            torch.stack([outcome.loss, flag]).tolist()
        if turn >= 2 * WARMUP_STEPS:
            times[with_checks].append((time.perf_counter() - begin[0], time.process_time() - begin[1], check_seconds))
    medians = {key: [statistics.median(column) for column in zip(*times[key], strict=True)] for key in times}
    return [medians[True][0], medians[False][0], medians[False][1], medians[True][2], float(detector.parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--clean", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layout", action="append")
    options = parser.parse_args()
    layouts = options.layout or list(LAYOUTS)
    fork_server = ForkServer(FAULTY_WORKER)
    try:
        with tempfile.TemporaryDirectory() as name:
            if options.flips:
                print("| layout | bit flips | detected in the same step | right rank | loss curve |")
                print("| --- | --- | --- | --- | --- |")
                for seed, layout in enumerate(layouts):
                    count = options.flips // len(layouts) + (seed < options.flips % len(layouts))
                    print(flips(fork_server, Path(name), layout, count, seed), flush=True)
            if options.clean:
                print("\n| layout | clean steps | false alarms |\n| --- | --- | --- |")
                for number, layout in enumerate(layouts):
                    steps = -(-options.clean // len(layouts))
                    run = train(fork_server, Path(name) / f"clean-{number}", layout, steps, [])
                    alarms = sum(event["event"] in ("corruption", "rollback") for event in run.events())
                    print(f"| `{layout}` | {len(list(run.metrics()))} | {alarms} |", flush=True)
    finally:
        fork_server.close()
    if options.turns:
        print("\n| layout | checked per step | with checksums | without | overhead | overhead in CPU time |")
        print("| --- | --- | --- | --- | --- | --- |")
        job = make_job(
            {"model": {"layers": 6, "width": 256, "heads": 8, "vocab": 1024, "sequence": 128}, "batch": {"samples": 16}}
        )
        for layout in layouts:
            parsed = Layout.parse(layout)
            result = run_world(compare, parsed.world, job, parsed, options.turns, options.device)[0]
            checked, plain, cpu_seconds, check_seconds, parts = result
            overhead = f"{100 * (checked / plain - 1):.2f}% | {100 * check_seconds / cpu_seconds:.2f}%"
            part = "all" if parts == 1 else f"1/{parts:.0f}"
            print(f"| `{layout}` | {part} | {checked * 1e3:.1f} ms | {plain * 1e3:.1f} ms | {overhead} |", flush=True)


if __name__ == "__main__":
    main()
