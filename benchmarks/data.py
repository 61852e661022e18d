"""Compares Shardwise's loader with PyTorch's DataLoader over a map-style dataset, on the same files in one run.

    tokens    windows of 1,024 tokens from a token file of 32 MiB, batches of 32
    images    12,000 images in CIFAR-10's format, cropped and flipped, batches of 128

Both produce full batches in shuffled order and take turns, without workers and with the same number of workers;
throughput is the median over turns. The wait is that of `benchmarks/data_loading.py` on the built-in demo.
Run: python benchmarks/data.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.data.images import MEAN, STD, TEST_FILE, TRAIN_FILES, ImageAugmentation, open_cifar10
from shardwise.data.input_files import BadRecords
from shardwise.data.loader import Loader
from shardwise.data.sample_stream import SampleStream
from shardwise.data.token_file import TokenWindows, open_token_file, write_token_arrays

WINDOW = 1024
ROOT = Path(__file__).parent.parent


class PlainTokens(Dataset):
    """A straightforward implementation: a memory map, a slice, two tensors."""

    def __init__(self, path: Path):
        self.path = path
        self.map: np.ndarray | None = None

    def __len__(self) -> int:
        return (self.path.stat().st_size - 32) // 2 // WINDOW - 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.map is None:
            self.map = np.memmap(self.path, "<u2", "r", offset=32)
        row = torch.from_numpy(self.map[index * WINDOW : (index + 1) * WINDOW + 1].astype(np.int64))
        return row[:-1], row[1:]


class PlainImages(Dataset):
    """A straightforward implementation without torchvision: bytes in memory, padded crop, flip, normalization."""

    def __init__(self, folder: Path):
        records = [np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in TRAIN_FILES]
        data = np.concatenate(records)
        self.images, self.classes = data[:, 1:].reshape(-1, 3, 32, 32), data[:, 0]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.images[index].astype(np.float32) / 255 - MEAN) / STD
        image = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        top, left, flip = torch.randint(9, (3,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return torch.from_numpy((image[:, :, ::-1] if flip % 2 else image).copy()), int(self.classes[index])


def endless(loader: DataLoader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def write_files(folder: Path) -> None:
    rng = np.random.default_rng(0)
    write_token_arrays(folder / "tokens.bin", iter([rng.integers(0, 50_000, 1 << 24)]), 50_000)
    for name in (*TRAIN_FILES, TEST_FILE):
        records = rng.integers(0, 256, (2000, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def compare(kind: str, folder: Path, workers: int, turns: int, batches: int) -> tuple[float, float]:
    """Returns the samples per second of Shardwise's loader and of PyTorch's."""
    size = 32 if kind == "tokens" else 128
    if kind == "tokens":
        stream = SampleStream(TokenWindows([open_token_file(folder / "tokens.bin")], WINDOW), 0)
        plain: Dataset = PlainTokens(folder / "tokens.bin")
    else:
        stream = SampleStream(open_cifar10(str(folder), BadRecords(), ImageAugmentation(["crop", "flip"], 0))[0], 0)
        plain = PlainImages(folder)
    baseline = endless(DataLoader(plain, size, shuffle=True, num_workers=workers, drop_last=True))
    rates: dict[str, list[float]] = {"shardwise": [], "pytorch": []}
    with closing(Loader(stream, size, workers=workers)) as loader:
        pairs: list[tuple[str, Callable[[], Any]]] = [("shardwise", loader.__next__), ("pytorch", baseline.__next__)]
        for turn in range(turns + 1):
            for name, next_batch in pairs if turn % 2 else reversed(pairs):
                for _ in range(2 * (workers + 1)):  # drain prefetched batches
                    next_batch()
                begin = time.perf_counter()
                for _ in range(batches):
                    next_batch()
                if turn:
                    rates[name].append(batches * size / (time.perf_counter() - begin))
    return statistics.median(rates["shardwise"]), statistics.median(rates["pytorch"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        for kind in ("tokens", "images"):
            for workers in (0, 2):
                ours, pytorch = compare(kind, Path(name), workers, options.turns, options.batches)
                rates = f"Shardwise {ours:,.0f} samples/s, DataLoader {pytorch:,.0f}, ratio {ours / pytorch:.2f}"
                print(f"{kind}, {workers or 'no'} workers: {rates}")
    command = [sys.executable, str(ROOT / "benchmarks/data_loading.py"), str(ROOT / "shardwise/demo.toml"), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    waits = f"{1e3 * report['wait_seconds']:.3f} ms of {1e3 * report['step_seconds']:.0f} ms"
    print(f"demo: a step waits for data {waits}, {100 * report['wait_fraction']:.2f}%")


if __name__ == "__main__":
    main()
