"""The sources of samples, and the endless, stateless stream of a run: the stream position determines the sample.

Stream position p is sample `permutation(p mod n)` of epoch `p div n`, whatever the number of ranks. In a mixture each
source has its own stream, and each position of the mixture maps to a position in one of them. `rank_positions` computes
which positions a data-parallel rank reads in a step."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import DataError
from shardwise.job import Job
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.objectives import Objective, next_token
from shardwise.random import Permutation


class Source(Protocol):
    """A map-style dataset of `length + 1` tokens per sample: inputs are all but the last, targets all but the first."""

    length: int
    vocab: int  # vocabulary size: token ids are below it

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...  # `length + 1` int64 tokens; -100 marks an ignored target


class CountedSource:
    """The base of our sources: `count` samples, each of which `read_sample` reads."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self.count:
            raise IndexError(f"sample index {index} is out of range for {self.count} samples")
        return self.read_sample(index)

    def read_sample(self, index: int) -> np.ndarray:
        raise NotImplementedError


class Subset(CountedSource):
    """Samples [start, stop) of another source; splits it into training and validation."""

    def __init__(self, source: Source, start: int, stop: int):
        self.source, self.start, self.count = source, start, stop - start
        self.length, self.vocab = source.length, source.vocab

    def read_sample(self, index: int) -> np.ndarray:
        return self.source[self.start + index]


class Mixture(CountedSource):
    """Interleaves several sources in one stream by weight; as a dataset, their concatenation. The first source gets its
    share of all stream positions, evenly spread, the next its share of the rest, and so on. In any prefix of the stream
    each has its share, to within one sample per preceding source. Each is shuffled and repeated by itself."""

    WEIGHT_BITS = 24  # fixed-point bits of a weight; products fit 64 bits for positions below 2^39

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        self.sources = tuple(sources)
        self.length, self.vocab = sources[0].length, max(source.vocab for source in sources)
        *self.offsets, self.count = accumulate(map(len, sources), initial=0)  # of each source in the concatenation
        remaining = list(accumulate(reversed(weights)))[::-1]
        shares = [weight / rest for weight, rest in zip(weights, remaining, strict=True)]
        self._fixed_point_weights = [max(1, round(share * 2**self.WEIGHT_BITS)) for share in shares]

    def read_sample(self, index: int) -> np.ndarray:
        source_index = bisect_right(self.offsets, index) - 1
        return self.sources[source_index][index - self.offsets[source_index]]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each position's source and the position in that source's own stream."""
        source_index, source_positions = np.full_like(positions, len(self.sources) - 1), positions.copy()
        unassigned = np.ones(len(positions), bool)
        for number, weight in enumerate(self._fixed_point_weights[:-1]):
            before = (source_positions * weight) >> self.WEIGHT_BITS
            assigned = unassigned & (((source_positions + 1) * weight) >> self.WEIGHT_BITS > before)
            source_index[assigned] = number
            passed_on = np.where(unassigned, source_positions - before, source_positions)
            source_positions = np.where(assigned, before, passed_on)
            unassigned &= ~assigned
        return source_index, source_positions


class SyntheticTokens(CountedSource):
    """Generated token sequences: a permutation, by the seed, maps each token to the next, and 10% of tokens are random.
    Sources of different `count` share their samples."""

    def __init__(self, count: int, length: int, vocab: int, seed: int):
        self.count, self.length, self.vocab, self.seed = count, length, vocab, seed
        # powers[b] applies the permutation 2^b times: a run of any length takes a few lookups instead of a loop.
        powers = [Permutation(vocab, "synthetic", seed)(np.arange(vocab))]
        for _ in range(length.bit_length() - 1):
            powers.append(powers[-1][powers[-1]])
        self._powers = powers

    def read_sample(self, index: int) -> np.ndarray:
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


@dataclass(frozen=True)
class Samples:
    """A batch: tokens (B, S), targets (B, S) and ids (B,), which are the samples' stream positions. Sources of images
    and clicks store their inputs in `tokens` and their labels in `targets`."""

    tokens: Tensor
    targets: Tensor
    ids: Tensor
    document_ids: Tensor | None = None  # of each token of the full sequence (B, S); None: each is one document
    inputs: tuple[Tensor, ...] = ()  # tensors (B, ...) of a batch for a module that is not ours; all stages get them
    counts: Tensor | None = None  # targets of each sample (B,), if `targets` does not tell it; set with `inputs`
    preference: Tensor | None = None  # of pairs of answers (B, 2): reference and beta (`shardwise.models.preference`)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the loader provides, for `from_tensors`; document ids are computed later, on the device."""
        rest = (self.preference,) if self.counts is None else (self.counts, *self.inputs)
        return self.tokens, self.targets, self.ids, *(tensor for tensor in rest if tensor is not None)

    @classmethod
    def from_tensors(cls, tensors: Iterable[Tensor]) -> "Samples":
        tokens, targets, ids, *rest = tensors
        if len(rest) == 1:  # counts come with inputs
            return cls(tokens, targets, ids, preference=rest[0])
        return cls(tokens, targets, ids, None, tuple(rest[1:]), rest[0] if rest else None)

    @property
    def num_targets(self) -> Tensor:
        """The number of targets, without ignored ones."""
        return (self.targets != IGNORE_INDEX).sum() if self.counts is None else self.counts.sum()

    def split(self, size: int) -> "Iterator[Samples]":
        parts = map(Samples.from_tensors, zip(*(tensor.split(size) for tensor in self.tensors), strict=True))
        beside = {key: getattr(self, key) for key in ("document_ids", "preference")}
        split = {key: tensor.split(size) for key, tensor in beside.items() if tensor is not None}
        for number, part in enumerate(parts):
            yield replace(part, **{key: tensors[number] for key, tensors in split.items()})

    @property
    def forward_kwargs(self) -> dict[str, Tensor]:
        """The keyword arguments of a chain's forward besides tokens and targets."""
        beside = {"ids": self.ids, "document_ids": self.document_ids, "preference": self.preference}
        given = {key: tensor for key, tensor in beside.items() if tensor is not None}
        return {**given, **{f"input_{n}": tensor for n, tensor in enumerate(self.inputs)}}

    def with_document_ids(self, end_of_document: int) -> "Samples":
        """Sets `document_ids`: documents are numbered from 0 each ends with `end_of_document`; -1: None."""
        if end_of_document < 0:
            return self
        is_end = (self.tokens == end_of_document).int()
        return replace(self, document_ids=is_end.cumsum(1, dtype=torch.int32) - is_end)

    def with_packed_ids(self) -> "Samples":
        """Sets `document_ids` of rows in which the first token t of each document is stored as -1 - t."""
        is_first = self.tokens < 0
        tokens = torch.where(is_first, ~self.tokens, self.tokens)
        return replace(self, tokens=tokens, document_ids=is_first.cumsum(1, dtype=torch.int32))

    def to(self, device: torch.device) -> "Samples":
        return Samples.from_tensors(t.to(device, non_blocking=True) for t in self.tensors)


class SampleStream:
    def __init__(self, source: Source, seed: int, shuffle: bool = True, objective: Objective = next_token):
        self.source, self.seed, self.objective = source, seed, objective
        self.shuffle = shuffle and getattr(source, "stream", None) is None
        self._permutations: dict[tuple[int, ...], Permutation] = {}

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Returns the indices of the samples at these stream positions."""
        if not isinstance(self.source, Mixture):
            return self._shuffled_indices(positions, len(self.source))
        source_index, source_positions = self.source.locate(positions)
        indices = np.empty_like(positions)
        for number, source in enumerate(self.source.sources):
            mask = source_index == number
            shuffled = self._shuffled_indices(source_positions[mask], len(source), number)
            indices[mask] = self.source.offsets[number] + shuffled
        return indices

    def _shuffled_indices(self, positions: np.ndarray, count: int, *source_index: int) -> np.ndarray:
        """Returns sample indices for positions in one source's own stream."""
        if not self.shuffle:
            return positions % count
        indices = np.empty_like(positions)
        for epoch in sorted({*(positions // count).tolist()}):  # np.unique would import numpy.ma
            key = (epoch, *source_index)
            if key not in self._permutations:
                self._permutations[key] = Permutation(count, "order", self.seed, *key)
            mask = positions // count == epoch
            indices[mask] = self._permutations[key](positions[mask] % count)
        return indices

    def read(self, positions: np.ndarray) -> Samples:
        if hasattr(self.source, "samples"):  # it builds batches itself: its samples are not token sequences
            return self.source.samples(self.indices(positions), positions)  # type: ignore[no-any-return]
        rows = np.stack([read_sample(self.source, index) for index in self.indices(positions).tolist()])
        parts = (*self.objective(rows, positions), positions.astype(np.int64))
        return Samples.from_tensors(torch.from_numpy(part) for part in parts)


def read_sample(dataset: Any, index: int) -> Any:
    """Returns a sample; raises DataError if it cannot be read."""
    try:
        return dataset[index]
    except DataError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"sample {index} of {type(dataset).__name__} cannot be read: {cause}.") from error


def job_stream(job: Job, source: Source, shuffle: bool = True) -> SampleStream:
    """Returns the stream of a source with the job's seed and the objective of its model."""
    return SampleStream(source, job.seed, shuffle, job.family.objective(job.model, job.seed))


def rank_positions(step: int, global_batch_size: int, ranks: int, rank: int) -> np.ndarray:
    """Returns the stream positions that data-parallel rank `rank` of `ranks` reads in `step`."""
    per_rank = global_batch_size // ranks
    return np.arange(per_rank, dtype=np.int64) + (step * global_batch_size + rank * per_rank)
