"""Flipped bits, false alarms and what the checksums cost, in several layouts on CPU processes.

    flips     runs with bits flipped in signs and exponents of weights, optimizer states and summed gradients: how many
              were found in the step in which they happened, with the right rank and tensor; whether the curve is that
              of an undisturbed run, bit by bit
    clean     runs without: how many alarms there were
    overhead  steps with checksums and without, in turns, in the same processes; medians

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
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.data.source import SyntheticTokens
from shardwise.integrity.corruption_detector import CorruptionDetector
from shardwise.job import Job, make_job
from shardwise.launch.launch import launch
from shardwise.layout import Layout
from shardwise.optim import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.step import make_step_fn
from shardwise.train.metrics_processor import forward_flops
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
WARM = 5  # steps of each kind that are not counted: they make states, compile and record


def train(fork_server: ForkServer, folder: Path, layout: str, steps: int, faults: list[Fault]) -> RunFolder:
    run = {
        "folder": str(folder),
        "device": "cpu",
        "max_corruptions": 1000,
        "checksum_every": 1,
        "redundant_compute_every": 20,
    }
    job = make_job(SMALL | {"steps": steps, "checkpoint": {"every": EVERY if steps < 1000 else 0}, "run": run})
    made = RunFolder.create(job)
    inject_faults(made.path, faults)
    launch(made, Layout.parse(layout), resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
    return made


def curve(run: RunFolder) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in run.metrics()]


def flips(fork_server: ForkServer, folder: Path, layout: str, count: int, seed: int) -> str:
    draw, world = random.Random(seed), Layout.parse(layout).world
    kinds = ["weight", "state", *(["gradient"] if "replicate" in layout else [])]
    faults = []
    for number in range(count):
        kind = draw.choice(kinds)
        phase = "gradient" if kind == "gradient" else draw.choice(["data", "forward", "backward"])
        faults.append(Fault(kind, draw.randrange(world), EVERY + 2 + 2 * number, phase, 1000 * seed + number))
    steps = EVERY + 2 * count + 4
    base = train(fork_server, folder / f"base-{seed}", layout, steps, [])
    run = train(fork_server, folder / f"flips-{seed}", layout, steps, faults)
    events = [event for event in run.events() if event["event"] == "corruption"]
    times, found, named = trigger_times(run.path), 0, 0
    for fault in faults:
        label = (run.path / "faults" / f"number-{fault.number}").read_text()
        told = [event for event in events if (event["step"], event["tensor"]) == (fault.step, label)]
        found += bool(told)
        named += any(e["ranks"] == [fault.rank] for e in told)
    same = "same bits" if curve(run) == curve(base) else "DIFFERS"
    return f"| `{layout}` | {len(times)} | {found} | {named} | {same} |"


def compare(job: Job, layout: Layout, turns: int, device: str) -> list[float]:
    """Median seconds of a step with checksums and of one without, of the processor for the latter and for checksums."""
    engine = parallelize(job, layout, torch.device(device))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    flops = 3 * forward_flops(job) * job.samples / layout.world
    detector = CorruptionDetector(job, engine, optimizer, Path(), flops, print)
    spent = 0.0

    def timed(act: Callable[..., Any], *args: Any) -> Any:
        nonlocal spent
        begin = time.thread_time()
        result = act(*args)
        spent += time.thread_time() - begin
        return result

    compiled = job.should_compile(device, layout)
    bare = make_step_fn(engine, optimizer, job.optimizer.clip, compiled)
    watched = make_step_fn(
        engine, optimizer, job.optimizer.clip, compiled, on_grads_ready=lambda outcome: timed(detector.before_update)
    )
    stream, data = SampleStream(SyntheticTokens(4096, job.model.sequence, job.model.vocab, 0), 0), engine.mesh["data"]
    batches = [
        stream.read(rank_positions(n, job.samples, data.size, data.index)).to(torch.device(device)) for n in range(4)
    ]
    taken: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for turn in range(2 * (turns + WARM)):
        ours, spent = bool(turn % 2) ^ bool(turn // 2 % 2), 0.0
        if ours:
            detector.reset()
        if layout.world > 1:
            dist.barrier()
        begin = time.perf_counter(), time.process_time()
        outcome = (watched if ours else bare)(batches[turn % 4])
        if ours:
            timed(detector.after_step)
            told = torch.stack([outcome.loss, *timed(detector.reduce_flags, 0)]).tolist()
            assert not told[2], "a false alarm"
        else:
            flag = torch.zeros((), device=device)
            if layout.world > 1:
                dist.all_reduce(flag, dist.ReduceOp.MAX)
            torch.stack([outcome.loss, flag]).tolist()
        if turn >= 2 * WARM:
            taken[ours].append((time.perf_counter() - begin[0], time.process_time() - begin[1], spent))
    (ours_, _, checks), (bare_, busy, _) = (map(statistics.median, zip(*taken[k], strict=True)) for k in (True, False))
    return [ours_, bare_, busy, checks, float(detector.parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--clean", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layout", action="append")
    given = parser.parse_args()
    layouts = given.layout or list(LAYOUTS)
    fork_server = ForkServer(FAULTY_WORKER)
    try:
        with tempfile.TemporaryDirectory() as name:
            if given.flips:
                print("| layout | bits flipped | found in that step | right rank | curve |")
                print("| --- | --- | --- | --- | --- |")
                for seed, layout in enumerate(layouts):
                    count = given.flips // len(layouts) + (seed < given.flips % len(layouts))
                    print(flips(fork_server, Path(name), layout, count, seed), flush=True)
            if given.clean:
                print("\n| layout | clean steps | alarms |\n| --- | --- | --- |")
                for number, layout in enumerate(layouts):
                    steps = -(-given.clean // len(layouts))
                    run = train(fork_server, Path(name) / f"clean-{number}", layout, steps, [])
                    alarms = sum(event["event"] in ("corruption", "rollback") for event in run.events())
                    print(f"| `{layout}` | {len(list(run.metrics()))} | {alarms} |", flush=True)
    finally:
        fork_server.close()
    if given.turns:
        print("\n| layout | looked at in a step | with checksums | without | overhead | of processor time |")
        print("| --- | --- | --- | --- | --- | --- |")
        job = make_job(
            {"model": {"layers": 6, "width": 256, "heads": 8, "vocab": 1024, "sequence": 128}, "batch": {"samples": 16}}
        )
        for layout in layouts:
            parsed = Layout.parse(layout)
            ours, bare, busy, own, parts = run_world(compare, parsed.world, job, parsed, given.turns, given.device)[0]
            shares = f"{100 * (ours / bare - 1):.2f}% | {100 * own / busy:.2f}%"
            part = "all" if parts == 1 else f"1/{parts:.0f}"
            print(f"| `{layout}` | {part} | {ours * 1e3:.1f} ms | {bare * 1e3:.1f} ms | {shares} |", flush=True)


if __name__ == "__main__":
    main()
