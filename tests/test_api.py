"""The public names are those of `__all__`, each can be had, and importing the package costs no PyTorch."""

from __future__ import annotations

import subprocess
import sys

import shardwise


def test_all_is_sorted_and_every_name_is_there() -> None:
    names = shardwise.__all__
    assert sorted(names) == sorted(set(names))
    assert names[:-1] == sorted(names[:-1])
    for name in names:
        assert getattr(shardwise, name) is not None


def test_each_name_is_defined_where_it_is_said_to_be() -> None:
    for name, home in shardwise._PUBLIC_NAMES.items():
        found = getattr(shardwise, name)
        assert found.__module__.startswith(home), f"{name} lives in {found.__module__}"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, shardwise, shardwise.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
