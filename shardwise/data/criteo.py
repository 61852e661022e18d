"""Click logs for DLRM: files in Criteo's format, and a synthetic log with a Zipf distribution of ids.

A sample is one int64 row: label, sparse ids (-1: none), their weights, dense features. Weights and dense features are
stored as the bits of float64, so that the loader handles a row like any other; `ClickBatch.unpack` unpacks it. A line
of a Criteo file (Kaggle 2014 and the terabyte set) has 40 tab-separated fields: label 0 or 1, 13 integer features, 26
categorical features as 32-bit hashes in hexadecimal. All but the label may be missing. An integer x turns into log(1 +
max(x, 0)), a missing one into 0; a category into its hash modulo the table's rows, or an empty bag."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from shardwise.data.input_files import DECOMPRESSORS, BadRecords, DataFile
from shardwise.data.sample_stream import CountedSource, Samples
from shardwise.errors import DataError
from shardwise.files import os_errors_as
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.random import GOLDEN_GAMMA, hash_key_uint64, mix64_numpy, to_unit_interval

NUM_DENSE_FEATURES, NUM_SPARSE_FEATURES = 13, 26
LINES_PER_OFFSET = 16  # the index keeps the offset of every 16th line
_U64 = np.uint64


@dataclass(frozen=True)
class ClickBatch:
    sparse_ids: Tensor  # (B, tables, lookups) int64; -1 pads bags
    weights: Tensor  # (B, tables, lookups) float64
    dense_features: Tensor  # (B, features) float64
    labels: Tensor  # (B,) int64; negative: ignored

    @classmethod
    def unpack(cls, samples: Samples, model: DLRMConfig) -> "ClickBatch":
        shape, size = (-1, model.tables, model.lookups), model.tables * model.lookups
        packed = samples.tokens
        floats = packed[:, size:].contiguous().view(torch.float64)
        return cls(packed[:, :size].view(shape), floats[:, :size].view(shape), floats[:, size:], samples.targets[:, 0])


class ClickSource(CountedSource):
    """`count` rows of a click log, starting at row `first`."""

    length, vocab = 1, 2  # one binary target per sample

    def __init__(self, model: DLRMConfig, first: int, count: int):
        self.model, self.first, self.count = model, first, count

    def read_sample(self, index: int) -> np.ndarray:
        return self.rows(np.array([self.first + index]))[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Returns packed rows by their indices in the whole log."""
        raise NotImplementedError

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        """Returns the rows as samples: the label is the target, the rest the input."""
        packed = torch.from_numpy(self.rows(self.first + indices))
        ids = torch.from_numpy(positions.astype(np.int64))
        return Samples(packed[:, 1:].contiguous(), packed[:, :1].contiguous(), ids)


def _pack_rows(labels: np.ndarray, sparse_ids: np.ndarray, weights: np.ndarray, dense: np.ndarray) -> np.ndarray:
    count = len(labels)
    bits = np.concatenate((weights.reshape(count, -1), dense), axis=1).astype(np.float64).view(np.int64)
    return np.concatenate((labels[:, None].astype(np.int64), sparse_ids.reshape(count, -1), bits), axis=1)


class SyntheticClicks(ClickSource):
    """A generated log in which each row is a hash of the seed and its index. Ids follow a Zipf distribution; a
    permutation per table spreads the frequent ones over its rows. Each id and each dense feature shifts the click's
    logit by its own amount, so that a model can learn. One bag in fifty is empty; with several lookups a bag has
    between one and all of them, with weights between 1/2 and 3/2."""

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
        draws = np.arange(2 * size + model.tables + model.dense_features + 1, dtype=_U64)
        row_keys = mix64_numpy(indices.astype(_U64) ^ self.key)[:, None]
        bits = mix64_numpy(row_keys + draws * _U64(GOLDEN_GAMMA))
        ends = np.cumsum((size, size, model.tables, model.dense_features))
        category_bits, weight_bits, length_bits, dense_bits, label_bits = np.split(bits, ends, 1)
        rank = _zipf_ranks(to_unit_interval(category_bits).reshape(shape), self.table_rows, self.zipf_exponent)
        permuted = (rank * self.row_multiplier[:, None] + self.row_offset[:, None]) % self.table_rows
        sparse_ids = permuted.astype(np.int64)
        nonempty_lengths = 1 + (length_bits % _U64(model.lookups)).astype(np.int64)
        lengths = np.where(to_unit_interval(length_bits) < 0.02, 0, nonempty_lengths)
        present = np.arange(model.lookups) < lengths[:, :, None]
        bag_weights = present * (0.5 + to_unit_interval(weight_bits).reshape(shape) if model.lookups > 1 else 1.0)
        dense_features = np.log1p(np.floor(-20.0 * np.log1p(-to_unit_interval(dense_bits))))
        tables = np.arange(model.tables, dtype=_U64)[:, None] << _U64(40)
        sparse_effects = 2.0 * to_unit_interval(mix64_numpy((sparse_ids.astype(_U64) + tables) ^ ~self.key)) - 1.0
        logits = 3.0 * (sparse_effects * bag_weights).sum((1, 2)) / np.sqrt(size)
        logits = logits + (self.dense_effects * (dense_features - 2.5)).sum(1) - 1.0  # about one third are clicks
        labels = to_unit_interval(label_bits[:, 0]) < 1.0 / (1.0 + np.exp(-logits))
        return _pack_rows(labels, np.where(present, sparse_ids, -1), bag_weights, dense_features)


def _zipf_ranks(u: np.ndarray, counts: np.ndarray, exponent: float) -> np.ndarray:
    """Maps uniform numbers to ranks from 0 on, by the inverse CDF of the continuous power law rank^-exponent."""
    power = 1.0 - exponent
    ranks = (((counts + _U64(1)).astype(np.float64) ** power - 1.0) * u + 1.0) ** (1.0 / power) - 1.0
    return np.minimum(ranks.astype(_U64), counts - _U64(1))


def _next_coprime(values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Returns the smallest number >= each value that is coprime to its count: its multiples visit every row once."""
    while (has_divisor := np.gcd(values, np.array(counts, dtype=_U64)) != 1).any():
        values = values + has_divisor
    return values


class CriteoClicks(ClickSource):
    """Rows of one Criteo file. A skipped bad row keeps its stream position, with an ignored target."""

    def __init__(self, model: DLRMConfig, path: Path, offsets: np.ndarray, first: int, count: int, bad: Any = None):
        super().__init__(model, first, count)
        self.path, self.offsets, self.bad_records = path, offsets, bad or BadRecords()

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


def index_criteo_file(extent: DataFile) -> tuple[np.ndarray, int]:
    """Reads it once; returns the byte offsets of every 16th line and of the end, and the number of lines."""
    offsets, lines, position, last_byte = [0], 0, 0, b"\n"
    if extent.path.suffix in DECOMPRESSORS:
        raise DataError(f"data.path = '{extent.path}' is compressed; unpack it, since rows are read one by one.")
    with os_errors_as(DataError, f"data.path = '{extent.path}' cannot be read"), extent.open() as file:
        while chunk := file.read(1 << 24):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            indexed_ends = ends[LINES_PER_OFFSET - 1 - lines % LINES_PER_OFFSET :: LINES_PER_OFFSET]
            offsets += (indexed_ends + position + 1).tolist()
            lines, position, last_byte = lines + len(ends), position + len(chunk), chunk[-1:]
    if last_byte != b"\n":
        lines += 1  # the last line has no newline
    if not lines:
        raise DataError(f"data.path = '{extent.path}' is empty; a Criteo file has one sample per line.")
    if offsets[-1] != position:
        offsets.append(position)
    return np.array(offsets, np.int64), lines


def require_good_row(path: Path, model: DLRMConfig) -> None:
    """Raises DataError if no row can be read: with `on_bad_record = "skip"`, a run would have no target at all."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            with suppress(DataError):
                parse_criteo_row(line.rstrip(b"\n"), path, number, model)
                return
    raise DataError(f"data.path = '{path}' has no row in Criteo's format: label, 13 integers, 26 hashes, with tabs.")


def parse_criteo_row(line: bytes, path: Path, line_number: int, model: DLRMConfig) -> np.ndarray:
    """Parses a line of 40 fields into a packed row; `line_number` starts at 1."""
    where = f"{path}, row {line_number}"
    fields = line.rstrip(b"\r").decode("utf-8", "replace").split("\t")
    if len(fields) != (num_fields := 1 + NUM_DENSE_FEATURES + NUM_SPARSE_FEATURES):
        form = "label, 13 integer features, 26 categorical features, separated by tabs"
        raise DataError(f"{where}: it has {len(fields)} fields, but a Criteo row has {num_fields}: {form}.")
    if fields[0] not in ("0", "1"):
        raise DataError(f"{where}, field 1 (label): {fields[0]!r} is neither 0 nor 1.")
    dense_features = np.zeros(NUM_DENSE_FEATURES)
    for i, text in enumerate(fields[1 : 1 + NUM_DENSE_FEATURES]):
        try:
            dense_features[i] = np.log1p(float(max(0, int(text)))) if text else 0.0
        except (ValueError, OverflowError):
            raise DataError(f"{where}, field {i + 2} (integer {i + 1}): {text!r} is not an integer.") from None
    sparse_ids = np.full((NUM_SPARSE_FEATURES, model.lookups), -1, np.int64)
    for i, text in enumerate(fields[1 + NUM_DENSE_FEATURES :]):
        try:
            sparse_ids[i, 0] = int(text, 16) % model.table_rows[i] if text else -1
        except ValueError:
            field = f"field {i + 2 + NUM_DENSE_FEATURES} (category {i + 1})"
            raise DataError(f"{where}, {field}: {text!r} is not a hexadecimal number.") from None
    return _pack_rows(np.array([int(fields[0])]), sparse_ids[None], 1.0 * (sparse_ids >= 0)[None], dense_features[None])
