"""The command line itself: what it shows, and with which code it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli import main
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
        "shardwise.launch.start.start_training", lambda file, settings, *_, **__: asked.append(settings)
    )
    assert not call(monkeypatch, "train", "--set", "steps=3", "--layout", "pipeline=2 tensor=2")
    assert asked == [["steps=3", "layout=pipeline=2 tensor=2"]]
    assert call(monkeypatch, "train", "--layout", "pipline=2") == 2
    assert "did you mean 'pipeline'?" in capsys.readouterr().err
