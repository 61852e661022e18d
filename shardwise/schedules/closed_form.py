"""A bound of a pipeline step's time, and micro-batches in flight at its memory peaks, in closed form: this takes
microseconds, so the planner's search can call it for every layout.

The bound of the time holds for any stages: no schedule is faster than the time before a rank can start, its own work
and the time that other ranks need after it. The counts were derived from simulated schedules.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from shardwise.layout import FULL_BACKWARD, V_SHAPED
from shardwise.schedules.simulate import StageCosts


def lower_bound(schedule: str, ranks: int, virtual: int, micro_batches: int, costs: StageCosts) -> float:
    """Returns a lower bound of the seconds of a step. With equal stages, a schedule with full backwards takes as long,
    unless it has fewer micro-batches than ranks."""
    forward, backward, weight, m = costs.forward, costs.backward_input, costs.backward_weight, micro_batches
    if schedule in FULL_BACKWARD:
        backward, weight = [b + w for b, w in zip(backward, weight)], [0.0] * len(weight)
    both = _work_by_rank(schedule, [f + b for f, b in zip(forward, backward)], ranks)
    weights = _work_by_rank(schedule, weight, ranks)
    # Seconds of one micro-batch: in earlier ranks before this one's first stage and after it, and in all later stages.
    lead_in, lead_out, later = 0.0, 0.0, sum(forward) + sum(backward)
    best = later + (m - 1) * forward[0] + weight[0]  # the path of the last micro-batch
    for rank, (f, b) in enumerate(zip(forward[:ranks], backward)):
        own_weights, after = m * weights[rank], lead_out + weight[0] if rank else 0.0
        total = lead_in + m * both[rank] + (own_weights if own_weights > after else after)
        later -= f + b
        if schedule == "1f1b":  # a rank waits before its first backward, and again before its last ones
            waits = [max(0.0, later - (ranks - 1 - rank) * seconds) for seconds in (f, b)]
            total += max(waits) if m == ranks - rank else sum(waits)
        if total > best:
            best = total
        lead_in, lead_out = lead_in + f, lead_out + b
    return best


def _work_by_rank(schedule: str, seconds: Sequence[float], ranks: int) -> Sequence[float]:
    if schedule in V_SHAPED:
        return [a + b for a, b in zip(seconds[:ranks], reversed(seconds))]
    return seconds if len(seconds) == ranks else [sum(seconds[rank::ranks]) for rank in range(ranks)]


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
