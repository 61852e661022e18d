"""Atomic writes of files and folders, locks, the cache folder, and the one parser of every TOML and JSON file."""

import json
import os
import re
import tomllib
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from shardwise.errors import DataError, JobError, ShardwiseError, shorten

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{32}")  # of what `atomic_write` has not finished
MAX_DEPTH = 64  # brackets within brackets; deeper values would end in a RecursionError wherever they are used


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError, and nothing else, if the text is malformed, too deep, or has a huge integer."""
    return _parse(tomllib.loads, text)  # type: ignore[no-any-return]


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parses JSON as `parse_toml` parses TOML. `parse_constant` converts NaN and infinities, which are not JSON."""
    return _parse(lambda source: json.loads(source, parse_constant=parse_constant), text)


def parse_record(line: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> dict[str, Any] | None:
    """Parses a line of a JSON Lines file; None if it is damaged or not an object, or if its step is no whole number."""
    with suppress(ValueError):
        record = parse_json(line, parse_constant)
        return record if isinstance(record, dict) and type(record.get("step", 0)) is int else None
    return None


def _parse(load: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        values = load(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise ValueError("it has an integer of more than 64 bits") from None
        raise
    _check_plain(values)
    return values


def _check_plain(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("its brackets are nested too deeply")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list | int):
                _check_plain(item, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("it has an integer of more than 64 bits")


def user_path(name: str | Path) -> Path:
    """Returns a path in which `~` is the user's home. The home of a user that nobody is stays as it is written, so that
    whoever looks there finds no such file, and says so."""
    return Path(os.path.expanduser(name))


def require_parent_folder(path: Path | None) -> None:
    """Raises JobError if a file cannot be created because its folder is missing, before any work is done."""
    if path is not None and path.is_dir():
        raise JobError(f"{path} is a folder; give the path of a file.")
    if path is not None and not path.parent.is_dir():
        raise JobError(f"{path}: the folder {path.parent} does not exist; create it first.")


def import_extra(module: str, extra: str, what: str) -> Any:
    """Imports an optional package."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(f"{what} needs the {module.split('.')[0]} package; `pip install shardwise[{extra}]`.") from None


@contextmanager
def os_errors_as(kind: type[ShardwiseError], problem: str) -> Iterator[None]:
    """Turns an OSError, or what damaged compressed files raise, into an error of this kind: the problem, its cause."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise kind(f"{problem}: {getattr(error, 'strerror', '') or error}.") from None


@contextmanager
def malformed_as_data_error(*runs: Path) -> Iterator[None]:
    """Turns what a value of the wrong type or size raises into DataError: the files of a run may have been edited."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        names, reason = ", ".join(map(str, runs)), f"{type(error).__name__}: {shorten(str(error))}"
        raise DataError(f"a file in {names} is malformed ({reason}); restore it or remove it.") from None


def cache_folder() -> Path:
    """Returns the folder that keeps encoded corpora, downloads and local copies of runs between runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwise"
    return Path(os.environ.get("SHARDWISE_CACHE", default))


@contextmanager
def file_lock(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder, if its file system has locks. A killed process releases it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError:  # a read-only cache, filled elsewhere, needs no lock
        yield
        return
    with lock:
        with suppress(OSError):
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _temporary_path(path: Path) -> Path:
    """Returns the name under which a file is written before it gets its own (`TEMPORARY_NAME`)."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` if the block succeeds; of several writers, the last one wins."""
    temporary = _temporary_path(path)
    try:
        with temporary.open("wb", buffering=1 << 20) as file:
            yield file
        fsync_and_rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a reader, or a start after a kill, finds the old text or the new one."""
    content = _encode(path, text)
    with atomic_write(path) as file:
        file.write(content)


def create_text(path: Path, text: str) -> None:
    """Writes a file that does not exist, whole or not at all; of several processes at once, one succeeds.

    Raises FileExistsError if the file exists. The name is a second link to the finished file, since a rename would
    replace what another process has written meanwhile."""
    content = _encode(path, text)
    temporary = _temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
        _fsync(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError as error:  # a file system without hard links
            if path.exists():
                raise FileExistsError(error.errno, "the file exists", str(path)) from None
            os.replace(temporary, path)
        _fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _encode(path: Path, text: str) -> bytes:
    """Returns a text as UTF-8, before any file is touched: it may have the name of a file in another encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        begin = max(0, error.start - 20)
        part = text[begin : error.end + 20]
        raise JobError(
            f"{path} cannot be written: {shorten(part)} in it is not valid UTF-8; rename the file or folder of that "
            "name, or make a link to it with another name."
        ) from None


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
