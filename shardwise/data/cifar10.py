"""Reads CIFAR-10 as published: 50,000 training and 10,000 test images of 32 x 32 pixels in ten classes.

The binary version has records of 3,073 bytes: the class, then the red, green and blue planes. It is memory-mapped. The
Python version is pickled, and unpickling can run code, so it is not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.images import ImageAugmentation, ImageSource
from shardwise.data.input_files import BadRecords
from shardwise.errors import DataError

IMAGE_SIZE, NUM_CLASSES = 32, 10
IMAGE_BYTES = 3 * IMAGE_SIZE * IMAGE_SIZE
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# Per-channel statistics of the training images, on a scale of 0 to 1.
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
STD = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]


@dataclass(frozen=True)
class CifarFile:
    """One of the six files. Only its path is pickled, so each worker process opens the file itself."""

    path: Path

    @cached_property
    def images_and_labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3072) and labels (n,), both uint8."""
        try:
            num_records = self.path.stat().st_size // (1 + IMAGE_BYTES)
            shape = (num_records, 1 + IMAGE_BYTES)
            # An empty file cannot be mapped.
            records = np.memmap(self.path, np.uint8, "r", shape=shape) if num_records else np.empty(shape, np.uint8)
            return records[:, 1:], records[:, 0]
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from None

    def valid_records(self, bad_records: BadRecords) -> np.ndarray:
        """Returns the indices of the records with a valid label, and reports the others."""
        images, labels = self.images_and_labels
        invalid = np.flatnonzero(labels >= NUM_CLASSES)
        for number in invalid.tolist():
            where = f"{self.path}, record {number + 1} (byte {number * (1 + IMAGE_BYTES):,})"
            reason = f"class {labels[number]}, but CIFAR-10 has classes 0 to {NUM_CLASSES - 1}."
            bad_records.report(DataError(f"{where}: {reason}"))
        if remainder := self.path.stat().st_size % (1 + IMAGE_BYTES):
            where = f"{self.path}, record {len(images) + 1} (byte {len(images) * (1 + IMAGE_BYTES):,})"
            bad_records.report(DataError(f"{where}: the file ends after {remainder} of {1 + IMAGE_BYTES:,} bytes."))
        return np.setdiff1d(np.arange(len(images)), invalid, assume_unique=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


class Cifar10(ImageSource):
    """The valid records of several files, concatenated."""

    def __init__(self, files: Sequence[CifarFile], bad_records: BadRecords, augment: ImageAugmentation | None = None):
        valid = [file.valid_records(bad_records) for file in files]
        super().__init__(sum(map(len, valid)), IMAGE_SIZE, NUM_CLASSES, augment)
        self.files = tuple(files)
        self.file_index = np.repeat(np.arange(len(valid)), [len(part) for part in valid])
        self.record_index = np.concatenate(valid)
        if not self.count:
            raise DataError(f"{files[0].path.parent} has no valid CIFAR-10 record; download it again from {HOMEPAGE}.")

    def read_bytes(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns images (B, 3072) and labels (B,) as stored, in uint8."""
        images, labels = np.empty((len(indices), IMAGE_BYTES), np.uint8), np.empty(len(indices), np.uint8)
        file_index, record_index = self.file_index[indices], self.record_index[indices]
        for number in np.unique(file_index).tolist():
            mask = file_index == number
            file_images, file_labels = self.files[number].images_and_labels
            images[mask], labels[mask] = file_images[record_index[mask]], file_labels[record_index[mask]]
        return images, labels

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self.read_bytes(indices)
        pixels = images.reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE).astype(np.float32)
        pixels *= 1 / (255 * STD)
        pixels -= MEAN / STD
        return pixels, labels.astype(np.int64)


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
            batches = [CifarFile(file) for file in files]
            return Cifar10(batches[:-1], bad_records, augment), Cifar10(batches[-1:], bad_records)
    problem = f"data.path = {path!r} has no CIFAR-10 files in binary form"
    raise DataError(f"{problem}; download cifar-10-binary.tar.gz from {HOMEPAGE}, and set it to the unpacked folder.")
