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
    attention_backward: float = 0.822
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    eager: float = 2.66
    """How many times as many kernels a block takes in PyTorch's own operators, against fused ones."""
    scores: float = 7.1
    """How often each number of the square of scores is moved in a forward, where attention is not fused."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 2.65
    """Of the links' latency, felt in each hop of a collective."""
    start: float = 1.5e-05
    """Seconds until the ranks of a collective are all there and it runs, for each doubling of their number."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    apart: float = 2.6
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    depth: float = 72.8
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.788
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.854
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.918
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0795
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.598
    hidden_transfer: float = 0.382
    """Share of the transfers between stages that hides, with one stage a rank."""
    hidden_interleaved: float = 0.8
    """The same with several stages a rank."""
    grouped: float = 0.637
    """Rate of many small products side by side, of experts, against one."""
    routing: float = 53.4
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.00265
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.00874
    """Seconds of a step that depend on nothing."""
    shared: float = 1.0
    """How many times as fast a rank runs while the others wait: above 1 where processes share processors."""


BASE = Efficiency()
# fmt: off
_KEYS = (
    "product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor",
)
_VALUES = {
    "ampere":           (0.734, 0.6, 0.446, 0.745, 0.75, 0.752, 1.58e-05, 0.201),
    "blackwell":        (0.55, 0.645, 0.346, 0.589, 0.693, 0.452, 1.48e-05, 0.181),
    "blackwell-ultra":  (0.546, 0.751, 0.569, 0.707, 0.78, 0.421, 2.9e-05, 0.226),
    "hopper":           (0.72, 0.799, 0.374, 0.482, 0.789, 0.847, 2.92e-05, 0.402),
    "tpu":              (0.908, 0.699, 0.442, 0.475, 0.919, 0.702, 1.9e-05, 0.461),
    "volta":            (0.866, 0.6, 0.5, 0.795, 0.0823, 0.695, 3.7e-05, 0.2),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
