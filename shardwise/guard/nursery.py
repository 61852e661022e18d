"""A process that has PyTorch imported and forks workers from itself when it is told to.

Importing takes seconds, a fork none: the workers of a world start together and, after a fault, again at once. It has
one thread and no device, so that what it forks is whole. Python's own fork server is not used: it would import the
caller's main program again, and does not say at once how a worker ended.

Run: python -m shardwise.guard.nursery SOCKET MODULE ... with modules to import. It reads one order per line:

    {"fork": "world 1", "ranks": [0, 1], "size": 2, "entry": "module:function", "arguments": [...], "held": false, ...}
    {"release": "world 2"}                          workers that were held, as stand-bys, go on
    {"kill": "world 1", "number": 9, "ranks": [0]}  a signal
    {"grace": 0}                                    seconds that workers have when their caller is gone
    {"forget": "/dev/shm/..."}                      the snapshots of a run, see `shardwise.guard.memory`

and says `{"world": "world 1", "pids": {"0": 7, "1": 8}}`, `{"world": "world 1", "rank": 0, "stopped": true}` or false,
and `{"world": "world 1", "rank": 0, "code": -9}` of a worker that ended. It ends when its caller does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

GRACE = 60.0  # seconds that workers have to save when their launcher was killed outright
HELD = "--held="  # before the number of the file that a stand-by reads from
MEMORY = "--memory="  # before the folder of snapshots
Entry = Callable[[list[str]], None]
Word = dict[str, Any]


class Lines:
    """JSON objects, a line each, over a socket."""

    def __init__(self, link: socket.socket):
        self.link, self._text = link, b""

    def fileno(self) -> int:
        return self.link.fileno()

    def say(self, word: Word) -> None:
        with suppress(OSError):  # one that is gone is found when it is listened to
            self.link.sendall(json.dumps(word).encode() + b"\n")

    def heard(self) -> list[Word] | None:
        """What has come, after a wait for the first of it; None once the other end is gone."""
        try:
            more = self.link.recv(1 << 16)
        except OSError:
            return None
        if not more:
            return None
        *lines, self._text = (self._text + more).split(b"\n")
        return [json.loads(line) for line in lines]


class Nursery(Lines):
    """The caller's end."""

    def __init__(self, *modules: str):
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        if all(module in sys.modules for module in modules) and _single():
            self.pid = os.fork()  # all is imported here already, and nothing computed yet
            if not self.pid:
                ours.close()
                _live(theirs)
        else:
            self.pid = subprocess.Popen(
                [sys.executable, "-u", "-m", "shardwise.guard.nursery", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()], env={"OMP_NUM_THREADS": "1", **os.environ},
            ).pid  # fmt: skip
        theirs.close()
        super().__init__(ours)
        self.used = False

    def say(self, word: Word) -> None:
        self.used = True
        super().say(word)

    def close(self) -> None:
        self.link.close()
        if not self.used:
            os.kill(self.pid, signal.SIGKILL)  # perhaps in the middle of imports
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _single() -> bool:
    """Whether this process has one thread, also counting those of libraries: then what is forked is whole."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


@dataclass
class _World:
    pids: dict[int, int]
    """By rank, of those that live."""
    release: Callable[[], None]


def serve(link: socket.socket) -> None:
    """The nursery itself: forks, and tells who ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    lines, worlds, memories, grace = Lines(link), dict[str, _World](), set[str](), GRACE
    while True:
        ready = select.select([link.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 12)
            for name, world in worlds.items():
                for word in _changes(world):
                    lines.say({"world": name, **word})
        if link.fileno() in ready:
            orders = lines.heard()
            if orders is None:
                break
            for order in orders:
                memories.add(order.get("memory", ""))
                grace = order.get("grace", grace)
                _obey(order, worlds, lines)
    # The caller is gone: workers save and end, those that were held at once. Those that do not end with us.
    _signal([pid for world in worlds.values() for pid in world.pids.values()], signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(world.pids for world in worlds.values()) and time.monotonic() < deadline:
        for world in worlds.values():
            list(_changes(world))
        time.sleep(0.05)
    for memory in memories:
        _forget(memory)


def _obey(order: Word, worlds: dict[str, _World], lines: Lines) -> None:
    if "fork" in order:
        name = order["fork"]
        worlds[name] = world = _fork_all(order, lines)
        lines.say({"world": name, "pids": world.pids})
    elif "forget" in order:
        _forget(order["forget"])
    elif "release" in order:
        worlds[order["release"]].release()
    elif "kill" in order:
        pids = worlds[order["kill"]].pids if order["kill"] in worlds else {}
        _signal([pid for rank, pid in pids.items() if rank in order.get("ranks", pids)], order["number"])


def _forget(memory: str) -> None:
    if memory:
        shutil.rmtree(memory, ignore_errors=True)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:  # not waited for yet, so that no other process has its number
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _changes(world: _World) -> Iterable[Word]:
    """What happened to workers since the last look."""
    for rank, pid in list(world.pids.items()):
        while True:
            seen, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not seen:
                break
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                yield {"rank": rank, "stopped": os.WIFSTOPPED(status)}
                continue
            del world.pids[rank]
            yield {"rank": rank, "code": os.waitstatus_to_exitcode(status)}
            break


def _fork_all(order: Word, lines: Lines) -> _World:
    read, write = os.pipe() if order.get("held") else (-1, -1)
    arguments = [*order["arguments"], f"{MEMORY}{order.get('memory', '')}"]
    arguments += [f"{HELD}{read}"] if read >= 0 else []

    def release() -> None:
        os.write(write, b"." * len(order["ranks"]))

    pids = {}
    for place, rank in enumerate(order["ranks"]):
        pids[rank] = _fork(lines, rank, place, order, arguments, write)
    if read >= 0:
        os.close(read)
    return _World(pids, release)


def _fork(lines: Lines, rank: int, place: int, order: Word, arguments: list[str], write: int) -> int:
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
        lines.link.close()
        if write >= 0:
            os.close(write)
        end_with_parent()
        slots = order.get("slots") or list(range(len(order["ranks"])))
        names = {"RANK": rank, "LOCAL_RANK": slots[place], "WORLD_SIZE": order["size"], "LOCAL_WORLD_SIZE": len(slots)}
        os.environ.update({name: str(value) for name, value in names.items()} | order.get("environment", {}))
        find(order["entry"])(arguments)
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - nobody else is left to tell it
        traceback.print_exc()
    finally:
        os._exit(code)  # what waits for neighbours, or belongs to the nursery, is not torn down


def wait_held(arguments: list[str]) -> Callable[[], None] | None:
    """Of a worker that is held: waits until it is released. None for all others."""
    for argument in arguments:
        if argument.startswith(HELD):
            file = int(argument.removeprefix(HELD))

            def wait() -> None:
                if not os.read(file, 1):
                    os._exit(0)  # never needed
                os.close(file)

            return wait
    return None


def given_memory(arguments: list[str]) -> str:
    return next((one.removeprefix(MEMORY) for one in arguments if one.startswith(MEMORY)), "")


def end_with_parent() -> None:
    """No worker outlives a parent that is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def find(entry: str) -> Entry:
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


def _live(link: socket.socket) -> None:
    """All that a nursery does; it does not return."""
    for given in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group; the caller decides
        signal.signal(given, signal.SIG_IGN)
    try:
        serve(link)
    except BaseException:  # noqa: BLE001 - nobody else is left to tell it
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    for given in (signal.SIGINT, signal.SIGTERM):
        signal.signal(given, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _live(socket.socket(fileno=int(sys.argv[1])))
