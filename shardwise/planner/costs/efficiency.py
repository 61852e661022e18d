"""What software reaches of the peaks: few numbers, global or per device family, fitted to published runs.

`tools/fit_planner.py` fits them; never one number per run, model or source. `docs/explanation/planner.md` says how good
the prediction is, and what each number means in kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of peaks, and seconds."""

    matmul: float = 0.75
    """Of the peak rate, in large products of 16 bits."""
    low_precision_matmul: float = 0.6
    """Of the peak rate, in large products of 8 bits or fewer, scaling and casts included."""
    attention: float = 0.55
    """Of the 16-bit peak, in the forward of fused attention; the backward reaches `attention_backward` of that."""
    attention_backward: float = 0.758
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk_memory: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    all_to_all: float = 0.642
    """Of that, where everybody sends to everybody."""
    latency: float = 3.25
    """Of the links' latency, felt in each hop of a collective."""
    collective_start: float = 4.73e-05
    """Seconds until the ranks of a collective are all there and it runs."""
    kernel_launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    overlap_sharpness: float = 13.2
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    matmul_half_rate_depth: float = 89.8
    """Length of the inner sum at which a product runs at half of its rate."""
    wave_quantization: float = 0.821
    """How much of a last, partly filled wave of tiles is felt."""
    unaligned_64: float = 0.796
    """Rate of products whose sides are no multiples of 64 numbers."""
    unaligned_8: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    overlap_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    overlap_data: float = 0.834
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.104
    """What hidden traffic costs all the same, as a share of its time."""
    overlap_expert: float = 0.587
    overlap_p2p: float = 0.411
    """Share of the transfers between stages that hides, with one stage a rank."""
    overlap_p2p_interleaved: float = 0.795
    """The same with several stages a rank."""
    grouped_matmul: float = 0.665
    """Rate of many small products side by side, of experts, against one."""
    routing_kernels: float = 162
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.00641
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed_seconds: float = 0.00369
    """Seconds of a step that depend on nothing."""
    compiled: float = 0.0
    """1 where blocks were compiled, and steps recorded, when the rest was measured."""
    uncontended_speedup: float = 1.0
    """How many times as fast a rank runs while the others wait: above 1 where processes share processors."""


DEFAULT_EFFICIENCY = Efficiency()
# fmt: off
_FAMILY_FIELDS = (
    "matmul", "low_precision_matmul", "attention", "memory", "inner", "outer", "kernel_launch", "overlap_tensor",
)
_FAMILY_VALUES = {
    "ampere":           (0.856, 0.6, 0.719, 0.563, 0.696, 0.711, 1.57e-05, 0.2),
    "blackwell":        (0.674, 0.754, 0.312, 0.569, 0.687, 0.681, 1.32e-05, 0.163),
    "blackwell-ultra":  (0.761, 0.828, 0.53, 0.67, 0.718, 0.687, 1.9e-05, 0.219),
    "hopper":           (0.769, 0.784, 0.415, 0.561, 0.714, 0.742, 1.73e-05, 0.241),
    "tpu":              (0.95, 0.64, 0.432, 0.478, 0.719, 0.7, 1.6e-05, 0.219),
    "volta":            (0.722, 0.6, 0.5, 0.762, 0.646, 0.696, 1.6e-05, 0.2),
}

FAMILY_EFFICIENCIES = {family: dict(zip(_FAMILY_FIELDS, values, strict=True)) for family, values in _FAMILY_VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(DEFAULT_EFFICIENCY, **{**FAMILY_EFFICIENCIES.get(family, {}), **measured})
