"""The console blocks of README, tutorial and how-to pages: commands that take seconds run, and print what is shown.

`SKIPPED` lists the commands that do not run here, with the reason. `stable` alone decides what of a line is compared:
numbers that vary are masked. A shown line `...` stands for any lines.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_docs import ROOT, blocks

from shardwise.cli import main
from shardwise.job import load_job
from shardwise.launch.start import DEMO, _print_summary
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare

PAGES = [ROOT / "README.md", ROOT / "docs/tutorial.md", *sorted(ROOT.glob("docs/how-to/*.md"))]
TRAIN = 'shardwise train first.toml --set layout="pipeline=1" --set run.folder=runs/one'
USES_RUN = (
    "shardwise sample",
    "shardwise compare",
    "shardwise trace",
    "shardwise eval",
)  # of the run that TRAIN leaves
EXACT = ("job:", "layout:", "shardwise:")  # lines whose numbers do not vary

YOUR_JOB = "a template for the reader's own job; the tutorial runs the same command"
TRAINS = "trains for more than seconds; tests/test_train.py trains, stops and resumes"
MEASURES = "measures this machine for a minute, or needs that measurement"
TINY = "a job for many GPUs; tests/test_peers.py plans it, and trains it when it is tiny"
FOLDER = "needs a Hugging Face folder; tests/test_weights.py makes some"
SKIPPED = {
    'shardwise train job.toml --set layout="pipeline=2 tensor=2"': YOUR_JOB,
    'shardwise verify job.toml --layout "pipeline=2 shard=2 tensor=2"': YOUR_JOB,
    'shardwise train first.toml --set layout="pipeline=2 shard=2 tensor=2"': TRAINS,
    'shardwise train first.toml --set layout="pipeline=2 stages=1,3"': TRAINS,
    'shardwise train job.toml --set layout="shard=2 zero=3 recompute=selective"': TRAINS,
    "shardwise train job.toml --set tracker=csv": TRAINS,
    "shardwise train text.toml": TRAINS,
    "shardwise train examples/sft.toml": TRAINS,
    "shardwise train --resume runs/first": TRAINS,
    'shardwise train --resume runs/first --set layout="replicate=2"': TRAINS,
    'shardwise train --resume runs/first --set layout="pipeline=2 shard=2 tensor=2 zero=3"': TRAINS,
    "shardwise train --resume runs/first --processes 4": TRAINS,
    "shardwise train --resume runs/bad": "needs a damaged checkpoint; tests/test_checkpoint.py damages some",
    "shardwise export runs/my-run my-model --check": "needs a run; tests/test_weights.py exports some",
    "shardwise train --set model.name=hf:./Llama-3.2-1B --set data.source=text --set data.path=notes.txt": FOLDER,
    "shardwise train --set model.weights=./Llama-3.2-1B --set model.sequence=4096": FOLDER,
    "shardwise train --set model.weights=runs/first --set data.source=text --set data.path=more.txt": TRAINS,
    "shardwise train --set model.weights=runs/first@200 --set model.sequence=512": TRAINS,
    "shardwise train --set model.name=hf:./Llama-3.2-1B --set model.lora.rank=16 --set data.source=text "
    "--set data.path=notes.txt": FOLDER,
    "shardwise drift my-model new.jsonl --html drift.html": "tests/test_handover.py compares some",
    "shardwise export runs/tuned my-adapter": "needs a run; tests/test_lora.py exports some",
    "shardwise merge runs/tuned my-model --check": "needs a run; tests/test_lora.py merges some",
    "shardwise calibrate -o here.toml": MEASURES,
    "shardwise tune job.toml": "measures this machine for minutes; tests/test_tune.py tunes",
    "shardwise plan job.toml --cluster here.toml": MEASURES,
    "shardwise train job.toml --cluster here.toml": MEASURES,
    "shardwise verify examples/llama-small.toml --shrink": "verifies a dozen layouts, which takes minutes",
    'shardwise verify examples/gpt.toml --shrink --layout "pipeline=2 schedule=zbv" --layout "shard=2 zero=3"': (
        "the same command as the one with --json"
    ),
    'shardwise dryrun examples/gpt-1t.toml --layout "pipeline=64 tensor=8 shard=6 micro_batch=1 recompute=full"': (
        "takes a minute; tests/test_dryrun.py runs smaller ones"
    ),
    **{
        f"shardwise plan job.toml --cluster {cluster}": TINY
        for cluster in ("h100 --devices 64", "h100 --devices 8", "a100-80g --devices 1024")
    },
    "shardwise sweep job.toml --over optimizer.lr=1e-4,3e-4,1e-3 --over model.lora.rank=8,32": YOUR_JOB,
    'shardwise verify job.toml --shrink --layout "pipeline=2 shard=2 tensor=2"': TINY,
    'shardwise verify job.toml --shrink --layout "shard=2 tensor=2 zero=3"': TINY,
    'shardwise verify job.toml --shrink --layout "shard=2 zero=3"': TINY,
    "shardwise train job.toml": TINY,
    "shardwise submit job.toml --slurm --nodes 8 --gpus-per-node 8": "needs Slurm; tests/test_slurm.py submits",
    "shardwise submit job.toml --slurm --nodes 128 --gpus-per-node 8": "needs Slurm; tests/test_slurm.py submits",
    "shardwise submit first.toml --slurm --nodes 2": "needs Slurm; tests/test_slurm.py submits",
    "shardwise submit first.toml --ray --nodes 2 --gpus-per-node 8": "needs Ray; tests/test_ray.py submits",
    "shardwise watch runs/0001": "serves until Ctrl-C; tests/test_watch.py asks the server",
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yields each `$ shardwise ...` of the pages, and the lines shown below it."""
    for page in PAGES:
        for text in blocks(page, "console"):
            for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                if command.startswith("shardwise "):
                    yield " ".join(command.split()), shown


SHOWN: dict[str, list[list[str]]] = {}
for _command, _lines in commands():
    SHOWN.setdefault(_command, []).append(_lines)
RUNNABLE = [command for command in SHOWN if command not in SKIPPED]


def stable(line: str) -> str:
    """Returns what must be the same in every run: numbers masked, but for layouts and jobs; no column widths."""
    line = re.sub(r"[\u2500-\u257f]+", "|", line)
    if not line.startswith(EXACT):
        line = re.sub(r"(?<![\w=])\d+(?:[,.:]\d+)*(?:e[-+]?\d+)?", "#", line)
    return " ".join(line.split())


def check_output(command: str, output: str) -> None:
    for shown in SHOWN[command]:
        printed = iter(map(stable, output.splitlines()))
        for line in shown:
            assert line == "..." or stable(line) in printed, f"$ {command}\ndoes not print\n{line}\nbut\n{output}"


def run(command: str, folder: Path) -> str:
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Runs a command in this process, which has imported PyTorch already."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr()
    assert not ended.value.code, printed.out + printed.err
    return printed.out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The reader's folder: the tutorial's job, the examples, and some text."""
    (tutorial,) = blocks(ROOT / "docs" / "tutorial.md", "toml")
    (tmp_path / "first.toml").write_text(tutorial)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my-text").mkdir()
    for number, page in enumerate(PAGES[:5]):
        shutil.copy(page, tmp_path / "my-text" / f"{number}.txt")
    return tmp_path


def test_every_skip_is_of_a_command_on_a_page() -> None:
    assert set(SKIPPED) <= set(SHOWN), sorted(set(SKIPPED) - set(SHOWN))
    assert TRAIN in RUNNABLE and len(RUNNABLE) >= 8


def is_error(command: str) -> bool:
    return any(line.startswith("shardwise: ") for shown in SHOWN[command] for line in shown)


@pytest.mark.parametrize("command", [command for command in RUNNABLE if is_error(command)])
def test_errors_are_those_shown(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    check_output(command, capsys.readouterr().err)


def case_name(command: str) -> str:
    """Proofs and plans, which take longest, are two kinds of cases; any other command is a kind of its own."""
    words = command.removeprefix("shardwise ")
    return words if words.startswith(("verify", "plan")) else re.sub("[ -]+", "_", words)


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(
    "command",
    [one for one in RUNNABLE if one != TRAIN and not one.startswith(USES_RUN) and not is_error(one)],
    ids=case_name,
)
def test_commands_print_what_is_shown(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if "bpe:" in command:
        pytest.importorskip("tokenizers")
    few_steps = " --set steps=2" if command.startswith("shardwise train ") else ""
    check_output(command, run_here(command + few_steps, folder, monkeypatch, capfd))


@pytest.mark.cluster
def test_a_run_and_what_is_done_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tutorial's first training; then it stands in for the runs that other pages read."""
    check_output(TRAIN, run(f"{TRAIN} --set steps=4", folder))
    for name in ("0001", "0002"):
        shutil.copytree(folder / "runs" / "one", folder / "runs" / name)
    for command in RUNNABLE:
        if command.startswith(USES_RUN):
            check_output(command, run_here(command, folder, monkeypatch, capfd))


def test_the_demo_is_the_one_shown() -> None:
    (demo,) = (text for text in blocks(ROOT / "README.md", "console") if text.startswith("$ make demo"))
    job = load_job(DEMO)
    lines: list[str] = []
    (layout,) = re.findall(r"^layout: (.*?) \(", demo, re.MULTILINE)
    _print_summary(prepare(job, Layout.parse(layout)), lines.append)
    assert lines and all(line in demo.splitlines() for line in lines), lines
    drawn = ElementTree.parse(ROOT / "docs" / "demo.svg").getroot()
    recorded = {"".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert all(line in recorded for line in lines), "what is printed has changed: run tools/record.py"
