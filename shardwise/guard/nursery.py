"""A process that has PyTorch imported and forks workers from itself when it is told to.

Importing takes seconds, a fork none: the workers of a world start together and, after a fault, again at once. It has
one thread and no device, so that what it forks is whole. Python's own fork server is not used: it would import the
caller's main program again, and does not say at once how a worker ended.

Run: python -m shardwise.guard.nursery SOCKET MODULE ... with modules to import. It reads one order per line,
`{"entry": "module:function", "world": 2, "arguments": [...]}`, and answers `{"pids": [...]}`, then
`{"pid": 7, "code": -9}` for each worker that ended. It ends when its caller does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

GRACE = 60.0  # seconds that workers have to save when their launcher was killed outright
Entry = Callable[[list[str]], None]


class Nursery:
    """The caller's end."""

    def __init__(self, *modules: str):
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shardwise.guard.nursery", str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()], env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
        theirs.close()
        self._socket, self._text = ours, b""

    def fork(self, world: int, entry: str, arguments: list[str]) -> None:
        """Starts a world whose workers call `entry`, a `module:function`, with these arguments."""
        _say(self._socket, {"world": world, "entry": entry, "arguments": arguments})

    def heard(self, seconds: float) -> list[dict[str, Any]] | None:
        """What it has said, after a wait of at most so long for the first word; None once it is gone."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return []
        more = self._socket.recv(1 << 16)
        if not more:
            return None
        *lines, self._text = (self._text + more).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


def serve(link: socket.socket) -> None:
    """The nursery itself: forks, and tells who ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    text = b""
    children: set[int] = set()
    while True:
        ready = select.select([link.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 12)
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.discard(pid)
                    _say(link, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if link.fileno() in ready:
            more = link.recv(1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pids = [_fork(link, rank, order) for rank in range(order["world"])]
                children.update(pids)
                _say(link, {"pids": pids})
    # The caller is gone: workers save and end. Those that do not end with us.
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while children and time.monotonic() < deadline:
        children = {pid for pid in children if not os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.05)


def _say(link: socket.socket, word: dict[str, Any]) -> None:
    link.sendall(json.dumps(word).encode() + b"\n")


def _fork(link: socket.socket, rank: int, order: dict[str, Any]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        link.close()
        end_with_parent()
        world = str(order["world"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        find(order["entry"])(order["arguments"])
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - nobody else is left to tell it
        traceback.print_exc()
    finally:
        os._exit(code)  # what waits for neighbours, or belongs to the nursery, is not torn down


def end_with_parent() -> None:
    """No worker outlives a parent that is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def find(entry: str) -> Entry:
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


if __name__ == "__main__":
    for given in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group; the caller decides
        signal.signal(given, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
