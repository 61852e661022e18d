"""Copies a run folder to its object store while the run goes on, in a thread of the launcher or of a node's agent.

The newest checkpoint goes first, so that a slow store always gets one that is worth having. The files of a checkpoint
are opened before they are copied: what retention removes meanwhile is copied to its end. When the store does not
answer, the run goes on and the copy is tried again, at longer intervals; the launcher waits for it at the end.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.console import print_line
from shardwise.data.make_sources import download_data
from shardwise.errors import RunError, ShardwiseError
from shardwise.job import load_job
from shardwise.object_store import in_parallel
from shardwise.train import checkpoint_folder, run_store
from shardwise.train.checkpoint_folder import MANIFEST_FILE, DamagedCheckpoint, list_checkpoints
from shardwise.train.run_store import FETCHED_FILE, RunStore, checkpoint_order

POLL_SECONDS, MAX_BACKOFF = 1.0, 60.0
COPY_SECONDS = 10.0  # between copies of a small file; longer for files of many MiB, which are copied as a whole
END_PATIENCE = 60.0  # for a store that does not answer at the end of a run
PEER_PATIENCE = 600.0  # for files of other nodes at the end of a run
Identity = tuple[int, int]


@dataclass
class _Upload:
    identity: Identity
    files: dict[str, Any]  # open, and not yet copied
    manifest: bytes
    wanted: dict[str, Any]  # what the manifest says of all files
    closing: ExitStack


class RunUploader:
    """`is_main`: on node 0, which copies the small files and manifests, and removes what the run has removed."""

    def __init__(self, store: RunStore, log_event: Callable[[str, str], None], keep: int = 1, is_main: bool = True):
        self.store, self.log_event, self.keep, self.is_main = store, log_event, keep, is_main
        self.problem = ""  # why the store could not be written the last time
        self._versions: dict[str, tuple[int, int]] = {}  # size and time of each small file when it was copied
        self._due: dict[str, float] = {}
        self._uploads: dict[str, _Upload] = {}
        self._done: dict[str, Identity] = {}  # checkpoints that need no more copying
        self._stored: set[str] = set()  # checkpoints that are complete in the store
        self._ended, self._small_lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="shardwise-uploader", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copies while the block runs, and at its end the rest; raises RunError if that fails."""
        if self.is_main:
            self._stored = {name for name, _, _ in self.store.complete()}
            self.store.remove(run_store.checkpoint_names(self.store.remote.list()) - self._stored - set(self._local()))
            self.copy_small_files(at_once=True)  # shows that the store can be written; and other nodes read them
        self._thread.start()
        threading.Thread(target=self._keep_small_files, daemon=True).start()
        try:
            yield
        except BaseException:
            with suppress(ShardwiseError):
                self.finish(patience=POLL_SECONDS)
            raise
        self.finish()

    def finish(self, patience: float = END_PATIENCE) -> None:
        self._ended.set()
        self._thread.join()
        begin = time.monotonic()
        while not (self._try(at_once=True) and self._is_complete()) and not self.store.taken_over_by:
            if time.monotonic() - begin > (patience if self.problem else min(PEER_PATIENCE, 10 * patience)):
                place, why = self.store.folder, self.problem or "files of other nodes have not arrived."
                raise RunError(
                    f"the run is in {place}, but not all of it is in {self.store.url}: {why} Once the store works, "
                    f"`shardwise train --resume {self.store.url}` on this machine copies the rest."
                )
            time.sleep(POLL_SECONDS)
        if other := self.store.taken_over_by:
            raise RunError(f"{self.store.url} has been taken over by {other}, so this launcher has ended.")

    def _run(self) -> None:
        pause = POLL_SECONDS
        while not self._ended.wait(pause):
            pause = POLL_SECONDS if self._try() else min(2 * pause, MAX_BACKOFF)

    def _try(self, at_once: bool = False) -> bool:
        """Copies what there is; returns False, and says so once, if the store cannot be written."""
        try:
            while not self.store.taken_over_by and self._advance():
                pass
            if not self.store.taken_over_by:
                self.copy_small_files(at_once)
        except Exception as error:  # noqa: BLE001 - nobody above this thread reports it
            if not self.problem:
                self.log_event("store_failed", f"{error} The run goes on; the copy is tried again.")
            self.problem = str(error)
            return False
        if self.problem:
            self.problem = ""
            self.log_event("store_recovered", f"{self.store.url} can be written again.")
        return True

    # Checkpoints

    def _local(self) -> list[str]:
        """Returns the names of the checkpoints in the folder, newest first."""
        return [path.name for _, path in list_checkpoints(self.store.checkpoints)]

    def _is_complete(self) -> bool:
        return all(name in self._done for name in self._local()[:1])

    def _advance(self) -> bool:
        """Copies the newest checkpoint that is not yet copied; returns whether there may be more to do."""
        for name in self.store.undo() if self.is_main else ():
            self._drop(name)
            self._stored.discard(name)
            self._done.pop(name, None)
        local = self._local()
        for name in sorted({*local, *self._uploads}, key=checkpoint_order, reverse=True):
            newest = max(map(checkpoint_order, self._stored), default=(-1, 0))
            if name not in local and newest > checkpoint_order(name):
                self._drop(name)  # removed by retention, and of no use any more
                continue
            upload = self._open(name) if name in local else self._uploads[name]
            if upload is None:
                continue
            has_work = bool(upload.files)
            if name in self._stored and has_work:  # it had another content
                self._stored.discard(name)
                self.store.remote.delete([f"checkpoints/{name}/{MANIFEST_FILE}"])

            def copy(file: str, name: str = name, upload: _Upload = upload) -> None:
                self.store.remote.put(upload.files[file], f"checkpoints/{name}/{file}")
                del upload.files[file]

            in_parallel(copy, list(upload.files))
            if self._commit(name, upload) or has_work:
                return True
        return False

    def _open(self, name: str) -> _Upload | None:
        """Opens the files of a checkpoint in the folder; returns None if there is nothing to copy."""
        path, opened = self.store.checkpoints / name, ExitStack()
        with suppress(FileNotFoundError):  # removed meanwhile
            # Of the folder and its oldest shard: a load may add shards of other nodes.
            shards = [file.stat().st_mtime_ns for file in path.glob("__*.distcp")]
            identity = path.stat().st_ino, min(shards, default=0)
            if name in self._uploads and self._uploads[name].identity == identity:
                return self._uploads[name]
            self._drop(name)
            if self._done.get(name) == identity:
                return None
            if (path / FETCHED_FILE).exists() or self._is_known(name, path):
                self._done[name] = identity
                return None
            files = {file.name: opened.enter_context(file.open("rb")) for file in path.iterdir()}
            self._done[name] = identity  # unless it is worth copying
            manifest = files.pop(MANIFEST_FILE).read() if MANIFEST_FILE in files else b""
            with suppress(DamagedCheckpoint):
                wanted = checkpoint_folder.parse_manifest(manifest)["files"] if self.is_main else {}
                del self._done[name]
                self._uploads[name] = _Upload(identity, files, manifest, wanted, opened)
                return self._uploads[name]
        opened.close()
        return None

    def _is_known(self, name: str, path: Path) -> bool:
        """Whether the store has this checkpoint: its manifest has the hashes of all files."""
        if name not in self._stored:
            return False
        return self.store.remote.read(f"checkpoints/{name}/{MANIFEST_FILE}") == (path / MANIFEST_FILE).read_bytes()

    def _commit(self, name: str, upload: _Upload) -> bool:
        """Adds the manifest once all files are there."""
        if self.is_main:
            if run_store.missing_files(name, upload.wanted, self.store.remote.list()) or self.store.is_undone(name):
                return False
            self.copy_small_files(at_once=True)  # so that the metrics of the steps up to this one are there too
            if not self.store.is_writer():
                return False
            self.store.remote.write(f"checkpoints/{name}/{MANIFEST_FILE}", upload.manifest)
            self._stored.add(name)
            self.store.note_saved(max(self._stored, key=checkpoint_order))
        self._done[name] = upload.identity
        upload.closing.close()
        del self._uploads[name]
        self._remove_old()
        return True

    def _drop(self, name: str) -> None:
        if upload := self._uploads.pop(name, None):
            upload.closing.close()

    def _remove_old(self) -> None:
        """Removes all but the newest `keep` from the store."""
        stored = sorted(self._stored, key=checkpoint_order, reverse=True)
        if old := {*stored[self.keep :]} - {*self._local()}:
            self.store.remove(old)
            self._stored -= old

    # Small files

    def copy_small_files(self, at_once: bool = False) -> None:
        with self._small_lock:
            self._copy_small_files(at_once)

    def _keep_small_files(self) -> None:
        """Copies them also while a large checkpoint is on its way."""
        while not self._ended.wait(COPY_SECONDS) and not self.store.taken_over_by:
            with suppress(ShardwiseError):  # the other thread reports it
                self.copy_small_files()

    def _copy_small_files(self, at_once: bool) -> None:
        for name, path in self.store.small_files().items():
            if not self.is_main and not name.startswith("timeline/"):
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                stat = path.stat()
                version = stat.st_size, stat.st_mtime_ns
                if self._versions.get(name) == version or not (at_once or time.monotonic() >= self._due.get(name, 0.0)):
                    continue
                self.store.remote.put(file, name)
                self._versions[name] = version
                self._due[name] = time.monotonic() + max(COPY_SECONDS, stat.st_size / 2**20)


AGENT_FILES = ("job.toml", "plan.toml", "data.json", "tokenizer.json")


@dataclass
class AgentFolder:
    """The local folder of a run on another node than node 0; called before workers are forked there."""

    use: str
    uploading: ExitStack
    """Ends when the agent does: then the rest of the shards is copied."""
    store: RunStore | None = None

    def __call__(self, url: str) -> Path:
        is_known = self.store is not None and self.store.url == url
        store = self.store if self.store is not None and is_known else RunStore(run_store.local_folder(url, self.use))
        store.download(names=AGENT_FILES)
        download_data(load_job(store.folder / "job.toml").data)
        if not is_known:
            for _, path in list_checkpoints(store.checkpoints):
                if not (path / FETCHED_FILE).exists():
                    checkpoint_folder.remove_checkpoint(path)  # shards of an earlier agent, maybe of another run
            self.store = store
            uploader = RunUploader(store, lambda kind, message: print_line(f"{kind}: {message}"), is_main=False)
            self.uploading.enter_context(uploader.running())
        return store.folder
