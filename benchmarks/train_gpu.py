"""`shardwise train` against `shardwise bench step` on one GPU: the same job, as many steps, in turns.

    python benchmarks/train_gpu.py                        GPT-2 with batch 64, and 1.5B, in bf16
    python benchmarks/train_gpu.py --shape 1.5b --precision fp8 --turns 3 --json FILE

Tokens per second over the last `--steps` steps: of `train` between the times in metrics.jsonl, of `bench step` by its
median. A card warms up and slows down over a run, so both take as many steps, with a pause before each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
from gpu_peers import BATCH, SHAPES

WARMUP_STEPS = 12  # of `train`: compilation, and the recording of the CUDA graph


def job_of(shape: str, precision: str, folder: Path, steps: int) -> dict[str, Any]:
    return {
        "precision": precision, "layout": "replicate=1", "steps": WARMUP_STEPS + steps, "model": SHAPES[shape],
        "batch": {"samples": BATCH[shape]}, "data": {"source": "synthetic"}, "checkpoint": {"snapshot_every": 0},
        "run": {"folder": str(folder / "run"), "device": "cuda"},
    }  # fmt: skip


def shardwise(*words: str) -> str:
    command = [sys.executable, "-m", "shardwise", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def rates(shape: str, precision: str, steps: int, pause: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder, tokens = Path(name), BATCH[shape] * SHAPES[shape]["sequence"]
        job = folder / "job.toml"
        job.write_text(tomli_w.dumps(job_of(shape, precision, folder, steps)), encoding="utf-8")
        time.sleep(pause)
        shardwise("train", str(job))
        times = [json.loads(line)["time"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        time.sleep(pause)
        report = json.loads(shardwise("bench", "step", str(job), "--steps", str(steps), "--json"))
        train = tokens * steps / (times[-1] - times[-1 - steps])
        return {"train": train, "bench": report["tokens_per_second"], "ratio": train / report["tokens_per_second"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds before each run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for shape in options.shape or ("gpt2", "1.5b"):
        found[shape] = [rates(shape, options.precision, options.steps, options.pause) for _ in range(options.turns)]
        for turn in found[shape]:
            print(f"{shape}: train {turn['train']:,.0f}, bench {turn['bench']:,.0f}, ratio {turn['ratio']:.3f}")
        print(f"{shape}: median ratio {statistics.median(turn['ratio'] for turn in found[shape]):.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
