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
    attention_backward: float = 0.82
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    eager: float = 2.24
    """How many times as many kernels a block takes in PyTorch's own operators, against fused ones."""
    scores: float = 6.03
    """How often each number of the square of scores is moved in a forward, where attention is not fused."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 2.67
    """Of the links' latency, felt in each hop of a collective."""
    start: float = 1.69e-05
    """Seconds until the ranks of a collective are all there and it runs, for each doubling of their number."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    apart: float = 2.63
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    depth: float = 59.9
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.784
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.857
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.917
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0676
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.594
    hidden_transfer: float = 0.382
    """Share of the transfers between stages that hides, with one stage a rank."""
    hidden_interleaved: float = 0.796
    """The same with several stages a rank."""
    grouped: float = 0.581
    """Rate of many small products side by side, of experts, against one."""
    routing: float = 53.5
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.00267
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.00943
    """Seconds of a step that depend on nothing."""
    compiled: float = 0.0
    """1 where blocks were compiled, and steps recorded, when the rest was measured."""
    shared: float = 1.0
    """How many times as fast a rank runs while the others wait: above 1 where processes share processors."""


BASE = Efficiency()
# fmt: off
_KEYS = (
    "product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor",
)
_VALUES = {
    "ampere":           (0.736, 0.6, 0.45, 0.704, 0.756, 0.75, 1.57e-05, 0.2),
    "blackwell":        (0.641, 0.683, 0.296, 0.615, 0.629, 0.438, 1.42e-05, 0.154),
    "blackwell-ultra":  (0.698, 0.769, 0.526, 0.701, 0.78, 0.353, 2.85e-05, 0.22),
    "hopper":           (0.731, 0.807, 0.376, 0.469, 0.791, 0.847, 2.81e-05, 0.38),
    "tpu":              (0.841, 0.625, 0.499, 0.602, 0.92, 0.703, 1.9e-05, 0.525),
    "volta":            (0.802, 0.6, 0.5, 0.823, 0.0918, 0.695, 3.81e-05, 0.2),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
