"""A run in an object store: `run.folder` is a URL, and the run folder is a local copy in front of it.

    URL/job.toml, metrics.jsonl, ...     the small files of a run folder, copied when they have changed
    URL/checkpoints/step-00000100/...    copied once, the manifest last
    URL/writer.json                      the launcher that writes here, rewritten every BEAT_SECONDS while it does

- The launcher copies, in a thread, and no worker does: training never waits for the store.
- A checkpoint counts once its manifest is there and all its files have the sizes that the manifest names. Files are
  hashed when they have been downloaded.
- The store is the truth. A launcher goes on in its own folder if that was the last to write here, and copies what is
  missing. Any other takes what the store has, and forgets what its folder had beyond that.
- With several nodes, each has a folder of its own: the ranks of a node write their shards there, and the agent of the
  node copies them. Node 0 adds the manifest when all files are there (`shardwise.train.run_uploader`).
"""

import hashlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.console import print_line
from shardwise.errors import CheckpointError, JobError, StoreError
from shardwise.files import TEMPORARY_NAME, cache_folder, parse_json, write_text
from shardwise.object_store import Entry, ObjectStore, in_parallel, parse_url
from shardwise.train import checkpoint_folder
from shardwise.train.checkpoint_folder import FOLDER_PATTERN, MANIFEST_FILE, CheckpointGroup, DamagedCheckpoint
from shardwise.workers.run_owner import describe_owner, is_dead, owner_name, parse_owner

LINK_FILE, WRITER_FILE = "store.json", "writer.json"  # of a local copy: its URL and id; of the store: who writes there
FETCHED_FILE = ".fetched"  # marks a local checkpoint that came from the store
UNDONE_SUFFIX = ".undone"
LOCAL_PREFIXES = ("checkpoints/", "heartbeats/", "owner.", LINK_FILE, WRITER_FILE)
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
ARRIVAL_SECONDS = 10.0  # to wait for a file that another node may be copying
WAIT_SECONDS = 5.0
Say = Callable[[str], None]
Order = tuple[int, int]


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
    if store.is_written():  # tells whoever shows this folder that the run goes on
        (store.folder / "heartbeats").mkdir(exist_ok=True)
        (store.folder / "heartbeats" / "rank-0.json").touch()
    return store.folder


def place_name(folder: Path) -> str:
    """Returns what a user calls the run in this folder: its URL, or the folder."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json((folder / LINK_FILE).read_bytes())["url"])
    return str(folder)


def checkpoint_order(name: str) -> Order:
    """Sorts names of checkpoints by step and number of the save."""
    match = FOLDER_PATTERN.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


class RunStore:
    """The run of a local copy, in its store."""

    def __init__(self, folder: Path):
        link = parse_json((folder / LINK_FILE).read_bytes())
        self.folder, self.url, self.id = folder, str(link["url"]), str(link["id"])
        self.checkpoints = folder / "checkpoints"
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
            raise JobError(
                f"run.folder = {self.url!r} already has a run; continue it with `shardwise train --resume {self.url}`, "
                "or choose another folder."
            )
        for path in self.folder.iterdir():  # of a run that has been removed from the store
            if path.name != LINK_FILE and not path.name.startswith("owner."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.remote.write("job.toml", job.encode())

    # The writer

    @contextmanager
    def claimed(self, say: Say, on_loss: Callable[[], None]) -> Iterator[None]:
        """Is the one that writes to the store; raises JobError if another launcher does. If one takes over, because
        this one seemed dead, calls `on_loss`."""
        other, self._on_loss = self._read_writer(), on_loss
        self.last_writer, saved = str(other.get("folder", "")), str(other.get("saved", ""))
        self.saved = saved if FOLDER_PATTERN.fullmatch(saved) else ""
        is_other = other and self.last_writer != self.id and not other["ended"]
        if is_other and not is_dead(self.url, other["owner"], self._sign_of_life, say, STALE_SECONDS):
            name = owner_name(self._read_writer().get("owner", {}))
            raise JobError(f"{self.url} is being trained by {name}; resume when it has ended.")
        self._owner, self._lock, ended = describe_owner([os.getpid()]), threading.Lock(), threading.Event()
        self._write_writer()
        if self._read_writer().get("folder") != self.id:
            raise JobError(f"{self.url} is being trained by a launcher that has just begun; resume when it has ended.")

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS) and not self.taken_over_by:
                with suppress(StoreError):  # whoever copies files reports it
                    if self.is_writer():
                        self._write_writer()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            with suppress(StoreError):
                if self.is_writer():
                    self._write_writer(ended=True)

    def is_writer(self) -> bool:
        """Whether no other launcher has taken over; if one has, the run ends."""
        writer = self._read_writer()
        if writer and writer["folder"] != self.id and not self.taken_over_by:
            self.taken_over_by = owner_name(writer["owner"])
            self._on_loss()
        return not self.taken_over_by

    def note_saved(self, name: str) -> None:
        self.saved = name
        self._write_writer()

    def _write_writer(self, ended: bool = False) -> None:
        with self._lock:
            writer = {"folder": self.id, "ended": ended, "saved": self.saved, "beat": time.time(), **self._owner}
            self.remote.write(WRITER_FILE, json.dumps(writer).encode())

    def _read_writer(self) -> dict[str, Any]:
        content = self.remote.read(WRITER_FILE) or b""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            values = parse_json(content)
            return {"owner": parse_owner(content), **{key: values[key] for key in ("folder", "ended", "saved")}}
        return {}

    def _sign_of_life(self) -> int:
        content, writer = self.remote.read(WRITER_FILE), self._read_writer()
        return 0 if writer.get("ended", True) else int(hashlib.sha256(content or b"").hexdigest(), 16)

    # From the store

    def restore(self, say: Say) -> None:
        """Makes the folder what the run goes on from; called by the launcher that has claimed the store."""
        is_mine = self.last_writer == self.id and (self.folder / "job.toml").is_file()
        self.download(only_missing=is_mine)
        if is_mine:
            self.undo()
        else:
            for path in self.checkpoints.glob(f"*{UNDONE_SUFFIX}"):
                path.unlink()
            known = {name: content for name, content, _ in self.complete()}
            for _, path in checkpoint_folder.list_checkpoints(self.checkpoints):
                manifest = path / MANIFEST_FILE
                if not manifest.is_file() or manifest.read_bytes() != known.get(path.name):
                    checkpoint_folder.remove_checkpoint(path)
        if not self.fetch_newest(say) and self.saved:
            raise CheckpointError(
                f"{self.url} has no complete checkpoint, although {self.saved} was saved there; restore it, or start a "
                "new run to train from step 0."
            )

    def mark_undone(self, name: str) -> None:
        """Has a checkpoint removed from the store too: the run has gone back behind it, as it may be corrupt."""
        (self.checkpoints / f"{name}{UNDONE_SUFFIX}").touch()

    def is_undone(self, name: str) -> bool:
        return (self.checkpoints / f"{name}{UNDONE_SUFFIX}").exists()

    def undo(self) -> list[str]:
        """Removes the checkpoints that are marked so from the store, and returns their names."""
        marks = {path.name.removesuffix(UNDONE_SUFFIX): path for path in self.checkpoints.glob(f"*{UNDONE_SUFFIX}")}
        self.remove(set(marks))
        self.saved = "" if self.saved in marks else self.saved
        for path in marks.values():
            path.unlink()
        return list(marks)

    def remove(self, names: set[str]) -> None:
        """Removes checkpoints from the store, their manifests first."""
        if not names:
            return
        self.remote.delete(f"checkpoints/{name}/{MANIFEST_FILE}" for name in names)
        files = [name.split("/") for name in self.remote.list() if name.startswith("checkpoints/")]
        self.remote.delete("/".join(parts) for parts in files if parts[1] in names)

    def download(self, only_missing: bool = False, names: Sequence[str] = ()) -> None:
        """Makes the small files, or those of these names, what they are in the store, or only adds missing ones."""
        entries = {name: entry for name, entry in self.remote.list().items() if _is_small(name)}
        if "job.toml" not in entries:
            raise JobError(f"{self.url} is not a run folder: it has no job.toml.")
        local = {} if names else self.small_files()
        wanted = [item for item in entries.items() if not (only_missing and item[0] in local)]
        wanted = [item for item in wanted if not names or item[0] in names]
        in_parallel(lambda item: self.remote.get(item[0], self.folder / item[0], item[1]), wanted)
        for name in local if not only_missing else ():
            if name not in entries:
                local[name].unlink(missing_ok=True)

    def is_written(self) -> bool:
        """Whether a launcher writes to the store, as far as is known."""
        return not self._read_writer().get("ended", True)

    def small_files(self) -> dict[str, Path]:
        files = [path for path in self.folder.rglob("*") if not path.is_dir()]
        found = {str(path.relative_to(self.folder)): path for path in files}
        return {name: path for name, path in found.items() if _is_small(name)}

    def complete(self) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
        """Yields name and manifest, as bytes and parsed, of every checkpoint that is complete, newest first."""
        entries = self.remote.list()
        for name in sorted(checkpoint_names(entries), key=checkpoint_order, reverse=True):
            with suppress(DamagedCheckpoint):
                content = self.remote.read(f"checkpoints/{name}/{MANIFEST_FILE}") or b""
                manifest = checkpoint_folder.parse_manifest(content)
                if not missing_files(name, manifest["files"], entries):
                    yield name, content, manifest

    def fetch_newest(self, say: Say, step: int | None = None) -> bool:
        """Downloads the newest complete checkpoint, or that of `step`, unless the folder has it or a newer one. Returns
        whether the folder has one then."""
        for name, content, _ in self.complete():
            if step is not None and checkpoint_order(name)[0] != step:
                continue
            local = [checkpoint_order(path.name) for _, path in checkpoint_folder.valid_checkpoints(self.checkpoints)]
            if step is None and max(local, default=(-1, 0)) >= checkpoint_order(name):
                return True
            try:
                self.fetch(name, content)
                return True
            except DamagedCheckpoint as error:
                say(f"checkpoint {name} in {self.url} is damaged: {error}; the next older one is used.")
        return bool(checkpoint_folder.valid_checkpoints(self.checkpoints))

    def fetch(self, name: str, content: bytes) -> None:
        """Downloads what the local copy of a checkpoint lacks. `content`: its manifest. Raises DamagedCheckpoint."""
        manifest, path = checkpoint_folder.parse_manifest(content), self.checkpoints / name
        files, deadline = manifest["files"], time.monotonic() + ARRIVAL_SECONDS
        wanted = [
            file for file, info in files.items() if checkpoint_folder.file_problem(path, file, info, size_only=True)
        ]
        target = path if path.is_dir() else path.with_name(f"{name}.partial-{uuid.uuid4().hex[:8]}")
        while wanted and (absent := missing_files(name, {f: files[f] for f in wanted}, self.remote.list())):
            if time.monotonic() > deadline:
                raise DamagedCheckpoint(f"{absent[0]} is not in {self.url}")
            time.sleep(0.5)

        def fetch_file(file: str) -> None:
            self.remote.get(f"checkpoints/{name}/{file}", target / file)
            if problem := checkpoint_folder.file_problem(target, file, files[file]):
                (target / file).unlink(missing_ok=True)
                raise DamagedCheckpoint(problem)

        in_parallel(fetch_file, wanted)
        if not (target / MANIFEST_FILE).exists():
            target.mkdir(parents=True, exist_ok=True)
            (target / MANIFEST_FILE).write_bytes(content)
        if target != path:
            (target / FETCHED_FILE).touch()
            target.rename(path)


def checkpoint_names(entries: dict[str, Entry]) -> set[str]:
    parts = [name.split("/") for name in entries if name.startswith("checkpoints/")]
    return {part[1] for part in parts if len(part) == 3 and FOLDER_PATTERN.fullmatch(part[1])}


def missing_files(name: str, files: dict[str, Any], entries: dict[str, Entry]) -> list[str]:
    """Returns those of a checkpoint's files, as in its manifest, that the store lacks or has with another size."""
    sizes = {file: entries.get(f"checkpoints/{name}/{file}", (-1, 0.0))[0] for file in files}
    return [file for file, info in files.items() if sizes[file] != info["bytes"]]


def find_newest_valid(
    folder: Path, group: CheckpointGroup, step: int | None, store: RunStore | None, on_wait: Callable[[], None]
) -> checkpoint_folder.CheckpointChoice:
    """Like that of `checkpoint_folder`. Where nodes have folders of their own, completes these from the store; if what
    node 0 has cannot be completed, takes the newest in the store. Calls `on_wait` every few seconds."""
    if store is None or group.has_one_folder:
        return checkpoint_folder.find_newest_valid(folder, group, step)

    def patiently(function: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(function)
            while not wait([future], WAIT_SECONDS).done:
                on_wait()
            future.result()

    def complete_copies(path: Path) -> None:
        file = path / MANIFEST_FILE
        manifest = group.on_rank_zero(lambda: file.read_text() if file.is_file() else "").encode()
        with suppress(RuntimeError):  # the verification names what stays missing
            group.on_leaders(lambda: patiently(lambda: store.fetch(path.name, manifest)))

    try:
        choice = checkpoint_folder.find_newest_valid(folder, group, step, complete_copies)
    except CheckpointError:
        choice = checkpoint_folder.CheckpointChoice(None, {}, [])
    if choice.path is None:
        group.on_rank_zero(lambda: patiently(lambda: store.fetch_newest(print_line)))
        choice = checkpoint_folder.find_newest_valid(folder, group, step, complete_copies)
    return choice


def _is_small(name: str) -> bool:
    return not name.startswith(LOCAL_PREFIXES) and not TEMPORARY_NAME.fullmatch(name.rpartition("/")[2])
