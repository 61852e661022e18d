"""Hardware descriptions: devices with their peak FLOP/s, memory and links, from data sheets.

A `Cluster` is a device type, the size of a fast domain (a node, an NVLink rack, a torus pod), and two links: within a
domain and between domains. Bandwidths are per device and direction, in bytes per second; FLOP/s are dense. The fraction
of these peaks that software reaches is in `shardwise.planner.costs.machine`.

`shardwise calibrate` writes the same fields as TOML, with measured efficiencies.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import TypeAdapter, ValidationError

from shardwise.errors import JobError, shorten, suggest
from shardwise.files import parse_toml, write_text
from shardwise.layout import MAX_WORLD

GB, TERA, GIB = 1e9, 1e12, 2**30
MAX_RATE = 1e21  # of a device: FLOP/s, bytes, bytes per second
TOPOLOGIES = ("switch", "torus2", "torus3")


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, from its data sheet."""

    name: str
    family: str  # selects the efficiencies: volta, ampere, hopper, blackwell, blackwell-ultra, cdna2, tpu, cpu
    memory: float  # bytes
    bandwidth: float  # memory bandwidth, bytes per second
    peak_by_precision: dict[str, float]  # dense matmul FLOP/s by precision
    compute_units: int  # streaming multiprocessors, or their counterpart, that share one matmul

    def peak_flops(self, precision: str) -> float:
        """Returns the peak matmul FLOP/s; an unsupported precision runs at the rate of the next wider supported one."""
        next_wider = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "float32", "float32": "float64"}
        next_wider["tf32"] = "float32"
        name = precision
        while name not in self.peak_by_precision:
            if name not in next_wider:
                return min(self.peak_by_precision.values())
            name = next_wider[name]
        return self.peak_by_precision[name]


@dataclass(frozen=True)
class LinkSpec:
    """One level of the network."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    device: DeviceSpec
    domain_size: int  # devices per domain, connected by the inner link
    inner: LinkSpec
    outer: LinkSpec
    topology: str = "switch"  # topology of the inner link: `switch`, `torus2` or `torus3`
    # Efficiencies measured by `shardwise calibrate`; they override those of the device's family.
    measured: dict[str, float] = field(default_factory=dict)


def _device_spec(
    name: str, family: str, memory_gib: float, bandwidth: float, half_tflops: float, units: int, **other_tflops: float
) -> DeviceSpec:
    peak = {"fp16": half_tflops * TERA, "bf16": half_tflops * TERA, **{k: v * TERA for k, v in other_tflops.items()}}
    return DeviceSpec(name, family, memory_gib * GIB, bandwidth * GB, peak, units)


# Data sheets: NVIDIA V100, A100, H100, H200, DGX B200 and B300, GB200 and GB300 NVL72; AMD CDNA 2 white paper;
# Google Cloud's TPU pages. Memory is what the driver makes available. B300 and GB300 have the B200's fp8 rate. A GB200
# has a higher power limit than a B200. The H100 with HBM2e in Meta's Grand Teton (torchtitan's benchmarks) has no data
# sheet: its peak is "between SXM and NVL", so we use the mean.
# fmt: off
DEVICES = {device.name: device for device in (
    _device_spec("V100-16GB", "volta", 15.8, 900, 125, 80, float32=15.7, bf16=15.7),
    _device_spec("V100-32GB", "volta", 31.7, 900, 125, 80, float32=15.7, bf16=15.7),
    _device_spec("A100-40GB", "ampere", 39.4, 1555, 312, 108, float32=19.5, tf32=156),
    _device_spec("A100-80GB", "ampere", 79.2, 2039, 312, 108, float32=19.5, tf32=156),
    _device_spec("H100-80GB", "hopper", 79.2, 3352, 989, 132, float32=67, tf32=494, fp8=1979),
    _device_spec("H100-94GB", "hopper", 93.1, 3900, 989, 132, float32=67, tf32=494, fp8=1979),
    _device_spec("H100-96GB", "hopper", 94.5, 4000, 989, 132, float32=67, tf32=494, fp8=1979),
    _device_spec("H100-HBM2e", "hopper", 95.0, 2400, 912, 132, float32=62, tf32=456, fp8=1825),
    _device_spec("H200", "hopper", 139.8, 4800, 989, 132, float32=67, tf32=494, fp8=1979),
    _device_spec("B200", "blackwell", 178.4, 7700, 2250, 148, float32=75, tf32=1125, fp8=4500, fp4=9000),
    _device_spec("B300", "blackwell-ultra", 267.0, 7700, 2250, 148, float32=75, tf32=1125, fp8=4500, fp4=13500),
    _device_spec("GB200", "blackwell", 184.0, 8000, 2450, 152, float32=80, tf32=1225, fp8=4900, fp4=9800),
    _device_spec("GB300", "blackwell-ultra", 276.0, 8000, 2450, 152, float32=80, tf32=1225, fp8=4900, fp4=14700),
    _device_spec("MI250X-GCD", "cdna2", 63.9, 1638, 191.5, 110, float32=23.9),
    _device_spec("TPU-v4", "tpu", 31.7, 1228, 275, 2, float32=69),
    _device_spec("TPU-v5e", "tpu", 15.7, 819, 197, 1, float32=49),
    _device_spec("TPU-v5p", "tpu", 94.7, 2765, 459, 2, float32=115),
    _device_spec("TPU-v7x", "tpu", 191.7, 7370, 2307, 2, float32=577, fp8=4614),
    DeviceSpec("CPU", "cpu", 8 * GIB, 20 * GB, {"float64": 1.7e10, "float32": 3.4e10}, 1),
)}
# fmt: on

# A TPU's inner bandwidth is the total of its links: six of 45 GB/s (v4), four of 45 (v5e), six of 90 (v5p), 9.6 Tbit/s
# in all (v7x). Rail-optimized InfiniBand has one port per device, of 100, 200, 400 or 800 Gbit/s.
_INFINIBAND = {
    100: LinkSpec(12.5 * GB, 5e-6), 200: LinkSpec(25 * GB, 5e-6), 400: LinkSpec(50 * GB, 5e-6),
    800: LinkSpec(100 * GB, 5e-6),
}  # fmt: skip


def _nvlink(bandwidth: float) -> LinkSpec:
    return LinkSpec(bandwidth * GB, 1.5e-6)


# One process per core, communicating through gloo, measured by `calibrate --processes 2` on a server of 2020.
# Memory-bound operators reach little of the copy bandwidth, and nothing overlaps. Attention is above 1 because the cost
# model's rule for short sequences is a GPU's.
CPU_EFFICIENCIES = {
    "matmul": 1.0, "matmul_half_rate_depth": 0.0, "wave_quantization": 0.0, "unaligned_64": 1.0, "unaligned_8": 0.9,
    "attention": 1.8, "attention_backward": 1.15, "memory": 0.08, "bulk_memory": 1.0, "inner": 1.0, "outer": 1.0,
    "latency": 0.5, "collective_start": 5e-4, "kernel_launch": 3.4e-5, "overlap_sharpness": 1.0, "jitter": 0.0,
    "fixed_seconds": 0.0, "contention": 0.0, "overlap_data": 0.0, "overlap_tensor": 0.0, "overlap_p2p": 0.0,
    "overlap_p2p_interleaved": 0.0,
}  # fmt: skip

# fmt: off
CLUSTERS = {
    "v100-16g": Cluster(DEVICES["V100-16GB"], 8, _nvlink(150), _INFINIBAND[100]),
    "v100-32g": Cluster(DEVICES["V100-32GB"], 8, _nvlink(150), _INFINIBAND[100]),
    "a100-40g": Cluster(DEVICES["A100-40GB"], 8, _nvlink(300), _INFINIBAND[200]),
    "a100-80g": Cluster(DEVICES["A100-80GB"], 8, _nvlink(300), _INFINIBAND[200]),
    "h100":     Cluster(DEVICES["H100-80GB"], 8, _nvlink(450), _INFINIBAND[400]),
    "h100-94g": Cluster(DEVICES["H100-94GB"], 8, _nvlink(300), _INFINIBAND[200]),
    "h100-96g": Cluster(DEVICES["H100-96GB"], 1, _nvlink(450), _INFINIBAND[400]),
    "h100-hbm2e": Cluster(DEVICES["H100-HBM2e"], 8, _nvlink(450), _INFINIBAND[400]),
    "h200":     Cluster(DEVICES["H200"], 8, _nvlink(450), _INFINIBAND[400]),
    "b200":     Cluster(DEVICES["B200"], 8, _nvlink(900), _INFINIBAND[400]),
    "b300":     Cluster(DEVICES["B300"], 8, _nvlink(900), _INFINIBAND[800]),
    "gb200":    Cluster(DEVICES["GB200"], 72, _nvlink(900), _INFINIBAND[400]),
    "gb300":    Cluster(DEVICES["GB300"], 72, _nvlink(900), _INFINIBAND[800]),
    "mi250x":   Cluster(DEVICES["MI250X-GCD"], 8, LinkSpec(50 * GB, 8e-6), _INFINIBAND[100]),
    "tpu-v4":   Cluster(DEVICES["TPU-v4"], 4096, LinkSpec(270 * GB, 1e-6), LinkSpec(3 * GB, 5e-5), "torus3"),
    "tpu-v5e":  Cluster(DEVICES["TPU-v5e"], 256, LinkSpec(180 * GB, 1e-6), LinkSpec(3 * GB, 5e-5), "torus2"),
    "tpu-v5p":  Cluster(DEVICES["TPU-v5p"], 6144, LinkSpec(540 * GB, 1e-6), LinkSpec(6 * GB, 5e-5), "torus3"),
    "tpu-v7x":  Cluster(DEVICES["TPU-v7x"], 9216, LinkSpec(1200 * GB, 1e-6), LinkSpec(12 * GB, 5e-5), "torus3"),
    "cpu": Cluster(DEVICES["CPU"], 1024, LinkSpec(0.8 * GB, 4e-4), LinkSpec(0.1 * GB, 1e-3), measured=CPU_EFFICIENCIES),
}
# fmt: on


def find_cluster(name: str) -> Cluster:
    """Returns a preset by name, or reads a calibrated file by path."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        raise JobError(f"unknown cluster {name!r}: {suggest(name, CLUSTERS)} Or give a file of `shardwise calibrate`.")
    return read_cluster(path)


def read_cluster(path: Path) -> Cluster:
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
        cluster = TypeAdapter(Cluster).validate_python(values)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise JobError(f"{path} is not a cluster file ({problem}); `shardwise calibrate -o FILE` writes one.") from None
    for key, value in _leaves(values):
        low, high = (0.0, MAX_RATE) if key.startswith("measured.") or key.endswith(".latency") else (1e-9, MAX_RATE)
        high = MAX_WORLD if key in ("domain_size", "device.compute_units") else high
        if isinstance(value, bool) or (isinstance(value, int | float) and not low <= value <= high):
            raise JobError(f"{path}: {key} = {shorten(value)}: it must be a number from {low:g} to {high:g}.")
    if cluster.topology not in TOPOLOGIES or not cluster.device.peak_by_precision:
        raise JobError(f"{path}: topology must be {', '.join(TOPOLOGIES)}, and peak_by_precision needs an entry.")
    return cluster


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def write_cluster(cluster: Cluster, path: Path) -> None:
    write_text(path, tomli_w.dumps(asdict(cluster)))


def device_by_driver_name(name: str, memory: float = 0.0) -> DeviceSpec | None:
    """Returns the device with this driver name; of several variants, the one with the closest memory size."""
    name_parts = name.upper().replace("_", " ").replace("-", " ").split()
    for key in ("GB300", "GB200", "B300", "B200", "H200", "H100", "GH200", "A100", "A800", "V100"):
        if any(part.startswith(key) for part in name_parts):
            model = {"GH200": "H100", "A800": "A100"}.get(key, key)
            candidates = [device for device in DEVICES.values() if device.name.startswith(model)]
            return min(candidates, key=lambda d: abs(d.memory - memory) if memory else d.name != f"{model}-80GB")
    return None


def cluster_by_driver_name(name: str, memory: float = 0.0) -> Cluster | None:
    """Returns the usual cluster of the device with this driver name."""
    device = device_by_driver_name(name, memory)
    return next((cluster for cluster in CLUSTERS.values() if cluster.device is device), None)


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the device's peak matmul FLOP/s in this precision, if known."""
    if device.type != "cuda" or precision not in ("bf16", "fp16", "fp8"):
        return None
    spec = device_by_driver_name(torch.cuda.get_device_name(device))
    return spec.peak_flops(precision) if spec else None
