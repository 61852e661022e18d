"""Labelled images: the base class of datasets, which read in batches, random augmentation, synthetic images, CIFAR-10.

A sample is a float32 image (3, size, size), normalised to mean 0 and standard deviation 1, with its class as target.
Augmentations (docs/how-to/train-on-images.md) are applied in the order crop, flip, colour, cutout. Random numbers are
hashes of the seed and the sample's stream position, so they do not depend on the layout, the number of workers or
restarts. A record of CIFAR-10's binary version has 3,073 bytes: the class, then the red, green and blue planes; its
Python version is pickled, and unpickling can run code."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.input_files import BadRecords
from shardwise.data.sample_stream import CountedSource, Samples
from shardwise.errors import DataError
from shardwise.files import os_errors_as, user_path
from shardwise.random import GOLDEN_GAMMA, hash_key_uint64, mix64_numpy, to_unit_interval

IMAGE_SIZE, NUM_CLASSES = 32, 10
RECORD_BYTES = 1 + 3 * IMAGE_SIZE * IMAGE_SIZE
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# Per-channel statistics of CIFAR-10's training images, on a scale of 0 to 1.
MEAN, STD = np.array([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]], np.float32)[..., None, None]


class ImageAugmentation:
    def __init__(self, names: Sequence[str], seed: int):
        self.names, self.seed = frozenset(names), seed

    def apply(self, images: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if self.names & {"crop", "flip"}:
            images = self._crop_and_flip(images, positions)
        if "colour" in self.names:
            images = self._colour_jitter(images, positions)
        if "cutout" in self.names:
            images = self._cutout(images, positions)
        return images

    def _crop_and_flip(self, images: np.ndarray, positions: np.ndarray) -> np.ndarray:
        image_size = images.shape[-1]
        margin = image_size // 8 if "crop" in self.names else 0
        padded = np.pad(images, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
        row, column, flip = self._uniform("moved", positions, 3)
        tops, lefts = ((2 * margin + 1) * part for part in (row, column))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (image_size, image_size), (2, 3))
        crops = windows[np.arange(len(images)), :, tops.astype(int), lefts.astype(int)]
        is_flipped = (flip < 0.5) & ("flip" in self.names)
        crops[is_flipped] = crops[is_flipped][..., ::-1]
        return crops

    def _colour_jitter(self, images: np.ndarray, positions: np.ndarray) -> np.ndarray:
        jitter = (0.4 * self._uniform("colour", positions, 3) - 0.2).astype(np.float32)[:, :, None, None]
        brightness, contrast, saturation = jitter
        grey = (images[:, 0] + images[:, 1] + images[:, 2]) / np.float32(3)
        images = images * (1 + saturation)[:, None] - (grey * saturation)[:, None]
        return images * (1 + contrast)[:, None] + brightness[:, None]

    def _cutout(self, images: np.ndarray, positions: np.ndarray) -> np.ndarray:
        image_size = images.shape[-1]
        half = image_size // 4
        centers = (self._uniform("cutout", positions, 2) * image_size).astype(int).tolist()
        images = images.copy()
        for image, row, column in zip(images, *centers, strict=True):
            image[:, max(0, row - half) : row + half, max(0, column - half) : column + half] = 0.0
        return images

    def _uniform(self, purpose: str, positions: np.ndarray, count: int) -> np.ndarray:
        """Returns `count` uniform numbers in [0, 1) for each position, (count, B)."""
        bits = mix64_numpy(positions.astype(np.uint64) ^ hash_key_uint64("augment", self.seed, purpose, 0))
        increments = np.arange(1, count + 1, dtype=np.uint64)[:, None] * np.uint64(GOLDEN_GAMMA)
        return to_unit_interval(mix64_numpy(bits + increments))


class ImageSource(CountedSource):
    """A dataset of labelled images, augmented as a function of the stream position."""

    def __init__(self, count: int, image_size: int, classes: int, augment: ImageAugmentation | None = None):
        self.count, self.image_size, self.augment = count, image_size, augment
        self.length, self.vocab = 3 * image_size * image_size, classes

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns float32 images (B, 3, size, size) and their classes (B,)."""
        raise NotImplementedError

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        images, targets = self.read_images(indices)
        if self.augment is not None:
            images = self.augment.apply(images, positions)
        ids = torch.from_numpy(positions.astype(np.int64))
        return Samples(torch.from_numpy(images), torch.from_numpy(targets[:, None].astype(np.int64)), ids)


class SyntheticImages(ImageSource):
    """Generated images: a wave pattern per class, shifted and with noise; a function of the seed and the index."""

    def __init__(self, count: int, image_size: int, classes: int, seed: int, augment: ImageAugmentation | None = None,
                 first_index: int = 0):  # fmt: skip
        super().__init__(count, image_size, classes, augment)
        self.seed, self.first_index = seed, first_index

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, classes = zip(*(self._draw(self.first_index + index) for index in indices.tolist()))
        return np.stack(images).astype(np.float32), np.array(classes, np.int64)

    def _draw(self, index: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng((self.seed, 3, index))
        label = int(rng.integers(self.vocab))
        class_rng = np.random.default_rng((self.seed, 4, label))
        waves = class_rng.normal(size=(3, 4, 2)) * 2 * np.pi / self.image_size * 2  # four per channel
        phase = class_rng.random((3, 4)) * 2 * np.pi
        x, y = np.meshgrid(np.arange(self.image_size), np.arange(self.image_size))
        shift = rng.integers(0, self.image_size // 4 + 1, 2)
        angle = waves[..., 0, None, None] * (x + shift[0]) + waves[..., 1, None, None] * (y + shift[1])
        noise = rng.normal(size=(3, self.image_size, self.image_size))
        return np.cos(angle + phase[..., None, None]).sum(1) / 2 + noise, label


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
    with os_errors_as(DataError, f"{path} cannot be read"):
        shape = (path.stat().st_size // RECORD_BYTES, RECORD_BYTES)
        return np.memmap(path, np.uint8, "r", shape=shape) if shape[0] else np.empty(shape, np.uint8)


def _valid_records(path: Path, records: np.ndarray, bad_records: BadRecords) -> np.ndarray:
    """Returns the indices of the records with a valid label, and reports the others."""
    invalid, end = np.flatnonzero(records[:, 0] >= NUM_CLASSES), len(records)
    reasons = {n: f"class {records[n, 0]}, but CIFAR-10 has classes 0 to {NUM_CLASSES - 1}." for n in invalid.tolist()}
    if remainder := path.stat().st_size % RECORD_BYTES:
        reasons[end] = f"the file ends after {remainder} of {RECORD_BYTES:,} bytes."
    for number, reason in reasons.items():
        bad_records.report(DataError(f"{path}, record {number + 1} (byte {number * RECORD_BYTES:,}): {reason}"))
    return np.setdiff1d(np.arange(end), invalid, assume_unique=True)


def open_cifar10(path: str, bad_records: BadRecords, augment: ImageAugmentation | None) -> tuple[Cifar10, Cifar10]:
    """Opens the training and test images in `path`, which has either the six files or the unpacked archive's folder."""
    folder = user_path(path)
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
