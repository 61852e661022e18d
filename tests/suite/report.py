"""What the suite says while it runs and at its end.

In a terminal, one line tells how many tests have passed and how long the rest will take. After a failure stands the
command that runs this test alone. A test that hangs is ended with the stacks of all its processes."""

import faulthandler
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import psutil
import pytest

STACK_SIGNAL = signal.SIGUSR2  # makes a process write the stacks of all its threads
REAL_PYTHON = sys.executable  # `suite.warm` puts another program in its place
SECONDS_TO_WRITE = 1.0
LINE_SECONDS = 0.2  # between two drawings of the line of progress


def pytest_configure(config: pytest.Config) -> None:
    is_controller = not hasattr(config, "workerinput")
    if is_controller and sys.stderr.isatty():
        config.pluginmanager.register(ProgressLine(config), "progress line")


class ProgressLine:
    """Draws one line in place of a dot per test."""

    def __init__(self, config: pytest.Config):
        self.begin = time.monotonic()
        self.total = 0
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.drawn = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.total = len(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when == "call" and report.passed:
            return "passed", "", ""
        if report.skipped:
            return "skipped", "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.counts["failed"] += 1
        elif report.when == "call" or report.skipped:
            self.counts["skipped" if report.skipped else "passed"] += 1
        if time.monotonic() - self.drawn > LINE_SECONDS:
            self.draw()

    def draw(self) -> None:
        self.drawn = time.monotonic()
        done = sum(self.counts.values())
        if not done or not self.total:
            return
        left = (self.drawn - self.begin) / done * max(0, self.total - done)
        failed = f", {self.counts['failed']} failed" if self.counts["failed"] else ""
        line = f"{done:,} of {self.total:,} tests{failed}, about {left // 60:.0f}:{left % 60:02.0f} left"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def pytest_sessionfinish(self) -> None:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seed = config.getoption("shuffle")
    order = "as written" if seed is None else f"drawn by --shuffle {seed}"
    terminalreporter.write_line(f"order: {order}; every other random number has a fixed seed.")

    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if not failed:
        return
    terminalreporter.section("to run one alone")
    for nodeid in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.write_line(f"{REAL_PYTHON} -m pytest {shlex.quote(nodeid)}")


# A test that hangs


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Ends the test after its time, as pytest-timeout does, once every process of it has shown where it is."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        show_stacks()
        pytest.fail(f"Timeout: the test has not ended after {settings.timeout:g} s.")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Processes that are forked from here inherit the handler; their stacks go where the test's output goes.
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    return (yield)


def show_stacks() -> None:
    """Writes the stacks of this process and of all that it has started to the test's output."""
    faulthandler.dump_traceback(file=2, all_threads=True)
    for process in psutil.Process().children(recursive=True):
        with_handler = _handles(process.pid)
        print(f"process {process.pid}: {' '.join(_command(process))[:200]}", file=sys.stderr, flush=True)
        if with_handler:
            os.kill(process.pid, STACK_SIGNAL)
            time.sleep(SECONDS_TO_WRITE)


def _handles(pid: int) -> bool:
    """Whether a process has a handler of the signal, which would end it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
