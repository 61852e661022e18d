"""A parameter server as a baseline for all-reduce: some or all ranks each serve a slice of the weights.

Every rank sends each server its slice of the gradient and receives the sum, with a schedule like those of
`shardwise.comm.allreduce`. `examples/cifar10/async_server.py` is an asynchronous one.
"""

from shardwise.comm.allreduce import P2PStep, PeerSlice, chunk_bounds


def push_pull_schedule(rank: int, ranks: int, count: int, servers: int) -> list[P2PStep]:
    """Returns a rank's steps: push gradient slices to the servers, then pull the sums."""
    bounds = chunk_bounds(count, servers) + [count] * (
        ranks - servers
    )  # the first `servers` ranks serve one slice each
    offsets = range(1, ranks)

    def served(peer: int, owner: int) -> PeerSlice:  # the slice that `owner` serves, exchanged with `peer`
        return PeerSlice(peer % ranks, bounds[owner % ranks], bounds[owner % ranks + 1])

    push = [P2PStep(served(rank + offset, rank + offset), served(rank - offset, rank), True) for offset in offsets]
    pull = [P2PStep(served(rank + offset, rank), served(rank - offset, rank - offset)) for offset in offsets]
    return push + pull
