"""A process that imports PyTorch once and forks workers on request.

Importing takes seconds and forking milliseconds, so workers start, and restart after a fault, almost at once. The
server is single-threaded and touches no device, which makes forking safe. Python's own fork server would import the
caller's main module again, and it reports the exit of a worker late. Run as python -m shardwise.workers.fork_server
SOCKET MODULE..., with modules to import. It reads one command per line:

    {"fork": "group-1", "ranks": [0, 1], "size": 2, "entry": "module:function", "arguments": [...], ...}
    {"release": "group-2"}                              lets standby workers continue
    {"kill": "group-1", "signal": 9, "ranks": [0]}      sends a signal
    {"own": "RUN/owner.json", "token": "..."}           keeps the run folder, see `shardwise.workers.run_owner`
    {"remove_snapshots": "0123456789ab-0"}              deletes a run's snapshots, see `shardwise.workers.snapshots`

and reports `{"group": "group-1", "pids": {"0": 7, "1": 8}}`, `{"group": "group-1", "rank": 0, "stopped": true}` (false
when continued) and `{"group": "group-1", "rank": 0, "code": -9}` (exit code). All end with the launcher."""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import quick_import
from shardwise.console import name_process
from shardwise.workers.run_owner import BEAT_SECONDS, keep

SHARED_MEMORY = Path("/dev/shm")
ENTRY_POINTS = ("shardwise.launch.worker:main", "shardwise.chaos.faulty_worker:main")  # that other nodes may name
Message = dict[str, Any]


class MessageChannel:
    """Sends and receives JSON objects, one per line, over a socket."""

    def __init__(self, connection: socket.socket):
        self.connection, self._buffer = connection, b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        with suppress(OSError):  # `receive` reports a lost peer
            self.connection.sendall(self.encode(message) + b"\n")

    def receive(self) -> list[Message] | None:
        """Blocks until data arrives and returns the complete messages; None once the peer is gone."""
        chunk = b""
        with suppress(OSError):
            chunk = self.connection.recv(1 << 16)
        if not chunk:
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [message for line in lines if (message := self.decode(line)) is not None]

    def encode(self, message: Message) -> bytes:
        return json.dumps(message).encode()

    def decode(self, line: bytes) -> Message | None:
        return json.loads(line)


class ForkServer(MessageChannel):
    """Starts a fork server with `modules` imported, and is the launcher's end of its socket."""

    def __init__(self, *modules: str):
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        has_one_thread = len(os.listdir("/proc/self/task")) == 1  # native ones included
        if all(module in sys.modules for module in modules) and has_one_thread:
            self.pid = os.fork()  # everything is imported here already, and no other thread holds a lock
            if not self.pid:
                ours.close()
                _serve_and_exit(theirs)
        else:
            command = [sys.executable, "-u", "-m", "shardwise.workers.fork_server", str(theirs.fileno()), *modules]
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            self.pid = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment).pid
        theirs.close()
        super().__init__(ours)
        self.has_workers = False

    def send(self, message: Message) -> None:
        self.has_workers |= "fork" in message
        super().send(message)

    def close(self) -> None:
        self.connection.close()
        if not self.has_workers:
            os.kill(self.pid, signal.SIGKILL)  # it may still be importing
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@dataclass
class _ForkedGroup:
    pids: dict[int, int]  # pids of live workers, by rank
    release: Callable[[], None]


def serve(connection: socket.socket) -> None:
    """Runs the fork server: executes commands and reports workers that exit, stop or continue."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    channel, groups = MessageChannel(connection), dict[str, _ForkedGroup]()
    snapshot_keys, owned, launcher = set[str](), ("", ""), os.getppid()
    signal_parent_death(signal.SIGCHLD)  # wakes the loop; the socket stays open if the launcher has other children
    last_beat = time.monotonic()
    while os.getppid() == launcher:
        ready = select.select([connection.fileno(), wakeup_read], [], [], BEAT_SECONDS)[0]
        if owned[0] and time.monotonic() - last_beat >= BEAT_SECONDS:
            last_beat = time.monotonic()
            if not keep(Path(owned[0]), owned[1]):
                break
        if wakeup_read in ready:
            os.read(wakeup_read, 1 << 12)
            for name, group in groups.items():
                for message in _poll_workers(group):
                    channel.send({"group": name, **message})
        if connection.fileno() in ready:
            if (commands := channel.receive()) is None:
                break
            for command in commands:
                snapshot_keys.add(command.get("snapshots", ""))
                owned = (command["own"], command["token"]) if "own" in command else owned
                _handle_command(command, groups, channel)
    # The launcher is gone, or has lost the run folder: nobody may write there any more.
    pids = [pid for group in groups.values() for pid in group.pids.values()]
    signal_all(pids, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    for key in filter(None, snapshot_keys):
        remove_snapshots(key)


def _handle_command(command: Message, groups: dict[str, _ForkedGroup], channel: MessageChannel) -> None:
    if "fork" in command:
        groups[command["fork"]] = group = _fork_workers(command, channel)
        channel.send({"group": command["fork"], "pids": group.pids})
    elif "remove_snapshots" in command:
        remove_snapshots(command["remove_snapshots"])
    elif command.get("release") in groups:
        groups[command["release"]].release()
    elif "kill" in command:
        pids = groups[command["kill"]].pids if command["kill"] in groups else {}
        signal_all([pid for rank, pid in pids.items() if rank in command.get("ranks", pids)], command["signal"])


def snapshot_folders(key: str) -> list[Path]:
    """Returns our folders with the snapshots of a run on this node; those of other users, and links, are not ours."""
    found = []
    for path in SHARED_MEMORY.glob(f"shardwise-{key}-*"):
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
                found.append(path)
    return found


def remove_snapshots(key: str) -> None:
    for folder in snapshot_folders(key):
        shutil.rmtree(folder, ignore_errors=True)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:  # of our workers: not reaped yet, so the pid cannot have been reused
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _poll_workers(group: _ForkedGroup) -> Iterable[Message]:
    """Yields the state changes of a group's workers since the last call."""
    for rank, pid in list(group.pids.items()):
        while rank in group.pids and (change := os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
            if os.WIFSTOPPED(change[1]) or os.WIFCONTINUED(change[1]):
                yield {"rank": rank, "stopped": os.WIFSTOPPED(change[1])}
            else:
                del group.pids[rank]
                yield {"rank": rank, "code": os.waitstatus_to_exitcode(change[1])}


def _fork_workers(command: Message, channel: MessageChannel) -> _ForkedGroup:
    read, write = os.pipe() if command.get("standby") else (-1, -1)
    key, folder = command["snapshots"], ""
    if SHARED_MEMORY.is_dir():  # a random name and mode 700, so that no other user can put a link in its place
        folder = next(map(str, snapshot_folders(key)), "") or tempfile.mkdtemp("", f"shardwise-{key}-", SHARED_MEMORY)

    def release() -> None:
        os.write(write, b"." * len(command["ranks"]))

    def wait() -> None:
        if not os.read(read, 1):
            os._exit(0)  # the pipe closed: this standby was never needed
        os.close(read)
        _name_worker("rank", command)

    options, pids = {"snapshots": folder, "standby_gate": wait if read >= 0 else None}, {}
    for local_index, rank in enumerate(command["ranks"]):
        pids[rank] = _fork_worker(channel, local_index, command, options, write)
    if read >= 0:
        os.close(read)
    return _ForkedGroup(pids, release)


def _fork_worker(channel: MessageChannel, local_index: int, command: Message, options: Message, write: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
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
        signal_parent_death(signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)
        slots = command.get("slots") or list(range(len(command["ranks"])))
        world = {"RANK": command["ranks"][local_index], "LOCAL_RANK": slots[local_index]}
        world |= {"WORLD_SIZE": command["size"], "LOCAL_WORLD_SIZE": len(slots)}
        os.environ.update({name: str(value) for name, value in world.items()} | command.get("environment", {}))
        _name_worker("standby of rank" if command.get("standby") else "rank", command)
        module, _, name = command["entry"].partition(":")
        getattr(quick_import(module), name)(command["arguments"], **options)
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - nobody above reports it
        traceback.print_exc()
    finally:
        os._exit(code)  # skip the teardown: it would wait for peers, or touch what belongs to the fork server


def _name_worker(role: str, command: Message) -> None:
    name_process(f"shardwise: {role} {os.environ['RANK']} of {command['size']}, {command['arguments'][0]}")


def signal_parent_death(number: int) -> None:
    """Asks the kernel for a signal when the parent dies."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def _serve_and_exit(connection: socket.socket) -> None:
    """Runs the fork server and exits; never returns."""
    _pass_on_stop_signals()
    try:
        serve(connection)
    except BaseException:  # noqa: BLE001 - nobody above reports it
        traceback.print_exc()
    finally:
        os._exit(0)


def _pass_on_stop_signals() -> None:
    """The launcher decides. A terminal sends it Ctrl-C too; SIGTERM may be meant for this process alone."""
    launcher = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal_all([launcher] * (os.getppid() == launcher), number))
    name_process(f"shardwise: fork server of {launcher}")


if __name__ == "__main__":
    _pass_on_stop_signals()
    for module in sys.argv[2:]:
        quick_import(module)
    _serve_and_exit(socket.socket(fileno=int(sys.argv[1])))
