"""Labelled images: the base class of datasets, which read in batches, random augmentation, and a synthetic dataset.

A sample is a float32 image (3, size, size), normalised to mean 0 and standard deviation 1, with its class as target.
Augmentations (docs/how-to/train-on-images.md) are applied in the order crop, flip, colour, cutout. Random numbers are
hashes of the seed and the sample's stream position, so they do not depend on the layout, the number of workers or
restarts.
"""

from collections.abc import Sequence

import numpy as np
import torch

from shardwise.data.sample_stream import CountedSource, Samples
from shardwise.random import GOLDEN_GAMMA, hash_key_uint64, mix64_numpy, to_unit_interval


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
        tops = (row * (2 * margin + 1)).astype(int).tolist()
        lefts = (column * (2 * margin + 1)).astype(int).tolist()
        flips = ((flip < 0.5) & ("flip" in self.names)).tolist()
        augmented = np.empty_like(images)
        for out, image, top, left, is_flipped in zip(augmented, padded, tops, lefts, flips, strict=True):
            crop = image[:, top : top + image_size, left : left + image_size]
            out[...] = crop[:, :, ::-1] if is_flipped else crop
        return augmented

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

    def read_sample(self, index: int) -> np.ndarray:
        """Returns one image, flattened, followed by its class."""
        images, classes = self.read_images(np.array([index]))
        return np.append(images.reshape(-1), classes).astype(np.float32)

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

    def __init__(
        self, count: int, image_size: int, classes: int, seed: int, augment: ImageAugmentation | None = None,
        first_index: int = 0,
    ):  # fmt: skip
        super().__init__(count, image_size, classes, augment)
        self.seed, self.first_index = seed, first_index

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((len(indices), 3, self.image_size, self.image_size), np.float32)
        classes = np.empty(len(indices), np.int64)
        for number, index in enumerate(indices.tolist()):
            images[number], classes[number] = self._draw(self.first_index + index)
        return images, classes

    def _draw(self, index: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng((self.seed, 3, index))
        label = int(rng.integers(self.vocab))
        class_rng = np.random.default_rng((self.seed, 4, label))
        # Four waves per channel.
        waves = class_rng.normal(size=(3, 4, 2)) * 2 * np.pi / self.image_size * 2
        phase = class_rng.random((3, 4)) * 2 * np.pi
        x, y = np.meshgrid(np.arange(self.image_size), np.arange(self.image_size))
        shift = rng.integers(0, self.image_size // 4 + 1, 2)
        angle = waves[..., 0, None, None] * (x + shift[0]) + waves[..., 1, None, None] * (y + shift[1])
        noise = rng.normal(size=(3, self.image_size, self.image_size))
        return np.cos(angle + phase[..., None, None]).sum(1) / 2 + noise, label
