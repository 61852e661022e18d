"""Measures how long the planner's search takes and how many layouts it evaluates.

    python benchmarks/planner_speed.py

Process time of one search per job, after imports. The first job must be planned within 2 seconds.
"""

from __future__ import annotations

import time

from shardwise.cluster import find_cluster
from shardwise.job import make_job
from shardwise.planner.plan import make_estimator
from shardwise.planner.search import class_layouts, layout_classes, search

JOBS = (("gpt-1t", 3072, 3072, "a100-80g"), ("llama3-70b", 2048, 512, "h100"), ("llama3-8b", 512, 64, "h100"))


def main() -> None:
    print(f"{'model':<12}{'devices':>8}  {'cluster':<10}{'layouts':>9}{'evaluated':>11}{'seconds':>9}{'us/layout':>11}")
    for name, samples, devices, cluster in JOBS:
        job = make_job({"model": {"name": name}, "batch": {"samples": samples}, "precision": "bf16"})
        estimator = make_estimator(job, find_cluster(cluster))
        begin = time.process_time()
        result = search(estimator, devices)
        seconds = time.process_time() - begin
        space = sum(1 for base in layout_classes(estimator, devices) for _ in class_layouts(estimator, base))
        per_layout = 1e6 * seconds / result.evaluated
        print(
            f"{name:<12}{devices:>8}  {cluster:<10}{space:>9}{result.evaluated:>11}{seconds:>9.2f}{per_layout:>11.1f}"
        )
        print(f"    {result.best[0].layout}: {result.best[0].seconds:.2f} s per step")


if __name__ == "__main__":
    main()
