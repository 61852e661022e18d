"""What is released: a source distribution, and a wheel made from it that works in an environment of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import shardwise

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds with setuptools as pip does, but without a network: an environment for the build would need one."""
    out.mkdir(exist_ok=True)
    script = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    return out / run(sys.executable, "-c", script, out, folder=source).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that Git would commit, in a folder of their own."""
    source = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return build("sdist", source, source / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "dist")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone in a new environment; what it depends on is that of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(paths)))
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        folder=folder,
    )
    return folder


def test_the_wheel_trains_in_an_environment_of_its_own(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "shardwise"
    assert run(command, "--version", folder=tmp_path) == f"shardwise {PROJECT['version']}\n"
    place = run(environment / "bin" / "python", "-c", "import shardwise; print(shardwise.__file__)", folder=tmp_path)
    assert place.startswith(str(environment))
    settings = ["steps=2", "layout=replicate=2", "run.folder=run", "batch.samples=4"]
    printed = run(
        command, "train", *(word for one in settings for word in ("--set", one)), folder=tmp_path, OMP_NUM_THREADS="1"
    )
    assert (
        re.search(r"^step +2/2 ", printed, re.MULTILINE) and (tmp_path / "run" / "report.html").stat().st_size > 50_000
    )
    run(command, "plan", "--cluster", "h100", "--devices", "2", folder=tmp_path)  # reads its tables


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "shardwise", folder=ROOT).splitlines()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not {name for name in listed if (ROOT / name).is_file()} - names
    assert all(name.startswith(("shardwise/", f"shardwise-{PROJECT['version']}.dist-info/")) for name in names)
    assert wheel.stat().st_size < 2 * 2**20


def test_the_source_distribution_holds_what_the_tests_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("tests/conftest.py", "tools/docs.py", "docs/README.md", "Makefile", "constraints.txt", "CITATION.cff",
                 "examples/gpt.toml", "benchmarks/runs.csv", "mkdocs.yml", "Dockerfile", "LICENSE"):  # fmt: skip
        assert name in names, name
    assert not [name for name in names if name.startswith(("runs/", "build/", ".venv/", ".git/")) or ".pyc" in name]


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and PROJECT["version"] == shardwise.__version__ == citation["version"] == newest[1]
    assert citation["cff-version"] == "1.2.0" and citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors", "type"} <= set(citation)


def test_the_image_is_made_of_what_is_there() -> None:
    """As far as it goes without Docker: known instructions, files and extras that exist, the wheel's entry point."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {word for word, _ in steps} <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    for word, rest in steps:
        if word == "COPY" and not rest.startswith("--from"):
            for name in shlex.split(rest)[:-1]:
                assert (ROOT / name).exists() and name in sent, name
        if extras := re.findall(r"\.whl\)\[(.*?)\]", rest):
            assert set(extras[0].split(",")) <= set(PROJECT["optional-dependencies"])
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    assert dict(steps)["ENTRYPOINT"] == '["shardwise"]' and "shardwise" in PROJECT["scripts"]
