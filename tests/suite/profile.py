"""Where the time of the suite goes: `--profile FILE` appends a line of JSON for every test.

Seconds on the clock say what a test takes beside others; seconds of processor time, its own and that of processes that
it has waited for, say what it takes from them. A test with much of the one and little of the other waits."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COUNTED = {"subprocess.Popen": "commands", "os.fork": "forks", "time.sleep": "sleeps"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile", type=Path, metavar="FILE", help="append what each test takes, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("profile"):
        config.pluginmanager.register(Profile(config.getoption("profile")), "profile")


class Profile:
    """Measures each test from its first fixture to its last."""

    def __init__(self, file: Path):
        self.file = file.absolute()
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in COUNTED:
            self.counts[COUNTED[event]] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.counts.clear()
        begin = time.monotonic()
        before = os.times()
        try:
            return (yield)
        finally:
            now = os.times()
            row = {
                "test": item.nodeid,
                "seconds": round(time.monotonic() - begin, 3),
                "own": round(now.user + now.system - before.user - before.system, 3),
                "children": round(
                    now.children_user + now.children_system - before.children_user - before.children_system, 3
                ),
                **self.counts,
            }
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
