"""Where a chain is cut into pipeline stages: the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.words import counted


def cut_stages(layout: Layout, costs: Sequence[float]) -> list[tuple[int, int]]:
    """Spans of pieces, one per stage. `costs` are those of embedding, layers and head, in this order."""
    count = layout.stage_count
    if count > len(costs):
        layers = counted(len(costs) - 2, "layer")
        raise LayoutError(
            f"layout '{layout}' has {count} stages, but the model has {len(costs)} pieces "
            f"({layers}, embedding and head); use at most {len(costs)} stages."
        )
    if layout.stages:
        return _fixed(layout, len(costs) - 2)
    return balance(tuple(costs), count)


def _fixed(layout: Layout, layers: int) -> list[tuple[int, int]]:
    if sum(layout.stages) != layers:
        raise LayoutError(
            f"stages={','.join(map(str, layout.stages))} holds {counted(sum(layout.stages), 'layer')}, "
            f"but the model has {layers}."
        )
    ends = [1 + sum(layout.stages[: i + 1]) for i in range(len(layout.stages))]
    ends[-1] += 1
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if any(first == last for first, last in spans):
        raise LayoutError(
            f"stages={','.join(map(str, layout.stages))}: only the first stage (with the embedding) and the last "
            "(with the head) may hold no layer."
        )
    return spans


def balance(costs: tuple[float, ...], count: int) -> list[tuple[int, int]]:
    """The cut of `costs` into `count` runs, none empty, whose largest sum is least; ties go to earlier cuts."""

    @cache
    def best(start: int, stages: int) -> tuple[float, int]:
        """The least largest sum of costs[start:] in `stages` runs, and where the first of them ends."""
        if stages == 1:
            return sum(costs[start:]), len(costs)
        found = (float("inf"), -1)
        first = 0.0
        for end in range(start + 1, len(costs) - stages + 2):
            first += costs[end - 1]
            worst = max(first, best(end, stages - 1)[0])
            if worst < found[0]:
                found = (worst, end)
            if first > found[0]:
                break
        return found

    spans, start = [], 0
    for stages in range(count, 0, -1):
        end = best(start, stages)[1]
        spans.append((start, end))
        start = end
    return spans
