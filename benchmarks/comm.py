"""Compares ring, halving, tree, two-level and parameter-server all-reduce with PyTorch's, locally and on slow links.

    python benchmarks/comm.py                   local processes, then links of 1000 and 100 Mbit/s
    python benchmarks/comm.py --rates 100       only links of 100 Mbit/s

Slow links are network namespaces joined by a bridge, with a token bucket filter in both directions (`ip`, `tc`; skipped
without root). Each time is compared with a model: the schedule runs in lockstep, and each step takes a latency plus the
largest number of bytes that leave or enter a node in it, divided by the link rate. The latency is that of one step of
the same algorithm at 1 KiB. The bytes that leave the busiest node are compared with the counter of its interface.
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

import allreduce
import links
import torch
import torch.distributed as dist
from allreduce import SEGMENT_BYTES, Schedule, get_schedule, push_pull_schedule, segment_bounds

ROOT = Path(__file__).parent.parent
SIZES = (1 << 10, 1 << 18, 1 << 22, 1 << 24)  # the last only for links of at least 1000 Mbit/s
REPEATS = 3
NAME = "swbench"
LIBRARY = "library"


def schedules_of(ranks: int, node: int) -> dict[str, Schedule]:
    schedules = {name: get_schedule(name, node) for name in (*allreduce.ALGORITHMS, "two-level")}
    servers = {"server": 1, "servers": ranks}
    return schedules | {name: partial(push_pull_schedule, servers=count) for name, count in servers.items()}


def busiest_bytes_by_step(schedule: Schedule, ranks: int, node: int, size: int) -> list[int]:
    """Returns, for each step of a schedule, the largest number of bytes that leave or enter a node."""
    bounds = segment_bounds(size // 4, 4, SEGMENT_BYTES)
    segments = [stop - start for start, stop in zip(bounds, bounds[1:])]
    schedules = [[schedule(rank, ranks, count) for rank in range(ranks)] for count in segments]
    depth = len(schedules[0][0])
    busiest = []
    for step in range(depth + len(segments) - 1):  # segments are pipelined: each starts one step after the previous
        sent, received = [0] * (ranks // node), [0] * (ranks // node)
        for segment in range(max(0, step - depth + 1), min(step + 1, len(segments))):
            for rank in range(ranks):
                send = schedules[segment][rank][step - segment].send
                if send and send.peer // node != rank // node:
                    sent[rank // node] += 4 * (send.stop - send.start)
                    received[send.peer // node] += 4 * (send.stop - send.start)
        busiest.append(max(sent + received))
    return busiest


def bytes_leaving_node(schedule: Schedule, ranks: int, node: int, size: int) -> int:
    """Returns the bytes that leave the busiest node."""
    total = [0] * (ranks // node)
    bounds = segment_bounds(size // 4, 4, SEGMENT_BYTES)
    for count in (stop - start for start, stop in zip(bounds, bounds[1:])):
        for rank in range(ranks):
            for step in schedule(rank, ranks, count):
                if step.send and step.send.peer // node != rank // node:
                    total[rank // node] += 4 * (step.send.stop - step.send.start)
    return max(total)


def worker(node: int, rate: int) -> None:
    """Runs one process on a slow link; rank 0 prints the seconds and the bytes on the wire."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counter = Path("/sys/class/net/up/statistics/tx_bytes")
    results = []
    for size in SIZES if rate >= 1000 else SIZES[:-1]:
        tensor = torch.zeros(size // 4)
        collectives: dict[str, Any] = {LIBRARY: partial(dist.all_reduce, tensor)}
        for name, schedule in schedules_of(ranks, node).items():
            collectives[name] = partial(allreduce.run_schedule, tensor, schedule, name)
        for name, collective in collectives.items():
            times, wire_bytes = [], []
            for _ in range(REPEATS + 1):
                dist.barrier()
                before, begin = int(counter.read_text()), time.perf_counter()
                collective()
                seconds = time.perf_counter() - begin
                dist.barrier()
                both = torch.tensor([seconds, int(counter.read_text()) - before], dtype=torch.float64)
                dist.all_reduce(both, dist.ReduceOp.MAX)
                times.append(float(both[0]))
                wire_bytes.append(float(both[1]))
            results.append((size, name, statistics.median(times[1:]), statistics.median(wire_bytes[1:])))
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()


def run_command(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def create_links(nodes: int, rate: int) -> None:
    """Creates one namespace per node, whose rate-limited interface `up` is attached to a bridge."""
    run_command(f"ip netns add {NAME}")
    run_command(f"ip -n {NAME} link add hub type bridge")
    run_command(f"ip -n {NAME} link set dev hub up")
    for number in range(nodes):
        node, port = f"{NAME}{number}", f"port{number}"
        run_command(f"ip netns add {node}")
        run_command(f"ip -n {NAME} link add {port} type veth peer name up netns {node}")
        run_command(f"ip -n {NAME} link set dev {port} master hub up")
        run_command(f"ip -n {node} addr add 10.77.0.{number + 1}/24 dev up")
        for namespace, device in ((node, "up"), (node, "lo"), (NAME, port)):
            run_command(f"ip -n {namespace} link set dev {device} up")
        for namespace, device in ((node, "up"), (NAME, port)):
            bucket = f"rate {rate}mbit burst 96kb limit 8mb"
            run_command(f"tc -n {namespace} qdisc add dev {device} root tbf {bucket}")


def delete_links(nodes: int) -> None:
    for name in (*(f"{NAME}{number}" for number in range(nodes)), NAME):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def in_namespaces(command: list[str], nodes: int, node: int, seconds: float = 500) -> list[str]:
    """Runs one process per rank in its node's namespace and returns their output; deletes the links at the end."""
    variables = {
        "WORLD_SIZE": nodes * node, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": "up",
        "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    workers = []
    try:
        for rank in range(nodes * node):
            arguments = ["ip", "netns", "exec", f"{NAME}{rank // node}", sys.executable, *command]
            environment = {**os.environ, **{key: str(value) for key, value in {**variables, "RANK": rank}.items()}}
            workers.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True))
        return [process.communicate(timeout=seconds)[0] for process in workers]
    finally:
        for process in workers:
            process.kill()
        delete_links(nodes)


def bench_links(rate: int, nodes: int, node: int) -> None:
    print(f"\n{nodes} nodes with {node} processes each, links of {rate} Mbit/s")
    ranks = nodes * node
    try:
        create_links(nodes, rate)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        delete_links(nodes)
        print(f"skipped: cannot create network namespaces or token buckets ({getattr(error, 'stderr', error)}).")
        return
    outputs = in_namespaces([__file__, "--worker", str(node), str(rate)], nodes, node)
    show(json.loads(outputs[0]), rate * 1e6 / 8, ranks, node)


def show(results: list[Any], rate: float, ranks: int, node: int) -> None:
    schedules = schedules_of(ranks, node)
    steps = {name: len(schedule(0, ranks, 1)) for name, schedule in schedules.items()}
    latency = {name: seconds / steps[name] for size, name, seconds, _ in results if size == SIZES[0] and name in steps}
    print("ms per step: " + ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in latency.items()))
    print(f"{'bytes':>9s} {'':10s} {'ms':>8s} {'model':>8s} {'ratio':>6s} {'sent by node':>15s} {'model':>11s}")
    for size, name, seconds, wire_bytes in results:
        line = f"{links.format_bytes(size):>9s} {name:10s} {1e3 * seconds:8.1f}"
        if name in schedules:
            schedule = schedules[name]
            busiest = busiest_bytes_by_step(schedule, ranks, node, size)
            predicted = sum(latency[name] + step_bytes / rate for step_bytes in busiest)
            sent = bytes_leaving_node(schedule, ranks, node, size)
            line += f" {1e3 * predicted:8.1f} {seconds / predicted:6.2f} {wire_bytes:15,.0f} {sent:11,}"
        else:
            line += f" {'':8s} {'':6s} {wire_bytes:15,.0f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rates", type=int, nargs="*", default=[1000, 100], help="Mbit/s")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    for processes in options.processes:
        report = links.bench_comm(processes, None, 1 << 24, REPEATS)
        assert report is not None
        print(report.text(), flush=True)
    if options.rates and (os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc")):
        print("skipping slow links: they need root, `ip` and `tc`.")
        return
    for rate in options.rates:
        bench_links(rate, 4, 1)
        bench_links(rate, 2, 2)


if __name__ == "__main__":
    main()
