"""What a source of samples is, a part of one, and the one that needs no files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from shardwise.random import Permutation


class Source(Protocol):
    """A fixed list of samples, each of `length + 1` tokens: inputs are all but the last, targets all but the first."""

    length: int
    vocab: int
    """One more than the largest token that may come."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """The sample at `index` as int64, of `length + 1` tokens; -100 marks a target that does not count."""
        ...


class Part:
    """The samples `first` to `last` (without it) of another source: how training and validation share one list."""

    def __init__(self, source: Source, first: int, last: int):
        self.source, self.first, self.last = source, first, last
        self.length, self.vocab = source.length, source.vocab

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.source[self.first + index]


class Mixture:
    """Several sources in one stream, each with its share of the places; behind one another as a list.

    Which source a place gets is arithmetic: the first has its share of all places, evenly spread, the next its share of
    those that are left, and so on. So among any first places each has its share to within one for each source before
    it, and its samples come in an order and in epochs of its own.
    """

    BITS = 24  # of a share; with places below 2^39 products fit 64 bits

    def __init__(self, parts: Sequence[Source], weights: Sequence[float]):
        self.parts = tuple(parts)
        self.length, self.vocab = parts[0].length, max(part.vocab for part in parts)
        self.ends = list(accumulate(map(len, parts)))
        left = list(accumulate(reversed(weights)))[::-1]
        self._shares = [max(1, round(one / rest * 2**self.BITS)) for one, rest in zip(weights, left, strict=True)]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect_right(self.ends, index)
        return self.parts[which][index - self.first(which)]

    def first(self, which: int) -> int:
        """Where a source begins in the list."""
        return self.ends[which - 1] if which else 0

    def split(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each place its source, and the place in that source's own stream."""
        which, own = np.full_like(places, len(self.parts) - 1), places.copy()
        left = np.ones(len(places), bool)
        for number, share in enumerate(self._shares[:-1]):
            before, after = (own * share) >> self.BITS, ((own + 1) * share) >> self.BITS
            taken = left & (after > before)
            which[taken] = number
            own = np.where(taken, before, np.where(left, own - before, own))
            left &= ~taken
        return which, own


class Synthetic:
    """Random walks over the vocabulary: the next token follows from the last one but for some noise, so a model learns.

    The rule depends on the seed, a walk on seed and index: sources that differ in `count` share their first samples.
    """

    def __init__(self, count: int, length: int, vocab: int, seed: int):
        self.count, self.length, self.vocab, self.seed = count, length, vocab, seed
        # Row b takes 2^b steps of the rule at once, so that a run of any length is a few lookups instead of a loop.
        powers = [Permutation(vocab, "synthetic", seed)(np.arange(vocab))]
        for _ in range(length.bit_length() - 1):
            powers.append(powers[-1][powers[-1]])
        self._powers = powers

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        draw = np.random.default_rng((self.seed, index))
        drawn = draw.random(self.length + 1) < 0.1
        tokens = draw.integers(0, self.vocab, self.length + 1)
        drawn[0] = True
        places = np.arange(self.length + 1)
        last = np.maximum.accumulate(np.where(drawn, places, 0))  # the drawn token that each place comes from
        tokens, steps = tokens[last], places - last
        for power in self._powers[: int(steps.max()).bit_length()]:
            tokens = np.where(steps & 1, power[tokens], tokens)
            steps >>= 1
        return tokens.astype(np.int64)
