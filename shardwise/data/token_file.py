"""The token file: an encoded corpus as one memory-mapped array.

Encoding is slow and happens once; training reads windows at random offsets. Every text source is therefore encoded into
this format: a header of 32 bytes, then little-endian tokens in the narrowest type that the vocabulary fits. The fields
of the header are in docs/how-to/token-files.md. Headerless files of other trainers need their type in the path
(`train.bin:uint16`): the file itself does not identify it, and a wrong guess would train on noise. Samples are windows
of fixed length. With sequence length S, sample i is the tokens [i S, i S + S + 1). Its last token is the next sample's
first, so every token of a file's windows but the first is a target once. The rest is dropped."""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from shardwise.data.sample_stream import CountedSource
from shardwise.errors import DataError
from shardwise.files import atomic_write, os_errors_as

MAGIC = b"SHARDTOK"
VERSION = 1
RAW_DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # type suffixes in the path of a headerless file
_HEADER = struct.Struct("<8sIIQQ")
_DTYPES = {1: "<u1", 2: "<u2", 4: "<u4"}


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped array of tokens. Pickles without the map, so that each worker process maps the file itself."""

    path: Path
    dtype: str
    vocab: int
    count: int
    offset: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens [start, stop) as int64."""
        return self._map[start:stop].astype(np.int64)

    @cached_property
    def _map(self) -> np.ndarray:
        if not self.count:  # an empty range cannot be mapped
            return np.empty(0, self.dtype)
        # As a plain array, because slicing a np.memmap is several times slower.
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.count,)))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_map"}


def open_token_file(path: Path) -> TokenFile:
    """Opens a token file; raises DataError if its header or size is wrong."""
    header, size = _read_header_and_size(path)
    if not header.startswith(MAGIC) or len(header) < _HEADER.size:
        problem = f"{path} is not a token file: it begins with {header[:8]!r}, not {MAGIC!r}"
        raise DataError(f"{problem}. Write one with `shardwise data`, or add its type, ':uint16' or ':uint32'.")
    _, version, width, vocab, count = _HEADER.unpack(header)
    if version != VERSION or width not in _DTYPES:
        known = f"this Shardwise reads version {VERSION} with 1, 2 or 4 bytes per token"
        raise DataError(f"{path} is a token file of version {version} with {width}; {known}. Write it again.")
    if size != _HEADER.size + width * count:
        raise DataError(f"{path} was truncated or overwritten: it does not have {count} tokens; write it again.")
    return TokenFile(path, _DTYPES[width], vocab, count, _HEADER.size)


def open_raw_token_file(path: Path, dtype: str, vocab: int, max_size: int | None = None) -> TokenFile:
    """Opens a headerless file, or its first bytes, of type `dtype` ("uint16" or "uint32"), with ids below `vocab`."""
    header, size = _read_header_and_size(path)
    size = size if max_size is None else min(size, max_size)
    if header.startswith(MAGIC):
        raise DataError(f"{path} has a header that gives its type; leave ':{dtype}' out of data.path.")
    width = np.dtype(RAW_DTYPES[dtype]).itemsize
    if size % width:
        raise DataError(f"{path} has {size} bytes, not a multiple of {width}: it is not an array of {dtype} ids.")
    return TokenFile(path, RAW_DTYPES[dtype], vocab, size // width, 0)


def _read_header_and_size(path: Path) -> tuple[bytes, int]:
    with os_errors_as(DataError, f"the token file {path} cannot be read"), path.open("rb") as file:
        return file.read(_HEADER.size), os.fstat(file.fileno()).st_size


def write_token_arrays(path: Path, arrays: Iterable[np.ndarray], vocab: int) -> TokenFile:
    """Writes the concatenated arrays as a token file; `path` appears only once it is complete."""
    width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4
    count = 0
    with write_data_file(path) as file:
        file.write(bytes(_HEADER.size))  # placeholder; without a header the file is not valid
        for array in arrays:
            if array.size and not 0 <= int(array.min()) <= int(array.max()) < vocab:
                found = f"ids range from {int(array.min())} to {int(array.max())}"
                raise DataError(f"{path}: {found}, but with a vocabulary of {vocab} they must be below {vocab}.")
            file.write(array.astype(_DTYPES[width]).tobytes())
            count += array.size
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, VERSION, width, vocab, count))
    return TokenFile(path, _DTYPES[width], vocab, count, _HEADER.size)


@contextmanager
def write_data_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears at `path` only once it is complete; OS errors become DataErrors."""
    with os_errors_as(DataError, f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            yield file


class TokenWindows(CountedSource):
    """The windows of several token files, concatenated; a window never spans two files."""

    def __init__(self, files: Sequence[TokenFile], length: int):
        self.files, self.length = tuple(files), length
        self.vocab = max(file.vocab for file in self.files)
        *self._offsets, self.count = accumulate((max(0, file.count - 1) // length for file in self.files), initial=0)

    def read_sample(self, index: int) -> np.ndarray:
        file_index = bisect_right(self._offsets, index) - 1
        file, first = self.files[file_index], (index - self._offsets[file_index]) * self.length
        tokens = file.read(first, first + self.length + 1)
        # Ids can exceed the declared vocabulary (headerless files, bit flips). On a GPU, an id beyond the embedding's
        # rows fails with a device assertion that names neither file nor sample.
        if (largest := int(tokens.max())) >= file.vocab:
            problem = f"{file.path} has id {largest} at token {first + int(tokens.argmax())} (sample {index})"
            raise DataError(f"{problem}; set model.vocab = {largest + 1} or more, or write the file again.")
        return tokens
