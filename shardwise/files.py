"""Atomic writes of files and folders."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shardwise.errors import JobError


def require_parent_folder(*paths: Path | None) -> None:
    """Raises JobError if a file cannot be created because its folder is missing, before any work is done."""
    for path in paths:
        if path is not None and path.is_dir():
            raise JobError(f"{path} is a folder; give the path of a file.")
        if path is not None and not path.parent.is_dir():
            raise JobError(f"{path}: the folder {path.parent} does not exist; create it first.")


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` if the block succeeds; of several writers, the last one wins."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb", buffering=1 << 20) as file:
            yield file
        fsync_and_rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def fsync_and_rename(temporary: Path, final: Path) -> None:
    """Flushes a file or folder to disk, then renames it."""
    _fsync(temporary)
    os.replace(temporary, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
