"""Images that need no files: each class has a pattern of its own, shifted and under noise, so that a model learns."""

from __future__ import annotations

import numpy as np


class Drawn:
    """Samples of 3 x side x side numbers with their class behind them, drawn from the seed and their index alone."""

    def __init__(self, count: int, side: int, classes: int, seed: int):
        self.count, self.side, self.classes, self.seed = count, side, classes, seed
        self.length, self.vocab = 3 * side * side, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        draw = np.random.default_rng((self.seed, 3, index))
        label = int(draw.integers(self.classes))
        pattern = np.random.default_rng((self.seed, 4, label))
        waves = pattern.normal(size=(3, 4, 2)) * 2 * np.pi / self.side * 2  # of each color: directions and lengths
        phase = pattern.random((3, 4)) * 2 * np.pi
        x, y = np.meshgrid(np.arange(self.side), np.arange(self.side))
        shift = draw.integers(0, self.side // 4 + 1, 2)
        angle = waves[..., 0, None, None] * (x + shift[0]) + waves[..., 1, None, None] * (y + shift[1])
        image = np.cos(angle + phase[..., None, None]).sum(1) / 2 + draw.normal(size=(3, self.side, self.side))
        return np.append(image.reshape(-1), label).astype(np.float32)
