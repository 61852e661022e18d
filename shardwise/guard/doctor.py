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

from shardwise.errors import JobError
from shardwise.guard.beat import beats, read_beats
from shardwise.words import ranks_text

FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
PACKAGE = str(Path(__file__).parent.parent) + os.sep
LEFT = "left the order of collectives that all follow"
OWN = "shardwise/guard/beat.py"  # where a rank that fails writes down what it knows
WRAPPER = "comm/collectives.py"  # who calls a collective is of interest, not what it goes through
LOOK = 2.0  # seconds in which a rank of a run that is well comes to something new
KEPT = 8  # findings that a run folder keeps


@dataclass(frozen=True)
class Rank:
    """What is known of a rank."""

    rank: int
    beat: dict[str, Any]
    fate: str
    """What happened to its process, such as "was killed by SIGKILL"; empty: it lives."""
    frames: list[tuple[str, int, str]]
    """Of the thread that trains, innermost first: file, line, function."""
    recent: list[dict[str, Any]]
    groups: dict[str, list[int]]

    @property
    def pending(self) -> dict[str, Any] | None:
        """The oldest collective that has not ended, of the thread that trains."""
        return next((flight for flight in self.own if not flight["ended"]), None)

    @cached_property
    def own(self) -> list[dict[str, Any]]:
        return [f for f in self.recent if f["axis"] != "checkpoint" or self.beat.get("phase") in ("saving", "loading")]

    @property
    def waits(self) -> bool:
        if self.fate:
            return False
        if any("/torch/distributed/" in file for file, _, _ in self.frames[:3]):
            return True
        inside = bool(self.frames) and ("/torch/" in self.frames[0][0] or self.frames[0][0].endswith("/train/loop.py"))
        return inside and self.pending is not None  # in C++, below an operator, a backward or a copy from the device

    @property
    def upset(self) -> bool:
        """Whether another rank may have ended it: the library gives up on a message that it did not expect."""
        return "SIGABRT" in self.fate or self.fate.startswith("failed with RuntimeError")

    @cached_property
    def strayed(self) -> str:
        """Which collective of this step follows on one that it never followed on before, and what used to."""
        usual: dict[tuple[str, ...], dict[str, Any]] = {}
        pairs = set()
        for one, then in zip(self.own, self.own[1:], strict=False):
            pair = (_kind(one), _kind(then))
            if pair not in pairs and then["time"] >= self.beat["since"]:
                before = f", where {_told(usual[pair[0]])} used to be" if pair[0] in usual else ""
                return f"{_told(then)}{before}"
            pairs.add(pair)
            usual[pair[0]] = then
        return ""

    @property
    def place(self) -> str:
        """Where in the code, the innermost line of ours and, of a rank that does not wait, the innermost of all."""
        ours = [frame for frame in self.frames if frame[0].startswith(PACKAGE) and not frame[0].endswith(WRAPPER)]
        if not self.frames:
            return ""
        innermost = self.frames[0]
        places = [innermost] + ([ours[0]] if ours and ours[0] != innermost and not self.waits else [])
        if self.waits and ours:
            places = [ours[0]]
        return ", called from ".join(f"{_short(file)}:{line} ({name})" for file, line, name in places)


def _kind(flight: dict[str, Any]) -> tuple[str, ...]:
    return (flight["group"], flight["what"], str(flight["sizes"]), str(flight["types"]))


def _short(file: str) -> str:
    return file.replace(PACKAGE, "shardwise/").rpartition("site-packages/")[2]


@dataclass(frozen=True)
class Finding:
    culprits: list[int]
    sentences: list[str]

    @property
    def sentence(self) -> str:
        """About the culprits."""
        return " ".join(self.sentences[: max(1, len(self.culprits))])


def look(folder: Path, fates: dict[int, str]) -> dict[int, Rank]:
    """What all ranks left in a folder of beats."""
    found = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError):
            beat = json.loads(path.read_text())
            rank, waits = int(beat["rank"]), {}
            with suppress(OSError, ValueError):
                waits = json.loads(path.with_suffix(".waits").read_text())
            frames = _frames(path.with_suffix(".stack"))
            recent, groups = waits.get("recent", []), waits.get("groups", {})
            found[rank] = Rank(rank, beat, fates.get(rank, ""), frames, recent, groups)
    return dict(sorted(found.items()))


def _frames(path: Path) -> list[tuple[str, int, str]]:
    """Of the main thread, which is the last in the last of the dumps."""
    with suppress(OSError):
        last = re.split(r"^(?:Current thread|Thread) ", path.read_text(errors="replace"), flags=re.MULTILINE)[-1]
        return [(file, int(line), name) for file, line, name in FRAME.findall(last) if not file.endswith(OWN)]
    return []


def diagnose(ranks: dict[int, Rank], now: float) -> Finding:
    """Names the culprits, why, and who waits for them."""
    gone = [one for one in ranks.values() if one.fate]
    waiting = [one for one in ranks.values() if one.waits]
    busy = [one for one in ranks.values() if not one.fate and not one.waits]
    strayed = [one for one in ranks.values() if one.strayed]
    if gone and all(one.upset for one in gone) and 0 < len(strayed) < len(ranks):
        culprits = strayed
        fates = " and ".join(f"rank {one.rank} {one.fate}" for one in gone if one not in strayed)
        said = [f"rank {one.rank} {LEFT} with {one.strayed}; {fates}" for one in strayed]
    elif gone:
        culprits = gone
        said = [f"rank {one.rank} {one.fate}, in step {one.beat['step']}, {_phase(one)}" for one in gone]
    elif waiting and busy:
        culprits = busy
        said = [f"rank {one.rank} is stuck {_since(one, now)}" for one in busy]
    elif waiting:
        culprits, why = _apart(waiting)
        said = [f"rank {one.rank} {why} with {one.strayed or _collective(one)}{_at(one)}" for one in culprits]
    else:
        culprits = sorted(busy, key=lambda one: one.beat["since"])[:1]
        said = [f"no rank waits for another; rank {one.rank} is longest {_since(one, now)}" for one in culprits]
    blamed = [one.rank for one in culprits]
    for collective, others in _alike([one for one in waiting if one.rank not in blamed]).items():
        oldest = min((one.pending["time"] for one in others if one.pending), default=now)
        verb = "waits" if len(others) == 1 else "wait"
        since = f" since {now - oldest:.1f} s" if oldest < now else ""
        said.append(f"{ranks_text([one.rank for one in others])} {verb} in {collective}{since}{_at(others[0])}")
    return Finding(blamed, [f"{sentence}." for sentence in said] or ["nothing is known of any rank."])


def _apart(waiting: list[Rank]) -> tuple[list[Rank], str]:
    """Of ranks that all wait, those that left the common order."""
    strayed = [one for one in waiting if one.strayed]
    if 0 < len(strayed) < len(waiting):
        return strayed, LEFT
    kinds = [_kind(one.own[-1]) if one.own else () for one in waiting]
    rare = min((kinds.count(kind) for kind in kinds), default=0)
    odd = [one for one, kind in zip(waiting, kinds, strict=True) if kinds.count(kind) == rare]
    if len(odd) < len(waiting):
        return odd, "differs from most"
    return waiting, "waits for others that wait for it, all"


def _alike(waiting: list[Rank]) -> dict[str, list[Rank]]:
    found: dict[str, list[Rank]] = {}
    for one in waiting:
        found.setdefault(_collective(one), []).append(one)
    return found


def _collective(one: Rank) -> str:
    flight = one.pending or (one.own[-1] if one.own and not one.frames else None)
    if flight is None:
        names = [name for file, _, name in one.frames if "/torch/distributed/" in file]
        return "a message of axis pipeline" if "_wait_batch_p2p" in names else names[0] if names else "a collective"
    return _told(flight)


def _told(flight: dict[str, Any]) -> str:
    size = " x ".join(map(str, flight["sizes"][0])) if flight["sizes"] and flight["sizes"][0] else "scalar"
    number = "" if flight["pair"] else f" number {flight['number']}"
    return f"{flight['what']}{number} ({size}) over axis {flight['axis']}"


def _at(one: Rank) -> str:
    return f", at {one.place}" if one.place else ""


def _phase(one: Rank) -> str:
    return one.beat["phase"]


def _since(one: Rank, now: float) -> str:
    late = now - one.beat["beat"]
    silent = f", and its Python has not run for {late:.1f} s" if late > 5 else ""
    return f"in step {one.beat['step']}, {_phase(one)}, since {now - one.beat['since']:.1f} s{silent}{_at(one)}"


# Asking ranks that live


def ask(run: Path, ranks: Iterable[int], seconds: float, send: Callable[[], None]) -> None:
    """Has these ranks write down their stacks and collectives, and waits for it at most so long. `send`: SIGUSR1."""
    asked = time.time()
    send()
    deadline = time.monotonic() + seconds
    files = [beats(run) / f"rank-{rank}.waits" for rank in ranks]
    while time.monotonic() < deadline and not all(_written(file, asked) for file in files):
        time.sleep(0.01)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _written(file: Path, asked: float) -> bool:
    with suppress(OSError):
        return file.stat().st_mtime > asked - 1.0
    return False


def is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def keep(run: Path, finding: Finding, kind: str, fates: dict[int, str]) -> None:
    """Puts the evidence and what was found in a folder of its own, where the next attempt does not write."""
    folder = run / "doctor"
    folder.mkdir(exist_ok=True)
    there = sorted(folder.glob("[0-9]*"))
    for path in there[: -KEPT + 1]:
        shutil.rmtree(path, ignore_errors=True)
    own = folder / f"{int(there[-1].name) + 1 if there else 1:04d}"
    shutil.copytree(beats(run), own)
    record = {"time": round(time.time(), 3), "kind": kind, "culprits": finding.culprits, "found": finding.sentences}
    (own / "found.json").write_text(json.dumps(record | {"fates": fates}, indent=1))


def examine(run: Path) -> list[str]:
    """What `shardwise doctor` says: of a run that is under way, how it stands; of any other, what was found last."""
    if not (run / "job.toml").is_file():
        raise JobError(f"{run} is no run folder: it has no job.toml.")
    here = {rank: beat for rank, beat in read_beats(run).items() if beat["host"] == socket.gethostname()}
    alive = {rank: beat["pid"] for rank, beat in here.items() if _is_worker(beat)}
    if alive:
        time.sleep(LOOK)
        later = read_beats(run)
        step = max(beat["step"] for beat in here.values())
        if all(later.get(rank, beat)["since"] != beat["since"] for rank, beat in here.items()):
            return [f"the run is under way, at step {step}, and every rank makes progress."]
        fates = {rank: "is stopped" for rank, pid in alive.items() if is_stopped(pid)}
        fates |= dict.fromkeys(here.keys() - alive.keys(), "is gone")
        well = {rank: pid for rank, pid in alive.items() if rank not in fates}
        ask(run, well, 2.0, lambda: signal_all(well.values(), signal.SIGUSR1))
        now = time.time()
        first = f"the run is under way, at step {step}, but not every rank has made progress for {LOOK:g} s:"
        return [first, *diagnose(look(beats(run), fates), now).sentences]
    found = sorted((run / "doctor").glob("*/found.json"))
    if not found:
        return ["no rank is alive here, and nothing was found wrong with this run."]
    record = json.loads(found[-1].read_text())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
    return [f"{when}, {record['kind']}:", *record["found"], f"stacks and collectives: {found[-1].parent}"]


def _is_worker(beat: dict[str, Any]) -> bool:
    """Whether that process still is the one that wrote the beat: process numbers come again."""
    with suppress(psutil.Error):
        process = psutil.Process(beat["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= beat["beat"]
    return False
