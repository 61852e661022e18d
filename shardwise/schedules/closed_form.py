"""Time of a pipeline step, and micro-batches in flight at its memory peaks, in closed form: takes microseconds, so the
planner's search can call it for every layout.

A schedule takes as long as its critical path. With even stages only a few critical paths are possible, and
`closed_form` returns the longest: the work of one rank plus extra forwards, backward-inputs and backward-weights. The
paths were derived from simulated schedules. Each is a real path, so the result never exceeds the simulation; where a
path is missing, it is a lower bound. It is exact, except for zbv with pipeline < micro-batches < 2 x pipeline - 1, and
for zero-bubble with several stages per rank and fewer micro-batches than ranks.

For uneven stages `uneven_lower_bound` adds up, for each rank, its own work, the time before it can start and the time
other ranks need after it. It never exceeds the simulation and is exact for gpipe.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf

from shardwise.layout import FULL_BACKWARD, SPLIT_BACKWARD, V_SHAPED
from shardwise.schedules.simulate import StageCosts

CriticalPath = tuple[int, int, int]  # forwards, backward-inputs and -weights beyond one rank's own work


def closed_form(
    schedule: str, ranks: int, virtual: int, micro_batches: int,
    forward: float, backward_input: float, backward_weight: float,
) -> float:  # fmt: skip
    """Returns the seconds of a step with even stages, given the times of one stage and one micro-batch."""
    work = micro_batches * virtual * (forward + backward_input + backward_weight)
    if ranks == 1:
        return work
    paths = CRITICAL_PATHS[schedule](ranks, virtual, micro_batches)
    return work + max([f * forward + b * backward_input + w * backward_weight for f, b, w in paths])


def _single_path(p: int, v: int, m: int) -> list[CriticalPath]:
    return [(p - 1,) * 3]


def _interleaved_paths(p: int, v: int, m: int) -> list[CriticalPath]:
    return [(p - 1 if m >= p else v * p - 1 + m - m * v,) * 3]


def _zero_bubble_paths(p: int, v: int, m: int) -> list[CriticalPath]:
    n = p - 1
    if v > 1 and m < p:
        extra = v * p - 1 + m - m * v
        return [(extra, extra, 1 - m * v), (extra, 1, 0), (extra - m + 1, n, 0)]
    warmup = min(m - 1, n)
    paths = [(n - warmup, n, 0), (n, n - warmup, 0), (n, n, -warmup)]
    if v == 1 and m > p:
        rounds = -(-(m - 1) // p) + 1
        paths += [(n, 0, rounds - m + n), (n, n, rounds - m)]
    return paths


def _zbv_paths(p: int, v: int, m: int) -> list[CriticalPath]:
    n = p - 1
    if m <= p:
        warmup, last = m - 1, 2 * n
        return [
            (last - 2 * warmup, last, 0), (last - warmup, last - warmup, 0), (last, last - 3 * warmup, -warmup),
            (last, last - 2 * warmup, -2 * warmup),
        ]  # fmt: skip
    if m < 2 * p - 1:
        j = m - p
        return [
            (0, n + 1 - j, j - 1), (0, 2 * n, -2 * j), (n + 1 - j, 0, j - 1), (n + j - 1, 1 - j, 0),
            (n + j - 1, n + 1 - j, -2 * j), (n + j, -j, -1), (2 * n, -n, -n), (2 * n, 0, -2 * n - 1),
        ]  # fmt: skip
    return [
        (0, 1, n - 1), (0, n, 0), (0, 2 * n, -2 * n), (1, 0, n - 1), (n - 1, 1, 0), (n - 1, n + 1, -2 * n), (n, 0, -1),
        (n, n, -2 * n - 1), (2 * n - 1, 1 - n, 0), (2 * n - 1, 1, -2 * n), (2 * n, -n, -1), (2 * n, 0, -2 * n - 1),
    ]  # fmt: skip


def _dualpipev_paths(p: int, v: int, m: int) -> list[CriticalPath]:
    n = p - 1
    return [(n - 1, n, 0), (n - 1, 2 * n, -n), (2 * n, 0, 0), (2 * n, n, -n)]


CRITICAL_PATHS = {
    "gpipe": _single_path, "1f1b": _single_path, "interleaved": _interleaved_paths, "zero-bubble": _zero_bubble_paths,
    "zbv": _zbv_paths, "dualpipev": _dualpipev_paths,
}  # fmt: skip


def lower_bound(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Returns a lower bound of the seconds of a step; exact for even stages, except as listed at the top."""
    times = costs.forward, costs.backward_input, costs.backward_weight
    f, b, w = map(min, times)
    even_bound = closed_form(schedule, ranks, virtual, micro_batches, f, b, w)
    if (f, b, w) == tuple(map(max, times)):
        return even_bound
    return max(even_bound, uneven_lower_bound(schedule, ranks, virtual, micro_batches, costs))


def upper_bound(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Returns an upper bound of the seconds of a step: all stages are as slow as the slowest."""
    below_warmup = ranks < micro_batches < 2 * ranks - 1 if schedule == "zbv" else micro_batches < ranks
    if below_warmup and schedule in SPLIT_BACKWARD:
        return inf  # the closed form is only a lower bound here
    f, b, w = map(max, (costs.forward, costs.backward_input, costs.backward_weight))
    return closed_form(schedule, ranks, virtual, micro_batches, f, b, w)


def uneven_lower_bound(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Returns a lower bound of the seconds of a step with these stage costs."""
    forward, backward_input, backward_weight = costs.forward, costs.backward_input, costs.backward_weight
    if ranks == 1:
        return micro_batches * (sum(forward) + sum(backward_input) + sum(backward_weight))
    if schedule not in FULL_BACKWARD:
        return _lower_bound_split_backward(schedule, costs, ranks, micro_batches)
    backward = [b + w for b, w in zip(backward_input, backward_weight)]
    if schedule == "1f1b":
        return _lower_bound_1f1b(forward, backward, micro_batches)
    once = sum(forward) + sum(backward)
    if schedule == "gpipe":
        return once + (micro_batches - 1) * (max(forward) + max(backward))
    # Interleaved: a rank's work plus that of earlier ranks before it starts and after it ends.
    outer = accumulate((f + b for f, b in zip(forward[: ranks - 1], backward)), initial=0.0)
    work = _sum_by_rank("interleaved", forward, backward, ranks)
    return max(once, max([lead + micro_batches * own for lead, own in zip(outer, work)]))


def _lower_bound_1f1b(forward: Sequence[float], backward: Sequence[float], m: int) -> float:
    """Maximum over ranks of warmup, steady state and cooldown, plus the time of the ranks before it."""
    best, before_and_after, round_trip = 0.0, 0.0, sum(forward) + sum(backward)
    warmup = len(forward)
    for f, b in zip(forward, backward):
        both = f + b
        round_trip -= both  # a micro-batch through all later stages and back
        warmup_idle = round_trip - (warmup - 1) * f
        cooldown_idle = round_trip - (warmup - 1) * b
        total = before_and_after + m * both
        if m == warmup:
            idle = warmup_idle if warmup_idle > cooldown_idle else cooldown_idle
            total += idle if idle > 0 else 0.0
        else:
            total += warmup_idle if warmup_idle > 0 else 0.0
            total += cooldown_idle if cooldown_idle > 0 else 0.0
        if total > best:
            best = total
        before_and_after += both
        warmup -= 1
    return best


def _sum_by_rank(schedule: str, a_costs: Sequence[float], b_costs: Sequence[float], p: int) -> list[float]:
    """Returns the sum of both costs over each rank's stages."""
    both = [a + b for a, b in zip(a_costs, b_costs)]
    if schedule in V_SHAPED:
        return [a + b for a, b in zip(both[:p], both[::-1])]
    return both if len(both) == p else [sum(both[rank::p]) for rank in range(p)]


def _lower_bound_split_backward(schedule: str, costs: StageCosts, p: int, m: int) -> float:
    """Maximum over ranks of a rank's work, plus the idle time and the work of other ranks that must surround it."""
    forward, backward_input, backward_weight = costs.forward, costs.backward_input, costs.backward_weight
    inner = sum(forward) + sum(backward_input)
    best = inner + (m - 1) * forward[0] + backward_weight[0]  # path of the last micro-batch
    forward_and_input = _sum_by_rank(schedule, forward, backward_input, p)
    weights = _sum_by_rank(schedule, backward_weight, [0.0] * len(backward_weight), p)
    # Steady: after its last backward-input, a rank has `rank + 1` backward-weights of its first stage left, and in zbv
    # `rank` of its last stage.
    is_steady = m >= p if schedule == "zero-bubble" else schedule == "zbv" and m >= 2 * p - 1
    is_zbv, single_stage_zero_bubble = schedule == "zbv", schedule == "zero-bubble" and len(forward) == p
    # Time of earlier ranks before this rank's first forward and after its last backward-input.
    lead_in = lead_out = 0.0
    for rank in range(p):
        f, b, w = forward[rank], backward_input[rank], backward_weight[rank]
        work = lead_in + m * forward_and_input[rank]
        trailing_weight = m * weights[rank]
        if is_steady:
            trailing_weight = (rank + 1) * w + (rank * backward_weight[-1 - rank] if is_zbv else 0.0)
        idle = lead_out + backward_weight[0] - trailing_weight if rank else 0.0
        if single_stage_zero_bubble and m >= p - rank:  # idle between warmup forwards and first backward-input
            first_wait = inner - b - (p - rank) * f
            idle = first_wait if first_wait > idle else idle
        total = work + m * weights[rank] + (idle if idle > 0 else 0.0)
        if total > best:
            best = total
        inner -= f + b
        lead_in += f
        lead_out += b
    return best


InFlightCounts = tuple[tuple[int, ...], tuple[int, ...]]
"""Per stage of a rank: micro-batches before their backward, and micro-batches whose weight gradients are pending."""


@lru_cache(maxsize=4096)
def schedule_peak_in_flight(schedule: str, p: int, v: int, r: int, m: int) -> tuple[InFlightCounts, ...]:
    """Returns the candidates for the memory peak of rank `r` of `p` with `v` stages each and `m` micro-batches; at any
    other time it holds no more than at one of them."""
    none = (0,) * v
    if p == 1:
        return (((1,), (0,)),)
    if schedule == "gpipe":
        return (((m,), none),)
    if schedule == "1f1b":
        return (((min(m, p - r),), none),)
    if schedule == "interleaved":
        return tuple((live, none) for live in _interleaved_in_flight(p, v, r, m))
    if schedule == "zero-bubble":
        return tuple(_zero_bubble_in_flight(p, v, r, m))
    # V-shaped: the steady state, then the drain with pending weight gradients.
    steady = ((2 * p - 1 - r, r + 1), (2 * p - r, r)) if schedule == "zbv" else ((2 * p - r, r + 1),)
    peaks: list[InFlightCounts] = [((min(m, first), min(m, last)), none) for first, last in steady]
    pending = (r + 1, r) if schedule == "zbv" else ((r + 2) // 2, (r + 1) // 2)
    peaks.append(((min(m, p - 1 - r), 0), (min(m, pending[0]), min(m, pending[1]))))
    peaks.append(((min(m, 2 * p - 1 - r), min(m, r)), (0, 1)))
    return tuple(peaks)


def _round_size(p: int, m: int) -> int:
    return m // max(1, m // p)


def _interleaved_in_flight(p: int, v: int, r: int, m: int) -> Iterator[tuple[int, ...]]:
    """Yields the maximal counts. Forwards visit the stages in rounds; after the warm-up forwards and backwards
    alternate, and backwards visit the stages in rounds in reverse order."""
    size, total = _round_size(p, m), m * v
    warmup = min(total, (p - 1 - r) * 2 + (v - 1) * size)
    live = [0] * v
    counts: set[tuple[int, ...]] = set()
    for step in range(min(total, warmup + 2 * size * v)):
        live[step // size % v] += 1
        if step >= warmup:
            if {step % size, (step - warmup) % size} & {0, size - 1}:  # between these, counts change monotonically
                counts.add(tuple(live))
            live[v - 1 - (step - warmup) // size % v] -= 1
    counts.add(tuple(live))
    for count in counts:
        if not any(other != count and all(a >= b for a, b in zip(other, count)) for other in counts):
            yield count


def _zero_bubble_in_flight(p: int, v: int, r: int, m: int) -> Iterator[InFlightCounts]:
    """Yields the counts: all ranks hold equally many micro-batches, later ranks more with pending weight gradients."""
    size = _round_size(p, m)
    for extra in {0, size if m > size and v > 1 else 0}:
        live = [size] * v
        live[0], live[-1] = live[0] + extra, live[-1] - extra
        for pending_total in (min(r, m), min(r + 1, m)):
            for order in {tuple(range(v)), tuple(reversed(range(v)))}:
                left, rest, pending = pending_total, list(live), [0] * v
                for stage in order:
                    taken = min(left, rest[stage])
                    left, rest[stage], pending[stage] = left - taken, rest[stage] - taken, taken
                yield tuple(rest), tuple(pending)
