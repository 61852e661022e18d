"""Click logs: Criteo's format, and a generated log with the right skew.

A sample is one row of 64-bit words: label, places of all categories (-1: none), their weights, numbers. The last two
are stored as the bits of float64, so that a row travels like any other (`shardwise.data.loader`); `Clicks.of` reads it.

Criteo's files (Kaggle 2014, and the terabyte set): 40 fields a line, separated by tabs: label 0 or 1, 13 counts, 26
categories as 32-bit hashes in hexadecimal; any but the label may be missing. A count x becomes log(1 + max(x, 0)), a
missing one 0; a category becomes its hash modulo the rows of its table, a missing one an empty bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from shardwise.data.bad import Bad
from shardwise.data.stream import Samples
from shardwise.errors import DataError
from shardwise.kinds import DLRM
from shardwise.models.chain import IGNORED
from shardwise.random import mixed, unit, word_key

COUNTS, CATEGORIES = 13, 26
BLOCK = 16  # lines between two offsets that are kept
_U64 = np.uint64


@dataclass(frozen=True)
class Clicks:
    """Samples of a click log as tensors."""

    categories: Tensor
    """(B, tables, lookups) int64, -1 where there is none"""
    weights: Tensor
    """(B, tables, lookups) float64"""
    numbers: Tensor
    """(B, features) float64"""
    labels: Tensor
    """(B,) int64; below zero: does not count"""

    @classmethod
    def of(cls, samples: Samples, model: DLRM) -> Clicks:
        shape, size = (-1, model.tables, model.lookups), model.tables * model.lookups
        words = samples.tokens
        numbers = words[:, size:].contiguous().view(torch.float64)
        return cls(words[:, :size].view(shape), numbers[:, :size].view(shape), numbers[:, size:], samples.targets[:, 0])


class ClickSource:
    """Rows of clicks, from `first` on."""

    length = 1
    vocab = 2

    def __init__(self, model: DLRM, first: int, count: int):
        self.model, self.first, self.count = model, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        return self.rows(np.array([self.first + index]))[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """The samples at some places of the whole log, one below the other."""
        raise NotImplementedError

    def samples(self, indices: np.ndarray, places: np.ndarray) -> Samples:
        """The label is the target, all else is input."""
        words = torch.from_numpy(self.rows(self.first + indices))
        return Samples(words[:, 1:].contiguous(), words[:, :1].contiguous(), torch.from_numpy(places.astype(np.int64)))


def _packed(labels: np.ndarray, categories: np.ndarray, weights: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    count = len(labels)
    bits = np.concatenate((weights.reshape(count, -1), numbers), axis=1).astype(np.float64).view(np.int64)
    return np.concatenate((labels[:, None].astype(np.int64), categories.reshape(count, -1), bits), axis=1)


# Generated


class Generated(ClickSource):
    """A log by hash of (seed, index). How often a category comes falls with a power of its rank (Zipf, exponent
    `skew`); which rows the frequent ones are is mixed by table. Each category, and each number, pulls a click up or
    down by an amount of its own, so there is something to learn. One category in fifty is missing; with several lookups
    a bag has from one to all of them, with weights between 1/2 and 3/2."""

    skew = 1.05

    def __init__(self, model: DLRM, first: int, count: int, seed: int):
        super().__init__(model, first, count)
        self.key = word_key("clicks", seed)
        tables = np.arange(model.tables, dtype=_U64)
        self.sizes = np.array(model.sizes, dtype=_U64)[:, None]
        self.turn = _coprime(mixed(tables + self.key) % self.sizes[:, 0], model.sizes)
        self.shift = mixed(~(tables + self.key)) % self.sizes[:, 0]
        self.pull = np.linspace(-0.5, 0.5, model.features)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        model = self.model
        shape = (len(indices), model.tables, model.lookups)
        size = model.tables * model.lookups
        steps = np.arange(2 * size + model.tables + model.features + 1, dtype=_U64) * _U64(0x9E3779B97F4A7C15)
        drawn = mixed(mixed(indices.astype(_U64) ^ self.key)[:, None] + steps)
        which, weights, fill, noise, last = np.split(drawn, np.cumsum((size, size, model.tables, model.features)), 1)
        rank = _zipf(unit(which).reshape(shape), self.sizes, self.skew)
        categories = ((rank * self.turn[:, None] + self.shift[:, None]) % self.sizes).astype(np.int64)
        lengths = np.where(unit(fill) < 0.02, 0, 1 + (fill % _U64(model.lookups)).astype(np.int64))
        there = np.arange(model.lookups) < lengths[:, :, None]
        factors = there * (0.5 + unit(weights).reshape(shape) if model.lookups > 1 else 1.0)
        numbers = np.log1p(np.floor(-20.0 * np.log1p(-unit(noise))))
        tables = np.arange(model.tables, dtype=_U64)[:, None] << _U64(40)
        pulls = 2.0 * unit(mixed((categories.astype(_U64) + tables) ^ ~self.key)) - 1.0
        logits = 3.0 * (pulls * factors).sum((1, 2)) / np.sqrt(size) + (self.pull * (numbers - 2.5)).sum(1) - 1.0
        labels = unit(last[:, 0]) < 1.0 / (1.0 + np.exp(-logits))
        return _packed(labels, np.where(there, categories, -1), factors, numbers)


def _zipf(u: np.ndarray, counts: np.ndarray, skew: float) -> np.ndarray:
    """Ranks from 0 on whose frequency falls as rank^-skew: the inverse of the continuous law's distribution."""
    power = 1.0 - skew
    ranks = (((counts + _U64(1)).astype(np.float64) ** power - 1.0) * u + 1.0) ** (1.0 / power) - 1.0
    return np.minimum(ranks.astype(_U64), counts - _U64(1))


def _coprime(values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The next number from each value on that shares no factor with its count: multiples of it visit every row once."""
    found = []
    for value, count in zip(values.tolist(), counts, strict=True):
        while np.gcd(value, count) != 1:
            value += 1
        found.append(value)
    return np.array(found, dtype=_U64)


# Criteo's files


class Criteo(ClickSource):
    """One file, found through the offsets of some of its lines. A bad row that is passed over keeps its place in the
    stream as a sample that does not count."""

    def __init__(self, model: DLRM, path: Path, offsets: np.ndarray, first: int, count: int, bad: Bad | None = None):
        super().__init__(model, first, count)
        self.path, self.offsets, self.bad = path, offsets, bad or Bad()

    def rows(self, indices: np.ndarray) -> np.ndarray:
        with self.path.open("rb") as file:
            return np.concatenate([self._row(self._line(file, index), index) for index in indices.tolist()])

    def _row(self, line: bytes, index: int) -> np.ndarray:
        try:
            return parse(line, self.path, index + 1, self.model)
        except DataError as error:
            self.bad.tell(error)
        categories = np.full((1, CATEGORIES, self.model.lookups), -1, np.int64)
        return _packed(np.array([IGNORED]), categories, 0.0 * categories, np.zeros((1, COUNTS)))

    def _line(self, file: BinaryIO, index: int) -> bytes:
        begin, end = self.offsets[index // BLOCK : index // BLOCK + 2].tolist()
        file.seek(begin)
        return file.read(end - begin).split(b"\n")[index % BLOCK]


def open_criteo(path: Path) -> tuple[np.ndarray, int]:
    """Offsets of every 16th line and of the end, and how many lines there are. Reads the file once."""
    offsets, lines, place, last = [0], 0, 0, b"\n"
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
                offsets += (ends[BLOCK - 1 - lines % BLOCK :: BLOCK] + place + 1).tolist()
                lines, place, last = lines + len(ends), place + len(chunk), chunk[-1:]
    except OSError as error:
        raise DataError(f"data.path = '{path}' cannot be read: {error.strerror}.") from None
    if last != b"\n":
        lines += 1  # the last line has no end
    if not lines:
        raise DataError(f"data.path = '{path}' is empty; a Criteo file has a click in each line.")
    if offsets[-1] != place:
        offsets.append(place)
    return np.array(offsets, np.int64), lines


def parse(line: bytes, path: Path, number: int, model: DLRM) -> np.ndarray:
    """A line of 40 fields as a row; `number` counts lines from 1."""
    where = f"{path}, row {number}"
    fields = line.rstrip(b"\r").decode("utf-8", "replace").split("\t")
    if len(fields) != 1 + COUNTS + CATEGORIES:
        raise DataError(
            f"{where}: it has {len(fields)} fields, but a Criteo row has {1 + COUNTS + CATEGORIES}, separated by tabs: "
            f"label, {COUNTS} counts, {CATEGORIES} categories."
        )
    if fields[0] not in ("0", "1"):
        raise DataError(f"{where}, field 1 (label): {fields[0]!r} is neither 0 nor 1.")
    numbers = np.zeros(COUNTS)
    for place, text in enumerate(fields[1 : 1 + COUNTS]):
        try:
            numbers[place] = np.log1p(max(0, int(text))) if text else 0.0
        except (ValueError, OverflowError):
            raise DataError(f"{where}, field {place + 2} (count {place + 1}): {text!r} is no whole number.") from None
    categories = np.full((CATEGORIES, model.lookups), -1, np.int64)
    for place, text in enumerate(fields[1 + COUNTS :]):
        try:
            categories[place, 0] = int(text, 16) % model.sizes[place] if text else -1
        except ValueError:
            raise DataError(
                f"{where}, field {place + 2 + COUNTS} (category {place + 1}): {text!r} is no hexadecimal number."
            ) from None
    return _packed(np.array([int(fields[0])]), categories[None], 1.0 * (categories >= 0)[None], numbers[None])
