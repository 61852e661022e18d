"""Click logs: Criteo's format, and a generated log with the right skew.

A sample is one row of 64-bit words: label, places of all categories (-1: none), their weights, numbers. The last two
are stored as the bits of float64, so that a row travels like any other (`shardwise.data.loader`); `ClickBatch.of` reads it.

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

from shardwise.data.bad_records import BadRecords
from shardwise.data.sample_stream import Samples
from shardwise.errors import DataError
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.random import hash_key_uint64, mix64_numpy, to_unit_interval

NUM_DENSE_FEATURES, NUM_SPARSE_FEATURES = 13, 26
LINES_PER_OFFSET = 16  # lines between two offsets that are kept
_U64 = np.uint64


@dataclass(frozen=True)
class ClickBatch:
    """Samples of a click log as tensors."""

    sparse_ids: Tensor
    """(B, tables, lookups) int64, -1 where there is none"""
    weights: Tensor
    """(B, tables, lookups) float64"""
    dense_features: Tensor
    """(B, features) float64"""
    labels: Tensor
    """(B,) int64; below zero: does not count"""

    @classmethod
    def of(cls, samples: Samples, model: DLRMConfig) -> ClickBatch:
        shape, size = (-1, model.tables, model.lookups), model.tables * model.lookups
        packed = samples.tokens
        floats = packed[:, size:].contiguous().view(torch.float64)
        return cls(packed[:, :size].view(shape), floats[:, :size].view(shape), floats[:, size:], samples.targets[:, 0])


class ClickSource:
    """Rows of clicks, from `first` on."""

    length = 1
    vocab = 2

    def __init__(self, model: DLRMConfig, first: int, count: int):
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

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        """The label is the target, all else is input."""
        packed = torch.from_numpy(self.rows(self.first + indices))
        return Samples(
            packed[:, 1:].contiguous(), packed[:, :1].contiguous(), torch.from_numpy(positions.astype(np.int64))
        )


def _pack_rows(
    labels: np.ndarray, sparse_ids: np.ndarray, weights: np.ndarray, dense_features: np.ndarray
) -> np.ndarray:
    count = len(labels)
    bits = np.concatenate((weights.reshape(count, -1), dense_features), axis=1).astype(np.float64).view(np.int64)
    return np.concatenate((labels[:, None].astype(np.int64), sparse_ids.reshape(count, -1), bits), axis=1)


# Generated


class SyntheticClicks(ClickSource):
    """A log by hash of (seed, index). How often a category comes falls with a power of its rank (Zipf, exponent
    `skew`); which rows the frequent ones are is mixed by table. Each category, and each number, pulls a click up or
    down by an amount of its own, so there is something to learn. One category in fifty is missing; with several lookups
    a bag has from one to all of them, with weights between 1/2 and 3/2."""

    zipf_exponent = 1.05

    def __init__(self, model: DLRMConfig, first: int, count: int, seed: int):
        super().__init__(model, first, count)
        self.key = hash_key_uint64("clicks", seed)
        tables = np.arange(model.tables, dtype=_U64)
        self.table_rows = np.array(model.table_rows, dtype=_U64)[:, None]
        self.row_multiplier = _next_coprime(mix64_numpy(tables + self.key) % self.table_rows[:, 0], model.table_rows)
        self.row_offset = mix64_numpy(~(tables + self.key)) % self.table_rows[:, 0]
        self.dense_effects = np.linspace(-0.5, 0.5, model.dense_features)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        model = self.model
        shape = (len(indices), model.tables, model.lookups)
        size = model.tables * model.lookups
        hash_increments = np.arange(2 * size + model.tables + model.dense_features + 1, dtype=_U64) * _U64(
            0x9E3779B97F4A7C15
        )
        bits = mix64_numpy(mix64_numpy(indices.astype(_U64) ^ self.key)[:, None] + hash_increments)
        category_bits, weight_bits, length_bits, dense_bits, label_bits = np.split(
            bits, np.cumsum((size, size, model.tables, model.dense_features)), 1
        )
        rank = _zipf_ranks(to_unit_interval(category_bits).reshape(shape), self.table_rows, self.zipf_exponent)
        sparse_ids = ((rank * self.row_multiplier[:, None] + self.row_offset[:, None]) % self.table_rows).astype(
            np.int64
        )
        lengths = np.where(
            to_unit_interval(length_bits) < 0.02, 0, 1 + (length_bits % _U64(model.lookups)).astype(np.int64)
        )
        present = np.arange(model.lookups) < lengths[:, :, None]
        bag_weights = present * (0.5 + to_unit_interval(weight_bits).reshape(shape) if model.lookups > 1 else 1.0)
        dense_features = np.log1p(np.floor(-20.0 * np.log1p(-to_unit_interval(dense_bits))))
        tables = np.arange(model.tables, dtype=_U64)[:, None] << _U64(40)
        sparse_effects = 2.0 * to_unit_interval(mix64_numpy((sparse_ids.astype(_U64) + tables) ^ ~self.key)) - 1.0
        logits = (
            3.0 * (sparse_effects * bag_weights).sum((1, 2)) / np.sqrt(size)
            + (self.dense_effects * (dense_features - 2.5)).sum(1)
            - 1.0
        )
        labels = to_unit_interval(label_bits[:, 0]) < 1.0 / (1.0 + np.exp(-logits))
        return _pack_rows(labels, np.where(present, sparse_ids, -1), bag_weights, dense_features)


def _zipf_ranks(u: np.ndarray, counts: np.ndarray, exponent: float) -> np.ndarray:
    """Ranks from 0 on whose frequency falls as rank^-skew: the inverse of the continuous law's distribution."""
    power = 1.0 - exponent
    ranks = (((counts + _U64(1)).astype(np.float64) ** power - 1.0) * u + 1.0) ** (1.0 / power) - 1.0
    return np.minimum(ranks.astype(_U64), counts - _U64(1))


def _next_coprime(values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The next number from each value on that shares no factor with its count: multiples of it visit every row once."""
    found = []
    for value, count in zip(values.tolist(), counts, strict=True):
        while np.gcd(value, count) != 1:
            value += 1
        found.append(value)
    return np.array(found, dtype=_U64)


# Criteo's files


class CriteoClicks(ClickSource):
    """One file, found through the offsets of some of its lines. A bad row that is passed over keeps its place in the
    stream as a sample that does not count."""

    def __init__(
        self,
        model: DLRMConfig,
        path: Path,
        offsets: np.ndarray,
        first: int,
        count: int,
        bad_records: BadRecords | None = None,
    ):
        super().__init__(model, first, count)
        self.path, self.offsets, self.bad_records = path, offsets, bad_records or BadRecords()

    def rows(self, indices: np.ndarray) -> np.ndarray:
        with self.path.open("rb") as file:
            return np.concatenate([self._parse_row(self._read_line(file, index), index) for index in indices.tolist()])

    def _parse_row(self, line: bytes, index: int) -> np.ndarray:
        try:
            return parse_criteo_row(line, self.path, index + 1, self.model)
        except DataError as error:
            self.bad_records.report(error)
        sparse_ids = np.full((1, NUM_SPARSE_FEATURES, self.model.lookups), -1, np.int64)
        return _pack_rows(np.array([IGNORE_INDEX]), sparse_ids, 0.0 * sparse_ids, np.zeros((1, NUM_DENSE_FEATURES)))

    def _read_line(self, file: BinaryIO, index: int) -> bytes:
        begin, end = self.offsets[index // LINES_PER_OFFSET : index // LINES_PER_OFFSET + 2].tolist()
        file.seek(begin)
        return file.read(end - begin).split(b"\n")[index % LINES_PER_OFFSET]


def index_criteo_file(path: Path) -> tuple[np.ndarray, int]:
    """Offsets of every 16th line and of the end, and how many lines there are. Reads the file once."""
    offsets, lines, position, last_byte = [0], 0, 0, b"\n"
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
                offsets += (
                    ends[LINES_PER_OFFSET - 1 - lines % LINES_PER_OFFSET :: LINES_PER_OFFSET] + position + 1
                ).tolist()
                lines, position, last_byte = lines + len(ends), position + len(chunk), chunk[-1:]
    except OSError as error:
        raise DataError(f"data.path = '{path}' cannot be read: {error.strerror}.") from None
    if last_byte != b"\n":
        lines += 1  # the last line has no end
    if not lines:
        raise DataError(f"data.path = '{path}' is empty; a Criteo file has a click in each line.")
    if offsets[-1] != position:
        offsets.append(position)
    return np.array(offsets, np.int64), lines


def parse_criteo_row(line: bytes, path: Path, line_number: int, model: DLRMConfig) -> np.ndarray:
    """A line of 40 fields as a row; `number` counts lines from 1."""
    where = f"{path}, row {line_number}"
    fields = line.rstrip(b"\r").decode("utf-8", "replace").split("\t")
    if len(fields) != 1 + NUM_DENSE_FEATURES + NUM_SPARSE_FEATURES:
        raise DataError(
            f"{where}: it has {len(fields)} fields, but a Criteo row has {1 + NUM_DENSE_FEATURES + NUM_SPARSE_FEATURES}, separated by tabs: "
            f"label, {NUM_DENSE_FEATURES} counts, {NUM_SPARSE_FEATURES} categories."
        )
    if fields[0] not in ("0", "1"):
        raise DataError(f"{where}, field 1 (label): {fields[0]!r} is neither 0 nor 1.")
    dense_features = np.zeros(NUM_DENSE_FEATURES)
    for place, text in enumerate(fields[1 : 1 + NUM_DENSE_FEATURES]):
        try:
            dense_features[place] = np.log1p(max(0, int(text))) if text else 0.0
        except (ValueError, OverflowError):
            raise DataError(f"{where}, field {place + 2} (count {place + 1}): {text!r} is no whole number.") from None
    sparse_ids = np.full((NUM_SPARSE_FEATURES, model.lookups), -1, np.int64)
    for place, text in enumerate(fields[1 + NUM_DENSE_FEATURES :]):
        try:
            sparse_ids[place, 0] = int(text, 16) % model.table_rows[place] if text else -1
        except ValueError:
            raise DataError(
                f"{where}, field {place + 2 + NUM_DENSE_FEATURES} (category {place + 1}): {text!r} is no hexadecimal number."
            ) from None
    return _pack_rows(np.array([int(fields[0])]), sparse_ids[None], 1.0 * (sparse_ids >= 0)[None], dense_features[None])
