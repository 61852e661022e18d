"""The `Source` protocol, subsets and mixtures of sources, and synthetic tokens."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from shardwise.random import Permutation


class Source(Protocol):
    """A map-style dataset of `length + 1` tokens per sample: inputs are all but the last, targets all but the first."""

    length: int
    vocab: int  # vocabulary size: token ids are below it

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns `length + 1` int64 tokens; -100 marks an ignored target."""
        ...


class Subset:
    """Samples [start, stop) of another source; splits it into training and validation."""

    def __init__(self, source: Source, start: int, stop: int):
        self.source, self.start, self.stop = source, start, stop
        self.length, self.vocab = source.length, source.vocab

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample index {index} is out of range for {len(self)} samples")
        return self.source[self.start + index]


class Mixture:
    """Interleaves several sources in one stream by weight; as a dataset, their concatenation.

    The first source gets its share of all stream positions, evenly spread, the next its share of the remaining ones,
    and so on. In any prefix of the stream each source has its share, to within one sample per preceding source. Each
    source is shuffled and repeated on its own.
    """

    WEIGHT_BITS = 24  # fixed-point bits of a weight; products fit 64 bits for positions below 2^39

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        self.sources = tuple(sources)
        self.length, self.vocab = sources[0].length, max(source.vocab for source in sources)
        self.cumulative_sizes = list(accumulate(map(len, sources)))
        remaining = list(accumulate(reversed(weights)))[::-1]
        shares = [weight / rest for weight, rest in zip(weights, remaining, strict=True)]
        self._fixed_point_weights = [max(1, round(share * 2**self.WEIGHT_BITS)) for share in shares]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample index {index} is out of range for {len(self)} samples")
        source_index = bisect_right(self.cumulative_sizes, index)
        return self.sources[source_index][index - self.offset(source_index)]

    def offset(self, source_index: int) -> int:
        """Returns the index of a source's first sample in the concatenation."""
        return self.cumulative_sizes[source_index - 1] if source_index else 0

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each position's source and the position in that source's own stream."""
        source_index, source_positions = np.full_like(positions, len(self.sources) - 1), positions.copy()
        unassigned = np.ones(len(positions), bool)
        for number, weight in enumerate(self._fixed_point_weights[:-1]):
            before = (source_positions * weight) >> self.WEIGHT_BITS
            after = ((source_positions + 1) * weight) >> self.WEIGHT_BITS
            assigned = unassigned & (after > before)
            source_index[assigned] = number
            passed_on = np.where(unassigned, source_positions - before, source_positions)
            source_positions = np.where(assigned, before, passed_on)
            unassigned &= ~assigned
        return source_index, source_positions


class SyntheticTokens:
    """Generated token sequences: a permutation, by the seed, maps each token to the next, and 10% of tokens are random.
    Sources of different `count` share their samples."""

    def __init__(self, count: int, length: int, vocab: int, seed: int):
        self.count, self.length, self.vocab, self.seed = count, length, vocab, seed
        # powers[b] applies the permutation 2^b times: a run of any length takes a few lookups instead of a loop.
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
        last_random = np.maximum.accumulate(np.where(is_random, positions, 0))
        tokens, steps = tokens[last_random], positions - last_random
        for power in self._powers[: int(steps.max()).bit_length()]:
            tokens = np.where(steps & 1, power[tokens], tokens)
            steps >>= 1
        return tokens.astype(np.int64)
