"""The versions of PyTorch that an installation may take: said once in pyproject.toml, and the same everywhere else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def supported() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    (requirement,) = [one for one in requirements if one.name == "torch"]
    return requirement


def minor_versions(supported: Requirement) -> list[str]:
    return [f"2.{minor}" for minor in range(100) if supported.specifier.contains(f"2.{minor}.1")]


def test_an_installation_leaves_todays_pytorch_in_place(supported: Requirement) -> None:
    for version in ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"):
        assert supported.specifier.contains(version)


def test_what_is_tested_with_is_supported(supported: Requirement) -> None:
    assert supported.specifier.contains(Version(torch.__version__).base_version)

    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==(.*)$", constraints, re.MULTILINE)
    assert pinned is not None and supported.specifier.contains(pinned[1])


def test_every_supported_version_is_tested(supported: Requirement) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["torch"] == minor_versions(supported)


def test_the_readme_names_the_supported_versions(supported: Requirement) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    versions = minor_versions(supported)
    assert f"It needs PyTorch {versions[0]} to {versions[-1]} " in readme
