"""Where workers can run: the places of one machine or of several, as one.

A place is a machine with a nursery and some slots, each for a process and its device. Its nursery is our own child, or
belongs to an agent on another machine that passes everything on (`shardwise.guard.nodes`).
"""

from __future__ import annotations

import select
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import RunError
from shardwise.guard.memory import memory_of
from shardwise.guard.nursery import Lines, Nursery, Word


@dataclass
class Place:
    node: int
    lines: Lines
    slots: list[int]
    host: str = ""


@dataclass
class World:
    """The workers of one attempt, or the stand-bys for the next."""

    name: str
    layout: str
    size: int
    ranks: dict[int, list[int]]
    """By node."""
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    stopped: dict[int, float] = field(default_factory=dict)
    """Ranks that are stopped, and since when."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks whose machine is not heard of any more, and what is known of it."""

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.codes]

    @property
    def born(self) -> bool:
        return len(self.pids) == self.size

    @property
    def broken(self) -> list[int]:
        return [rank for rank, code in self.codes.items() if code]

    def hear(self, word: Word) -> None:
        if "pids" in word:
            self.pids |= {int(rank): pid for rank, pid in word["pids"].items()}
        elif "code" in word:
            self.codes[word["rank"]] = word["code"]
            self.stopped.pop(word["rank"], None)
        elif word["stopped"]:
            self.stopped.setdefault(word["rank"], time.monotonic())
        else:
            self.stopped.pop(word["rank"], None)


class Crew:
    """The places that a run has. `nursery`: where workers of this machine come from."""

    def __init__(self, run: Path, nursery: Nursery, slots: int):
        self.run, self.places = run, [Place(0, nursery, list(range(slots)))]
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        self._worlds: dict[str, World] = {}

    @property
    def size(self) -> int:
        return sum(len(place.slots) for place in self.places)

    def store(self, name: str) -> str:
        """Where the ranks of a world find each other: a file, where all are on one machine."""
        return str(Path(self._folder.name) / name)

    def environment(self, place: Place) -> dict[str, str]:
        return {}

    def fork(self, name: str, layout: str, size: int, entry: str, more: list[str], held: bool) -> World:
        """Starts the workers of a world, or stand-bys for it, on the first slots that there are."""
        shares, first = {}, 0
        for place in self.places:
            count = min(len(place.slots), size - first)
            shares[place.node] = list(range(first, first + count))
            first += count
        assert first == size, f"{size} workers, but {self.size} slots"
        order = {"fork": name, "size": size, "entry": entry, "held": held}
        words = [str(self.run), layout, self.store(name), *more]
        for place in self.places:
            if ranks := shares[place.node]:
                own: dict[str, Any] = {"ranks": ranks, "slots": place.slots[: len(ranks)], "arguments": words}
                own |= {"memory": memory_of(self.run, place.node), "environment": self.environment(place)}
                place.lines.say(order | own)
        self._worlds[name] = World(name, layout, size, shares)
        return self._worlds[name]

    def forget(self) -> None:
        """The snapshots of this run: what is left of an earlier start, or of this one at its end."""
        for place in self.places:
            place.lines.say({"forget": memory_of(self.run, place.node)})

    def release(self, world: World) -> None:
        for place in self.places:
            if world.ranks.get(place.node):
                place.lines.say({"release": world.name})

    def kill(self, world: World, number: int, ranks: list[int] | None = None) -> None:
        for place in self.places:
            if world.ranks.get(place.node):
                place.lines.say({"kill": world.name, "number": number, **({} if ranks is None else {"ranks": ranks})})

    def hear(self, seconds: float) -> None:
        """Takes in what workers did, after a wait of at most so long for the first word."""
        for lines in select.select(self.files(), [], [], seconds)[0]:
            self.take(lines)

    def files(self) -> list[Any]:
        return [place.lines for place in self.places]

    def worlds(self) -> list[World]:
        return list(self._worlds.values())

    def wait_for(self, size: int, seconds: float) -> None:
        """Waits for machines that may come back, at most so long, until there are so many slots."""

    def take(self, lines: Lines) -> None:
        words = lines.heard()
        if words is None:
            raise RunError("the process that starts workers was killed; the workers ended with it.")
        self.deal(words)

    def deal(self, words: list[Word]) -> None:
        for word in words:
            if word.get("world") in self._worlds:
                self._worlds[word["world"]].hear(word)

    def drop(self, world: World, ranks: list[int]) -> None:
        """The slots of these ranks are not used any more."""
        for place in self.places:
            own = world.ranks.get(place.node, [])
            bad = {place.slots[own.index(rank)] for rank in ranks if rank in own}
            place.slots = [slot for slot in place.slots if slot not in bad]

    def end(self, world: World | None, seconds: float = 10.0) -> None:
        """Kills all of a world, and waits until they are gone."""
        if world is None:
            return
        self.kill(world, 9)
        self.drain(world, seconds)
        self._worlds.pop(world.name, None)

    def drain(self, world: World, seconds: float) -> None:
        """Waits until all have ended, at most so long."""
        deadline = time.monotonic() + seconds
        while (world.alive or not world.born) and time.monotonic() < deadline:
            self.hear(min(0.1, seconds))

    def close(self) -> None:
        self._folder.cleanup()
