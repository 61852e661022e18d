"""The token file: a whole corpus as one array on disk, read through a memory map.

Encoding text is slow and happens once; training reads windows at random places of terabytes. So whatever the source,
what a run reads is this file: a header of 32 bytes, then the tokens, little-endian, as narrow as the vocabulary allows.

    bytes 0-7     "SHARDTOK"
    bytes 8-11    version of the format, 1
    bytes 12-15   bytes per token: 1, 2 or 4 (vocabulary up to 256, up to 65,536, or more)
    bytes 16-23   vocabulary: one more than the largest id that may come
    bytes 24-31   number of tokens

Headerless files of 16- or 32-bit ids, as other trainers write them, are read too, but only when the path says so:
`data.path = "train.bin:uint16"`. Nothing in such a file tells what it is, and a wrong guess would train on noise.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from shardwise.errors import DataError
from shardwise.files import atomic_write

MAGIC = b"SHARDTOK"
VERSION = 1
RAW_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
"""What may follow the colon of a headerless file's path."""
_HEADER = struct.Struct("<8sIIQQ")
_DTYPES = {1: "<u1", 2: "<u2", 4: "<u4"}


@dataclass(frozen=True)
class TokenFile:
    """Some tokens on disk. Pickles as its path: every process maps the file for itself."""

    path: Path
    dtype: str
    vocab: int
    count: int
    offset: int

    def __len__(self) -> int:
        return self.count

    def read(self, first: int, last: int) -> np.ndarray:
        """The tokens `first` to `last` (without it) as int64."""
        return self._map[first:last].astype(np.int64)

    @cached_property
    def _map(self) -> np.ndarray:
        if not self.count:  # an empty range cannot be mapped
            return np.empty(0, self.dtype)
        # As a plain array: slices of a memory map take several times as long to make.
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.count,)))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_map"}


def open_token_file(path: Path) -> TokenFile:
    """Opens a token file and checks that it is whole."""
    header, size = _read_header_and_size(path)
    if not header.startswith(MAGIC) or len(header) < _HEADER.size:
        raise DataError(
            f"{path} is not a token file: it begins with {header[:8]!r}, not {MAGIC!r}. Write one with `shardwise data`, "
            f"or say data.path = '{path}:uint16' if it holds bare 16-bit ids."
        )
    _, version, width, vocab, count = _HEADER.unpack(header)
    if version != VERSION or width not in _DTYPES:
        raise DataError(
            f"{path} is a token file of version {version} with {width} bytes per token; this Shardwise reads version "
            f"{VERSION} with 1, 2 or 4. Write it again with `shardwise data`."
        )
    if size != _HEADER.size + width * count:
        raise DataError(
            f"{path} has {size} bytes, but its header promises {count} tokens of {width} bytes, "
            f"{_HEADER.size + width * count} bytes in all: it was cut short or overwritten. Copy or write it again."
        )
    return TokenFile(path, _DTYPES[width], vocab, count, _HEADER.size)


def open_raw_token_file(path: Path, dtype: str, vocab: int) -> TokenFile:
    """Opens a headerless file of `kind` ("uint16" or "uint32"), whose ids are taken to be below `vocab`."""
    header, size = _read_header_and_size(path)
    if header.startswith(MAGIC):
        raise DataError(f"{path} says by its header what it holds; leave ':{dtype}' out of data.path.")
    width = np.dtype(RAW_DTYPES[dtype]).itemsize
    if size % width:
        raise DataError(f"{path} has {size} bytes, not a multiple of {width}: it does not hold {dtype} ids alone.")
    return TokenFile(path, RAW_DTYPES[dtype], vocab, size // width, 0)


def _read_header_and_size(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            return file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"the token file {path} cannot be read: {error.strerror}.") from error


def write_token_arrays(path: Path, arrays: Iterable[np.ndarray], vocab: int) -> TokenFile:
    """Writes the arrays one behind the other; `path` appears only when all of it is there."""
    width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4
    count = 0
    with write_data_file(path) as file:
        file.write(bytes(_HEADER.size))  # its place; a file that stops here is no token file
        for array in arrays:
            if array.size and not 0 <= int(array.min()) <= int(array.max()) < vocab:
                raise DataError(
                    f"ids from {int(array.min())} to {int(array.max())} do not fit {path}: with a vocabulary of "
                    f"{vocab} they lie between 0 and {vocab - 1}. Give the tokenizer's own vocabulary."
                )
            file.write(array.astype(_DTYPES[width]).tobytes())
            count += array.size
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, VERSION, width, vocab, count))
    return TokenFile(path, _DTYPES[width], vocab, count, _HEADER.size)


@contextmanager
def write_data_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when all of it is there; what goes wrong is told in a sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
