"""A small list of cases in which every possible pair of values occurs: most bugs need two features to meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs(case: Case) -> set[Any]:
    """All pairs of (factor, value) in a case."""
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def cover(
    groups: Sequence[Sequence[Case]], fits: Callable[[Case], bool], cost: Callable[[Case], float], tries: int = 60
) -> list[Case]:
    """Cases, each of one part from every group, that hold every pair that a case which fits can hold.

    Takes, as long as a pair is missing, the best of a few random cases that hold it. The same in every run.
    """
    draw = random.Random(0)
    values = {item for group in groups for part in group for item in part.items()}
    wanted = [(a, b) for a, b in product(values, values) if a[0] < b[0]]
    missing, chosen = set(wanted), []
    for pair in sorted(wanted, key=repr):
        if pair not in missing:
            continue
        narrowed = [[p for p in group if all(p.get(key, value) == value for key, value in pair)] for group in groups]
        if not all(narrowed):
            continue  # no part holds both
        found = []
        for _ in range(tries):
            case = {key: value for group in narrowed for key, value in draw.choice(group).items()}
            if fits(case):
                found.append(case)
        if found:
            chosen.append(max(found, key=lambda case: len(pairs(case) & missing) / cost(case)))
            missing -= pairs(chosen[-1])
    return chosen
