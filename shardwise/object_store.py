"""Files in an object store, by URL: s3://, gs://, az://, file:// and whatever else fsspec reaches.

`Path("s3://bucket/run")` turns into `s3:/bucket/run`; both forms name the same URL. An object appears whole or not at
all, and several do not appear at once, so what makes the others valid is written last. A downloaded file gets the time
of its object: one with the same time and size is not downloaded again."""

import glob
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from shardwise.errors import DataError, JobError, StoreError
from shardwise.files import TEMPORARY_NAME, atomic_write, cache_folder, file_lock, fsync_and_rename

URL_PATTERN = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/].*)")  # a scheme of one letter would be a drive of Windows
TIME_FIELDS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")  # by kind of store
TRANSFERS = 8  # at once; each object of an S3 store is also split into parts that travel at once
Entry = tuple[int, float]  # size in bytes, and Unix time of the last change


def parse_url(path: str | Path) -> str:
    """Returns the URL that a text or path names, always in the same form; empty if it names a local path."""
    match = URL_PATTERN.fullmatch(str(path))
    if match is None:
        return ""
    if ":" in match[2].split("/")[0].rpartition("@")[0]:  # it would be in files and messages
        raise JobError(f"a URL of {match[1]}:// has a password; set it in the environment or a file of its package.")
    return f"{match[1]}:{'///' if match[1] in ('file', 'local') else '//'}{match[2].rstrip('/')}"


class ObjectStore:
    """The objects below a URL, by relative name. Every failure is a StoreError with a sentence."""

    def __init__(self, url: str):
        import fsspec

        self.url, self.is_local = url, url.partition(":")[0] in ("file", "local")
        options = {"auto_mkdir": True} if self.is_local else {"use_listings_cache": False}
        with self._explain("opened"):
            self.fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        self.root = str(root).rstrip("/")

    @contextmanager
    def _explain(self, verb: str, name: str = "") -> Iterator[None]:
        """Makes a sentence of what a library raises: each kind of store has its own errors."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            text = f": {' '.join(str(error).split()).rstrip('.')[:300]}".rstrip(": ")
            place = f"{self.url}/{name}".rstrip("/")
            raise StoreError(f"{place} cannot be {verb}: {type(error).__name__}{text}.") from None

    def list(self, pattern: str = "") -> dict[str, Entry]:
        """Returns all objects, or those that match a glob. Names that lead out of a folder are left out."""
        found: dict[str, Any] = {}
        with self._explain("listed"), suppress(FileNotFoundError):
            search, path = (self.fs.glob, f"{self.root}/{pattern}") if pattern else (self.fs.find, self.root)
            found = search(path, detail=True)
        entries = {}
        for path, info in found.items():
            name = str(path).removeprefix(self.root).removeprefix("/")
            if is_plain(name) and info.get("type") != "directory":
                entries[name] = int(info["size"] or 0), _unix_time(info)
        return entries

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object, None if it does not exist."""
        with self._explain("read", name), suppress(FileNotFoundError):
            return bytes(self.fs.cat_file(f"{self.root}/{name}"))
        return None

    def write(self, name: str, content: bytes) -> None:
        self._write(name, lambda path: self.fs.pipe_file(path, content))

    def put(self, source: BinaryIO, name: str) -> None:
        """Uploads an open file, from its beginning; it may have been removed since it was opened."""
        descriptor = f"/proc/self/fd/{source.fileno()}"
        local = descriptor if os.path.exists(descriptor) else source.name
        self._write(name, lambda path: self.fs.put_file(local, path))

    def _write(self, name: str, upload: Callable[[str], Any]) -> None:
        path = Path(f"{self.root}/{name}")
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with self._explain("written", name):
            upload(str(temporary) if self.is_local else f"{self.root}/{name}")
            if self.is_local:  # whole or not at all, as in other stores
                fsync_and_rename(temporary, path)

    def get(self, name: str, target: Path, entry: Entry | None = None) -> None:
        """Downloads an object, unless the file is the same by size and time, if these are given."""
        stat = target.stat() if target.is_file() else None
        if entry and stat and stat.st_size == entry[0] and abs(stat.st_mtime - entry[1]) < 1e-3:
            return
        with self._explain("read", name):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(target) as file:
                self.fs.get_file(f"{self.root}/{name}".rstrip("/"), file.name)
            if entry is not None:
                os.utime(target, (entry[1], entry[1]))

    def delete(self, names: Iterable[str]) -> None:
        def delete_one(name: str) -> None:
            with self._explain("removed", name), suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")
                if self.is_local:
                    with suppress(OSError):
                        Path(f"{self.root}/{name}").parent.rmdir()  # if it is empty now

        in_parallel(delete_one, names)


def is_plain(name: str) -> bool:
    """Whether a name stays below its folder, and is no file that is being written."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or "\0" in name
    return not leads_out and not TEMPORARY_NAME.fullmatch(path.name)


def _unix_time(info: dict[str, Any]) -> float:
    value = next((info[key] for key in TIME_FIELDS if info.get(key) is not None), 0.0)
    with suppress(ValueError, TypeError):
        value = datetime.fromisoformat(value) if isinstance(value, str) else value
        return value.timestamp() if isinstance(value, datetime) else float(value)
    return 0.0


def in_parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> None:
    """Calls a function for every item, several at once; raises the first error."""
    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(function, items))


def local_copy(path: str) -> str:
    """Returns the local copy of what a URL names, a file, folder or glob, downloading what is new; a path unchanged.
    There is one per machine, whose place in the cache says what it is a copy of."""
    if not (url := parse_url(path)):
        return path
    parts = url.split("/")
    plain = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    base, pattern = "/".join(parts[:plain]), "/".join(parts[plain:])
    store, target = ObjectStore(base), cached_path(base)
    entries = store.list(pattern)
    if not entries:
        raise DataError(f"data.path = {path!r}: no such file or folder; give a file, a folder or a glob.")
    with file_lock(cache_folder() / "locks" / hashlib.sha256(base.encode()).hexdigest()):
        in_parallel(lambda item: store.get(item[0], target / item[0], item[1]), entries.items())
        for file in target.rglob("*") if target.is_dir() and not pattern else ():
            if file.is_file() and str(file.relative_to(target)) not in entries:
                file.unlink()  # as in the store
    return str(target / pattern)


def cached_path(name: str) -> Path:
    """Returns where the local copy of a URL is; the path itself if it is none."""
    scheme, _, rest = parse_url(name).partition(":")
    if scheme and not is_plain(rest.lstrip("/")):
        raise DataError(f"{name!r} is no URL of data: write it without '..'.")
    return cache_folder().absolute() / "data" / scheme / rest.lstrip("/") if scheme else Path(name)


def original_name(path: str) -> str:
    """Returns the URL that a path in the cache is a copy of; other paths unchanged."""
    folder = cache_folder().absolute() / "data"
    if not Path(path).is_relative_to(folder):
        return path
    scheme, *rest = Path(path).relative_to(folder).parts
    return parse_url(f"{scheme}:/{'/'.join(rest)}")
