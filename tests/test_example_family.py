"""The family of `examples/family`, a package of its own: found by its entry point, proven, trained, planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "examples" / "family"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package counts as installed: its metadata lies on the path, as pip would write it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / f"shardwise_mixer-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
             for group, entries in project["entry-points"].items()]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(folder), str(PACKAGE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def shardwise(env: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.mark.cluster
def test_it_is_proven(installed: dict[str, str], tmp_path: Path) -> None:
    layouts = ("replicate=2", "shard=2 zero=3", "tensor=2", "pipeline=2 tensor=2 micro_batch=2")
    options = [option for layout in layouts for option in ("--layout", layout)]
    done = shardwise(installed, tmp_path, "verify", str(PACKAGE / "mixer.toml"), "--shrink", "--json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["ok"] for record in records] == [True] * len(layouts)
    assert max(record["grad"] for record in records) < 1e-10


def test_it_trains_and_is_planned(installed: dict[str, str], tmp_path: Path) -> None:
    settings = ["--set", "steps=12", "--set", "run.folder=run", "--set", "layout=pipeline=2"]
    done = shardwise(installed, tmp_path, "train", str(PACKAGE / "mixer.toml"), *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.2
    assert "predicted" in done.stdout


def test_what_it_does_not_say_it_can_is_refused(installed: dict[str, str], tmp_path: Path) -> None:
    done = shardwise(installed, tmp_path, "train", str(PACKAGE / "mixer.toml"), "--set", "layout=context=2")
    assert done.returncode == 2 and "an MLP-Mixer cannot be split along the sequence" in done.stderr


def test_without_the_package_it_is_unknown(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = shardwise(env, tmp_path, "train", str(PACKAGE / "mixer.toml"))
    assert done.returncode == 2 and "unknown model 'mixer'" in done.stderr
