"""A process with everything imported, from which the commands of tests are forked: importing PyTorch takes seconds.

It is forked from pytest's process once all tests are collected, before the first one runs, so nothing has been computed
in it. From then on `sys.executable` is a small program (`warm_python.py`) that asks it to fork, and is for its starter
the process itself: it passes on file descriptors, arguments, working folder and environment, later its signals, and
ends with the same exit code. What it does not know it hands to the real interpreter. Tests for clusters start
real interpreters only."""

import atexit
import ctypes
import functools
import gc
import io
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from suite.report import REAL_PYTHON

CLIENT = Path(__file__).with_name("warm_python.py")
FRESH_SEED = torch.initial_seed()  # of a process that has just started
MAX_REQUEST = 1 << 20
STOP_ON_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG

Request = dict[str, Any]


class WarmProcess:
    """The process that forks, seen from pytest's."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardwise-tests-"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.folder / "socket"))
        listener.listen(64)

        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _die_with_parent(parent)
            serve(listener)
        listener.close()

        self.program = self.folder / "python"
        self.program.write_text(f"#!{REAL_PYTHON} -IS\n{CLIENT.read_text()}")
        self.program.chmod(0o755)
        (self.folder / "real").symlink_to(REAL_PYTHON)
        sys.executable = str(self.program)

    def close(self) -> None:
        sys.executable = REAL_PYTHON
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start the commands of tests in interpreters of their own")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: no collection of garbage looks at it again, here or in a process that is forked."""
    gc.freeze()
    gc.enable()
    if runs_tests(session.config) and not session.config.getoption("cold") and not torch.cuda.is_available():
        # With a GPU, this process has asked for it, and what is forked from such a process cannot use it.
        session.config.stash[WARM] = WarmProcess()


def runs_tests(config: pytest.Config) -> bool:
    """Whether this process runs tests itself: not one that only lists them, or that hands them to others."""
    has_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    return not has_workers and not config.getoption("collectonly") and config.getoption("mutants") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Gives tests for clusters real interpreters: their commands run in network namespaces, under limits and daemons of
    their own, and a process that is forked from here would be outside of them."""
    is_of_cluster = item.get_closest_marker("cluster") is not None
    if WARM in item.config.stash:
        sys.executable = REAL_PYTHON if is_of_cluster else str(item.config.stash[WARM].program)
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    if WARM in config.stash:
        config.stash[WARM].close()


WARM = pytest.StashKey[WarmProcess]()


def serve(listener: socket.socket) -> NoReturn:
    """Forks a process for each connection, and tells there how it ended. Ends by a signal only."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a fork server passes those that it gets on to its parent
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    connections: dict[socket.socket, int] = {}
    while True:
        ready = select.select([listener, wakeup_read, *connections], [], [])[0]
        if listener in ready:
            connection = listener.accept()[0]
            pid = fork_process(connection, listener, [*connections, wakeup_read, wakeup_write])
            if pid:
                connections[connection] = pid
        for connection in [one for one in ready if one in connections]:
            pass_signal(connection, connections)
        if wakeup_read in ready:
            os.read(wakeup_read, 1 << 12)
            report_ended(connections)


def pass_signal(connection: socket.socket, connections: dict[socket.socket, int]) -> None:
    """Sends a process the signal that its client got, or ends it if the client is gone."""
    try:
        message = connection.recv(16)
    except OSError:
        message = b""
    number = int(message) if message else signal.SIGKILL
    with suppress(ProcessLookupError):
        os.kill(connections[connection], number)
    if not message:
        os.waitpid(connections.pop(connection), 0)
        connection.close()


def report_ended(connections: dict[socket.socket, int]) -> None:
    for connection, pid in list(connections.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            continue
        with suppress(OSError):  # the client has been killed meanwhile
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        del connections[connection]
        connection.close()


def fork_process(connection: socket.socket, listener: socket.socket, others: list[Any]) -> int:
    """Forks a process that does what a client asks for. Returns its number, 0 if the client is gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 64)
    if not data:
        connection.close()
        return 0
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid

    try:
        _die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for one in others:
            os.close(one if isinstance(one, int) else one.fileno())
        os.close(listener.fileno())
        os.close(connection.fileno())
        become(json.loads(data), descriptors)
    except BaseException:  # noqa: BLE001 - nobody above reports it
        traceback.print_exc()
    finally:
        os._exit(1)


def become(request: Request, descriptors: list[int]) -> NoReturn:
    """Makes this process what a new interpreter would be with such a command line, and runs it to its end."""
    place_descriptors(dict(zip(request["descriptors"], descriptors, strict=True)))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    sys.stdin, sys.stdout, sys.stderr = (_standard_stream(number) for number in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.excepthook = sys.__excepthook__
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", message=".* found in sys.modules", category=RuntimeWarning)
    atexit._clear()
    random.seed()
    np.random.seed()
    torch.manual_seed(FRESH_SEED)
    forget_results()

    code = run(request["arguments"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)


def forget_results() -> None:
    """Empties the caches of the package's functions: collecting tests may have filled them, for example with the model
    families that are installed, of which a command on another path finds others."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "shardwise":
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def place_descriptors(places: dict[int, int]) -> None:
    """Gives descriptors that came over a socket the numbers that the client had for them."""
    highest = max(*places, *places.values()) + 1
    moved = {number: os.dup2(current, highest + number, inheritable=False) for number, current in places.items()}
    for current in places.values():
        os.close(current)
    for number, current in moved.items():
        os.dup2(current, number, inheritable=True)
        os.close(current)


def run(arguments: list[str]) -> int:
    """Runs `-m module ...` or `script ...`. Returns the exit code."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    first = os.getcwd() if is_module else str(Path(arguments[0]).parent.absolute())
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *own, *(path for path in sys.path if not _is_of_tests(path) and path not in own)]
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return _exit_code(end)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _is_of_tests(path: str) -> bool:
    return Path(path).is_relative_to(Path(__file__).parent.parent)


def _standard_stream(number: int) -> Any:
    try:
        is_terminal = os.isatty(number)
        raw = open(number, "rb" if number == 0 else "wb", buffering=-1, closefd=False)  # noqa: SIM115
    except OSError:
        return None  # it is closed
    errors = "backslashreplace" if number == 2 else "strict"
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    return io.TextIOWrapper(
        raw, encoding, errors, line_buffering=number == 2 or is_terminal,
        write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
    )  # fmt: skip


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(STOP_ON_DEATH_OF_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
