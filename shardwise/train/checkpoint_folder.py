"""Checkpoint folders on disk: listing, verifying, writing and removing them.

A finished checkpoint is `step-<number>`; one that is being written or removed is `step-<number>.partial-<id>`. Its
`manifest.json` is written last and has the size and SHA-256 of every other file, and a SHA-256 of its own values.
`shardwise.train.checkpoint` lists the guarantees."""

import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.collectives import all_gather_json, broadcast_json
from shardwise.errors import CheckpointError, JobError
from shardwise.files import parse_json
from shardwise.host_memory import num_threads

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
# The second number counts repeated saves of a step: an existing folder, maybe a damaged one, is not overwritten.
FOLDER_PATTERN = re.compile(r"step-(\d+)(?:\.(\d+))?")
FILE_PATTERN = re.compile(r"(?!\.\.?$)[\w.-]+")  # a manifest may come from elsewhere: no path leads out of its folder
T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointGroup:
    """All ranks, in a process group of their own, so that background saves do not mix with training's collectives."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    sharing: tuple[int, ...] = (0,)  # ranks that share this run folder: all, unless nodes have their own (URLs)

    @classmethod
    def create(cls, folder_id: str = "") -> "CheckpointGroup":
        """`folder_id`: differs between ranks that do not share a run folder."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", group_desc="checkpoint"))
        ids = group.all_gather(folder_id)
        return replace(group, sharing=tuple(rank for rank in range(group.size) if ids[rank] == folder_id))

    @property
    def has_one_folder(self) -> bool:
        return len(self.sharing) == self.size

    def on_leaders(self, function: Callable[[], object]) -> None:
        """Calls `function` on the first rank of every run folder; raises the first error on every rank."""
        is_leader = self.rank == self.sharing[0]
        self.on_every_rank(lambda: function() if is_leader else None, names_rank=not self.has_one_folder)

    def on_every_rank(self, function: Callable[[], T], names_rank: bool = True) -> list[T]:
        """Calls `function` on every rank; returns all results, or raises the first error, on every rank."""
        result, problem = None, ""
        try:
            result = function()
        except Exception as error:
            problem = f"rank {self.rank}: {error}" if names_rank else str(error)
        outcomes = self.all_gather((result, problem))
        if problems := [problem for _, problem in outcomes if problem]:
            raise CheckpointError(problems[0])
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def all_gather(self, value: T) -> list[T]:
        return [value] if self.group is None else all_gather_json(value, self.group)

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """Calls `function` on rank 0; every rank returns its result (JSON) or raises its error (or a RuntimeError)."""
        if self.group is None:
            return function()
        try:
            outcome = [function() if self.rank == 0 else None, None, None]
        except Exception as error:
            broadcast_json([None, type(error).__name__, str(error)], self.group)
            raise
        result, kind, message = broadcast_json(outcome, self.group)
        if kind is not None:
            known = {error.__name__: error for error in (CheckpointError, DamagedCheckpoint, JobError)}
            raise known.get(kind, RuntimeError)(message)
        return result


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns step and path of every folder named like a finished checkpoint, newest first."""
    if not folder.is_dir():
        return []
    finished = [path for path in folder.iterdir() if FOLDER_PATTERN.fullmatch(path.name)]
    return [(save_order(path.name)[0], path) for path in sorted(finished, key=lambda path: save_order(path.name))[::-1]]


def shared_list(folder: Path, group: CheckpointGroup) -> list[tuple[int, Path]]:
    """Returns what `list_checkpoints` returns on rank 0, on every rank."""
    listed = group.on_rank_zero(lambda: [(step, path.name) for step, path in list_checkpoints(folder)])
    return [(step, folder / name) for step, name in listed]


def valid_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints whose manifest is valid and whose files have the right sizes; does not hash them."""
    valid = []
    for step, path in list_checkpoints(folder):
        with suppress(DamagedCheckpoint):
            files = read_manifest(path)["files"]
            if not any(file_problem(path, name, info, size_only=True) for name, info in files.items()):
                valid.append((step, path))
    return valid


def next_free_path(folder: Path, step: int) -> Path:
    """Returns a free path for a step. A folder cannot be replaced atomically, so an existing one is kept."""
    taken = [save_order(path.name)[1] for number, path in list_checkpoints(folder) if number == step]
    name = f"step-{step:08d}"
    return folder / (f"{name}.{max(taken) + 1}" if taken else name)


def save_order(name: str) -> tuple[int, int]:
    """Returns the step of a checkpoint and the number of its save."""
    match = FOLDER_PATTERN.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


class DamagedCheckpoint(Exception):
    """Raised with the file and its problem."""


@dataclass(frozen=True)
class CheckpointChoice:
    """The newest intact checkpoint, and the damaged ones that were skipped, with their problems."""

    path: Path | None
    manifest: dict[str, Any]
    damaged: list[tuple[Path, str]]


def find_newest_valid(folder: Path, group: CheckpointGroup, step: int | None = None,
                      prepare: Callable[[Path], None] = lambda path: None) -> CheckpointChoice:  # fmt: skip
    """Returns the newest checkpoint, or that of `step`, whose files all match their hashes; skips damaged ones.
    `prepare` is called, on every rank, for each one before it is verified."""
    candidates = shared_list(folder, group)
    if step is not None and step not in dict(candidates):
        available = ", ".join(str(number) for number, _ in candidates) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; available: {available}.")
    damaged: list[tuple[Path, str]] = []
    for path in [path for number, path in candidates if step in (None, number)]:
        prepare(path)
        problems, manifest = verify_checkpoint_files(path, group)
        if not problems:
            return CheckpointChoice(path, manifest, damaged)
        damaged.append((path, f"checkpoint {path.name} is damaged: {'; '.join(problems)}."))
    if not damaged:
        return CheckpointChoice(None, {}, [])
    raise CheckpointError(f"no checkpoint in {folder} can be loaded. {' '.join(sentence for _, sentence in damaged)}")


def verify_checkpoint_files(path: Path, group: CheckpointGroup) -> tuple[list[str], dict[str, Any]]:
    """Returns a checkpoint's problems and its manifest; the ranks that share a folder divide its files among them."""
    try:
        manifest = group.on_rank_zero(lambda: read_manifest(path))
    except DamagedCheckpoint as error:
        return [str(error)], {}
    by_size = sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"])
    own = by_size[group.sharing.index(group.rank) :: len(group.sharing)]
    with ThreadPoolExecutor(num_threads(sum(info["bytes"] for _, info in own))) as pool:
        problems = list(pool.map(lambda file: file_problem(path, *file), own))
    return sorted(problem for part in group.all_gather(problems) for problem in part if problem), manifest


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        return parse_manifest((path / MANIFEST_FILE).read_bytes())
    except OSError as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DamagedCheckpoint(f"{MANIFEST_FILE} {problem}") from None


def parse_manifest(content: bytes) -> dict[str, Any]:
    try:
        manifest = parse_json(content)
    except ValueError as error:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} has changed since it was written")
    if (version := manifest.get("format")) != FORMAT_VERSION:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} has format {version}; this version reads {FORMAT_VERSION}")
    for name, info in files.items() if isinstance(files := manifest.get("files"), dict) else [("", None)]:
        is_info = isinstance(info, dict) and type(info.get("bytes")) is int and isinstance(info.get("sha256"), str)
        if not is_info or not FILE_PATTERN.fullmatch(name):
            raise DamagedCheckpoint(f"{MANIFEST_FILE} names {name!r}, which is no file of a checkpoint")
    return manifest


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    # Through JSON once, so that the digest is of the values as they will be read: string keys, lists for tuples.
    manifest = json.loads(json.dumps({"format": FORMAT_VERSION, **values}))
    content = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
    write_hashed_file(folder / MANIFEST_FILE, content.encode())


def _digest(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of the values, independent of formatting."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_problem(path: Path, name: str, file_info: dict[str, Any], size_only: bool = False) -> str | None:
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


class HashedFileWriter(io.BufferedWriter):
    """A file that hashes the data passed to it, so that later corruption shows, and calls fsync when it is closed."""

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

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.os_error is not None:
            raise self.os_error  # torch.save turns a full disk into "unexpected pos"

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    def file_info(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


def write_hashed_file(path: Path, content: bytes) -> dict[str, Any]:
    with HashedFileWriter(path) as file:
        file.write(content)
    return file.file_info()


def create_partial(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}.partial-{uuid.uuid4().hex[:8]}"
    path.mkdir()  # not its parents: a run folder that vanished, maybe with its mount, must not be recreated
    return path


def remove_checkpoint(path: Path) -> None:
    """Renames the folder before deleting it, so that a crash leaves no incomplete checkpoint under a valid name."""
    removed = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
    with suppress(OSError):
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    for path in folder.glob("step-*.partial-*"):
        shutil.rmtree(path, ignore_errors=True)
