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


class Subset:
    """The samples `first` to `last` (without it) of another source: how training and validation share one list."""

    def __init__(self, source: Source, start: int, stop: int):
        self.source, self.start, self.stop = source, start, stop
        self.length, self.vocab = source.length, source.vocab

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.source[self.start + index]


class Mixture:
    """Several sources in one stream, each with its share of the places; behind one another as a list.

    Which source a place gets is arithmetic: the first has its share of all places, evenly spread, the next its share of
    those that are left, and so on. So among any first places each has its share to within one for each source before
    it, and its samples come in an order and in epochs of its own.
    """

    WEIGHT_BITS = 24  # of a share; with places below 2^39 products fit 64 bits

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        self.sources = tuple(sources)
        self.length, self.vocab = sources[0].length, max(source.vocab for source in sources)
        self.cumulative_sizes = list(accumulate(map(len, sources)))
        remaining = list(accumulate(reversed(weights)))[::-1]
        self._fixed_point_weights = [
            max(1, round(weight / rest * 2**self.WEIGHT_BITS)) for weight, rest in zip(weights, remaining, strict=True)
        ]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source_index = bisect_right(self.cumulative_sizes, index)
        return self.sources[source_index][index - self.offset(source_index)]

    def offset(self, source_index: int) -> int:
        """Where a source begins in the list."""
        return self.cumulative_sizes[source_index - 1] if source_index else 0

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each place its source, and the place in that source's own stream."""
        source_index, source_positions = np.full_like(positions, len(self.sources) - 1), positions.copy()
        unassigned = np.ones(len(positions), bool)
        for number, weight in enumerate(self._fixed_point_weights[:-1]):
            before, after = (
                (source_positions * weight) >> self.WEIGHT_BITS,
                ((source_positions + 1) * weight) >> self.WEIGHT_BITS,
            )
            assigned = unassigned & (after > before)
            source_index[assigned] = number
            source_positions = np.where(
                assigned, before, np.where(unassigned, source_positions - before, source_positions)
            )
            unassigned &= ~assigned
        return source_index, source_positions


class SyntheticTokens:
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
        rng = np.random.default_rng((self.seed, index))
        is_random = rng.random(self.length + 1) < 0.1
        tokens = rng.integers(0, self.vocab, self.length + 1)
        is_random[0] = True
        positions = np.arange(self.length + 1)
        last_random = np.maximum.accumulate(
            np.where(is_random, positions, 0)
        )  # the drawn token that each place comes from
        tokens, steps = tokens[last_random], positions - last_random
        for power in self._powers[: int(steps.max()).bit_length()]:
            tokens = np.where(steps & 1, power[tokens], tokens)
            steps >>= 1
        return tokens.astype(np.int64)
