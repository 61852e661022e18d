"""What each rank writes about its progress, and which rank it shows to have caused a hang or a crash.

Each rank records its progress in the run folder, where it outlives the process.

heartbeats/rank-3.json          pid, step, phase and its start time; rewritten on every change and five times a second
heartbeats/rank-3.stack         on SIGUSR1: the main thread's Python stack, by C code even if Python is stuck; then all
heartbeats/rank-3.collectives   after a stack dump or a failure: recent collectives of PyTorch's flight recorder and
                                the ranks of each process group

docs/explanation/faults.md says which rank is to blame. If all wait, and none or all departed from their own sequence of
collectives, it is the rank whose last collective differs from that of most ranks."""

import ctypes
import faulthandler
import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from shardwise.console import fill_in, format_ranks
from shardwise.files import malformed_as_data_error, parse_json, parse_record, write_text
from shardwise.run_job import check_job_file
from shardwise.workers.fork_server import signal_all

INTERVAL = 0.2
POLL_INTERVAL = 0.05  # seconds between checks for a new stack dump
TERMINATED = "std::terminate was called"
AXIS_NAMES = {"default_pg": "world", "undefined": "other"}  # by PyTorch's descriptions of process groups
RECORD_BYTES = 256  # fixed length, because the record is overwritten in place
FRAME_PATTERN = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
PACKAGE = str(Path(__file__).parent.parent) + os.sep
HEARTBEAT_FILE = "shardwise/workers/diagnosis.py"  # this file: its frames are those of the dump, not of training
COLLECTIVES_FILE = "comm/collectives.py"  # a wrapper: report its caller instead
OBSERVATION_SECONDS = 2.0  # every rank of a healthy run makes progress within this time
MAX_DIAGNOSES = 8  # diagnoses kept in a run folder


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

    @property
    def step(self) -> int:
        return self._step

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
    """Returns the last heartbeat of each rank, unless it is damaged or being rewritten: every field has its type."""
    heartbeats = {}
    for path in heartbeat_folder(run).glob("rank-*.json"):
        with suppress(OSError):
            heartbeat = parse_record(path.read_bytes()) or {}
            is_valid = all(type(heartbeat.get(key)) is int and heartbeat[key] >= 0 for key in ("rank", "pid", "step"))
            is_valid &= all(isinstance(heartbeat.get(key), int | float) for key in ("since", "heartbeat"))
            if is_valid and all(isinstance(heartbeat.get(key), str) for key in ("host", "phase")):
                heartbeats[heartbeat["rank"]] = heartbeat
    return dict(sorted(heartbeats.items()))


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
        collectives.append({
            "group": group, "axis": axis, "number": number, "is_p2p": entry["is_p2p"],
            "op": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "sizes": entry["input_sizes"], "types": entry["input_dtypes"], "thread": entry.get("thread_id"),
            "completed": entry["retired"] or entry["state"] == "completed", "time": entry["time_created_ns"] / 1e9,
        })  # fmt: skip
    return collectives


@dataclass(frozen=True)
class RankState:
    """The evidence about one rank."""

    rank: int
    heartbeat: dict[str, Any]
    exit_reason: str  # what happened to its process, such as "was killed by SIGKILL"; empty if it is alive
    frames: list[tuple[str, int, str]]  # stack of the training thread, innermost frame first: file, line, function
    collectives: list[dict[str, Any]]
    ended_by_terminate: bool = False  # whether a C++ exception in a native thread ended it

    @property
    def pending_collective(self) -> dict[str, Any] | None:
        """The oldest unfinished collective of the training thread."""
        return next((collective for collective in self.training_collectives if not collective["completed"]), None)

    @cached_property
    def training_collectives(self) -> list[dict[str, Any]]:
        """Collectives of the training thread, which uses the checkpoint process group only while it saves or loads."""
        in_checkpoint = self.heartbeat.get("phase") in ("saving", "loading")
        return [entry for entry in self.collectives if entry["axis"] != "checkpoint" or in_checkpoint]

    @property
    def is_waiting(self) -> bool:
        if self.exit_reason:
            return False
        if any("/torch/distributed/" in file for file, _, _ in self.frames[:3]):
            return True
        # A rank can also wait in C++ code, called by an operator, the backward pass or a device-to-host copy.
        file = self.frames[0][0] if self.frames else ""
        return self.pending_collective is not None and ("/torch/" in file or file.endswith("/train/loop.py"))

    @property
    def is_secondary_failure(self) -> bool:
        """Whether another rank may have caused this exit: on an unexpected message, a thread of gloo's own raises."""
        return self.ended_by_terminate or self.exit_reason.startswith("failed with RuntimeError")

    @cached_property
    def divergence(self) -> str:
        """The first collective of the current phase that departs from this rank's earlier sequence; empty if none."""
        successor: dict[tuple[str, ...], dict[str, Any]] = {}
        pairs = set()
        for previous, current in zip(self.training_collectives, self.training_collectives[1:], strict=False):
            pair = (_collective_signature(previous), _collective_signature(current))
            if pair not in pairs and current["time"] >= self.heartbeat["since"]:
                usual = f" instead of {_describe_collective(successor[pair[0]])}" if pair[0] in successor else ""
                return f"{_describe_collective(current)}{usual}"
            pairs.add(pair)
            successor[pair[0]] = current
        return ""

    @property
    def wait(self) -> str:
        """What this rank waits in."""
        last = self.training_collectives[-1] if self.training_collectives and not self.frames else None
        if (collective := self.pending_collective or last) is not None:
            return _describe_collective(collective)
        names = [name for file, _, name in self.frames if "/torch/distributed/" in file]
        return "a pipeline send or receive" if "_wait_batch_p2p" in names else names[0] if names else "a collective"

    @property
    def waiting_since(self) -> float:
        return math.inf if self.pending_collective is None else float(self.pending_collective["time"])

    @property
    def location(self) -> str:
        """The innermost Shardwise frame; for a rank that is not waiting, preceded by the innermost frame of all."""
        ours = [frame for frame in self.frames if frame[0].startswith(PACKAGE)]
        ours = [frame for frame in ours if not frame[0].endswith(COLLECTIVES_FILE)][:1]
        innermost = self.frames[:1]
        shown = (ours or innermost) if self.is_waiting else list(dict.fromkeys([*innermost, *ours]))
        short = [(file.replace(PACKAGE, "shardwise/").rpartition("site-packages/")[2], *rest) for file, *rest in shown]
        return ", called from ".join(f"{file}:{line} ({name})" for file, line, name in short)


def _collective_signature(collective: dict[str, Any]) -> tuple[str, ...]:
    return (collective["group"], collective["op"], str(collective["sizes"]), str(collective["types"]))


@dataclass(frozen=True)
class Diagnosis:
    """The ranks to blame, and one sentence per culprit and per group of waiting ranks."""

    culprits: list[int]
    messages: list[str]

    @property
    def message(self) -> str:
        """The sentences about the culprits."""
        return " ".join(self.messages[: max(1, len(self.culprits))])


def read_rank_states(run: Path, exit_reasons: dict[int, str]) -> dict[int, RankState]:
    """Reads the heartbeat, stack and collectives of every rank of a run."""
    states = {}
    for rank, heartbeat in read_heartbeats(run).items():
        path, dump, reason = heartbeat_folder(run) / f"rank-{rank}.collectives", {}, exit_reasons.get(rank, "")
        with suppress(OSError):
            dump = parse_record(path.read_bytes()) or {}
        frames, terminated = _read_frames(path.with_suffix(".stack"))
        states[rank] = RankState(rank, heartbeat, reason, frames, dump.get("collectives", []), terminated)
    return states


def _read_frames(path: Path) -> tuple[list[tuple[str, int, str]], bool]:
    """Returns the frames of the main thread, the last one of the last dump, and whether `std::terminate` was called."""
    with suppress(OSError):
        text = path.read_text(errors="replace")
        frames = FRAME_PATTERN.findall(re.split(r"^(?:Current thread|Thread|Stack) ", text, flags=re.MULTILINE)[-1])
        frames = [(file, int(line), name) for file, line, name in frames if not file.endswith(HEARTBEAT_FILE)]
        return frames, TERMINATED in text
    return [], False


def diagnose(ranks: dict[int, RankState], now: float) -> Diagnosis:
    """Names the culprits with the evidence, and the ranks that wait for them, in the sentences of `diagnosis.txt`."""
    dead = [state for state in ranks.values() if state.exit_reason]
    waiting = [state for state in ranks.values() if state.is_waiting]
    busy = [state for state in ranks.values() if not state.exit_reason and not state.is_waiting]
    diverged = [state for state in ranks.values() if state.divergence]
    # If several survivors all seem to have diverged, the attempt is too young to know their usual sequence.
    limit = len(ranks) - (len(dead) if len(ranks) - len(dead) > 1 else 0)
    if dead and all(state.is_secondary_failure for state in dead) and 0 < len(diverged) < limit:
        culprits, why = diverged, "diverged"
    elif dead:
        culprits, why = [state for state in dead if not state.is_secondary_failure] or dead, "ended"
    elif waiting and busy:
        culprits, why = busy, "stuck"
    elif waiting:
        culprits, why = _find_diverged(waiting)
    else:
        culprits, why = sorted(busy, key=lambda state: state.heartbeat["since"])[:1], "slowest"
    blamed = [state.rank for state in culprits]
    waits: dict[str, list[RankState]] = {}
    for state in waiting:
        if state.rank not in blamed:
            waits.setdefault(state.wait, []).append(state)
    values = {"culprits": culprits, "why": why, "dead": dead, "waits": waits, "now": now, "format_ranks": format_ranks}
    return Diagnosis(blamed, fill_in(Path(__file__).with_name("diagnosis.txt"), values).splitlines())


def _find_diverged(waiting: list[RankState]) -> tuple[list[RankState], str]:
    """Of ranks that all wait, returns those that broke the common order of collectives, and why they are blamed."""
    diverged = [state for state in waiting if state.divergence]
    if 0 < len(diverged) < len(waiting):
        return diverged, "diverged"
    signatures = [_collective_signature(s.training_collectives[-1]) if s.training_collectives else () for s in waiting]
    fewest = min((signatures.count(signature) for signature in signatures), default=0)
    odd = [state for state, signature in zip(waiting, signatures, strict=True) if signatures.count(signature) == fewest]
    return (odd, "odd") if len(odd) < len(waiting) else (waiting, "deadlocked")


def _describe_collective(collective: dict[str, Any]) -> str:
    size = " x ".join(map(str, collective["sizes"][0])) if collective["sizes"] and collective["sizes"][0] else "scalar"
    number = "" if collective["is_p2p"] else f" #{collective['number']}"
    return f"{collective['op']}{number} ({size}) on axis {collective['axis']}"


def request_dumps(run: Path, ranks: Iterable[int], timeout: float, send_signal: Callable[[], None],
                  wait: Callable[[float], None] = time.sleep) -> None:  # fmt: skip
    """Makes ranks dump stacks and collectives by SIGUSR1; waits for the files. `wait` receives those of other nodes."""
    requested_at = time.time()
    send_signal()
    deadline = time.monotonic() + timeout
    files = [heartbeat_folder(run) / f"rank-{rank}.collectives" for rank in ranks]
    is_fresh = lambda file: file.exists() and file.stat().st_mtime > requested_at - 1.0  # noqa: E731
    while time.monotonic() < deadline and not all(map(is_fresh, files)):
        wait(0.01)


def save_diagnosis(run: Path, diagnosis: Diagnosis, kind: str, exit_reasons: dict[int, str]) -> None:
    """Saves the diagnosis and its evidence to a new folder in `doctor`, so that no later attempt overwrites it."""
    folder = run / "doctor"
    folder.mkdir(exist_ok=True)
    existing = sorted(folder.glob("[0-9]*"))
    for path in existing[: -MAX_DIAGNOSES + 1]:
        shutil.rmtree(path, ignore_errors=True)
    target = folder / f"{int(existing[-1].name) + 1 if existing else 1:04d}"
    shutil.copytree(heartbeat_folder(run), target)
    record = {"time": round(time.time(), 3), "kind": kind, **asdict(diagnosis), "exit_reasons": exit_reasons}
    write_text(target / "diagnosis.json", json.dumps(record, indent=1))


def diagnose_run(run: Path) -> list[str]:
    """Returns the lines of `shardwise doctor`: the state of a live run, or the last diagnosis of a run that ended."""
    check_job_file(run)
    local = {rank: beat for rank, beat in read_heartbeats(run).items() if beat["host"] == socket.gethostname()}
    alive = {rank: beat["pid"] for rank, beat in local.items() if _worker_status(run, beat)}
    if alive:
        time.sleep(OBSERVATION_SECONDS)
        later = read_heartbeats(run)
        step = max(beat["step"] for beat in local.values())
        if all(later.get(rank, beat)["since"] != beat["since"] for rank, beat in local.items()):
            return [f"the run is at step {step}, and every rank is making progress."]
        stopped = [rank for rank in alive if _worker_status(run, local[rank]) == psutil.STATUS_STOPPED]
        exit_reasons = dict.fromkeys(stopped, "is stopped") | dict.fromkeys(local.keys() - alive.keys(), "exited")
        responsive = {rank: pid for rank, pid in alive.items() if rank not in exit_reasons}
        request_dumps(run, responsive, 2.0, lambda: signal_all(responsive.values(), signal.SIGUSR1))
        with malformed_as_data_error(heartbeat_folder(run)):
            finding = diagnose(read_rank_states(run, exit_reasons), time.time())
        headline = f"the run is at step {step}, but some ranks made no progress in the last {OBSERVATION_SECONDS:g} s:"
        return [headline, *finding.messages]
    saved = sorted((run / "doctor").glob("*/diagnosis.json"))
    if not saved:
        return ["no rank of this run is alive on this machine, and no fault was recorded."]
    with malformed_as_data_error(saved[-1].parent):
        record = parse_json(saved[-1].read_bytes())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
        messages = [str(message) for message in record["messages"]]
        return [f"{when}, {record['kind']}:", *messages, f"stacks and collectives: {saved[-1].parent}"]


def _worker_status(run: Path, heartbeat: dict[str, Any]) -> str:
    """Returns what the process that wrote this heartbeat does; empty if it has ended. The file may be damaged, or the
    pid another's by now, and a signal would end that process; who writes a heartbeat has its file open."""
    with suppress(psutil.Error, OverflowError):
        process, path = psutil.Process(heartbeat["pid"]), heartbeat_folder(run) / f"rank-{heartbeat['rank']}.json"
        is_open = str(path.resolve()) in [file.path for file in process.open_files()]
        return process.status() if is_open and process.status() != psutil.STATUS_ZOMBIE else ""
    return ""
