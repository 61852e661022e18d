"""The place of a process in its cluster: `shardwise where` describes it, `shardwise doctor --preflight` measures it.

`where` shows the cluster, devices, links and storage: what a bug report needs first. `--preflight` measures every
device, disk, clock and link of a world before a long run (docs/how-to/clusters.md). All ranks measure at once; links in
other pairs each round, until all were measured or time is up."""

import os
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.benchmark import Timer

from shardwise.cluster import GIB
from shardwise.comm.collectives import all_gather_json, leave_world, ping_pong
from shardwise.console import fill_in
from shardwise.job import Job
from shardwise.launch.cluster_environment import ClusterEnvironment
from shardwise.launch.worker import init_distributed
from shardwise.train.local_machine import first_gpu, host_memory
from shardwise.workers.nodes import MAX_CLOCK_SKEW, describe_software

TEMPLATES = Path(__file__).parent / "templates"
SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.", "9p")
LINK_BYTES, DISK_BYTES, MIB = 8 << 20, 64 << 20, 1 << 20
LINK_SECONDS, MATMUL_SECONDS = 15.0, 2.0  # time for all links; for the products of each device
SLOW = 0.7  # below this share of the median, a device, disk or link counts as slow
RATES = {"matmul": "TFLOP/s", "memory": "GiB of free memory", "disk": "MB/s to disk"}
Measured = dict[str, Any]


def describe_place(environment: ClusterEnvironment, folder: Path) -> dict[str, Any]:
    """Returns everything that `where` says, by name; `folder` is where runs would be written."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    (gpu, memory), node, states = first_gpu(), environment.node, psutil.net_if_stats()
    place = {name: value for name, value in vars(environment).items() if name not in ("name", "source", "node")}
    return {
        "environment": environment.name, "world": environment.text(), "read_from": environment.source, **place,
        "node": None if node is None else {"index": node.index, "count": node.count, "address": node.endpoint},
        "host": socket.gethostname(), "cores": os.cpu_count(), "memory_bytes": host_memory(),
        "devices": [{"name": gpu, "memory_bytes": memory}] * torch.cuda.device_count(),
        "links": [{"name": name, "addresses": [one.address for one in found if one.family != psutil.AF_LINK],
                   "megabits_per_s": states[name].speed}
                  for name, found in psutil.net_if_addrs().items() if name in states and states[name].isup],
        "infiniband": {path.parts[-4]: path.read_text().strip()
                       for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))},
        "storage": _storage(folder.absolute()), "software": describe_software(),
    }  # fmt: skip


def _storage(path: Path) -> dict[str, Any]:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    mounts = [one for one in psutil.disk_partitions(all=True) if existing.is_relative_to(one.mountpoint)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown"
    facts = {"file_system": kind, "is_shared": kind.startswith(SHARED_FILE_SYSTEMS)}
    return {"path": str(path), **facts, "free_bytes": shutil.disk_usage(existing).free}


def measure_world(environment: ClusterEnvironment, folder: Path) -> list[Measured]:
    """Returns what each rank measured, by rank; `links` are those to higher ranks, in GB/s."""
    environment.export()
    world_size = environment.world_size or 1
    device = init_distributed(world_size, Job())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    mine = {"host": socket.gethostname(), "memory": free / GIB}
    mine |= {"matmul": _matmul_rate(device), "disk": _disk_rate(folder)}
    all_gather_json(None)  # so that all read their clocks at once
    mine["clock"] = time.time()
    measured = all_gather_json(mine | {"links": _link_rates(device, environment.rank, world_size)})
    leave_world()
    return measured


def _matmul_rate(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    matrix = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    return 2e-12 * size**3 / timer.blocked_autorange(min_run_time=MATMUL_SECONDS).mean


def _disk_rate(folder: Path) -> float:
    block, begin = os.urandom(MIB), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(DISK_BYTES // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return DISK_BYTES / (time.perf_counter() - begin) / 1e6


def _link_rates(device: torch.device, rank: int, world_size: int) -> dict[str, float]:
    rates, tensor = dict[str, float](), torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    last = world_size - 1 + world_size % 2  # of an even number of ranks, the last keeps its place and the others rotate
    rounds, number = last, 0
    while number < rounds:
        peer, seconds = (number - rank) % last if rank < last else number * (last + 1) // 2 % last, 0.0
        first, second = sorted((rank, last if peer == rank else peer))
        if second < world_size:
            for sent in (tensor[:1024], tensor):  # the first connects
                begin = time.perf_counter()
                ping_pong(sent, first, second)
                int(sent[-1])  # waits for the device
                seconds = time.perf_counter() - begin
            if rank == first:
                rates[str(second)] = 2e-9 * LINK_BYTES / seconds
        if number == 0:  # all ranks agree on the number of rounds
            rounds = min(rounds, max(1, int(LINK_SECONDS / max(*all_gather_json(seconds), 1e-3))))
        number += 1
    return rates


def find_problems(found: list[Measured]) -> list[str]:
    """Returns a sentence for everything that is slow or wrong."""
    medians = {key: statistics.median(one[key] for one in found) for key in RATES}
    medians["links"] = statistics.median([rate for one in found for rate in one["links"].values()] or [0.0])
    values = {"found": found, "rates": RATES, "medians": medians, "slow": SLOW, "max_skew": MAX_CLOCK_SKEW}
    return fill_in(TEMPLATES / "problems.txt", values).splitlines()


def preflight_text(found: list[Measured]) -> str:
    """Returns a line per rank, and the problems."""
    ranks = [(str(rank), list(one["links"].values())) for rank, one in enumerate(found)]
    links = [own + [other["links"][rank] for other in found if rank in other["links"]] for rank, own in ranks]
    values = {"found": found, "links": links, "problems": find_problems(found)}
    return fill_in(TEMPLATES / "preflight.txt", values)
