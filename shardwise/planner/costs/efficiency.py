"""How much of a device's peaks real kernels and links reach: a few constants, global or per device family.

`tools/fit_planner.py` fits them to published runs and writes `shardwise/planner/constants.toml`; it never fits one per
run, model or source. `docs/explanation/planner.md` states the resulting error.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import JobError

CONSTANTS = tomllib.loads((Path(__file__).parents[1] / "constants.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of peaks, counts and seconds."""

    # Per device family.
    matmul: float  # of the peak FLOP/s, in large 16-bit matmuls
    low_precision_matmul: float  # of the peak FLOP/s, in large matmuls of 8 bits or fewer, including scaling and casts
    attention: float  # of the 16-bit peak, in the forward of fused attention
    memory: float  # of the memory bandwidth, in elementwise operators
    inner: float  # of the bandwidth within a domain (node, rack, torus), in large collectives
    outer: float  # of the bandwidth between domains
    kernel_launch: float  # host seconds to launch one kernel
    overlap_tensor: float  # fraction of tensor-parallel communication that overlaps with matmuls

    # For all families.
    attention_backward: float  # rate of attention's backward relative to its forward
    matmul_half_rate_depth: float  # inner dimension (k) at which a matmul reaches half of its rate
    wave_quantization: float  # fraction of the theoretical loss to partial tiles and waves that occurs in practice
    unaligned_64: float  # relative rate of matmuls with k or n not a multiple of 64
    grouped_matmul: float  # rate of many small matmuls (experts) relative to one
    all_to_all: float  # of `outer`, in an all-to-all
    latency: float  # latency per hop of a collective, relative to the link's
    collective_start: float  # seconds until all ranks of a collective have arrived and it runs
    overlap_sharpness: float  # exponent of the p-norm of device and host time (`Machine.bottleneck_time`)
    overlap_data: float  # fraction of a pass that can hide gradient reduction or weight gathering
    contention: float  # slowdown of compute by overlapped communication, as a fraction of the communication time
    overlap_expert: float  # fraction of expert dispatch that overlaps with compute
    overlap_p2p: float  # fraction of transfers between stages that overlaps, with one stage per rank
    overlap_p2p_interleaved: float  # the same with several stages per rank
    routing_kernels: float  # kernels that a forward launches to dispatch tokens to experts and combine them
    jitter: float  # relative step time added by each doubling of the number of domains: waiting for the slowest
    fixed_seconds: float  # seconds added to every step

    # Not fitted; `calibrate` measures them.
    unaligned_8: float = 0.3  # relative rate of matmuls with k or n not a multiple of 8
    bulk_memory: float = 0.0  # of the memory bandwidth, in one large operator such as the update; 0: as `memory`
    compiled: float = 0.0  # 1 if blocks were compiled and steps captured as CUDA graphs when the rest was measured
    uncontended_speedup: float = 1.0  # how much faster a rank runs while others wait, if processes share cores


POSITIVE = (
    "matmul", "low_precision_matmul", "attention", "attention_backward", "memory", "inner", "outer", "unaligned_64",
    "unaligned_8", "grouped_matmul", "all_to_all", "overlap_sharpness", "uncontended_speedup",
)  # fmt: skip


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    """Returns a family's fitted constants, overridden by what `calibrate` measured."""
    for name, value in measured.items():
        low, high = 0.01 if name in POSITIVE else 0.0, 1.0 if name.startswith(("overlap_", "wave_")) else 1e6
        high = 100.0 if name == "overlap_sharpness" else high
        if name not in Efficiency.__dataclass_fields__ or not low <= value <= high:
            raise JobError(f"the cluster's measured.{name} = {value:g} is unknown, or not from {low:g} to {high:g}.")
    families = CONSTANTS["families"]
    return Efficiency(**{**CONSTANTS["common"], **families.get(family, families["other"]), **measured})
