"""Splits a chain into pipeline stages: minimizes the cost of the slowest stage, then balances the others."""

from collections.abc import Sequence

import numpy as np

from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.layout import Layout


def cut_stages(layout: Layout, costs: Sequence[float]) -> list[tuple[int, int]]:
    """Returns the [first, last) module range of each stage. `costs`: of embedding, layers and head, in this order."""
    count = layout.stage_count
    if count > len(costs):
        layers = pluralize(len(costs) - 2, "layer")
        raise LayoutError(
            f"layout '{layout}' has {count} stages, but the model has {len(costs)} modules "
            f"({layers}, embedding and head); use at most {len(costs)} stages."
        )
    if layout.stages:
        return _explicit_stages(layout, len(costs) - 2)
    return balance(tuple(costs), count)


def _explicit_stages(layout: Layout, layers: int) -> list[tuple[int, int]]:
    text = f"stages={','.join(map(str, layout.stages))}"
    if sum(layout.stages) != layers:
        raise LayoutError(f"{text} holds {pluralize(sum(layout.stages), 'layer')}, but the model has {layers}.")
    ends = [1 + sum(layout.stages[: i + 1]) for i in range(len(layout.stages))]
    ends[-1] += 1
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if any(first == last for first, last in spans):
        raise LayoutError(f"{text}: only the first stage (embedding) and the last (head) may hold no layer.")
    return spans


def balance(costs: tuple[float, ...], count: int) -> list[tuple[int, int]]:
    """Returns the split of `costs` into `count` contiguous segments with the smallest maximum sum; among those, the one
    with the smallest sum of squares, so that others are balanced if one module dominates."""
    cumulative = np.concatenate(([0.0], np.cumsum(costs)))
    segment_costs = cumulative - cumulative[:, None]  # [i, j]: the sum of costs[i:j]
    segment_costs[np.tri(len(cumulative), dtype=bool)] = np.inf  # no empty segment
    bottleneck = _best_partition(segment_costs, count, np.maximum)[0][0]
    _, choices = _best_partition(np.where(segment_costs <= bottleneck, segment_costs**2, np.inf), count, np.add)
    boundaries = [0]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return list(zip(boundaries[:-1], boundaries[1:]))


def _best_partition(segment_costs: np.ndarray, count: int, combine: np.ufunc) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the best value of `count` segments from each start, and the end of the first of 1 to `count` segments."""
    value = np.where(np.arange(len(segment_costs)) == len(segment_costs) - 1, 0.0, np.inf)  # no segment: only the end
    choices = []
    for _ in range(count):
        values = combine(segment_costs, value)
        choices.append(values.argmin(1))
        value = values.min(1)
    return value, choices
