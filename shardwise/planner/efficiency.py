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
    attention_backward: float = 0.839
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    eager: float = 1.92
    """How many times as many kernels a block takes in PyTorch's own operators, against fused ones."""
    scores: float = 3.13
    """How often each number of the square of scores is moved in a forward, where attention is not fused."""
    logits: float = 114
    """Bytes moved per logit in forward and backward of a loss of PyTorch's own operators."""
    added: float = 10.5
    """Bytes moved per weight and micro-batch where PyTorch's own operators add gradients, one weight after another."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    latency: float = 2.74
    """Of the links' latency, felt in each hop of a collective."""
    start: float = 4.29e-05
    """Seconds until the ranks of a collective are all there and it runs, for each doubling of their number."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    apart: float = 3.72
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    depth: float = 50.3
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.785
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.829
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.944
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.0746
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.593
    hidden_transfer: float = 0.536
    """Share of the transfers between stages that hides, with one stage a rank."""
    hidden_interleaved: float = 0.81
    """The same with several stages a rank."""
    grouped: float = 0.575
    """Rate of many small products side by side, of experts, against one."""
    routing: float = 123
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.00252
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.00478
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
    "ampere":           (0.754, 0.6, 0.43, 0.718, 0.7, 0.757, 1.54e-05, 0.201),
    "blackwell":        (0.632, 0.687, 0.273, 0.706, 0.721, 0.425, 1.32e-05, 0.173),
    "blackwell-ultra":  (0.682, 0.769, 0.546, 0.765, 0.802, 0.289, 1.87e-05, 0.224),
    "hopper":           (0.733, 0.815, 0.369, 0.452, 0.801, 0.873, 1.69e-05, 0.39),
    "tpu":              (0.849, 0.657, 0.488, 0.569, 0.922, 0.704, 1.6e-05, 0.603),
    "volta":            (0.796, 0.6, 0.5, 0.828, 0.11, 0.085, 1.68e-05, 0.2),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
