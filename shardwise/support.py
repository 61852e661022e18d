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

from shardwise.job import PRECISIONS
from shardwise.layout import RECOMPUTE, SCHEDULES, SPLIT_BACKWARD, Layout, keep_share

EXACT, COST, REFUSED = "exact", "exact at a stated cost", "refused"

ALONE = "none"  # the schedule of a layout without a pipeline
SHARE = "share"  # recompute given as the share of blocks that keep everything


@dataclass(frozen=True)
class Support:
    verdict: str
    """`exact`, `exact at a stated cost` or `refused`."""
    sentence: str = ""
    """The cost; or why it is refused, and what to do instead."""


class Words(NamedTuple):
    """One combination."""

    schedule: str
    zero: int
    recompute: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A verdict on the combinations whose every word is among the given ones; where none are given, any will do."""

    schedule: tuple[str, ...] = (ALONE, *SCHEDULES)
    zero: tuple[int, ...] = (1, 2, 3)
    recompute: tuple[str, ...] = (*RECOMPUTE, SHARE)
    precision: tuple[str, ...] = PRECISIONS
    verdict: str
    sentence: str = ""

    def fits(self, words: Words) -> bool:
        return all(word in getattr(self, axis) for axis, word in words._asdict().items())


ROWS = (
    Row(schedule=SPLIT_BACKWARD, zero=(2,), verdict=COST, sentence=(
        "gradients are reduce-scattered after each micro-batch instead of once a step; those of a stage are whole "
        "while its weight gradients are computed; what is computed again is kept until then.")),
    Row(schedule=SPLIT_BACKWARD, zero=(3,), verdict=COST, sentence=(
        "weights are gathered three times per micro-batch, block by block for the forward and a whole stage for each "
        "half of the backward; gradients are reduce-scattered after each micro-batch instead of once a step; what is "
        "computed again is kept until then.")),
    Row(schedule=SPLIT_BACKWARD, recompute=("selective", "full", SHARE), verdict=COST, sentence=(
        "what is computed again for the input gradients is kept until the weight gradients are done.")),
    Row(zero=(2,), verdict=COST, sentence=(
        "gradients are reduce-scattered after each micro-batch instead of once a step.")),
    Row(zero=(3,), verdict=COST, sentence=(
        "weights are gathered for each forward and each backward of each micro-batch, and gradients are "
        "reduce-scattered after each micro-batch instead of once a step.")),
    Row(verdict=EXACT),
)  # fmt: skip


def look_up(words: Words) -> Support:
    row = next(row for row in ROWS if row.fits(words))
    return Support(row.verdict, row.sentence)


def words_of(layout: Layout, precision: str) -> Words:
    """A layout in the words of the table. Without a shard axis there is nothing for `zero` to cut."""
    share = keep_share(layout.recompute)
    return Words(
        schedule=layout.schedule if layout.pipeline > 1 else ALONE,
        zero=layout.zero if layout.shard > 1 else 1,
        recompute=layout.recompute if share is None else SHARE,
        precision=precision,
    )


def support(layout: Layout, precision: str) -> Support:
    return look_up(words_of(layout, precision))


def table() -> Iterator[tuple[Words, Support]]:
    """Every combination with its verdict."""
    for words in product((ALONE, *SCHEDULES), (1, 2, 3), (*RECOMPUTE, SHARE), PRECISIONS):
        yield Words(*words), look_up(Words(*words))
