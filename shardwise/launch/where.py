"""`shardwise where`: the cluster this process is in, its devices, links and storage; what a bug report needs first."""

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
import torch

from shardwise.cluster import GIB
from shardwise.launch.cluster_environment import ClusterEnvironment
from shardwise.train.local_machine import first_gpu, host_memory
from shardwise.workers.nodes import describe_software

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.", "9p")


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
        "links": [
            {"name": name, "addresses": [one.address for one in found if one.family != psutil.AF_LINK],
             "megabits_per_s": states[name].speed}
            for name, found in psutil.net_if_addrs().items() if name in states and states[name].isup
        ],
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


def place_text(place: dict[str, Any]) -> str:
    """Returns the description as lines for people."""
    devices, storage = place["devices"], place["storage"]
    links = [f"{link['name']} {' '.join(link['addresses'])}".strip() for link in place["links"]]
    gpus = f"{len(devices)} x {devices[0]['name']}, {devices[0]['memory_bytes'] / GIB:.0f} GiB; " if devices else ""
    shared = "shared by hosts" if storage["is_shared"] else "of this host, as far as can be seen"
    rows = {
        "world": place["world"],
        "read from": " ".join(f"{name}={value}" for name, value in place["read_from"].items()) or "no variable",
        "host": f"{place['host']}, {place['cores']} cores, {place['memory_bytes'] / GIB:.0f} GiB",
        "devices": f"{gpus or 'no GPU; '}CPU",
        "links": "; ".join([*links, *(f"{name} {rate}" for name, rate in place["infiniband"].items())]),
        "storage": f"{storage['path']}: {storage['file_system']}, {storage['free_bytes'] / GIB:.0f} GiB free, {shared}",
        "software": ", ".join(f"{name} {version}" for name, version in place["software"].items()),
    }
    return "\n".join(f"{name + ':':<10} {value}" for name, value in rows.items())
