"""A parameter server, to compare all-reduce with: some ranks, or all, hold a slice of the weights each.

Synchronous (`exchange`): everyone sends a server its slice of the gradient and gets back the sum; a schedule like those
of `shardwise.comm.allreduce`. Asynchronous (`Server`, `Worker`): a server updates its weights as gradients come and
answers with what it has, but lets nobody run more than `staleness` rounds ahead of the slowest (Ho et al., 2013).
A rank that dies is left behind, and named at the end; one that served a slice is named at once by those who ask it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.allreduce import Bounds, Part, Step, cut
from shardwise.errors import RunError

Update = Callable[[Tensor, Tensor], object]  # of weights and a gradient, in place
PUSH, PULL = 1, 2  # tags: a rank's thread and its server's threads share the group


def slices(count: int, ranks: int, servers: int) -> Bounds:
    """The ends of the slices; the first `servers` ranks hold one each."""
    return cut(count, servers) + [count] * (ranks - servers)


def exchange(rank: int, ranks: int, count: int, servers: int) -> list[Step]:
    bounds, turns = slices(count, ranks, servers), range(1, ranks)

    def part(peer: int, of: int) -> Part:
        return Part(peer % ranks, bounds[of % ranks], bounds[of % ranks + 1])

    push = [Step(part(rank + turn, rank + turn), part(rank - turn, rank), True) for turn in turns]
    pull = [Step(part(rank + turn, rank), part(rank - turn, rank - turn)) for turn in turns]
    return push + pull


def exchange_count(rank: int, ranks: int, count: int, servers: int) -> int:
    """What others serve of the gradient, and to each other rank what this one serves."""
    bounds = slices(count, ranks, servers)
    own = bounds[rank + 1] - bounds[rank]
    return count - own + (ranks - 1) * own


class Server:
    """A slice of the weights, served by a thread for each other rank."""

    def __init__(self, weights: Tensor, update: Update, staleness: int, rounds: int):
        self.weights, self.update, self.staleness, self.rounds = weights, update, staleness, rounds
        self.done = [0] * dist.get_world_size()
        self.widest = 0
        """The most rounds that one rank was ever ahead of another."""
        self.lost: dict[int, int] = {}
        """Ranks that do not answer, and after how many rounds."""
        self.changed = threading.Condition()
        others = [rank for rank in range(len(self.done)) if rank != dist.get_rank()]
        self.threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in others]
        for thread in self.threads:
            thread.start()

    def take(self, rank: int, gradient: Tensor) -> Tensor:
        """Updates with a rank's gradient; returns the weights once the rank may go on."""
        with self.changed:
            self.update(self.weights, gradient)
            self.done[rank] += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._ahead(rank) <= self.staleness)
            self.widest = max(self.widest, self._ahead(rank))
            return self.weights.clone()

    def _ahead(self, rank: int) -> int:
        """Rounds before the slowest that still answers."""
        return self.done[rank] - min(done for other, done in enumerate(self.done) if other not in self.lost)

    def _serve(self, rank: int) -> None:
        gradient = torch.empty_like(self.weights)
        try:
            for _ in range(self.rounds):
                dist.recv(gradient, rank, tag=PUSH)
                dist.send(self.take(rank, gradient), rank, tag=PULL)
        except RuntimeError:
            with self.changed:
                self.lost[rank] = self.done[rank]
                self.changed.notify_all()

    def finish(self) -> None:
        for thread in self.threads:
            thread.join()
        if self.lost:
            raise RunError(" ".join(_silent(rank, done) for rank, done in sorted(self.lost.items())))


def _silent(rank: int, done: int) -> str:
    return f"rank {rank} does not answer (asynchronous server, after round {done})."


class Worker:
    """One rank's end, and the slice that it serves where it serves one. Every rank makes as many rounds."""

    def __init__(self, weights: Tensor, update: Update, servers: int, staleness: int, rounds: int):
        self.weights, self.rank = weights.view(-1), dist.get_rank()
        if not 1 <= servers <= dist.get_world_size():
            raise RunError(f"{servers} servers among {dist.get_world_size()} ranks: at least one, at most all.")
        bounds = cut(self.weights.numel(), servers)
        self.spans = [slice(*ends) for ends in zip(bounds, bounds[1:])]
        own = self.weights[self.spans[self.rank]].clone() if self.rank < servers else None
        self.server = Server(own, update, staleness, rounds) if own is not None else None
        self.done = 0

    def round(self, gradient: Tensor) -> None:
        """Sends a gradient; puts what the servers answer into the weights."""
        flat, waits = gradient.view(-1), []
        for server, span in enumerate(self.spans):
            if server != self.rank:
                try:
                    sent = dist.isend(flat[span], server, tag=PUSH)
                    waits.append((server, sent, dist.irecv(self.weights[span], server, tag=PULL)))
                except RuntimeError:
                    raise RunError(_silent(server, self.done)) from None
        if self.server is not None:
            self.weights[self.spans[self.rank]] = self.server.take(self.rank, flat[self.spans[self.rank]])
        for server, sent, answer in waits:
            assert sent is not None and answer is not None
            try:
                sent.wait()
                answer.wait()
            except RuntimeError:
                raise RunError(_silent(server, self.done)) from None
        self.done += 1

    def finish(self) -> None:
        """Until every rank has made its rounds."""
        if self.server is not None:
            self.server.finish()
