"""Finds the rank that caused a hang or a crash, from the files that ranks write (see `shardwise.workers.heartbeat`).

A rank that was killed or is stopped is the culprit. Otherwise it is the rank that is not in a collective while others
wait in one. If all ranks wait, their collectives do not match: every step issues the same sequence of collectives, so
the culprit is the rank that departed from its own sequence or, if that does not single out a rank, the rank whose last
collective differs from that of most ranks.
"""

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from shardwise.console import format_ranks
from shardwise.errors import JobError
from shardwise.files import malformed_as_data_error, parse_json, parse_record
from shardwise.workers.fork_server import signal_all
from shardwise.workers.heartbeat import TERMINATED, heartbeat_folder, read_heartbeats

FRAME_PATTERN = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
PACKAGE = str(Path(__file__).parent.parent) + os.sep
DIVERGED = "broke the common order of collectives: it called"
HEARTBEAT_FILE = "shardwise/workers/heartbeat.py"  # its frames are those of the dump, not of the training code
COLLECTIVES_FILE = "comm/collectives.py"  # a wrapper: report its caller instead
OBSERVATION_SECONDS = 2.0  # every rank of a healthy run makes progress within this time
MAX_DIAGNOSES = 8  # diagnoses kept in a run folder


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
        in_torch = "/torch/" in file or file.endswith("/train/loop.py")
        return in_torch and self.pending_collective is not None

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
    """Names the culprits with the evidence, and the ranks that wait for them."""
    dead = [state for state in ranks.values() if state.exit_reason]
    waiting = [state for state in ranks.values() if state.is_waiting]
    busy = [state for state in ranks.values() if not state.exit_reason and not state.is_waiting]
    diverged = [state for state in ranks.values() if state.divergence]
    # If several survivors all seem to have diverged, the attempt is too young to know their usual sequence.
    limit = len(ranks) - (len(dead) if len(ranks) - len(dead) > 1 else 0)
    if dead and all(state.is_secondary_failure for state in dead) and 0 < len(diverged) < limit:
        culprits = diverged
        aborted = " and ".join(f"rank {state.rank} {state.exit_reason}" for state in dead if state not in diverged)
        messages = [f"rank {state.rank} {DIVERGED} {state.divergence}; {aborted}" for state in diverged]
    elif dead:
        culprits = [state for state in dead if not state.is_secondary_failure] or dead
        messages = [f"rank {state.rank} {state.exit_reason} {_step_and_phase(state)}" for state in culprits]
    elif waiting and busy:
        culprits = busy
        messages = [f"rank {state.rank} has been stuck {_describe_stall(state, now)}" for state in busy]
    elif waiting:
        culprits, why = _find_diverged(waiting)
        calls = [f"{state.divergence or _describe_wait(state)}{_location_suffix(state)}" for state in culprits]
        messages = [f"rank {state.rank} {why} {call}" for state, call in zip(culprits, calls, strict=True)]
    else:
        culprits = sorted(busy, key=lambda state: state.heartbeat["since"])[:1]
        no_wait = "no rank is waiting in a collective; the longest without progress is"
        messages = [f"{no_wait} rank {state.rank}, {_describe_stall(state, now)}" for state in culprits]
    blamed = [state.rank for state in culprits]
    by_collective: dict[str, list[RankState]] = {}
    for state in waiting:
        if state.rank not in blamed:
            by_collective.setdefault(_describe_wait(state), []).append(state)
    for collective, states in by_collective.items():
        oldest = min((state.pending_collective["time"] for state in states if state.pending_collective), default=now)
        verb = "has" if len(states) == 1 else "have"
        seconds = f" for {now - oldest:.1f} s" if oldest < now else ""
        ranks_text = format_ranks([state.rank for state in states])
        messages.append(f"{ranks_text} {verb} been waiting in {collective}{seconds}{_location_suffix(states[0])}")
    return Diagnosis(blamed, [f"{sentence}." for sentence in messages] or ["no rank has left a heartbeat."])


def _find_diverged(waiting: list[RankState]) -> tuple[list[RankState], str]:
    """Of ranks that all wait, returns those that broke the common order of collectives, and why they are blamed."""
    diverged = [state for state in waiting if state.divergence]
    if 0 < len(diverged) < len(waiting):
        return diverged, DIVERGED
    signatures = [_collective_signature(s.training_collectives[-1]) if s.training_collectives else () for s in waiting]
    fewest = min((signatures.count(signature) for signature in signatures), default=0)
    odd = [state for state, signature in zip(waiting, signatures, strict=True) if signatures.count(signature) == fewest]
    if len(odd) < len(waiting):
        return odd, "is in another collective than most ranks:"
    return waiting, "is deadlocked with all other ranks in"


def _describe_wait(state: RankState) -> str:
    last = state.training_collectives[-1] if state.training_collectives and not state.frames else None
    collective = state.pending_collective or last
    if collective is None:
        names = [name for file, _, name in state.frames if "/torch/distributed/" in file]
        return "a pipeline send or receive" if "_wait_batch_p2p" in names else names[0] if names else "a collective"
    return _describe_collective(collective)


def _describe_collective(collective: dict[str, Any]) -> str:
    size = " x ".join(map(str, collective["sizes"][0])) if collective["sizes"] and collective["sizes"][0] else "scalar"
    number = "" if collective["is_p2p"] else f" #{collective['number']}"
    return f"{collective['op']}{number} ({size}) on axis {collective['axis']}"


def _location_suffix(state: RankState) -> str:
    return f", at {state.location}" if state.location else ""


def _step_and_phase(state: RankState) -> str:
    return f"in step {state.heartbeat['step']} ({state.heartbeat['phase']})"


def _describe_stall(state: RankState, now: float) -> str:
    silence = now - state.heartbeat["heartbeat"]
    silent = f", without a heartbeat for {silence:.1f} s" if silence > 5 else ""
    return f"{_step_and_phase(state)} for {now - state.heartbeat['since']:.1f} s{silent}{_location_suffix(state)}"


def request_dumps(
    run: Path, ranks: Iterable[int], timeout: float, send_signal: Callable[[], None],
    wait: Callable[[float], None] = time.sleep,
) -> None:  # fmt: skip
    """Makes ranks dump stacks and collectives by SIGUSR1; waits for the files. `wait` receives those of other nodes."""
    requested_at = time.time()
    send_signal()
    deadline = time.monotonic() + timeout
    files = [heartbeat_folder(run) / f"rank-{rank}.collectives" for rank in ranks]
    while time.monotonic() < deadline and not all(_is_fresh(file, requested_at) for file in files):
        wait(0.01)


def _is_fresh(file: Path, requested_at: float) -> bool:
    with suppress(OSError):
        return file.stat().st_mtime > requested_at - 1.0
    return False


def is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


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
    (target / "diagnosis.json").write_text(json.dumps(record, indent=1))


def diagnose_run(run: Path) -> list[str]:
    """Returns the lines of `shardwise doctor`: the state of a live run, or the last diagnosis of a run that ended."""
    if not (run / "job.toml").is_file():
        raise JobError(f"{run} is not a run folder: it has no job.toml.")
    local = {rank: beat for rank, beat in read_heartbeats(run).items() if beat["host"] == socket.gethostname()}
    alive = {rank: beat["pid"] for rank, beat in local.items() if _is_worker(run, beat)}
    if alive:
        time.sleep(OBSERVATION_SECONDS)
        later = read_heartbeats(run)
        step = max(beat["step"] for beat in local.values())
        if all(later.get(rank, beat)["since"] != beat["since"] for rank, beat in local.items()):
            return [f"the run is at step {step}, and every rank is making progress."]
        exit_reasons = {rank: "is stopped" for rank, pid in alive.items() if is_stopped(pid)}
        exit_reasons |= dict.fromkeys(local.keys() - alive.keys(), "exited")
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


def _is_worker(run: Path, heartbeat: dict[str, Any]) -> bool:
    """Whether the process that wrote this heartbeat is alive. The file may be damaged, or the pid another's by now, and
    a signal would end that process; the process that writes a heartbeat has its file open."""
    with suppress(psutil.Error, OverflowError):
        process, path = psutil.Process(heartbeat["pid"]), heartbeat_folder(run) / f"rank-{heartbeat['rank']}.json"
        is_open = str(path.resolve()) in [file.path for file in process.open_files()]
        return is_open and process.status() != psutil.STATUS_ZOMBIE
    return False
