"""A run stays one run: it has one owner, and resumes with its own data, tokenizer, job and history, or says why not."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import BaseModel

from shardwise.cli import main
from shardwise.data.input_files import DataRecord
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream
from shardwise.data.tokenizer import train_bpe
from shardwise.errors import CheckpointError, DataError, JobError, RunError
from shardwise.files import create_text, write_text
from shardwise.job import Job, load_job, make_job
from shardwise.launch.start import start_training
from shardwise.layout import Layout
from shardwise.models.registry import families
from shardwise.parallel.prepare import prepare
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder, check_none_lost
from shardwise.watch.report_page import write_report
from shardwise.workers import run_owner
from shardwise.workers.diagnosis import read_heartbeats
from shardwise.workers.run_owner import own_run

JOB_TOML = """
precision = "float64"
layout = "shard=2"
[model]
layers = 2
width = 16
heads = 2
vocab = 61
sequence = 8
[data]
source = "synthetic"
[batch]
samples = 4
[checkpoint]
every = 5
[run]
folder = "run"
device = "cpu"
"""


# The owner


def owner_of(run: Path, **changes: Any) -> dict[str, Any]:
    """Leaves the file of an owner that has ended."""
    with own_run(run, print):
        owner = json.loads((run / "owner.json").read_text())
    owner |= changes
    (run / "owner.json").write_text(json.dumps(owner))
    return owner


def test_a_run_has_one_owner_until_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = rf"being trained by process {os.getpid()} on \S+ since 20\d\d-.* UTC; resume when it has ended"
    with own_run(tmp_path, print), pytest.raises(JobError, match=sentence):
        own_run(tmp_path, print).__enter__()
    assert not list(tmp_path.iterdir())
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    child.start()
    assert child.pid is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but nobody has asked for its exit code
    for ended in (
        [child.pid, run_owner._began(os.getpid())],
        [os.getpid(), 17],
    ):  # the latter id is another process now
        owner_of(tmp_path, processes=[ended])
        with own_run(tmp_path, print):
            pass
    child.join()
    monkeypatch.setattr(run_owner, "EXIT_SECONDS", 0.2)
    owner_of(tmp_path, pid=0, processes=[[0, 17], [os.getpid(), run_owner._began(os.getpid())]])  # its workers live
    with pytest.raises(JobError, match="being trained by process 0 on"):
        own_run(tmp_path, print).__enter__()


def test_a_damaged_owner_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_owner, "DAMAGED_SECONDS", 0.1)
    damages = (b"", b"\x00\xff", b"[]", b"[" * 9999, b'{"processes": "ab"}', b'{"processes": [[1, 1e999]]}')

    def take_over(number: int) -> None:
        run = tmp_path / str(number)
        run.mkdir()
        (run / "owner.json").write_bytes(damages[number])
        with own_run(run, print):
            assert json.loads((run / "owner.json").read_text())["pid"] == os.getpid()
        assert not list(run.iterdir())

    with ThreadPoolExecutor(len(damages)) as pool:  # each waits for a while, in case the file is half written
        assert len(list(pool.map(take_over, range(len(damages))))) == len(damages)


def test_an_owner_that_is_being_killed_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a process takes a while to die; the resume that follows `kill -9` must not be refused."""
    name, _, rest = Path("/proc/self/stat").read_text().rpartition(") ")
    fields = ["1", f"{name.partition(' ')[2]})".replace(" ", "-"), *rest.split()]
    assert run_owner._began(os.getpid()) == int(fields[21])
    for index, value in ((2, "Z"), (8, str(int(fields[8]) | 4)), (30, "256")):  # state, PF_EXITING, pending SIGKILL
        ending = [*fields[:index], value, *fields[index + 1 :]]
        monkeypatch.setattr(Path, "read_text", lambda _, ending=ending: " ".join(ending))
        assert run_owner._began(os.getpid()) == -1


def test_an_owner_elsewhere_is_alive_while_its_file_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_owner, "STALE_SECONDS", 0.6)
    path, ended, said = tmp_path / "owner.json", threading.Event(), list[str]()
    token = owner_of(tmp_path, machine="another", host="node7")["token"]
    monkeypatch.setattr(run_owner, "BEAT_SECONDS", 0.1)
    beat = threading.Thread(target=run_owner._keep_in_thread, args=(path, token, ended))
    beat.start()
    with pytest.raises(JobError, match="on node7 since"):
        own_run(tmp_path, said.append).__enter__()
    ended.set()
    beat.join()
    with own_run(tmp_path, said.append):
        assert not run_owner.keep(path, token), "the old owner does not notice"
    assert "on node7 since" in said[0] and "sign of life" in said[0]
    with pytest.raises(RunError, match="taken over by process 7 on node7"), own_run(tmp_path, print):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"token": "another", "pid": 7, "host": "node7"}))


def _contend(run: str, start: Any, won: Any, ended: Any) -> None:
    start.wait()
    try:
        with own_run(Path(run), print):
            won.put(True)
            ended.wait()
    except JobError:
        won.put(False)


def test_of_many_that_find_the_owner_dead_one_takes_over(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    owner_of(tmp_path, processes=[[2**22, 1]])
    start, won, ended = context.Event(), context.Queue(), context.Event()
    contenders = [context.Process(target=_contend, args=(str(tmp_path), start, won, ended)) for _ in range(12)]
    for contender in contenders:
        contender.start()
    start.set()
    assert sum(won.get(timeout=30) for _ in contenders) == 1
    ended.set()
    for contender in contenders:
        contender.join()
    assert not list(tmp_path.iterdir())


def _train_on_and_on() -> None:
    sys.argv = ["shardwise", "train", "job.toml", "--set", "steps=1000000"]
    main()


def test_a_launcher_owns_its_run_and_its_workers_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text(JOB_TOML)
    run = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    launcher = multiprocessing.get_context("fork").Process(target=_train_on_and_on, daemon=True)
    launcher.start()
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 3:
        assert launcher.is_alive()
        time.sleep(0.05)
    with pytest.raises(JobError, match=f"run is being trained by process {launcher.pid} on"):
        start_training(None, ["steps=20"], run, print)
    workers = psutil.Process(launcher.pid).children(recursive=True)
    for beat in read_heartbeats(run).values():
        os.kill(beat["pid"], signal.SIGSTOP)  # busy with something that no other signal ends
    launcher.kill()
    launcher.join()
    with own_run(run, print):  # waits for the workers
        assert [run_owner._began(worker.pid) for worker in workers] == [-1, -1, -1]


# The folder and its job.toml: there whole, or not at all


def fill_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def kill_myself(descriptor: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("cut", [fill_disk, kill_myself])
def test_a_creation_that_is_cut_leaves_no_run(
    cut: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job({"run": {"folder": str(tmp_path / "run")}})
    pid = os.fork()
    if not pid:
        monkeypatch.setattr(os, "fsync", cut)
        with suppress(JobError):
            RunFolder.create(job)
        os._exit(0)
    os.waitpid(pid, 0)
    assert not RunFolder.exists(str(tmp_path / "run"))
    assert RunFolder.create(job).job() == job


def create(arguments: tuple[Path, str]) -> bool:
    try:
        create_text(*arguments)
    except FileExistsError:
        return False
    return True


def test_of_several_that_create_a_file_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    texts = [f"{number}\n" * 9999 for number in range(16)]
    with multiprocessing.get_context("fork").Pool(8) as pool:
        created = pool.map(create, [(path, text) for text in texts], chunksize=1)
    assert sum(created) == 1
    assert path.read_text() == texts[created.index(True)]

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # a file system without hard links
    assert not create((path, "other"))
    assert create((tmp_path / "new", "text"))
    assert (tmp_path / "new").read_text() == "text"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "new"]


READERS = (
    "train --resume run", "train job.toml --continue", "train job.toml", "report run", "doctor run", "trace run",
    "train job.toml --set model.weights=run --set run.folder=other", "compare run run", "sample run",
    "export run out", "merge run out", "eval run --data job.toml", "laws fit run",
)  # fmt: skip
CUT_SHORT = "job.toml is empty, but a run begins with its whole job: .*; remove run/job.toml and start the run again"
NO_JOBS = {
    "": CUT_SHORT,
    "# a comment": CUT_SHORT,
    "steps = 3\nlayout = 'auto'\n[model]\nwidth = 8\n": "job.toml is not the job of a run: it lacks seed, .*model.name",
    "[tool.other]\nname = 'x'\n": "job.toml is not the job of a run: it lacks seed, layout, .* every key",
}


@pytest.mark.parametrize("command", READERS)
def test_an_empty_or_foreign_job_is_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB_TOML.replace("shard=2", "replicate=1"))
    Path("run").mkdir()
    monkeypatch.setattr("shardwise.launch.start.ForkServer", NoForkServer)
    for text, sentence in NO_JOBS.items():
        Path("run/job.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["shardwise", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert re.fullmatch(f"shardwise: .*{sentence}.*\n", said), said
        assert [path.name for path in Path("run").iterdir()] == ["job.toml"]


def test_an_empty_job_of_a_run_with_a_history_is_to_be_restored(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(JobError, match="job.toml is empty, but a run's has the whole job; restore it"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("caf\udce9", "run.folder: 'caf\\udce9' is not valid UTF-8, in which a run keeps its job; rename"),
     ("two\nlines", "folder = 'two\\nlines' has a line break or another character that cannot be printed"),
     ("\0", "run.folder: it contains a NUL character"), ("l" * 300, "ile name too long")],
)  # fmt: skip
def test_a_name_that_cannot_be_kept_is_refused_before_there_is_a_folder(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB_TOML)
    for resume_if_exists in (False, True):
        with pytest.raises(JobError) as refused:
            job = load_job(Path("job.toml"), [f"run.folder={name}"])
            if resume_if_exists:
                RunFolder.exists(job.run.folder)
            RunFolder.create(job)
        assert sentence in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_a_run_whose_folder_was_given_such_a_name_is_read(tmp_path: Path) -> None:
    run = RunFolder.create(make_job({"run": {"folder": str(tmp_path / "run")}}))
    name = tmp_path / "caf\udce9\nau lait"
    run.path.rename(name)
    assert "caf\\udce9" in write_report(name).read_text()
    with pytest.raises(JobError, match="cannot be written: .* is not valid UTF-8; rename the file or folder"):
        write_text(tmp_path / "text", f"in {name}")
    assert not (tmp_path / "text").exists()


# The same data, tokenizer, job and history: the whole road in this process, without workers


class NoForkServer:
    def __init__(self, *_: object) -> None:
        self.pid = os.getpid()

    def send(self, message: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Starts or resumes the run in `run` and returns what is said."""

    def launch(folder: RunFolder, layout: Layout, resume: bool, **_: object) -> None:
        TrainingLoop(prepare(folder.job(), layout), folder, torch.device("cpu"), resume).run()

    monkeypatch.setattr("shardwise.launch.start.ForkServer", NoForkServer)
    monkeypatch.setattr("shardwise.launch.start.launch", launch)
    monkeypatch.setattr("shardwise.launch.start.print_end_of_run", lambda *_: None)
    monkeypatch.setattr("shardwise.launch.start.summarize", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    job = JOB_TOML.replace('layout = "shard=2"', 'layout = "pipeline=1"').replace("every = 5", "every = 2")
    (tmp_path / "job.toml").write_text(job + '[optimizer]\nschedule = "constant"\nwarmup = 0\n')

    def start(*settings: str, resume: bool = False, **options: bool) -> list[str]:
        said: list[str] = []
        job_file = None if resume else Path("job.toml")
        start_training(job_file, list(settings), Path("run") if resume else None, said.append, **options)
        return said

    return start


def losses(run: str = "run") -> list[float]:
    return [row["loss"] for row in RunFolder.open(Path(run)).metrics()]


def events(kind: str) -> list[str]:
    return [event["message"] for event in RunFolder.open(Path("run")).events() if event["event"] == kind]


def change_in_place(path: Path) -> None:
    """Changes the content; size and time stay."""
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"7", b"8", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


WORDS = "".join(f"the {n} words of a {n * n % 91} corpus, " for n in range(400))
CLICKS = "".join(
    "\t".join([str(n % 2), *map(str, range(n, n + 13)), *(f"{n * k:x}" for k in range(26))]) + "\n" for n in range(90)
)
SOURCES = {
    "text": (WORDS, "more text " * 900),
    "jsonl": ("".join(json.dumps({"text": WORDS[n:][:99]}) + "\n" for n in range(0, 900, 9)), '{"text": "abc"}\n' * 9),
    "tokens": (WORDS, "abcd" * 500),
    "criteo": (CLICKS, CLICKS),
}  # fmt: skip


def samples_of(source: str, record: DataRecord, cache: str) -> list[list[float]]:
    model = {"name": "dlrm", "rows": 64, "width": 4} if source == "criteo" else {"sequence": 8, "vocab": 2**16}
    path = {"text": "data", "tokens": "data/one.bin:uint16"}.get(source, "data/one")
    job = make_job({"model": model, "data": {"source": source, "path": path}})
    training, held_out, _ = make_sources(job, Path(cache), record=record)
    stream = SampleStream(training, 0)
    return [stream.read(np.arange(len(training))).tokens.tolist(), len(held_out)]  # type: ignore[list-item]


@pytest.mark.parametrize("source", SOURCES)
def test_grown_data_is_read_as_far_as_it_went(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    file = Path("data/one.bin" if source == "tokens" else "data/one")
    before, more = SOURCES[source]
    file.write_text(before)
    first = DataRecord()
    whole = samples_of(source, first, "cache")
    first.save(Path("data.json"))
    with file.open("a") as grown:
        grown.write(more)
    Path("data/two").write_text("a new file " * 99)
    for cache in ("cache", "empty"):  # also when the old tokens are gone
        record = DataRecord.load(Path("data.json"))
        record.check(Path("run"))
        assert samples_of(source, record, cache) == whole
    fresh = samples_of(source, DataRecord(), "cache")
    assert fresh != whole
    change_in_place(file)
    assert samples_of(source, DataRecord(), "cache") != fresh, "a stale cache"
    with pytest.raises(DataError, match=rf"content of {file} has changed. Restore it, or .*--accept-data-change"):
        record.check(Path("run"))
    file.write_text(before[:-20])
    with pytest.raises(DataError, match=rf"{file} has {len(before) - 20} bytes instead of {len(before)}"):
        record.check(Path("run"))
    file.unlink()
    with pytest.raises(DataError, match=f"{file} is missing"):
        record.check(Path("run"))


def test_a_large_file_is_sampled_and_its_time_counts(tmp_path: Path) -> None:
    path, content = tmp_path / "large", bytearray(os.urandom(1 << 20))
    path.write_bytes(content)
    record = DataRecord()
    record.take([path])
    record.is_new = False
    for offset in (0, len(content) - 1):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        os.utime(path, ns=(0, record.files[str(path)].mtime_ns))
        assert ["content" in change for change in record.changes()] == [True]
    path.write_bytes(content[: 1 << 19] + b"somewhere between" + content[(1 << 19) + 17 :])
    assert ["was written again" in change for change in record.changes()] == [True]
    assert not record.changes(compare_times=False)


def test_a_resume_keeps_the_tokenizer_and_the_data_of_the_run(start: Callable[..., list[str]], tmp_path: Path) -> None:
    data = ["data.source=text", "data.path=book.txt", "model.vocab=320"]
    book, other = tmp_path / "book.txt", train_bpe(["quite another text " * 50], 300)
    for name, tokenizer in (("trained", "bpe:300"), ("given", "given.json")):
        book.write_text(WORDS)
        train_bpe([WORDS], 300).save(tmp_path / "given.json")
        settings = [*data, f"data.tokenizer={tokenizer}"]
        start(*settings, "steps=6", f"run.folder={name}")
        start(*settings, "steps=3")
        own = Path("run/tokenizer.json").read_bytes()
        with book.open("a") as grown:
            grown.write("quite another text " * 500)
        other.save(tmp_path / "given.json")
        shutil.rmtree(tmp_path / "cache")
        start("steps=6", resume=True)
        assert Path("run/tokenizer.json").read_bytes() == own
        assert losses() == losses(name) and len(losses()) == 6
        Path("run/tokenizer.json").write_text(Path("run/tokenizer.json").read_text() + " ")
        with pytest.raises(DataError, match="tokenizer.json is missing or has changed since the run began; restore it"):
            start("steps=7", resume=True)
        shutil.rmtree("run")


def test_changed_data_needs_consent_at_a_start_and_at_a_restart(start: Callable[..., list[str]]) -> None:
    Path("book.txt").write_text(WORDS)
    start("data.source=text", "data.path=book.txt", "model.vocab=256", "steps=4")
    change_in_place(Path("book.txt"))
    with pytest.raises(DataError, match="content of book.txt has changed"):
        start("steps=6", resume=True)
    run = RunFolder.open(Path("run"))
    with pytest.raises(DataError, match="content of book.txt has changed"):  # what a worker does after a fault
        TrainingLoop(prepare(run.job(), Layout()), run, torch.device("cpu"), True)
    assert len(losses()) == 4
    said = start("steps=6", resume=True, accept_data_change=True)
    assert len(losses()) == 6 and "the content of book.txt has changed" in events("data_changed")[0]
    assert f"data_changed: {events('data_changed')[0]}" in said
    start("steps=7", resume=True)  # the new data is that of the run now


def test_a_resume_does_not_end_before_it_begins(start: Callable[..., list[str]]) -> None:
    start("steps=6")
    before = {path: path.read_bytes() for path in Path("run").glob("*.*")}
    with pytest.raises(JobError, match="run is at step 6 already; set steps to 6 or more"):
        start("steps=3", resume=True)
    assert {path: path.read_bytes() for path in Path("run").glob("*.*")} == before


def test_history_is_never_shortened_without_a_copy(start: Callable[..., list[str]]) -> None:
    start("steps=5", "checkpoint.every=0")
    metrics = Path("run/metrics.jsonl")
    rows = metrics.read_text().splitlines(keepends=True)
    later = [row.replace('"step": 5', f'"step": {step}') for step, row in ((6, rows[4]), (7, rows[4]))]
    foreign = ['{"step": 999999, "mine": 1}\n', "not json\n", '{"step": "x"}\n', "[]\n"]
    metrics.write_text("".join([*rows[:2], *foreign, *rows[2:], *later]))
    start("steps=8", resume=True)
    found = metrics.read_text().splitlines(keepends=True)
    assert found[:8] == [*rows[:2], *foreign[1:], *rows[2:]] and len(found) == 11
    assert Path("run/metrics.discarded.jsonl").read_text() == "".join([foreign[0], *later])


def test_a_save_that_a_kill_cut_short_is_not_missed(start: Callable[..., list[str]]) -> None:
    start("steps=5", "checkpoint.every=0")
    run = RunFolder.open(Path("run"))
    kept = [event for event in run.events() if event["event"] == "started"]
    save, resumed = {"event": "checkpoint", "step": 4}, {"event": "resumed", "step": 0}
    rows = [*kept, save, resumed, save]  # killed twice while it saved
    Path("run/events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree("run/checkpoints")
    run.checkpoints.mkdir()
    check_none_lost(run)
    run.log_event("checkpoint", "saving step 5.", step=5)
    with pytest.raises(CheckpointError, match="saved step 4"):
        check_none_lost(run)


def test_lost_checkpoints_are_not_taken_for_a_new_run(start: Callable[..., list[str]]) -> None:
    start("steps=5")
    metrics = Path("run/metrics.jsonl").read_text()
    shutil.move("run/checkpoints", "away")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no checkpoint, although the run has saved step 5; restore it"):
            start("steps=6", resume=True)
        Path("run/checkpoints").mkdir(exist_ok=True)
    run = RunFolder.open(Path("run"))
    with pytest.raises(CheckpointError, match="has saved step 5"):  # what a worker does after a fault
        TrainingLoop(prepare(run.job(), Layout()), run, torch.device("cpu"), True).run()
    assert Path("run/metrics.jsonl").read_text() == metrics
    shutil.rmtree("run/checkpoints")
    shutil.move("away", "run/checkpoints")
    start("steps=6", resume=True)
    assert len(losses()) == 6


@pytest.mark.parametrize(
    ("key", "edit"),
    [("seed", ("seed = 0", "seed = 3")), ("optimizer.lr", ("lr = 0.0003", "lr = 0.1")),
     ("batch.samples", ("samples = 4\n", "samples = 8\n"))],
)  # fmt: skip
def test_an_edited_job_is_noticed(key: str, edit: tuple[str, str], start: Callable[..., list[str]]) -> None:
    start("steps=4")
    path = Path("run/job.toml")
    assert edit[0] in path.read_text()
    path.write_text(path.read_text().replace(*edit, 1))
    with pytest.raises(JobError, match=rf"not the job that saved step 4 of this run: it has {key} = \S+ instead of"):
        start("steps=6", resume=True)
    run = RunFolder.open(Path("run"))
    with pytest.raises(JobError, match="not the job that saved step 4"):  # what a worker does after a fault
        TrainingLoop(prepare(run.job(), Layout()), run, torch.device("cpu"), True).run()
    assert len(losses()) == 4


# Settings that are hardly meant


def test_suspicious_settings_are_warned_about_or_refused(start: Callable[..., list[str]]) -> None:
    Path("texts").mkdir()
    Path("texts/good.txt").write_text("good " * 7)
    Path("texts/bad.txt").write_bytes("schön ".encode("latin-1") * 40)
    settings = [
        "data.source=text", "data.path=texts", "model.vocab=256", "batch.samples=64", "steps=8", "optimizer.lr=0",
        "optimizer.warmup=90", 'optimizer.weight_decay_overrides={"no.such*"=0.0, "*"=0.1}', "validation.every=3",
        "data.validation_fraction=0",
    ]  # fmt: skip
    with pytest.raises(JobError, match="--strict: a batch has 64 samples, but the data has only 4") as refused:
        start(*settings, strict=True)
    assert not Path("run").exists()
    for _ in range(2):  # the second time, the tokens come from the cache
        said = start(*settings)
        words = ("64 samples", "about 128 times", "validation.every", "lr = 0 trains", "warmup = 90", "no.such*",
                 "texts/bad.txt: not UTF-8 text")  # fmt: skip
        assert all(word in message for word, message in zip(words, events("warning"), strict=True))
        assert all(f"warning: {message}" in said and message in str(refused.value) for message in events("warning"))
        shutil.rmtree("run")
    assert not [line for line in start("steps=2", strict=True) if "warning" in line]


def test_a_path_without_a_source_is_refused() -> None:
    with pytest.raises(JobError, match="data: path = 'book.txt' needs a source: text, jsonl"):
        make_job({"data": {"path": "book.txt"}})


def float_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from float_keys(field.annotation, f"{prefix}{name}.")
        elif field.annotation is float or "float]" in str(field.annotation):
            yield f"{prefix}{name}"


@pytest.mark.parametrize("family", ["", *families()])
def test_every_number_is_finite(family: str) -> None:
    keys = list(float_keys(families()[family].config, "model.") if family else float_keys(Job))
    assert family or len(keys) > 15
    for key in keys:
        for value in (math.inf, -math.inf, math.nan):
            *sections, leaf = key.split(".")
            values: dict[str, Any] = {
                leaf: [value, 0.5]
                if leaf == "betas"
                else {"a": value}
                if leaf in ("mix", "weight_decay_overrides")
                else value
            }
            values = {sections[0]: values} if sections else values
            if family:
                values["model"]["name"] = family
            with pytest.raises(JobError):
                make_job(values)
