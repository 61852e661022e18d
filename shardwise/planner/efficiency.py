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
    attention_backward: float = 0.852
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    eager: float = 4.01
    """How many times as many kernels a block takes in PyTorch's own operators, against fused ones."""
    scores: float = 7.85
    """How often each number of the square of scores is moved in a forward, where attention is not fused."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 2.84
    """Of the links' latency, felt in each hop of a collective."""
    start: float = 1.39e-05
    """Seconds until the ranks of a collective are all there and it runs, for each doubling of their number."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    apart: float = 2.35
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    depth: float = 76.5
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.753
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.851
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.954
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0731
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.588
    hidden_transfer: float = 0.606
    """Share of the transfers between stages that hides, with one stage a rank."""
    hidden_interleaved: float = 0.776
    """The same with several stages a rank."""
    grouped: float = 0.672
    """Rate of many small products side by side, of experts, against one."""
    routing: float = 40.1
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.0022
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.00853
    """Seconds of a step that depend on nothing."""
    shared: float = 1.0
    """How many times as fast a rank runs while the others wait: above 1 where processes share processors."""


BASE = Efficiency()
# fmt: off
_KEYS = (
    "product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor",
)
_VALUES = {
    "ampere":           (0.723, 0.6, 0.432, 0.81, 0.705, 0.77, 1.58e-05, 0.199),
    "blackwell":        (0.537, 0.649, 0.328, 0.592, 0.586, 0.415, 1.05e-05, 0.154),
    "blackwell-ultra":  (0.53, 0.749, 0.565, 0.72, 0.806, 0.282, 3.15e-05, 0.242),
    "hopper":           (0.715, 0.782, 0.36, 0.525, 0.803, 0.886, 3.38e-05, 0.415),
    "tpu":              (0.924, 0.772, 0.423, 0.418, 0.931, 0.704, 9.79e-06, 0.482),
    "volta":            (0.905, 0.6, 0.5, 0.834, 0.086, 0.0781, 3.6e-05, 0.2),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
