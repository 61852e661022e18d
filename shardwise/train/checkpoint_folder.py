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

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
# The second number: the step was saved again while an older folder of that step, perhaps a damaged one, was there.
FOLDER_PATTERN = re.compile(r"step-(\d+)(?:\.(\d+))?")

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointGroup:
    """The ranks of a world, on a group of their own: a write behind training must not mix with its collectives."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls) -> CheckpointGroup:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", group_desc="checkpoint"))

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        values: list[Any] = [value]
        if self.group is not None:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self.group)
        return values

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """What `act` gives on rank 0, and only there; its error is raised on every rank."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [(function(), None)]
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


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of everything that has the name of a finished checkpoint, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := FOLDER_PATTERN.fullmatch(path.name))]
    return sorted(found, key=lambda item: (item[0], _save_number(item[1])), reverse=True)


def valid_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Those of `saved` with a manifest and files of the right sizes; what is in the files is not read."""
    good = []
    for step, path in list_checkpoints(folder):
        with suppress(DamagedCheckpoint):
            if not any(
                _file_problem(path, name, facts, size_only=True) for name, facts in read_manifest(path)["files"].items()
            ):
                good.append((step, path))
    return good


def next_free_path(folder: Path, step: int) -> Path:
    """Where step `step` can be put. A folder cannot be replaced in one move, so an older one of that step stays."""
    taken = [_save_number(path) for number, path in list_checkpoints(folder) if number == step]
    name = f"step-{step:08d}"
    return folder / (f"{name}.{max(taken) + 1}" if taken else name)


def _save_number(path: Path) -> int:
    match = FOLDER_PATTERN.fullmatch(path.name)
    return int(match[2] or 0) if match else 0


# Whether they are whole


class DamagedCheckpoint(Exception):
    """Names a file and what is wrong with it."""


@dataclass(frozen=True)
class CheckpointChoice:
    """The newest checkpoint that holds every byte it was written with, and those that were passed over."""

    path: Path | None
    manifest: dict[str, Any]
    damaged: list[tuple[Path, str]]


def find_newest_valid(folder: Path, group: CheckpointGroup, step: int | None = None) -> CheckpointChoice:
    """Reads everything in the newest checkpoint, or in that of `step`, and goes to the next older one if it must."""
    candidates = group.on_rank_zero(lambda: list_checkpoints(folder))
    if step is not None and step not in dict(candidates):
        found = ", ".join(str(number) for number, _ in candidates) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; there are: {found}.")
    damaged: list[tuple[Path, str]] = []
    for number, path in candidates:
        if step is not None and number != step:
            continue
        problems, manifest = verify_checkpoint_files(path, group)
        if not problems:
            return CheckpointChoice(path, manifest, damaged)
        damaged.append((path, f"checkpoint {path.name} is damaged: {'; '.join(problems)}."))
    if not damaged:
        return CheckpointChoice(None, {}, [])
    sentences = " ".join(sentence for _, sentence in damaged)
    raise CheckpointError(f"none of the checkpoints in {folder} can be loaded. {sentences}")


def verify_checkpoint_files(path: Path, group: CheckpointGroup) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a checkpoint, and its manifest. The files are shared out over the ranks."""
    try:
        manifest = group.on_rank_zero(lambda: read_manifest(path))
    except DamagedCheckpoint as error:
        return [str(error)], {}
    by_size = sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"])
    problems = [_file_problem(path, name, facts) for name, facts in by_size[group.rank :: group.size]]
    return sorted(problem for part in group.all_gather(problems) for problem in part if problem), manifest


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} has changed since it was written")
    if manifest["format"] != FORMAT_VERSION:
        raise DamagedCheckpoint(
            f"{MANIFEST_FILE} is of format {manifest['format']}, this Shardwise reads format {FORMAT_VERSION}"
        )
    return manifest


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    manifest = json.loads(
        json.dumps({"format": FORMAT_VERSION, **facts})
    )  # as it will be read: keys are text, tuples lists
    write_hashed_file(folder / MANIFEST_FILE, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1))


def _digest(manifest: dict[str, Any]) -> str:
    """Of the values, however they are spaced."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_problem(path: Path, name: str, file_info: dict[str, Any], size_only: bool = False) -> str | None:
    try:
        size = (path / name).stat().st_size
        if size != file_info["bytes"]:
            return f"{name} has {size} bytes instead of {file_info['bytes']}"
        if not size_only:
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != file_info["sha256"]:
                    return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


# Writing and removing


class HashedFileWriter(io.BufferedWriter):
    """A file that is hashed on its way to the disk, and is on the disk once it is closed.

    The sum is of what was meant, so whatever happens to the file afterwards is seen.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(io.FileIO(path, "w"))
        self.digest, self.size = hashlib.sha256(), 0
        self.os_error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.os_error = error
            raise
        self.digest.update(data)
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

    def file_info(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


def write_hashed_file(path: Path, text: str) -> dict[str, Any]:
    with HashedFileWriter(path) as file:
        file.write(text.encode())
    return file.file_info()


def create_partial(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}.partial-{uuid.uuid4().hex[:8]}"
    path.mkdir()  # not its parents: a run folder that is gone, perhaps with its mount, must not come back empty
    return path


def remove_checkpoint(path: Path) -> None:
    """Away under another name first, so that a crash leaves no half of a checkpoint under a good name."""
    removed = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
    with suppress(OSError):
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    for path in folder.glob("step-*.partial-*"):
        shutil.rmtree(path, ignore_errors=True)
