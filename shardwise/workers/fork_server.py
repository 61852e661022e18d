"""A process that has PyTorch imported and forks workers from itself when it is told to.

Importing takes seconds, a fork none: the workers of a world start together and, after a fault, again at once. It has
one thread and no device, so that what it forks is whole. Python's own fork server is not used: it would import the
caller's main program again, and does not say at once how a worker ended.

Run: python -m shardwise.workers.fork_server SOCKET MODULE ... with modules to import. It reads one order per line:

    {"fork": "world 1", "ranks": [0, 1], "size": 2, "entry": "module:function", "arguments": [...], "held": false, ...}
    {"release": "world 2"}                          workers that were held, as stand-bys, go on
    {"kill": "world 1", "number": 9, "ranks": [0]}  a signal
    {"grace": 0}                                    seconds that workers have when their caller is gone
    {"forget": "/dev/shm/..."}                      the snapshots of a run, see `shardwise.workers.snapshots`

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

GRACE_SECONDS = 60.0  # seconds that workers have to save when their launcher was killed outright
STANDBY_FLAG = "--standby-fd="  # before the number of the file that a stand-by reads from
SNAPSHOT_FLAG = "--snapshots="  # before the folder of snapshots
EntryPoint = Callable[[list[str]], None]
Message = dict[str, Any]


class MessageChannel:
    """JSON objects, a line each, over a socket."""

    def __init__(self, connection: socket.socket):
        self.connection, self._buffer = connection, b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        with suppress(OSError):  # one that is gone is found when it is listened to
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come, after a wait for the first of it; None once the other end is gone."""
        try:
            more = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not more:
            return None
        *lines, self._buffer = (self._buffer + more).split(b"\n")
        return [json.loads(line) for line in lines]


class ForkServer(MessageChannel):
    """The caller's end."""

    def __init__(self, *modules: str):
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        if all(module in sys.modules for module in modules) and _is_single_threaded():
            self.pid = os.fork()  # all is imported here already, and nothing computed yet
            if not self.pid:
                ours.close()
                _serve_and_exit(theirs)
        else:
            self.pid = subprocess.Popen(
                [sys.executable, "-u", "-m", "shardwise.workers.fork_server", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()], env={"OMP_NUM_THREADS": "1", **os.environ},
            ).pid  # fmt: skip
        theirs.close()
        super().__init__(ours)
        self.has_sent = False

    def send(self, message: Message) -> None:
        self.has_sent = True
        super().send(message)

    def close(self) -> None:
        self.connection.close()
        if not self.has_sent:
            os.kill(self.pid, signal.SIGKILL)  # perhaps in the middle of imports
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _is_single_threaded() -> bool:
    """Whether this process has one thread, also counting those of libraries: then what is forked is whole."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


@dataclass
class _ForkedGroup:
    pids: dict[int, int]
    """By rank, of those that live."""
    release: Callable[[], None]


def serve(connection: socket.socket) -> None:
    """The nursery itself: forks, and tells who ended."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    channel, worlds, snapshot_folders, grace = (
        MessageChannel(connection),
        dict[str, _ForkedGroup](),
        set[str](),
        GRACE_SECONDS,
    )
    while True:
        ready = select.select([connection.fileno(), wakeup_read], [], [])[0]
        if wakeup_read in ready:
            os.read(wakeup_read, 1 << 12)
            for name, world in worlds.items():
                for message in _poll_workers(world):
                    channel.send({"world": name, **message})
        if connection.fileno() in ready:
            commands = channel.receive()
            if commands is None:
                break
            for command in commands:
                snapshot_folders.add(command.get("memory", ""))
                grace = command.get("grace", grace)
                _handle_command(command, worlds, channel)
    # The caller is gone: workers save and end, those that were held at once. Those that do not end with us.
    _signal([pid for world in worlds.values() for pid in world.pids.values()], signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(world.pids for world in worlds.values()) and time.monotonic() < deadline:
        for world in worlds.values():
            list(_poll_workers(world))
        time.sleep(0.05)
    for snapshot_folder in snapshot_folders:
        _remove_snapshots(snapshot_folder)


def _handle_command(command: Message, worlds: dict[str, _ForkedGroup], channel: MessageChannel) -> None:
    if "fork" in command:
        name = command["fork"]
        worlds[name] = world = _fork_workers(command, channel)
        channel.send({"world": name, "pids": world.pids})
    elif "remove_snapshots" in command:
        _remove_snapshots(command["remove_snapshots"])
    elif "release" in command:
        worlds[command["release"]].release()
    elif "kill" in command:
        pids = worlds[command["kill"]].pids if command["kill"] in worlds else {}
        _signal([pid for rank, pid in pids.items() if rank in command.get("ranks", pids)], command["signal"])


def _remove_snapshots(snapshot_folder: str) -> None:
    if snapshot_folder:
        shutil.rmtree(snapshot_folder, ignore_errors=True)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:  # not waited for yet, so that no other process has its number
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _poll_workers(world: _ForkedGroup) -> Iterable[Message]:
    """What happened to workers since the last look."""
    for rank, pid in list(world.pids.items()):
        while True:
            changed_pid, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not changed_pid:
                break
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                yield {"rank": rank, "stopped": os.WIFSTOPPED(status)}
                continue
            del world.pids[rank]
            yield {"rank": rank, "code": os.waitstatus_to_exitcode(status)}
            break


def _fork_workers(command: Message, channel: MessageChannel) -> _ForkedGroup:
    read, write = os.pipe() if command.get("standby") else (-1, -1)
    arguments = [*command["arguments"], f"{SNAPSHOT_FLAG}{command.get('memory', '')}"]
    arguments += [f"{STANDBY_FLAG}{read}"] if read >= 0 else []

    def release() -> None:
        os.write(write, b"." * len(command["ranks"]))

    pids = {}
    for local_index, rank in enumerate(command["ranks"]):
        pids[rank] = _fork_worker(channel, rank, local_index, command, arguments, write)
    if read >= 0:
        os.close(read)
    return _ForkedGroup(pids, release)


def _fork_worker(
    channel: MessageChannel, rank: int, local_index: int, command: Message, arguments: list[str], write: int
) -> int:
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
        channel.connection.close()
        if write >= 0:
            os.close(write)
        die_with_parent()
        slots = command.get("slots") or list(range(len(command["ranks"])))
        names = {
            "RANK": rank,
            "LOCAL_RANK": slots[local_index],
            "WORLD_SIZE": command["size"],
            "LOCAL_WORLD_SIZE": len(slots),
        }
        os.environ.update({name: str(value) for name, value in names.items()} | command.get("environment", {}))
        load_entry_point(command["entry"])(arguments)
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - nobody else is left to tell it
        traceback.print_exc()
    finally:
        os._exit(code)  # what waits for neighbours, or belongs to the nursery, is not torn down


def standby_wait(arguments: list[str]) -> Callable[[], None] | None:
    """Of a worker that is held: waits until it is released. None for all others."""
    for argument in arguments:
        if argument.startswith(STANDBY_FLAG):
            file = int(argument.removeprefix(STANDBY_FLAG))

            def wait() -> None:
                if not os.read(file, 1):
                    os._exit(0)  # never needed
                os.close(file)

            return wait
    return None


def snapshot_folder_argument(arguments: list[str]) -> str:
    return next((one.removeprefix(SNAPSHOT_FLAG) for one in arguments if one.startswith(SNAPSHOT_FLAG)), "")


def die_with_parent() -> None:
    """No worker outlives a parent that is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def load_entry_point(entry: str) -> EntryPoint:
    module, _, name = entry.partition(":")
    function: EntryPoint = getattr(importlib.import_module(module), name)
    return function


def _serve_and_exit(connection: socket.socket) -> None:
    """All that a nursery does; it does not return."""
    for given in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group; the caller decides
        signal.signal(given, signal.SIG_IGN)
    try:
        serve(connection)
    except BaseException:  # noqa: BLE001 - nobody else is left to tell it
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    for given in (signal.SIGINT, signal.SIGTERM):
        signal.signal(given, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _serve_and_exit(socket.socket(fileno=int(sys.argv[1])))
