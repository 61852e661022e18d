"""What a source of samples is, and the one that needs no files."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shardwise.random import Permutation


class Source(Protocol):
    """A fixed list of samples. A sample is `length + 1` tokens: inputs are all but the last, targets all but the first."""

    length: int
    vocab: int
    """One more than the largest token that may come."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """The sample at `index` as int64, of `length + 1` tokens; -100 marks a target that does not count."""
        ...


class Synthetic:
    """Random walks over the vocabulary: the next token follows from the last one but for some noise, so a model learns."""

    def __init__(self, count: int, length: int, vocab: int, seed: int):
        self.count, self.length, self.vocab, self.seed = count, length, vocab, seed
        self._next = Permutation(vocab, "synthetic", seed)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        draw = np.random.default_rng((self.seed, index))
        noise = draw.random(self.length + 1) < 0.1
        tokens = draw.integers(0, self.vocab, self.length + 1)
        follow = self._next(np.arange(self.vocab))
        for i in range(1, self.length + 1):
            if not noise[i]:
                tokens[i] = follow[tokens[i - 1]]
        return tokens.astype(np.int64)
