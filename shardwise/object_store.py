"""Files in an object store, by URL: s3://, gs://, az://, file:// and whatever else fsspec reaches.

`Path("s3://bucket/run")` turns into `s3:/bucket/run`; both forms name the same URL. An object appears whole or not at
all, and several do not appear at once, so what makes the others valid is written last. A downloaded file gets the time
of its object: one with the same time and size is not downloaded again.
"""

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from shardwise.errors import DataError, StoreError
from shardwise.files import TEMPORARY_NAME, atomic_write, cache_folder, file_lock

URL_PATTERN = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/].*)")  # a scheme of one letter would be a drive of Windows
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
TIME_FIELDS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")  # by kind of store
TRANSFERS = 8  # at once; each object of an S3 store is also split into parts that travel at once
Entry = tuple[int, float]  # size in bytes, and Unix time of the last change


def parse_url(path: str | Path) -> str:
    """Returns the URL that a text or path names, always in the same form; empty if it names a local path."""
    match = URL_PATTERN.fullmatch(str(path))
    if match is None:
        return ""
    return f"{match[1]}:{'///' if match[1] in ('file', 'local') else '//'}{match[2].rstrip('/')}"


class ObjectStore:
    """The objects below a URL, by relative name. Every failure is a StoreError with a sentence."""

    def __init__(self, url: str):
        import fsspec

        self.url, scheme = url, url.partition(":")[0]
        self.is_local = scheme in ("file", "local")
        try:
            options = {} if self.is_local else {"use_listings_cache": False}
            self.fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        except ImportError as error:
            raise StoreError(f"{url}: {error}; pip install {PACKAGES.get(scheme, 'the package')}.") from None
        except Exception as error:  # noqa: BLE001 - each kind of store has its own
            raise StoreError(f"{url} cannot be opened: {describe(error)}.") from None
        self.root = str(root).rstrip("/")

    def list(self, pattern: str = "") -> dict[str, Entry]:
        """Returns all objects, or those that match a glob. Names that lead out of a folder are left out."""
        try:
            if pattern:
                found = self.fs.glob(f"{self.root}/{pattern}", detail=True)
            else:
                found = self.fs.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:  # noqa: BLE001
            raise StoreError(f"{self.url} cannot be listed: {describe(error)}.") from None
        entries = {}
        for path, info in found.items():
            name = str(path).removeprefix(self.root).lstrip("/")
            if is_plain(name) and info.get("type") != "directory":
                entries[name] = int(info["size"] or 0), _unix_time(info)
        return entries

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object, None if it does not exist."""
        try:
            return bytes(self.fs.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001
            raise StoreError(f"{self.url}/{name} cannot be read: {describe(error)}.") from None

    def write(self, name: str, content: bytes) -> None:
        self._write(name, lambda path: self.fs.pipe_file(path, content), lambda file: file.write(content))

    def put(self, source: BinaryIO, name: str) -> None:
        """Uploads an open file, from its beginning; it may have been removed since it was opened."""
        descriptor = f"/proc/self/fd/{source.fileno()}"
        path = descriptor if os.path.exists(descriptor) else source.name
        self._write(name, lambda to: self.fs.put_file(path, to), lambda file: shutil.copyfile(path, file.name))

    def _write(self, name: str, upload: Callable[[str], Any], copy: Callable[[Any], Any]) -> None:
        path = f"{self.root}/{name}"
        try:
            if not self.is_local:
                upload(path)
                return
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(Path(path)) as file:
                copy(file)
        except Exception as error:  # noqa: BLE001
            raise StoreError(f"{self.url}/{name} cannot be written: {describe(error)}.") from None

    def get(self, name: str, target: Path, entry: Entry | None = None) -> None:
        """Downloads an object, unless the file is the same by size and time, if these are given."""
        if entry is not None and target.is_file():
            stat = target.stat()
            if stat.st_size == entry[0] and abs(stat.st_mtime - entry[1]) < 1e-3:
                return
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as file:
            try:
                self.fs.get_file(f"{self.root}/{name}".rstrip("/"), file.name)
            except Exception as error:  # noqa: BLE001
                raise StoreError(f"{self.url}/{name} cannot be read: {describe(error)}.") from None
        if entry is not None:
            os.utime(target, (entry[1], entry[1]))

    def delete(self, names: Iterable[str]) -> None:
        def delete_one(name: str) -> None:
            try:
                with suppress(FileNotFoundError):
                    self.fs.rm_file(f"{self.root}/{name}")
                if self.is_local:
                    with suppress(OSError):
                        Path(f"{self.root}/{name}").parent.rmdir()  # if it is empty now
            except Exception as error:  # noqa: BLE001
                raise StoreError(f"{self.url}/{name} cannot be removed: {describe(error)}.") from None

        in_parallel(delete_one, names)


def is_plain(name: str) -> bool:
    """Whether a name stays below its folder, and is no file that is being written."""
    parts = PurePosixPath(name).parts
    return not name.startswith("/") and ".." not in parts and "\0" not in name and not (
        parts and TEMPORARY_NAME.fullmatch(parts[-1])
    )  # fmt: skip


def describe(error: Exception) -> str:
    """Returns the error of a library in one line, for a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _unix_time(info: dict[str, Any]) -> float:
    value = next((info[key] for key in TIME_FIELDS if info.get(key) is not None), 0.0)
    with suppress(ValueError):
        value = datetime.fromisoformat(value) if isinstance(value, str) else value
    return value.timestamp() if isinstance(value, datetime) else float(value) if isinstance(value, int | float) else 0.0


def in_parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> None:
    """Calls a function for every item, several at once; raises the first error."""
    with ThreadPoolExecutor(TRANSFERS) as pool:
        for future in [pool.submit(function, item) for item in items]:
            future.result()


# Data: a URL is downloaded once per machine and then read as a path. Its place in the cache says what it is a copy of.


def local_copy(path: str) -> str:
    """Returns the local copy of what a URL names, a file, folder or glob, downloading what is new; a path unchanged."""
    url = parse_url(path)
    if not url:
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
    return cache_folder().absolute() / "data" / scheme / rest.lstrip("/") if scheme else Path(name)


def original_name(path: str) -> str:
    """Returns the URL that a path in the cache is a copy of; other paths unchanged."""
    folder = cache_folder().absolute() / "data"
    if not Path(path).is_relative_to(folder):
        return path
    scheme, *rest = Path(path).relative_to(folder).parts
    return parse_url(f"{scheme}:/{'/'.join(rest)}")
