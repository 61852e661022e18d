"""The endless stream of samples of a run. Its state is one integer: how many samples were consumed.

Place `p` of the stream is sample `order(p mod n)` of epoch `p div n`, whatever the number of ranks; of a mixture, place
`p` is a place in the stream of one of its sources. Which places a data rank reads when is arithmetic (`share`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shardwise.data.objectives import Objective, shifted
from shardwise.data.source import Mixture, Source
from shardwise.errors import DataError
from shardwise.random import Permutation


@dataclass(frozen=True)
class Samples:
    """Some samples as tensors: tokens (B, S), targets (B, S), and their places in the stream (B,)."""

    tokens: Tensor
    targets: Tensor
    ids: Tensor
    documents: Tensor | None = None
    """Of every position of whole sequences, the number of its document (B, S); None: all are one."""

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a loader makes; documents are told apart on the device."""
        return self.tokens, self.targets, self.ids

    def split(self, size: int) -> Iterator[Samples]:
        parts = zip(self.tokens.split(size), self.targets.split(size), self.ids.split(size), strict=True)
        if self.documents is None:
            return (Samples(*part) for part in parts)
        return (Samples(*part, apart) for part, apart in zip(parts, self.documents.split(size), strict=True))

    @property
    def batch(self) -> dict[str, Tensor]:
        """What a model is given by keyword, but for targets."""
        return {"ids": self.ids} if self.documents is None else {"ids": self.ids, "documents": self.documents}

    def apart(self, end: int) -> Samples:
        """The same samples with their documents numbered; `end` is the last token of one, -1: none is."""
        if end < 0:
            return self
        ends = (self.tokens == end).int()
        return replace(self, documents=ends.cumsum(1, dtype=torch.int32) - ends)

    def to(self, device: torch.device) -> Samples:
        return Samples(*(t.to(device, non_blocking=True) for t in self.parts))


@runtime_checkable
class Packed(Protocol):
    """A source whose samples are no tokens with targets beside them: it makes them itself."""

    def samples(self, indices: np.ndarray, places: np.ndarray) -> Samples: ...


class Stream:
    def __init__(self, source: Source, seed: int, shuffle: bool = True, objective: Objective = shifted):
        self.source, self.seed, self.shuffle, self.objective = source, seed, shuffle, objective
        self._orders: dict[tuple[int, ...], Permutation] = {}

    def indices(self, places: np.ndarray) -> np.ndarray:
        """The samples at some places of the stream."""
        if not isinstance(self.source, Mixture):
            return self._ordered(places, len(self.source))
        which, own = self.source.split(places)
        found = np.empty_like(places)
        for number, part in enumerate(self.source.parts):
            here = which == number
            found[here] = self.source.first(number) + self._ordered(own[here], len(part), number)
        return found

    def _ordered(self, places: np.ndarray, count: int, *which: int) -> np.ndarray:
        """Samples of one source at places of its own stream."""
        if not self.shuffle:
            return places % count
        found = np.empty_like(places)
        for epoch in np.unique(places // count).tolist():
            key = (epoch, *which)
            if key not in self._orders:
                self._orders[key] = Permutation(count, "order", self.seed, *key)
            order = self._orders[key]
            here = places // count == epoch
            found[here] = order(places[here] % count)
        return found

    def read(self, places: np.ndarray) -> Samples:
        if isinstance(self.source, Packed):
            return self.source.samples(self.indices(places), places)
        rows = np.stack([self._sample(index) for index in self.indices(places).tolist()])
        parts = (*self.objective(rows, places), places.astype(np.int64))
        return Samples(*(torch.from_numpy(part) for part in parts))

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
