"""Heartbeat files: each rank records its progress in the run folder, where it outlives the process.

heartbeats/rank-3.json          pid, step, phase and its start time; rewritten on every change and five times a second
heartbeats/rank-3.stack         on SIGUSR1: the main thread's Python stack, by C code even if Python is stuck; then all
heartbeats/rank-3.collectives   after a stack dump or a failure: recent collectives of PyTorch's flight recorder and
                                the ranks of each process group
"""

import ctypes
import faulthandler
import json
import math
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

from shardwise.files import parse_record

INTERVAL = 0.2
POLL_INTERVAL = 0.05  # seconds between checks for a new stack dump
TERMINATED = "std::terminate was called"
AXIS_NAMES = {"default_pg": "world", "undefined": "other"}  # by PyTorch's descriptions of process groups
RECORD_BYTES = 256  # fixed length, because the record is overwritten in place


class Heartbeat:
    """Writes this rank's heartbeat files. The training thread calls `set_phase` whenever it enters a new phase."""

    def __init__(self, run: Path, rank: int):
        folder = heartbeat_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.collectives_path = rank, folder / f"rank-{rank}.collectives"
        self._phase, self._step, self._since = "starting", 0, time.time()
        self._identity = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._lock, self._dump_lock = threading.Lock(), threading.Lock()
        self._file = os.open(folder / f"rank-{rank}.json", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self._stack = open(folder / f"rank-{rank}.stack", "w")  # noqa: SIM115 - open for the life of the process
        self.collectives_path.unlink(missing_ok=True)
        faulthandler.register(signal.SIGUSR1, self._stack, all_threads=False)  # others may run: reading them can crash
        faulthandler.enable(self._stack)  # dumps the stack on a crash in C code
        self._on_terminate = _mark_terminate(self._stack.fileno())
        self._write()
        threading.Thread(target=self._run, name="shardwise-heartbeat", daemon=True).start()

    def set_phase(self, phase: str, step: int) -> None:
        self._phase, self._step, self._since = phase, step, time.time()
        self._write()

    def dump_collectives(self) -> None:
        """Writes the recent collectives of this rank, with those that have not completed."""
        joined = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
        groups = {str(group.group_name): dist.get_process_group_ranks(group) for group in joined}
        record = {"time": time.time(), "collectives": in_flight_collectives(), "groups": groups}
        temporary = self.collectives_path.with_suffix(".partial")
        with self._dump_lock:  # a failing training thread and the heartbeat thread may dump at once
            temporary.write_text(json.dumps(record))
            temporary.replace(self.collectives_path)

    def _write(self) -> None:
        # Rounded down: a collective that starts the phase must not seem to precede it (see `RankState.divergence`).
        progress = {"step": self._step, "phase": self._phase, "since": math.floor(self._since * 1e3) / 1e3}
        record = {**self._identity, **progress, "heartbeat": round(time.time(), 3)}
        with self._lock, suppress(OSError):  # a lost disk is reported by whoever needs the data
            os.pwrite(self._file, json.dumps(record).ljust(RECORD_BYTES - 1)[: RECORD_BYTES - 1].encode() + b"\n", 0)

    def _run(self) -> None:
        last_stack_size, polls = 0, 0
        while True:
            time.sleep(POLL_INTERVAL)
            polls += 1
            if polls % round(INTERVAL / POLL_INTERVAL) == 0:
                self._write()
            if os.fstat(self._stack.fileno()).st_size != last_stack_size:  # SIGUSR1 arrived
                faulthandler.dump_traceback(self._stack)  # this thread has the GIL, so no other runs Python
                last_stack_size = os.fstat(self._stack.fileno()).st_size
                with suppress(OSError):
                    self.dump_collectives()


def _mark_terminate(file: int) -> Any:
    """Makes a C++ exception in a native thread, such as gloo's, leave a mark. Returns the handler, to be kept alive."""

    def mark() -> None:
        if threading.current_thread() is not threading.main_thread():
            os.write(file, f"{TERMINATED}\n".encode())
        previous()

    handler = ctypes.CFUNCTYPE(None)(mark)
    with suppress(OSError, AttributeError):  # another C++ library
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.restype = type(handler)
        previous = set_terminate(handler)
    return handler


def heartbeat_folder(run: Path) -> Path:
    return run / "heartbeats"


def read_heartbeats(run: Path) -> dict[int, dict[str, Any]]:
    """Returns the last heartbeat of each rank, except any that is being rewritten right now, or damaged: every field
    must have its type."""
    heartbeats = {}
    for path in heartbeat_folder(run).glob("rank-*.json"):
        with suppress(OSError):
            heartbeat = parse_record(path.read_bytes()) or {}
            is_valid = all(type(heartbeat.get(key)) is int and heartbeat[key] >= 0 for key in ("rank", "pid", "step"))
            is_valid &= all(isinstance(heartbeat.get(key), int | float) for key in ("since", "heartbeat"))
            if is_valid and all(isinstance(heartbeat.get(key), str) for key in ("host", "phase")):
                heartbeats[heartbeat["rank"]] = heartbeat
    return dict(sorted(heartbeats.items()))


def clear_heartbeats(run: Path) -> None:
    for path in heartbeat_folder(run).glob("rank-*"):
        path.unlink(missing_ok=True)


def in_flight_collectives() -> list[dict[str, Any]]:
    """Returns recent collectives, oldest first; empty if this PyTorch build has no flight recorder."""
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    collectives = []
    for entry in json.loads(dump()).get("entries", []):
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        group, axis = entry["process_group"]
        axis = AXIS_NAMES.get(axis, axis.removeprefix("mesh_"))
        collectives.append(
            {
                "group": group, "axis": axis, "number": number, "is_p2p": entry["is_p2p"],
                "op": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
                "sizes": entry["input_sizes"], "types": entry["input_dtypes"], "thread": entry.get("thread_id"),
                "completed": entry["retired"] or entry["state"] == "completed", "time": entry["time_created_ns"] / 1e9,
            }
        )  # fmt: skip
    return collectives
