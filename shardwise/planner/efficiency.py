"""What software reaches of the peaks: few numbers, global or per device family, fitted to published runs.

`tools/fit_planner.py` fits them; never one number per run, model or source. `docs/explanation/planner.md` says how good
the prediction is, and what each number means in kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of peaks, and seconds."""

    product: float = 0.75
    """Of the peak rate, in large products of 16 bits."""
    narrow: float = 0.6
    """Of the peak rate, in large products of 8 bits or fewer, scaling and casts included."""
    attention: float = 0.55
    """Of the 16-bit peak, in the forward of fused attention; the backward reaches `attention_backward` of that."""
    attention_backward: float = 0.995
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 0.1
    """Of the links' latency, felt in each hop of a collective."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    depth: float = 15.0
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.985
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.666
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.999
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0587
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.627
    hidden_transfer: float = 0.427
    """Share of the transfers between stages that hides."""
    grouped: float = 0.821
    """Rate of many small products side by side, of experts, against one."""
    jitter: float = 0.000231
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.01
    """Seconds of a step that depend on nothing."""


BASE = Efficiency()
# fmt: off
_KEYS = (
    "product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor",
)
_VALUES = {
    "ampere":           (0.807, 0.6, 0.396, 0.515, 0.22, 0.967, 1.87e-05, 0.00468),
    "blackwell":        (0.452, 0.606, 0.4, 0.433, 0.969, 0.393, 1e-05, 0.0648),
    "blackwell-ultra":  (0.363, 0.662, 0.642, 0.711, 0.948, 0.248, 1e-05, 0.726),
    "hopper":           (0.737, 0.88, 0.317, 0.364, 0.951, 0.999, 1e-05, 0.0892),
    "tpu":              (0.916, 0.875, 0.16, 0.99, 0.999, 0.7, 1e-05, 0.635),
    "volta":            (0.948, 0.6, 0.55, 0.522, 0.0831, 0.0662, 1e-05, 0.3),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
