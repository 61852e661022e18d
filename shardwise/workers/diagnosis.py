"""Who is to blame when a run hangs or dies, from what its ranks left behind (see `beat`).

A rank that was killed or is stopped is to blame. Otherwise it is the rank that is in no collective while others wait in
one. Where all wait, they wait for different things: the one whose last collective follows on what it never followed on
before has left the common order, because each step does the same as the one before it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from shardwise.console import format_ranks
from shardwise.errors import JobError
from shardwise.workers.heartbeat import heartbeat_folder, read_heartbeats

FRAME_PATTERN = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
PACKAGE = str(Path(__file__).parent.parent) + os.sep
LEFT_COMMON_ORDER = "left the order of collectives that all follow"
HEARTBEAT_FILE = "shardwise/workers/heartbeat.py"  # where a rank that fails writes down what it knows
COLLECTIVES_FILE = "comm/collectives.py"  # who calls a collective is of interest, not what it goes through
OBSERVATION_SECONDS = 2.0  # seconds in which a rank of a run that is well comes to something new
MAX_DIAGNOSES = 8  # findings that a run folder keeps


@dataclass(frozen=True)
class RankState:
    """What is known of a rank."""

    rank: int
    heartbeat: dict[str, Any]
    exit_reason: str
    """What happened to its process, such as "was killed by SIGKILL"; empty: it lives."""
    frames: list[tuple[str, int, str]]
    """Of the thread that trains, innermost first: file, line, function."""
    collectives: list[dict[str, Any]]
    group_ranks: dict[str, list[int]]

    @property
    def pending_collective(self) -> dict[str, Any] | None:
        """The oldest collective that has not ended, of the thread that trains."""
        return next((collective for collective in self.training_collectives if not collective["completed"]), None)

    @cached_property
    def training_collectives(self) -> list[dict[str, Any]]:
        return [
            f
            for f in self.collectives
            if f["axis"] != "checkpoint" or self.heartbeat.get("phase") in ("saving", "loading")
        ]

    @property
    def is_waiting(self) -> bool:
        if self.exit_reason:
            return False
        if any("/torch/distributed/" in file for file, _, _ in self.frames[:3]):
            return True
        inside = bool(self.frames) and ("/torch/" in self.frames[0][0] or self.frames[0][0].endswith("/train/loop.py"))
        return (
            inside and self.pending_collective is not None
        )  # in C++, below an operator, a backward or a copy from the device

    @property
    def is_secondary_failure(self) -> bool:
        """Whether another rank may have ended it: the library gives up on a message that it did not expect."""
        return "SIGABRT" in self.exit_reason or self.exit_reason.startswith("failed with RuntimeError")

    @cached_property
    def divergence(self) -> str:
        """Which collective of this step follows on one that it never followed on before, and what used to."""
        successor: dict[tuple[str, ...], dict[str, Any]] = {}
        pairs = set()
        for one, then in zip(self.training_collectives, self.training_collectives[1:], strict=False):
            pair = (_collective_signature(one), _collective_signature(then))
            if pair not in pairs and then["time"] >= self.heartbeat["since"]:
                before = (
                    f", where {_describe_collective(successor[pair[0]])} used to be" if pair[0] in successor else ""
                )
                return f"{_describe_collective(then)}{before}"
            pairs.add(pair)
            successor[pair[0]] = then
        return ""

    @property
    def location(self) -> str:
        """Where in the code, the innermost line of ours and, of a rank that does not wait, the innermost of all."""
        ours = [
            frame for frame in self.frames if frame[0].startswith(PACKAGE) and not frame[0].endswith(COLLECTIVES_FILE)
        ]
        if not self.frames:
            return ""
        innermost = self.frames[0]
        places = [innermost] + ([ours[0]] if ours and ours[0] != innermost and not self.is_waiting else [])
        if self.is_waiting and ours:
            places = [ours[0]]
        return ", called from ".join(f"{_short_path(file)}:{line} ({name})" for file, line, name in places)


def _collective_signature(collective: dict[str, Any]) -> tuple[str, ...]:
    return (collective["group"], collective["op"], str(collective["sizes"]), str(collective["types"]))


def _short_path(file: str) -> str:
    return file.replace(PACKAGE, "shardwise/").rpartition("site-packages/")[2]


@dataclass(frozen=True)
class Diagnosis:
    culprits: list[int]
    messages: list[str]

    @property
    def message(self) -> str:
        """About the culprits."""
        return " ".join(self.messages[: max(1, len(self.culprits))])


def read_rank_states(folder: Path, exit_reasons: dict[int, str]) -> dict[int, RankState]:
    """What all ranks left in a folder of beats."""
    found = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError):
            heartbeat = json.loads(path.read_text())
            rank, waits = int(heartbeat["rank"]), {}
            with suppress(OSError, ValueError):
                waits = json.loads(path.with_suffix(".collectives").read_text())
            frames = _read_frames(path.with_suffix(".stack"))
            recent, groups = waits.get("collectives", []), waits.get("groups", {})
            found[rank] = RankState(rank, heartbeat, exit_reasons.get(rank, ""), frames, recent, groups)
    return dict(sorted(found.items()))


def _read_frames(path: Path) -> list[tuple[str, int, str]]:
    """Of the main thread, which is the last in the last of the dumps."""
    with suppress(OSError):
        last = re.split(r"^(?:Current thread|Thread) ", path.read_text(errors="replace"), flags=re.MULTILINE)[-1]
        return [
            (file, int(line), name)
            for file, line, name in FRAME_PATTERN.findall(last)
            if not file.endswith(HEARTBEAT_FILE)
        ]
    return []


def diagnose(ranks: dict[int, RankState], now: float) -> Diagnosis:
    """Names the culprits, why, and who waits for them."""
    dead = [state for state in ranks.values() if state.exit_reason]
    waiting = [state for state in ranks.values() if state.is_waiting]
    busy = [state for state in ranks.values() if not state.exit_reason and not state.is_waiting]
    diverged = [state for state in ranks.values() if state.divergence]
    if dead and all(state.is_secondary_failure for state in dead) and 0 < len(diverged) < len(ranks):
        culprits = diverged
        exit_reasons = " and ".join(f"rank {state.rank} {state.exit_reason}" for state in dead if state not in diverged)
        messages = [
            f"rank {state.rank} {LEFT_COMMON_ORDER} with {state.divergence}; {exit_reasons}" for state in diverged
        ]
    elif dead:
        culprits = dead
        messages = [
            f"rank {state.rank} {state.exit_reason}, in step {state.heartbeat['step']}, {_phase(state)}"
            for state in dead
        ]
    elif waiting and busy:
        culprits = busy
        messages = [f"rank {state.rank} is stuck {_describe_stall(state, now)}" for state in busy]
    elif waiting:
        culprits, why = _find_diverged(waiting)
        messages = [
            f"rank {state.rank} {why} with {state.divergence or _describe_wait(state)}{_location_suffix(state)}"
            for state in culprits
        ]
    else:
        culprits = sorted(busy, key=lambda state: state.heartbeat["since"])[:1]
        messages = [
            f"no rank waits for another; rank {state.rank} is longest {_describe_stall(state, now)}"
            for state in culprits
        ]
    blamed = [state.rank for state in culprits]
    for collective, others in _group_by_collective([state for state in waiting if state.rank not in blamed]).items():
        oldest = min((state.pending_collective["time"] for state in others if state.pending_collective), default=now)
        verb = "waits" if len(others) == 1 else "wait"
        since = f" since {now - oldest:.1f} s" if oldest < now else ""
        messages.append(
            f"{format_ranks([state.rank for state in others])} {verb} in {collective}{since}{_location_suffix(others[0])}"
        )
    return Diagnosis(blamed, [f"{sentence}." for sentence in messages] or ["nothing is known of any rank."])


def _find_diverged(waiting: list[RankState]) -> tuple[list[RankState], str]:
    """Of ranks that all wait, those that left the common order."""
    diverged = [one for one in waiting if one.divergence]
    if 0 < len(diverged) < len(waiting):
        return diverged, LEFT_COMMON_ORDER
    kinds = [_collective_signature(one.training_collectives[-1]) if one.training_collectives else () for one in waiting]
    rare = min((kinds.count(kind) for kind in kinds), default=0)
    odd = [one for one, kind in zip(waiting, kinds, strict=True) if kinds.count(kind) == rare]
    if len(odd) < len(waiting):
        return odd, "differs from most"
    return waiting, "waits for others that wait for it, all"


def _group_by_collective(waiting: list[RankState]) -> dict[str, list[RankState]]:
    found: dict[str, list[RankState]] = {}
    for one in waiting:
        found.setdefault(_describe_wait(one), []).append(one)
    return found


def _describe_wait(one: RankState) -> str:
    collective = one.pending_collective or (
        one.training_collectives[-1] if one.training_collectives and not one.frames else None
    )
    if collective is None:
        names = [name for file, _, name in one.frames if "/torch/distributed/" in file]
        return "a message of axis pipeline" if "_wait_batch_p2p" in names else names[0] if names else "a collective"
    return _describe_collective(collective)


def _describe_collective(collective: dict[str, Any]) -> str:
    size = " x ".join(map(str, collective["sizes"][0])) if collective["sizes"] and collective["sizes"][0] else "scalar"
    number = "" if collective["is_p2p"] else f" number {collective['number']}"
    return f"{collective['op']}{number} ({size}) over axis {collective['axis']}"


def _location_suffix(one: RankState) -> str:
    return f", at {one.location}" if one.location else ""


def _phase(one: RankState) -> str:
    return one.heartbeat["phase"]


def _describe_stall(one: RankState, now: float) -> str:
    late = now - one.heartbeat["heartbeat"]
    silent = f", and its Python has not run for {late:.1f} s" if late > 5 else ""
    return f"in step {one.heartbeat['step']}, {_phase(one)}, since {now - one.heartbeat['since']:.1f} s{silent}{_location_suffix(one)}"


# Asking ranks that live


def request_dumps(run: Path, ranks: Iterable[int], seconds: float, send: Callable[[], None]) -> None:
    """Has these ranks write down their stacks and collectives, and waits for it at most so long. `send`: SIGUSR1."""
    asked = time.time()
    send()
    deadline = time.monotonic() + seconds
    files = [heartbeat_folder(run) / f"rank-{rank}.collectives" for rank in ranks]
    while time.monotonic() < deadline and not all(_is_fresh(file, asked) for file in files):
        time.sleep(0.01)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_fresh(file: Path, asked: float) -> bool:
    with suppress(OSError):
        return file.stat().st_mtime > asked - 1.0
    return False


def is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def save_diagnosis(run: Path, diagnosis: Diagnosis, kind: str, exit_reasons: dict[int, str]) -> None:
    """Puts the evidence and what was found in a folder of its own, where the next attempt does not write."""
    folder = run / "doctor"
    folder.mkdir(exist_ok=True)
    existing = sorted(folder.glob("[0-9]*"))
    for path in existing[: -MAX_DIAGNOSES + 1]:
        shutil.rmtree(path, ignore_errors=True)
    target = folder / f"{int(existing[-1].name) + 1 if existing else 1:04d}"
    shutil.copytree(heartbeat_folder(run), target)
    record = {
        "time": round(time.time(), 3),
        "kind": kind,
        "culprits": diagnosis.culprits,
        "messages": diagnosis.messages,
    }
    (target / "diagnosis.json").write_text(json.dumps(record | {"exit_reasons": exit_reasons}, indent=1))


def diagnose_run(run: Path) -> list[str]:
    """What `shardwise doctor` says: of a run that is under way, how it stands; of any other, what was found last."""
    if not (run / "job.toml").is_file():
        raise JobError(f"{run} is no run folder: it has no job.toml.")
    local_heartbeats = {
        rank: heartbeat for rank, heartbeat in read_heartbeats(run).items() if heartbeat["host"] == socket.gethostname()
    }
    alive = {rank: heartbeat["pid"] for rank, heartbeat in local_heartbeats.items() if _is_worker(heartbeat)}
    if alive:
        time.sleep(OBSERVATION_SECONDS)
        later = read_heartbeats(run)
        step = max(heartbeat["step"] for heartbeat in local_heartbeats.values())
        if all(
            later.get(rank, heartbeat)["since"] != heartbeat["since"] for rank, heartbeat in local_heartbeats.items()
        ):
            return [f"the run is under way, at step {step}, and every rank makes progress."]
        exit_reasons = {rank: "is stopped" for rank, pid in alive.items() if is_stopped(pid)}
        exit_reasons |= dict.fromkeys(local_heartbeats.keys() - alive.keys(), "is gone")
        responsive = {rank: pid for rank, pid in alive.items() if rank not in exit_reasons}
        request_dumps(run, responsive, 2.0, lambda: signal_all(responsive.values(), signal.SIGUSR1))
        now = time.time()
        first = (
            f"the run is under way, at step {step}, but not every rank has made progress for {OBSERVATION_SECONDS:g} s:"
        )
        return [first, *diagnose(read_rank_states(heartbeat_folder(run), exit_reasons), now).messages]
    found = sorted((run / "doctor").glob("*/diagnosis.json"))
    if not found:
        return ["no rank is alive here, and nothing was found wrong with this run."]
    record = json.loads(found[-1].read_text())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
    return [f"{when}, {record['kind']}:", *record["messages"], f"stacks and collectives: {found[-1].parent}"]


def _is_worker(heartbeat: dict[str, Any]) -> bool:
    """Whether that process still is the one that wrote the beat: process numbers come again."""
    with suppress(psutil.Error):
        process = psutil.Process(heartbeat["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= heartbeat["heartbeat"]
    return False
