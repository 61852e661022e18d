"""The command line itself: what it shows, and with which code it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import shardwise
from shardwise.cli import app, main
from shardwise.errors import JobError, LayoutError
from shardwise.job import load_job
from shardwise.layout import Layout
from shardwise.verify.parity import VerifyResult


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | None:
    """Runs a command in this process; gives its exit code, None for a plain end."""
    monkeypatch.setattr(sys, "argv", ["shardwise", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code  # type: ignore[return-value]


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not call(monkeypatch, "--version")
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


def test_help_keeps_its_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not call(monkeypatch, "data", "--help")
    assert "[data]" in capsys.readouterr().out


@pytest.mark.parametrize(("ok", "code"), [(True, None), (False, 1)])
def test_verify_ends_with_1_where_something_differs(
    ok: bool, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = VerifyResult("tensor=2", ok=ok, failure=None if ok else "a rank died.")
    monkeypatch.setattr("shardwise.verify.command.verify_job", lambda *_: [record])
    assert call(monkeypatch, "verify") == code
    assert ("a rank died" in capsys.readouterr().out) == (not ok)


def test_layout_is_short_for_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        "shardwise.launch.start.start_training",
        lambda file, settings, *_, **__: (asked.append(settings), True),  # type: ignore[func-returns-value]
    )
    assert not call(monkeypatch, "train", "--set", "steps=3", "--layout", "pipeline=2 tensor=2")
    assert asked == [["steps=3", "layout=pipeline=2 tensor=2"]]
    for command, layout in (("train", "pipline=2"), ("train", ""), ("plan", ""), ("chaos", "")):
        assert call(monkeypatch, command, "--layout", layout) == 2
    assert "did you mean 'pipeline'?" in capsys.readouterr().err


def test_every_command_can_be_quiet_and_answers_in_json() -> None:
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for group in ("laws", "bench"):
        commands |= commands.pop(group).commands
    options = {name: {option.name for option in command.params} for name, command in commands.items()}
    assert [name for name in options if "quiet" not in options[name]] == []
    assert [name for name in options if "as_json" not in options[name]] == ["watch"]


@pytest.mark.cluster
def test_what_is_asked_for_as_json_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--set", "steps=2", "--set", "layout=tensor=2", "--set", "model.width=32", "--set", "run.folder=run"]

    def answer(*words: str) -> Any:
        assert not call(monkeypatch, *words, "--json")
        return json.loads(capfd.readouterr().out)

    trained = answer("train", *small)
    assert (trained["run"], trained["is_finished"], trained["step"]) == ("run", True, 2) and trained["loss"] > 0
    assert answer("report", "run") == {"page": "run/report.html"} and answer("trace", "run")["events"] > 0
    assert len(answer("sample", "run", "--tokens", "3", "--prompt", "a", "--prompt", "b")) == 2
    assert answer("export", "run", "out")["folder"] == "out" and "no fault" in answer("doctor", "run")[0]
    assert not call(monkeypatch, "train", *small, "--set", "run.folder=other", "--quiet")
    assert capfd.readouterr().out == f"other: step 2, loss {trained['loss']:.4f}\n"
    assert not call(monkeypatch, "init", "--task", "pretrain", "-q")
    assert capfd.readouterr().out == "job.toml: trains a language model from scratch; its comments say what to change\n"
    assert not call(monkeypatch, "report", "run", "-q")
    assert capfd.readouterr().out == "run/report.html\n"


def test_an_empty_command_line_is_help_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch) == 0
    printed = capsys.readouterr()
    assert "Usage" in printed.out and not printed.err


def test_a_job_key_as_an_option_is_told_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "train", "--steps", "5") == 2
    assert capsys.readouterr().err == "shardwise: No such option: --steps; it is a key of the job: --set steps=...\n"
    for option, told in {
        "--training.steps": "--set steps=...", "--model.layers": "--set model.layers=...",
        "--lr": "did you mean optimizer.lr?", "--parallelism.tensor_parallel_degree": "did you mean tensor=N",
    }.items():  # fmt: skip
        assert call(monkeypatch, "train", option, "5") == 2
        assert told in capsys.readouterr().err
    assert call(monkeypatch, "train", "--set", "steps", "5") == 2
    assert "write for example --set steps=100" in capsys.readouterr().err
    assert call(monkeypatch, "train", "--layuot", "5") == 2
    assert "--layout" in capsys.readouterr().err


def test_zero_without_shard_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "train", "--set", "layout=zero=3") == 2
    assert "zero=3 shards over shard=N, which is 1" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    variables = {"_SHARDWISE_COMPLETE": f"complete_{shell}", "COMP_WORDS": "shardwise tr", "COMP_CWORD": "1",
                 "_TYPER_COMPLETE_ARGS": "shardwise tr", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip
    command = [sys.executable, "-c", "from shardwise.cli import main; import sys; sys.argv = ['shardwise']; main()"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert "train" in done.stdout and not done.stderr, done


@pytest.mark.parametrize(
    ("words", "answer"),
    [("plan --layout", "Option '--layout' requires an argument."),
     ("train --model.converters float8", '--set key=value: did you mean precision = "fp8"?'),
     ("train --model.layers 3", "No such option: --model.layers; it is a key of the job: --set model.layers=..."),
     ("train --nnodes 2", "No such option: --nnodes; use the command line: shardwise submit"),
     ("train --step 5", "--set steps=..."),
     ("plan --gpus 64", "a plan has --devices"),
     ("dryrun --cluster h100", "--cluster of plan and train"),
     ("plan --cluster a100 --devices 8", "did you mean 'a100-40g' or 'a100-80g'?"),
     ("run job.toml", "No such command 'run'; did you mean train?"),
     ("plan --set optimizer.betas=0.9,0.999", "should be a list in [ ]."),
     ("plan --set compile=inductor", "should be true or false, or should be 'auto'."),
     ("plan --set optimizer=adam", "set its keys below [optimizer], such as optimizer.name."),
     ("plan --set model.lora=3", "model.lora = 3: it is a section, not a value; set its keys below [model.lora]."),
     ("plan --layout shard=-1", 'layout = "auto" lets the planner choose.'),
     ("plan --layout zero=0", "write replicate=N."),
     ("plan --layout schedule=ZB1P", "did you mean schedule=zero-bubble?"),
     ("plan --set comms_logger=1", "leave it out; nothing here needs it.")],
)  # fmt: skip
def test_what_someone_from_elsewhere_types(words: str, answer: str, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    assert call(monkeypatch, *words.split()) == 2
    assert answer in capsys.readouterr().err


def test_all_unknown_keys_of_a_layout_are_told() -> None:
    with pytest.raises(LayoutError, match="'dp_shard'; did you mean shard=2 zero=3.*'tp'; did you mean tensor=2"):
        Layout.parse("dp_shard=2 tp=2 schedule=1f1b")


def test_sections_of_deepspeed(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        "fp16 = { enabled = false }\naio = { block_size = 4096 }\nscheduler = { params = { warmup_max_lr = 1.0 } }\n"
        "zero_optimization = { offload_optimizer = { device = 'cpu' } }\n"
    )
    with pytest.raises(JobError) as error:
        load_job(job)
    text = str(error.value)
    assert "'fp16'; it is switched off" in text and "block_size" not in text and "run.device" not in text
    assert "'scheduler.params.warmup_max_lr'; did you mean optimizer.lr?" in text
    (tmp_path / "ds.json").write_text("{}")
    with pytest.raises(JobError, match="A job is a TOML file"):
        load_job(tmp_path / "ds.json")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.tokenizer={}/x", "data.tokenizer = '{}/x' is not a file"),
        ("model.weights={}/x", "model.weights = '{}/x' is neither a run nor a folder with a config.json"),
    ],
)
@pytest.mark.parametrize("home", ["~who_is_that", "nowhere"])
def test_a_path_below_a_home_that_nobody_has_is_a_sentence(
    setting: str, sentence: str, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "train", "--set", setting.format(home)) == 2
    assert sentence.format(home) in capsys.readouterr().err
