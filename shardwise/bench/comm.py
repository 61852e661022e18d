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

from shardwise.bench.server import exchange, exchange_count
from shardwise.cluster import CLUSTERS, Link, read_cluster, write_cluster
from shardwise.comm import allreduce
from shardwise.comm.allreduce import Count, Schedule, algorithm, segments, sent_bytes
from shardwise.comm.collectives import all_reduce
from shardwise.comm.world import run_world
from shardwise.draw import COLOURS, EDGE, HIGH, SIDE, Panel, dot, path, svg, text
from shardwise.errors import JobError
from shardwise.files import demand_folder
from shardwise.words import counted

SMALLEST, FACTOR = 1 << 10, 4
LIBRARY = "library"
UNSEEN = 1e15  # bytes a second: larger messages did not take longer


@dataclass(frozen=True)
class Fit:
    latency: float
    """Seconds of a step."""
    bandwidth: float
    """Bytes a second of the busiest rank."""
    off: float
    """How far the fit is from a measurement, in the median."""


@dataclass(frozen=True)
class CommReport:
    processes: int
    node: int
    sizes: list[int]
    seconds: dict[str, list[float]]
    """By algorithm, for each size."""
    sent: dict[str, list[int]]
    """Bytes that the busiest rank sends; of the library, what a ring would."""
    steps: dict[str, list[int]]
    links: dict[str, Fit]
    """`inner`: within a node; `outer`: between nodes."""

    @property
    def fits(self) -> dict[str, Fit]:
        return {name: fit(self.steps[name], self.sent[name], self.seconds[name]) for name in self.seconds}

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": {name: asdict(found) for name, found in self.fits.items()}}

    def text(self) -> str:
        names, width = list(self.seconds), 13
        lines = [f"{counted(self.processes, 'process')}, {self.node} on a node; milliseconds of an all-reduce"]
        lines.append(f"{'bytes':>9s}" + "".join(f"{name:>{width}s}" for name in names))
        for place, size in enumerate(self.sizes):
            times = [1e3 * self.seconds[name][place] for name in names]
            lines.append(f"{size_word(size):>9s}" + "".join(f"{value:{width}.3g}" for value in times))
        lines.append("seconds = latency x steps + bytes / bandwidth")
        lines += [f"  {name:14s} {_fit_words(found)}" for name, found in self.fits.items()]
        lines += [f"  {name + ' link':14s} {_fit_words(found)}" for name, found in self.links.items()]
        return "\n".join([*lines, *self.verdict()])

    def verdict(self) -> list[str]:
        """Which wins where, in words."""
        own = [name for name in self.seconds if name != LIBRARY]
        best = [min(own, key=lambda name: self.seconds[name][place]) for place in range(len(self.sizes))]
        lines, first = [], 0
        for place in range(1, len(best) + 1):
            if place == len(best) or best[place] != best[first]:
                ratios = [self.seconds[best[first]][n] / self.seconds[LIBRARY][n] for n in range(first, place)]
                where = size_word(self.sizes[first])
                where += f" to {size_word(self.sizes[place - 1])}" if place - 1 > first else ""
                lines.append(
                    f"{where}: {best[first]} is the fastest of ours, {statistics.median(ratios):.2f} times the "
                    "library's time."
                )
                first = place
        return lines


def _fit_words(found: Fit) -> str:
    rate = f"{found.bandwidth / 1e6:.4g} MB/s" if found.bandwidth < UNSEEN else "messages too small for a bandwidth"
    return f"{1e3 * found.latency:.3g} ms a step, {rate}; off by {100 * found.off:.0f}%"


def size_word(size: int) -> str:
    for unit, word in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {word}"
    return f"{size} B"


def fit(steps: list[int], sent: list[int], seconds: list[float]) -> Fit:
    """Latency and bandwidth that are off least, relative to each measurement; neither below 0."""
    measured = np.array(seconds)
    matrix = np.stack([np.array(steps) / measured, np.array(sent) / measured], axis=1)
    scale = np.maximum(matrix.max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, np.ones(len(measured)))
    latency, each = found / scale
    off = float(np.median(np.abs(matrix @ (latency, each) - 1.0)))
    return Fit(float(latency), 1.0 / max(float(each), 1.0 / UNSEEN), off)


# Measuring


def bench_comm(processes: int, node: int | None, largest: int, turns: int) -> CommReport | None:
    """Measures the world that torchrun made, or one of so many processes here. None on all ranks but the first."""
    sizes = [SMALLEST]
    while sizes[-1] * FACTOR <= largest:
        sizes.append(sizes[-1] * FACTOR)
    joins = "RANK" in os.environ
    if joins:
        dist.init_process_group("gloo")
        processes = dist.get_world_size()
        node = node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node = node or (processes // 2 if processes % 2 == 0 else 1)
    if processes < 2:
        raise JobError("--processes 1: nothing travels where there is one; use at least 2.")
    if processes % node:
        raise JobError(f"--node {node}: {processes} processes do not divide into nodes of {node}.")
    if joins:
        found = _measure(node, sizes, turns)
        first = dist.get_rank() == 0
        dist.barrier()
        return found if first else None
    report: CommReport = run_world(_measure, processes, node, sizes, turns, timeout=1200.0)[0]
    return report


def _schedules(ranks: int, node: int) -> dict[str, tuple[Schedule, Count]]:
    names = [*allreduce.ALGORITHMS, "two-level"]
    found = {name: algorithm(name, node) for name in names}
    for word, servers in (("server", 1), ("servers", ranks)):
        found[word] = partial(exchange, servers=servers), partial(exchange_count, servers=servers)
    return found


def _measure(node: int, sizes: list[int], turns: int) -> CommReport:
    ranks = dist.get_world_size()
    schedules = _schedules(ranks, node)
    seconds: dict[str, list[float]] = {name: [] for name in (LIBRARY, *schedules)}
    sent: dict[str, list[int]] = {name: [] for name in seconds}
    steps: dict[str, list[int]] = {name: [] for name in seconds}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        works: dict[str, Callable[[], Any]] = {LIBRARY: partial(all_reduce, tensor)}
        for name, (schedule, _) in schedules.items():
            works[name] = partial(allreduce.run, tensor, schedule, name)
        for name, taken in _turns(works, turns).items():
            seconds[name].append(taken)
            schedule, count_of = schedules.get(name, allreduce.ALGORITHMS["ring"])
            count, cuts = tensor.numel(), len(segments(tensor.numel(), 4)) - 1
            steps[name].append(len(schedule(0, ranks, count)) + cuts - 1)
            sent[name].append(max(sent_bytes(count_of, rank, ranks, count, 4) for rank in range(ranks)))
    links = {}
    for name, other in (("inner", 1 if node > 1 else 0), ("outer", node if ranks > node else 0)):
        if other:
            links[name] = _link(other, sizes, turns)
    return CommReport(ranks, node, sizes, seconds, sent, steps, links)


def _turns(works: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Seconds of each work's slowest rank, in the median; one more turn comes before."""
    taken = torch.zeros(turns + 1, len(works), dtype=torch.float64)
    for turn in range(turns + 1):
        for place, work in enumerate(works.values()):
            dist.barrier()
            begin = time.perf_counter()
            work()
            taken[turn, place] = time.perf_counter() - begin
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return dict(zip(works, taken[1:].median(dim=0).values.tolist(), strict=True))


def _link(other: int, sizes: list[int], turns: int) -> Fit:
    """From rank 0 to another: half of there and back, while all else waits."""
    found = []
    for size in sizes:
        taken = _turns({"link": partial(_there_and_back, torch.zeros(size // 4), other)}, turns)
        found.append(taken["link"] / 2)
    return fit([1] * len(sizes), sizes, found)


def _there_and_back(tensor: Tensor, other: int) -> None:
    if dist.get_rank() == 0:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    elif dist.get_rank() == other:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


# Writing


def write_links(report: CommReport, file: Path) -> None:
    """Puts the links into a cluster file, or into a new one that is this machine's processors by their preset."""
    demand_folder(file)
    base = read_cluster(file) if file.exists() else CLUSTERS["cpu"]
    inner, outer = (report.links.get(name) for name in ("inner", "outer"))
    found = [Link(one.bandwidth, one.latency) for one in (inner or outer, outer or inner) if one is not None]
    write_cluster(replace(base, domain=report.node, inner=found[0], outer=found[1]), file)


def draw(report: CommReport) -> str:
    """Measurements as dots, fits as lines."""
    every = [value for times in report.seconds.values() for value in times]
    panel = Panel(EDGE, (report.sizes[0], report.sizes[-1]), (1e3 * min(every), 1e3 * max(every)), log_y=True)
    title = f"All-reduce of {counted(report.processes, 'process')}, {report.node} on a node"
    lines = [*panel.frame("bytes", f"{title}: milliseconds (dots) and fit (lines)")]
    for place, (name, found) in enumerate(report.fits.items()):
        colour, times = COLOURS[place], report.seconds[name]
        lines += [dot(*panel.place(size, 1e3 * value), colour) for size, value in zip(report.sizes, times)]
        model = [found.latency * n + sent / found.bandwidth for n, sent in zip(report.steps[name], report.sent[name])]
        curve = [panel.place(size, 1e3 * value) for size, value in zip(report.sizes, model) if value > 0]
        lines.append(f'<path d="{path(curve)}" stroke="{colour}" class="curve"/>')
        lines.append(text(EDGE + SIDE + 12, EDGE / 2 + 16 + 17 * place, name, "start", f'style="fill:{colour}"'))
    return svg(lines, 2 * EDGE + SIDE + 60, HIGH + 2 * EDGE, title)
