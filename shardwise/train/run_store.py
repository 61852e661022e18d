"""A run in an object store: `run.folder` is a URL, and the run folder is a local copy in front of it.

    URL/job.toml, metrics.jsonl, ...     the small files of a run folder, copied when they have changed
    URL/checkpoints/step-00000100/...    copied once, the manifest last
    URL/writer.json                      the launcher that writes here, rewritten every BEAT_SECONDS while it does

A checkpoint counts once its manifest is there and all its files have the sizes that the manifest names. Files are
hashed when they have been downloaded. `shardwise.train.run_uploader` copies, docs/how-to/object-store.md says more.

A store may answer late: a listing may lack what was written a moment ago. So nothing is concluded from one answer:
what is not listed is asked for by its name, and again after a pause. If the newest checkpoint cannot be had then, the
run is not resumed: going on from an older one would lose it."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.console import print_line
from shardwise.errors import CheckpointError, JobError, StoreError
from shardwise.files import cache_folder, parse_json, parse_record, parse_toml, write_text
from shardwise.object_store import MissingObject, ObjectStore, in_parallel, is_plain, parse_url, tries
from shardwise.train import checkpoint_folder as disk
from shardwise.train.checkpoint_folder import MANIFEST_FILE, DamagedCheckpoint, parse_manifest, save_order
from shardwise.workers.run_owner import Say, is_dead, owner_name, read_owner

LINK_FILE, WRITER_FILE = "store.json", "writer.json"  # of a local copy: its URL and id; of the store: who writes there
FETCHED_FILE = ".fetched"  # marks a local checkpoint that came from the store
UNDONE_SUFFIX, OBJECT_PATTERN = ".undone", re.compile("checkpoints/([^/]+)/([^/]+)")
NAMES = parse_toml(Path(__file__).with_name("run_folder.toml").read_text(encoding="utf-8"))
# Without these, a resume or an export would lose or change something: they are asked for by name if they are not
# listed. A run whose record of its base or task has not come would be taken for one of version 0.2.0 and get a new one.
RUN_FILES = frozenset(
    {
        "job.toml",
        "plan.toml",
        "data.json",
        "base.json",
        "task.json",
        "restarts.json",
        "metrics.jsonl",
        "ranks.jsonl",
        "events.jsonl",
        "metrics.discarded.jsonl",
        "ranks.discarded.jsonl",
        "skips.json",
        "preferences.json",
        "bad-records.txt",
        "quarantine.json",
        "notes.json",
        "mlflow-run.txt",
        *NAMES["tokenizer_files"],
    }
)
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
        self.damaged: set[str] = set()  # checkpoints in the store whose content does not match their hashes
        self.taken_over_by = ""
        # The folder whose run the store has: that of the writer, once it goes on from there. A launcher that could not
        # resume leaves it as it was, so that the folder which has more than the store can still be resumed.
        self._source = self.id

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
        if names := sorted(self.checkpoint_files()):
            raise JobError(
                f"run.folder = {self.url!r} has {names[-1]} of a run, but no job.toml; restore job.toml to go on with "
                "that run, or choose another folder."
            )
        for path in self.folder.iterdir():  # of a run that has been removed from the store
            if path.name != LINK_FILE and not path.name.startswith("owner."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.remote.write("job.toml", job.encode())

    @contextmanager
    def claimed(self, say: Say, on_loss: Callable[[], None]) -> Iterator[None]:
        """Is the one that writes to the store, as the owner of the folder; raises JobError if another launcher does. If
        one takes over, because this one seemed dead, calls `on_loss`."""
        other, self._on_loss, self._owner = self.read_writer(), on_loss, read_owner(self.folder / "owner.json")
        self.last_writer, self.saved, ended = other["source"], other["saved"], threading.Event()
        is_new = not self.last_writer and not self.checkpoint_files()
        self._source = self.id if is_new else self.last_writer
        is_other, sign = not other["ended"] and other["folder"] != self.id, lambda: self.read_writer()["sign"]
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
            writer = {"folder": self.id, "source": self._source, "ended": ended, "saved": self.saved,
                      "beat": time.time(), **self._owner}  # fmt: skip
            self.remote.write(WRITER_FILE, json.dumps(writer).encode(), is_shared=True)

    def read_writer(self) -> dict[str, Any]:
        """Returns what the store says of its writer. `sign` is another number after each sign of life, 0 at the end."""
        content = b""
        values: dict[str, Any] = {}
        for pause in tries():
            time.sleep(pause)
            content = self.remote.read(WRITER_FILE) or b""
            parsed = parse_record(content)
            values = parsed or {}
            if parsed is not None or not content:
                break

        saved, ended = str(values.get("saved")), values.get("ended") is not False
        folder = str(values.get("folder", ""))
        return {
            "folder": folder,
            "source": str(values.get("source", folder)),
            "saved": saved if disk.FOLDER_PATTERN.fullmatch(saved) else "",
            "ended": ended,
            "sign": 0 if ended else zlib.crc32(content) + 1,
            "owner": read_owner(content),
        }

    def restore(self, say: Say) -> None:
        """Makes the folder what the run goes on from; called by the launcher that has claimed the store."""
        is_mine = self.last_writer == self.id and (self.folder / "job.toml").is_file()
        if not is_mine:
            self.newest()  # raises, before anything here is replaced or removed, if the newest cannot be had

        self.download(only_missing=is_mine)
        self.undo(in_store=is_mine)

        if not is_mine:
            for _, path in disk.list_checkpoints(self.checkpoints):
                disk.remove_checkpoint(path)  # the store may have another of this name
        if not self.fetch_newest(say) and self.saved:
            raise CheckpointError(f"{self.url} has no complete checkpoint, although {self.saved} existed; restore it.")
        self._source = self.id
        self.write_writer()

    def undone_mark(self, name: str) -> Path:
        """Returns a file that marks a checkpoint which the run has gone back behind: it may be corrupt."""
        return self.checkpoints / f"{name}{UNDONE_SUFFIX}"

    def undo(self, in_store: bool = True, stored: Iterable[str] = ()) -> list[str]:
        """Removes the marks, and what they mark from the store, and returns the names of these checkpoints. `stored`:
        those that are known to be complete in the store."""
        marks = {path.name.removesuffix(UNDONE_SUFFIX): path for path in self.checkpoints.glob(f"*{UNDONE_SUFFIX}")}
        if marks and in_store and self.is_writer():
            if self.saved in marks:  # first, so that the writer never names what is not there
                self.saved = max(set(stored) - marks.keys(), key=save_order, default="")
                self.write_writer()
            self.remove(set(marks))
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
        local = {} if names else self.small_files()
        entries = {name: entry for name, entry in self.remote.list().items() if _is_small(name)}
        asked = set(names) | {"job.toml"} if names else RUN_FILES
        asked = asked - local.keys() if only_missing else asked | local.keys()

        def ask(name: str) -> None:
            entry = self.remote.entry(name)
            if entry is not None:
                entries[name] = entry

        in_parallel(ask, asked - entries.keys())
        if "job.toml" not in entries and not (only_missing and "job.toml" in local):
            raise JobError(f"{self.url} is not a run folder: it has no job.toml.")

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
        for path, entry in self.remote.list().items():
            match = OBJECT_PATTERN.fullmatch(path)
            if match is not None and disk.FOLDER_PATTERN.fullmatch(match[1]):
                found[match[1]][match[2]] = entry.size
        return found

    def first_missing(self, name: str, files: dict[str, Any]) -> str:
        """Returns one of a checkpoint's files, as in its manifest, that the store lacks or has with another size; empty
        if it has all. One that the listing lacks is asked for by its name."""
        found = self.checkpoint_files().get(name, {})
        for file, info in files.items():
            if found.get(file) == info["bytes"]:
                continue
            entry = self.remote.entry(f"checkpoints/{name}/{file}")
            if entry is None or entry.size != info["bytes"]:
                return file
        return ""

    def complete(self) -> dict[str, bytes]:
        """Returns the manifest of every checkpoint that is seen to be complete, newest first. Others may be complete
        too: an answer may be late, and another version may have written them. So none is removed for not being here."""
        complete = {}
        for name, found in sorted(self.checkpoint_files().items(), key=lambda item: save_order(item[0]), reverse=True):
            with suppress(DamagedCheckpoint):
                content = self.remote.read(f"checkpoints/{name}/{MANIFEST_FILE}") or b""
                if all(found.get(file) == info["bytes"] for file, info in parse_manifest(content)["files"].items()):
                    complete[name] = content
        return complete

    def newest(self, step: int | None = None) -> tuple[str, bytes] | None:
        """Returns name and manifest of the newest checkpoint in the store, or of the newest one of `step`; None if the
        store has none. Raises CheckpointError if it was saved, but cannot be had."""
        problem = CheckpointError()
        for pause in tries():
            time.sleep(pause)
            try:
                return self._look_for_newest(step)
            except CheckpointError as error:
                problem = error
        raise problem

    def _look_for_newest(self, step: int | None) -> tuple[str, bytes] | None:
        saved = self.read_writer()["saved"]
        names = {*self.checkpoint_files(), *([saved] if saved else [])} - self.damaged
        if step is not None:
            names = {name for name in names if save_order(name)[0] == step}

        for name in sorted(names, key=save_order, reverse=True):
            content = self.remote.read(f"checkpoints/{name}/{MANIFEST_FILE}")
            if content is None and name == saved:
                raise self._lost(name, f"{WRITER_FILE} names it as the last one saved, but it has no {MANIFEST_FILE}")
            if content is None:
                continue  # a launcher died before the copy was complete

            # The manifest is written last, and removed first: where there is one, there was a whole checkpoint.
            try:
                files = parse_manifest(content)["files"]
            except DamagedCheckpoint as error:
                raise self._lost(name, str(error)) from None
            if missing := self.first_missing(name, files):
                raise self._lost(name, f"the store has no {missing} of {files[missing]['bytes']} bytes")
            return name, content
        return None

    def _lost(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.url}/checkpoints/{name} cannot be used: {problem}. It is the newest checkpoint, so an older one is "
            "not taken instead, and nothing has been removed. Use the version of Shardwise that saved it, or the "
            "machine that did, or wait until the store has all of it. To give it up and go on from the one before, "
            f"remove {self.url}/checkpoints/{name} and {self.url}/{WRITER_FILE}."
        )

    def fetch_newest(self, say: Say, step: int | None = None) -> bool:
        """Downloads the newest checkpoint, or that of `step`, if it is new. Returns whether there is one. Raises
        CheckpointError if the newest cannot be had; one that does not match its hashes is damaged in the store, so the
        next older one is used."""
        local = [path.name for _, path in disk.valid_checkpoints(self.checkpoints)]
        if step is None and local:
            others = {*self.checkpoint_files(), self.read_writer()["saved"]}
            if all(save_order(local[0]) >= save_order(name) for name in others):
                return True

        pauses = tries()
        while True:
            choice = self.newest(step)
            if choice is None:
                return bool(local)
            name, content = choice
            if step is None and local and save_order(local[0]) >= save_order(name):
                return True
            try:
                self.fetch(name, content)
                return True
            except DamagedCheckpoint as error:
                say(f"checkpoint {name} in {self.url} is damaged: {error}; the next older one is used.")
                self.damaged.add(name)
            except MissingObject:  # the run may go on, and have removed it meanwhile
                pause = next(pauses, None)
                if pause is None:
                    raise
                time.sleep(pause)

    def fetch(self, name: str, content: bytes) -> None:
        """Downloads what the local copy of a checkpoint lacks. `content`: its manifest. Raises DamagedCheckpoint if a
        file does not match its hash, MissingObject if one does not arrive."""
        path, deadline = self.checkpoints / name, time.monotonic() + ARRIVAL_SECONDS
        files = parse_manifest(content)["files"]
        wanted = {file: info for file, info in files.items() if disk.file_problem(path, file, info, size_only=True)}
        target = path if path.is_dir() else path.with_name(f"{name}.partial-{uuid.uuid4().hex[:8]}")
        while wanted and (missing := self.first_missing(name, wanted)):
            if time.monotonic() > deadline:
                raise MissingObject(f"{self.url}/checkpoints/{name} cannot be read: {missing} is not in the store.")
            time.sleep(0.5)

        in_parallel(lambda file: self._fetch_file(name, file, files[file], target), wanted)
        target.mkdir(parents=True, exist_ok=True)
        if not (target / MANIFEST_FILE).exists():
            (target / MANIFEST_FILE).write_bytes(content)
        if target != path:
            (target / FETCHED_FILE).touch()
            target.rename(path)

    def _fetch_file(self, name: str, file: str, info: dict[str, Any], target: Path) -> None:
        """Downloads a file of a checkpoint; again, if it does not match its hash, until the same has come twice."""
        problem = ""
        last_digest = ""
        for pause in tries():
            time.sleep(pause)
            self.remote.get(f"checkpoints/{name}/{file}", target / file)
            problem = disk.file_problem(target, file, info) or ""
            if not problem:
                return
            with (target / file).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest == last_digest:
                break  # this is what the store has
            last_digest = digest
        (target / file).unlink(missing_ok=True)
        raise DamagedCheckpoint(problem)


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
