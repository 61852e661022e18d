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
    attention_backward: float = 0.858
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    eager: float = 1.95
    """How many times as many kernels a block takes in PyTorch's own operators, against fused ones."""
    scores: float = 8.69
    """How often each number of the square of scores is moved in a forward, where attention is not fused."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 0.43
    """Of the links' latency, felt in each hop of a collective."""
    start: float = 1.48e-05
    """Seconds until all ranks of a collective are there and it runs."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    apart: float = 4.08
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    depth: float = 69.8
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.809
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.845
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.955
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0939
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.582
    hidden_transfer: float = 0.623
    """Share of the transfers between stages that hides, with one stage a rank."""
    hidden_interleaved: float = 0.775
    """The same with several stages a rank."""
    grouped: float = 0.652
    """Rate of many small products side by side, of experts, against one."""
    routing: float = 151
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.00217
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.00873
    """Seconds of a step that depend on nothing."""


BASE = Efficiency()
# fmt: off
_KEYS = (
    "product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor",
)
_VALUES = {
    "ampere":           (0.742, 0.6, 0.43, 0.737, 0.541, 0.583, 1.85e-05, 0.21),
    "blackwell":        (0.543, 0.646, 0.326, 0.61, 0.573, 0.395, 8.09e-06, 0.148),
    "blackwell-ultra":  (0.531, 0.735, 0.559, 0.722, 0.821, 0.287, 1.71e-05, 0.242),
    "hopper":           (0.732, 0.828, 0.369, 0.429, 0.707, 0.882, 1.54e-05, 0.224),
    "tpu":              (0.924, 0.77, 0.418, 0.428, 0.926, 0.7, 1e-05, 0.495),
    "volta":            (0.907, 0.6, 0.5, 0.853, 0.0829, 0.0782, 5.51e-05, 0.2),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
