"""Hardware descriptions: devices with their peak FLOP/s, memory and links. `clusters.toml` has those of data sheets.

A `Cluster` is a device type, the size of a fast domain (a node, an NVLink rack, a torus pod), and two links: within a
domain and between domains. Bandwidths are per device and direction, in bytes per second; FLOP/s are dense. The fraction
of these peaks that software reaches is in `shardwise.planner.costs.machine`. `shardwise calibrate` writes the same
fields as TOML, with measured efficiencies."""

import tomllib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardwise.errors import JobError, suggest
from shardwise.files import parse_toml, write_text
from shardwise.layout import MAX_WORLD

GB, TERA, GIB = 1e9, 1e12, 2**30
# Keys of `--set cluster.KEY=VALUE`, each with its unit. `flops`: in bf16, other precisions in proportion.
UNITS = {"inner": GB, "outer": GB, "node_link": GB, "memory": GIB, "bandwidth": GB, "flops": 1e12}
Rate = Annotated[float, Field(strict=True, ge=1e-9, le=1e21, allow_inf_nan=False)]  # FLOP/s, bytes, bytes per second
NonNegative = Annotated[float, Field(strict=True, ge=0.0, le=1e21, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_WORLD)]
WIDENING = ("fp4", "fp8", "bf16", "fp16", "float32", "float64")
NEXT_WIDER = {**dict(zip(WIDENING, WIDENING[1:])), "tf32": "float32"}


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, from its data sheet."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    family: str  # selects the efficiencies: volta, ampere, hopper, blackwell, cdna2 to cdna4, tpu, cpu
    memory: Rate  # bytes
    bandwidth: Rate  # memory bandwidth, bytes per second
    peak_by_precision: Annotated[dict[str, Rate], Field(min_length=1)]  # dense matmul FLOP/s by precision
    compute_units: Count  # streaming multiprocessors, or their counterpart, that share one matmul
    power: NonNegative = 0.0  # rated watts; 0: not known

    def peak_flops(self, precision: str) -> float:
        """Returns the peak matmul FLOP/s; an unsupported precision runs at the rate of the next wider supported one."""
        while precision not in self.peak_by_precision and precision in NEXT_WIDER:
            precision = NEXT_WIDER[precision]
        return self.peak_by_precision.get(precision, min(self.peak_by_precision.values()))


@dataclass(frozen=True)
class LinkSpec:
    """One level of the network."""

    bandwidth: Rate
    latency: NonNegative


@dataclass(frozen=True)
class Cluster:
    __pydantic_config__ = ConfigDict(extra="forbid")
    device: DeviceSpec
    domain_size: Count  # devices per domain, connected by the inner link
    inner: LinkSpec
    outer: LinkSpec
    topology: Literal["switch", "torus2", "torus3"] = "switch"  # topology of the inner link
    measured: dict[str, NonNegative] = field(default_factory=dict)  # efficiencies that override those of the family


def _read_presets() -> tuple[dict[str, DeviceSpec], dict[str, Cluster]]:
    """Returns devices and clusters of `clusters.toml` by name; its units are GiB, GB/s and TFLOP/s."""
    presets = tomllib.loads((Path(__file__).parent / "clusters.toml").read_text(encoding="utf-8"))
    devices, clusters = {}, {}
    for name, values in presets["devices"].items():
        peaks = {precision: float(round(rate * TERA)) for precision, rate in values["tflops"].items()}
        memory, bandwidth = values["memory"] * GIB, values["bandwidth"] * GB
        devices[name] = DeviceSpec(name, values["family"], memory, bandwidth, peaks, values["compute_units"],
                                    values.get("power", 0.0))  # fmt: skip
    for name, values in presets["clusters"].items():
        inner, outer = (LinkSpec(bandwidth * GB, latency) for bandwidth, latency in (values["inner"], values["outer"]))
        device = devices[values["device"]]
        of_all_gpus = {} if device.family in ("cpu", "tpu") else presets["measured"]["gpu"]
        options = values.get("topology", "switch"), of_all_gpus | presets["measured"].get(device.family, {})
        clusters[name] = Cluster(device, values["domain_size"], inner, outer, *options)
    return devices, clusters


DEVICES, CLUSTERS = _read_presets()


def find_cluster(name: str) -> Cluster:
    """Returns a preset by name, or reads a calibrated file by path."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        near = max((known for known in CLUSTERS if name.lower().startswith(known)), key=len, default=name)
        raise JobError(f"unknown cluster {name!r}: {suggest(near, CLUSTERS)} Or give a file of `shardwise calibrate`.")
    return read_cluster(path)


def with_settings(cluster: Cluster, settings: list[str]) -> Cluster:
    """Returns the cluster with `cluster.KEY=VALUE` settings applied; `node_link` is the link between nodes, `outer`."""
    for setting in settings:
        key, _, text = setting.removeprefix("cluster.").partition("=")
        if key not in UNITS:
            raise JobError(f"--set {setting}: unknown key of a cluster: {suggest(key, UNITS)}")
        if not text.replace(".", "", 1).isdecimal() or not 0.0 < float(text) < 1e9:
            raise JobError(f"--set {setting}: cluster.{key} must be a positive number.")
        cluster = changed(cluster, key, float(text) * UNITS[key])
    return cluster


def changed(cluster: Cluster, key: str, value: float) -> Cluster:
    device = cluster.device
    if key in ("inner", "outer", "node_link"):
        link = "inner" if key == "inner" else "outer"
        return replace(cluster, **{link: replace(getattr(cluster, link), bandwidth=value)})
    ratio = value / device.peak_flops("bf16")  # more FLOP/s take as much more power
    peaks = {name: rate * ratio for name, rate in device.peak_by_precision.items()}
    values = {"peak_by_precision": peaks, "power": device.power * ratio} if key == "flops" else {key: value}
    return replace(cluster, device=replace(device, **values))


def read_cluster(path: Path) -> Cluster:
    try:
        return TypeAdapter(Cluster).validate_python(parse_toml(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise JobError(f"{path} is not a cluster file ({problem}); `shardwise calibrate -o FILE` writes one.") from None


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
