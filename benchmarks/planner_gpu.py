"""Predicted against measured step time and peak memory of differently shaped jobs on one GPU, after `calibrate` and
from the data sheet.

    python benchmarks/planner_gpu.py [--json FILE] [--job NAME ...] [--cluster FILE]

Each job runs in a process of its own: CUDA graphs of an earlier one would keep their memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from shardwise.bench.train_step import bench_step
from shardwise.cluster import Cluster, cluster_by_driver_name, read_cluster
from shardwise.job import make_job
from shardwise.layout import Layout
from shardwise.planner.plan import make_estimator, resolve_layout

GIB = 2**30
LLAMA: dict[str, object] = {
    "layers": 16, "width": 2048, "heads": 16, "kv_heads": 8, "ffn": 7168, "vocab": 32000, "sequence": 4096,
    "tied": False,
}  # fmt: skip
JOBS: dict[str, tuple[dict[str, object], int, str, dict[str, object]]] = {
    "gpt2": ({"name": "gpt2", "dropout": 0.0}, 32, "micro_batch=16", {}),
    "llama 1.3b": (LLAMA, 8, "micro_batch=4", {}),
    "fp8": (LLAMA, 8, "micro_batch=4", {"precision": "fp8"}),
    "lora": ({**LLAMA, "lora": {"rank": 16}}, 8, "micro_batch=4", {}),
    "offload": (LLAMA, 8, "micro_batch=4", {"optimizer": {"offload": True}}),
    "wide": ({"layers": 4, "width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000, "sequence": 2048,
              "tied": False}, 4, "micro_batch=2", {}),
    "long": ({"layers": 12, "width": 1024, "heads": 8, "ffn": 4096, "vocab": 50257, "sequence": 32768}, 2,
             "micro_batch=1 recompute=full", {}),
    "gpt2-xl": ({"name": "gpt2-xl", "dropout": 0.0}, 8, "micro_batch=4", {}),
    "selective": ({"name": "gpt2-xl", "dropout": 0.0}, 8, "micro_batch=8 recompute=selective", {}),
    "experts": ({"name": "moe", "layers": 8, "width": 1024, "heads": 16, "experts": 16, "experts_per_token": 2,
                 "expert_ffn": 2048, "vocab": 32000, "sequence": 2048, "tied": False}, 8, "micro_batch=8", {}),
    "bert": ({"name": "bert-base"}, 64, "micro_batch=64", {}),
    "resnet": ({"name": "resnet-50"}, 256, "micro_batch=256", {"optimizer": {"name": "sgd"}}),
}  # fmt: skip


def compare(name: str, cluster: Cluster) -> dict[str, object]:
    model, samples, text, settings = JOBS[name]
    job = make_job({"precision": "bf16", "model": model, "batch": {"samples": samples}, **settings})
    estimator = make_estimator(job, cluster)
    layout = resolve_layout(job, estimator.shape, Layout.parse(text))
    predicted = estimator.predict(layout)
    memory = predicted.memory[0]
    report = bench_step(job.model_copy(update={"layout": str(layout)}), torch.device("cuda"))
    seconds, peak = report.seconds, GIB * report.peak_memory_gib
    preset = cluster_by_driver_name(torch.cuda.get_device_name())
    sheet = make_estimator(job, preset).predict(layout) if preset else predicted
    return {
        "job": name, "layout": str(layout), "seconds": seconds, "predicted_seconds": predicted.seconds,
        "time_error": predicted.seconds / seconds - 1, "gib": peak / GIB,
        "predicted_gib": (memory.total - memory.reserve) / GIB,
        "memory_error": (memory.total - memory.reserve) / peak - 1,
        "sheet_time_error": sheet.seconds / seconds - 1,
        "sheet_memory_error": (sheet.memory[0].total - sheet.memory[0].reserve) / peak - 1,
        "parts": report.time_breakdown, "memory": {key: value / GIB for key, value in memory._asdict().items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", choices=JOBS, action="append", help="run only this job; repeatable")
    parser.add_argument("--cluster", type=Path, help="use this file written by `calibrate`; do not measure")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compare(options.one[0], read_cluster(Path(options.one[1])))))
        return
    records = []
    with tempfile.TemporaryDirectory() as folder:
        file = options.cluster or Path(folder, "here.toml")
        if options.cluster is None:
            command = [sys.executable, "-m", "shardwise", "calibrate", "--out", str(file)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for name in options.job or JOBS:
            command = [sys.executable, __file__, "--one", name, str(file)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: {(done.stderr.splitlines() or ['failed'])[-1][:200]}", flush=True)
                continue
            record = json.loads(done.stdout.splitlines()[-1])
            records.append(record)
            print(
                f"{name:12s} {record['layout']}: {1e3 * record['seconds']:.1f} ms, predicted "
                f"{1e3 * record['predicted_seconds']:.1f} ({100 * record['time_error']:+.1f}%); {record['gib']:.2f} "
                f"GiB, predicted {record['predicted_gib']:.2f} ({100 * record['memory_error']:+.1f}%); data sheet "
                f"{100 * record['sheet_time_error']:+.1f}%, {100 * record['sheet_memory_error']:+.1f}%",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(records), encoding="utf-8")


if __name__ == "__main__":
    main()
