"""The owner of a run folder: one launcher at a time trains in it, named in `owner.json`.

It is created exclusively, which needs no locks and works on network file systems, and touched every BEAT_SECONDS.
On the owner's machine (same boot, process namespace and user), the owner lives as long as its launcher or its fork
server, which ends after its workers: a process with this id that began at this time. From another machine, it lives if
the file is touched while we watch, so no clocks are compared (docs/how-to/resume-elsewhere.md)."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, RunError
from shardwise.files import os_errors_as, parse_json

BEAT_SECONDS, STALE_SECONDS = 2.0, 30.0
EXIT_SECONDS = 10.0  # time that workers of a killed launcher get to end
DAMAGED_SECONDS = 1.0  # for a file that cannot be read: it may be half written
Owner = dict[str, Any]
Say = Callable[[str], None]


@contextmanager
def own_run(run: Path, say: Say, fork_server: Any = None) -> Iterator[None]:
    """Owns a run folder; raises JobError if another launcher does. The fork server touches the file, else a thread."""
    path, pids = run / "owner.json", [os.getpid(), *([] if fork_server is None else [fork_server.pid])]
    owner: Owner = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "machine": _machine(), "pid": pids[0],
                    "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                    "processes": [[p, _began(p)] for p in pids]}  # fmt: skip
    with os_errors_as(JobError, f"the run folder {run} cannot be written"):
        _acquire(path, owner, say)
    ended = threading.Event()
    if fork_server is not None:
        fork_server.send({"own": str(path), "token": owner["token"]})
    else:
        threading.Thread(target=_keep_in_thread, args=(path, owner["token"], ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if not keep(path, owner["token"]):
            name = owner_name(read_owner(path))
            raise RunError(f"{run} has been taken over by {name}, so this launcher has ended.") from None
        with suppress(OSError):
            path.unlink()


def keep(path: Path, token: str) -> bool:
    """Touches the owner's file. Returns False if the folder has another owner."""
    with suppress(OSError):  # a file system that does not answer
        if read_owner(path).get("token", token) != token:
            return False
        os.utime(path)
    return True


def _keep_in_thread(path: Path, token: str, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        if not keep(path, token):
            os._exit(1)  # under torchrun or Slurm this process is a rank, which must not write any more


def _acquire(path: Path, owner: Owner, say: Say) -> None:
    while not _create(path, owner):
        other = read_owner(path)
        if not is_dead(path.parent, other, lambda: _touched(path), say, STALE_SECONDS):
            raise JobError(f"{path.parent} is being trained by {owner_name(other)}; resume when it has ended.")
        claim = path.with_name(f"owner.{other.get('token', 'damaged')}.claim")
        if _create(claim, owner):  # of several launchers that find the owner dead, one removes it
            if read_owner(path) == other:
                path.unlink(missing_ok=True)
            claim.unlink()
        elif is_dead(path.parent, read_owner(claim), partial(_touched, claim), say, STALE_SECONDS):
            claim.unlink(missing_ok=True)


def _create(path: Path, owner: Owner) -> bool:
    """Creates a file unless it exists. A reader that finds it half written takes no decision on it."""
    with suppress(FileExistsError), path.open("x") as file:
        file.write(json.dumps(owner))
        return True
    return False


def read_owner(path: Path | bytes) -> Owner:
    """Returns the owner in a file, or in the content of one; empty if there is none or it is damaged."""
    with suppress(FileNotFoundError, ValueError, TypeError, KeyError, OverflowError):
        owner = parse_json(path.read_bytes() if isinstance(path, Path) else path)
        pairs = [[int(pid), int(began)] for pid, began in owner["processes"]]
        words = {key: str(owner[key]) for key in ("token", "host", "machine", "time")}
        return {**words, "pid": int(owner["pid"]), "processes": pairs} if words["token"].isalnum() else {}
    return {}


def is_dead(place: Any, owner: Owner, touched: Callable[[], int], say: Say, patience: float) -> bool:
    """Waits until the owner has ended; returns False as soon as it shows to be alive. `touched` returns another number
    after each sign of life of an owner elsewhere, and 0 once it has ended."""
    is_here, first = bool(owner) and owner["machine"] == _machine(), touched()
    deadline = time.monotonic() + (EXIT_SECONDS if is_here else patience if owner else DAMAGED_SECONDS)
    if owner and not is_here:
        say(f"{place} belongs to {owner_name(owner)}; waiting {patience:g} s for a sign of life")
    while time.monotonic() < deadline:
        alive = [pid for pid, began in owner["processes"] if _began(pid) == began] if is_here else []
        if is_here and (not alive or owner["pid"] in alive):
            return not alive
        if not is_here and (now := touched()) != first:
            return not now
        time.sleep(0.05 if is_here else 0.5)
    return not is_here


def _touched(path: Path) -> int:
    with suppress(FileNotFoundError), path.open("rb") as file:  # opened, so that a network file system asks its server
        return os.fstat(file.fileno()).st_mtime_ns
    return 0


def _machine() -> str:
    """Returns a name of the machine that is the same for all processes that can look each other up."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return uuid.uuid4().hex  # without /proc, owners are judged by their files


def _began(pid: int) -> int:
    """Returns when a process began, in ticks since boot; -1 if it has ended, or has been killed and is about to."""
    with suppress(OSError, ValueError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        is_ending = state in "ZX" or int(fields[5]) & 0x4 or int(fields[27]) & 0x100  # PF_EXITING; pending SIGKILL
        return -1 if is_ending else int(fields[18])
    return -1


def owner_name(owner: Owner) -> str:
    return f"process {owner['pid']} on {owner['host']} since {owner['time']}" if owner else "another process"
