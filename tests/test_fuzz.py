"""Bad input ends in a sentence: random jobs, layouts and command lines find no traceback and start no process.

`FUZZ_SEED=10000 pytest --all tests/test_fuzz.py` takes the next 10,000 damaged files.
"""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import traceback
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from shardwise.cli import main
from shardwise.cluster import CLUSTERS, write_cluster
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream
from shardwise.data.token_file import write_token_arrays
from shardwise.data.tokenizer import train_bpe
from shardwise.errors import UserError
from shardwise.job import Job, load_job, make_job
from shardwise.laws.fit import ScalingLaw, fit_as_dict, fit_scaling_law, read_csv
from shardwise.layout import RECOMPUTE, SCHEDULES, Layout
from shardwise.models.registry import BUILT_IN
from shardwise.parallel.prepare import prepare
from shardwise.train.local_machine import choose_plan, plan_record
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.workers import fork_server, node_channel, run_owner
from shardwise.workers.worker_pool import WorkerGroup, WorkerPool

junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(), st.text(max_size=8), st.just([]), st.just({})
)
small = st.integers(-1, 12)
DEGREES = ["pipeline", "replicate", "shard", "tensor", "virtual", "micro_batch", "zero"]
model_values = {
    "name": st.sampled_from(["gpt", "gpt2", "llama3-8b", "nope", 3, *BUILT_IN, "mixtral-8x7b", "t5-11b"]),
    "experts": small, "layers": small, "width": st.integers(-8, 64),
    "heads": small, "kv_heads": small, "head_dim": small, "ffn": st.integers(-1, 70), "vocab": st.integers(0, 130),
    "sequence": st.integers(0, 40), "positions": st.sampled_from(["learned", "rotary", "none"]),
    "norm": st.sampled_from(["layer", "rms", ""]), "activation": st.sampled_from(["gelu", "swiglu", 1]),
    "bias": junk, "tied": st.booleans(), "dropout": st.floats(-0.2, 1.2),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
}  # fmt: skip
layout_words = st.lists(
    st.one_of(
        st.builds("{}={}".format, st.sampled_from(DEGREES), small),
        st.builds("schedule={}".format, st.sampled_from([*SCHEDULES, "1f2b"])),
        st.builds("recompute={}".format, st.sampled_from([*RECOMPUTE, "0.5", "2", "x"])),
        st.builds("stages={}".format, st.sampled_from(["1,1", "2,2", "0,4", "-1,5", "a"])),
        st.text(max_size=6),
    ),
    max_size=5,
).map(" ".join)  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, object]:
    values: dict[str, object] = {}
    if draw(st.booleans()):
        values["layout"] = draw(st.one_of(layout_words, junk))
    values["model"] = draw(st.one_of(st.fixed_dictionaries({}, optional=model_values), junk))
    values["batch"] = draw(
        st.fixed_dictionaries({}, optional={"samples": st.integers(-1, 48), "tokens": st.one_of(junk, st.just("1K"))})
    )
    values["optimizer"] = draw(
        st.fixed_dictionaries({}, optional={"lr": junk, "betas": junk, "warmup": junk, "schedule": junk})
    )
    for key in ("seed", "steps", "tokens", "precision", "data", "checkpoint", "run", "validation", "nonsense"):
        if draw(st.integers(0, 6)) == 0:
            values[key] = draw(junk)
    return values


@given(jobs())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_job_is_taken_or_refused_in_words(values: dict[str, object]) -> None:
    try:
        job = make_job(values)
        prepare(job, choose_plan(job)[0].best.layout)
    except UserError as error:
        message = str(error)
        assert message and "Traceback" not in message and len(message) < 4000


@given(layout_words)
@settings(max_examples=300, deadline=None)
def test_any_layout_is_taken_or_refused_in_words(text: str) -> None:
    try:
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout
        prepare(Job(), layout)
    except UserError as error:
        assert str(error)


@given(st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_override_is_taken_or_refused_in_words(key: str, value: str) -> None:
    try:
        load_job(None, [f"{key}={value}"])
    except UserError as error:
        assert str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "missing.toml"], ["train", "bad.toml"], ["train", "--set", "model.layer=3"],
        ["train", "--set", "layout=tensor=3"], ["train", "--resume", "nowhere"], ["train", "--resum", "x"],
        ["verify", "--layout", "pipeline=99"], ["verify", "--layout", "nonsense"], ["verify", "--steps", "1"],
        ["sample", "nowhere"], ["data", "out.bin", "--set", "data.source=text", "--set", "data.path=nowhere"],
        ["train", "--set", "data.source=jsonl", "--set", "data.path=bad.jsonl"],
        ["train", "--set", "data.tokenizer=bpe:99999", "--set", "model.vocab=256"],
        ["train", "--set", "run.device=tpu"], ["train", "--set", "run.folder=/proc/nope"], ["frobnicate"],
        ["train", "bad.toml", "--resume", "x"],
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("steps = = 3")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = "".join(capfd.readouterr())
    assert end.value.code == 2, said
    assert "Traceback" not in said
    assert 0 < len(said.strip().splitlines()) <= 8, said
    assert not (tmp_path / "runs").exists(), "a run folder was left behind"


def test_a_mistake_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "train", "--set", "model.layer=3"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert "layers" in done.stderr and "Traceback" not in done.stderr


# Numbers


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --layout shard=1000000000", "at most 1,000,000"), ("plan --layout micro_batch=99999999999", "at most"),
        ("plan --layout micro_batch=99999999", "nearest valid"),
        ("verify --layout replicate=999 --set batch.samples=999", "GiB"),
        ("dryrun --layout shard=1000000", "65,536"),
        ("plan --set batch.samples=80000000 --layout 'pipeline=8 micro_batch=1'", "actions"),
        ("laws design --budget 1e300:1e305", "1e+32"), ("laws design --budget 1e18:1e19 --spread inf", "1000"),
        ("laws design --budget 1e18:1e19 --spread nan", "1000"), ("laws design --budget 1e18 --sizes 99999", "100"),
        ("laws recommend --flops 1e300", "1e+32"), ("laws recommend --days nan --devices 8 --cluster h100", "days"),
        ("train --set data.workers=100000", "256"), ("train --set data.workers=256", "GiB"),
        ("train --set run.processes=9999", "GiB"),
        ("train --layout replicate=2 --set model.width=1000000", "GiB"), ("train --set model.width=1000000", "GiB"),
        ("verify --layout shard=2 --set model.width=1000000", "GiB"), ("bench step --set model.width=1000000", "GiB"),
        ("verify --steps 99999999", "1000000"), ("sample run --temperature nan", "temperature"),
        ("train --set steps=true", "true"), ("train --set optimizer.lr=inf", "finite"),
        ("train --set steps=1e300", "steps"), ("train --set model.norm_eps=inf", "finite"),
        ("train --set optimizer.betas=[true,0.9]", "true"),
        ("train --set data.source=mix --set data.mix={stdlib=inf}", "finite"),
        ("train --set seed=1" + "0" * 20, "seed"),
        (f"train --set steps={'9' * 5000}", "steps"), (f"train --set steps={'[' * 3000}", "steps"),
        (f"plan --layout shard={'9' * 5000}", "whole number"), ("train --set data.tokenizer=bpe:" + "9" * 5000, "bpe"),
    ],
)  # fmt: skip
def test_a_number_beyond_its_bound_is_a_sentence(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stub_processes(monkeypatch)
    code, said = call(shlex.split(arguments), monkeypatch, capfd)
    assert code == 2 and words in said and len(said) < 2000, said


def numeric_keys() -> list[tuple[str, dict[str, object]]]:
    """Every number of a job, as a key and the job without it."""
    fields = [(name, field.annotation) for name, field in Job.model_fields.items()]
    sections: list[tuple[str, Any, dict[str, object]]] = [("", Job, {})]
    sections += [(name, kind, {}) for name, kind in fields if inspect.isclass(kind) and issubclass(kind, BaseModel)]
    sections += [("model", family.config, {"name": name}) for name, family in BUILT_IN.items()]
    found = []
    for section, kind, base in sections:
        keys = [key for key, field in kind.model_fields.items() if re.search(r"\b(int|float)\b", str(field.annotation))]
        found += [(f"{section}.{key}" if section else key, base) for key in keys]
    return found


def test_every_number_of_a_job_is_bounded_and_no_boolean() -> None:
    keys = numeric_keys()
    assert len(keys) > 80
    for key, base in keys:
        for value in (10**17, -(10**17), True, math.inf, math.nan, 10**6000, "1" + "0" * 30, [[10**17]], {"a": 1e200}):
            if key == "seed" and value == 10**17:
                continue
            section, _, name = key.rpartition(".")
            with pytest.raises(UserError) as error:
                make_job({section: {**base, name: value}} if section else {name: value})
            assert len(str(error.value)) < 1000


# Damaged files

TINY = """
steps = 3
layout = "pipeline=2"
[model]
layers = 2
width = 16
heads = 2
vocab = 256
sequence = 8
[data]
source = "text"
path = "book.txt"
[batch]
samples = 4
[validation]
samples = 2
[optimizer]
lr = 0.003
betas = [0.9, 0.95]
"""
DLRM = """
steps = 2
layout = "replicate=2"
[model]
name = "dlrm"
rows = 20
width = 4
bottom = [8]
top = [8]
[data]
source = "criteo"
path = "clicks.txt"
on_bad_record = "skip"
[batch]
samples = 4
"""
BEAT = {
    "rank": 0,
    "pid": 1,
    "host": socket.gethostname(),
    "step": 3,
    "phase": "compute",
    "since": 1.0,
    "heartbeat": 2.0,
}
DIAGNOSIS = {"time": 1.0, "kind": "killed", "culprits": [0], "messages": ["rank 0 was killed."], "exit_reasons": {}}
OWNER = {"token": "0" * 32, "host": socket.gethostname(), "machine": run_owner._machine(), "pid": 4_000_000,
         "time": "2026-01-01 00:00:00 UTC", "processes": [[4_000_000, 1], [4_000_001, 1]]}  # fmt: skip
FIRST_CASE = int(os.environ.get("FUZZ_SEED", "0"))
CASES = 50  # of one test; `make test-all` runs two hundred times as many
SECONDS = 30  # that a case may take

# By file: the commands that read it. `{}` is a name that no other case has written to.
RUN_COMMANDS = ["report run", "trace run --out out/{}", "compare run twin --json", "compare run twin --html out/{}",
                "doctor run", "watch run", "watch", "train --resume run --set steps=4", "sample run --tokens 2",
                "laws fit run"]  # fmt: skip
JOB_COMMANDS = ["train {file} --set run.folder=out/{}", "plan {file}", "inspect {file} --json", "verify {file}",
                "dryrun {file}", "chaos {file}", "bench step {file} --steps 2",
                "data out/{}.bin --job {file}"]  # fmt: skip
DATA = "--set data.source={} --set data.path={}"
COMMANDS = {
    "job.toml": JOB_COMMANDS, "clicks.toml": JOB_COMMANDS,
    "cluster.toml": ["plan job.toml --cluster cluster.toml --json", "plan --cluster cluster.toml --devices 4",
                     "train job.toml --cluster cluster.toml --set run.folder=out/{}",
                     "laws recommend --flops 1e20 --devices 8 --cluster cluster.toml"],
    "law.json": ["laws recommend --flops 1e21 --law law.json", "laws recommend --law law.json --flops 1e20 --json "
                 "--unique-tokens 1e9", "laws recommend --law law.json --days 2 --devices 8 --cluster h100"],
    "runs.csv": ["laws fit runs.csv --draws 20 --out out/{}"],
    "book.txt": ["data out/{}.bin --job job.toml", "train job.toml --set run.folder=out/{}"],
    "notes.jsonl": ["data out/{}.bin " + DATA.format("jsonl", "notes.jsonl"),
                    "train job.toml --set run.folder=out/{} " + DATA.format("jsonl", "notes.jsonl")],
    "tokens.bin": ["train job.toml --set run.folder=out/{} " + DATA.format("tokens", "tokens.bin")],
    "tokenizer.json": ["data out/{}.bin --job job.toml --set data.tokenizer=tokenizer.json"],
    "clicks.txt": ["train clicks.toml --set run.folder=out/{}"],
    "cifar/data_batch_1.bin": ["train images.toml --set run.folder=out/{}"],
    "cifar/test_batch.bin": ["train images.toml --set run.folder=out/{}"],
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its twin, and a job, cluster, law and data file of every kind."""
    folder = tmp_path_factory.mktemp("fuzz") / "pristine"
    folder.mkdir()
    text = "".join(f"the quick brown fox jumps over {n} lazy dogs\n" for n in range(60))
    (folder / "book.txt").write_text(text)
    (folder / "notes.jsonl").write_text(
        "".join(json.dumps({"text": line, "id": 3}) + "\n" for line in text.splitlines())
    )
    row = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))])
    (folder / "clicks.txt").write_text(f"{row}\n" * 20)
    (folder / "cifar").mkdir()
    for number in range(1, 6):
        (folder / f"cifar/data_batch_{number}.bin").write_bytes(bytes(3073 * 4))
    (folder / "cifar/test_batch.bin").write_bytes(bytes(3073 * 2))
    (folder / "job.toml").write_text(TINY)
    (folder / "clicks.toml").write_text(DLRM)
    (folder / "images.toml").write_text(
        'steps = 1\nlayout = "replicate=1"\nbatch.samples = 2\ndata = {source = "cifar10", path = "cifar"}\n'
        'model = {name = "resnet", depth = 18, stem = "cifar", width = 4, image_size = 32, num_classes = 10}\n'
    )
    write_cluster(CLUSTERS["cpu"], folder / "cluster.toml")
    law = ScalingLaw(1.8, 480.0, 2000.0, 0.35, 0.37)
    sizes = [(10.0**n, 10.0**d) for n in (6, 7, 8) for d in (8, 9, 10)]
    lines = [f"{N:g},{D:g},{law.loss(N, D):.6f}" for N, D in sizes]
    (folder / "runs.csv").write_text("\n".join(["parameters,tokens,loss", *lines, ""]))
    fit = fit_scaling_law(read_csv(folder / "runs.csv"), bootstrap_samples=20)
    (folder / "law.json").write_text(json.dumps(fit_as_dict(fit)))
    write_token_arrays(folder / "tokens.bin", [np.arange(2000) % 256], 256)
    train_bpe([text], 300).save(folder / "tokenizer.json")
    job = make_job(tomllib.loads(TINY) | {"data": {"source": "synthetic"}, "run": {"folder": str(folder / "run")}})
    run_world(_train, 2, str(RunFolder.create(job).path), timeout=120)
    plan, source = choose_plan(job)
    run = RunFolder(folder / "run")
    run.write_plan(plan_record(job, plan, source))
    record = run.data_record()
    run.write_data(record, *run.sources(job, record))
    shutil.copytree(folder / "run", folder / "twin")
    extra = {"heartbeats/rank-0.json": BEAT, "doctor/0001/diagnosis.json": DIAGNOSIS, "skips.json": [[2, 1]],
             "owner.json": OWNER,
             "errors/rank-0.json": {"rank": 0, "time_ns": 1, "kind": "E", "message": "m", "exit_code": 1},
             "quarantine.json": {"0": [{"time": 1.0, "step": 1, "tensor": "x", "host": "h"}]}}  # fmt: skip
    for name, value in extra.items():
        (folder / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "run" / name).write_text(json.dumps(value))
    return folder


def _train(path: str) -> None:
    folder = RunFolder(Path(path))
    TrainingLoop(prepare(folder.job(), Layout(pipeline=2)), folder, torch.device("cpu")).run()


HOSTILE = [
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"nan", b"inf", b"1" + b"0" * 18, b"1" + b"0" * 40,
    b"9" * 5000, b"0x" + b"f" * 5000, b"1e300", b"1e-320", b'""', b'"x"', b'"' + b"y" * 5000 + b'"', b"[]", b"{}",
    b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 50 + b"]" * 50, b'"\\u0000"', b'"\\ud800"',
    b"\xff\xfe", b"99999999", b"1000000000", b"'\xf0\x9f\x8c\x8d'", b'"pipeline=1000000"', b'"shard=1000000000"',
    b'"mix"', b'"jsonl"', b'"bpe:99999999999999999999"', b'"../nowhere"', b"",
]  # fmt: skip
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\b(?:true|false|null)\b|\[|\]|\{|\}|[A-Za-z_]+')


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file and says how."""
    kind, content = rng.randrange(12), path.read_bytes()
    lines = content.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    if kind == 0:
        path.unlink()
        (path.mkdir if rng.random() < 0.7 else lambda: path.symlink_to(path))()
        return "a folder, or a link to itself"
    how = f"kind {kind}, line {at + 1}"
    if kind == 1:
        content = rng.choice([b"", rng.randbytes(rng.randrange(200)), content[: rng.randrange(len(content) + 1)]])
    elif kind == 2:
        content = bytes(byte if rng.random() > 0.01 else rng.randrange(256) for byte in content)
    elif kind == 3:
        content = b"".join([*lines[: at + 1], *lines[at:]])
    elif kind == 4:
        content = b"".join([*lines[:at], rng.choice(HOSTILE) + b"\n", *lines[at:]])
    elif kind == 5:
        content = b"".join(lines[:at] + lines[at + 1 :])
    else:
        content, how = replace_value(content, rng)
    path.write_bytes(content)
    return how


def replace_value(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replaces a value by one of another type or size; in a log, of some line, often the last. Says how."""
    tokens = list(TOKEN.finditer(content))
    if not tokens:
        return content, "no value"
    token, value = rng.choice(tokens if rng.random() < 0.7 else tokens[-12:]), rng.choice(HOSTILE)
    how = f"{content[max(0, token.start() - 30) : token.end()]!r} becomes {value[:60]!r}"
    return content[: token.start()] + value + content[token.end() :], how


@pytest.mark.thin(200)
@pytest.mark.parametrize("chunk", range(200))
def test_a_damaged_file_ends_in_a_sentence(
    chunk: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any bytes in any file of a run, and in a job, cluster, law and data file: exit 0 or 2 in time, no traceback, and
    no file changes but those of the run and the output."""
    work = tmp_path / "work"
    shutil.copytree(world, work)
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stub_processes(monkeypatch)
    for name, seconds in (("STALE_SECONDS", 0.2), ("EXIT_SECONDS", 0.2), ("DAMAGED_SECONDS", 0.05)):
        monkeypatch.setattr(run_owner, name, seconds)
    run_files = [str(path.relative_to(work)) for path in sorted((work / "run").rglob("*")) if path.is_file()]
    for number in range(FIRST_CASE + chunk * CASES, FIRST_CASE + (chunk + 1) * CASES):
        rng = random.Random(number)
        file = rng.choice(run_files if rng.random() < 0.5 else [*COMMANDS])
        command = rng.choice(COMMANDS.get(file, RUN_COMMANDS)).replace("{file}", file).replace("{}", str(number))
        (work / "out").mkdir()
        how = damage(work / file, rng)
        before = listing(work)
        seed = f"case {number}: {file}: {how}; shardwise {command}"
        code, said = call(command.split(), monkeypatch, capfd)
        assert code in (0, 2) or "cannot be written" in said, f"{seed}\n{said}"
        assert "Traceback" not in said and len(said) < 20_000, f"{seed}\n{said}"
        changed = {path for path, _ in before.items() ^ listing(work).items()}
        changed -= {path for path in changed if path.startswith(("run/", "runs", "out/"))}
        assert not changed, f"{seed} changed {changed}"
        for name in ("run", "out", "runs"):
            shutil.rmtree(work / name, ignore_errors=True)
        shutil.copytree(world / "run", work / "run")
        if not file.startswith("run/"):
            (shutil.rmtree if (work / file).is_dir() else os.unlink)(work / file)
            shutil.copyfile(world / file, work / file)


COMMANDS_OF_NODE_0: list[dict[str, Any]] = [
    {"heartbeat": 1}, {"shutdown": True}, {"rejected": "node 1 has joined already.", "is_final": False},
    {"patience": 0.7}, {"release": "group-1"},
    {"remove_snapshots": "0123456789ab-1"}, {"kill": "group-1", "signal": 9},
    {"kill": "group-1", "signal": 10, "ranks": [2, 3]},
    {"fork": "group-2", "size": 4, "entry": fork_server.ENTRY_POINTS[0], "standby": False, "arguments": ["run", "x"],
     "ranks": [2, 3], "slots": [0, 1], "snapshots": "0123456789ab-1"},
]  # fmt: skip
REPORTS_OF_A_NODE: list[dict[str, Any]] = [
    {"heartbeat": 1}, {"group": "group-1", "pids": {"2": 70, "3": 71}}, {"group": "group-1", "rank": 2, "code": -9},
    {"group": "group-1", "rank": 3, "stopped": True}, {"stop": 15},
    {"shardwise": "0.1.0", "torch": "2.13.0", "python": "3.12", "clock": 1e9},
]  # fmt: skip


@pytest.mark.parametrize("is_coordinator", [True, False])
def test_any_field_of_a_control_message_is_taken_or_dropped(
    is_coordinator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A peer that knows the secret sends any value in any field: nothing raises, and what is done is of the run."""
    forked, removed, signalled = list[dict[str, Any]](), list[str](), list[tuple[list[int], int]]()
    released = fork_server._ForkedGroup({2: 70, 3: 71}, lambda: None)
    monkeypatch.setattr(fork_server, "_fork_workers", lambda command, _: forked.append(command) or released)
    monkeypatch.setattr(fork_server, "remove_snapshots", removed.append)
    monkeypatch.setattr(fork_server, "signal_all", lambda pids, number: signalled.append((list(pids), number)))
    dropped: list[str] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(node_channel.NodeChannel, "_send_heartbeats", lambda _: None)
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)
    channel = node_channel.NodeChannel(ours, b"key", is_coordinator, dropped.append)
    pool = WorkerPool(tmp_path, SimpleNamespace(), 0)  # type: ignore[arg-type]
    taken, cases = 0, 5000 if request.config.getoption("--all") else 500
    for number in range(FIRST_CASE, FIRST_CASE + cases):
        rng = random.Random(number)
        line = json.dumps(rng.choice(REPORTS_OF_A_NODE if is_coordinator else COMMANDS_OF_NODE_0)).encode()
        for _ in range(rng.randrange(3)):
            line, _ = replace_value(line, rng)
        tag = channel._tag(not is_coordinator, channel._received + 1, line)
        message = channel.decode(tag + line)
        if message is None:
            continue
        taken += 1
        if is_coordinator:
            group = WorkerGroup("group-1", "shard=4", 4, {0: [0, 1], 1: [2, 3]})
            pool._worker_groups = {"group-1": group}
            pool.dispatch([message], 1)
            assert {*group.pids, *group.exit_codes, *group.stopped_since} <= {2, 3}, line
        else:
            sink = SimpleNamespace(send=lambda message: json.dumps(message))
            fork_server._handle_command(message, {"group-1": released}, sink)  # type: ignore[arg-type]
    assert taken > 100 and len(dropped) > 100 and taken + len(dropped) == cases
    assert all(command["entry"] in fork_server.ENTRY_POINTS for command in forked)
    assert all(set(pids) <= {70, 71} and number in node_channel.SIGNALS for pids, number in signalled)
    assert all(re.fullmatch("[0-9a-f]{12}-[0-9]{1,7}", key) for key in removed)
    assert is_coordinator or (forked and signalled and removed)
    pool.close()
    for end in (ours, theirs):
        end.close()


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            stat = os.lstat(os.path.join(parent, name))
            found[os.path.relpath(os.path.join(parent, name), folder)] = stat.st_size, stat.st_mtime_ns
    return found


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Calls a command in this process. Returns its exit code and what it said; raises if it takes too long."""

    def stop(*_: object) -> None:
        raise BaseException(f"no answer within {SECONDS} s")  # noqa: TRY002 - nothing may catch it

    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception:
        code, _ = -1, traceback.print_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return code, "".join(capfd.readouterr())


def stub_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands come as far as the moment in which they would start processes or serve pages."""
    nothing = SimpleNamespace(close=lambda: None, send=lambda _: None, pid=os.getpid())
    for module in ("shardwise.launch.start", "shardwise.chaos.run"):
        monkeypatch.setattr(f"{module}.ForkServer", lambda *_: nothing)
    monkeypatch.setattr("shardwise.launch.start.launch", lambda *_, **__: None)
    monkeypatch.setattr("shardwise.chaos.run.launch", lambda *_, **__: sys.exit(0))
    monkeypatch.setattr("shardwise.verify.parity.run_world", lambda *_, **__: sys.exit(0))
    monkeypatch.setattr("shardwise.bench.train_step.parallelize", lambda *_: sys.exit(0))
    read = SampleStream.read
    monkeypatch.setattr(SampleStream, "read", lambda stream, at: read(stream, at) if len(at) < 1000 else sys.exit(0))

    def serve_once(server: ThreadingHTTPServer, **_: object) -> None:
        registry = inspect.getclosurevars(server.RequestHandlerClass._route).nonlocals["registry"]  # type: ignore[attr-defined]
        for name in registry.paths():
            with suppress(Exception):  # the server answers with status 500
                registry.run_state(name)
        assert registry.single_run or registry.list_runs() is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve_once)


def test_a_read_only_disk_is_a_sentence(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stub_processes(monkeypatch)
    open_file = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "r" not in mode and tmp_path / "work" in path.absolute().parents:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return open_file(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    for command in ("report run", "trace run", "train --resume run", "compare run twin --html out.html",
                    "data out.bin --job job.toml", "laws fit runs.csv --draws 20 --out fit.json",
                    "laws design --budget 1e15 --out grid"):  # fmt: skip
        code, said = call(command.split(), monkeypatch, capfd)
        assert code == 2 and "Read-only file system" in said and "Traceback" not in said, f"{command}\n{said}"


def test_a_click_log_without_a_good_row_is_a_sentence(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stub_processes(monkeypatch)
    (tmp_path / "clicks.txt").write_text("2\tx\n" * 40)
    code, said = call(["train", str(world / "clicks.toml")], monkeypatch, capfd)
    assert code == 2 and "no row in Criteo's format" in said
