"""A run on several machines: one agent on each, the first of which leads.

    shardwise train job.toml --node 0/2 --address 10.0.0.1:29400     leads: plans, supervises, tells
    shardwise train --node 1/2 --address 10.0.0.1:29400              lends its machine: forks what it is told to

Leader and members tell each other ten times a second that they are there, beside all collectives. A member that is not
heard of is lost: its ranks are named, and all begin again when it is back, or without it (`run.elastic`). A member that
does not hear its leader ends its workers, so that nothing of an old attempt lives on, and comes back when it can. All
machines see the run folder; the loss of the leader ends the run, which goes on with `--resume`.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from shardwise.errors import JobError, RunError
from shardwise.guard.crew import Crew, Place
from shardwise.guard.nursery import Lines, Nursery, Word

BEAT = 0.1
LOST = 0.7  # seconds of silence
JOIN = 300.0  # seconds that agents wait for each other at the start
REFUSALS = 5  # in a row, after which a member does not ask again


@dataclass(frozen=True)
class Node:
    """Which of how many machines this is, and where the first one listens."""

    index: int
    count: int
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, address: str | None) -> Node:
        try:
            index, count = map(int, text.split("/"))
            host, _, port = (address or "").rpartition(":")
            if not 0 <= index < count or not host or not 0 < int(port) < 65536:
                raise ValueError
            return cls(index, count, host, int(port))
        except ValueError:
            raise JobError(
                f"--node {text} --address {address}: write --node 0/2 --address HOST:PORT on the first of two "
                "machines, --node 1/2 with the same address on the second."
            ) from None


class Link(Lines):
    """A line to another agent, on which a sign of life goes out all the time and silence is counted."""

    def __init__(self, link: socket.socket):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)  # before bulk data, where a queue knows the word
        super().__init__(link)
        self.silent, self._looked = 0.0, time.monotonic()
        self._lock, self.closed = threading.Lock(), False
        threading.Thread(target=self._live, daemon=True).start()

    def say(self, word: Word) -> None:
        with self._lock:
            super().say(word)

    def heard(self) -> list[Word] | None:
        words = super().heard()
        self.silent = 0.0
        return words

    def count(self) -> float:
        """Seconds of silence; those in which nobody listened count little."""
        now = time.monotonic()
        self.silent += min(now - self._looked, 2 * BEAT)
        self._looked = now
        return self.silent

    def close(self) -> None:
        self.closed = True
        self.link.close()

    def _live(self) -> None:
        while not self.closed:
            self.say({"beat": 1})
            time.sleep(BEAT)


class Nodes(Crew):
    """The leader's crew: places of its own, and those of members."""

    def __init__(self, run: Path, nursery: Nursery, slots: int, node: Node):
        super().__init__(run.resolve(), nursery, slots)
        self.node, self.each = node, slots
        try:
            self._listener = socket.create_server((node.host, node.port), reuse_port=False)
        except OSError as error:
            raise JobError(f"--address {node.host}:{node.port} cannot be listened on: {error.strerror}.") from None
        self._store = dist.TCPStore(node.host, 0, None, True, wait_for_workers=False)
        self.wait_for(slots * node.count, JOIN)
        if self.size < slots * node.count:
            here = sorted(place.node for place in self.places)
            raise RunError(f"of {node.count} nodes only {here} came to {node.host}:{node.port} within {JOIN:g} s.")

    def store(self, name: str) -> str:
        return f"tcp:{self.node.host}:{self._store.port}:{name}"

    def environment(self, place: Place) -> dict[str, str]:
        return interface(self.node.host) if place.node == 0 else {}

    def files(self) -> list[Any]:
        return [*super().files(), self._listener]

    def hear(self, seconds: float) -> None:
        for ready in select.select(self.files(), [], [], seconds)[0]:
            if ready is self._listener:
                self._admit()
            else:
                self.take(ready)
        for place in list(self.places):
            if isinstance(place.lines, Link) and place.lines.count() > LOST:
                self._lose(place, f"has not been heard of for {place.lines.silent:.1f} s")

    def take(self, lines: Lines) -> None:
        if not isinstance(lines, Link):
            super().take(lines)
            return
        words = lines.heard()
        if words is None:
            for place in list(self.places):
                if place.lines is lines:
                    self._lose(place, "closed its link")
            return
        self.deal(words)

    def wait_for(self, size: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.size < size and time.monotonic() < deadline:
            self.hear(BEAT)

    def _admit(self) -> None:
        link, (host, *_) = self._listener.accept()
        link.settimeout(2.0)
        lines = Link(link)
        index = _introduction(lines)
        link.settimeout(None)
        if not 0 < index < self.node.count or any(place.node == index for place in self.places):
            lines.say({"refused": f"node {index} of {self.node.count} is not wanted here, or here already."})
            lines.close()
            return
        self.places.append(Place(index, lines, list(range(self.each)), host))
        self.places.sort(key=lambda place: place.node)

    def _lose(self, place: Place, why: str) -> None:
        self.places.remove(place)
        assert isinstance(place.lines, Link)
        place.lines.close()
        for world in self.worlds():
            for rank in world.ranks.get(place.node, []):
                world.lost[rank] = f"is cut off: node {place.node} ({place.host}) {why}"
                world.codes.setdefault(rank, -signal.SIGKILL)

    def close(self) -> None:
        for place in self.places:
            if isinstance(place.lines, Link):
                place.lines.say({"end": True})
                place.lines.close()
        self._listener.close()
        super().close()


def _introduction(lines: Link) -> int:
    """Which node a new link says that it is; -1 where it is none of ours."""
    deadline = time.monotonic() + 2.0
    with suppress(ValueError, TypeError, AttributeError):
        while time.monotonic() < deadline and (words := lines.heard()) is not None:
            for word in words:  # a sign of life may come first
                if "node" in word:
                    return int(word["node"])
    return -1


def open_store(text: str, world: int) -> dist.Store:
    """Where the ranks of a world find each other, as a crew has told it."""
    if not text.startswith("tcp:"):
        return dist.FileStore(text, world)
    _, host, port, name = text.split(":")  # a name of its own for each attempt: nobody reads addresses of dead ones
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), None, False))


def interface(address: str) -> dict[str, str]:
    """What tells gloo by which network it reaches the others: by default it takes the one of the host's name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


@dataclass
class Member:
    """An agent that lends its machine: everything from the leader goes to the nursery, and back."""

    node: Node
    nursery: Nursery
    worlds: set[str] = field(default_factory=set)
    refused: int = 0

    def attend(self) -> None:
        """Until the leader says that all is done. Raises where it cannot be reached."""
        self.nursery.say({"grace": 0})  # alone its workers cannot save
        while True:
            link = self._connect()
            if self._relay(link):
                return
            for world in self.worlds:
                self.nursery.say({"kill": world, "number": signal.SIGKILL})
            link.close()

    def _connect(self) -> Link:
        deadline = time.monotonic() + JOIN
        while True:
            try:
                link = Link(socket.create_connection((self.node.host, self.node.port), timeout=2.0))
                link.link.settimeout(None)
                link.say({"node": self.node.index})
                return link
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"the first node was not to be reached at {self.node.host}:{self.node.port} for {JOIN:g} s: "
                        f"{error}. If its run has ended, start both again with --resume."
                    ) from None
                time.sleep(BEAT)

    def _relay(self, link: Link) -> bool:
        """Whether the run is done; if not, the leader is lost."""
        network = interface(link.link.getsockname()[0])
        while True:
            ready = select.select([link, self.nursery], [], [], BEAT)[0]
            if self.nursery in ready:
                words = self.nursery.heard()
                if words is None:
                    raise RunError("the process that starts workers was killed; the workers ended with it.")
                for word in words:
                    link.say(word)
            if link in ready:
                orders = link.heard()
                if orders is None:
                    return False
                for order in orders:
                    if "end" in order:
                        return True
                    if "refused" in order:
                        self.refused += 1  # one that comes back may be here before it counts as lost
                        if self.refused > REFUSALS:
                            raise RunError(f"the first node says: {order['refused']}")
                        time.sleep(1.0)
                        return False
                    if "fork" in order:
                        self.worlds.add(order["fork"])
                        self.refused = 0
                        order["environment"] = network
                    if "beat" not in order:
                        self.nursery.say(order)
            elif link.count() > LOST:
                return False
