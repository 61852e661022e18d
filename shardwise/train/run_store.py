"""A run in an object store: `run.folder` is a URL, and the run folder is a local copy in front of it.

    URL/job.toml, metrics.jsonl, ...     the small files of a run folder, copied when they have changed
    URL/checkpoints/step-00000100/...    copied once, the manifest last
    URL/writer.json                      the launcher that writes here, rewritten every BEAT_SECONDS while it does

A checkpoint counts once its manifest is there and all its files have the sizes that the manifest names. Files are
hashed when they have been downloaded. `shardwise.train.run_uploader` copies, docs/how-to/object-store.md says more."""

import hashlib
import json
import re
import shutil
import socket
import threading
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.console import print_line
from shardwise.errors import CheckpointError, JobError, StoreError
from shardwise.files import cache_folder, parse_json, parse_record, write_text
from shardwise.object_store import ObjectStore, in_parallel, is_plain, parse_url
from shardwise.train import checkpoint_folder as disk
from shardwise.train.checkpoint_folder import MANIFEST_FILE, DamagedCheckpoint, parse_manifest, save_order
from shardwise.workers.run_owner import Say, is_dead, owner_name, read_owner

LINK_FILE, WRITER_FILE = "store.json", "writer.json"  # of a local copy: its URL and id; of the store: who writes there
FETCHED_FILE = ".fetched"  # marks a local checkpoint that came from the store
UNDONE_SUFFIX, OBJECT_PATTERN = ".undone", re.compile("checkpoints/([^/]+)/([^/]+)")
LOCAL_PREFIXES = ("checkpoints/", "heartbeats/", "owner.", LINK_FILE, WRITER_FILE)
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
ARRIVAL_SECONDS = 10.0  # to wait for a file that another node may be copying
WAIT_SECONDS = 5.0


def local_folder(url: str, use: str = "") -> Path:
    """Returns the local copy of a run. Hosts that share a home have one each; so has each `use` on a host."""
    digest = hashlib.sha256(f"{url} {socket.gethostname()} {use}".encode()).hexdigest()[:12]
    folder = cache_folder().absolute() / "runs" / f"{url.split('/')[-1]}-{digest}"
    if not (folder / LINK_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / LINK_FILE, json.dumps({"url": url, "id": uuid.uuid4().hex}))
    return folder


def fetch_run(path: Path, weights: bool = False, step: int | None = None) -> Path:
    """Returns a folder to read the run of a URL from, with its newest checkpoint, or that of `step`, if `weights`. It
    is none that a launcher of this machine writes. Any other path is returned unchanged."""
    if not (url := parse_url(path)):
        return path
    store = RunStore(local_folder(url, "read"))
    store.download()
    if weights:
        store.fetch_newest(lambda sentence: None, step)
    if not store.read_writer()["ended"]:  # tells whoever shows this folder that the run goes on
        (store.folder / "heartbeats").mkdir(exist_ok=True)
        (store.folder / "heartbeats" / "rank-0.json").touch()
    return store.folder


class RunStore:
    def __init__(self, folder: Path):
        link = parse_json((folder / LINK_FILE).read_bytes())
        self.folder, self.url, self.id = folder, str(link["url"]), str(link["id"])
        self.checkpoints, self._lock = folder / "checkpoints", threading.Lock()
        self.saved = ""  # the newest checkpoint that is known to be complete in the store
        self.taken_over_by = ""

    @classmethod
    def of(cls, folder: Path) -> "RunStore | None":
        """Returns the store of a run folder, None if it is no copy of a store."""
        return cls(folder) if (folder / LINK_FILE).is_file() else None

    @cached_property
    def remote(self) -> ObjectStore:
        return ObjectStore(self.url)

    def begin(self, job: str) -> None:
        """Begins a new run. Raises JobError if the store has one, StoreError if it cannot be written."""
        if self.remote.read("job.toml") is not None:
            remedy = f"`shardwise train --resume {self.url}` goes on with it; or choose another."
            raise JobError(f"run.folder = {self.url!r} already has a run; {remedy}")
        for path in self.folder.iterdir():  # of a run that has been removed from the store
            if path.name != LINK_FILE and not path.name.startswith("owner."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.remote.write("job.toml", job.encode())

    @contextmanager
    def claimed(self, say: Say, on_loss: Callable[[], None]) -> Iterator[None]:
        """Is the one that writes to the store, as the owner of the folder; raises JobError if another launcher does. If
        one takes over, because this one seemed dead, calls `on_loss`."""
        other, self._on_loss, self._owner = self.read_writer(), on_loss, read_owner(self.folder / "owner.json")
        self.last_writer, self.saved, ended = other["folder"], other["saved"], threading.Event()
        is_other, sign = not other["ended"] and self.last_writer != self.id, lambda: self.read_writer()["sign"]
        if is_other and not is_dead(self.url, other["owner"], sign, say, STALE_SECONDS):
            raise JobError(f"{self.url} is being trained by {owner_name(other['owner'])}; resume when it has ended.")
        self.write_writer()
        if not self.is_writer():
            raise JobError(f"{self.url} is being trained by {self.taken_over_by}; resume when it has ended.")

        def renew(has_ended: bool = False) -> None:
            with suppress(StoreError):  # whoever copies files reports it
                if self.is_writer():
                    self.write_writer(has_ended)

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                renew()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            renew(has_ended=True)

    def is_writer(self) -> bool:
        """Whether no other launcher has taken over; if one has, the run ends."""
        writer = self.read_writer()
        if writer["folder"] not in ("", self.id) and not self.taken_over_by:
            self.taken_over_by = owner_name(writer["owner"])
            self._on_loss()
        return not self.taken_over_by

    def write_writer(self, ended: bool = False) -> None:
        with self._lock:
            writer = {"folder": self.id, "ended": ended, "saved": self.saved, "beat": time.time(), **self._owner}
            self.remote.write(WRITER_FILE, json.dumps(writer).encode())

    def read_writer(self) -> dict[str, Any]:
        """Returns what the store says of its writer. `sign` is another number after each sign of life, 0 at the end."""
        content = self.remote.read(WRITER_FILE) or b""
        values = parse_record(content) or {}
        saved, ended = str(values.get("saved")), values.get("ended") is not False
        return {"folder": str(values.get("folder", "")), "saved": saved if disk.FOLDER_PATTERN.fullmatch(saved) else "",
                "ended": ended, "sign": 0 if ended else zlib.crc32(content) + 1,
                "owner": read_owner(content)}  # fmt: skip

    def restore(self, say: Say) -> None:
        """Makes the folder what the run goes on from; called by the launcher that has claimed the store."""
        is_mine = self.last_writer == self.id and (self.folder / "job.toml").is_file()
        self.download(only_missing=is_mine)
        self.undo(in_store=is_mine)
        for _, path in () if is_mine else disk.list_checkpoints(self.checkpoints):
            disk.remove_checkpoint(path)  # the store may have another of this name
        if not self.fetch_newest(say) and self.saved:
            raise CheckpointError(f"{self.url} has no complete checkpoint, although {self.saved} existed; restore it.")

    def undone_mark(self, name: str) -> Path:
        """Returns a file that marks a checkpoint which the run has gone back behind: it may be corrupt."""
        return self.checkpoints / f"{name}{UNDONE_SUFFIX}"

    def undo(self, in_store: bool = True) -> list[str]:
        """Removes the marks, and what they mark from the store, and returns the names of these checkpoints."""
        marks = {path.name.removesuffix(UNDONE_SUFFIX): path for path in self.checkpoints.glob(f"*{UNDONE_SUFFIX}")}
        if in_store:
            self.remove(set(marks))
            self.saved = "" if self.saved in marks else self.saved
        for path in marks.values():
            path.unlink()
        return list(marks)

    def remove(self, names: set[str]) -> None:
        """Removes checkpoints from the store, their manifests first."""
        if names:
            self.remote.delete(f"checkpoints/{name}/{MANIFEST_FILE}" for name in names)
            files = self.checkpoint_files()
            self.remote.delete(f"checkpoints/{name}/{file}" for name in names for file in files.get(name, ()))

    def download(self, only_missing: bool = False, names: Sequence[str] = ()) -> None:
        """Makes the small files, or those of these names, what they are in the store, or only adds missing ones."""
        entries = {name: entry for name, entry in self.remote.list().items() if _is_small(name)}
        if "job.toml" not in entries:
            raise JobError(f"{self.url} is not a run folder: it has no job.toml.")
        local = {} if names else self.small_files()
        wanted = names or [name for name in entries if not (only_missing and name in local)]
        get = lambda name: self.remote.get(name, self.folder / name, entries[name])  # noqa: E731
        in_parallel(get, [name for name in wanted if name in entries])
        for name in set() if only_missing else local.keys() - entries.keys():
            local[name].unlink(missing_ok=True)

    def small_files(self) -> dict[str, Path]:
        found = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if not path.is_dir()}
        return {name: path for name, path in found.items() if _is_small(name)}

    def checkpoint_files(self) -> dict[str, dict[str, int]]:
        """Returns the files of every checkpoint in the store, complete or not, with their sizes."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for path, (size, _) in self.remote.list().items():
            if (match := OBJECT_PATTERN.fullmatch(path)) and disk.FOLDER_PATTERN.fullmatch(match[1]):
                found[match[1]][match[2]] = size
        return found

    def missing_files(self, name: str, files: dict[str, Any]) -> list[str]:
        """Returns those of a checkpoint's files, as in its manifest, that the store lacks or has with another size."""
        found = self.checkpoint_files().get(name, {})
        return [file for file, info in files.items() if found.get(file) != info["bytes"]]

    def complete(self) -> dict[str, bytes]:
        """Returns the manifest of every checkpoint that is complete, newest first."""
        complete = {}
        for name, found in sorted(self.checkpoint_files().items(), key=lambda item: save_order(item[0]), reverse=True):
            with suppress(DamagedCheckpoint):
                content = self.remote.read(f"checkpoints/{name}/{MANIFEST_FILE}") or b""
                if all(found.get(file) == info["bytes"] for file, info in parse_manifest(content)["files"].items()):
                    complete[name] = content
        return complete

    def fetch_newest(self, say: Say, step: int | None = None) -> bool:
        """Downloads the newest complete checkpoint, or that of `step`, if it is new. Returns whether there is one."""
        local = [path.name for _, path in disk.valid_checkpoints(self.checkpoints)]
        for name, content in self.complete().items():
            if step is None and local and save_order(local[0]) >= save_order(name):
                break
            try:
                if step in (None, save_order(name)[0]):
                    self.fetch(name, content)
                    return True
            except DamagedCheckpoint as error:
                say(f"checkpoint {name} in {self.url} is damaged: {error}; the next older one is used.")
        return bool(local)

    def fetch(self, name: str, content: bytes) -> None:
        """Downloads what the local copy of a checkpoint lacks. `content`: its manifest. Raises DamagedCheckpoint."""
        path, deadline = self.checkpoints / name, time.monotonic() + ARRIVAL_SECONDS
        files = parse_manifest(content)["files"]
        wanted = {file: info for file, info in files.items() if disk.file_problem(path, file, info, size_only=True)}
        target = path if path.is_dir() else path.with_name(f"{name}.partial-{uuid.uuid4().hex[:8]}")
        while wanted and (absent := self.missing_files(name, wanted)):
            if time.monotonic() > deadline:
                raise DamagedCheckpoint(f"{absent[0]} is not in {self.url}")
            time.sleep(0.5)

        def fetch_file(file: str) -> None:
            self.remote.get(f"checkpoints/{name}/{file}", target / file)
            if problem := disk.file_problem(target, file, files[file]):
                (target / file).unlink(missing_ok=True)
                raise DamagedCheckpoint(problem)

        in_parallel(fetch_file, wanted)
        target.mkdir(parents=True, exist_ok=True)
        if not (target / MANIFEST_FILE).exists():
            (target / MANIFEST_FILE).write_bytes(content)
        if target != path:
            (target / FETCHED_FILE).touch()
            target.rename(path)


def find_newest_valid(folder: Path, group: disk.CheckpointGroup, step: int | None, store: RunStore | None,
                      on_wait: Callable[[], None]) -> disk.CheckpointChoice:  # fmt: skip
    """Like that of `checkpoint_folder`. Where nodes have folders of their own, node 0 gets the newest checkpoint of the
    store, if it has none that is newer, and all complete theirs from there. Calls `on_wait` every few seconds."""
    if store is None or group.has_one_folder:
        return disk.find_newest_valid(folder, group, step)

    def patiently(function: Callable[..., object], *arguments: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(function, *arguments)
            while not wait([future], WAIT_SECONDS).done:
                on_wait()
            future.result()

    def complete_copies(path: Path) -> None:
        file = path / MANIFEST_FILE
        manifest = group.on_rank_zero(lambda: file.read_text() if file.is_file() else "").encode()
        with suppress(CheckpointError):  # the verification names what stays missing
            group.on_leaders(lambda: patiently(store.fetch, path.name, manifest))

    with suppress(StoreError, RuntimeError):  # the folders may have all
        group.on_rank_zero(lambda: patiently(store.fetch_newest, print_line))
    return disk.find_newest_valid(folder, group, step, complete_copies)


def _is_small(name: str) -> bool:
    return is_plain(name) and not name.startswith(LOCAL_PREFIXES)
