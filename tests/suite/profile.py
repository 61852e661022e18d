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

import psutil
import pytest

from suite.warm import WARM

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
        own_before, children_before = processor_times(item.config)
        try:
            return (yield)
        finally:
            own, children = processor_times(item.config)
            row = {
                "test": item.nodeid,
                "seconds": round(time.monotonic() - begin, 3),
                "own": round(own - own_before, 3),
                "children": round(children - children_before, 3),
                **self.counts,
            }
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def processor_times(config: pytest.Config) -> tuple[float, float]:
    """Returns the seconds of processor time of this process, and of all that have ended below it."""
    times = os.times()
    own = times.user + times.system
    children = times.children_user + times.children_system
    if WARM in config.stash:
        warm = psutil.Process(config.stash[WARM].pid).cpu_times()
        children += warm.user + warm.system + warm.children_user + warm.children_system
    return own, children
