"""CIFAR-10 as published: 50,000 images of 32 x 32 for training and 10,000 for testing, in ten classes.

The binary version has records of 3,073 bytes: the class, then red, green and blue, row by row. It is read through a
memory map. The Python version is six pickles of a dictionary, whose `data` is a numpy array (images, 3,072) and whose
`labels` are a list. A pickle is a program, so none is run: nothing may be called by name but what makes an array, and
those names lead to stand-ins here that keep the bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.augment import Augment
from shardwise.data.bad import Bad
from shardwise.data.images import Images
from shardwise.errors import DataError

SIDE, CLASSES = 32, 10
PIXELS = 3 * SIDE * SIDE
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
# Of the training images, red, green and blue, as shares of 255.
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
SPREAD = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]


@dataclass(frozen=True)
class Batch:
    """One of the six files. Pickles as its path: every process reads it for itself."""

    path: Path

    @cached_property
    def content(self) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3072) and classes (n,), both in bytes."""
        try:
            if self.path.suffix != ".bin":
                return _unpickled(self.path)
            whole = self.path.stat().st_size // (1 + PIXELS)
            records = np.memmap(self.path, np.uint8, "r", shape=(whole, 1 + PIXELS)) if whole else _NONE
            return records[:, 1:], records[:, 0]
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from None

    def check(self, bad: Bad) -> np.ndarray:
        """Which records are good."""
        images, classes = self.content
        found = np.flatnonzero(classes >= CLASSES)
        for number in found.tolist():
            place = f" (byte {number * (1 + PIXELS):,})" if self.path.suffix == ".bin" else ""
            rule = f"class {classes[number]}, but CIFAR-10's are 0 to {CLASSES - 1}."
            bad.tell(DataError(f"{self.path}, record {number + 1}{place}: {rule}"))
        if self.path.suffix == ".bin" and (rest := self.path.stat().st_size % (1 + PIXELS)):
            where = f"{self.path}, record {len(images) + 1} (byte {len(images) * (1 + PIXELS):,})"
            bad.tell(DataError(f"{where}: the file ends after {rest} of {1 + PIXELS:,} bytes."))
        return np.setdiff1d(np.arange(len(images)), found, assume_unique=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


_NONE = np.empty((0, 1 + PIXELS), np.uint8)


class Cifar(Images):
    """The good records of some files, one file behind the other."""

    def __init__(self, batches: Sequence[Batch], bad: Bad, augment: Augment | None = None):
        good = [batch.check(bad) for batch in batches]
        super().__init__(sum(map(len, good)), SIDE, CLASSES, augment)
        self.batches = tuple(batches)
        self.which = np.repeat(np.arange(len(good)), [len(part) for part in good])
        self.record = np.concatenate(good)
        if not self.count:
            raise DataError(f"{batches[0].path.parent} holds no good record of CIFAR-10; get it anew from {HOME}.")

    def raw(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (B, 3072) and classes (B,) as they lie in the files."""
        images, classes = np.empty((len(indices), PIXELS), np.uint8), np.empty(len(indices), np.uint8)
        which, record = self.which[indices], self.record[indices]
        for number in np.unique(which).tolist():
            here = which == number
            stored, known = self.batches[number].content
            images[here], classes[here] = stored[record[here]], known[record[here]]
        return images, classes

    def pictures(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, classes = self.raw(indices)
        pixels = images.reshape(-1, 3, SIDE, SIDE).astype(np.float32)
        pixels *= 1 / (255 * SPREAD)
        pixels -= MEAN / SPREAD
        return pixels, classes.astype(np.int64)


def open_cifar(path: str, bad: Bad, augment: Augment | None) -> tuple[Cifar, Cifar]:
    """The training and the test images of a folder, which may hold the files or the folder that they come in."""
    folder = Path(path).expanduser()
    places = [folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"]
    named = [(place, ending) for place in places for ending in (".bin", "")]
    for place, ending in named if path else []:
        files = [place / f"{name}{ending}" for name in (*TRAINING, TEST)]
        there = [file for file in files if file.is_file()]
        if there and len(there) < len(files):
            missing = next(file for file in files if file not in there)
            raise DataError(f"{missing} is missing beside {there[0].name}; unpack the files of {HOME} again.")
        if there:
            batches = [Batch(file) for file in files]
            return Cifar(batches[:-1], bad, augment), Cifar(batches[-1:], bad)
    raise DataError(
        f"data.path = {path!r} holds no CIFAR-10. Get cifar-10-binary.tar.gz or cifar-10-python.tar.gz from {HOME}, "
        f"unpack it into {f'{folder}' if path else 'a folder'}, and give that folder as data.path."
    )


# Pickles that are not run


class _Array:
    """Stands for a numpy array of bytes."""

    shape: tuple[int, ...] = ()
    kind: object = None
    content: bytes = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.kind, _, self.content = state


class _Type:
    """Stands for a numpy type."""

    def __init__(self, name: object, *more: object):
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass


def _array(*_: object) -> _Array:
    return _Array()


def _of_buffer(content: bytes, kind: object, shape: tuple[int, ...], order: str) -> _Array:
    made = _Array()
    made.shape, made.kind, made.content = shape, kind, content
    return made


def _latin(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Type}
for _core in ("numpy.core", "numpy._core"):
    _KNOWN[(f"{_core}.multiarray", "_reconstruct")] = _array
    _KNOWN[(f"{_core}.numeric", "_frombuffer")] = _of_buffer
_KNOWN[("_codecs", "encode")] = _latin  # how Python 3 writes bytes for Python 2


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of CIFAR-10 does")
        return _KNOWN[module, name]


def _unpickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        found = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        values = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
        data, labels = values["data"], values["labels"]
        if not isinstance(data, _Array) or not isinstance(data.kind, _Type) or data.kind.name not in ("u1", "|u1"):
            raise ValueError("its data is no array of bytes")
        content = data.content.encode("latin1") if isinstance(data.content, str) else bytes(data.content)
        images = np.frombuffer(content, np.uint8).reshape(-1, PIXELS)
        classes = np.array([min(max(int(label), -1), 255) for label in labels]).astype(np.uint8)
        if len(classes) != len(images):
            raise ValueError(f"it has {len(images)} images but {len(classes)} labels")
    except OSError:
        raise
    except Exception as error:  # whatever a wrong file makes of the reader
        raise DataError(f"{path} is no file of CIFAR-10: {error}. Get it anew from {HOME}.") from None
    return images, classes
