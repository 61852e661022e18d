"""Checkpoint folders on the disk: which there are, whether they are whole, and how all ranks come to one verdict.

A finished checkpoint is `step-<number>`; whatever is being written or removed is `step-<number>.partial-<word>`. Its
`manifest.json` is written last and names every other file with size and SHA-256; it holds the sum of its own values
too. `shardwise.train.checkpoint` says what is promised of all this.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
# The second number: the step was saved again while an older folder of that step, perhaps a damaged one, was there.
NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """The ranks of a world, on a group of their own: a write behind training must not mix with its collectives."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_the_world(cls) -> Peers:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", group_desc="checkpoint"))

    def all(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        values: list[Any] = [value]
        if self.group is not None:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, act: Callable[[], T]) -> T:
        """What `act` gives on rank 0, and only there; its error is raised on every rank."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [(act(), None)]
            except Exception as error:
                answer = [(None, error)]
        if self.group is not None:
            dist.broadcast_object_list(answer, src=0, group=self.group)
        value, problem = answer[0]
        if problem is not None:
            raise problem
        result: T = value
        return result


# Which there are


def saved(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of everything that has the name of a finished checkpoint, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted(found, key=lambda item: (item[0], _attempt(item[1])), reverse=True)


def good_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Those of `saved` with a manifest and files of the right sizes; what is in the files is not read."""
    good = []
    for step, path in saved(folder):
        with suppress(Damaged):
            if not any(_problem(path, name, facts, quick=True) for name, facts in read_manifest(path)["files"].items()):
                good.append((step, path))
    return good


def free_name(folder: Path, step: int) -> Path:
    """Where step `step` can be put. A folder cannot be replaced in one move, so an older one of that step stays."""
    taken = [_attempt(path) for number, path in saved(folder) if number == step]
    name = f"step-{step:08d}"
    return folder / (f"{name}.{max(taken) + 1}" if taken else name)


def _attempt(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[2] or 0) if match else 0


# Whether they are whole


class Damaged(Exception):
    """Names a file and what is wrong with it."""


@dataclass(frozen=True)
class Choice:
    """The newest checkpoint that holds every byte it was written with, and those that were passed over."""

    path: Path | None
    manifest: dict[str, Any]
    damaged: list[tuple[Path, str]]


def newest_good(folder: Path, peers: Peers, step: int | None = None) -> Choice:
    """Reads everything in the newest checkpoint, or in that of `step`, and goes to the next older one if it must."""
    there = peers.first(lambda: saved(folder))
    if step is not None and step not in dict(there):
        found = ", ".join(str(number) for number, _ in there) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; there are: {found}.")
    damaged: list[tuple[Path, str]] = []
    for number, path in there:
        if step is not None and number != step:
            continue
        problems, manifest = examine(path, peers)
        if not problems:
            return Choice(path, manifest, damaged)
        damaged.append((path, f"checkpoint {path.name} is damaged: {'; '.join(problems)}."))
    if not damaged:
        return Choice(None, {}, [])
    sentences = " ".join(sentence for _, sentence in damaged)
    raise CheckpointError(f"none of the checkpoints in {folder} can be loaded. {sentences}")


def examine(path: Path, peers: Peers) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a checkpoint, and its manifest. The files are shared out over the ranks."""
    try:
        manifest = peers.first(lambda: read_manifest(path))
    except Damaged as error:
        return [str(error)], {}
    by_size = sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"])
    own = [_problem(path, name, facts) for name, facts in by_size[peers.rank :: peers.size]]
    return sorted(problem for part in peers.all(own) for problem in part if problem), manifest


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise Damaged(f"{MANIFEST} has changed since it was written")
    if manifest["format"] != FORMAT:
        raise Damaged(f"{MANIFEST} is of format {manifest['format']}, this Shardwise reads format {FORMAT}")
    return manifest


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    manifest = json.loads(json.dumps({"format": FORMAT, **facts}))  # as it will be read: keys are text, tuples lists
    write_file(folder / MANIFEST, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1))


def _digest(manifest: dict[str, Any]) -> str:
    """Of the values, however they are spaced."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _problem(path: Path, name: str, facts: dict[str, Any], quick: bool = False) -> str | None:
    try:
        size = (path / name).stat().st_size
        if size != facts["bytes"]:
            return f"{name} has {size} bytes instead of {facts['bytes']}"
        if not quick:
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                    return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


# Writing and removing


class Hashed(io.BufferedWriter):
    """A file that is hashed on its way to the disk, and is on the disk once it is closed.

    The sum is of what was meant, so whatever happens to the file afterwards is seen.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(io.FileIO(path, "w"))
        self.sum, self.size = hashlib.sha256(), 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.problem = error
            raise
        self.sum.update(data)
        self.size += count
        return count

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()

    def facts(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.sum.hexdigest()}


def write_file(path: Path, text: str) -> dict[str, Any]:
    with Hashed(path) as file:
        file.write(text.encode())
    return file.facts()


def make_partial(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}.partial-{uuid.uuid4().hex[:8]}"
    path.mkdir()  # not its parents: a run folder that is gone, perhaps with its mount, must not come back empty
    return path


def remove(path: Path) -> None:
    """Away under another name first, so that a crash leaves no half of a checkpoint under a good name."""
    doomed = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
    with suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    for path in folder.glob("step-*.partial-*"):
        shutil.rmtree(path, ignore_errors=True)
