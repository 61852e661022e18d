"""Keeping a world of workers alive: a rank that dies, stops or gets stuck is named at once, and all begin again.

How a rank is found: one that ends or is stopped is reported by its parent, the nursery; one that is stuck has made no
new mark in its beat, nor has any other rank, for `patience` seconds. None of it waits for a collective to run out of
time. A fault ends the attempt: what the ranks know is kept for the doctor, all are killed, and a new attempt goes on
from the newest good checkpoint, with stand-bys where there are some: workers that are ready but for the state.

What would only happen again is not tried again: errors that we raise on purpose, another exception twice at the same
step, and `restarts` attempts in a row none of which got further than one before it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import RunError, ShardwiseError, UserError
from shardwise.guard import doctor
from shardwise.guard.beat import beats, forget_beats, read_beats
from shardwise.guard.crew import Crew, World
from shardwise.words import counted, ranks_text, signal_name

GLANCE = 0.1
STOPPED = 0.2  # seconds that a rank is stopped; Ctrl-Z stops and wakes all at once, but not in one instant
STEPPING = 2.0  # seconds of steps after which stand-bys are worth their while
START = 60.0  # seconds of patience at least, until a step is done: the first ones build, compile and connect
LAST_WORDS = 0.5  # seconds that others get to write down why they end
PAUSE, LONGEST = 0.5, 60.0  # seconds before another try; doubled each time, up to the second


@dataclass(frozen=True)
class Fault:
    kind: str
    """killed, halted, stuck, failed or lost."""
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


class Written(Protocol):
    """What failed ranks wrote down."""

    def error_records(self) -> list[dict[str, Any]]: ...
    def clear_errors(self) -> None: ...


@dataclass
class Supervisor:
    run: Path
    crew: Crew
    entry: str
    layout: str
    size: int
    restarts: int
    patience: float
    written: Written
    tell: Callable[..., None]
    """Takes a kind of event, a message, and facts."""
    replan: Callable[[int], tuple[str, int]] | None = None
    """Of a run that may go on with fewer processes: a layout for at most so many, and how many it uses."""
    rejoin: float = 0.0
    """Seconds that a lost machine has to come back."""
    standby: bool = False
    """Whether a second world of workers waits, ready but for the state, while the first one trains."""
    told: int = 0
    """The signal that this run was told to stop by."""
    world: World | None = None
    waiting: World | None = None
    furthest: int = -1
    tries: int = 0
    before: Fault | None = None
    blamed: set[int] = field(default_factory=set)
    """Ranks that were at fault in every try since the run last got further."""
    number: int = 0
    growing: bool = False

    def __post_init__(self) -> None:
        self.wanted = self.layout, self.size

    def pass_on(self, number: int) -> None:
        """A signal to the launcher is one to every worker; they end by themselves."""
        self.told = number
        if self.world is not None:
            self.crew.kill(self.world, number)

    def supervise(self, resume: bool) -> None:
        """Runs the world to its end. Raises the fault that nothing helps against."""
        self.crew.forget()
        try:
            while True:
                fault = self._attempt(resume)
                if fault is None:
                    return
                self._weigh(fault)
                resume = True
        finally:
            for world in (self.world, self.waiting):
                self.crew.end(world)
            self.crew.forget()

    def _attempt(self, resume: bool) -> Fault | None:
        """One attempt. Returns what ended it, None where all is done."""
        forget_beats(self.run)
        self.written.clear_errors()
        ready = self._ready(resume)
        if self.crew.size < self.size:
            return Fault("lost", [], max(self.furthest, 0), "a node was lost while all began again.")
        self.world = world = ready or self._fork(["--resume"] if resume else [], held=False)
        watch = Watch(self.patience)
        while True:
            born = world.born
            self.crew.hear(GLANCE)
            if world.born and not born:
                watch = Watch(self.patience)  # until now PyTorch was imported
            if self.told and not watch.told:
                watch.told = True
                self.crew.kill(world, self.told)  # also those that were just born
            if world.lost:
                return self._lost(world)
            if world.broken:
                return self._ended(world)
            if world.born and not world.alive:
                return self._attempt(resume=True) if self._grown() else None
            if self.size < self.wanted[1] <= self.crew.size and watch.stepping and not self.growing:
                self.growing = True
                self.crew.kill(world, signal.SIGTERM)  # they save, and end
            now = time.monotonic()
            stopped = [rank for rank, since in world.stopped.items() if now - since >= STOPPED]
            seen = read_beats(self.run)
            if stopped or (world.born and watch.stuck(seen)):
                return self._halted(world, stopped)
            if self.standby and watch.stepping > STEPPING and not self.told:
                self._stand_by()

    def _grown(self) -> bool:
        """Whether workers ended to make room for more."""
        if not self.growing or self.told:
            return False
        self.growing, (self.layout, self.size) = False, self.wanted
        message = f"a node is back: going on with {counted(self.size, 'process')} in layout '{self.layout}'."
        self.tell("more", message, layout=self.layout)
        return True

    def _ready(self, resume: bool) -> World | None:
        """The stand-bys, where they are well; else they are ended."""
        ready, self.waiting = self.waiting, None
        if ready is not None and resume and ready.layout == self.layout and not ready.codes:
            self.crew.release(ready)
            return ready
        self.crew.end(ready)
        return None

    def _fork(self, more: list[str], held: bool) -> World:
        self.number += 1
        name = f"world-{self.number}-{time.monotonic_ns()}"
        return self.crew.fork(name, self.layout, self.size, self.entry, more, held)

    def _stand_by(self) -> None:
        if self.waiting is not None and self.waiting.codes:
            self.crew.end(self.waiting)
            self.standby, self.waiting = False, None  # what cannot even wait is not tried again
        elif self.waiting is None:
            self.waiting = self._fork(["--resume"], held=True)

    def _ended(self, world: World) -> Fault:
        """A rank is dead. One that was killed could write nothing, so it comes before all; then who was first."""
        first = list(world.broken)
        codes = [world.codes[rank] for rank in first]
        aborted = -signal.SIGABRT in codes  # perhaps another's mistake
        killed = min(codes) < 0 and not aborted
        self._ask(world, world.alive, 2.0 if aborted else 0.1 if killed else 0.0)
        self.crew.drain(world, GLANCE if killed else LAST_WORDS)
        if world.lost:  # its machine was heard of last, but was first
            return self._lost(world)
        records = self.written.error_records()
        heard = {record["rank"] for record in records}
        silent = [rank for rank in world.broken if rank not in heard and world.codes[rank] < 0]
        silent = sorted(silent, key=lambda rank: rank not in first)
        beat = read_beats(self.run)
        if silent or not records:
            finding = self._keep("killed", {rank: _fate(world.codes[rank]) for rank in silent or first[:1]})
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
        self.crew.end(world)
        return fault

    def _halted(self, world: World, stopped: list[int]) -> Fault:
        """A rank is stopped or stuck."""
        fates = dict.fromkeys(stopped, "is stopped (SIGSTOP)")
        kind = "halted" if stopped else "stuck"
        self._ask(world, [rank for rank in world.alive if rank not in fates], 0.3 if stopped else 2.0)
        finding = self._keep(kind, fates)
        ranks = finding.culprits or [0]
        step = read_beats(self.run).get(ranks[0], {}).get("step", 0)
        self.crew.end(world)
        return Fault(kind, ranks, step, finding.sentence)

    def _lost(self, world: World) -> Fault:
        """A machine is gone, or cut off."""
        self._keep("lost", world.lost)
        ranks, step = sorted(world.lost), max((beat["step"] for beat in read_beats(self.run).values()), default=0)
        whys = sorted(set(world.lost.values()))
        verb = whys[0] if len(ranks) == 1 else whys[0].replace("is cut off", "are cut off")
        self.crew.end(world)
        return Fault("lost", ranks, step, f"{ranks_text(ranks)} {verb}, in step {step}.")

    def _ask(self, world: World, ranks: list[int], seconds: float) -> None:
        doctor.ask(self.run, ranks, seconds, lambda: self.crew.kill(world, signal.SIGUSR1, ranks))

    def _keep(self, kind: str, fates: dict[int, str]) -> doctor.Finding:
        finding = doctor.diagnose(doctor.look(beats(self.run), fates), time.time())
        with suppress(OSError):
            doctor.keep(self.run, finding, kind, fates)
        return finding

    def _weigh(self, fault: Fault) -> None:
        """Tells of a fault, and raises it where another attempt would not help."""
        if self.told:
            if fault.kind == "failed":
                raise fault.error()
            if not fault.step:
                raise RunError(f"told to stop by {signal_name(self.told)} before training began.")
            raise RunError(f"told to stop by {signal_name(self.told)}, but {fault.sentence}")
        reached = max((beat["step"] for beat in read_beats(self.run).values()), default=0)
        self.blamed = set(fault.ranks) if reached > self.furthest else self.blamed & set(fault.ranks)
        self.tries = 1 if reached > self.furthest else self.tries + 1
        before, self.before, self.furthest = self.before, fault, max(self.furthest, reached)
        again = before is not None and before.kind == "failed" and before.sentence == fault.sentence
        if fault.known or not self.restarts:
            raise fault.error("" if fault.known else "The others ended because of it.")
        if again and before is not None and before.step == fault.step:
            raise fault.error(f"The same happened before at step {fault.step}, so it is not tried again.")
        if self.tries > self.restarts and fault.kind != "failed" and 0 < len(self.blamed) < self.size:
            self._go_on_without(sorted(self.blamed), fault)
            return
        if self.tries > self.restarts:
            raise fault.error(f"Given up after {counted(self.restarts, 'restart')} that got no further.")
        if self.crew.size < self.size:
            self._wait_for_nodes(fault)
            return
        pause = 0.0 if self.tries == 1 else min(LONGEST, PAUSE * 2.0 ** (self.tries - 2))
        after = f" after {pause:g} s" if pause else ""
        message = f"{fault.sentence} All begin again{after} from the newest good checkpoint."
        self.tell(fault.kind, message, ranks=fault.ranks, step=fault.step, restart=self.tries)
        time.sleep(pause)

    def _wait_for_nodes(self, fault: Fault) -> None:
        """Until lost machines are back; goes on without them where that may be."""
        wait = f"Waiting at most {self.rejoin:g} s for it to come back."
        self.tell("lost", f"{fault.sentence} {wait}", ranks=fault.ranks, step=fault.step, restart=self.tries)
        self.crew.wait_for(self.size, self.rejoin)
        if self.crew.size >= self.size:
            return
        if self.replan is None:
            raise fault.error(f"It did not come back within {self.rejoin:g} s; start it again and go on with --resume.")
        self.layout, self.size = self.replan(self.crew.size)
        message = f"going on without it, with {counted(self.size, 'process')} in layout '{self.layout}'."
        self.tell("fewer", message, ranks=fault.ranks, step=fault.step, layout=self.layout)

    def _go_on_without(self, ranks: list[int], fault: Fault) -> None:
        """Takes their places from the run, and a layout for those that are left; raises where that may not be."""
        given_up = f"Given up after {counted(self.restarts, 'restart')} that got no further."
        if self.replan is None or self.world is None:
            raise fault.error(given_up)
        self.crew.drop(self.world, ranks)
        try:
            self.layout, self.size = self.replan(self.crew.size)
        except ShardwiseError as error:
            raise fault.error(f"{given_up} Without {ranks_text(ranks)} there is no layout: {error}") from None
        self.tries, self.blamed = 0, set()
        self.tell(
            "fewer",
            f"{fault.sentence} The place of {ranks_text(ranks)} is given up after {counted(self.restarts, 'restart')}; "
            f"going on with {counted(self.size, 'process')} in layout '{self.layout}'.",
            ranks=ranks, step=fault.step, layout=self.layout,
        )  # fmt: skip


def _fate(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@dataclass
class Watch:
    """What is seen of ranks that have not ended."""

    patience: float
    told: bool = False
    stepping: float = 0.0
    """Seconds since a step was done for the first time."""
    _marks: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)
    _first: tuple[int, float] = (0, 0.0)
    """The first step that was seen, and when another one was."""

    def stuck(self, seen: dict[int, dict[str, Any]]) -> bool:
        marks = {rank: (beat["step"], beat["phase"], beat["since"]) for rank, beat in seen.items()}
        if any(self._marks.get(rank) != mark for rank, mark in marks.items()):
            self._marks |= marks
            self._since = time.monotonic()
        now = time.monotonic()
        gap, self._last = now - self._last, now
        if gap > 20 * GLANCE:  # we were stopped ourselves, and the workers with us
            self._since += gap
        step, when = self._first
        latest = max((beat["step"] for beat in seen.values()), default=0)
        if not step or (latest > step and not when):
            self._first = step or latest, now if step else 0.0
        self.stepping = now - when if when else 0.0
        begun = any(beat["step"] > 1 for beat in seen.values())
        return now - self._since > (self.patience if begun else max(self.patience, START))
