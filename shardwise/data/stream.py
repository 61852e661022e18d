"""The endless stream of samples of a run. Its state is one integer: how many samples were consumed.

Place `p` of the stream is sample `order(p mod n)` of epoch `p div n`, whatever the number of ranks. Which places a
data rank reads in which step is arithmetic (`share`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.data.objectives import Objective, shifted
from shardwise.data.source import Source
from shardwise.errors import DataError
from shardwise.random import Permutation


@dataclass(frozen=True)
class Samples:
    """Some samples as tensors: tokens (B, S), targets (B, S), and their places in the stream (B,)."""

    tokens: Tensor
    targets: Tensor
    ids: Tensor

    def split(self, size: int) -> Iterator[Samples]:
        parts = zip(self.tokens.split(size), self.targets.split(size), self.ids.split(size), strict=True)
        return (Samples(*part) for part in parts)

    def to(self, device: torch.device) -> Samples:
        return Samples(*(t.to(device, non_blocking=True) for t in (self.tokens, self.targets, self.ids)))


class Stream:
    def __init__(self, source: Source, seed: int, shuffle: bool = True, objective: Objective = shifted):
        self.source, self.seed, self.shuffle, self.objective = source, seed, shuffle, objective
        self._orders: dict[int, Permutation] = {}

    def indices(self, places: np.ndarray) -> np.ndarray:
        """The samples at some places of the stream."""
        count = len(self.source)
        if not self.shuffle:
            return places % count
        found = np.empty_like(places)
        for epoch in np.unique(places // count):
            order = self._orders.setdefault(int(epoch), Permutation(count, "order", self.seed, int(epoch)))
            here = places // count == epoch
            found[here] = order(places[here] % count)
        return found

    def read(self, places: np.ndarray) -> Samples:
        made = [
            self.objective(self._sample(int(index)), int(place))
            for index, place in zip(self.indices(places), places, strict=True)
        ]
        tokens, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*made, strict=True))
        return Samples(tokens, targets, torch.from_numpy(places.astype(np.int64)))

    def _sample(self, index: int) -> np.ndarray:
        try:
            return self.source[index]
        except DataError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise DataError(f"sample {index} of {type(self.source).__name__} cannot be read: {what}.") from error


def share(step: int, samples: int, ranks: int, rank: int) -> np.ndarray:
    """The places that data rank `rank` of `ranks` reads in `step`, of a global batch of `samples`."""
    own = samples // ranks
    return np.arange(own, dtype=np.int64) + (step * samples + rank * own)
