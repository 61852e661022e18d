"""Where workers can run: the places of one machine or of several, as one.

A place is a machine with a nursery and some slots, each for a process and its device. Its nursery is our own child, or
belongs to an agent on another machine that passes everything on (`shardwise.workers.nodes`).
"""

from __future__ import annotations

import select
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import RunError
from shardwise.workers.fork_server import ForkServer, Message, MessageChannel
from shardwise.workers.snapshots import snapshot_folder


@dataclass
class NodeSlots:
    node: int
    channel: MessageChannel
    slots: list[int]
    host: str = ""


@dataclass
class WorkerGroup:
    """The workers of one attempt, or the stand-bys for the next."""

    name: str
    layout: str
    size: int
    ranks_by_node: dict[int, list[int]]
    """By node."""
    pids: dict[int, int] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    stopped_since: dict[int, float] = field(default_factory=dict)
    """Ranks that are stopped, and since when."""
    lost_ranks: dict[int, str] = field(default_factory=dict)
    """Ranks whose machine is not heard of any more, and what is known of it."""

    @property
    def alive_ranks(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.exit_codes]

    @property
    def all_started(self) -> bool:
        return len(self.pids) == self.size

    @property
    def failed_ranks(self) -> list[int]:
        return [rank for rank, code in self.exit_codes.items() if code]

    def receive(self, message: Message) -> None:
        if "pids" in message:
            self.pids |= {int(rank): pid for rank, pid in message["pids"].items()}
        elif "code" in message:
            self.exit_codes[message["rank"]] = message["code"]
            self.stopped_since.pop(message["rank"], None)
        elif message["stopped"]:
            self.stopped_since.setdefault(message["rank"], time.monotonic())
        else:
            self.stopped_since.pop(message["rank"], None)


class WorkerPool:
    """The places that a run has. `nursery`: where workers of this machine come from."""

    def __init__(self, run: Path, fork_server: ForkServer, slots: int):
        self.run, self.nodes = run, [NodeSlots(0, fork_server, list(range(slots)))]
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        self._worker_groups: dict[str, WorkerGroup] = {}

    @property
    def size(self) -> int:
        return sum(len(node_slots.slots) for node_slots in self.nodes)

    def store_address(self, name: str) -> str:
        """Where the ranks of a world find each other: a file, where all are on one machine."""
        return str(Path(self._folder.name) / name)

    def environment(self, node_slots: NodeSlots) -> dict[str, str]:
        return {}

    def fork(
        self, name: str, layout: str, size: int, entry: str, extra_arguments: list[str], as_standby: bool
    ) -> WorkerGroup:
        """Starts the workers of a world, or stand-bys for it, on the first slots that there are."""
        ranks_by_node, first = {}, 0
        for node_slots in self.nodes:
            count = min(len(node_slots.slots), size - first)
            ranks_by_node[node_slots.node] = list(range(first, first + count))
            first += count
        assert first == size, f"{size} workers, but {self.size} slots"
        command = {"fork": name, "size": size, "entry": entry, "standby": as_standby}
        arguments = [str(self.run), layout, self.store_address(name), *extra_arguments]
        for node_slots in self.nodes:
            if ranks := ranks_by_node[node_slots.node]:
                node_command: dict[str, Any] = {
                    "ranks": ranks,
                    "slots": node_slots.slots[: len(ranks)],
                    "arguments": arguments,
                }
                node_command |= {
                    "memory": snapshot_folder(self.run, node_slots.node),
                    "environment": self.environment(node_slots),
                }
                node_slots.channel.send(command | node_command)
        self._worker_groups[name] = WorkerGroup(name, layout, size, ranks_by_node)
        return self._worker_groups[name]

    def remove_snapshots(self) -> None:
        """The snapshots of this run: what is left of an earlier start, or of this one at its end."""
        for node_slots in self.nodes:
            node_slots.channel.send({"remove_snapshots": snapshot_folder(self.run, node_slots.node)})

    def release(self, worker_group: WorkerGroup) -> None:
        for node_slots in self.nodes:
            if worker_group.ranks_by_node.get(node_slots.node):
                node_slots.channel.send({"release": worker_group.name})

    def kill(self, worker_group: WorkerGroup, signal_number: int, ranks: list[int] | None = None) -> None:
        for node_slots in self.nodes:
            if worker_group.ranks_by_node.get(node_slots.node):
                node_slots.channel.send(
                    {"kill": worker_group.name, "signal": signal_number, **({} if ranks is None else {"ranks": ranks})}
                )

    def receive(self, timeout: float) -> None:
        """Takes in what workers did, after a wait of at most so long for the first word."""
        for channel in select.select(self.pollables(), [], [], timeout)[0]:
            self.receive_from(channel)

    def pollables(self) -> list[Any]:
        return [node_slots.channel for node_slots in self.nodes]

    def worker_groups(self) -> list[WorkerGroup]:
        return list(self._worker_groups.values())

    def wait_for_slots(self, size: int, timeout: float) -> None:
        """Waits for machines that may come back, at most so long, until there are so many slots."""

    def receive_from(self, channel: MessageChannel) -> None:
        messages = channel.receive()
        if messages is None:
            raise RunError("the process that starts workers was killed; the workers ended with it.")
        self.dispatch(messages)

    def dispatch(self, messages: list[Message]) -> None:
        for message in messages:
            if message.get("world") in self._worker_groups:
                self._worker_groups[message["world"]].receive(message)

    def exclude_ranks(self, worker_group: WorkerGroup, ranks: list[int]) -> None:
        """The slots of these ranks are not used any more."""
        for node_slots in self.nodes:
            node_ranks = worker_group.ranks_by_node.get(node_slots.node, [])
            excluded_slots = {node_slots.slots[node_ranks.index(rank)] for rank in ranks if rank in node_ranks}
            node_slots.slots = [slot for slot in node_slots.slots if slot not in excluded_slots]

    def kill_and_wait(self, worker_group: WorkerGroup | None, timeout: float = 10.0) -> None:
        """Kills all of a world, and waits until they are gone."""
        if worker_group is None:
            return
        self.kill(worker_group, 9)
        self.wait_for_exit(worker_group, timeout)
        self._worker_groups.pop(worker_group.name, None)

    def wait_for_exit(self, worker_group: WorkerGroup, timeout: float) -> None:
        """Waits until all have ended, at most so long."""
        deadline = time.monotonic() + timeout
        while (worker_group.alive_ranks or not worker_group.all_started) and time.monotonic() < deadline:
            self.receive(min(0.1, timeout))

    def close(self) -> None:
        self._folder.cleanup()
