"""Measures the all-reduce of PyTorch's backend by message size, and the links between processes.

    python benchmarks/links.py --processes 4 --write cluster.toml    the links also go into a file for `plan --cluster`
    torchrun --nproc-per-node 4 benchmarks/links.py                  measures that world

The time of a repeat is that of the slowest rank; results are medians over repeats, fitted to the alpha-beta model

    seconds = latency x steps + bytes / bandwidth

with the steps and bytes of a ring. Links are measured by ping-pong between two processes. `benchmarks/comm.py` compares
other algorithms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from shardwise.cluster import CLUSTERS, LinkSpec, read_cluster, write_cluster
from shardwise.comm.collectives import ping_pong
from shardwise.comm.world import run_world
from shardwise.console import pluralize
from shardwise.errors import JobError
from shardwise.files import require_parent_folder

MIN_BYTES, SIZE_FACTOR = 1 << 10, 4
MAX_BANDWIDTH = 1e15  # bytes per second; a fit that reaches it found no dependence on message size


@dataclass(frozen=True)
class AlphaBetaFit:
    latency: float  # seconds per step
    bandwidth: float  # bytes per second of the busiest rank
    median_error: float  # median relative error of the fit


@dataclass(frozen=True)
class CommReport:
    processes: int
    processes_per_node: int
    sizes: list[int]
    seconds: list[float]  # of an all-reduce, by size
    links: dict[str, AlphaBetaFit]  # `inner`: within a node; `outer`: between nodes

    @property
    def steps(self) -> int:
        return 2 * (self.processes - 1)

    @property
    def bytes_sent(self) -> list[int]:
        return [size * self.steps // self.processes for size in self.sizes]

    @property
    def fit(self) -> AlphaBetaFit:
        return fit_alpha_beta([self.steps] * len(self.sizes), self.bytes_sent, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fit": asdict(self.fit)}

    def text(self) -> str:
        lines = [f"{pluralize(self.processes, 'process')}, {self.processes_per_node} per node"]
        lines.append(f"{'bytes':>9s}{'all-reduce, ms':>17s}{'MB/s':>9s}")
        for size, seconds, sent in zip(self.sizes, self.seconds, self.bytes_sent, strict=True):
            lines.append(f"{format_bytes(size):>9s}{1e3 * seconds:17.3g}{sent / seconds / 1e6:9.4g}")
        lines += ["seconds = latency x steps + bytes / bandwidth", f"  {'all-reduce':14s} {_describe_fit(self.fit)}"]
        lines += [f"  {name + ' link':14s} {_describe_fit(fit)}" for name, fit in self.links.items()]
        return "\n".join(lines)


def _describe_fit(fit: AlphaBetaFit) -> str:
    measurable = fit.bandwidth < MAX_BANDWIDTH
    bandwidth = f"{fit.bandwidth / 1e6:.4g} MB/s" if measurable else "messages too small to measure bandwidth"
    return f"{1e3 * fit.latency:.3g} ms per step, {bandwidth}; median error {100 * fit.median_error:.0f}%"


def format_bytes(size: int) -> str:
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"))
    return next((f"{size / unit:g} {name}" for unit, name in units if size >= unit), f"{size} B")


def fit_alpha_beta(steps: list[int], bytes_sent: list[int], seconds: list[float]) -> AlphaBetaFit:
    """Fits latency and bandwidth by least squares of the relative errors; neither is negative."""
    times = np.array(seconds)
    matrix = np.stack([np.array(steps) / times, np.array(bytes_sent) / times], axis=1)
    scale = np.maximum(matrix.max(axis=0), 1e-300)
    solution, _ = nnls(matrix / scale, np.ones(len(times)))
    latency, seconds_per_byte = solution / scale
    median_error = float(np.median(np.abs(matrix @ (latency, seconds_per_byte) - 1.0)))
    return AlphaBetaFit(float(latency), 1.0 / max(float(seconds_per_byte), 1.0 / MAX_BANDWIDTH), median_error)


def bench_comm(processes: int, processes_per_node: int | None, max_bytes: int, repeats: int) -> CommReport | None:
    """Benchmarks torchrun's processes, or starts `processes` local ones. Returns None on ranks other than 0."""
    sizes = [MIN_BYTES]
    while sizes[-1] * SIZE_FACTOR <= max_bytes:
        sizes.append(sizes[-1] * SIZE_FACTOR)
    is_torchrun = "RANK" in os.environ
    if is_torchrun:
        dist.init_process_group("gloo")
        processes = dist.get_world_size()
        processes_per_node = processes_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    processes_per_node = processes_per_node or (processes // 2 if processes % 2 == 0 else 1)
    if processes < 2:
        raise JobError(f"{pluralize(processes, 'process')}: an all-reduce needs at least 2; start more.")
    if processes % processes_per_node:
        per_node = f"--nproc-per-node {processes_per_node}"
        raise JobError(f"{per_node}: {processes} processes do not divide into nodes of {processes_per_node}.")
    if is_torchrun:
        result = _measure(processes_per_node, sizes, repeats)
        dist.barrier()
        return result if dist.get_rank() == 0 else None
    return run_world(_measure, processes, processes_per_node, sizes, repeats, timeout=1200.0)[0]


def _measure(processes_per_node: int, sizes: list[int], repeats: int) -> CommReport:
    ranks, seconds = dist.get_world_size(), list[float]()
    for size in sizes:
        seconds += time_collectives({"sum": partial(dist.all_reduce, torch.zeros(size // 4))}, repeats).values()
    links = {}
    if processes_per_node > 1:
        links["inner"] = _measure_link(1, sizes, repeats)
    if ranks > processes_per_node:
        links["outer"] = _measure_link(processes_per_node, sizes, repeats)
    return CommReport(ranks, processes_per_node, sizes, seconds, links)


def time_collectives(collectives: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each collective's slowest rank, after one warmup repeat."""
    times = torch.zeros(repeats + 1, len(collectives), dtype=torch.float64)
    for repeat in range(repeats + 1):
        for index, collective in enumerate(collectives.values()):
            dist.barrier()
            begin = time.perf_counter()
            collective()
            times[repeat, index] = time.perf_counter() - begin
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(collectives, times[1:].median(dim=0).values.tolist(), strict=True))


def _measure_link(peer: int, sizes: list[int], repeats: int) -> AlphaBetaFit:
    """Fits the link from rank 0 to `peer`: half the time of a ping-pong while the other ranks are idle."""
    seconds = []
    for size in sizes:
        times = time_collectives({"link": partial(ping_pong, torch.zeros(size // 4), 0, peer)}, repeats)
        seconds.append(times["link"] / 2)
    return fit_alpha_beta([1] * len(sizes), sizes, seconds)


def write_links(report: CommReport, file: Path) -> None:
    """Writes the measured links to a cluster file; a new file takes everything else from the `cpu` preset."""
    require_parent_folder(file)
    base = read_cluster(file) if file.exists() else CLUSTERS["cpu"]
    specs = {name: LinkSpec(link.bandwidth, link.latency) for name, link in report.links.items()}
    inner, outer = specs.get("inner") or specs["outer"], specs.get("outer") or specs["inner"]
    write_cluster(replace(base, domain_size=report.processes_per_node, inner=inner, outer=outer), file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=4, help="ignored under torchrun")
    parser.add_argument("--nproc-per-node", type=int, help="default: LOCAL_WORLD_SIZE, or half of --processes")
    parser.add_argument("--max-mib", type=int, default=16, help="largest message")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", type=Path, help="cluster file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = bench_comm(options.processes, options.nproc_per_node, options.max_mib << 20, options.repeats)
    if report is None:
        return
    print(json.dumps(report.as_dict()) if options.json else report.text())
    if options.write is not None:
        write_links(report, options.write)


if __name__ == "__main__":
    main()
