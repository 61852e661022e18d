"""A run in an object store: a folder that plays one (`file://`), and a real S3 server (moto) where it is installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from shardwise import object_store
from shardwise.data.input_files import DataRecord
from shardwise.data.make_sources import make_sources
from shardwise.errors import CheckpointError, DataError, JobError, RunError, ShardwiseError, StoreError
from shardwise.job import Job, make_job
from shardwise.object_store import ObjectStore, is_plain, local_copy, original_name, parse_url
from shardwise.train import run_store, run_uploader
from shardwise.train.checkpoint_folder import DamagedCheckpoint, list_checkpoints, parse_manifest, write_manifest
from shardwise.train.run_folder import RunFolder
from shardwise.train.run_store import RunStore, local_folder
from shardwise.train.run_uploader import RunUploader
from shardwise.workers.diagnosis import read_heartbeats
from shardwise.workers.run_owner import own_run
from shardwise.workers.snapshots import snapshot_key

pytestmark = pytest.mark.cluster

PORT = 29473
STEPS = 40
SECRET = "only for these tests, on one machine"
KEY_ID, KEY = "the-id-of-a-key", "the-key-that-nobody-may-see"


def job_of(folder: str, layout: str = "replicate=2", steps: int = STEPS, **checkpoint: int) -> Job:
    return make_job(
        {
            "precision": "float64", "steps": steps, "layout": layout,
            "model": {"layers": 2, "width": 16, "heads": 2, "vocab": 61, "sequence": 8}, "batch": {"samples": 4},
            "data": {"source": "synthetic"}, "validation": {"samples": 4},
            "checkpoint": {"every": 2, "snapshot_every": 0, **checkpoint},
            "run": {"folder": folder, "device": "cpu", "standby": False, "rejoin_timeout": 60},
        }
    )  # fmt: skip


def curve(folder: RunFolder) -> list[tuple[int, int, float, float]]:
    return [(record["step"], record["samples"], record["loss"], record["grad_norm"]) for record in folder.metrics()]


def kinds(folder: RunFolder) -> list[str]:
    return [event["event"] for event in folder.events()]


def wait(what: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 150
    while not what():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes]) -> None:
    """All processes at once, as when a machine goes dark."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(cache: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "SHARDWISE_CACHE": str(cache), "SHARDWISE_SECRET": SECRET, **variables}
    command = [sys.executable, "-m", "shardwise", "train", *words]
    with Path(f"{cache}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store answers is asked for again without waiting long."""
    monkeypatch.setattr(object_store, "PAUSES", (0.01,) * 5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(cache: Path, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of an S3 server on this machine."""
    pytest.importorskip("moto.server", reason="moto, which plays an S3 server, is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            deadline = time.monotonic() + 180
            while True:
                try:
                    boto3.client("s3").create_bucket(Bucket="runs")
                    break
                except Exception:  # noqa: BLE001 - it does not listen yet
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            yield "s3://runs"
        finally:
            server.kill()
            server.wait()


# Names


def test_both_forms_of_a_url_are_the_same() -> None:
    for text in ("s3://bucket/run", "s3:/bucket/run", "s3://bucket/run/"):
        assert parse_url(text) == parse_url(Path(text)) == "s3://bucket/run"
    assert parse_url("file:///tmp/x") == parse_url(Path("file:///tmp/x")) == "file:///tmp/x"
    for text in ("runs/0001", "/tmp/s3", "c:/runs", "a:b", "", "runs/s3://x"):
        assert not parse_url(text)
    assert [name for name in ("a/b", ".metadata", "../x", "/x", "a/../../x", f".x.{'0' * 32}") if is_plain(name)] == [
        "a/b", ".metadata",
    ]  # fmt: skip


def test_what_is_wrong_with_a_store_is_a_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Protocol not known: foo"):
        ObjectStore("foo://bucket/run")
    with pytest.raises(StoreError, match="install gcsfs"):
        ObjectStore("gs://bucket/run")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be read: NotADirectoryError"):
        RunFolder.create(job_of(f"file://{tmp_path}/file/run"))
    with pytest.raises(JobError, match="file:///nowhere/run is not a run folder: it has no job.toml"):
        RunFolder.open(Path("file:///nowhere/run"))


def test_s3_says_what_is_wrong(s3: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="The specified bucket does not exist"):
        RunFolder.create(job_of("s3://missing/run"))
    with pytest.raises(JobError, match="is not a run folder"):
        RunFolder.open(Path(f"{s3}/none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="Could not connect"):
        RunFolder.create(job_of(f"{s3}/run"))


def test_hostile_names_lead_nowhere(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects whose names lead out of the folder, or would replace what makes it a copy, are left alone."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "deep" / "cache"))
    client = pytest.importorskip("boto3").client("s3")
    names = ("../x", "../../../../x", f"/{tmp_path}/x", "a/../../../x", "store.json", "owner.json", "fine")
    client.put_object(Bucket="runs", Key="hostile/job.toml", Body=make_job({}).to_toml().encode())
    for name in names:
        client.put_object(Bucket="runs", Key=f"hostile/{name}", Body=b"hostile")
    folder = RunFolder.open(Path(f"{s3}/hostile")).path
    local_copy(f"{s3}/hostile")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"hostile"]
    copies = tmp_path / "deep" / "cache" / "data" / "s3" / "runs" / "hostile"
    assert sorted(written) == sorted(
        [folder / "fine", *(copies / name for name in ("store.json", "owner.json", "fine"))]
    )
    with pytest.raises(DataError, match="without '..'"):
        local_copy(f"{s3}/../../../x")
    (tmp_path / "data.json").write_text(
        json.dumps({"files": {f"{s3}/../../../x": [1, 1, ""]}, "samples": [], "tokenizer": ""})
    )
    with pytest.raises(DataError, match="without '..'"):
        DataRecord.load(tmp_path / "data.json")
    client.put_object(Bucket="runs", Key="hostile/fine/x", Body=b"")
    with pytest.raises(StoreError, match="hostile/fine.* cannot be read"):  # a file that is a folder too
        RunFolder.open(Path(f"{s3}/hostile"))


def test_a_password_in_a_url_is_refused_and_not_repeated(cache: Path) -> None:
    for url in ("sftp://user:hidden@host/run", "s3://key:hidden@bucket/run"):
        with pytest.raises(JobError, match="has a password") as error:
            RunFolder.create(job_of(url))
        assert "hidden" not in str(error.value) and not cache.exists()


# Copies, without training


def save(folder: Path, step: int, content: bytes = b"shard", name: str = "") -> Path:
    path = folder / "checkpoints" / (name or f"step-{step:08d}")
    path.mkdir(parents=True)
    files = {"__0_0.distcp": content * step, "tensors.json": b"{}"}
    for file, data in files.items():
        (path / file).write_bytes(data)
    digests = {file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for file, data in files.items()}
    write_manifest(path, {"step": step, "state": {"step": step}, "files": digests})
    return path


class Launcher:
    """What a launcher does with the store, on a machine with this cache; the copy is made when asked for."""

    def __init__(self, url: str, cache: Path, patch: pytest.MonkeyPatch, keep: int = 2):
        patch.setenv("SHARDWISE_CACHE", str(cache))
        self.said: list[str] = []
        self.events: list[str] = []
        self.is_new = not RunFolder.exists(url)
        self.folder = RunFolder.create(job_of(url)).path if self.is_new else local_folder(url)
        self.store = RunStore(self.folder)
        self.lost = 0
        self.uploader = RunUploader(self.store, lambda kind, text: self.events.append(kind), keep)

    def lose(self) -> None:
        self.lost += 1

    def __enter__(self) -> Launcher:
        with ExitStack() as claim:
            claim.enter_context(own_run(self.folder, self.said.append))
            claim.enter_context(self.store.claimed(self.said.append, self.lose))
            if not self.is_new:
                self.store.restore(self.said.append)
            self.claim = claim.pop_all()
        self.uploader._stored = self.store.complete().keys() - self.store.damaged
        return self

    def __exit__(self, *error: Any) -> None:
        self.claim.close()

    def copy(self) -> bool:
        return self.uploader._try(at_once=True)

    @property
    def local(self) -> list[int]:
        return [step for step, _ in list_checkpoints(self.store.checkpoints)]

    @property
    def stored(self) -> list[str]:
        return list(self.store.complete())


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, cache: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store/run"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def test_a_run_moves_from_machine_to_machine(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Launcher(place, tmp_path / "a", monkeypatch) as one:
        for step in (1, 2, 3):
            save(one.folder, step)
            (one.folder / "metrics.jsonl").open("a").write(f'{{"step": {step}}}\n')
            if step == 3:  # retention
                shutil.rmtree(one.store.checkpoints / "step-00000001")
            assert one.copy()
        assert one.stored == ["step-00000003", "step-00000002"]
    with pytest.raises(JobError, match="already has a run"):
        RunFolder.create(job_of(place))
    with Launcher(place, tmp_path / "b", monkeypatch) as two:
        assert two.local == [3] and len(list(RunFolder(two.folder).metrics())) == 3
        save(two.folder, 4)
        assert two.copy() and two.stored == ["step-00000004", "step-00000003"]
    save(one.folder, 5)  # of a branch that nobody went on with
    (one.folder / "skips.json").write_text("[[1, 1]]")
    with Launcher(place, tmp_path / "a", monkeypatch) as three:
        assert three.local == [4] and not (three.folder / "skips.json").exists()
        save(three.folder, 5, b"other")
    with Launcher(place, tmp_path / "a", monkeypatch) as four:  # it was the last: what it has not copied counts
        assert four.local == [5, 4] and four.copy() and four.stored[0] == "step-00000005"
    with Launcher(place, tmp_path / "c", monkeypatch) as five:
        assert (five.store.checkpoints / "step-00000005" / "__0_0.distcp").read_bytes() == b"other" * 5


def test_what_a_run_has_gone_back_behind_leaves_the_store(url: str, cache: Path, monkeypatch: Any) -> None:
    with Launcher(url, cache, monkeypatch) as one:
        for step in (1, 2):
            save(one.folder, step)
        assert one.copy() and one.stored == ["step-00000002", "step-00000001"]
        shutil.rmtree(one.store.checkpoints / "step-00000002")
        assert one.copy() and len(one.stored) == 2  # somebody cleans up here: the store keeps it
        one.store.undone_mark("step-00000002").touch()
        assert one.copy() and one.stored == ["step-00000001"]
        save(one.folder, 2, b"other")  # the same name, another content
        assert one.copy() and one.stored[0] == "step-00000002"
        content = one.store.remote.read("checkpoints/step-00000002/__0_0.distcp")
        assert content == b"other" * 2


def test_shards_of_other_nodes_in_the_folder_change_nothing(url: str, cache: Path, monkeypatch: Any) -> None:
    with Launcher(url, cache, monkeypatch) as one:
        path = save(one.folder, 1)
        assert one.copy() and one.stored
        monkeypatch.setattr(ObjectStore, "delete", fail)
        (path / "__1_0.distcp").write_bytes(b"of another node")  # a load has completed the folder
        assert one.copy() and one.copy() and one.stored == ["step-00000001"]


def test_the_newest_goes_first_and_retention_does_not_stop_it(url: str, cache: Path, monkeypatch: Any) -> None:
    with Launcher(url, cache, monkeypatch, keep=1) as one:
        save(one.folder, 1)
        put, order = ObjectStore.put, list[str]()

        def slow(self: ObjectStore, source: Any, name: str) -> None:
            if name.startswith("checkpoints"):
                order.append(name.split("/")[1])
                if len(set(order)) == 1 and len(order) == 1:  # meanwhile two more are saved, and one is kept
                    save(one.folder, 2)
                    save(one.folder, 3)
                    for step in (1, 2):
                        shutil.rmtree(one.store.checkpoints / f"step-{step:08d}")
            put(self, source, name)

        monkeypatch.setattr(ObjectStore, "put", slow)
        assert one.copy() and one.stored == ["step-00000003"]
        assert list(dict.fromkeys(order)) == ["step-00000001", "step-00000003"]


def test_a_store_that_fails_is_tried_again(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Launcher(url, cache, monkeypatch) as one:
        save(one.folder, 1)
        write = ObjectStore._write
        monkeypatch.setattr(ObjectStore, "_write", fail)
        assert not one.copy() and not one.copy() and one.events == ["store_failed"] and one.stored == []
        monkeypatch.setattr(run_uploader, "POLL_SECONDS", 0.01)
        one.uploader._thread.start()
        with pytest.raises(RunError, match=f"the run is in {one.folder}, but not all of it is in {url}: out of order"):
            one.uploader.finish(patience=0.0)
        monkeypatch.setattr(ObjectStore, "_write", write)
        assert one.copy() and one.events == ["store_failed", "store_recovered"] and one.stored == ["step-00000001"]


class Forwarder:
    """Stands between a client and a server, so that the server can be unreachable for a while."""

    def __init__(self, port: int):
        self.target = port
        with socket.create_server(("127.0.0.1", 0)) as door:
            self.port = door.getsockname()[1]
        self.connections: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        self.door = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.door,), daemon=True).start()

    def close(self) -> None:
        self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()
        for one in self.connections:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, server = door.accept()[0], socket.create_connection(("127.0.0.1", self.target))
                self.connections += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def test_a_server_goes_down_and_comes_back(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarder = Forwarder(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{forwarder.port}")
    with Launcher(f"{s3}/{tmp_path.name}", tmp_path / "a", monkeypatch) as one:
        save(one.folder, 1)
        assert one.copy()
        forwarder.close()
        save(one.folder, 2)
        assert not one.copy() and one.events == ["store_failed"]
        forwarder.open()
        assert one.copy() and one.events == ["store_failed", "store_recovered"]
        assert one.stored == ["step-00000002", "step-00000001"]


def fail(*arguments: Any) -> None:
    raise StoreError("out of order.")


def test_one_launcher_writes(url: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Launcher(url, tmp_path / "a", monkeypatch) as one:
        with (
            pytest.raises(JobError, match=f"is being trained by process {os.getpid()} on"),
            Launcher(url, tmp_path / "b", monkeypatch),
        ):
            pass
        # One on another machine, as far as can be seen, that is silent for long.
        monkeypatch.setattr("shardwise.workers.run_owner._machine", lambda: "elsewhere")
        monkeypatch.setattr(run_store, "STALE_SECONDS", 1.0)
        with Launcher(url, tmp_path / "b", monkeypatch) as two:
            assert "waiting 1 s for a sign of life" in two.said[0]
            save(one.folder, 1)
            assert not one.store.is_writer() and one.copy() and not one.stored and one.lost == 1
            monkeypatch.setattr(run_uploader, "POLL_SECONDS", 0.01)
            one.uploader._thread.start()
            with pytest.raises(RunError, match="has been taken over by process"):
                one.uploader.finish()
            one.store.taken_over_by = ""
    writer = json.loads((tmp_path / "store" / "run" / "writer.json").read_text())
    assert writer["folder"] == two.store.id and writer["ended"]


def test_a_launcher_that_lives_elsewhere_is_noticed(url: str, tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_store, "BEAT_SECONDS", 0.1)
    with Launcher(url, tmp_path / "a", monkeypatch):
        monkeypatch.setattr("shardwise.workers.run_owner._machine", lambda: "elsewhere")
        with pytest.raises(JobError, match="is being trained by"), Launcher(url, tmp_path / "b", monkeypatch):
            pass


def test_only_a_complete_checkpoint_counts(url: str, tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    with Launcher(url, tmp_path / "a", monkeypatch, keep=4) as one:
        for step in (1, 2, 3, 4):
            save(one.folder, step)
        assert one.copy()
    run = tmp_path / "store" / "run"
    stored = run / "checkpoints"
    (stored / "step-00000002" / "__0_0.distcp").write_bytes(b"SHARD" * 2)  # has changed
    (stored / "step-00000003" / "__0_0.distcp").write_bytes(b"short")
    (stored / "step-00000004" / "manifest.json").unlink()

    def refuse(name: str, why: str) -> None:
        before = ObjectStore(url).list()
        with pytest.raises(CheckpointError, match=why) as error, Launcher(url, tmp_path / "b", monkeypatch, keep=4):
            pass
        assert f"{url}/checkpoints/{name}" in str(error.value) and f"{url}/writer.json" in str(error.value)
        assert ObjectStore(url).list().keys() == before.keys() | {"writer.json"}
        shutil.rmtree(stored / name)  # the way around, as the sentence says
        (run / "writer.json").unlink()

    refuse("step-00000004", "writer.json names it as the last one saved, but it has no manifest.json")
    refuse("step-00000003", "the store has no __0_0.distcp of 15 bytes")
    (stored / "step-00000005").mkdir()
    (stored / "step-00000005" / "__0_0.distcp").write_bytes(b"a launcher died before the manifest was written")
    with Launcher(url, tmp_path / "b", monkeypatch, keep=2) as two:
        assert two.local == [1] and "step-00000002" in two.said[0] and "__0_0.distcp has changed" in two.said[0]
        names = lambda: sorted(path.name[-1] for path in stored.iterdir())  # noqa: E731
        assert two.copy() and names() == ["1", "2", "5"]
        save(two.folder, 2)  # again: what the store has of it is damaged
        assert two.copy() and names() == ["1", "2", "5"]
        assert (stored / "step-00000002" / "__0_0.distcp").read_bytes() == b"shard" * 2
        for step in (6, 7):
            save(two.folder, step)
            shutil.rmtree(two.store.checkpoints / f"step-{[1, 2][step - 6]:08d}")  # retention
            assert two.copy()
        assert names() == ["6", "7"]
    shutil.rmtree(stored)
    with (
        pytest.raises(CheckpointError, match="writer.json names it as the last one saved"),
        Launcher(url, tmp_path / "c", monkeypatch),
    ):
        pass


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "..", "a/b", "", "manifest.json/../x"])
def test_a_manifest_names_no_file_elsewhere(url: str, tmp_path: Path, cache: Path, name: str, monkeypatch: Any) -> None:
    with Launcher(url, tmp_path / "a", monkeypatch) as one:
        save(one.folder, 1)
        assert one.copy()
    path = tmp_path / "store" / "run" / "checkpoints" / "step-00000002"
    path.mkdir()
    write_manifest(path, {"step": 2, "files": {name: {"bytes": 1, "sha256": "0" * 64}}})
    with pytest.raises(DamagedCheckpoint, match="which is no file of a checkpoint"):
        parse_manifest((path / "manifest.json").read_bytes())
    with (
        pytest.raises(CheckpointError, match="which is no file of a checkpoint. It is the newest"),
        Launcher(url, tmp_path / "b", monkeypatch),
    ):
        pass
    shutil.rmtree(path)
    with Launcher(url, tmp_path / "b", monkeypatch) as two:
        assert two.local == [1] and two.stored == ["step-00000001"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"folder": 1}', '{"folder": "x", "ended": false, "saved": 3}'])
def test_a_damaged_writer_is_no_hindrance(url: str, cache: Path, content: str, monkeypatch: Any) -> None:
    with Launcher(url, cache, monkeypatch):
        pass
    ObjectStore(url).write("writer.json", content.encode())
    with Launcher(url, cache.parent / "b", monkeypatch) as two:
        assert two.store.is_writer()


# Data


def test_data_of_a_url_is_read_as_a_local_copy(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(place)
    for name, text in (("a.txt", "one two three " * 400), ("deep/b.txt", "four five six " * 400), ("c.bin", "no")):
        store.write(name, text.encode())
    for path, count in ((place, 3), (f"{place}/a.txt", 1), (f"{place}/*.txt", 1), (f"{place}/**/*.txt", 2)):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        copy = local_copy(path)
        found = [file for file in (tmp_path / "cache" / "data").rglob("*") if file.is_file()]
        assert len(found) == count and original_name(copy) == path
    with pytest.raises(DataError, match="no such file or folder"):
        local_copy(f"{place}/none")
    values = job_of("").model_dump(exclude_none=True)
    values["model"] |= {"vocab": 256}
    job = make_job({**values, "data": {"source": "text", "path": f"{place}/deep"}})
    record = DataRecord()
    training = make_sources(job, record=record)[0]
    record.save(tmp_path / "data.json")
    assert list(json.loads((tmp_path / "data.json").read_text())["files"]) == [f"{place}/deep/b.txt"]
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "other"))  # another machine
    again = DataRecord.load(tmp_path / "data.json")
    again.check(tmp_path)
    assert (make_sources(job, record=again)[0][0] == training[0]).all()
    store.write("deep/b.txt", b"seven eight nine " * 400)
    with pytest.raises((DataError, ShardwiseError), match="has changed"):
        local_copy(f"{place}/deep")
        again.check(tmp_path)


# Runs


@pytest.mark.timeout(600)
def test_killed_and_resumed_on_another_machine(place: str, tmp_path: Path) -> None:
    plain = RunFolder(tmp_path / "plain")
    for name, folder in (("run", place), ("plain", str(plain.path))):
        (tmp_path / f"{name}.toml").write_text(job_of(folder).to_toml())
    undisturbed = start(tmp_path / "p", str(tmp_path / "plain.toml"))
    kills = 0
    for number in range(2):
        launcher = start(tmp_path / f"machine{number}", str(tmp_path / "run.toml"), "--continue")
        manifests = lambda: [n for n in ObjectStore(place).list() if n.endswith("manifest.json")]  # noqa: E731
        before = set(manifests())
        try:
            wait(lambda: set(manifests()) - before, launcher)
        except AssertionError:
            assert launcher.poll() == 0  # it was faster than we looked
            break
        end(launcher)
        kills += 1
        shutil.rmtree(tmp_path / f"machine{number}")
    launcher = start(tmp_path / "last", "--resume", place)
    assert launcher.wait(150) == 0 and undisturbed.wait(150) == 0
    run = RunFolder.open(Path(place))
    assert kills and curve(run) == curve(plain) and len(curve(run)) == STEPS
    assert (run.path / "report.html").exists() and kinds(run)[-1] == "finished"
    local_copy(place)
    contents = [path.read_bytes() for path in (run.path.parents[1]).rglob("*") if path.is_file()]
    contents += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert contents and not [text for text in contents if KEY.encode() in text or KEY_ID.encode() in text]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("snapshots", [0, 2])
def test_two_nodes_without_a_shared_folder(url: str, tmp_path: Path, snapshots: int) -> None:
    """Node 1 is lost with its disk and comes back; then node 0 is, and a new one goes on."""
    plain, layout, steps = RunFolder(tmp_path / "plain"), "replicate=2 tensor=2", 3 * STEPS  # not over before the loss
    for name, folder in (("run", url), ("plain", str(plain.path))):
        text = job_of(folder, layout, steps, snapshot_every=snapshots, every=8).to_toml()
        (tmp_path / f"{name}.toml").write_text(text)
    undisturbed = start(tmp_path / "p", str(tmp_path / "plain.toml"))
    address = ["--address", f"127.0.0.1:{PORT}"]
    stored = RunFolder(tmp_path / "store" / "run")

    def node(index: int, name: str, *words: str) -> subprocess.Popen[bytes]:
        return start(tmp_path / name, *words, "--node", f"{index}/2", *address)

    member, lead = node(1, "member0"), node(0, "lead0", str(tmp_path / "run.toml"))
    try:
        (local,) = wait_for_folder(tmp_path / "lead0", lead)
        wait(lambda: list(stored.path.glob("checkpoints/*/manifest.json")), lead)
        if snapshots:  # how often they are taken depends on the time that they take
            wait(lambda: newest_in_memory(local.path, 4) > list_checkpoints(local.path / "checkpoints")[0][0], lead)
        end(member)
        shutil.rmtree(tmp_path / "member0")
        wait(lambda: "node_lost" in kinds(local), lead)
        assert next(event for event in local.events() if event["event"] == "node_lost")["ranks"] == [2, 3]
        member = node(1, "member1")
        wait(lambda: "resumed" in kinds(local), lead)
        if snapshots:  # a rank of node 1 dies: node 0 has its heartbeat, and names it
            wait(lambda: read_heartbeats(local.path).get(3, {}).get("phase") == "computing", lead)
            os.kill(read_heartbeats(local.path)[3]["pid"], signal.SIGKILL)
            wait(lambda: "killed" in kinds(local), lead)
            assert next(e for e in local.events() if e["event"] == "killed")["ranks"] == [3]
            assert lead.wait(150) == 0 and member.wait(60) == 0
        else:
            seen = len(curve(local))
            wait(lambda: len(curve(local)) > seen or kinds(local)[-1] == "finished", lead)
            end(lead)
            shutil.rmtree(tmp_path / "lead0")
            lead = node(0, "lead1", "--resume", url)
            assert lead.wait(150) == 0 and member.wait(60) == 0
        assert undisturbed.wait(150) == 0
    finally:
        for process in (member, lead, undisturbed):
            if process.poll() is None:
                end(process)
    run = RunFolder.open(Path(url))
    assert curve(run) == curve(plain) and len(curve(run)) == steps
    sources = [event["source"] for event in run.events() if event["event"] == "resumed"]
    assert sources[0] == ("memory" if snapshots else "disk")
    assert not list((tmp_path / "member1").glob("runs/*/metrics.jsonl"))  # it shared nothing


def newest_in_memory(run: Path, ranks: int) -> int:
    """The step of the newest snapshot that node 0 holds of every rank."""
    steps: list[set[int]] = [set() for _ in range(ranks)]
    for path in Path("/dev/shm").glob(f"shardwise-{snapshot_key(run, 0)}-*/rank-*.json"):
        with suppress(OSError, ValueError):  # it is overwritten just now
            steps[int(path.name[len("rank-") :].partition(".")[0])].add(json.loads(path.read_text())["step"])
    return max(set.intersection(*steps), default=0)


def wait_for_folder(cache: Path, process: subprocess.Popen[bytes]) -> list[RunFolder]:
    wait(lambda: list(cache.glob("runs/*/metrics.jsonl")), process)
    return [RunFolder(path.parent) for path in cache.glob("runs/*/metrics.jsonl")]
