"""Does `shardwise tune` find the truly fastest layout? An exhaustive sweep on CPU processes says which one that is.

    python benchmarks/tune_cpu.py [--json] [--jobs gpt,moe,...] [--minutes 1.5]

For each of ten small jobs: `tune` picks a layout within its minutes. Then every layout of the planner's space that the
engine runs (without recomputation, which only adds time where memory suffices) is measured, side by side: engines of
many layouts live in the same processes and take turns, so that other load on the machine affects all of them equally.
The better part is measured again in more rounds, together with tune's pick, by the median. A pick counts as the best if
its median is within 5% of the lowest. The noise is how much two halves of the last rounds disagree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.world import run_world
from shardwise.data.loader import Loader
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import job_stream
from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.launch.tune import tune_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.plan import make_estimator
from shardwise.planner.search import class_layouts, layout_classes
from shardwise.step import make_step_fn
from shardwise.train.local_machine import choose_plan

GPT = {"layers": 4, "width": 64, "heads": 4, "vocab": 256, "sequence": 32}
JOBS: dict[str, dict[str, Any]] = {  # name: processes, samples, model
    "gpt": {"processes": 2, "samples": 16, "model": GPT},
    "gpt on 4": {"processes": 4, "samples": 16, "model": GPT},
    "tiny batch": {"processes": 2, "samples": 2, "model": GPT | {"width": 128}},
    "deep": {"processes": 3, "samples": 24, "model": GPT | {"layers": 9, "width": 48}},
    "long sequence": {"processes": 2, "samples": 2, "model": GPT | {"layers": 2, "sequence": 512}},
    "large vocabulary": {"processes": 2, "samples": 8, "model": GPT | {"layers": 2, "vocab": 4096}},
    "moe": {"processes": 2, "samples": 8, "model": GPT | {"name": "moe", "layers": 2, "experts": 4}},
    "bert": {"processes": 2, "samples": 16, "model": GPT | {"name": "bert"}},
    "t5": {"processes": 2, "samples": 8, "model": {"name": "t5", "layers": 2, "width": 64, "heads": 4,
                                                   "head_dim": 16, "ffn": 128, "vocab": 272, "sequence": 64,
                                                   "target_sequence": 32}},
    "resnet": {"processes": 2, "samples": 8, "model": {"name": "resnet", "depth": 18, "stem": "cifar",
                                                      "width": 8, "image_size": 32, "num_classes": 10}},
    "dlrm": {"processes": 2, "samples": 256, "model": {"name": "dlrm", "tables": 4, "rows": 1000, "width": 16,
                                                       "bottom": [64, 32], "top": [128, 64]}},
}  # fmt: skip
AT_ONCE = 16  # engines in the same processes
BEST = 8  # layouts of the last rounds
TOLERANCE = 0.05


def the_job(name: str) -> Job:
    spec = JOBS[name]
    data = {"source": "synthetic", "samples": 1024}
    run = {"device": "cpu", "processes": spec["processes"]}
    return make_job({"model": spec["model"], "batch": {"samples": spec["samples"]}, "data": data, "run": run})


def all_layouts(job: Job) -> list[Layout]:
    plan, _ = choose_plan(job)
    estimator = make_estimator(job, plan.cluster)
    found = {}
    for base in layout_classes(estimator, plan.devices):
        for layout in class_layouts(estimator, base):
            if layout.recompute == "none":
                with suppress(LayoutError):
                    micro_batch = prepare(job, layout).batch.micro_batch
                    assert micro_batch == layout.micro_batch
                    found[layout] = True
    if job.model.single_micro_batch:  # the classes have no micro-batch of any size
        for text in ("replicate={}", "shard={} zero=1", "shard={} zero=2", "shard={} zero=3"):
            with suppress(LayoutError):
                prepare(job, layout := Layout.parse(text.format(plan.devices)))
                found[layout] = True
    return list(found)


def measure(job: Job, layouts: list[Layout], rounds: int) -> list[list[float]]:
    """Returns the seconds of each round by layout, on one rank. The first two rounds warm up."""
    source = make_sources(job)[0]
    steps, batches = [], []
    for layout in layouts:
        engine = parallelize(prepare(job, layout), torch.device("cpu"))
        stream, data = job_stream(job, source), engine.mesh["loader"]
        batches.append(iter(Loader(stream, job.samples, data.size, data.index)))
        engine.begin_stream(job, stream)
        steps.append(make_step_fn(engine, engine.make_optimizer(job), job.optimizer.clip, False))
    times: list[list[float]] = [[] for _ in layouts]
    for number in range(rounds + 2):
        for layout_times, take, batch in zip(times, steps, batches, strict=True):
            samples = next(batch)[1]
            dist.barrier()
            begin = time.perf_counter()
            take(samples)
            dist.barrier()
            if number > 1:
                layout_times.append(time.perf_counter() - begin)
    return times


def sweep(job: Job, layouts: list[Layout], rounds: int) -> dict[Layout, list[float]]:
    found: dict[Layout, list[float]] = {}
    for start in range(0, len(layouts), AT_ONCE):
        some = layouts[start : start + AT_ONCE]
        processes = some[0].world
        found |= dict(
            zip(some, run_world(measure, processes, job, some, rounds, is_fresh_process=True)[0], strict=True)
        )
    return found


def truth(job: Job, pick: Layout, rounds: int) -> tuple[dict[Layout, list[float]], int]:
    """Returns the times of the fastest layouts and of the pick in the last rounds, and how many were swept."""
    layouts = all_layouts(job)
    left, count = [*dict.fromkeys([pick, *layouts])], 3
    while len(left) > BEST:
        times = sweep(job, left, count)
        left = sorted(left, key=lambda layout: statistics.median(times[layout]))[: max(BEST, len(left) // 4)]
        count *= 2
    return sweep(job, [*dict.fromkeys([pick, *left])], rounds), len(layouts)


def judge(name: str, minutes: float, rounds: int) -> dict[str, Any]:
    job = the_job(name)
    with tempfile.TemporaryDirectory() as folder:
        tuned = tune_job(job, 8, minutes, Path(folder), lambda text: None)
    pick = Layout.parse(tuned["candidates"][0]["layout"])
    times, swept = truth(job, pick, rounds)
    medians = {layout: statistics.median(seconds) for layout, seconds in times.items()}
    best = min(medians, key=medians.__getitem__)
    halves = [abs(statistics.median(t[::2]) / statistics.median(t[1::2]) - 1.0) for t in times.values()]
    return {
        "job": name, "processes": job.run.processes, "layouts": swept, "tune_seconds": tuned["seconds"],
        "pick": str(pick), "planned": tuned["planned"], "best": str(best),
        "loss": medians[pick] / medians[best] - 1.0, "noise": statistics.median(halves),
        "measured": {str(k): v for k, v in medians.items()},
        "candidates": tuned["candidates"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    found = []
    for name in options.jobs.split(","):
        found.append(row := judge(name, options.minutes, options.rounds))
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        kind = "best" if row["loss"] <= TOLERANCE else "missed"
        figures = f"{100 * row['loss']:.1f}% over the best of {row['layouts']} (noise {100 * row['noise']:.1f}%)"
        layouts = f"'{row['pick']}', best '{row['best']}', planned '{row['planned']}'"
        print(f"{name}: {kind}, {figures}, tuned in {row['tune_seconds']:.0f} s: {layouts}", flush=True)
    if not options.json:
        print(f"{sum(row['loss'] <= TOLERANCE for row in found)} of {len(found)} jobs")


if __name__ == "__main__":
    main()
