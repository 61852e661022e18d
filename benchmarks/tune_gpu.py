"""Does `shardwise tune` find the fastest layout on one GPU? `bench step` of every micro-batch says which one that is.

    python benchmarks/tune_gpu.py [--job NAME ...] [--minutes 1] [--json FILE]

For each job: `tune` picks a layout within its minutes; then each micro-batch without recomputation (which only adds
time where memory suffices), and the pick, is measured in a process of its own. A pick counts as the best if it is
within 5% of the fastest. Micro-batches that run out of memory are listed as such.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
from planner_gpu import JOBS

TOLERANCE = 0.05
STEPS = 15


def shardwise(*words: str) -> dict[str, Any]:
    """Returns what a command prints with --json, or {"problem": its last line}."""
    done = subprocess.run([sys.executable, "-m", "shardwise", *words, "--json"], capture_output=True, text=True)
    if done.returncode:
        return {"problem": ([*done.stderr.splitlines(), "failed"])[-2 if done.stderr else 0][:200]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def judge(name: str, minutes: float) -> dict[str, Any]:
    model, samples, _, settings = JOBS[name]
    job = {
        "precision": "bf16",
        "model": model,
        "batch": {"samples": samples},
        "data": {"source": "synthetic"},
        **settings,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.toml")
        file.write_text(tomli_w.dumps(job), encoding="utf-8")
        tuned = shardwise("tune", str(file), "--minutes", str(minutes), "--out", str(Path(folder, "tune")))
        if "problem" in tuned:
            return {"job": name, **tuned}
        pick = tuned["candidates"][0]["layout"]
        sizes = [size for size in range(1, samples + 1) if samples % size == 0]
        layouts = [*dict.fromkeys([pick, *(f"micro_batch={size}" for size in reversed(sizes))])]
        measured = {}
        for layout in layouts:
            report = shardwise("bench", "step", str(file), "--set", f"layout={layout}", "--steps", str(STEPS))
            measured[layout] = report.get("seconds", report.get("problem"))
    times = {layout: seconds for layout, seconds in measured.items() if isinstance(seconds, float)}
    best = min(times, key=times.__getitem__)
    return {
        "job": name, "pick": pick, "best": best, "loss": times[pick] / times[best] - 1.0, "measured": measured,
        "tune_seconds": tuned["seconds"], "planned": tuned["planned"], "candidates": tuned["candidates"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for name in options.job or JOBS:
        found.append(row := judge(name, options.minutes))
        if "problem" in row:
            print(f"{name}: {row['problem']}", flush=True)
            continue
        kind = "best" if row["loss"] <= TOLERANCE else "missed"
        print(
            f"{name}: {kind}, '{row['pick']}' {100 * row['loss']:.1f}% over '{row['best']}', tuned in "
            f"{row['tune_seconds']:.0f} s ({len(row['candidates'])} layouts), planned '{row['planned']}'; measured: "
            + ", ".join(
                f"{k}: {1e3 * v:.1f} ms" if isinstance(v, float) else f"{k}: {v}" for k, v in row["measured"].items()
            ),
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
