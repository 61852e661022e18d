"""An asynchronous parameter server, for comparison with all-reduce; some or all ranks each serve a slice of weights.

A server applies gradients as they arrive and replies with its current weights, but lets no rank run more than
`staleness` rounds ahead of the slowest (Ho et al., 2013). If a worker dies, the others continue and the error names it
at the end; if a server dies, its clients raise at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RunError

UpdateFn = Callable[[Tensor, Tensor], object]  # updates the weights in place, given a gradient
PUSH_TAG, PULL_TAG = 1, 2  # a rank's worker and server threads share one process group


class AsyncParameterServer:
    """Serves a slice of the weights, with one thread per other rank."""

    def __init__(
        self, weights: Tensor, update: UpdateFn, staleness: int, rounds: int, report_dead: Callable[[int], None]
    ):
        self.weights, self.update, self.staleness, self.rounds = weights, update, staleness, rounds
        self.report_dead = report_dead
        self.rounds_done = [0] * dist.get_world_size()
        self.max_staleness = 0
        """The largest lead, in rounds, of any rank over the slowest."""
        self.dead_ranks: dict[int, int] = {}
        """Ranks that stopped responding, with the rounds they completed."""
        self.condition = threading.Condition()
        clients = [rank for rank in range(len(self.rounds_done)) if rank != dist.get_rank()]
        self.threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in clients]
        for thread in self.threads:
            thread.start()

    def apply_gradient(self, rank: int, gradient: Tensor) -> Tensor:
        """Applies a rank's gradient; returns the weights once the staleness bound lets the rank continue."""
        with self.condition:
            self.update(self.weights, gradient)
            self.rounds_done[rank] += 1
            self.condition.notify_all()
            self.condition.wait_for(lambda: self._rounds_ahead(rank) <= self.staleness)
            self.max_staleness = max(self.max_staleness, self._rounds_ahead(rank))
            return self.weights.clone()

    def _rounds_ahead(self, rank: int) -> int:
        """Returns a rank's lead, in rounds, over the slowest live rank."""
        live_rounds = [rounds for other, rounds in enumerate(self.rounds_done) if other not in self.dead_ranks]
        return self.rounds_done[rank] - min(live_rounds)

    def _serve(self, rank: int) -> None:
        gradient = torch.empty_like(self.weights)
        try:
            for _ in range(self.rounds):
                dist.recv(gradient, rank, tag=PUSH_TAG)
                dist.send(self.apply_gradient(rank, gradient), rank, tag=PULL_TAG)
        except RuntimeError:
            self.wait_no_longer_for(rank)
            self.report_dead(rank)

    def wait_no_longer_for(self, rank: int) -> None:
        with self.condition:
            self.dead_ranks[rank] = self.rounds_done[rank]
            self.condition.notify_all()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        if self.dead_ranks:
            raise RunError(" ".join(_no_response(rank, rounds) for rank, rounds in sorted(self.dead_ranks.items())))


def _no_response(rank: int, rounds_done: int) -> str:
    return f"rank {rank} is not responding (asynchronous parameter server, after round {rounds_done})."


class ParameterServerWorker:
    """A rank's client, and its server if it serves a slice. Every rank must run the same number of rounds."""

    def __init__(self, weights: Tensor, update: UpdateFn, servers: int, staleness: int, rounds: int):
        self.weights, self.rank = weights.view(-1), dist.get_rank()
        if not 1 <= servers <= dist.get_world_size():
            raise RunError(
                f"{servers} servers among {dist.get_world_size()} ranks: use at least 1 and at most all ranks."
            )
        bounds = [index * self.weights.numel() // servers for index in range(servers + 1)]
        self.slices = [slice(*ends) for ends in zip(bounds, bounds[1:])]
        served = self.weights[self.slices[self.rank]].clone() if self.rank < servers else None
        self.answers = queue.SimpleQueue[int | None]()
        """None for each server that answered, or the rank of a dead one."""
        self.server = None
        if served is not None:
            self.server = AsyncParameterServer(served, update, staleness, rounds, self._report_dead)
        self.rounds_done = 0

    def push_pull(self, gradient: Tensor) -> None:
        """Sends a gradient to the servers and receives the updated weights; the first server found dead is named."""
        flat = gradient.view(-1)
        for server, server_slice in enumerate(self.slices):
            part, pending = flat[server_slice], []
            if server != self.rank:
                try:
                    pending = [
                        dist.isend(part, server, tag=PUSH_TAG),
                        dist.irecv(self.weights[server_slice], server, tag=PULL_TAG),
                    ]
                except RuntimeError:
                    raise self._lost(server) from None
            # A thread each: a live server may hold this rank back for one that a dead server has stopped.
            threading.Thread(target=self._await_weights, args=(server, part, pending), daemon=True).start()
        for _ in self.slices:
            dead = self.answers.get()
            if dead is not None:
                raise self._lost(dead)
        self.rounds_done += 1

    def _await_weights(self, server: int, part: Tensor, pending: list[dist.Work | None]) -> None:
        try:
            if server == self.rank:
                assert self.server is not None
                self.weights[self.slices[server]] = self.server.apply_gradient(self.rank, part)
            for work in pending:
                assert work is not None
                work.wait()
            self.answers.put(None)
        except RuntimeError:
            self.answers.put(server)

    def _report_dead(self, rank: int) -> None:
        """Ends a wait: Gloo may leave one of two threads waiting for a rank that the other has found dead."""
        if rank < len(self.slices):
            self.answers.put(rank)

    def _lost(self, server: int) -> RunError:
        """Ends this rank's rounds: others would wait for it at its own server and blame it, not the dead one."""
        if self.server is not None:
            self.server.wait_no_longer_for(self.rank)
        return RunError(_no_response(server, self.rounds_done))

    def join(self) -> None:
        """Waits until every rank has completed its rounds."""
        if self.server is not None:
            self.server.join()
