"""Images changed on the fly, so that no two epochs show the same.

    crop     moved by up to an eighth of its side, what is left bare filled with the mean
    flip     mirrored, every other one
    colour   brighter or darker, with more or less contrast and colour, each by up to a fifth
    cutout   a square of half its side replaced by the mean (DeVries and Taylor 2017)
    mixup    blended with another image of the set, and the loss with it (Zhang et al. 2018; their alpha = 1)

They come in this order, whatever that of the job. What is drawn is a hash of the seed and the image's place in the
stream, and no number depends on the images beside it: any layout, number of workers or resume gives the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.models.resnet import SECOND, SHARE, WHOLE
from shardwise.random import mixed, unit, word_key


class Augment:
    def __init__(self, names: Sequence[str], seed: int):
        self.names, self.seed = frozenset(names), seed

    @property
    def mixes(self) -> bool:
        return "mixup" in self.names

    def change(self, images: np.ndarray, places: np.ndarray, turn: int = 0) -> np.ndarray:
        """Each image by itself; `turn` is 1 for the second image of a place."""
        if self.names & {"crop", "flip"}:
            images = self._moved(images, places, turn)
        if "colour" in self.names:
            images = self._coloured(images, places, turn)
        if "cutout" in self.names:
            images = self._cut(images, places, turn)
        return images

    def partners(self, places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place another image of the set, and the share that it gets, in parts of `WHOLE`."""
        which, share = self._draw("mixup", places, 2)
        return (which * count).astype(np.int64), (share * WHOLE).astype(np.int64)

    def mix(
        self, images: np.ndarray, targets: np.ndarray, seconds: np.ndarray, classes: np.ndarray, shares: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blended images, and both classes with the second's share in one number each."""
        part = (shares / WHOLE).astype(np.float32)[:, None, None, None]
        return images * (1 - part) + seconds * part, targets | classes << SECOND | shares << SHARE

    def _moved(self, images: np.ndarray, places: np.ndarray, turn: int) -> np.ndarray:
        side = images.shape[-1]
        margin = side // 8 if "crop" in self.names else 0
        wider = np.pad(images, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
        down, right, flip = self._draw("moved", places, 3, turn)
        tops = (down * (2 * margin + 1)).astype(int).tolist()
        lefts = (right * (2 * margin + 1)).astype(int).tolist()
        mirrored = ((flip < 0.5) & ("flip" in self.names)).tolist()
        moved = np.empty_like(images)
        for out, image, top, left, mirror in zip(moved, wider, tops, lefts, mirrored, strict=True):
            part = image[:, top : top + side, left : left + side]
            out[...] = part[:, :, ::-1] if mirror else part
        return moved

    def _coloured(self, images: np.ndarray, places: np.ndarray, turn: int) -> np.ndarray:
        drawn = (0.4 * self._draw("colour", places, 3, turn) - 0.2).astype(np.float32)[:, :, None, None]
        brightness, contrast, colour = drawn
        grey = (images[:, 0] + images[:, 1] + images[:, 2]) / np.float32(3)
        images = images * (1 + colour)[:, None] - (grey * colour)[:, None]
        return images * (1 + contrast)[:, None] + brightness[:, None]

    def _cut(self, images: np.ndarray, places: np.ndarray, turn: int) -> np.ndarray:
        side = images.shape[-1]
        half = side // 4
        centres = (self._draw("cutout", places, 2, turn) * side).astype(int).tolist()
        images = images.copy()
        for image, down, right in zip(images, *centres, strict=True):
            image[:, max(0, down - half) : down + half, max(0, right - half) : right + half] = 0.0
        return images

    def _draw(self, what: str, places: np.ndarray, count: int, turn: int = 0) -> np.ndarray:
        """`count` numbers from 0 to before 1 for each place (count, B)."""
        words = mixed(places.astype(np.uint64) ^ word_key("augment", self.seed, what, turn))
        return unit(mixed(words + np.arange(1, count + 1, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)))
