"""The support table: what each combination of schedule, ZeRO stage, activation checkpointing and precision costs.

The first matching row decides. `exact` means that the layout computes what one device computes, up to rounding. The
last row matches everything, so every combination has a verdict; `benchmarks/verify_matrix.py` runs all of them. What a
model, a batch or a world size does not allow is refused by `shardwise.parallel.prepare`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from shardwise.layout import RECOMPUTE, SCHEDULES, SPLIT_BACKWARD, Layout, kept_activation_fraction

EXACT, EXACT_AT_COST = "exact", "exact at a stated cost"

PRECISIONS = ("float64", "float32", "bf16", "fp16", "fp8")
NO_PIPELINE = "none"  # the schedule of a layout without a pipeline
FRACTION = "fraction"  # recompute given as the fraction of blocks that keep all activations


class Combination(NamedTuple):
    """A layout, reduced to what the support table depends on."""

    schedule: str
    zero: int
    recompute: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class SupportRule:
    """A verdict for all combinations whose values are among those listed; each field defaults to all values."""

    schedule: tuple[str, ...] = (NO_PIPELINE, *SCHEDULES)
    zero: tuple[int, ...] = (1, 2, 3)
    recompute: tuple[str, ...] = (*RECOMPUTE, FRACTION)
    precision: tuple[str, ...] = PRECISIONS
    verdict: str  # `exact` or `exact at a stated cost`
    explanation: str = ""  # the cost

    def matches(self, combination: Combination) -> bool:
        return all(value in getattr(self, axis) for axis, value in combination._asdict().items())


SUPPORT_RULES = (
    SupportRule(schedule=SPLIT_BACKWARD, zero=(2,), verdict=EXACT_AT_COST, explanation=(
        "gradients are reduce-scattered after each micro-batch instead of once per step; a stage's gradients are "
        "unsharded while its weight gradients are computed; recomputed activations are kept until then.")),
    SupportRule(schedule=SPLIT_BACKWARD, zero=(3,), verdict=EXACT_AT_COST, explanation=(
        "weights are all-gathered three times per micro-batch, block by block in the forward and a full stage in each "
        "half of the backward; gradients are reduce-scattered after each micro-batch instead of once per step; "
        "recomputed activations are kept until the weight gradients are done.")),
    SupportRule(schedule=SPLIT_BACKWARD, recompute=("selective", "full", FRACTION), verdict=EXACT_AT_COST, explanation=(
        "activations recomputed for the input gradients are kept until the weight gradients are done.")),
    SupportRule(zero=(2,), verdict=EXACT_AT_COST, explanation=(
        "gradients are reduce-scattered after each micro-batch instead of once per step.")),
    SupportRule(zero=(3,), verdict=EXACT_AT_COST, explanation=(
        "weights are all-gathered for each forward and each backward of each micro-batch, and gradients are "
        "reduce-scattered after each micro-batch instead of once per step.")),
    SupportRule(verdict=EXACT),
)  # fmt: skip


def lookup(combination: Combination) -> SupportRule:
    return next(rule for rule in SUPPORT_RULES if rule.matches(combination))


def combination_of(layout: Layout, precision: str) -> Combination:
    """Returns the table entry of a layout. Without a `shard` axis, `zero` has no effect."""
    fraction = kept_activation_fraction(layout.recompute)
    return Combination(
        schedule=layout.schedule if layout.pipeline > 1 else NO_PIPELINE,
        zero=layout.zero if layout.shard > 1 else 1, recompute=layout.recompute if fraction is None else FRACTION,
        precision=precision,
    )  # fmt: skip


def support(layout: Layout, precision: str) -> SupportRule:
    return lookup(combination_of(layout, precision))


def all_combinations() -> Iterator[tuple[Combination, SupportRule]]:
    """Yields every combination with its verdict."""
    for combination in product((NO_PIPELINE, *SCHEDULES), (1, 2, 3), (*RECOMPUTE, FRACTION), PRECISIONS):
        yield Combination(*combination), lookup(Combination(*combination))
