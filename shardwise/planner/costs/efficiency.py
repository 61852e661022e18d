"""How much of a device's peaks real kernels and links reach: a few constants, global or per device family.

`tools/fit_planner.py` fits them to published runs and writes `shardwise/planner/constants.toml`; it never fits one per
run, model or source. `docs/explanation/planner.md` states the resulting error.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

CONSTANTS = tomllib.loads((Path(__file__).parents[1] / "constants.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of peaks, counts and seconds."""

    # Per device family.
    matmul: float
    """Of the peak FLOP/s, in large 16-bit matmuls."""
    low_precision_matmul: float
    """Of the peak FLOP/s, in large matmuls of 8 bits or fewer, including scaling and casts."""
    attention: float
    """Of the 16-bit peak, in the forward of fused attention."""
    memory: float
    """Of the memory bandwidth, in elementwise operators."""
    inner: float
    """Of the bandwidth within a domain (node, rack, torus), in large collectives."""
    outer: float
    """Of the bandwidth between domains."""
    kernel_launch: float
    """Host seconds to launch one kernel."""
    overlap_tensor: float
    """Fraction of tensor-parallel communication that overlaps with matmuls."""

    # For all families.
    attention_backward: float
    """Rate of attention's backward relative to its forward."""
    matmul_half_rate_depth: float
    """Inner dimension (k) at which a matmul reaches half of its rate."""
    wave_quantization: float
    """Fraction of the theoretical loss to partial tiles and a partial last wave that occurs in practice."""
    unaligned_64: float
    """Relative rate of matmuls with k or n not a multiple of 64."""
    grouped_matmul: float
    """Rate of many small matmuls (experts) relative to one."""
    all_to_all: float
    """Of `outer`, in an all-to-all."""
    latency: float
    """Latency per hop of a collective, relative to the link's."""
    collective_start: float
    """Seconds until all ranks of a collective have arrived and it runs."""
    overlap_sharpness: float
    """Exponent of the p-norm of device and host time (`Machine.bottleneck_time`)."""
    overlap_data: float
    """Fraction of a pass that can hide gradient reduction or weight gathering."""
    contention: float
    """Slowdown of compute by overlapped communication, as a fraction of the communication time."""
    overlap_expert: float
    """Fraction of expert dispatch that overlaps with compute."""
    overlap_p2p: float
    """Fraction of transfers between stages that overlaps, with one stage per rank."""
    overlap_p2p_interleaved: float
    """The same with several stages per rank."""
    routing_kernels: float
    """Kernels that a forward launches to dispatch tokens to experts and combine them."""
    jitter: float
    """Relative step time added by each doubling of the number of domains: waiting for the slowest."""
    fixed_seconds: float
    """Seconds added to every step."""

    # Not fitted; `calibrate` measures them.
    unaligned_8: float = 0.3
    """Relative rate of matmuls with k or n not a multiple of 8."""
    bulk_memory: float = 0.0
    """Of the memory bandwidth, in one large operator such as the optimizer update; 0: same as `memory`."""
    compiled: float = 0.0
    """1 if blocks were compiled and steps captured as CUDA graphs when the rest was measured."""
    uncontended_speedup: float = 1.0
    """How much faster a rank runs while the others wait: above 1 where processes share cores."""


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    """Returns a family's fitted constants, overridden by what `calibrate` measured."""
    families = CONSTANTS["families"]
    return Efficiency(**{**CONSTANTS["common"], **families.get(family, families["other"]), **measured})
