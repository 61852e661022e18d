"""A small list of cases in which every possible pair of values occurs: most bugs need two features to meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs(case: Case) -> set[Any]:
    """All pairs of (factor, value) in a case."""
    return set(combinations(sorted(case.items()), 2))


def cover(
    groups: Sequence[Sequence[Case]], fits: Callable[[Case], bool], cost: Callable[[Case], float], tries: int = 300
) -> list[Case]:
    """Cases, each of one part from every group, that hold every pair that a case which fits can hold.

    As long as a pair is missing, a random case that holds it is improved part by part to hold many missing ones at
    little cost. The same in every run.
    """
    draw = random.Random(0)
    values = {item for group in groups for part in group for item in part.items()}
    wanted = sorted(((a, b) for a, b in product(values, values) if a[0] < b[0]), key=repr)
    draw.shuffle(wanted)
    missing, chosen = set(wanted), []
    holders = [_holders(group) for group in groups]
    for pair in wanted:
        if pair not in missing:
            continue
        narrowed = [_narrow(group, held, pair) for group, held in zip(groups, holders)]
        if not all(narrowed):
            continue  # no part holds both
        best, most = None, 0.0
        for turn in range(tries):
            parts = [draw.choice(group) for group in narrowed]
            if best is not None and turn % 2:
                keep = draw.randrange(len(parts))
                parts = [part if i == keep else old for i, (part, old) in enumerate(zip(parts, best))]
            case = {key: value for part in parts for key, value in part.items()}
            if fits(case) and (score := len(pairs(case) & missing) / cost(case)) > most:
                best, most = parts, score
        if best is not None:
            chosen.append({key: value for part in best for key, value in part.items()})
            missing -= pairs(chosen[-1])
    return chosen


def _holders(group: Sequence[Case]) -> dict[Any, list[Case]]:
    """Returns by (factor, value) the parts that hold it."""
    held: dict[Any, list[Case]] = {}
    for part in group:
        for item in part.items():
            held.setdefault(item, []).append(part)
    return held


def _narrow(group: Sequence[Case], held: dict[Any, list[Case]], pair: Any) -> Sequence[Case]:
    """Returns the parts of a group that hold those of two items whose factors the group has."""
    items = [item for item in pair if item[0] in group[0]]
    if not items:
        return group
    first, *rest = items
    return [part for part in held.get(first, []) if all(part[key] == value for key, value in rest)]
