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
    attention_backward: float = 0.992
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 6.83
    """Of the links' latency, felt in each hop of a collective."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    depth: float = 246.0
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.967
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.694
    """Rate of products whose sides are no multiples of 64 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.998
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0678
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.666
    hidden_transfer: float = 0.407
    """Share of the transfers between stages that hides."""
    grouped: float = 0.665
    """Rate of many small products side by side, of experts, against one."""
    jitter: float = 0.000731
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.01
    """Seconds of a step that depend on nothing."""


BASE = Efficiency()
# fmt: off
_KEYS = (
    "product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor",
)
_VALUES = {
    "ampere":           (0.782, 0.6, 0.402, 0.598, 0.287, 0.903, 1.72e-05, 0.00764),
    "blackwell":        (0.487, 0.632, 0.253, 0.908, 0.973, 0.404, 1e-05, 0.108),
    "blackwell-ultra":  (0.437, 0.695, 0.597, 0.857, 0.905, 0.249, 1e-05, 0.413),
    "hopper":           (0.77, 0.903, 0.316, 0.388, 0.955, 0.998, 1e-05, 0.219),
    "tpu":              (0.876, 0.832, 0.322, 0.988, 0.998, 0.7, 1e-05, 0.743),
    "volta":            (0.884, 0.6, 0.55, 0.764, 0.0895, 0.069, 1e-05, 0.3),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
