"""All-reduce algorithms over point-to-point messages: ring, halving-doubling, tree, two-level.

A schedule describes an algorithm as data: for each step, the slices this rank sends and receives, and the peers.
`run_schedule` executes any schedule. Long messages are split into segments that are pipelined through it. Each element
is summed on one rank and distributed from there, so all ranks get the same bits.

PyTorch's own `all_reduce` hides its algorithm, its traffic and which rank does not respond.

    ring       Patarasuk, Yuan (2009)
    halving    recursive halving and doubling, Rabenseifner (2004); ranks beyond a power of two fold into a neighbour
    tree       binomial: reduce to rank 0, then broadcast
    two-level  reduce-scatter within a node, rings across nodes, all-gather within the node
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RunError

SEGMENT_BYTES = 1 << 22
Bounds = list[int]


class PeerSlice(NamedTuple):
    """A slice of the message, sent to or received from a peer of the group."""

    peer: int
    start: int
    stop: int


class P2PStep(NamedTuple):
    """One step of a rank; idle if it neither sends nor receives."""

    send: PeerSlice | None = None
    recv: PeerSlice | None = None
    accumulate: bool = False  # whether the received slice is added to the local one or replaces it


Schedule = Callable[[int, int, int], list[P2PStep]]  # (rank, ranks, numel)


def chunk_bounds(count: int, parts: int, first: int = 0) -> Bounds:
    """Returns the boundaries of `parts` nearly equal chunks of `count` elements."""
    return [first + count * part // parts for part in range(parts + 1)]


def _chunk_size(bounds: Bounds, part: int) -> int:
    part %= len(bounds) - 1
    return bounds[part + 1] - bounds[part]


def _ring_reduce_scatter(index: int, members: list[int], bounds: Bounds) -> list[P2PStep]:
    """Reduces around the ring; in the end each member holds the sum of the chunk after its own index."""
    return [_ring_step(index, members, bounds, index - step, True) for step in range(len(members) - 1)]


def _ring_all_gather(index: int, members: list[int], bounds: Bounds) -> list[P2PStep]:
    return [_ring_step(index, members, bounds, index + 1 - step, False) for step in range(len(members) - 1)]


def _ring_step(index: int, members: list[int], bounds: Bounds, chunk: int, accumulate: bool) -> P2PStep:
    ranks = len(members)
    send_chunk, recv_chunk = chunk % ranks, (chunk - 1) % ranks
    sent = PeerSlice(members[(index + 1) % ranks], bounds[send_chunk], bounds[send_chunk + 1])
    received = PeerSlice(members[index - 1], bounds[recv_chunk], bounds[recv_chunk + 1])
    return P2PStep(sent, received, accumulate)


def halving_doubling_schedule(rank: int, ranks: int, count: int) -> list[P2PStep]:
    core_size = 1 << (ranks.bit_length() - 1)  # the largest power of two; the `extra` ranks beyond it are folded
    extra, levels = ranks - core_size, core_size.bit_length() - 1
    is_folded = rank < 2 * extra
    if is_folded and rank % 2 == 0:
        full_message = PeerSlice(rank + 1, 0, count)
        return [P2PStep(send=full_message), *[P2PStep()] * (2 * levels), P2PStep(recv=full_message)]
    core_rank = rank // 2 if is_folded else rank - extra
    bounds, halving, doubling = chunk_bounds(count, core_size), [], []
    for level in range(levels):
        width = core_size >> (level + 1)
        block, other = core_rank // width, core_rank // width ^ 1
        peer = core_rank ^ width
        peer = 2 * peer + 1 if peer < extra else peer + extra
        kept, sent = (PeerSlice(peer, bounds[b * width], bounds[(b + 1) * width]) for b in (block, other))
        halving.append(P2PStep(sent, kept, True))
        doubling.append(P2PStep(kept, sent))
    full_message = PeerSlice(rank - 1, 0, count)
    before = [P2PStep(recv=full_message, accumulate=True) if is_folded else P2PStep()] * bool(extra)
    after = [P2PStep(send=full_message) if is_folded else P2PStep()] * bool(extra)
    return before + halving + doubling[::-1] + after


def tree_schedule(rank: int, ranks: int, count: int) -> list[P2PStep]:
    up, down = [], []
    for level in range((ranks - 1).bit_length()):
        distance = 1 << level
        parent, child = PeerSlice(rank - distance, 0, count), PeerSlice(rank + distance, 0, count)
        if rank % (2 * distance) == distance:
            up.append(P2PStep(send=parent))
            down.append(P2PStep(recv=parent))
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            up.append(P2PStep(recv=child, accumulate=True))
            down.append(P2PStep(send=child))
        else:
            up.append(P2PStep())
            down.append(P2PStep())
    return up + down[::-1]


def two_level_schedule(rank: int, ranks: int, count: int, ranks_per_node: int) -> list[P2PStep]:
    """The ranks of a node must be consecutive in the group."""
    node, local_rank = divmod(rank, ranks_per_node)
    intra_node = [node * ranks_per_node + other for other in range(ranks_per_node)]
    inter_node = [other * ranks_per_node + local_rank for other in range(ranks // ranks_per_node)]
    bounds, own_chunk = chunk_bounds(count, ranks_per_node), (local_rank + 1) % ranks_per_node
    inter_node_bounds = chunk_bounds(_chunk_size(bounds, own_chunk), len(inter_node), bounds[own_chunk])
    inner, outer = (local_rank, intra_node, bounds), (node, inter_node, inter_node_bounds)
    across_nodes = _ring_reduce_scatter(*outer) + _ring_all_gather(*outer)
    return _ring_reduce_scatter(*inner) + across_nodes + _ring_all_gather(*inner)


def ring_schedule(rank: int, ranks: int, count: int) -> list[P2PStep]:
    return two_level_schedule(rank, ranks, count, ranks_per_node=ranks)


ALGORITHMS: dict[str, Schedule] = {"ring": ring_schedule, "halving": halving_doubling_schedule, "tree": tree_schedule}


def get_schedule(name: str, ranks_per_node: int = 1) -> Schedule:
    """Returns the schedule of an algorithm; `ranks_per_node` is for `two-level`."""
    return partial(two_level_schedule, ranks_per_node=ranks_per_node) if name == "two-level" else ALGORITHMS[name]


def all_reduce(
    tensor: Tensor, name: str, group: dist.ProcessGroup | None = None, ranks_per_node: int = 1,
    segment_bytes: int = SEGMENT_BYTES,
) -> int:  # fmt: skip
    """Sums a contiguous tensor over a group, in place. Returns the bytes this rank sent."""
    return run_schedule(tensor, get_schedule(name, ranks_per_node), f"{name} all-reduce", group, segment_bytes)


def segment_bounds(count: int, element_size: int, segment_bytes: int = SEGMENT_BYTES) -> Bounds:
    """Returns the boundaries of the segments of `count` elements."""
    return chunk_bounds(count, max(1, -(-count * element_size // segment_bytes)))


def sent_bytes(schedule: Schedule, rank: int, ranks: int, count: int, element_size: int, segment_bytes: int) -> int:
    """Returns the bytes that a rank sends for `count` elements."""
    bounds = segment_bounds(count, element_size, segment_bytes)
    segments = (schedule(rank, ranks, _chunk_size(bounds, index)) for index in range(len(bounds) - 1))
    sends = [step.send for steps in segments for step in steps if step.send]
    return element_size * sum(part.stop - part.start for part in sends)


def run_schedule(
    tensor: Tensor, schedule: Schedule, description: str, group: dist.ProcessGroup | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> int:  # fmt: skip
    """Executes a schedule on a contiguous tensor. Returns the bytes this rank sent."""
    if not dist.is_initialized():
        return 0
    flat, rank, ranks = tensor.detach().view(-1), dist.get_rank(group), dist.get_world_size(group)
    bounds = segment_bounds(flat.numel(), flat.element_size(), segment_bytes)
    steps_by_segment = [schedule(rank, ranks, _chunk_size(bounds, index)) for index in range(len(bounds) - 1)]
    depth, bytes_sent = len(steps_by_segment[0]), 0
    # Segments in flight at the same time never share a receive buffer.
    received = [step.recv for steps in steps_by_segment for step in steps if step.recv and step.accumulate]
    buffer_size = max((part.stop - part.start for part in received), default=0)
    recv_buffers = [flat.new_empty(buffer_size) for _ in range(min(depth, len(steps_by_segment)))]
    ticks = depth + len(steps_by_segment) - 1
    for tick in range(ticks):
        recvs, sends, accumulations = [], [], []
        for index in range(max(0, tick - depth + 1), min(tick + 1, len(steps_by_segment))):
            step, start = steps_by_segment[index][tick - index], bounds[index]
            if step.recv and step.recv.start < step.recv.stop:
                target = flat[start + step.recv.start : start + step.recv.stop]
                buffer = recv_buffers[index % len(recv_buffers)][: target.numel()] if step.accumulate else target
                recvs.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=step.recv.peer))
                accumulations.append((target, buffer) if step.accumulate else None)
            if step.send and step.send.start < step.send.stop:
                sent = flat[start + step.send.start : start + step.send.stop]
                sends.append(dist.P2POp(dist.isend, sent, group=group, group_peer=step.send.peer))
                bytes_sent += sent.numel() * sent.element_size()
        if recvs or sends:
            _send_recv(recvs, sends, accumulations, f"{description}, step {tick + 1} of {ticks}")
    return bytes_sent


def _send_recv(
    recvs: list[dist.P2POp], sends: list[dist.P2POp], accumulations: list[tuple[Tensor, Tensor] | None],
    description: str,
) -> None:  # fmt: skip
    """Sends and receives concurrently, and accumulates as slices arrive. Receives are posted first: gloo announces a
    posted receive in the same stream as the data, where it would queue behind what is sent."""
    ops = recvs + sends
    peer = ops[0].peer
    try:
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # NCCL returns one work for the batch
            for work in works:
                work.wait()
            works = []
        for index, op in enumerate(ops):
            peer = op.peer
            if works:
                works[index].wait()
            if index < len(accumulations) and (target_and_buffer := accumulations[index]):
                target_and_buffer[0].add_(target_and_buffer[1])
    except RuntimeError as error:
        raise RunError(f"rank {find_unresponsive_rank(peer)} is not responding ({description}).") from error


# Which rank is unresponsive

BLAME_GRACE_SECONDS = 1.0  # time for the others to publish which rank they waited for


def find_unresponsive_rank(peer: int) -> int:
    """Returns the rank at the end of the chain of waits: whoever times out publishes which rank it waited for."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"waited for/{dist.get_rank()}", str(peer))
        seen, deadline = {dist.get_rank()}, time.monotonic() + BLAME_GRACE_SECONDS
        while peer not in seen:
            seen.add(peer)
            while not store.check([f"waited for/{peer}"]):
                if time.monotonic() > deadline:
                    return peer
                time.sleep(0.02)
            peer = int(store.get(f"waited for/{peer}"))
    except RuntimeError:
        pass  # without the store, our own peer is all we know
    return peer


# A parameter server, for comparison


def push_pull_schedule(rank: int, ranks: int, count: int, servers: int) -> list[P2PStep]:
    """Returns a rank's steps with a parameter server, the baseline of all-reduce: some or all ranks each serve a slice
    of the weights, to which all push their slice of the gradient and from which they pull the sum.
    `examples/cifar10/async_server.py` is an asynchronous one."""
    bounds = chunk_bounds(count, servers) + [count] * (ranks - servers)  # the first ranks serve one slice each
    offsets = range(1, ranks)

    def served(peer: int, owner: int) -> PeerSlice:  # the slice that `owner` serves, exchanged with `peer`
        return PeerSlice(peer % ranks, bounds[owner % ranks], bounds[owner % ranks + 1])

    push = [P2PStep(served(rank + offset, rank + offset), served(rank - offset, rank), True) for offset in offsets]
    pull = [P2PStep(served(rank + offset, rank), served(rank - offset, rank - offset)) for offset in offsets]
    return push + pull
