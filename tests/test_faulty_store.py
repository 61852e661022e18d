"""An object store that gives half of an object, lists late, or has what another version wrote."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from shardwise import object_store
from shardwise.data.input_files import DataFile, DataRecord
from shardwise.data.make_sources import make_sources
from shardwise.errors import CheckpointError, DataError, JobError, StoreError
from shardwise.job import Job, make_job
from shardwise.launch.start import StartOptions, open_data, start_training
from shardwise.layout import Layout
from shardwise.object_store import ObjectStore, local_copy
from shardwise.parallel.prepare import prepare
from shardwise.train import checkpoint_folder, run_store
from shardwise.train.base_weights import BASE_FILE
from shardwise.train.checkpoint_folder import list_checkpoints, write_manifest
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.train.run_store import RunStore, local_folder
from shardwise.train.run_uploader import RunUploader
from shardwise.train.task_record import TASK_FILE
from shardwise.workers.repeated_failures import FILE_NAME as RESTARTS_FILE
from shardwise.workers.run_owner import own_run

FOR_EVER = 10**9


class FaultyStore(LocalFileSystem):
    """A folder as a store. Each fault is counted down by the answers that it spoils."""

    protocol = "faulty"
    torn: dict[str, int] = {}
    """By the end of a name: how many reads give the first half only, without an error."""

    garbled: dict[str, int] = {}
    """The same for reads of the right size with other content."""

    unlisted: dict[str, int] = {}
    """The same for listings that lack the object."""

    unknown: dict[str, int] = {}
    """The same for questions for the object by its name."""

    cut: dict[str, int] = {}
    """The same for uploads of which only half arrives, without an error."""

    lost: dict[str, int] = {}
    """The same for uploads of which nothing arrives, without an error."""

    described: dict[str, Any] = {}
    """What the store says of every object in addition; a function of the content."""

    lock = threading.Lock()

    def __init__(self, **options: Any):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol("/" + str(path).removeprefix("faulty://").lstrip("/"))

    @classmethod
    def reset(cls) -> None:
        for faults in (cls.torn, cls.garbled, cls.unlisted, cls.unknown, cls.cut, cls.lost, cls.described):
            faults.clear()

    @classmethod
    def strikes(cls, faults: dict[str, int], path: str) -> bool:
        with cls.lock:
            for end, count in faults.items():
                if path.endswith(end) and count > 0:
                    faults[end] -= 1
                    return True
        return False

    def _spoiled(self, path: str) -> bytes:
        content = Path(path).read_bytes()
        if self.strikes(self.torn, path):
            return content[: len(content) // 2]
        if self.strikes(self.garbled, path):
            return bytes(byte ^ 1 for byte in content)
        return content

    def _described(self, path: str, info: dict[str, Any]) -> dict[str, Any]:
        if info["type"] == "file":
            info |= {key: function(Path(path).read_bytes()) for key, function in self.described.items()}
        return info

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        return self._spoiled(self._strip_protocol(path))

    def get_file(self, path1: str, path2: str, *arguments: Any, **options: Any) -> None:
        Path(path2).write_bytes(self._spoiled(self._strip_protocol(path1)))

    def put_file(self, path1: str, path2: str, *arguments: Any, **options: Any) -> None:
        super().put_file(path1, path2)
        self._cut(path2)

    def pipe_file(self, path: str, value: bytes, *arguments: Any, **options: Any) -> None:
        super().pipe_file(path, value)
        self._cut(path)

    def _cut(self, path: str) -> None:
        if self.strikes(self.cut, path):
            os.truncate(path, os.path.getsize(path) // 2)
        if self.strikes(self.lost, path):
            os.unlink(path)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        found = super().find(path, *arguments, **options)
        return {name: self._described(name, i) for name, i in found.items() if not self.strikes(self.unlisted, name)}

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        info = super().info(path, **options)
        if isinstance(path, os.DirEntry):  # of a listing
            return info
        if info["type"] == "file" and self.strikes(self.unknown, str(path)):
            raise FileNotFoundError(path)
        return self._described(self._strip_protocol(path), info)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the folder that plays the store."""
    FaultyStore.reset()
    monkeypatch.setattr(object_store, "PAUSES", (0.0,) * 5)
    monkeypatch.setattr(run_store, "ARRIVAL_SECONDS", 0.0)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir()
    yield tmp_path / "store"
    FaultyStore.reset()


@pytest.fixture
def url(store: Path) -> str:
    return f"faulty:/{store}/run"


# One object


def test_half_of_an_object_is_read_again(store: Path, tmp_path: Path) -> None:
    (store / "object").write_bytes(b"content" * 1000)
    remote = ObjectStore(f"faulty:/{store}")
    FaultyStore.torn["object"] = 2
    assert remote.read("object") == b"content" * 1000
    FaultyStore.torn["object"] = 2
    remote.get("object", tmp_path / "copy", remote.list()["object"])
    assert (tmp_path / "copy").read_bytes() == b"content" * 1000
    assert (tmp_path / "copy").stat().st_mtime == pytest.approx((store / "object").stat().st_mtime, abs=1e-3)


def test_an_object_that_never_comes_whole_is_refused(store: Path, tmp_path: Path) -> None:
    (store / "object").write_bytes(b"content" * 1000)
    remote = ObjectStore(f"faulty:/{store}")
    FaultyStore.torn["object"] = FOR_EVER
    for read in (lambda: remote.read("object"), lambda: remote.get("object", tmp_path / "copy")):
        with pytest.raises(StoreError, match="object cannot be read: it has 7000 bytes, and 3500 came, 6 times"):
            read()
    assert not (tmp_path / "copy").exists()


def test_an_object_that_is_replaced_while_it_is_read_is_read_as_it_is_now(store: Path, tmp_path: Path) -> None:
    (store / "log").write_bytes(b"one")
    remote = ObjectStore(f"faulty:/{store}")
    listed = remote.list()["log"]
    (store / "log").write_bytes(b"one, two")
    remote.get("log", tmp_path / "copy", listed)
    assert (tmp_path / "copy").read_bytes() == b"one, two"


def md5(content: bytes) -> bytes:
    return hashlib.md5(content).digest()


DIGESTS = {
    "ETag": lambda content: f'"{md5(content).hex()}"',
    "md5Hash": lambda content: base64.b64encode(md5(content)).decode(),
    "content_settings": lambda content: {"content_md5": bytearray(md5(content))},
    "crc32c": lambda content: base64.b64encode(hashlib.sha1(content).digest()[:4]).decode(),
}


@pytest.mark.parametrize("name", DIGESTS)
def test_digests_of_the_store_are_compared(
    store: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of store has its own name for them. The checksum is played: its package comes with Google's client."""

    class Checksum:
        def __init__(self) -> None:
            self.sha1 = hashlib.sha1()
            self.update = self.sha1.update

        def hexdigest(self) -> bytes:
            return self.sha1.hexdigest()[:8].encode()

    module: Any = ModuleType("google_crc32c")
    module.Checksum = Checksum
    monkeypatch.setitem(sys.modules, "google_crc32c", module)

    content = b"content" * 1000
    (store / "object").write_bytes(content)
    FaultyStore.described[name] = DIGESTS[name]
    remote = ObjectStore(f"faulty:/{store}")
    FaultyStore.garbled["object"] = 1
    assert remote.read("object") == content
    FaultyStore.garbled["object"] = 1
    remote.get("object", tmp_path / "copy", remote.list()["object"])
    assert (tmp_path / "copy").read_bytes() == content
    if name != "ETag":
        FaultyStore.garbled["object"] = FOR_EVER
        with pytest.raises(StoreError, match="its (MD5|CRC32C) is"):
            remote.read("object")


def test_an_etag_that_is_no_md5_is_known_by_two_equal_reads(store: Path) -> None:
    """Objects that are encrypted with keys of KMS have such ETags; and those of several parts have a number."""
    (store / "object").write_bytes(b"content")
    FaultyStore.described["ETag"] = lambda content: f'"{"0" * 32}"'
    assert ObjectStore(f"faulty:/{store}").read("object") == b"content"
    FaultyStore.described["ETag"] = lambda content: f'"{"0" * 32}-2"'
    assert ObjectStore(f"faulty:/{store}").entry("object").digests == ()  # type: ignore[union-attr]


def test_an_upload_of_which_half_arrives_is_an_error(store: Path, tmp_path: Path) -> None:
    remote = ObjectStore(f"faulty:/{store}")
    (tmp_path / "local").write_bytes(b"content" * 1000)
    FaultyStore.cut["object"] = 2
    with pytest.raises(StoreError, match="of its 7000 bytes, the store has 3500"):
        remote.write("object", b"content" * 1000)
    with (tmp_path / "local").open("rb") as file:
        with pytest.raises(StoreError, match="of its 7000 bytes, the store has 3500"):
            remote.put(file, "object")
        remote.put(file, "object")
    assert (store / "object").read_bytes() == b"content" * 1000


@pytest.mark.parametrize("content", [b"", b"content"])
def test_an_upload_that_is_lost_is_an_error(store: Path, tmp_path: Path, content: bytes) -> None:
    """An empty object that is not there is no empty object."""
    remote = ObjectStore(f"faulty:/{store}")
    (tmp_path / "local").write_bytes(content)
    FaultyStore.lost["object"] = 2
    message = f"object cannot be written: the store took its {len(content)} bytes .*, but does not have it"
    with pytest.raises(StoreError, match=message):
        remote.write("object", content)
    with (tmp_path / "local").open("rb") as file:
        with pytest.raises(StoreError, match=message):
            remote.put(file, "object")
        remote.put(file, "object")
    assert (store / "object").read_bytes() == content


def test_a_download_that_cannot_be_written_here_is_an_error_of_the_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or a file in the way; a disk that is full; a time that cannot be set."""
    (store / "object").write_bytes(b"content")
    remote = ObjectStore(f"faulty:/{store}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for target in (tmp_path / "folder", tmp_path / "file" / "copy"):
        with pytest.raises(StoreError, match=rf"object cannot be copied to {target}: (Is a directory|File exists)\."):
            remote.get("object", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "store"]

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "utime"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(StoreError, match=f"cannot be copied to {tmp_path}/copy: No space left on device"):
                remote.get("object", tmp_path / "copy", remote.list()["object"])
    remote.get("object", tmp_path / "copy", remote.list()["object"])
    assert (tmp_path / "copy").read_bytes() == b"content"


# Runs


def job_of(folder: str, **checkpoint: Any) -> Job:
    return make_job(
        {
            "precision": "float64", "steps": 15, "layout": "replicate=1",
            "model": {"layers": 1, "width": 8, "heads": 1, "vocab": 61, "sequence": 8}, "batch": {"samples": 2},
            "data": {"source": "synthetic"}, "validation": {"samples": 2},
            "checkpoint": {"every": 5, "snapshot_every": 0, **checkpoint},
            "run": {"folder": folder, "device": "cpu", "standby": False},
        }
    )  # fmt: skip


def save(folder: Path, step: int, content: bytes = b"shard", **values: Any) -> Path:
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {"__0_0.distcp": content * step, "tensors.json": b"{}"}
    for file, data in files.items():
        (path / file).write_bytes(data)
    digests = {file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for file, data in files.items()}
    write_manifest(path, {"step": step, "state": {"step": step}, "files": digests, **values})
    return path


class Machine:
    """A launcher with a cache of its own, from claiming the run to copying what it has saved."""

    def __init__(self, url: str, cache: Path, patch: pytest.MonkeyPatch):
        patch.setenv("SHARDWISE_CACHE", str(cache))
        self.is_new = not RunFolder.exists(url)
        self.folder = RunFolder.create(job_of(url)).path if self.is_new else local_folder(url)
        self.store = RunStore(self.folder)
        self.said: list[str] = []

    def __enter__(self) -> Machine:
        with ExitStack() as running:
            running.enter_context(own_run(self.folder, self.said.append))
            running.enter_context(self.store.claimed(self.said.append, lambda: None))
            if not self.is_new:
                self.store.restore(self.said.append)
            uploader = RunUploader(self.store, lambda kind, text: self.said.append(f"{kind}: {text}"), keep=2)
            running.enter_context(uploader.running())
            self.running = running.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.running.__exit__(*error)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in list_checkpoints(self.store.checkpoints)]


def begin(url: str, cache: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A run that has saved steps 1 and 2. Returns what the store has."""
    with Machine(url, cache, patch) as one:
        save(one.folder, 1)
        save(one.folder, 2)
        for step in range(15):
            RunFolder(one.folder).log_metrics({"step": step, "loss": 1.0})
        RunFolder(one.folder).log_event("checkpoint", "saved", step=2)
    return contents(url)


def contents(url: str) -> dict[str, bytes]:
    """Everything but the name of the writer, read past the faults."""
    root = Path(url.removeprefix("faulty:/"))
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name != "writer.json"}


NEWEST = ("step-00000002/__0_0.distcp", "step-00000002/tensors.json", "step-00000002/manifest.json")


@pytest.mark.parametrize("late", [*NEWEST, "all of them"])
def test_a_listing_that_lacks_a_part_of_the_newest_checkpoint(
    url: str, tmp_path: Path, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a few seconds, or for ever: what is not listed is asked for by its name."""
    before = begin(url, tmp_path / "a", monkeypatch)
    for number, count in enumerate((1, 3, FOR_EVER)):
        for name in NEWEST if late == "all of them" else [late]:
            FaultyStore.unlisted[name] = count
        with Machine(url, tmp_path / f"b{number}", monkeypatch) as two:
            assert two.steps == [2]
        assert contents(url) == before


@pytest.mark.parametrize("late", NEWEST)
def test_a_store_that_answers_late(url: str, tmp_path: Path, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = begin(url, tmp_path / "a", monkeypatch)
    FaultyStore.unlisted[late] = FaultyStore.unknown[late] = 2
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert two.steps == [2]
    assert contents(url) == before

    FaultyStore.unlisted[late] = FaultyStore.unknown[late] = FOR_EVER
    with pytest.raises(CheckpointError, match="step-00000002 cannot be used"):
        Machine(url, tmp_path / "c", monkeypatch).__enter__()
    assert contents(url) == before


@pytest.mark.parametrize("torn", [*NEWEST, "writer.json", "job.toml", "metrics.jsonl", "events.jsonl"])
def test_torn_reads_of_a_run(url: str, tmp_path: Path, torn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = begin(url, tmp_path / "a", monkeypatch)
    FaultyStore.torn[torn] = 2
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert two.steps == [2] and not two.said
        assert len(list(RunFolder(two.folder).metrics())) == 15
    assert contents(url) == before

    FaultyStore.torn[torn] = 2
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "reader"))
    reader = RunFolder.open(Path(url), weights=True)
    assert len(list(reader.metrics())) == 15 and list_checkpoints(reader.checkpoints)[0][0] == 2

    FaultyStore.torn[torn] = FOR_EVER
    with pytest.raises(StoreError, match="cannot be read: it has"):
        Machine(url, tmp_path / "c", monkeypatch).__enter__()
    FaultyStore.reset()
    assert contents(url) == before


def test_a_shard_that_comes_changed_is_read_again(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is right, and the store gives no digest; the manifest does."""
    begin(url, tmp_path / "a", monkeypatch)
    FaultyStore.garbled[NEWEST[0]] = 1
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert two.steps == [2] and not two.said


def make_foreign(store: Path) -> None:
    """Step 2 as a newer version would write it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "FORMAT_VERSION", 2)
        path = store / "run" / "checkpoints" / "step-00000002"
        files = json.loads((path / "manifest.json").read_bytes())["files"]
        write_manifest(path, {"step": 2, "state": {"step": 2}, "files": files})


def test_a_checkpoint_of_a_newer_version_is_neither_skipped_nor_removed(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(url, tmp_path / "a", monkeypatch)
    make_foreign(store)
    before = contents(url)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="has format 2; this version reads 1. It is the newest") as error:
            Machine(url, tmp_path / "b", monkeypatch).__enter__()
        assert contents(url) == before
    with pytest.raises(CheckpointError, match="has format 2"):
        RunFolder.open(Path(url), weights=True)

    # The way around that the sentence names: the run goes on from the one before.
    assert f"remove {url}/checkpoints/step-00000002 and {url}/writer.json" in str(error.value)
    shutil.rmtree(store / "run" / "checkpoints" / "step-00000002")
    with pytest.raises(CheckpointError, match="writer.json names it as the last one saved"):
        Machine(url, tmp_path / "b", monkeypatch).__enter__()
    (store / "run" / "writer.json").unlink()
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert two.steps == [1]


def test_what_cannot_be_read_is_not_removed_by_a_run_that_goes_on(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Age alone decides: it stays until it is older than the checkpoints to keep."""
    begin(url, tmp_path / "a", monkeypatch)
    run = store / "run" / "checkpoints"
    (run / "step-00000001" / "manifest.json").write_text("{}")
    shutil.copytree(run / "step-00000001", run / "step-00000009")
    (run / "step-00000009" / "manifest.json").unlink()  # a copy that was cut short
    with Machine(url, tmp_path / "b", monkeypatch):
        pass
    names = lambda: {name.split("/")[1][-1] for name in contents(url) if name.startswith("checkpoints/")}  # noqa: E731
    assert names() == {"1", "2", "9"}
    with Machine(url, tmp_path / "b", monkeypatch) as three:
        save(three.folder, 3)
    assert names() == {"2", "3", "9"}  # two are kept


def test_a_refused_resume_elsewhere_leaves_the_run_to_the_machine_that_has_it(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(url, tmp_path / "a", monkeypatch)
    (store / "run" / "checkpoints" / "step-00000002" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="the store has no __0_0.distcp of 10 bytes"):
        Machine(url, tmp_path / "b", monkeypatch).__enter__()
    with Machine(url, tmp_path / "a", monkeypatch) as one:
        assert one.steps == [2, 1]
    assert contents(url)["checkpoints/step-00000002/__0_0.distcp"] == b"shard" * 2


def test_a_refused_resume_elsewhere_leaves_a_copy_of_before_as_it_is(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has gone on since: its newest checkpoint cannot be had, and nothing is replaced by its files."""
    begin(url, tmp_path / "a", monkeypatch)
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        save(two.folder, 3)
        RunFolder(two.folder).log_metrics({"step": 15, "loss": 1.0})
    (store / "run" / "checkpoints" / "step-00000003" / "__0_0.distcp").unlink()

    with pytest.raises(CheckpointError, match="the store has no __0_0.distcp of 15 bytes"):
        Machine(url, tmp_path / "a", monkeypatch).__enter__()
    (metrics,) = (tmp_path / "a").rglob("metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 15


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "job.toml"])
def test_a_listing_that_lacks_a_small_file(
    url: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begin(url, tmp_path / "a", monkeypatch)
    FaultyStore.unlisted[name] = FOR_EVER
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        RunFolder(two.folder).log_metrics({"step": 15, "loss": 1.0})
    FaultyStore.reset()
    after = contents(url)
    assert after[name].startswith(before[name]) and len(after["metrics.jsonl"].splitlines()) == 16


# Of these, a resume on a fresh machine would write new ones; and an export would lack the last one.
RECORDS = (BASE_FILE, TASK_FILE, RESTARTS_FILE, "special_tokens_map.json")


@pytest.mark.parametrize("name", RECORDS)
def test_a_listing_that_lacks_a_record_of_the_run(
    url: str, store: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(url, tmp_path / "a", monkeypatch)
    (store / "run" / name).write_text("as the run began")
    FaultyStore.unlisted[name] = FOR_EVER
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert (two.folder / name).read_text() == "as the run began"


def test_a_new_run_does_not_begin_on_the_checkpoints_of_another(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may not be listed yet, or have been removed alone."""
    begin(url, tmp_path / "a", monkeypatch)
    (store / "run" / "job.toml").unlink()
    with pytest.raises(JobError, match="has step-00000002 of a run, but no job.toml"):
        RunFolder.create(job_of(url))


def test_going_back_names_no_checkpoint_that_leaves_the_store(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(url, tmp_path / "a", monkeypatch)
    remove = RunStore.remove
    named: list[str] = []

    def removing(self: RunStore, names: set[str]) -> None:
        named.append(json.loads((store / "run" / "writer.json").read_bytes())["saved"])
        remove(self, names)

    monkeypatch.setattr(RunStore, "remove", removing)
    with Machine(url, tmp_path / "a", monkeypatch) as one:
        shutil.rmtree(one.store.checkpoints / "step-00000002")
        one.store.undone_mark("step-00000002").touch()
    assert named[0] == "step-00000001"
    monkeypatch.setattr(RunStore, "remove", remove)
    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert two.steps == [1]


def test_a_damaged_checkpoint_is_no_longer_named_when_it_is_saved_again(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest goes first; a launcher that dies then must leave a run that can be resumed."""
    begin(url, tmp_path / "a", monkeypatch)
    shard = store / "run" / "checkpoints" / "step-00000002" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[::-1])
    delete = ObjectStore.delete
    named: list[str] = []

    def deleting(self: ObjectStore, names: Iterable[str]) -> None:
        named.append(json.loads((store / "run" / "writer.json").read_bytes())["saved"])
        delete(self, names)

    with Machine(url, tmp_path / "b", monkeypatch) as two:
        assert two.steps == [1]
        monkeypatch.setattr(ObjectStore, "delete", deleting)
        save(two.folder, 2)
    assert named[0] == "step-00000001"
    assert json.loads((store / "run" / "writer.json").read_bytes())["saved"] == "step-00000002"


# Data


def text_job(path: str, source: str = "text") -> Job:
    values = job_of("").model_dump(exclude_none=True)
    values["model"] |= {"vocab": 256}
    return make_job({**values, "data": {"source": source, "path": path}})


TEXT = "\n\n".join(f"A sentence with the number {number} in it." for number in range(2000))


def test_torn_data_is_read_again(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run reads, and what it records of it, is the whole file."""
    (store / "data.txt").write_text(TEXT)
    record = DataRecord()
    FaultyStore.torn["data.txt"] = 1
    training = make_sources(text_job(f"faulty:/{store}/data.txt"), record=record)[0]
    plain = make_sources(text_job(str(store / "data.txt")), tmp_path / "plain")[0]
    assert len(training) == len(plain) and (training[len(plain) - 1] == plain[len(plain) - 1]).all()
    (file,) = record.files.values()
    assert (file.size, file.digest) == (len(TEXT), DataFile.of(store / "data.txt").digest)

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "late"))
    FaultyStore.unlisted["data.txt"] = FOR_EVER
    assert len(make_sources(text_job(f"faulty:/{store}/data.txt"))[0]) == len(plain)

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "other"))
    FaultyStore.reset()
    FaultyStore.torn["data.txt"] = FOR_EVER
    with pytest.raises(StoreError, match=f"it has {len(TEXT)} bytes, and {len(TEXT) // 2} came"):
        make_sources(text_job(f"faulty:/{store}/data.txt"))


def test_a_run_that_began_with_half_of_its_data_says_so(store: Path, tmp_path: Path) -> None:
    """An earlier version did: its record has the time of the object, and fewer bytes."""
    (store / "data.txt").write_text(TEXT)
    record = DataRecord()
    make_sources(text_job(f"faulty:/{store}/data.txt"), record=record)
    (file,) = record.files.values()
    whole = file.path.read_bytes()
    stat = file.path.stat()
    file.path.write_bytes(whole[: len(whole) // 2])
    os.utime(file.path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    record.files[str(file.path)] = DataFile.of(file.path)
    record.save(tmp_path / "data.json")

    local_copy(f"faulty:/{store}/data.txt")
    with pytest.raises(DataError, match=f"the run began with {len(TEXT) // 2} of the {len(TEXT)} bytes of faulty://"):
        DataRecord.load(tmp_path / "data.json").check(tmp_path)


def test_data_that_was_replaced_in_the_store_is_not_taken(
    url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a machine is brought up to date before it is compared with what the run began with."""
    (store / "data.txt").write_text(TEXT)
    values = text_job(f"faulty:/{store}/data.txt").model_dump(exclude_none=True)
    run = RunFolder.create(make_job({**values, "run": {**values["run"], "folder": str(tmp_path / "run")}}))
    record = DataRecord()
    run.write_data(record, *run.sources(run.job(), record))
    (store / "data.txt").write_text(TEXT.replace("number", "figure"))
    with pytest.raises(DataError, match="the content of .*data.txt has changed"):
        start_training(None, [], run.path, print)


def test_a_node_with_an_old_copy_of_a_validation_set_fetches_the_new_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers compare the data too, before which its copies are brought up to date, as the launcher's are."""
    (store / "set.txt").write_text(TEXT.replace("number", "figure"))
    (tmp_path / "data.txt").write_text(TEXT)
    set_url = f"faulty:/{store}/set.txt"
    values = text_job(str(tmp_path / "data.txt")).model_dump(exclude_none=True)
    values["validation"] |= {"every": 2, "sets": {"mine": set_url}}
    values["run"] |= {"folder": str(tmp_path / "run")}
    job = make_job(values)

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "node 1"))
    local_copy(set_url)
    (store / "set.txt").write_text(TEXT)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "node 0"))
    prepared = prepare(job, Layout())
    run = RunFolder.create(job)
    record, sources, _ = open_data(prepared, None, StartOptions())
    run.write_data(record, *sources)

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "node 1"))
    loop = TrainingLoop(prepared, run, torch.device("cpu"))
    assert len(loop.validation_sets["mine"]) > 0


def test_a_validation_set_that_a_resume_leaves_out_may_be_gone(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / "set.txt").write_text(TEXT)
    (tmp_path / "data.txt").write_text(TEXT)
    values = text_job(str(tmp_path / "data.txt")).model_dump(exclude_none=True)
    values["validation"] |= {"every": 2, "sets": {"mine": f"faulty:/{store}/set.txt"}}
    values["run"] |= {"folder": str(tmp_path / "run")}
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "here"))
    run = RunFolder.create(make_job(values))
    record, sources, _ = open_data(prepare(run.job(), Layout()), None, StartOptions())
    run.write_data(record, *sources)

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "elsewhere"))
    (store / "set.txt").unlink()
    values["validation"]["sets"] = {}
    record, _, _ = open_data(prepare(make_job(values), Layout()), run, StartOptions())
    assert not record.validation_sets
