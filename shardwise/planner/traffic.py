"""Bytes that a rank of our own engine sends and receives in a step, by axis and collective, as a dry run counts them:
the larger side of each collective, on the first rank of every axis but the pipeline.

Nothing is estimated: parameters are those of the engine (`Own`), padded as it pads them, and tests hold every number
against dry runs.
"""

from __future__ import annotations

from collections import Counter

from shardwise.layout import AXES, Layout, keep_share
from shardwise.planner.memory import Part
from shardwise.planner.own import Own
from shardwise.planner.simulate import INPUT, Program, named


def traffic(
    own: Own, layout: Layout, rank: int, micro_batches: int, program: Program | None = None
) -> dict[tuple[str, str], int]:
    """Of a pipeline rank: by axis and collective. `program`: that of a schedule that has no name."""
    stages = own.stages(layout)
    parts = [stages[stage] for stage in layout.stages_of(rank)]
    found: Counter[tuple[str, str]] = Counter()
    _pipeline(found, own, layout, rank, micro_batches)
    if layout.tensor > 1:
        _tensor(found, own, layout, parts, micro_batches)
    if layout.data > 1:
        _data(found, own, layout, parts, rank, micro_batches, program)
    if layout.pipeline > 1 and own.model.tied and (parts[0].first != parts[-1].last):
        table = next(each for each in own.pieces(layout.tensor)["embed"])
        found["ties", "all-reduce"] += own.wide * table.piece(layout.shard)
    # The number of targets; loss and norm.
    only = [axis for axis in AXES if getattr(layout, axis) == layout.world > 1]
    if layout.data > 1:
        found[only[0] if only else "data", "all-reduce"] += own.wide
    if layout.world > 1:
        found[only[0] if only else "data" if layout.data == layout.world else "world", "all-reduce"] += 2 * own.wide
    return {key: size for key, size in found.items() if size}


def by_axis(own: Own, layout: Layout, rank: int, micro_batches: int, program: Program | None = None) -> dict[str, int]:
    """All collectives of an axis together."""
    found: Counter[str] = Counter()
    for (axis, _), size in traffic(own, layout, rank, micro_batches, program).items():
        found[axis] += size
    return dict(found)


def _pipeline(found: Counter[tuple[str, str]], own: Own, layout: Layout, rank: int, micro_batches: int) -> None:
    sent = own.neighbours(layout, rank) * micro_batches * round(own.kept(layout).stream)
    found["pipeline", "send"] += sent
    found["pipeline", "receive"] += sent


def _tensor(found: Counter[tuple[str, str]], own: Own, layout: Layout, parts: list[Part], micro_batches: int) -> None:
    """Each edge of a region gathers or sums one stream forward, the other way back."""
    blocks, first, last = (sum(each) for each in zip(*parts, strict=True))
    edges = 4 * blocks + first + last
    again = recomputed(layout, parts)
    stream = micro_batches * round(own.kept(layout).whole)
    found["tensor", "all-gather"] += stream * (edges + 2 * again)
    # A checkpoint stops when it has all that was saved: before the block's last sum.
    found["tensor", "reduce-scatter"] += stream * (edges + (2 if layout.split_backward else 1) * again)
    tokens = layout.micro_batch * own.model.sequence
    found["tensor", "all-reduce"] += last * micro_batches * 3 * own.wide * tokens  # maxima, sums, hits of the loss
    for part in parts:
        uncut = [each.piece(layout.shard) for each in own.parameters(layout, part) if not each.cut]
        found["tensor", "all-reduce"] += own.wide * sum(uncut)


def recomputed(layout: Layout, parts: list[Part]) -> int:
    """Blocks whose forward is run again, collectives included."""
    share = keep_share(layout.recompute)
    if share is None:
        share = float(layout.recompute != "full")
    return sum(part.blocks - int(part.blocks * share) for part in parts)


def _halved(layout: Layout, stage: int, micro_batches: int, program: Program | None) -> int:
    """Backwards of a stage in two halves, each of which needs whole weights; the first stage's input half does not."""
    if not layout.split_backward or stage == 0:
        return 0
    if program is None and layout.schedule != "dualpipev":
        return micro_batches
    few = min(micro_batches, 2 * layout.stage_count)  # those in the steady part are whole
    program = program or named(layout.schedule, layout.pipeline, layout.stages_per_rank, few)
    return sum(1 for _, kind, place, _ in program.actions if kind == INPUT and place == stage)


def _data(
    found: Counter[tuple[str, str]], own: Own, layout: Layout, parts: list[Part], rank: int, micro_batches: int,
    program: Program | None,
) -> None:  # fmt: skip
    shard, w = layout.shard, own.wide
    pieces = sum(each.piece(shard) for part in parts for each in own.parameters(layout, part))
    fsdp = shard > 1 and layout.zero > 1
    times = micro_batches if fsdp else 1
    if shard > 1:
        found["shard", "reduce-scatter"] += times * shard * pieces * w
        size = shard * (own.size if fsdp else w)
        for part, stage in zip(parts, layout.stages_of(rank)):
            gathers = 1 if layout.zero < 3 else 2 * micro_batches + _halved(layout, stage, micro_batches, program)
            found["shard", "all-gather"] += gathers * size * sum(e.piece(shard) for e in own.parameters(layout, part))
    if layout.replicate > 1:
        found["replicate", "all-reduce"] += times * pieces * w
