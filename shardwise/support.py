"""The support table: which combinations of schedule, ZeRO stage, recomputation and precision can be had, at what cost.

Data, read from the top: the first row that fits decides. `exact` means that the layout computes what one device
computes, up to the rounding of its precision. The last row fits everything, so every combination has a verdict;
`benchmarks/verify_matrix.py` runs all that are not refused, and `shardwise.parallel` starts none that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from shardwise.layout import RECOMPUTE, SCHEDULES, SPLIT_BACKWARD, Layout, kept_activation_fraction

EXACT, EXACT_AT_COST, REFUSED = "exact", "exact at a stated cost", "refused"

PRECISIONS = ("float64", "float32", "bf16", "fp16", "fp8")
NO_PIPELINE = "none"  # the schedule of a layout without a pipeline
FRACTION = "fraction"  # recompute given as the share of blocks that keep everything


@dataclass(frozen=True)
class Support:
    verdict: str
    """`exact`, `exact at a stated cost` or `refused`."""
    explanation: str = ""
    """The cost; or why it is refused, and what to do instead."""


class Combination(NamedTuple):
    """One combination."""

    schedule: str
    zero: int
    recompute: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class SupportRule:
    """A verdict on the combinations whose every word is among the given ones; where none are given, any will do."""

    schedule: tuple[str, ...] = (NO_PIPELINE, *SCHEDULES)
    zero: tuple[int, ...] = (1, 2, 3)
    recompute: tuple[str, ...] = (*RECOMPUTE, FRACTION)
    precision: tuple[str, ...] = PRECISIONS
    verdict: str
    explanation: str = ""

    def matches(self, combination: Combination) -> bool:
        return all(value in getattr(self, axis) for axis, value in combination._asdict().items())


SUPPORT_RULES = (
    SupportRule(schedule=SPLIT_BACKWARD, zero=(2,), verdict=EXACT_AT_COST, explanation=(
        "gradients are reduce-scattered after each micro-batch instead of once a step; those of a stage are whole "
        "while its weight gradients are computed; what is computed again is kept until then.")),
    SupportRule(schedule=SPLIT_BACKWARD, zero=(3,), verdict=EXACT_AT_COST, explanation=(
        "weights are gathered three times per micro-batch, block by block for the forward and a whole stage for each "
        "half of the backward; gradients are reduce-scattered after each micro-batch instead of once a step; what is "
        "computed again is kept until then.")),
    SupportRule(schedule=SPLIT_BACKWARD, recompute=("selective", "full", FRACTION), verdict=EXACT_AT_COST, explanation=(
        "what is computed again for the input gradients is kept until the weight gradients are done.")),
    SupportRule(zero=(2,), verdict=EXACT_AT_COST, explanation=(
        "gradients are reduce-scattered after each micro-batch instead of once a step.")),
    SupportRule(zero=(3,), verdict=EXACT_AT_COST, explanation=(
        "weights are gathered for each forward and each backward of each micro-batch, and gradients are "
        "reduce-scattered after each micro-batch instead of once a step.")),
    SupportRule(verdict=EXACT),
)  # fmt: skip


def lookup(combination: Combination) -> Support:
    row = next(row for row in SUPPORT_RULES if row.matches(combination))
    return Support(row.verdict, row.explanation)


def combination_of(layout: Layout, precision: str) -> Combination:
    """A layout in the words of the table. Without a shard axis there is nothing for `zero` to cut."""
    fraction = kept_activation_fraction(layout.recompute)
    return Combination(
        schedule=layout.schedule if layout.pipeline > 1 else NO_PIPELINE,
        zero=layout.zero if layout.shard > 1 else 1,
        recompute=layout.recompute if fraction is None else FRACTION,
        precision=precision,
    )


def support(layout: Layout, precision: str) -> Support:
    return lookup(combination_of(layout, precision))


def all_combinations() -> Iterator[tuple[Combination, Support]]:
    """Every combination with its verdict."""
    for combination in product((NO_PIPELINE, *SCHEDULES), (1, 2, 3), (*RECOMPUTE, FRACTION), PRECISIONS):
        yield Combination(*combination), lookup(Combination(*combination))
