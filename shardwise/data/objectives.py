"""What a sample's tokens are turned into: what the model reads, and what it is to predict.

    Shifted   a decoder: every token from those before it
    Masked    BERT: a fixed number of positions, most of them hidden (80% a mask, 10% any token, 10% left as they are)
    Spans     T5: runs of tokens left out; the encoder reads the rest with a mark for each run, the decoder writes marks
              and runs. Encoder and decoder lie one behind the other in one row.

Images and clicks come with their targets. What is drawn depends on the seed and the sample's place in the stream alone.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shardwise.kinds import T5, Bert, Named
from shardwise.models.chain import IGNORED


class Objective(Protocol):
    def __call__(self, rows: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of some samples (`rows`: one token more than their source's length); -100 does not
        count."""


def objective_of(model: Named, seed: int) -> Objective:
    if isinstance(model, Bert):
        return Masked(model, seed)
    return Spans(model, seed) if isinstance(model, T5) else shifted


def shifted(rows: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows[:, :-1].clip(min=0), np.ascontiguousarray(rows[:, 1:])  # an ignored target is still some input


class Each:
    """Sample by sample."""

    def __call__(self, rows: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        made = [self.one(row, place) for row, place in zip(rows, places.tolist(), strict=True)]
        tokens, targets = map(np.stack, zip(*made, strict=True))
        return tokens, targets

    def one(self, row: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError


class Masked(Each):
    def __init__(self, model: Bert, seed: int):
        self.model, self.seed = model, seed

    def one(self, row: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
        model, draw = self.model, np.random.default_rng((self.seed, 1, place))
        row = row[: model.sequence]
        chosen = draw.permutation(model.sequence)[: model.predicted]
        targets = np.full_like(row, IGNORED)
        targets[chosen] = row[chosen]
        tokens, fate = row.clip(min=0), draw.random(model.predicted)
        tokens[chosen[fate < 0.8]] = model.mask
        anything = chosen[fate >= 0.9]
        tokens[anything] = draw.integers(0, model.vocab - model.spare, len(anything))
        return tokens, targets


class Spans(Each):
    def __init__(self, model: T5, seed: int):
        self.model, self.seed = model, seed

    def one(self, row: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
        model, draw = self.model, np.random.default_rng((self.seed, 2, place))
        row = row[: model.window]
        noise, spans = model.noise(len(row))
        out, kept = _parts(draw, noise, spans), _parts(draw, len(row) - noise, spans)
        reads: list[np.ndarray] = []
        writes: list[np.ndarray] = []
        at = 0
        for number, (before, left_out) in enumerate(zip(kept, out, strict=True)):
            mark = np.array([model.vocab - 1 - number])
            reads += [row[at : at + before], mark]
            writes += [mark, row[at + before : at + before + left_out]]
            at += before + left_out
        end = model.vocab - 1 - spans  # begin, end, and what fills up
        read = _filled(np.concatenate(reads), model.sequence, end, end)
        target = _filled(np.concatenate(writes), model.targets, end, IGNORED)
        begin = np.concatenate(([end], np.where(target[:-1] == IGNORED, end, target[:-1])))
        tokens = np.concatenate((read, begin)).clip(min=0)
        return tokens, np.concatenate((np.full_like(read, IGNORED), target))


def _parts(draw: np.random.Generator, total: int, count: int) -> np.ndarray:
    """`count` whole numbers of at least 1 that add up to `total`, all such rows alike likely."""
    cuts = np.sort(draw.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [total])))


def _filled(tokens: np.ndarray, length: int, end: int, filler: int) -> np.ndarray:
    found = np.full(length, filler, dtype=np.int64)
    found[: len(tokens)] = tokens
    found[len(tokens)] = end
    return found
