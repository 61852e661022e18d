"""All-reduce algorithms over point-to-point messages: ring, halving and doubling, tree, two levels.

An algorithm is a schedule, as data: for each step, what this rank sends to whom and takes from whom. `run` is the one
place that moves numbers. A long message is cut into segments that follow each other through the schedule, so that a
step of one travels while another step of the next does. Each number is summed up in one place and handed on from there,
so all ranks get the same bits. Beside each schedule stands the exact count of numbers that a rank sends.

PyTorch's own `all_reduce` hides its algorithm, its traffic and the name of a rank that does not answer.

    ring       Patarasu, Yuan (2009). Halving: Rabenseifner (2004), where ranks beyond a power of two fold into others.
    tree       binomial, sum towards rank 0 and back.  Two levels: scatter in a node, rings across nodes, gather.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RunError

SEGMENT = 1 << 22  # bytes
Bounds = list[int]


class Part(NamedTuple):
    """Numbers that travel to or from another rank of the group."""

    peer: int
    first: int
    last: int


class Step(NamedTuple):
    """What one rank does at a time; a rank that waits has steps with neither."""

    send: Part | None = None
    take: Part | None = None
    adds: bool = False
    """Whether what is taken is added to what is there, or takes its place."""


Schedule = Callable[[int, int, int], list[Step]]  # of rank, ranks and numbers
Count = Callable[[int, int, int], int]


def cut(count: int, parts: int, first: int = 0) -> Bounds:
    """The ends of nearly equal parts."""
    return [first + count * part // parts for part in range(parts + 1)]


def _size(bounds: Bounds, part: int) -> int:
    part %= len(bounds) - 1
    return bounds[part + 1] - bounds[part]


# Ring


def ring(rank: int, ranks: int, count: int) -> list[Step]:
    bounds = cut(count, ranks)
    everyone = list(range(ranks))
    return _scatter(rank, everyone, bounds) + _gather(rank, everyone, bounds)


def ring_count(rank: int, ranks: int, count: int) -> int:
    """All parts but one, twice: 2 (ranks - 1) / ranks of the message where that divides."""
    bounds = cut(count, ranks)
    return 2 * count - _size(bounds, rank + 1) - _size(bounds, rank + 2) if ranks > 1 else 0


def _scatter(place: int, members: list[int], bounds: Bounds) -> list[Step]:
    """Sums round a ring; in the end a place holds the part after its own."""
    return [_turn(place, members, bounds, place - turn, True) for turn in range(len(members) - 1)]


def _gather(place: int, members: list[int], bounds: Bounds) -> list[Step]:
    return [_turn(place, members, bounds, place + 1 - turn, False) for turn in range(len(members) - 1)]


def _turn(place: int, members: list[int], bounds: Bounds, part: int, adds: bool) -> Step:
    ranks = len(members)
    sent, taken = part % ranks, (part - 1) % ranks
    return Step(
        Part(members[(place + 1) % ranks], bounds[sent], bounds[sent + 1]),
        Part(members[place - 1], bounds[taken], bounds[taken + 1]),
        adds,
    )


# Halving and doubling


def halving(rank: int, ranks: int, count: int) -> list[Step]:
    core = 1 << (ranks.bit_length() - 1)
    extra, place = ranks - core, _core_place(rank, ranks)
    levels = core.bit_length() - 1
    if place is None:
        whole = Part(rank + 1, 0, count)
        return [Step(send=whole), *[Step()] * (2 * levels), Step(take=whole)]
    bounds, down, up = cut(count, core), [], []
    for level in range(levels):
        width = core >> (level + 1)
        block, other = place // width, place // width ^ 1
        peer = place ^ width
        peer = 2 * peer + 1 if peer < extra else peer + extra
        kept, sent = (Part(peer, bounds[b * width], bounds[(b + 1) * width]) for b in (block, other))
        down.append(Step(sent, kept, True))
        up.append(Step(kept, sent))
    folded = rank < 2 * extra
    whole = Part(rank - 1, 0, count)
    before = [Step(take=whole, adds=True) if folded else Step()] * bool(extra)
    after = [Step(send=whole) if folded else Step()] * bool(extra)
    return before + down + up[::-1] + after


def halving_count(rank: int, ranks: int, count: int) -> int:
    """2 (core - 1) / core of the message; folded ranks and their partners send the whole once besides."""
    core = 1 << (ranks.bit_length() - 1)
    place = _core_place(rank, ranks)
    if place is None:
        return count
    bounds = cut(count, core)
    total = count - _size(bounds, place) + (count if rank < 2 * (ranks - core) else 0)
    for level in range(core.bit_length() - 1):
        first = place >> level << level
        total += bounds[first + (1 << level)] - bounds[first]
    return total


def _core_place(rank: int, ranks: int) -> int | None:
    """A rank's place among a power of two of them; None where its right neighbour speaks for it."""
    extra = ranks - (1 << (ranks.bit_length() - 1))
    if rank >= 2 * extra:
        return rank - extra
    return rank // 2 if rank % 2 else None


# Tree


def tree(rank: int, ranks: int, count: int) -> list[Step]:
    up, down = [], []
    for level in range((ranks - 1).bit_length()):
        distance = 1 << level
        parent, child = Part(rank - distance, 0, count), Part(rank + distance, 0, count)
        if rank % (2 * distance) == distance:
            up.append(Step(send=parent))
            down.append(Step(take=parent))
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            up.append(Step(take=child, adds=True))
            down.append(Step(send=child))
        else:
            up.append(Step())
            down.append(Step())
    return up + down[::-1]


def tree_count(rank: int, ranks: int, count: int) -> int:
    """The whole once to the parent, and once to each child."""
    levels = (rank & -rank).bit_length() - 1 if rank else (ranks - 1).bit_length()
    children = sum(rank + (1 << level) < ranks for level in range(levels))
    return count * ((rank > 0) + children)


# Two levels


def two_level(rank: int, ranks: int, count: int, node: int) -> list[Step]:
    """`node`: ranks on a node, neighbours in the group."""
    number, local = divmod(rank, node)
    inside = [number * node + other for other in range(node)]
    across = [other * node + local for other in range(ranks // node)]
    bounds, own = cut(count, node), (local + 1) % node
    parts = cut(_size(bounds, own), len(across), bounds[own])
    ring_across = _scatter(number, across, parts) + _gather(number, across, parts)
    return _scatter(local, inside, bounds) + ring_across + _gather(local, inside, bounds)


def two_level_count(rank: int, ranks: int, count: int, node: int) -> int:
    """A ring in the node, and one of a node-th of the message across nodes."""
    number, local = divmod(rank, node)
    slice_ = _size(cut(count, node), local + 1)
    return ring_count(local, node, count) + ring_count(number, ranks // node, slice_)


ALGORITHMS: dict[str, tuple[Schedule, Count]] = {
    "ring": (ring, ring_count), "halving": (halving, halving_count), "tree": (tree, tree_count),
}  # fmt: skip


def algorithm(name: str, node: int = 1) -> tuple[Schedule, Count]:
    """A schedule and its count by name; `node` is for two levels."""
    if name == "two-level":
        return partial(two_level, node=node), partial(two_level_count, node=node)
    return ALGORITHMS[name]


# Moving


def all_reduce(
    tensor: Tensor, name: str, group: dist.ProcessGroup | None = None, node: int = 1, segment: int = SEGMENT
) -> int:
    """Sums a contiguous tensor over a group, in place. Returns the bytes that this rank sent."""
    return run(tensor, algorithm(name, node)[0], f"{name} all-reduce", group, segment)


def segments(count: int, size: int, segment: int = SEGMENT) -> Bounds:
    """The ends of the segments of so many numbers of `size` bytes."""
    return cut(count, max(1, -(-count * size // segment)))


def sent_bytes(count_of: Count, rank: int, ranks: int, count: int, size: int, segment: int = SEGMENT) -> int:
    """What a rank sends for so many numbers of `size` bytes: the formula over all segments."""
    bounds = segments(count, size, segment)
    return size * sum(count_of(rank, ranks, _size(bounds, part)) for part in range(len(bounds) - 1))


def run(
    tensor: Tensor, schedule: Schedule, word: str, group: dist.ProcessGroup | None = None, segment: int = SEGMENT
) -> int:
    """Walks a schedule with the numbers of a contiguous tensor. Returns the bytes that this rank sent."""
    if not dist.is_initialized():
        return 0
    flat, rank, ranks = tensor.detach().view(-1), dist.get_rank(group), dist.get_world_size(group)
    bounds = segments(flat.numel(), flat.element_size(), segment)
    plans = [schedule(rank, ranks, _size(bounds, part)) for part in range(len(bounds) - 1)]
    depth, total = len(plans[0]), 0
    # Segments that are under way at the same moment never share a place in it.
    spare = [flat.new_empty(_largest(plans)) for _ in range(min(depth, len(plans)))]
    for moment in range(depth + len(plans) - 1):
        takes, sends, sums = [], [], []
        for part in range(max(0, moment - depth + 1), min(moment + 1, len(plans))):
            step, start = plans[part][moment - part], bounds[part]
            if step.take and step.take.first < step.take.last:
                there = flat[start + step.take.first : start + step.take.last]
                place = spare[part % len(spare)][: there.numel()] if step.adds else there
                takes.append(dist.P2POp(dist.irecv, place, group=group, group_peer=step.take.peer))
                sums.append((there, place) if step.adds else None)
            if step.send and step.send.first < step.send.last:
                sent = flat[start + step.send.first : start + step.send.last]
                sends.append(dist.P2POp(dist.isend, sent, group=group, group_peer=step.send.peer))
                total += sent.numel() * sent.element_size()
        if takes or sends:
            _move(takes, sends, sums, f"{word}, step {moment + 1} of {depth + len(plans) - 1}")
    return total


def _largest(plans: list[list[Step]]) -> int:
    return max((s.take.last - s.take.first for steps in plans for s in steps if s.take and s.adds), default=0)


def _move(
    takes: list[dist.P2POp], sends: list[dist.P2POp], sums: list[tuple[Tensor, Tensor] | None], word: str
) -> None:
    """Sends and takes at once, and adds up as it comes. Takes are first: gloo tells a sender that its peer is ready in
    the same stream, where the word would wait behind what is sent."""
    moves = takes + sends
    peer = moves[0].peer
    try:
        works = dist.batch_isend_irecv(moves)
        if len(works) < len(moves):  # NCCL has one for all
            for work in works:
                work.wait()
            works = []
        for place, move in enumerate(moves):
            peer = move.peer
            if works:
                works[place].wait()
            if place < len(sums) and (both := sums[place]):
                both[0].add_(both[1])
    except RuntimeError as error:
        raise RunError(f"rank {blamed(peer)} does not answer ({word}).") from error


# Who is to blame

GRACE = 1.0  # seconds in which others may say for whom they waited


def blamed(peer: int) -> int:
    """The rank at the end of the line, where we wait for a peer that waits for another. Whoever gives up leaves the
    name of the rank it waited for in the store; one that does not answer leaves none."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"waited for/{dist.get_rank()}", str(peer))
        seen, until = {dist.get_rank()}, time.monotonic() + GRACE
        while peer not in seen:
            seen.add(peer)
            while not store.check([f"waited for/{peer}"]):
                if time.monotonic() > until:
                    return peer
                time.sleep(0.02)
            peer = int(store.get(f"waited for/{peer}"))
    except RuntimeError:
        pass  # with the store gone, our own peer is all that we know
    return peer
