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
    attention_backward: float = 0.758
    memory: float = 0.7
    """Of the memory's bandwidth, in operators that only move numbers."""
    bulk: float = 0.0
    """Of the memory's bandwidth, in one large operator such as the update; 0: as `memory`."""
    eager: float = 2
    """How many times as many kernels a block takes in PyTorch's own operators, against fused ones."""
    older: float = 0.602
    """Rate of FlashAttention 2 and before it, against today's fused attention."""
    scores: float = 2.79
    """How often each number of the square of scores is moved in a forward, where attention is not fused."""
    logits: float = 94.6
    """Bytes moved per logit in forward and backward of a loss of PyTorch's own operators."""
    added: float = 18.7
    """Bytes moved per weight and micro-batch where PyTorch's own operators add gradients, one weight after another."""
    inner: float = 0.7
    """Of the inner link's bandwidth, in large collectives."""
    outer: float = 0.7
    """Of the outer link's bandwidth."""
    scattered: float = 0.642
    """Of that, where everybody sends to everybody."""
    latency: float = 3.25
    """Of the links' latency, felt in each hop of a collective."""
    start: float = 4.73e-05
    """Seconds until the ranks of a collective are all there and it runs."""
    waits: float = 0.000235
    """Seconds that ranks of the tensor axis wait for each other at a sum, where nothing overlaps it."""
    launch: float = 1e-5
    """Seconds of the host to start one kernel."""
    apart: float = 13.2
    """How sharply a pass is either the host's or the device's: seconds are the norm of both of this power."""
    depth: float = 89.8
    """Length of the inner sum at which a product runs at half of its rate."""
    wave: float = 0.821
    """How much of a last, partly filled wave of tiles is felt."""
    ragged: float = 0.796
    """Rate of products whose sides are no multiples of 64 numbers."""
    odd: float = 0.3
    """Rate of products whose sides are no multiples of 8 numbers."""
    hidden_tensor: float = 0.3
    """Share of the tensor axis' traffic that hides behind products, where software overlaps it."""
    hidden_data: float = 0.834
    """Share of a backward that can hide gradient sums; share of a pass that can hide the gathering of weights."""
    contention: float = 0.104
    """What hidden traffic costs all the same, as a share of its time."""
    hidden_expert: float = 0.587
    hidden_transfer: float = 0.411
    """Share of the transfers between stages that hides, with one stage a rank."""
    hidden_interleaved: float = 0.795
    """The same with several stages a rank."""
    grouped: float = 0.665
    """Rate of many small products side by side, of experts, against one."""
    routing: float = 162
    """Kernels that the host starts to send tokens to experts and back, in a forward."""
    jitter: float = 0.00641
    """What each doubling of the number of domains adds to a step, waiting for the slowest."""
    fixed: float = 0.00369
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
    "ampere":           (0.856, 0.6, 0.719, 0.563, 0.696, 0.711, 1.57e-05, 0.2),
    "blackwell":        (0.674, 0.754, 0.312, 0.569, 0.687, 0.681, 1.32e-05, 0.163),
    "blackwell-ultra":  (0.761, 0.828, 0.53, 0.67, 0.718, 0.687, 1.9e-05, 0.219),
    "hopper":           (0.769, 0.784, 0.415, 0.561, 0.714, 0.742, 1.73e-05, 0.241),
    "tpu":              (0.95, 0.64, 0.432, 0.478, 0.719, 0.7, 1.6e-05, 0.219),
    "volta":            (0.722, 0.6, 0.5, 0.762, 0.646, 0.696, 1.6e-05, 0.2),
}

FAMILIES = {family: dict(zip(_KEYS, values, strict=True)) for family, values in _VALUES.items()}
# fmt: on


def efficiency_of(family: str, measured: dict[str, float]) -> Efficiency:
    return replace(BASE, **{**FAMILIES.get(family, {}), **measured})
