"""Reads CIFAR-10 as published: 50,000 training and 10,000 test images of 32 x 32 pixels in ten classes.

The binary version has records of 3,073 bytes: the class, then the red, green and blue planes. It is memory-mapped. The
Python version is pickled, and unpickling can run code, so it is not read.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.images import ImageAugmentation, ImageSource
from shardwise.data.input_files import BadRecords
from shardwise.errors import DataError

IMAGE_SIZE, NUM_CLASSES = 32, 10
RECORD_BYTES = 1 + 3 * IMAGE_SIZE * IMAGE_SIZE
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# Per-channel statistics of the training images, on a scale of 0 to 1.
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
STD = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]


class Cifar10(ImageSource):
    """The valid records of several files, concatenated. Only paths are pickled: each worker process maps the files."""

    def __init__(self, paths: Sequence[Path], bad_records: BadRecords, augment: ImageAugmentation | None = None):
        self.paths = tuple(paths)
        valid = [_valid_records(*file, bad_records) for file in zip(paths, self._records)]
        super().__init__(sum(map(len, valid)), IMAGE_SIZE, NUM_CLASSES, augment)
        self.file_index = np.repeat(np.arange(len(valid)), [len(part) for part in valid])
        self.record_index = np.concatenate(valid)
        if not self.count:
            raise DataError(f"{paths[0].parent} has no valid CIFAR-10 record; download it again from {HOMEPAGE}.")

    @cached_property
    def _records(self) -> list[np.ndarray]:
        return [_map_records(path) for path in self.paths]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_records"}

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        records, file_index = np.empty((len(indices), RECORD_BYTES), np.uint8), self.file_index[indices]
        for number in np.unique(file_index).tolist():
            mask = file_index == number
            records[mask] = self._records[number][self.record_index[indices[mask]]]
        pixels = records[:, 1:].reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE).astype(np.float32)
        pixels *= 1 / (255 * STD)
        pixels -= MEAN / STD
        return pixels, records[:, 0].astype(np.int64)


def _map_records(path: Path) -> np.ndarray:
    """Returns the records of a file (n, 3073), memory-mapped."""
    try:
        shape = (path.stat().st_size // RECORD_BYTES, RECORD_BYTES)
        return np.memmap(path, np.uint8, "r", shape=shape) if shape[0] else np.empty(shape, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _valid_records(path: Path, records: np.ndarray, bad_records: BadRecords) -> np.ndarray:
    """Returns the indices of the records with a valid label, and reports the others."""
    invalid, end = np.flatnonzero(records[:, 0] >= NUM_CLASSES), len(records)
    reasons = {n: f"class {records[n, 0]}, but CIFAR-10 has classes 0 to {NUM_CLASSES - 1}." for n in invalid.tolist()}
    if remainder := path.stat().st_size % RECORD_BYTES:
        reasons[end] = f"the file ends after {remainder} of {RECORD_BYTES:,} bytes."
    for number, reason in reasons.items():
        where = f"{path}, record {number + 1} (byte {number * RECORD_BYTES:,})"
        bad_records.report(DataError(f"{where}: {reason}"))
    return np.setdiff1d(np.arange(end), invalid, assume_unique=True)


def open_cifar10(path: str, bad_records: BadRecords, augment: ImageAugmentation | None) -> tuple[Cifar10, Cifar10]:
    """Opens the training and test images in `path`, which has either the six files or the unpacked archive's folder."""
    folder = Path(path).expanduser()
    for candidate in (folder, folder / "cifar-10-batches-bin") if path else ():
        files = [candidate / f"{name}.bin" for name in (*TRAIN_FILES, TEST_FILE)]
        existing = [file for file in files if file.is_file()]
        if existing and len(existing) < len(files):
            missing = next(file for file in files if file not in existing)
            raise DataError(f"{missing} is missing; unpack the archive from {HOMEPAGE} again.")
        if existing:
            return Cifar10(files[:-1], bad_records, augment), Cifar10(files[-1:], bad_records)
    problem = f"data.path = {path!r} has no CIFAR-10 files in binary form"
    raise DataError(f"{problem}; download cifar-10-binary.tar.gz from {HOMEPAGE}, and set it to the unpacked folder.")
