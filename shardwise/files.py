"""Files and folders that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shardwise.errors import JobError


def require_parent_folder(*paths: Path | None) -> None:
    """Raises where the folder of a file that is to be written is not there: before the work, not after it."""
    for path in paths:
        if path is not None and path.is_dir():
            raise JobError(f"{path} is a folder; name a file.")
        if path is not None and not path.parent.is_dir():
            raise JobError(f"{path}: there is no folder {path.parent}.")


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes `path`'s place when the block ends well, and leaves nothing behind when it does not.

    The name in between is unique, so that several processes may write the same path: the last one wins, each is whole.
    """
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
    """Gives a file or folder that was written under another name its own, once all of it is on the disk."""
    _fsync(temporary)
    os.replace(temporary, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
