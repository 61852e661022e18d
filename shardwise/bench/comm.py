"""How long sums over processes take, by algorithm and size, and what the links between them can do.

Every algorithm of `shardwise.comm`, a parameter server and PyTorch's own all-reduce take turns, so that whatever else
the machine does hits all alike; a turn lasts as long as its slowest rank, a figure is the median of the turns. To each
algorithm are fitted the two numbers of

    seconds = latency x steps + bytes / bandwidth

with its own steps and the bytes that its busiest rank sends; to each link, from one process to another and back.
"""

from __future__ import annotations

import os
import statistics
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
from torch import Tensor

from shardwise.bench.parameter_server import push_pull_count, push_pull_schedule
from shardwise.cluster import CLUSTERS, LinkSpec, read_cluster, write_cluster
from shardwise.comm import allreduce
from shardwise.comm.allreduce import Schedule, SentNumelFn, get_algorithm, segment_bounds, sent_bytes
from shardwise.comm.world import run_world
from shardwise.console import pluralize
from shardwise.draw import (
    COLORS,
    MARGIN,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    Panel,
    line_path,
    svg_circle,
    svg_document,
    svg_text,
)
from shardwise.errors import JobError
from shardwise.files import require_parent_folder

MIN_BYTES, SIZE_FACTOR = 1 << 10, 4
LIBRARY = "library"
MAX_BANDWIDTH = 1e15  # bytes a second: larger messages did not take longer


@dataclass(frozen=True)
class AlphaBetaFit:
    latency: float
    """Seconds of a step."""
    bandwidth: float
    """Bytes a second of the busiest rank."""
    median_error: float
    """How far the fit is from a measurement, in the median."""


@dataclass(frozen=True)
class CommReport:
    processes: int
    processes_per_node: int
    sizes: list[int]
    seconds: dict[str, list[float]]
    """By algorithm, for each size."""
    bytes_sent: dict[str, list[int]]
    """Bytes that the busiest rank sends; of the library, what a ring would."""
    steps: dict[str, list[int]]
    links: dict[str, AlphaBetaFit]
    """`inner`: within a node; `outer`: between nodes."""

    @property
    def fits(self) -> dict[str, AlphaBetaFit]:
        return {
            name: fit_alpha_beta(self.steps[name], self.bytes_sent[name], self.seconds[name]) for name in self.seconds
        }

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": {name: asdict(found) for name, found in self.fits.items()}}

    def text(self) -> str:
        names, width = list(self.seconds), 13
        lines = [
            f"{pluralize(self.processes, 'process')}, {self.processes_per_node} on a node; milliseconds of an all-reduce"
        ]
        lines.append(f"{'bytes':>9s}" + "".join(f"{name:>{width}s}" for name in names))
        for index, size in enumerate(self.sizes):
            times = [1e3 * self.seconds[name][index] for name in names]
            lines.append(f"{format_bytes(size):>9s}" + "".join(f"{value:{width}.3g}" for value in times))
        lines.append("seconds = latency x steps + bytes / bandwidth")
        lines += [f"  {name:14s} {_describe_fit(found)}" for name, found in self.fits.items()]
        lines += [f"  {name + ' link':14s} {_describe_fit(found)}" for name, found in self.links.items()]
        return "\n".join([*lines, *self.describe_fastest()])

    def describe_fastest(self) -> list[str]:
        """Which wins where, in words."""
        algorithms = [name for name in self.seconds if name != LIBRARY]
        fastest = [min(algorithms, key=lambda name: self.seconds[name][index]) for index in range(len(self.sizes))]
        lines, first = [], 0
        for index in range(1, len(fastest) + 1):
            if index == len(fastest) or fastest[index] != fastest[first]:
                ratios = [self.seconds[fastest[first]][n] / self.seconds[LIBRARY][n] for n in range(first, index)]
                sizes = format_bytes(self.sizes[first])
                sizes += f" to {format_bytes(self.sizes[index - 1])}" if index - 1 > first else ""
                lines.append(
                    f"{sizes}: {fastest[first]} is the fastest of ours, {statistics.median(ratios):.2f} times the "
                    "library's time."
                )
                first = index
        return lines


def _describe_fit(found: AlphaBetaFit) -> str:
    rate = (
        f"{found.bandwidth / 1e6:.4g} MB/s" if found.bandwidth < MAX_BANDWIDTH else "messages too small for a bandwidth"
    )
    return f"{1e3 * found.latency:.3g} ms a step, {rate}; off by {100 * found.median_error:.0f}%"


def format_bytes(size: int) -> str:
    for unit, word in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {word}"
    return f"{size} B"


def fit_alpha_beta(steps: list[int], bytes_sent: list[int], seconds: list[float]) -> AlphaBetaFit:
    """Latency and bandwidth that are off least, relative to each measurement; neither below 0."""
    times = np.array(seconds)
    matrix = np.stack([np.array(steps) / times, np.array(bytes_sent) / times], axis=1)
    scale = np.maximum(matrix.max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, np.ones(len(times)))
    latency, seconds_per_byte = found / scale
    median_error = float(np.median(np.abs(matrix @ (latency, seconds_per_byte) - 1.0)))
    return AlphaBetaFit(float(latency), 1.0 / max(float(seconds_per_byte), 1.0 / MAX_BANDWIDTH), median_error)


# Measuring


def bench_comm(processes: int, processes_per_node: int | None, max_bytes: int, repeats: int) -> CommReport | None:
    """Measures the world that torchrun made, or one of so many processes here. None on all ranks but the first."""
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
        raise JobError("--processes 1: nothing travels where there is one; use at least 2.")
    if processes % processes_per_node:
        raise JobError(
            f"--node {processes_per_node}: {processes} processes do not divide into nodes of {processes_per_node}."
        )
    if is_torchrun:
        found = _measure(processes_per_node, sizes, repeats)
        first = dist.get_rank() == 0
        dist.barrier()
        return found if first else None
    report: CommReport = run_world(_measure, processes, processes_per_node, sizes, repeats, timeout=1200.0)[0]
    return report


def _schedules(ranks: int, processes_per_node: int) -> dict[str, tuple[Schedule, SentNumelFn]]:
    names = [*allreduce.ALGORITHMS, "two-level"]
    found = {name: get_algorithm(name, processes_per_node) for name in names}
    for word, servers in (("server", 1), ("servers", ranks)):
        found[word] = partial(push_pull_schedule, servers=servers), partial(push_pull_count, servers=servers)
    return found


def _measure(processes_per_node: int, sizes: list[int], repeats: int) -> CommReport:
    ranks = dist.get_world_size()
    schedules = _schedules(ranks, processes_per_node)
    seconds: dict[str, list[float]] = {name: [] for name in (LIBRARY, *schedules)}
    bytes_sent: dict[str, list[int]] = {name: [] for name in seconds}
    steps: dict[str, list[int]] = {name: [] for name in seconds}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        collectives: dict[str, Callable[[], Any]] = {LIBRARY: partial(dist.all_reduce, tensor)}
        for name, (schedule, _) in schedules.items():
            collectives[name] = partial(allreduce.run_schedule, tensor, schedule, name)
        for name, taken in _time_collectives(collectives, repeats).items():
            seconds[name].append(taken)
            schedule, count_sent = schedules.get(name, allreduce.ALGORITHMS["ring"])
            count, num_segments = tensor.numel(), len(segment_bounds(tensor.numel(), 4)) - 1
            steps[name].append(len(schedule(0, ranks, count)) + num_segments - 1)
            bytes_sent[name].append(max(sent_bytes(count_sent, rank, ranks, count, 4) for rank in range(ranks)))
    links = {}
    for name, peer in (
        ("inner", 1 if processes_per_node > 1 else 0),
        ("outer", processes_per_node if ranks > processes_per_node else 0),
    ):
        if peer:
            links[name] = _measure_link(peer, sizes, repeats)
    return CommReport(ranks, processes_per_node, sizes, seconds, bytes_sent, steps, links)


def _time_collectives(collectives: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of each work's slowest rank, in the median; one more turn comes before."""
    taken = torch.zeros(repeats + 1, len(collectives), dtype=torch.float64)
    for repeat in range(repeats + 1):
        for index, collective in enumerate(collectives.values()):
            dist.barrier()
            begin = time.perf_counter()
            collective()
            taken[repeat, index] = time.perf_counter() - begin
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return dict(zip(collectives, taken[1:].median(dim=0).values.tolist(), strict=True))


def _measure_link(peer: int, sizes: list[int], repeats: int) -> AlphaBetaFit:
    """From rank 0 to another: half of there and back, while all else waits."""
    found = []
    for size in sizes:
        taken = _time_collectives({"link": partial(_ping_pong, torch.zeros(size // 4), peer)}, repeats)
        found.append(taken["link"] / 2)
    return fit_alpha_beta([1] * len(sizes), sizes, found)


def _ping_pong(tensor: Tensor, peer: int) -> None:
    if dist.get_rank() == 0:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
    elif dist.get_rank() == peer:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


# Writing


def write_links(report: CommReport, file: Path) -> None:
    """Puts the links into a cluster file, or into a new one that is this machine's processors by their preset."""
    require_parent_folder(file)
    base = read_cluster(file) if file.exists() else CLUSTERS["cpu"]
    inner, outer = (report.links.get(name) for name in ("inner", "outer"))
    found = [LinkSpec(one.bandwidth, one.latency) for one in (inner or outer, outer or inner) if one is not None]
    write_cluster(replace(base, domain_size=report.processes_per_node, inner=found[0], outer=found[1]), file)


def draw_report(report: CommReport) -> str:
    """Measurements as dots, fits as lines."""
    all_seconds = [value for times in report.seconds.values() for value in times]
    panel = Panel(
        MARGIN, (report.sizes[0], report.sizes[-1]), (1e3 * min(all_seconds), 1e3 * max(all_seconds)), log_y=True
    )
    title = f"All-reduce of {pluralize(report.processes, 'process')}, {report.processes_per_node} on a node"
    lines = [*panel.axes("bytes", f"{title}: milliseconds (dots) and fit (lines)")]
    for index, (name, found) in enumerate(report.fits.items()):
        colour, times = COLORS[index], report.seconds[name]
        lines += [svg_circle(*panel.to_pixels(size, 1e3 * value), colour) for size, value in zip(report.sizes, times)]
        model = [
            found.latency * n + bytes_sent / found.bandwidth
            for n, bytes_sent in zip(report.steps[name], report.bytes_sent[name])
        ]
        curve = [panel.to_pixels(size, 1e3 * value) for size, value in zip(report.sizes, model) if value > 0]
        lines.append(f'<path d="{line_path(curve)}" stroke="{colour}" class="curve"/>')
        lines.append(
            svg_text(MARGIN + PANEL_WIDTH + 12, MARGIN / 2 + 16 + 17 * index, name, "start", f'style="fill:{colour}"')
        )
    return svg_document(lines, 2 * MARGIN + PANEL_WIDTH + 60, PANEL_HEIGHT + 2 * MARGIN, title)
