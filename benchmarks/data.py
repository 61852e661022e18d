"""Our loader against PyTorch's DataLoader over a plain map-style set, on the same files, side by side in one run.

    tokens    windows of 1,024 of a token file of 32 MiB, batches of 32
    images    files as CIFAR-10's (12,000 images), cropped and mirrored, batches of 128

Both give whole batches in a shuffled order, in turns; samples a second are those of the median turn, by this process or
by as many workers. The wait is that of `shardwise bench data` for the built-in demo. Run: python benchmarks/data.py
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.data.augment import ImageAugmentation
from shardwise.data.bad_records import BadRecords
from shardwise.data.cifar10 import MEAN, STD, TEST_FILE, TRAIN_FILES, open_cifar10
from shardwise.data.loader import Loader
from shardwise.data.sample_stream import SampleStream
from shardwise.data.token_file import open_token_file, write_token_arrays
from shardwise.data.token_windows import TokenWindows

WINDOW = 1024
ROOT = Path(__file__).parent.parent


class PlainTokens(Dataset):
    """As one would write it: a memory map, a slice, two tensors."""

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
    """As one would write it without a library of transforms: bytes in memory, a padded crop, a flip, normalised."""

    def __init__(self, folder: Path):
        records = [np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in TRAIN_FILES]
        whole = np.concatenate(records)
        self.images, self.classes = whole[:, 1:].reshape(-1, 3, 32, 32), whole[:, 0]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.images[index].astype(np.float32) / 255 - MEAN) / STD
        image = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        top, left, mirror = torch.randint(9, (3,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return torch.from_numpy((image[:, :, ::-1] if mirror % 2 else image).copy()), int(self.classes[index])


def endless(loader: DataLoader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def files(folder: Path) -> None:
    draw = np.random.default_rng(0)
    write_token_arrays(folder / "tokens.bin", iter([draw.integers(0, 50_000, 1 << 24)]), 50_000)
    for name in (*TRAIN_FILES, TEST_FILE):
        records = draw.integers(0, 256, (2000, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def compare(kind: str, folder: Path, workers: int, turns: int, batches: int) -> tuple[float, float]:
    """Samples a second of ours and of PyTorch's."""
    size = 32 if kind == "tokens" else 128
    if kind == "tokens":
        stream = SampleStream(TokenWindows([open_token_file(folder / "tokens.bin")], WINDOW), 0)
        plain: Dataset = PlainTokens(folder / "tokens.bin")
    else:
        stream = SampleStream(open_cifar10(str(folder), BadRecords(), ImageAugmentation(["crop", "flip"], 0))[0], 0)
        plain = PlainImages(folder)
    theirs = endless(DataLoader(plain, size, shuffle=True, num_workers=workers, drop_last=True))
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    with Loader(stream, size, workers=workers) as ours:
        pairs: list[tuple[str, Callable[[], Any]]] = [("ours", ours.__next__), ("theirs", theirs.__next__)]
        for turn in range(turns + 1):
            for name, take in pairs if turn % 2 else reversed(pairs):
                for _ in range(2 * (workers + 1)):  # what lies ready from before
                    take()
                begin = time.perf_counter()
                for _ in range(batches):
                    take()
                if turn:
                    times[name].append(batches * size / (time.perf_counter() - begin))
    return statistics.median(times["ours"]), statistics.median(times["theirs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--batches", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        files(Path(name))
        for kind in ("tokens", "images"):
            for workers in (0, 2):
                ours, theirs = compare(kind, Path(name), workers, given.turns, given.batches)
                who = f"{workers} workers" if workers else "no workers"
                print(f"{kind}, {who}: ours {ours:,.0f} samples/s, DataLoader {theirs:,.0f}, ratio {ours / theirs:.2f}")
    command = [sys.executable, "-m", "shardwise", "bench", "data", str(ROOT / "shardwise" / "demo.toml"), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    waits = f"{1e3 * report['wait_seconds']:.3f} ms of {1e3 * report['step_seconds']:.0f} ms"
    print(f"the demo: a step waits {waits}, {100 * report['wait_fraction']:.2f}%")


if __name__ == "__main__":
    main()
