"""Signs of life: each rank keeps a small file that says where it is, and others read it without asking the rank.

    heartbeats/rank-3.json    process, step, phase and since when; rewritten in place, also five times a second by a thread
    heartbeats/rank-3.stack   on SIGUSR1: the Python stacks of all threads, written by C code that needs no interpreter
    heartbeats/rank-3.collectives   then, by the thread: the collectives of late as PyTorch's flight recorder has them, and the
                         groups that they run in; written by a rank that fails, too

The files live in the run folder, so that a rank that was killed has left its last words there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

INTERVAL = 0.2
POLL_INTERVAL = 0.05  # seconds between looks whether somebody asked
RECORD_BYTES = 256  # bytes of a beat: rewritten in place, it has to have one length


class Heartbeat:
    """This rank's files. `mark` is called by the thread that trains, wherever it comes to something new."""

    def __init__(self, run: Path, rank: int):
        folder = heartbeat_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.collectives_path = rank, folder / f"rank-{rank}.collectives"
        self._phase, self._step, self._since = "starting", 0, time.time()
        self._identity = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._lock = threading.Lock()
        self._file = os.open(folder / f"rank-{rank}.json", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self._stack = open(folder / f"rank-{rank}.stack", "w")  # noqa: SIM115 - for as long as the process lives
        self.collectives_path.unlink(missing_ok=True)
        faulthandler.register(signal.SIGUSR1, self._stack)
        faulthandler.enable(self._stack)  # of a crash in C code, too
        self._write()
        threading.Thread(target=self._run, name="shardwise-heartbeat", daemon=True).start()

    def set_phase(self, phase: str, step: int) -> None:
        self._phase, self._step, self._since = phase, step, time.time()
        self._write()

    def dump_collectives(self) -> None:
        """Writes down which collectives this rank has begun of late, and which have not ended."""
        record = {"time": time.time(), "collectives": in_flight_collectives(), "groups": process_group_ranks()}
        temporary = self.collectives_path.with_suffix(".between")
        temporary.write_text(json.dumps(record))
        temporary.replace(self.collectives_path)

    def _write(self) -> None:
        progress = {"step": self._step, "phase": self._phase, "since": round(self._since, 3)}
        record = {**self._identity, **progress, "heartbeat": round(time.time(), 3)}
        with self._lock, suppress(OSError):  # a disk that is gone is told by what needs it
            os.pwrite(self._file, json.dumps(record).ljust(RECORD_BYTES - 1)[: RECORD_BYTES - 1].encode() + b"\n", 0)

    def _run(self) -> None:
        last_stack_size, polls = 0, 0
        while True:
            time.sleep(POLL_INTERVAL)
            polls += 1
            if polls % round(INTERVAL / POLL_INTERVAL) == 0:
                self._write()
            size = os.fstat(self._stack.fileno()).st_size
            if size != last_stack_size:  # somebody sent the signal
                last_stack_size = size
                with suppress(OSError):
                    self.dump_collectives()


def heartbeat_folder(run: Path) -> Path:
    return run / "heartbeats"


def read_heartbeats(run: Path) -> dict[int, dict[str, Any]]:
    """The last beat of each rank. One that is just being rewritten is left out."""
    found = {}
    for path in heartbeat_folder(run).glob("rank-*.json"):
        with suppress(OSError, ValueError):
            heartbeat = json.loads(path.read_text())
            found[int(heartbeat["rank"])] = heartbeat
    return dict(sorted(found.items()))


def clear_heartbeats(run: Path) -> None:
    for path in heartbeat_folder(run).glob("rank-*"):
        path.unlink(missing_ok=True)


def in_flight_collectives() -> list[dict[str, Any]]:
    """The collectives of late, oldest first; nothing where this PyTorch has no record of them."""
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    found = []
    for entry in json.loads(dump()).get("entries", []):
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        group, axis = entry["process_group"]
        found.append(
            {
                "group": group, "axis": axis_name(axis), "number": number, "is_p2p": entry["is_p2p"],
                "op": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
                "sizes": entry["input_sizes"], "types": entry["input_dtypes"], "thread": entry.get("thread_id"),
                "completed": entry["retired"] or entry["state"] == "completed", "time": entry["time_created_ns"] / 1e9,
            }
        )  # fmt: skip
    return found


def process_group_ranks() -> dict[str, list[int]]:
    """The ranks of each process group that this rank is in, by the group's name."""
    if not dist.is_initialized():
        return {}
    return {str(group.group_name): dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map}


def axis_name(description: str) -> str:
    return {"default_pg": "world", "undefined": "other"}.get(description, description.removeprefix("mesh_"))
