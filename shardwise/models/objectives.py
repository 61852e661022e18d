"""Training objectives: how a window of tokens becomes inputs and targets.

    next_token      decoders: predict every token from those before it
    MaskedLM        BERT: predict a fixed number of positions (80% masked, 10% replaced at random, 10% unchanged)
    SpanCorruption  T5: sentinels replace spans in the encoder's input, and the decoder predicts the spans; encoder and
                    decoder inputs are concatenated into one row

Images and clicks have their own targets. Random choices depend only on the seed and the sample's place in the stream.
"""

from collections.abc import Callable

import numpy as np

from shardwise.models.bert_family import BertConfig
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.t5_family import T5Config

Objective = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From windows, each one token longer than the source's length, and their positions in the stream to inputs and
targets; -100 is ignored."""


def next_token(rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows[:, :-1].clip(min=0), np.ascontiguousarray(rows[:, 1:])  # ignored targets (-100) are not valid inputs


class PerSampleObjective:
    """Base class of objectives that transform one sample at a time."""

    def __call__(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        transformed = [self.transform(row, position) for row, position in zip(rows, positions.tolist(), strict=True)]
        tokens, targets = map(np.stack, zip(*transformed, strict=True))
        return tokens, targets

    def transform(self, row: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError


class MaskedLM(PerSampleObjective):
    def __init__(self, model: BertConfig, seed: int):
        self.model, self.seed = model, seed

    def transform(self, row: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        model, rng = self.model, np.random.default_rng((self.seed, 1, position))
        row = row[: model.sequence]
        masked_positions = rng.permutation(model.sequence)[: model.max_predictions]
        targets = np.full_like(row, IGNORE_INDEX)
        targets[masked_positions] = row[masked_positions]
        tokens, draws = row.clip(min=0), rng.random(model.max_predictions)
        tokens[masked_positions[draws < 0.8]] = model.resolved_mask_id
        randomized = masked_positions[draws >= 0.9]
        tokens[randomized] = rng.integers(0, model.vocab_size - model.reserved_ids, len(randomized))
        return tokens, targets


class SpanCorruption(PerSampleObjective):
    def __init__(self, model: T5Config, seed: int, eos: int | None = None, start: int | None = None):
        """`eos`, `start`: ids of the end and of the decoder's first token; None: an id next to the sentinels."""
        self.model, self.seed, self.eos, self.start = model, seed, eos, start

    def transform(self, row: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        model, rng = self.model, np.random.default_rng((self.seed, 2, position))
        row = row[: model.text_window]
        noise, spans = model.noise_counts(len(row))
        noise_lengths = _random_partition(rng, noise, spans)
        kept_lengths = _random_partition(rng, len(row) - noise, spans)
        encoder_chunks: list[np.ndarray] = []
        decoder_chunks: list[np.ndarray] = []
        start = 0
        for number, (kept, masked) in enumerate(zip(kept_lengths, noise_lengths, strict=True)):
            sentinel = np.array([model.vocab - 1 - number])
            encoder_chunks += [row[start : start + kept], sentinel]
            decoder_chunks += [sentinel, row[start + kept : start + kept + masked]]
            start += kept + masked
        eos = model.vocab - 1 - spans if self.eos is None else self.eos  # end and padding token
        encoder_tokens = _pad_with_eos(np.concatenate(encoder_chunks), model.sequence, eos, eos)
        decoder_targets = _pad_with_eos(np.concatenate(decoder_chunks), model.target_sequence, eos, IGNORE_INDEX)
        previous_targets = np.where(decoder_targets[:-1] == IGNORE_INDEX, eos, decoder_targets[:-1])
        start_token = eos if self.start is None else self.start
        tokens = np.concatenate((encoder_tokens, [start_token], previous_targets)).clip(min=0)
        return tokens, np.concatenate((np.full_like(encoder_tokens, IGNORE_INDEX), decoder_targets))


def _random_partition(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    """Returns `count` positive integers that sum to `total`, uniformly over all such partitions."""
    return np.diff(np.concatenate(([0], np.sort(rng.permutation(total - 1)[: count - 1]) + 1, [total])))


def _pad_with_eos(tokens: np.ndarray, length: int, eos: int, padding: int) -> np.ndarray:
    return np.pad(np.append(tokens, eos), (0, length - len(tokens) - 1), constant_values=padding)
