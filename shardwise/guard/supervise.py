"""Keeping a world of workers alive: a rank that dies, stops or gets stuck is named at once, and all begin again.

How a rank is found: one that ends is reported by its parent, the nursery; one that is stopped is seen in the process
table; one that is stuck has made no new mark in its beat, nor has any other rank, for `patience` seconds. None of it
waits for a collective to run out of time. A fault ends the attempt: what the ranks know is kept for the doctor, all are
killed, and a new attempt goes on from the newest good checkpoint.

What would only happen again is not tried again: errors that we raise on purpose, another exception twice at the same
step, and `restarts` attempts in a row none of which got further than one before it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import RunError, ShardwiseError, UserError
from shardwise.guard import doctor
from shardwise.guard.beat import beats, forget_beats, read_beats
from shardwise.guard.nursery import Nursery
from shardwise.words import counted, signal_name

GLANCE = 0.1
LOOKS = 3  # in a row that find a rank stopped; Ctrl-Z stops and wakes all at once, but not in one instant
START = 60.0  # seconds of patience at least, until a step is done: the first ones build, compile and connect
LAST_WORDS = 0.5  # seconds that others get to write down why they end
PAUSE, LONGEST = 0.5, 60.0  # seconds before another try; doubled each time, up to the second


@dataclass(frozen=True)
class Fault:
    kind: str
    """killed, halted, stuck or failed."""
    ranks: list[int]
    step: int
    sentence: str
    said: str = ""
    """All that it said itself, where it could."""
    known: bool = False
    """Whether it is an error that we raise on purpose."""
    exit_code: int = 1

    def error(self, why: str = "") -> ShardwiseError:
        text = " ".join(part for part in (self.said or self.sentence, why) if part)
        return (UserError if self.exit_code == 2 else RunError)(text)


@dataclass
class World:
    """The workers of one attempt."""

    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    @property
    def alive(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.codes}

    @property
    def broken(self) -> list[int]:
        return [rank for rank, code in self.codes.items() if code]

    def hear(self, words: list[dict[str, Any]]) -> None:
        for word in words:
            if "pids" in word:
                self.pids = dict(enumerate(word["pids"]))
            else:
                self.codes |= {rank: word["code"] for rank, pid in self.pids.items() if pid == word["pid"]}

    def kill(self, number: int) -> None:
        for pid in self.alive.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Written(Protocol):
    """What failed ranks wrote down."""

    def error_records(self) -> list[dict[str, Any]]: ...
    def clear_errors(self) -> None: ...


@dataclass
class Supervisor:
    run: Path
    size: int
    restarts: int
    patience: float
    written: Written
    tell: Callable[..., None]
    """Takes a kind of event, a message, and facts."""
    told: int = 0
    """The signal that this run was told to stop by."""
    world: World = field(default_factory=World)
    furthest: int = -1
    tries: int = 0
    before: Fault | None = None

    def pass_on(self, number: int) -> None:
        """A signal to the launcher is one to every worker; they end by themselves."""
        self.told = number
        self.world.kill(number)

    def supervise(self, nursery: Nursery, entry: str, arguments: list[str], resume: bool) -> None:
        """Runs the world to its end. Raises the fault that nothing helps against."""
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            try:
                while True:
                    store = Path(folder) / f"store-{self.tries}-{time.monotonic_ns()}"
                    fault = self._attempt(nursery, entry, [*arguments, str(store), *(["--resume"] if resume else [])])
                    if fault is None:
                        return
                    self._weigh(fault)
                    resume = True
            finally:
                self._end(nursery)

    def _attempt(self, nursery: Nursery, entry: str, arguments: list[str]) -> Fault | None:
        """One attempt. Returns what ended it, None where all is done."""
        forget_beats(self.run)
        self.written.clear_errors()
        self.world = World()
        nursery.fork(self.size, entry, arguments)
        watch = Watch(self.patience)
        while True:
            words = nursery.heard(GLANCE)
            if words is None:
                raise RunError("the process that starts workers was killed; the workers ended with it.")
            if words and not self.world.pids:
                watch = Watch(self.patience)  # until now PyTorch was imported
            self.world.hear(words)
            if self.told and not watch.told:
                watch.told = True
                self.world.kill(self.told)  # also those that were just born
            if self.world.broken:
                return self._ended(nursery)
            if self.world.pids and not self.world.alive:
                return None
            seen = read_beats(self.run)
            stopped = watch.stopped(self.world.alive)
            if stopped or (self.world.pids and watch.stuck(seen)):
                return self._halted(nursery, stopped)

    def _ended(self, nursery: Nursery) -> Fault:
        """A rank is dead. One that was killed could write nothing, so it comes before all; then who was first."""
        first = list(self.world.broken)
        codes = [self.world.codes[rank] for rank in first]
        aborted = -signal.SIGABRT in codes  # perhaps another's mistake
        killed = min(codes) < 0 and not aborted
        doctor.ask(self.run, self.world.alive, 2.0 if aborted else 0.2 if killed else 0.0)
        self._drain(nursery, GLANCE if killed else LAST_WORDS)
        records = self.written.error_records()
        heard = {record["rank"] for record in records}
        silent = [rank for rank in self.world.broken if rank not in heard and self.world.codes[rank] < 0]
        silent = sorted(silent, key=lambda rank: rank not in first)
        beat = read_beats(self.run)
        if silent or not records:
            finding = self._keep("killed", {rank: _fate(self.world.codes[rank]) for rank in silent or first[:1]})
            ranks = finding.culprits or first[:1]
            fault = Fault("killed", ranks, beat.get(ranks[0], {}).get("step", 0), finding.sentence)
        else:
            one = records[0]
            rank, said, code = one["rank"], one["trace"] or one["message"], one["exit_code"]
            said = said if code == 2 else f"rank {rank} failed: {said.rstrip()}"
            last = one["message"].strip().splitlines()[:1]
            finding = self._keep("failed", {rank: f"failed with {one['kind']}: {' '.join(last)}"})
            ranks, step = finding.culprits or [rank], beat.get(rank, {}).get("step", 0)
            fault = Fault("failed", ranks, step, finding.sentence, said, one["trace"] is None, code)
        self._end(nursery)
        return fault

    def _halted(self, nursery: Nursery, stopped: list[int]) -> Fault:
        """A rank is stopped or stuck."""
        fates = dict.fromkeys(stopped, "is stopped (SIGSTOP)")
        kind = "halted" if stopped else "stuck"
        wait = 0.5 if stopped else 2.0
        doctor.ask(self.run, {rank: pid for rank, pid in self.world.alive.items() if rank not in fates}, wait)
        finding = self._keep(kind, fates)
        ranks = finding.culprits or [0]
        step = read_beats(self.run).get(ranks[0], {}).get("step", 0)
        self._end(nursery)
        return Fault(kind, ranks, step, finding.sentence)

    def _keep(self, kind: str, fates: dict[int, str]) -> doctor.Finding:
        finding = doctor.diagnose(doctor.look(beats(self.run), fates), time.time())
        with suppress(OSError):
            doctor.keep(self.run, finding, kind, fates)
        return finding

    def _end(self, nursery: Nursery) -> None:
        self.world.kill(signal.SIGKILL)
        self._drain(nursery, 10.0)

    def _drain(self, nursery: Nursery, seconds: float) -> None:
        """Waits until all have ended, at most so long."""
        deadline = time.monotonic() + seconds
        while self.world.alive and time.monotonic() < deadline:
            words = nursery.heard(min(GLANCE, seconds))
            if words is None:
                return
            self.world.hear(words)

    def _weigh(self, fault: Fault) -> None:
        """Tells of a fault, and raises it where another attempt would not help."""
        if self.told:
            if fault.kind == "failed":
                raise fault.error()
            if not fault.step:
                raise RunError(f"told to stop by {signal_name(self.told)} before training began.")
            raise RunError(f"told to stop by {signal_name(self.told)}, but {fault.sentence}")
        reached = max((beat["step"] for beat in read_beats(self.run).values()), default=0)
        self.tries = 1 if reached > self.furthest else self.tries + 1
        before, self.before, self.furthest = self.before, fault, max(self.furthest, reached)
        again = before is not None and before.kind == "failed" and before.sentence == fault.sentence
        if fault.known or not self.restarts:
            raise fault.error("" if fault.known else "The others ended because of it.")
        if again and before is not None and before.step == fault.step:
            raise fault.error(f"The same happened before at step {fault.step}, so it is not tried again.")
        if self.tries > self.restarts:
            raise fault.error(f"Given up after {counted(self.restarts, 'restart')} that got no further.")
        pause = 0.0 if self.tries == 1 else min(LONGEST, PAUSE * 2.0 ** (self.tries - 2))
        after = f" after {pause:g} s" if pause else ""
        message = f"{fault.sentence} All begin again{after} from the newest good checkpoint."
        self.tell(fault.kind, message, ranks=fault.ranks, step=fault.step, restart=self.tries)
        time.sleep(pause)


def _fate(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@dataclass
class Watch:
    """What is seen of ranks that have not ended."""

    patience: float
    told: bool = False
    _looks: dict[int, int] = field(default_factory=dict)
    _marks: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def stopped(self, pids: dict[int, int]) -> list[int]:
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank, pid in pids.items() if doctor.is_stopped(pid)}
        return [rank for rank, looks in self._looks.items() if looks >= LOOKS]

    def stuck(self, seen: dict[int, dict[str, Any]]) -> bool:
        marks = {rank: (beat["step"], beat["phase"], beat["since"]) for rank, beat in seen.items()}
        if any(self._marks.get(rank) != mark for rank, mark in marks.items()):
            self._marks |= marks
            self._since = time.monotonic()
        gap, self._last = time.monotonic() - self._last, time.monotonic()
        if gap > 20 * GLANCE:  # we were stopped ourselves, and the workers with us
            self._since += gap
        begun = any(beat["step"] > 1 for beat in seen.values())
        return time.monotonic() - self._since > (self.patience if begun else max(self.patience, START))
