"""The support table: which combinations of schedule, ZeRO stage, recomputation and precision can be had, and at what cost.

Data, read from the top: the first row that fits decides. `exact` means that the layout computes what one device
computes, up to the rounding of its precision. What is neither exact by a row nor refused by one does not exist: the
last row fits everything. `benchmarks/verify_matrix.py` runs every row that is not refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardwise.layout import FULL_BACKWARD, RECOMPUTE, SCHEDULES, SPLIT_BACKWARD, Layout, keep_share

EXACT, COST, REFUSED = "exact", "exact at a stated cost", "refused"

ALONE = "none"  # the schedule of a layout without a pipeline
SHARE = "share"  # recompute given as the share of blocks to keep
AXES = {
    "schedule": (ALONE, *SCHEDULES),
    "zero": (1, 2, 3),
    "recompute": (*RECOMPUTE, SHARE),
    "precision": ("float64", "float32", "bf16", "fp16"),
}


@dataclass(frozen=True)
class Support:
    verdict: str
    """`exact`, `exact at a stated cost` or `refused`."""
    sentence: str = ""
    """The cost, or why it is refused and what to do instead."""


@dataclass(frozen=True)
class Row:
    """A verdict on the combinations whose every word is among the given ones; an empty tuple fits any word."""

    support: Support
    schedule: tuple[str, ...] = ()
    zero: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()

    def fits(self, **words: str | int) -> bool:
        return all(not getattr(self, axis) or word in getattr(self, axis) for axis, word in words.items())


ROWS = (
    Row(
        Support(
            REFUSED,
            "FSDP frees weights and reduces gradients between the two halves of a split backward, so gradients come out "
            "wrong or missing; use zero=1, or schedule=1f1b or interleaved.",
        ),
        schedule=SPLIT_BACKWARD, zero=(2, 3),
    ),
    Row(
        Support(
            REFUSED,
            "selective recomputation gives its kept tensors out once, but a split backward asks for them twice; "
            "use recompute=full or none, or schedule=1f1b or interleaved.",
        ),
        schedule=SPLIT_BACKWARD, recompute=("selective",),
    ),
    Row(
        Support(
            COST,
            "each walk through a part of the graph computes the block again: FORWARDS forwards a block "
            "and micro-batch instead of 2.",
        ),
        schedule=SPLIT_BACKWARD, recompute=("full", SHARE),
    ),
    Row(
        Support(COST, "one reduce-scatter of the gradients per micro-batch instead of one per step."),
        zero=(2,),
    ),
    Row(
        Support(
            COST,
            "weights are gathered for each forward and each backward of a micro-batch, and gradients reduce-scattered "
            "per micro-batch instead of once per step.",
        ),
        zero=(3,),
    ),
    Row(Support(EXACT)),
)  # fmt: skip


def look_up(schedule: str, zero: int, recompute: str, precision: str) -> Support:
    return next(r.support for r in ROWS if r.fits(schedule=schedule, zero=zero, recompute=recompute, precision=precision))


def words_of(layout: Layout, precision: str) -> tuple[str, int, str, str]:
    """A layout in the words of the table. Without a shard axis there is nothing for `zero` to cut."""
    share = keep_share(layout.recompute)
    recompute = layout.recompute if share is None else {0.0: "full", 1.0: "none"}.get(share, SHARE)
    return (
        layout.schedule if layout.pipeline > 1 else ALONE,
        layout.zero if layout.shard > 1 else 1,
        recompute,
        precision,
    )


def support(layout: Layout, precision: str) -> Support:
    return look_up(*words_of(layout, precision))


def table() -> Iterator[tuple[tuple[str, int, str, str], Support]]:
    """Every combination with its verdict."""
    for words in product(*AXES.values()):
        yield words, look_up(*words)


__all__ = ["COST", "EXACT", "FULL_BACKWARD", "REFUSED", "Row", "Support", "support", "table"]
