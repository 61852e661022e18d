"""Base class of labelled image datasets, which read in batches, and a synthetic one.

A sample is a float32 image (3, size, size), normalised to mean 0 and standard deviation 1, with its class as target.
"""

import numpy as np
import torch

from shardwise.data.augment import ImageAugmentation
from shardwise.data.sample_stream import Samples


class ImageSource:
    """A dataset of labelled images, augmented as a function of the stream position."""

    def __init__(self, count: int, image_size: int, classes: int, augment: ImageAugmentation | None = None):
        self.count, self.image_size, self.augment = count, image_size, augment
        self.length, self.vocab = 3 * image_size * image_size, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns one image, flattened, followed by its class."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample index {index} is out of range for {self.count} samples")
        images, classes = self.read_images(np.array([index]))
        return np.append(images.reshape(-1), classes).astype(np.float32)

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns float32 images (B, 3, size, size) and their classes (B,)."""
        raise NotImplementedError

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        images, targets = self.read_images(indices)
        if self.augment is not None:
            images = self.augment.apply(images, positions)
            if "mixup" in self.augment.names:
                partners, mixup_weights = self.augment.mixup_partners(positions, self.count)
                partner_images, partner_targets = self.read_images(partners)
                partner_images = self.augment.apply(partner_images, positions, mixup_index=1)
                images, targets = self.augment.mixup(images, targets, partner_images, partner_targets, mixup_weights)
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
