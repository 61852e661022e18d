"""Copies a run folder to its object store while the run goes on, in a thread of the launcher or of a node's agent.

The newest checkpoint goes first. The files of a checkpoint are opened before they are copied: what retention removes
meanwhile is copied to its end. docs/how-to/object-store.md says what happens when the store does not answer."""

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwise.console import print_line
from shardwise.errors import RunError, ShardwiseError
from shardwise.job import load_job
from shardwise.object_store import in_parallel
from shardwise.train import checkpoint_folder
from shardwise.train.checkpoint_folder import MANIFEST_FILE, DamagedCheckpoint, parse_manifest, save_order
from shardwise.train.run_store import FETCHED_FILE, RunStore, local_folder
from shardwise.train.validate import refresh_copies

POLL_SECONDS, MAX_BACKOFF = 1.0, 60.0
COPY_SECONDS = 10.0  # between copies of a small file; longer for files of many MiB, which are copied as a whole
END_PATIENCE = 60.0  # for a store that does not answer at the end of a run; for other nodes, 10 times as long
AGENT_FILES = ("job.toml", "plan.toml", "data.json", "tokenizer.json")


class RunUploader:
    """`is_main`: on node 0, which copies the small files and manifests, and removes what the run has removed."""

    def __init__(self, store: RunStore, log_event: Callable[[str, str], None], keep: int = 1, is_main: bool = True):
        self.store, self.log_event, self.keep, self.is_main = store, log_event, keep, is_main
        self.problem = ""  # why the store could not be written the last time
        self._small: dict[str, tuple[int, int, float]] = {}  # size and time of each that was copied; when it is due
        self._sent: dict[str, set[str]] = defaultdict(set)  # the files of each checkpoint that have been copied
        self._copied: set[str] = set()  # checkpoints of which nothing is left to copy from here
        self._pending: dict[str, bytes] = {}  # manifests that wait for files of other nodes
        self._stored: set[str] = set()  # checkpoints that are complete in the store
        self._ended, self._small_lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="shardwise-uploader", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copies while the block runs, and at its end the rest; raises RunError if that fails."""
        if self.is_main:
            self._stored = self.store.complete().keys() - self.store.damaged
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
            if time.monotonic() - begin > (patience if self.problem else 10 * patience):
                url, why = self.store.url, self.problem or "files of other nodes have not arrived."
                remedy = f"Once the store works, `shardwise train --resume {url}` on this machine copies the rest."
                raise RunError(f"the run is in {self.store.folder}, but not all of it is in {url}: {why} {remedy}")
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

    def _local(self) -> list[Path]:
        return [path for _, path in checkpoint_folder.list_checkpoints(self.store.checkpoints)]

    def _is_complete(self) -> bool:
        return all(path.name in (self._copied | self._stored) - {*self._pending} for path in self._local()[:1])

    def _advance(self) -> bool:
        """Completes or copies the newest checkpoint that is not yet in the store; returns whether there was one."""
        undone = self.store.undo(in_store=self.is_main, stored=self._stored)
        for name in undone:  # it may come again, with another content
            self._stored -= {name}
            self._copied -= {name}
            self._pending.pop(name, None)
            self._sent.pop(name, None)
        if any(self._commit(name) for name in sorted(self._pending, key=save_order, reverse=True)):
            return True
        path = next((path for path in self._local() if path.name not in self._copied | self._stored), None)
        if path is not None:
            self._copy(path)
        return path is not None

    def _copy(self, path: Path) -> None:
        """Copies the files of a checkpoint, or those that a node has of it."""
        with ExitStack() as opened, suppress(FileNotFoundError, DamagedCheckpoint):  # removed meanwhile; damaged
            files = {file.name: opened.enter_context(file.open("rb")) for file in path.iterdir()}
            manifest = files.pop(MANIFEST_FILE).read() if MANIFEST_FILE in files else b""
            if self.is_main:
                parse_manifest(manifest)
                self._replace_damaged(path.name)

            def copy(file: str) -> None:
                self.store.remote.put(files[file], f"checkpoints/{path.name}/{file}")
                self._sent[path.name].add(file)

            if FETCHED_FILE not in files:
                in_parallel(copy, files.keys() - self._sent[path.name])
                self._pending |= {path.name: manifest} if self.is_main else {}
        self._copied.add(path.name)

    def _commit(self, name: str) -> bool:
        """Adds the manifest once all files are there; forgets a checkpoint that is of no use any more."""
        local = {path.name for path in self._local()}
        is_old = name not in local and any(save_order(other) > save_order(name) for other in self._stored)
        if not is_old:
            if self.store.first_missing(name, parse_manifest(self._pending[name])["files"]):
                return False
            self.copy_small_files(at_once=True)  # so that the metrics of the steps up to this one are there too
            if not self.store.is_writer() or self.store.undone_mark(name).exists():
                return False
            self.store.remote.write(f"checkpoints/{name}/{MANIFEST_FILE}", self._pending[name])
            self._stored.add(name)
            self.store.saved = max(self._stored, key=save_order)
            self.store.write_writer()
            self._remove_old(local)
        del self._pending[name]
        return True

    def _replace_damaged(self, name: str) -> None:
        """Takes the manifest of a damaged checkpoint away before the run, which is there again, saves another one."""
        if name in self.store.damaged and self.store.is_writer():
            if self.store.saved == name:  # first, so that the writer never names what is not there
                self.store.saved = max(self._stored, key=save_order, default="")
                self.store.write_writer()
            self.store.remote.delete([f"checkpoints/{name}/{MANIFEST_FILE}"])
            self.store.damaged.discard(name)

    def _remove_old(self, local: set[str]) -> None:
        """Removes what is older than the checkpoints to keep, also what remains of copies that were cut short. Age is
        the only reason: what looks incomplete, or cannot be read, may be whole (`RunStore.complete`)."""
        kept = sorted(self._stored, key=save_order, reverse=True)[: self.keep]
        if len(kept) < self.keep:
            return
        oldest = save_order(kept[-1])
        listed = self.store.checkpoint_files()
        old = {name for name in listed if save_order(name) < oldest} - local - self._pending.keys()
        self.store.remove(old)
        self._stored -= old

    def _keep_small_files(self) -> None:
        """Copies them also while a large checkpoint is on its way."""
        while not self._ended.wait(COPY_SECONDS):
            with suppress(ShardwiseError):  # the other thread reports it
                self.copy_small_files()

    def copy_small_files(self, at_once: bool = False) -> None:
        with self._small_lock:
            for name, path in self.store.small_files().items() if not self.store.taken_over_by else ():
                size, changed, due = self._small.get(name, (-1, 0, 0.0))
                if not (self.is_main or name.startswith("timeline/")) or not (at_once or time.monotonic() >= due):
                    continue
                with suppress(FileNotFoundError), path.open("rb") as file:
                    stat = path.stat()
                    if (size, changed) != (stat.st_size, stat.st_mtime_ns):
                        self.store.remote.put(file, name)
                        due = time.monotonic() + max(COPY_SECONDS, stat.st_size / 2**20)
                        self._small[name] = stat.st_size, stat.st_mtime_ns, due


def agent_folder(use: str, uploading: ExitStack) -> Callable[[str], Path]:
    """Returns what makes the local folder of a run, before workers are forked there, on another node than node 0.
    `uploading` ends when the agent does: then the rest of its shards is copied."""
    stores: dict[str, RunStore] = {}

    def prepare(url: str) -> Path:
        store = stores.get(url) or RunStore(local_folder(url, use))
        store.download(names=AGENT_FILES)
        refresh_copies(load_job(store.folder / "job.toml"))
        if url not in stores:
            for name in ("checkpoints", "heartbeats", "errors"):  # of an earlier agent, maybe of another run
                shutil.rmtree(store.folder / name, ignore_errors=True)
            uploader = RunUploader(store, lambda kind, text: print_line(f"{kind}: {text}"), is_main=False)
            uploading.enter_context(uploader.running())
            stores[url] = store
        return store.folder

    return prepare
