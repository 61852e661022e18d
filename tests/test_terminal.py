"""What commands print on narrow and wide terminals, piped, and without colours."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.console import fit_columns

JOB = """steps = 2
layout = "replicate=2"
model = {layers = 2, width = 32, heads = 2, sequence = 16, vocab = 256}
batch = {samples = 8}
data = {source = "synthetic"}
run = {device = "cpu"}
"""
COMMANDS = [
    "plan LARGE --cluster h100 --devices 16 --price 2",
    "plan JOB --cluster cpu --devices 2",
    "verify JOB --layout tensor=2",
    "dryrun JOB --layout pipeline=2 --set batch.samples=4 --every-stage",
    "--help",
    *(f"{name} --help" for name in ("train", "plan", "verify", "dryrun", "sample", "sweep", "init", "eval", "submit")),
]
FREE_TEXT = re.compile(r"(llama3-8b|gpt): |Layout '|copies: |buffers: ")  # sentences of one line, no tables


@pytest.mark.thin(3)
@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal(
    command: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"JOB": JOB, "LARGE": 'model = {name = "llama3-8b"}\nbatch = {samples = 64}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "…" not in result.output or "--help" in command
    for line in result.output.splitlines():
        assert len(line.rstrip()) <= width or FREE_TEXT.match(line), line


def in_terminal(arguments: list[str], folder: Path, **variables: str) -> str:
    """Returns what a command writes to a terminal."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "shardwise", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **variables}
    process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, cwd=folder, env=environment)
    os.close(writer)
    found = b""
    try:
        while part := os.read(reader, 65536):
            found += part
    except OSError:  # the terminal is closed
        pass
    os.close(reader)
    assert process.wait() == 0, found.decode()
    return found.decode()


def test_training_on_a_narrow_terminal_without_colours(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    said = in_terminal(["train", "job.toml"], tmp_path, NO_COLOR="1", COLUMNS="60")
    assert not re.search(r"\x1b\[[\d;]*m", said) and "step 2/2" in said
    table = said.partition("step time breakdown, ms:")[2].partition("A step takes")[0].splitlines()
    assert len(table) > 3 and all(len(line.replace("\x1b[K", "")) <= 60 for line in table)


@pytest.mark.parametrize("command", ["env", "plan job.toml --cluster cpu --devices 2", "--help"])
def test_no_colour_means_none(command: str, tmp_path: Path) -> None:
    """Bold and cursor codes may stay; a colour may not."""
    (tmp_path / "job.toml").write_text(JOB)
    said = in_terminal(command.split(), tmp_path, NO_COLOR="1", COLUMNS="80")
    assert not re.search(r"\x1b\[(\d+;)*([39][0-7]|[34]8)(;\d+)*m", said)


def test_a_pipe_gets_plain_text(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "shardwise", "plan", "job.toml", "--cluster", "cpu", "--devices", "2"]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in said and "layouts, best first" in said


def test_rows_become_columns_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["rank", "compute", "all-reduce wait (replicate)"], *([str(rank), "1.25", "0.5"] for rank in range(9))]
    monkeypatch.setenv("COLUMNS", "80")
    assert fit_columns(rows)[0] == "rank  compute  all-reduce wait (replicate)"
    monkeypatch.setenv("COLUMNS", "40")
    lines = fit_columns(rows)
    assert max(map(len, lines)) <= 38 and sum(line.startswith("rank") for line in lines) > 1
    assert [cell for line in lines if line.startswith("rank") for cell in line.split()[1:]] == list("012345678")
