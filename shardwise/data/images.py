"""Images with a class each, read many at once, and a set that needs no files.

A sample is an image (3, side, side) in float32, about zero with a spread of about one, and its class as the target.
"""

from __future__ import annotations

import numpy as np
import torch

from shardwise.data.augment import Augment
from shardwise.data.stream import Samples


class Images:
    """A list of images; what `augment` does to them depends on their place in the stream."""

    def __init__(self, count: int, side: int, classes: int, augment: Augment | None = None):
        self.count, self.side, self.augment = count, side, augment
        self.length, self.vocab = 3 * side * side, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        """One image as a row of numbers, its class behind them."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        images, classes = self.pictures(np.array([index]))
        return np.append(images.reshape(-1), classes).astype(np.float32)

    def pictures(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (B, 3, side, side) in float32, and their classes (B,)."""
        raise NotImplementedError

    def samples(self, indices: np.ndarray, places: np.ndarray) -> Samples:
        images, targets = self.pictures(indices)
        if self.augment is not None:
            images = self.augment.change(images, places)
            if self.augment.mixes:
                others, shares = self.augment.partners(places, self.count)
                seconds, classes = self.pictures(others)
                seconds = self.augment.change(seconds, places, turn=1)
                images, targets = self.augment.mix(images, targets, seconds, classes, shares)
        ids = torch.from_numpy(places.astype(np.int64))
        return Samples(torch.from_numpy(images), torch.from_numpy(targets[:, None].astype(np.int64)), ids)


class Drawn(Images):
    """Each class has a pattern of its own, shifted and under noise, so that a model learns; drawn from the seed and the
    index alone."""

    def __init__(self, count: int, side: int, classes: int, seed: int, augment: Augment | None = None, first: int = 0):
        super().__init__(count, side, classes, augment)
        self.seed, self.first = seed, first

    def pictures(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((len(indices), 3, self.side, self.side), np.float32)
        classes = np.empty(len(indices), np.int64)
        for number, index in enumerate(indices.tolist()):
            images[number], classes[number] = self._draw(self.first + index)
        return images, classes

    def _draw(self, index: int) -> tuple[np.ndarray, int]:
        draw = np.random.default_rng((self.seed, 3, index))
        label = int(draw.integers(self.vocab))
        pattern = np.random.default_rng((self.seed, 4, label))
        waves = pattern.normal(size=(3, 4, 2)) * 2 * np.pi / self.side * 2  # of each color: directions and lengths
        phase = pattern.random((3, 4)) * 2 * np.pi
        x, y = np.meshgrid(np.arange(self.side), np.arange(self.side))
        shift = draw.integers(0, self.side // 4 + 1, 2)
        angle = waves[..., 0, None, None] * (x + shift[0]) + waves[..., 1, None, None] * (y + shift[1])
        image = np.cos(angle + phase[..., None, None]).sum(1) / 2 + draw.normal(size=(3, self.side, self.side))
        return image, label
