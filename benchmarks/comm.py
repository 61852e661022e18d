"""All-reduce by ring, halving, tree, two levels and parameter server beside PyTorch's own: here, and over slow links.

    python benchmarks/comm.py                   processes of this machine, then links of 1000 and 100 Mbit/s
    python benchmarks/comm.py --rates 100       one kind of link

Slow links are network namespaces joined by a bridge, each with a token bucket on its way out and in (`ip`, `tc`; needs
root, and is left out in words where it cannot be had). Beside each time stands a formula: a schedule goes in lockstep,
and each moment of it takes a latency, and the time of the most bytes that leave or enter a node in it, over the link's
rate. The latency is what a step of the same algorithm takes for 1 KiB. Beside the bytes that a schedule says leave the
busiest node stand those that the node's interface has counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.bench import comm
from shardwise.comm import allreduce
from shardwise.comm.allreduce import SEGMENT_BYTES, Schedule, segment_bounds

ROOT = Path(__file__).parent.parent
SIZES = (1 << 10, 1 << 18, 1 << 22, 1 << 24)  # the last for links of 1000 Mbit/s and more
TURNS = 3
NAME = "swbench"


def moments(schedule: Schedule, ranks: int, node: int, size: int) -> list[int]:
    """For each moment of a schedule, the most bytes that leave or enter a node."""
    bounds = segment_bounds(size // 4, 4, SEGMENT_BYTES)
    parts = [last - first for first, last in zip(bounds, bounds[1:])]
    plans = [[schedule(rank, ranks, count) for rank in range(ranks)] for count in parts]
    depth = len(plans[0][0])
    found = []
    for moment in range(depth + len(parts) - 1):
        out, into = [0] * (ranks // node), [0] * (ranks // node)
        for part in range(max(0, moment - depth + 1), min(moment + 1, len(parts))):
            for rank in range(ranks):
                send = plans[part][rank][moment - part].send
                if send and send.peer // node != rank // node:
                    out[rank // node] += 4 * (send.stop - send.start)
                    into[send.peer // node] += 4 * (send.stop - send.start)
        found.append(max(out + into))
    return found


def leaving(schedule: Schedule, ranks: int, node: int, size: int) -> int:
    """Bytes that leave the busiest node."""
    total = [0] * (ranks // node)
    bounds = segment_bounds(size // 4, 4, SEGMENT_BYTES)
    for count in (last - first for first, last in zip(bounds, bounds[1:])):
        for rank in range(ranks):
            for step in schedule(rank, ranks, count):
                if step.send and step.send.peer // node != rank // node:
                    total[rank // node] += 4 * (step.send.stop - step.send.start)
    return max(total)


def worker(node: int, rate: int) -> None:
    """One process on a slow link; the first tells seconds and bytes on the wire."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counter = Path("/sys/class/net/up/statistics/tx_bytes")
    found = []
    for size in SIZES if rate >= 1000 else SIZES[:-1]:
        tensor = torch.zeros(size // 4)
        works: dict[str, Any] = {comm.LIBRARY: partial(dist.all_reduce, tensor)}
        for name, (schedule, _) in comm._schedules(ranks, node).items():
            works[name] = partial(allreduce.run_schedule, tensor, schedule, name)
        for name, work in works.items():
            taken, wire = [], []
            for _ in range(TURNS + 1):
                dist.barrier()
                before, begin = int(counter.read_text()), time.perf_counter()
                work()
                seconds = time.perf_counter() - begin
                dist.barrier()
                both = torch.tensor([seconds, int(counter.read_text()) - before], dtype=torch.float64)
                dist.all_reduce(both, dist.ReduceOp.MAX)
                taken.append(float(both[0]))
                wire.append(float(both[1]))
            found.append((size, name, statistics.median(taken[1:]), statistics.median(wire[1:])))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def lay(nodes: int, rate: int) -> None:
    """Namespaces with an interface `up` each, limited both ways, on a bridge in a namespace of its own."""
    sh(f"ip netns add {NAME}")
    sh(f"ip -n {NAME} link add hub type bridge")
    sh(f"ip -n {NAME} link set dev hub up")
    for number in range(nodes):
        here, port = f"{NAME}{number}", f"port{number}"
        sh(f"ip netns add {here}")
        sh(f"ip -n {NAME} link add {port} type veth peer name up netns {here}")
        sh(f"ip -n {NAME} link set dev {port} master hub up")
        sh(f"ip -n {here} addr add 10.77.0.{number + 1}/24 dev up")
        for namespace, device in ((here, "up"), (here, "lo"), (NAME, port)):
            sh(f"ip -n {namespace} link set dev {device} up")
        for namespace, device in ((here, "up"), (NAME, port)):
            bucket = f"rate {rate}mbit burst 96kb limit 8mb"
            sh(f"tc -n {namespace} qdisc add dev {device} root tbf {bucket}")


def clear(nodes: int) -> None:
    for name in (*(f"{NAME}{number}" for number in range(nodes)), NAME):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def in_namespaces(command: list[str], nodes: int, node: int, seconds: float = 500) -> list[str]:
    """What the processes of a world say, each in its node's namespace. The links are taken down at the end."""
    names = {
        "WORLD_SIZE": nodes * node, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": "up",
        "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    workers = []
    try:
        for rank in range(nodes * node):
            words = ["ip", "netns", "exec", f"{NAME}{rank // node}", sys.executable, *command]
            environment = {**os.environ, **{key: str(value) for key, value in {**names, "RANK": rank}.items()}}
            workers.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
        return [one.communicate(timeout=seconds)[0] for one in workers]
    finally:
        for one in workers:
            one.kill()
        clear(nodes)


def over_links(rate: int, nodes: int, node: int) -> None:
    print(f"\n{nodes} nodes of {node} on links of {rate} Mbit/s")
    ranks = nodes * node
    try:
        lay(nodes, rate)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        clear(nodes)
        print(f"left out: no namespaces or token buckets can be had here ({getattr(error, 'stderr', error)}).")
        return
    said = in_namespaces([__file__, "--worker", str(node), str(rate)], nodes, node)
    show(json.loads(said[0]), rate * 1e6 / 8, ranks, node)


def show(found: list[Any], rate: float, ranks: int, node: int) -> None:
    schedules = comm._schedules(ranks, node)
    steps = {name: len(schedule(0, ranks, 1)) for name, (schedule, _) in schedules.items()}
    latency = {name: taken / steps[name] for size, name, taken, _ in found if size == SIZES[0] and name in steps}
    print("ms of a step: " + ", ".join(f"{name} {1e3 * one:.2f}" for name, one in latency.items()))
    print(f"{'bytes':>9s} {'':10s} {'ms':>8s} {'formula':>8s} {'ratio':>6s} {'left the node':>15s} {'formula':>11s}")
    for size, name, taken, wire in found:
        line = f"{comm.format_bytes(size):>9s} {name:10s} {1e3 * taken:8.1f}"
        if name in schedules:
            schedule = schedules[name][0]
            formula = sum(latency[name] + most / rate for most in moments(schedule, ranks, node, size))
            sent = leaving(schedule, ranks, node, size)
            line += f" {1e3 * formula:8.1f} {taken / formula:6.2f} {wire:15,.0f} {sent:11,}"
        else:
            line += f" {'':8s} {'':6s} {wire:15,.0f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rates", type=int, nargs="*", default=[1000, 100], help="Mbit/s")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(*given.worker)
        return
    for processes in given.processes:
        report = comm.bench_comm(processes, None, 1 << 24, TURNS)
        assert report is not None
        print(report.text(), flush=True)
    if given.rates and (os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc")):
        print("slow links are left out: they need root, `ip` and `tc`.")
        return
    for rate in given.rates:
        over_links(rate, 4, 1)
        over_links(rate, 2, 2)


if __name__ == "__main__":
    main()
