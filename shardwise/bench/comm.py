"""Benchmarks all-reduce algorithms by message size, and the links between processes.

Every algorithm of `shardwise.comm`, a parameter server and PyTorch's own all-reduce run in turn within each repeat, so
that other load on the machine affects all equally. The time of a repeat is that of the slowest rank; results are
medians over repeats. Each algorithm is fitted to the alpha-beta model

    seconds = latency x steps + bytes / bandwidth

with its number of steps and the bytes its busiest rank sends. Links are measured by ping-pong between two processes.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor

from shardwise import draw
from shardwise.cluster import CLUSTERS, LinkSpec, read_cluster, write_cluster
from shardwise.comm import allreduce
from shardwise.comm.allreduce import P2PStep, PeerSlice, Schedule, chunk_bounds, get_schedule, sent_bytes
from shardwise.comm.world import run_world
from shardwise.console import pluralize
from shardwise.errors import JobError
from shardwise.files import require_parent_folder

MIN_BYTES, SIZE_FACTOR = 1 << 10, 4
LIBRARY = "library"
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
    seconds: dict[str, list[float]]  # by algorithm, one entry per size
    bytes_sent: dict[str, list[int]]  # bytes that the busiest rank sends; for PyTorch's all-reduce, those of a ring
    steps: dict[str, list[int]]
    links: dict[str, AlphaBetaFit]  # `inner`: within a node; `outer`: between nodes

    @property
    def fits(self) -> dict[str, AlphaBetaFit]:
        return {n: fit_alpha_beta(self.steps[n], self.bytes_sent[n], self.seconds[n]) for n in self.seconds}

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": {name: asdict(fit) for name, fit in self.fits.items()}}

    def text(self) -> str:
        names, width = list(self.seconds), 13
        processes = f"{pluralize(self.processes, 'process')}, {self.processes_per_node} per node"
        lines = [f"{processes}; milliseconds per all-reduce"]
        lines.append(f"{'bytes':>9s}" + "".join(f"{name:>{width}s}" for name in names))
        for index, size in enumerate(self.sizes):
            times = [1e3 * self.seconds[name][index] for name in names]
            lines.append(f"{format_bytes(size):>9s}" + "".join(f"{value:{width}.3g}" for value in times))
        lines.append("seconds = latency x steps + bytes / bandwidth")
        lines += [f"  {name:14s} {_describe_fit(fit)}" for name, fit in self.fits.items()]
        lines += [f"  {name + ' link':14s} {_describe_fit(fit)}" for name, fit in self.links.items()]
        return "\n".join([*lines, *self.describe_fastest()])

    def describe_fastest(self) -> list[str]:
        """Returns one sentence per range of sizes that names the fastest algorithm."""
        algorithms = [name for name in self.seconds if name != LIBRARY]
        fastest = [min(algorithms, key=lambda name: self.seconds[name][index]) for index in range(len(self.sizes))]
        lines = []
        for name, group in groupby(range(len(self.sizes)), key=fastest.__getitem__):
            indices = list(group)
            ratio = statistics.median(self.seconds[name][n] / self.seconds[LIBRARY][n] for n in indices)
            sizes = " to ".join(
                format_bytes(size) for size in sorted({self.sizes[indices[0]], self.sizes[indices[-1]]})
            )
            claim = f"{name} is the fastest of Shardwise's algorithms, {ratio:.2f}x the time of PyTorch's all-reduce"
            lines.append(f"{sizes}: {claim}.")
        return lines


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


def _schedules(ranks: int, processes_per_node: int) -> dict[str, Schedule]:
    schedules = {name: get_schedule(name, processes_per_node) for name in (*allreduce.ALGORITHMS, "two-level")}
    servers = {"server": 1, "servers": ranks}
    return schedules | {name: partial(push_pull_schedule, servers=count) for name, count in servers.items()}


def _measure(processes_per_node: int, sizes: list[int], repeats: int) -> CommReport:
    ranks = dist.get_world_size()
    schedules = _schedules(ranks, processes_per_node)
    seconds: dict[str, list[float]] = {name: [] for name in (LIBRARY, *schedules)}
    bytes_sent: dict[str, list[int]] = {name: [] for name in seconds}
    steps: dict[str, list[int]] = {name: [] for name in seconds}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        collectives: dict[str, Callable[[], Any]] = {LIBRARY: partial(dist.all_reduce, tensor)}
        for name, schedule in schedules.items():
            collectives[name] = partial(allreduce.run_schedule, tensor, schedule, name)
        for name, elapsed in _time_collectives(collectives, repeats).items():
            seconds[name].append(elapsed)
            schedule = schedules.get(name, allreduce.ring_schedule)
            count, num_segments = tensor.numel(), len(allreduce.segment_bounds(tensor.numel(), 4)) - 1
            steps[name].append(len(schedule(0, ranks, count)) + num_segments - 1)
            sent = [sent_bytes(schedule, rank, ranks, count, 4, allreduce.SEGMENT_BYTES) for rank in range(ranks)]
            bytes_sent[name].append(max(sent))
    links = {}
    if processes_per_node > 1:
        links["inner"] = _measure_link(1, sizes, repeats)
    if ranks > processes_per_node:
        links["outer"] = _measure_link(processes_per_node, sizes, repeats)
    return CommReport(ranks, processes_per_node, sizes, seconds, bytes_sent, steps, links)


def _time_collectives(collectives: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
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
        times = _time_collectives({"link": partial(ping_pong, torch.zeros(size // 4), 0, peer)}, repeats)
        seconds.append(times["link"] / 2)
    return fit_alpha_beta([1] * len(sizes), sizes, seconds)


def ping_pong(tensor: Tensor, first: int, second: int, group: dist.ProcessGroup | None = None) -> None:
    """Sends a tensor from one rank to another and back; other ranks do nothing."""
    if dist.get_rank() == first:
        dist.send(tensor, second, group)
        dist.recv(tensor, second, group)
    elif dist.get_rank() == second:
        dist.recv(tensor, first, group)
        dist.send(tensor, first, group)


def write_links(report: CommReport, file: Path) -> None:
    """Writes the measured links to a cluster file; a new file takes everything else from the `cpu` preset."""
    require_parent_folder(file)
    base = read_cluster(file) if file.exists() else CLUSTERS["cpu"]
    specs = {name: LinkSpec(link.bandwidth, link.latency) for name, link in report.links.items()}
    inner, outer = specs.get("inner") or specs["outer"], specs.get("outer") or specs["inner"]
    write_cluster(replace(base, domain_size=report.processes_per_node, inner=inner, outer=outer), file)


def draw_report(report: CommReport) -> str:
    """Returns an SVG plot of the times (dots) and the fits (lines)."""
    milliseconds = [1e3 * value for times in report.seconds.values() for value in times]
    y_range = min(milliseconds), max(milliseconds)
    panel = draw.Panel(draw.MARGIN, (report.sizes[0], report.sizes[-1]), y_range, log_y=True)
    title = f"All-reduce of {pluralize(report.processes, 'process')}, {report.processes_per_node} per node"
    lines = [*panel.axes("bytes", f"{title}: milliseconds (dots) and fit (lines)")]
    for index, (name, fit) in enumerate(report.fits.items()):
        color, times = draw.COLORS[index], report.seconds[name]
        dots = [panel.to_pixels(size, 1e3 * value) for size, value in zip(report.sizes, times)]
        lines += [draw.svg_circle(*dot, color) for dot in dots]
        counts = zip(report.steps[name], report.bytes_sent[name])
        fitted = [fit.latency * steps + bytes_sent / fit.bandwidth for steps, bytes_sent in counts]
        curve = [panel.to_pixels(size, 1e3 * value) for size, value in zip(report.sizes, fitted) if value > 0]
        lines.append(f'<path d="{draw.line_path(curve)}" stroke="{color}" class="curve"/>')
        x, y = draw.MARGIN + draw.PANEL_WIDTH + 12, draw.MARGIN / 2 + 16 + 17 * index
        lines.append(draw.svg_text(x, y, name, "start", f'style="fill:{color}"'))
    return draw.svg_document(lines, 2 * draw.MARGIN + draw.PANEL_WIDTH + 60, draw.PANEL_HEIGHT + 2 * draw.MARGIN, title)


def push_pull_schedule(rank: int, ranks: int, count: int, servers: int) -> list[P2PStep]:
    """Returns a rank's steps with a parameter server, the baseline of all-reduce: some or all ranks each serve a slice
    of the weights, to which all push their slice of the gradient and from which they pull the sum.
    `examples/cifar10/async_server.py` is an asynchronous one."""
    bounds = chunk_bounds(count, servers) + [count] * (ranks - servers)  # the first ranks serve one slice each
    offsets = range(1, ranks)

    def served(peer: int, owner: int) -> PeerSlice:  # the slice that `owner` serves, exchanged with `peer`
        return PeerSlice(peer % ranks, bounds[owner % ranks], bounds[owner % ranks + 1])

    push = [P2PStep(served(rank + offset, rank + offset), served(rank - offset, rank), True) for offset in offsets]
    pull = [P2PStep(served(rank + offset, rank), served(rank - offset, rank - offset)) for offset in offsets]
    return push + pull
