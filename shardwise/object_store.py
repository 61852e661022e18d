"""Files in an object store, by URL: s3://, gs://, az://, file:// and whatever else fsspec reaches.

`Path("s3://bucket/run")` turns into `s3:/bucket/run`; both forms name the same URL. An object appears whole or not at
all, and several do not appear at once, so what makes the others valid is written last. A downloaded file gets the time
of its object: one with the same time and size is not downloaded again.

A connection may end in the middle of an object without an error. So whatever is copied is compared with what the store
says of the object: its size, and its digest if the store gives one. What differs is copied again, then refused."""

import base64
import glob
import hashlib
import io
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from shardwise.errors import DataError, JobError, StoreError
from shardwise.files import TEMPORARY_NAME, atomic_write, cache_folder, file_lock, fsync_and_rename, os_errors_as

URL_PATTERN = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/].*)")  # a scheme of one letter would be a drive of Windows
TIME_FIELDS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")  # by kind of store
TRANSFERS = 8  # at once; each object of an S3 store is also split into parts that travel at once
PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds before each new try to read what is torn, late or missing
UNKNOWN_SIZE = -1
MD5_PATTERN = re.compile('"?([0-9a-f]{32})"?')  # an ETag of several parts has a number after it


Content = io.BytesIO | io.BufferedReader  # what has been read of an object, in memory or in a file


class StoredObject(NamedTuple):
    """What a store says of an object."""

    size: int
    """In bytes; UNKNOWN_SIZE if the store does not say."""

    changed: float
    """Unix time of the last change."""

    digests: tuple[tuple[str, str], ...] = ()
    """Kind (`md5`, `crc32c`, `etag`) and hexadecimal value of each digest that the store gives."""


def parse_url(path: str | Path) -> str:
    """Returns the URL that a text or path names, always in the same form; empty if it names a local path."""
    match = URL_PATTERN.fullmatch(str(path))
    if match is None:
        return ""
    if ":" in match[2].split("/")[0].rpartition("@")[0]:  # it would be in files and messages
        raise JobError(f"a URL of {match[1]}:// has a password; set it in the environment or a file of its package.")
    return f"{match[1]}:{'///' if match[1] in ('file', 'local') else '//'}{match[2].rstrip('/')}"


class MissingObject(StoreError):
    """An object that was listed, or that something names, is not in the store: maybe not yet, or not any more."""


class ObjectStore:
    """The objects below a URL, by relative name. Every failure is a StoreError with a sentence."""

    def __init__(self, url: str):
        import fsspec

        self.url, self.is_local = url, url.partition(":")[0] in ("file", "local")
        options = {"auto_mkdir": True} if self.is_local else {"use_listings_cache": False}
        with self._explain("opened"):
            self.fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        self.root = str(root).rstrip("/")
        self._etags_are_md5 = True  # until two reads agree on something else

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    @contextmanager
    def _explain(self, verb: str, name: str = "") -> Iterator[None]:
        """Makes a sentence of what a library raises: each kind of store has its own errors."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            text = f": {' '.join(str(error).split()).rstrip('.')[:300]}".rstrip(": ")
            place = f"{self.url}/{name}".rstrip("/")
            raise StoreError(f"{place} cannot be {verb}: {type(error).__name__}{text}.") from None

    def list(self, pattern: str = "") -> dict[str, StoredObject]:
        """Returns all objects, or those that match a glob. Names that lead out of a folder are left out."""
        found: dict[str, Any] = {}
        with self._explain("listed"), suppress(FileNotFoundError):
            search, path = (self.fs.glob, f"{self.root}/{pattern}") if pattern else (self.fs.find, self.root)
            found = search(path, detail=True)
        entries = {}
        for path, info in found.items():
            name = str(path).removeprefix(self.root).removeprefix("/")
            if is_plain(name) and info.get("type") != "directory":
                entries[name] = _entry(info)
        return entries

    def entry(self, name: str) -> StoredObject | None:
        """Returns what the store says of one object, None if it does not exist. Asks for the object by its name, which
        also finds one that a listing does not have yet."""
        with self._explain("read", name), suppress(FileNotFoundError):
            info = self.fs.info(self._path(name))
            return None if info.get("type") == "directory" else _entry(info)
        return None

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object, None if it does not exist."""

        def read_once() -> Content | None:
            with self._explain("read", name), suppress(FileNotFoundError):
                return io.BytesIO(self.fs.cat_file(self._path(name)))
            return None

        found = self._read_whole(name, None, read_once)
        if found is None:
            return None
        _, content = found
        with content:
            content.seek(0)
            return content.read()

    def write(self, name: str, content: bytes, is_shared: bool = False) -> None:
        """`is_shared`: another launcher may write this object too, so it may have another size right afterwards."""
        self._write(name, lambda path: self.fs.pipe_file(path, content))
        if not is_shared:
            self._check_written(name, len(content), len(content))

    def put(self, source: BinaryIO, name: str) -> None:
        """Uploads an open file, from its beginning; it may have been removed since it was opened."""
        descriptor = f"/proc/self/fd/{source.fileno()}"
        local = descriptor if os.path.exists(descriptor) else source.name
        smallest = os.fstat(source.fileno()).st_size
        self._write(name, lambda path: self.fs.put_file(local, path))
        self._check_written(name, smallest, os.fstat(source.fileno()).st_size)  # a log may have grown meanwhile

    def _write(self, name: str, upload: Callable[[str], Any]) -> None:
        path = Path(f"{self.root}/{name}")
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with self._explain("written", name):
            upload(str(temporary) if self.is_local else f"{self.root}/{name}")
            if self.is_local:  # whole or not at all, as in other stores
                fsync_and_rename(temporary, path)

    def _check_written(self, name: str, smallest: int, largest: int) -> None:
        """Raises StoreError if an object that has just been written has not arrived whole."""
        entry: StoredObject | None = None
        for pause in tries():
            time.sleep(pause)  # a store may answer with what it had before
            entry = self.entry(name)
            if entry is not None and (entry.size == UNKNOWN_SIZE or smallest <= entry.size <= largest):
                return

        if entry is None:
            raise StoreError(
                f"{self.url}/{name} cannot be written: the store took its {largest} bytes without an error, but does "
                "not have it; check the network and the store."
            )
        raise StoreError(
            f"{self.url}/{name} cannot be written: of its {largest} bytes, the store has {entry.size}; "
            "check the network and the store."
        )

    def get(self, name: str, target: Path, entry: StoredObject | None = None) -> None:
        """Downloads an object, unless the file is the same by size and time, if these are given."""
        place = f"{self.url}/{name}".rstrip("/")

        with os_errors_as(StoreError, f"{place} cannot be copied to {target}"):
            if entry is not None and _is_copy(target, entry):
                return
            target.parent.mkdir(parents=True, exist_ok=True)

            with atomic_write(target) as file:

                def read_once() -> Content | None:
                    with self._explain("read", name), suppress(FileNotFoundError):
                        self.fs.get_file(self._path(name), file.name)
                        return Path(file.name).open("rb")
                    return None

                found = self._read_whole(name, entry, read_once)
                if found is None:
                    raise MissingObject(f"{place} cannot be read: it is not in the store.")
                stored, content = found
                content.close()

            if entry is not None:
                os.utime(target, (stored.changed, stored.changed))

    def _read_whole(
        self, name: str, entry: StoredObject | None, read_once: Callable[[], Content | None]
    ) -> tuple[StoredObject, Content] | None:
        """Reads an object until what has come is what the store says it has. Returns what the store says, and what has
        come, for the caller to close; None if the object does not exist. Raises StoreError if it never comes whole."""
        last_md5 = ""
        problem = ""
        for pause in tries():
            time.sleep(pause)
            if entry is None or problem:  # it may have been replaced since it was listed
                entry = self.entry(name)
            if entry is None:
                return None
            content = read_once()
            if content is None:
                return None

            content.seek(0)
            md5 = hashlib.file_digest(content, _md5).hexdigest() if entry.digests or problem else ""
            is_same_again = md5 != "" and md5 == last_md5
            problem = _difference(entry, content, md5, trusts_etag=self._etags_are_md5 and not is_same_again)
            if not problem:
                if is_same_again and _etag_differs(entry, md5):
                    self._etags_are_md5 = False  # of objects that are encrypted with keys of KMS, it is no MD5
                return entry, content

            content.close()
            last_md5 = md5

        raise StoreError(
            f"{self.url}/{name}".rstrip("/") + f" cannot be read: {problem}, {len(PAUSES) + 1} times in a row; "
            "check the network and the store, then start again."
        )

    def delete(self, names: Iterable[str]) -> None:
        def delete_one(name: str) -> None:
            with self._explain("removed", name), suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")
                if self.is_local:
                    with suppress(OSError):
                        Path(f"{self.root}/{name}").parent.rmdir()  # if it is empty now

        in_parallel(delete_one, names)


def _is_copy(target: Path, entry: StoredObject) -> bool:
    """Whether a file has the size and the time of an object."""
    if not target.is_file():
        return False
    stat = target.stat()
    return stat.st_size == entry.size and abs(stat.st_mtime - entry.changed) < 1e-3


def _difference(entry: StoredObject, content: Content, md5: str, trusts_etag: bool) -> str:
    """Returns how what was read differs from what the store says of the object; empty if it does not.
    `trusts_etag`: whether an ETag counts as an MD5."""
    size = content.seek(0, os.SEEK_END)
    if entry.size not in (UNKNOWN_SIZE, size):
        return f"it has {entry.size} bytes, and {size} came"

    for kind, expected in entry.digests:
        if kind == "md5" and md5 != expected:
            return f"its MD5 is {expected}, and that of what came is {md5}"
        if kind == "crc32c":
            found = _crc32c(content)
            if found not in ("", expected):
                return f"its CRC32C is {expected}, and that of what came is {found}"
    if trusts_etag and _etag_differs(entry, md5):
        return f"its ETag is {dict(entry.digests)['etag']}, and the MD5 of what came is {md5}"
    return ""


def _etag_differs(entry: StoredObject, md5: str) -> bool:
    """Whether the store gives an ETag that is not this MD5."""
    return dict(entry.digests).get("etag", md5) != md5


def tries() -> Iterator[float]:
    """Returns how long to wait before each try of what may be torn or late: the first one is at once."""
    return iter((0.0, *PAUSES))


def is_plain(name: str) -> bool:
    """Whether a name stays below its folder, and is no file that is being written."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or "\0" in name
    return not leads_out and not TEMPORARY_NAME.fullmatch(path.name)


def _entry(info: dict[str, Any]) -> StoredObject:
    size = info.get("size")
    if size is None or info.get("contentEncoding"):  # then the size is that of the compressed object
        return StoredObject(UNKNOWN_SIZE, _unix_time(info))
    return StoredObject(int(size), _unix_time(info), tuple(_digests(info)))


def _digests(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the digests in what a store says of an object; each kind of store has its own names."""
    settings = info.get("content_settings") or {}  # Azure
    content_md5 = settings.get("content_md5") if isinstance(settings, dict) else getattr(settings, "content_md5", None)
    md5 = info.get("md5Hash") or content_md5  # Google's name, or Azure's
    kind, value = ("md5", md5) if md5 else ("crc32c", info.get("crc32c"))  # Google's objects of several parts
    with suppress(ValueError, TypeError):
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else bytes(value or b"")
        if content:
            yield kind, content.hex()
    if match := MD5_PATTERN.fullmatch(str(info.get("ETag") or "")):  # S3
        yield "etag", match[1]


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _crc32c(result: Content) -> str:
    """Returns the CRC32C of a file; empty without the package that comes with Google's client."""
    try:
        checksum = import_module("google_crc32c").Checksum()
    except ImportError:
        return ""
    result.seek(0)
    while block := result.read(1 << 20):
        checksum.update(block)
    return str(checksum.hexdigest().decode())


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
    if not entries and not pattern:
        entry = store.entry("")  # a file that is not listed yet
        entries = {} if entry is None else {"": entry}
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
