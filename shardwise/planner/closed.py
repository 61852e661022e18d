"""Seconds of a pipeline step without simulating it: microseconds, so that a search can ask for every layout.

The time of a schedule is that of its longest path through actions that wait for each other. For even stages there are
few kinds of longest path, and `closed_form` is the largest of them: extra forwards, input halves, weight halves and
transfers beside what every rank is busy with. They were read off simulated schedules. Each is a path, so none is ever
too long; where a kind is left out the form is a lower bound. It is exact

- without transfers, except for zbv with pipeline < micro-batches < 2 x pipeline - 1, and for zero-bubble with several
  stages a rank and fewer micro-batches than ranks;
- with transfers for gpipe, 1f1b and zero-bubble with one stage a rank; for the others while transfers are short.

For uneven stages `bound` adds, rank by rank, what it must compute, the time until it can start and the time that others
need after it. It is never above the simulation; for gpipe it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from shardwise.layout import FULL_BACKWARD, SPLIT_BACKWARD, V_SHAPED
from shardwise.planner.simulate import Costs

Path = tuple[int, int, int, int]
"""Forwards, input halves and weight halves beside a rank's own work; transfers."""


def closed_form(
    schedule: str, ranks: int, virtual: int, micro_batches: int,
    forward: float, input: float, weight: float, transfer: float = 0.0, overlapped: bool = True,
) -> float:  # fmt: skip
    """Seconds of a step with even stages; times are those of one stage and one micro-batch.

    Not overlapped (see `simulate`) it is exact for gpipe and 1f1b and a loose lower bound for the others.
    """
    work = micro_batches * virtual * (forward + input + weight)
    if ranks == 1:
        return work
    if schedule in ("gpipe", "1f1b"):
        paths = [_one_path(schedule, ranks, micro_batches, overlapped)]
    else:
        paths = PATHS[schedule](ranks, virtual, micro_batches)
    return work + max([f * forward + b * input + w * weight + t * transfer for f, b, w, t in paths])


def _one_path(schedule: str, p: int, m: int, overlapped: bool) -> Path:
    more = p - 1
    if schedule == "gpipe":
        transfers = 2 * more if overlapped else 2 * (p + m - 2)
    elif overlapped:
        transfers = _zigzag(p, m)
    else:
        transfers = 2 * (p + m) - 5 if p > 2 else m + 1
    return more, more, more, transfers


def _zigzag(p: int, m: int) -> int:
    """Transfers on the longest path of 1f1b: down, up, and as often down and up again as micro-batches allow."""
    rounds = -(-(m - 1) // p)
    return 2 * (p - 1 + m - 1 - rounds)


def _interleaved(p: int, v: int, m: int) -> list[Path]:
    more = p - 1 if m >= p else v * p - 1 + m - m * v
    # Rounds of just p micro-batches come back to a rank when it needs them; in longer ones there is time for transfers.
    transfers = 2 * (p - 1) if m > p and m % p else 2 * (v * p - 1)
    return [(more, more, more, transfers)]


def _zero_bubble(p: int, v: int, m: int) -> list[Path]:
    n = p - 1
    if v > 1 and m < p:
        more = v * p - 1 + m - m * v
        return [(more, more, 1 - m * v, 2 * (v * p - 1)), (more, 1, 0, n), (more - m + 1, n, 0, n)]
    few = min(m - 1, n)
    turns = 0 if m > p and m % p else (v - 1) * p
    down = min(4 * n, _zigzag(p, m)) + turns
    paths = [(n - few, n, 0, 2 * n + turns), (n, n - few, 0, down - few), (n, n, -few, down)]
    if v == 1 and m > p:
        zigzag = _zigzag(p, m)
        rounds = -(-(m - 1) // p) + 1
        paths += [(n, 0, rounds - m + n, zigzag - n), (n, n, rounds - m, zigzag)]
    return paths


def _zbv(p: int, v: int, m: int) -> list[Path]:
    n = p - 1
    if m <= p:
        few = m - 1
        return [
            (2 * n - 2 * few, 2 * n, 0, 4 * n),
            (2 * n - few, 2 * n - few, 0, 4 * n - 2 * few),
            (2 * n, 2 * n - 3 * few, -few, 4 * n - 2 * few),
            (2 * n, 2 * n - 2 * few, -2 * few, 4 * n),
        ]
    if m < 2 * p - 1:
        j = m - p
        return [
            (0, n + 1 - j, j - 1, n),
            (0, 2 * n, -2 * j, 4 * n),
            (n + 1 - j, 0, j - 1, n),
            (n + j - 1, 1 - j, 0, n),
            (n + j - 1, n + 1 - j, -2 * j, n),
            (n + j, -j, -1, n),
            (2 * n, -n, -n, n),
            (2 * n, 0, -2 * n - 1, 4 * n),
        ]
    return [
        (0, 1, n - 1, 3 * n),
        (0, n, 0, 5 * n - 2),
        (0, n, -1, 5 * n),
        (0, 2 * n, -2 * n, 6 * n - 2),
        (0, 2 * n, -2 * n - 1, 6 * n),
        (1, 0, n - 1, 3 * n - 2),
        (n - 1, 1, 0, 5 * n - 2),
        (n - 1, n + 1, -2 * n, 6 * n - 2),
        (n, 0, -1, 5 * n),
        (n, n, -2 * n - 1, 6 * n),
        (2 * n - 1, 1 - n, 0, 3 * n - 2),
        (2 * n - 1, 1, -2 * n, 4 * n - 2),
        (2 * n, -n, -1, 3 * n),
        (2 * n, 0, -2 * n - 1, 4 * n),
    ]


def _dualpipev(p: int, v: int, m: int) -> list[Path]:
    n, zigzag = p - 1, _zigzag(p, m)
    return [
        (n - 1, n, 0, zigzag + n),
        (n - 1, 2 * n, -n, zigzag + 2 * n),
        (2 * n, 0, 0, zigzag - n),
        (2 * n, n, -n, zigzag),
    ]


PATHS = {"interleaved": _interleaved, "zero-bubble": _zero_bubble, "zbv": _zbv, "dualpipev": _dualpipev}


def at_least(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: Costs) -> float:
    """Seconds of a step: exact for even stages (but for the cases above), never too long for others."""
    times = costs.forward, costs.input, costs.weight
    f, b, w = map(min, times)
    least = closed_form(schedule, ranks, virtual, micro_batches, f, b, w)
    if (f, b, w) == tuple(map(max, times)):
        return least
    return max(least, bound(schedule, ranks, virtual, micro_batches, costs))


def at_most(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: Costs) -> float:
    """Seconds that a step without transfers takes at most: with every stage as slow as the slowest of them."""
    few = ranks < micro_batches < 2 * ranks - 1 if schedule == "zbv" else micro_batches < ranks
    if few and schedule in SPLIT_BACKWARD:
        return inf  # where the closed form may be too short
    f, b, w = map(max, (costs.forward, costs.input, costs.weight))
    return closed_form(schedule, ranks, virtual, micro_batches, f, b, w)


def bound(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: Costs, overlapped: bool = True) -> float:
    """Seconds that a step with these stages takes at least."""
    forward, input, weight, hops = costs.forward, costs.input, costs.weight, costs.transfer
    if ranks == 1:
        return micro_batches * (sum(forward) + sum(input) + sum(weight))
    if schedule in V_SHAPED:
        hops = [*hops[: ranks - 1], 0.0, *hops[ranks:]]
    if not overlapped:  # a receive then is part of the action that waits for it
        forward = [f + hop for f, hop in zip(forward, (0.0, *hops))]
        input = [b + hop for b, hop in zip(input, (*hops, 0.0))]
        hops = [0.0] * len(hops)
    if schedule in FULL_BACKWARD:
        backward = [b + w for b, w in zip(input, weight)]
        if schedule == "1f1b":
            return _bound_1f1b(forward, backward, hops, micro_batches)
        once = sum(forward) + sum(backward) + 2 * sum(hops)
        if schedule == "gpipe":
            return once + (micro_batches - 1) * (max(forward) + max(backward))
        return max(once, _bound_interleaved(forward, backward, hops, ranks, micro_batches))
    return _bound_split(schedule, forward, input, weight, hops, ranks, micro_batches)


def _bound_1f1b(forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], m: int) -> float:
    """By rank: until its first backward, its steady part, from its last forward on; and what earlier ranks add."""
    best, outer, inner = 0.0, 0.0, sum(forward) + sum(backward) + 2 * sum(hops)
    warm = len(forward)
    for f, b, hop in zip(forward, backward, (*hops, 0.0)):
        both = f + b
        inner -= both  # a micro-batch through all later stages and back
        warmer = inner - (warm - 1) * f
        cooler = inner - (warm - 1) * b
        if m == warm:
            idle = warmer if warmer > cooler else cooler
            total = outer + m * both + (idle if idle > 0 else 0.0)
        else:
            total = outer + m * both + (warmer if warmer > 0 else 0.0) + (cooler if cooler > 0 else 0.0)
        if total > best:
            best = total
        outer += both + 2 * hop
        inner -= 2 * hop
        warm -= 1
    return best


def _bound_interleaved(
    forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], p: int, m: int
) -> float:
    """By rank: its work, what earlier ranks do before it can start, what they do after it is done."""
    outer = accumulate((f + b + 2 * hop for f, b, hop in zip(forward[: p - 1], backward, hops)), initial=0.0)
    return max([lead + m * work for lead, work in zip(outer, _by_rank("interleaved", forward, backward, p))])


def _by_rank(schedule: str, one: Sequence[float], other: Sequence[float], p: int) -> list[float]:
    """Both costs of a rank's stages."""
    both = [a + b for a, b in zip(one, other)]
    if schedule in V_SHAPED:
        return [a + b for a, b in zip(both[:p], both[::-1])]
    return both if len(both) == p else [sum(both[rank::p]) for rank in range(p)]


def _bound_split(
    schedule: str, forward: Sequence[float], input: Sequence[float], weight: Sequence[float], hops: Sequence[float],
    p: int, m: int,
) -> float:  # fmt: skip
    """By rank: all of its work; or its forwards and input halves, and what follows the last of them."""
    inner = sum(forward) + sum(input) + 2 * sum(hops)
    best = inner + (m - 1) * forward[0] + weight[0]  # the last micro-batch alone
    halves = _by_rank(schedule, forward, input, p)
    weights = _by_rank(schedule, weight, [0.0] * len(weight), p)
    # Weight halves that the order leaves behind a rank's last input half, of its first stage and of its last.
    ordered = m >= p if schedule == "zero-bubble" else schedule == "zbv" and m >= 2 * p - 1
    both, short = schedule == "zbv", schedule == "zero-bubble" and len(forward) == p
    lead = out = 0.0  # what earlier ranks do before the first forward of this one, and after its last input half
    for rank, hop in zip(range(p), (*hops, 0.0)):
        f, b, w = forward[rank], input[rank], weight[rank]
        work = lead + m * halves[rank]
        behind = (rank + 1) * w + (rank * weight[-1 - rank] if both else 0.0) if ordered else m * weights[rank]
        idle = out + weight[0] - behind if rank else 0.0
        if short and m >= p - rank:  # between its first forwards and its first input half
            waits = inner - b - (p - rank) * f
            idle = waits if waits > idle else idle
        total = work + m * weights[rank] + (idle if idle > 0 else 0.0)
        if total > best:
            best = total
        inner -= f + b + 2 * hop
        lead += f + hop
        out += b + hop
    return best
