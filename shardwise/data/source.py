"""What a source of samples is, a part of one, and the one that needs no files."""

from __future__ import annotations

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
