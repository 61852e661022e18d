"""Every all-reduce algorithm gives the exact sum, the same bits everywhere and the traffic of its formula; who does not
answer is named. A parameter server gives the same sums, and lets nobody run ahead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.world import run_world
from shardwise.errors import RunError

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("examples/cifar10", "benchmarks")]
import allreduce  # noqa: E402
from allreduce import (  # noqa: E402
    _chunk_size,
    all_reduce,
    chunk_bounds,
    get_schedule,
    push_pull_schedule,
    sent_bytes,
)
from async_server import ParameterServerWorker  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
COUNTS = (0, 1, 2, 7, 12, 61)
SEGMENT = 96  # bytes: some messages are cut into many


# The elements that a rank sends, by the formula of each algorithm.


def ring_sent_numel(rank: int, ranks: int, count: int) -> int:
    """A rank sends all chunks but one in each phase: 2 (ranks - 1) / ranks of the message if it divides evenly."""
    bounds = chunk_bounds(count, ranks)
    return 2 * count - _chunk_size(bounds, rank + 1) - _chunk_size(bounds, rank + 2) if ranks > 1 else 0


def halving_doubling_sent_numel(rank: int, ranks: int, count: int) -> int:
    """A folded rank sends the full message; a core rank 2 (core - 1) / core of it, plus all of it to a folded rank."""
    core_size = 1 << (ranks.bit_length() - 1)
    extra = ranks - core_size
    if rank < 2 * extra and rank % 2 == 0:
        return count
    core_rank = rank // 2 if rank < 2 * extra else rank - extra
    bounds = chunk_bounds(count, core_size)
    total = count - _chunk_size(bounds, core_rank) + (count if rank < 2 * extra else 0)
    for level in range(core_size.bit_length() - 1):
        first = core_rank >> level << level
        total += bounds[first + (1 << level)] - bounds[first]
    return total


def tree_sent_numel(rank: int, ranks: int, count: int) -> int:
    """A rank sends one full message to its parent and one to each child."""
    levels = (rank & -rank).bit_length() - 1 if rank else (ranks - 1).bit_length()
    children = sum(rank + (1 << level) < ranks for level in range(levels))
    return count * ((rank > 0) + children)


def two_level_sent_numel(rank: int, ranks: int, count: int, ranks_per_node: int) -> int:
    """A rank sends what a ring within the node sends, plus what a ring across nodes sends for its chunk."""
    node, local_rank = divmod(rank, ranks_per_node)
    chunk_size = _chunk_size(chunk_bounds(count, ranks_per_node), local_rank + 1)
    across_nodes = ring_sent_numel(node, ranks // ranks_per_node, chunk_size)
    return ring_sent_numel(local_rank, ranks_per_node, count) + across_nodes


def push_pull_sent_numel(rank: int, ranks: int, count: int, servers: int) -> int:
    """Returns the elements a rank sends: gradient slices to the servers, and its served slice to every other rank."""
    bounds = chunk_bounds(count, servers) + [count] * (ranks - servers)
    served = bounds[rank + 1] - bounds[rank]
    return count - served + (ranks - 1) * served


FORMULAS: dict[str, Any] = {
    "ring": ring_sent_numel,
    "halving": halving_doubling_sent_numel,
    "tree": tree_sent_numel,
    "two-level": partial(two_level_sent_numel, ranks_per_node=1),
}


def schedules(ranks: int) -> dict[str, tuple[Any, Any]]:
    """The schedule and the formula of every algorithm."""
    found: dict[str, tuple[Any, Any]] = {name: (get_schedule(name), FORMULAS[name]) for name in allreduce.ALGORITHMS}
    for node in range(1, ranks + 1):
        if ranks % node == 0:
            formula = partial(two_level_sent_numel, ranks_per_node=node)
            found[f"two-level {node}"] = (get_schedule("two-level", node), formula)
    for servers in {1, (ranks + 1) // 2, ranks}:
        found[f"server {servers}"] = (
            partial(push_pull_schedule, servers=servers),
            partial(push_pull_sent_numel, servers=servers),
        )
    return found


def sums() -> list[str]:
    """What goes wrong on one rank, over all algorithms, sizes and types."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong = []
    for name, (schedule, count_of) in schedules(ranks).items():
        for number, count in enumerate(COUNTS):
            for dtype in (DTYPES[(number + shift) % len(DTYPES)] for shift in (0, 3)):
                places = torch.arange(count)
                tensor = ((places + rank) % 7).to(dtype)
                expected = sum(((places + other) % 7 for other in range(ranks)), start=places * 0).to(dtype)
                sent = allreduce.run_schedule(tensor, schedule, name, segment_bytes=SEGMENT)
                if not torch.equal(tensor, expected):
                    wrong.append(f"{name}, {count} x {dtype}: {tensor}, not {expected}")
                size = tensor.element_size()
                bounds = allreduce.segment_bounds(count, size, SEGMENT)
                formula = size * sum(count_of(rank, ranks, last - first) for first, last in zip(bounds, bounds[1:]))
                if not sent == formula == sent_bytes(schedule, rank, ranks, count, size, SEGMENT):
                    wrong.append(f"{name}, {count} x {dtype}: sent {sent} bytes, not {formula}")
    return wrong


@pytest.mark.thin(4)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_sums_are_exact_and_traffic_is_the_formula(ranks: int) -> None:
    assert run_world(sums, ranks) == [[]] * ranks


def test_tensors_that_go_through_the_host() -> None:
    assert run_world(sums, 3, backend="host_staged") == [[]] * 3


def rounded(count: int) -> list[tuple[list[int], float]]:
    """The bits of sums that are rounded, and how far they are from the sum in float64."""
    found = []
    for name, (schedule, _) in schedules(dist.get_world_size()).items():
        generator = torch.Generator().manual_seed(dist.get_rank())
        tensor = torch.randn(count, generator=generator)
        wide = tensor.double()
        dist.all_reduce(wide)
        allreduce.run_schedule(tensor, schedule, name, segment_bytes=1 << 10)
        found.append((tensor.view(torch.int32).tolist(), float((tensor - wide).abs().max())))
    return found


def test_all_ranks_get_the_same_bits() -> None:
    first, *others = run_world(rounded, 6, 1001)
    assert all(error < 1e-5 for _, error in first)
    assert all(bits == theirs for other in others for (bits, _), (theirs, _) in zip(first, other, strict=True))


def in_a_group() -> tuple[list[float], int]:
    """Two groups of a world at the same time, whose ranks are not those of the world; a matrix; in place."""
    groups = [dist.new_group([1, 3, 5]), dist.new_group([0, 4, 2])]
    group = groups[dist.get_rank() % 2 == 0]
    matrix = torch.full((3, 5), float(dist.get_rank()))
    sent = all_reduce(matrix, "ring", group)
    return matrix.unique().tolist(), sent


def test_groups_of_a_world() -> None:
    found = run_world(in_a_group, 6)
    assert [sums for sums, _ in found] == [[6.0], [9.0]] * 3
    assert [sent for _, sent in found] == [2 * 2 * 5 * 4] * 6


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64, 1000])
def test_closed_forms(ranks: int) -> None:
    """Where the message divides; the sum over all ranks of what is sent at least."""
    count = 7 * 8 * 125 * 64
    for name in ("ring", "two-level"):
        shares = {FORMULAS[name](rank, ranks, count) / count for rank in range(ranks)}
        assert max(shares) == pytest.approx(2 * (ranks - 1) / ranks, rel=1e-3)
    assert sum(tree_sent_numel(rank, ranks, count) for rank in range(ranks)) == 2 * (ranks - 1) * count
    if ranks & (ranks - 1) == 0:
        assert halving_doubling_sent_numel(0, ranks, count) == 2 * (ranks - 1) * count // ranks


def lose(rank: int, name: str, how: signal.Signals, folder: str, end: Any) -> None:
    """A rank of four; rank 2 goes in the middle of a sum of many segments."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=2))
    tensor = torch.ones(1 << 16)
    all_reduce(tensor, name, ranks_per_node=2)
    if rank == 2:
        add = torch.Tensor.add_
        calls: list[int] = []

        def go(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), how)
            return add(*args)

        torch.Tensor.add_ = go  # type: ignore[method-assign, assignment]
    begin = time.monotonic()
    try:
        all_reduce(tensor, name, ranks_per_node=2, segment_bytes=1 << 12)
        end.send(("no error", 0.0))
    except RunError as error:
        end.send((str(error), time.monotonic() - begin))
    os._exit(0)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "how"), [("ring", signal.SIGKILL), ("halving", signal.SIGSTOP), ("tree", signal.SIGKILL),
                      ("two-level", signal.SIGSTOP)]
)  # fmt: skip
def test_who_does_not_answer_is_named(name: str, how: signal.Signals, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ends, workers = [], []
    for rank in range(4):
        here, there = context.Pipe(duplex=False)
        workers.append(context.Process(target=lose, args=(rank, name, how, str(tmp_path), there), daemon=True))
        workers[-1].start()
        there.close()
        ends.append(here)
    try:
        for rank in (0, 1, 3):
            assert ends[rank].poll(20)
            said, seconds = ends[rank].recv()
            assert said.startswith(f"rank 2 is not responding ({name} all-reduce, step "), (rank, said)
            assert seconds < 2 + 2 * allreduce.BLAME_GRACE_SECONDS + 1
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def descend(servers: int, staleness: int, rounds: int) -> tuple[float, int, list[float]]:
    """Ranks that each pull the weights towards their own target, rank 0 slowly: how far from the middle they end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(11, dtype=torch.float64)
    worker = ParameterServerWorker(
        weights, lambda own, gradient: own.sub_(gradient, alpha=0.05), servers, staleness, rounds
    )
    for _ in range(rounds):
        if rank == 0:
            time.sleep(0.005)
        worker.push_pull((weights - rank) / ranks)
    worker.join()
    dist.barrier()
    middle = (ranks - 1) / 2
    return float((weights - middle).abs().max()), worker.server.max_staleness if worker.server else 0, weights.tolist()


@pytest.mark.thin(4)
@pytest.mark.parametrize(("servers", "staleness"), [(1, 0), (2, 2), (3, 5)])
def test_asynchronous_server_bounds_staleness(servers: int, staleness: int) -> None:
    found = run_world(descend, 3, servers, staleness, 60)
    assert all(distance < 0.3 for distance, _, _ in found)
    widest = max(ahead for _, ahead, _ in found)
    assert widest <= staleness and (widest > 0) == (staleness > 0)


def too_many() -> None:
    ParameterServerWorker(torch.zeros(3), lambda own, gradient: None, 3, 0, 1)


def test_more_servers_than_ranks() -> None:
    with pytest.raises(RunError, match="3 servers among 2 ranks"):
        run_world(too_many, 2)


def leave(rank: int, victim: int, folder: str, end: Any, all_said: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    weights, said = torch.zeros(11, dtype=torch.float64), ""
    try:
        worker = ParameterServerWorker(weights, lambda own, gradient: own.sub_(gradient, alpha=0.05), 2, 1, 20)
        for number in range(20):
            if rank == victim and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            worker.push_pull(weights - rank)
        worker.join()
    except RunError as error:
        said = str(error)
    end.send(said)
    all_said.wait(60)  # others may still ask
    os._exit(0)


@pytest.mark.parametrize("victim", [1, 3])
def test_an_asynchronous_server_names_who_is_gone(victim: int, tmp_path: Path) -> None:
    """Ranks 0 and 1 serve. Without a worker all others make their rounds; without a server nobody does."""
    context = multiprocessing.get_context("fork")
    ends, all_said = {}, context.Event()
    for rank in range(4):
        here, there = context.Pipe(duplex=False)
        context.Process(target=leave, args=(rank, victim, str(tmp_path), there, all_said), daemon=True).start()
        there.close()
        ends[rank] = here
    said = {rank: end.recv() for rank, end in ends.items() if rank != victim and end.poll(60)}
    all_said.set()
    gone = f"rank {victim} is not responding (asynchronous parameter server, after round 5)."
    if victim == 3:
        assert said == {0: gone, 1: gone, 2: ""}
    else:
        assert set(said) == {0, 2, 3}
        assert all(word.startswith("rank 1 is not responding") for word in said.values()), said
