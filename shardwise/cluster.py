"""Hardware descriptions: devices with their peak FLOP/s, memory and links. `clusters.toml` has those of data sheets.

A `Cluster` is a device type, the size of a fast domain (a node, an NVLink rack, a torus pod), and two links: within a
domain and between domains. Bandwidths are per device and direction, in bytes per second; FLOP/s are dense. Software
reaches a fraction of these peaks (`Efficiency`). `shardwise calibrate` writes the same fields as TOML."""

import tomllib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
import torch
from pydantic import ConfigDict, Field, GetPydanticSchema, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shardwise.errors import JobError, suggest
from shardwise.files import parse_toml, write_text
from shardwise.layout import MAX_WORLD

GB, TERA, GIB = 1e9, 1e12, 2**30
# Keys of `--set cluster.KEY=VALUE`, each with its unit. `flops`: in bf16, other precisions in proportion.
UNITS = {"inner": GB, "outer": GB, "node_link": GB, "memory": GIB, "bandwidth": GB, "flops": 1e12}
Rate = Annotated[float, Field(strict=True, ge=1e-9, le=1e21, allow_inf_nan=False)]  # FLOP/s, bytes, bytes per second
NonNegative = Annotated[float, Field(strict=True, ge=0.0, le=1e6)]  # a count, seconds or watts
Positive = Annotated[float, Field(strict=True, ge=0.01, le=1e6)]  # a rate, which divides
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]
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


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of peaks, counts and seconds."""

    # Per device family.
    matmul: Positive  # of the peak FLOP/s, in large 16-bit matmuls
    low_precision_matmul: Positive  # the same in matmuls of 8 bits or fewer, including scaling and casts
    attention: Positive  # of the 16-bit peak, in the forward of fused attention
    memory: Positive  # of the memory bandwidth, in elementwise operators

    # For all families.
    inner: Positive  # of the bandwidth within a domain (node, rack, torus), in large collectives
    outer: Positive  # of the bandwidth between domains
    kernel_launch: NonNegative  # host seconds to launch one kernel
    overlap_tensor: Share  # fraction of tensor-parallel communication that overlaps with matmuls
    attention_backward: Positive  # rate of attention's backward relative to its forward
    matmul_half_rate_depth: NonNegative  # inner dimension (k) at which a matmul reaches half of its rate
    wave_quantization: Share  # fraction of the theoretical loss to partial tiles and waves that occurs in practice
    unaligned_64: Positive  # relative rate of matmuls with k or n not a multiple of 64
    grouped_matmul: Positive  # rate of many small matmuls (experts) relative to one
    all_to_all: Positive  # of `outer`, in an all-to-all
    latency: NonNegative  # latency per hop of a collective, relative to the link's
    collective_start: NonNegative  # seconds until all ranks of a collective have arrived and it runs
    overlap_sharpness: Annotated[Positive, Field(le=100.0)]  # p-norm of `Machine.bottleneck_time`
    overlap_data: Share  # fraction of a pass that can hide gradient reduction or weight gathering
    overlap_expert: Share  # fraction of expert dispatch that overlaps with compute
    overlap_p2p: Share  # fraction of transfers between stages that overlaps with the work of one stage
    expert_kernels: NonNegative  # kernels that a forward launches for each expert of a rank
    jitter: NonNegative  # relative step time added by each doubling of the number of domains: waiting for the slowest
    fixed_seconds: NonNegative  # seconds added to every step

    # Not fitted; `calibrate` or `tune` measures them.
    bulk_memory: NonNegative = 0.0  # of the memory bandwidth, in one large operator such as the update; 0: as `memory`
    compiled: Share = 0.0  # 1 if blocks were compiled and steps captured as CUDA graphs when the rest was measured
    low_precision_casts: NonNegative = 1.0  # bytes that casts to 8 bits move, relative to one read and one write
    convolution: Positive = 1.0  # rate of convolutions relative to matmuls of as many FLOPs
    all_reduce: NonNegative = 1.0  # time of an all-reduce of gradients, relative to a reduce-scatter and an all-gather
    weight_gather: NonNegative = 1.0  # time of gathering a block's weights (ZeRO 3), relative to its collective
    split_backward: NonNegative = 1.0  # time of a pipeline with split backward, relative to its parts
    uncontended_speedup: Positive = 1.0  # how much faster a rank runs while others wait, if processes share cores


_Measured = TypedDict("_Measured", Efficiency.__annotations__, total=False)  # type: ignore[misc]
_Measured.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
Measured = Annotated[dict[str, float], GetPydanticSchema(lambda _, schema_of: schema_of(_Measured))]


@dataclass(frozen=True)
class Cluster:
    __pydantic_config__ = ConfigDict(extra="forbid")
    device: DeviceSpec
    domain_size: Count  # devices per domain, connected by the inner link
    inner: LinkSpec
    outer: LinkSpec
    topology: Literal["switch", "torus2", "torus3"] = "switch"  # topology of the inner link
    measured: Measured = field(default_factory=dict)  # efficiencies that override those of the family


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
