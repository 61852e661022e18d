"""The pool of worker slots of a run, on one machine or several.

Each node has a fork server and some slots, each for one process and its device. The local fork server is our own child;
that of another node belongs to its agent, which relays all messages (`shardwise.workers.nodes`)."""

import select
import signal
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.comm.world import interface_environment
from shardwise.errors import RunError
from shardwise.workers.fork_server import ForkServer, Message, MessageChannel
from shardwise.workers.snapshots import snapshot_key

FORK_SERVER_LOST = "the fork server was killed, and its workers with it; continue with --resume."


@dataclass
class NodeSlots:
    index: int
    channel: MessageChannel
    slots: list[int]
    host: str = ""


@dataclass
class WorkerGroup:
    """The workers of one attempt, or the standby workers for the next one."""

    name: str
    layout: str
    size: int
    ranks_by_node: dict[int, list[int]]
    pids: dict[int, int] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    stopped_since: dict[int, float] = field(default_factory=dict)  # when a stopped (SIGSTOP) rank was first seen
    lost_ranks: dict[int, str] = field(default_factory=dict)  # ranks whose node is lost, with the reason

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
        elif message.get("stopped"):
            self.stopped_since.setdefault(message["rank"], time.monotonic())
        else:  # it continues, or has ended
            self.stopped_since.pop(message["rank"], None)
        if "code" in message:
            self.exit_codes[message["rank"]] = message["code"]


class WorkerPool:
    """Starts, signals and monitors the workers of a run. `fork_server` forks those of this machine."""

    def __init__(self, run_path: Path, fork_server: ForkServer, slots: int):
        self.run_path, self.nodes = run_path, [NodeSlots(0, fork_server, list(range(slots)))]
        self.url = ""  # of a run in an object store: other nodes have folders of their own
        self.is_finished = False  # whether the run has taken all its steps, which other nodes are told at the end
        self.failure = 0  # the exit code of a run that failed: other nodes end with it, too, and are not started again
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        self._worker_groups: dict[str, WorkerGroup] = {}

    @property
    def size(self) -> int:
        """The number of usable slots."""
        return sum(len(node.slots) for node in self.nodes)

    def store_address(self, name: str) -> str:
        """Returns the address of a worker group's rendezvous store: a file, since all ranks share this machine."""
        return str(Path(self._folder.name) / name)

    def environment(self) -> dict[str, str]:
        """Returns extra environment variables for the workers of this machine: they communicate over loopback."""
        return interface_environment("127.0.0.1")

    def fork(self, name: str, layout: str, size: int, entry: str, extra: list[str], as_standby: bool) -> WorkerGroup:
        """Starts a group of workers, or of standby workers, on the first free slots; `extra` are more arguments."""
        unplaced = iter(range(size))
        ranks_by_node = {node.index: list(islice(unplaced, len(node.slots))) for node in self.nodes}
        assert not list(unplaced), f"{size} workers, but {self.size} slots"
        command = {"fork": name, "size": size, "entry": entry, "standby": as_standby}
        for node in self.nodes:
            if ranks := ranks_by_node[node.index]:
                placement = {"ranks": ranks, "slots": node.slots[: len(ranks)]}
                snapshots = {"snapshots": snapshot_key(self.run_path, node.index)}
                environment = {} if node.index else {"environment": self.environment()}
                place = self.url if self.url and node.index else str(self.run_path)
                arguments = {"arguments": [place, layout, self.store_address(name), *extra]}
                node.channel.send(command | arguments | placement | snapshots | environment)
        self._worker_groups[name] = WorkerGroup(name, layout, size, ranks_by_node)
        return self._worker_groups[name]

    def remove_snapshots(self) -> None:
        for node in self.nodes:
            node.channel.send({"remove_snapshots": snapshot_key(self.run_path, node.index)})

    def release(self, worker_group: WorkerGroup) -> None:
        """Lets the standby workers of a group continue."""
        self._send(worker_group, {"release": worker_group.name})

    def kill(self, worker_group: WorkerGroup, signal_number: int, ranks: list[int] | None = None) -> None:
        """Sends a signal to these ranks, or to the whole group."""
        selection = {} if ranks is None else {"ranks": ranks}
        self._send(worker_group, {"kill": worker_group.name, "signal": signal_number, **selection})

    def _send(self, worker_group: WorkerGroup, command: Message) -> None:
        for node in self.nodes:
            if worker_group.ranks_by_node.get(node.index):
                node.channel.send(command)

    def receive(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for messages and applies them."""
        for channel in select.select(self.pollables(), [], [], timeout)[0]:
            self.receive_from(channel)

    def pollables(self) -> list[Any]:
        return [node.channel for node in self.nodes]

    def wait_for_slots(self, size: int, timeout: float) -> None:
        """Waits up to `timeout` seconds until the pool has `size` slots. On one machine, returns at once."""

    def receive_from(self, channel: MessageChannel) -> None:
        if (messages := channel.receive()) is None:
            raise RunError(FORK_SERVER_LOST)
        self.dispatch(messages)

    def dispatch(self, messages: list[Message], node: int = 0) -> None:
        """Applies the reports of a node about its own ranks."""
        for message in messages:
            group = self._worker_groups.get(message.get("group", ""))
            ranks = map(int, message.get("pids", [message.get("rank", -1)]))
            if group is not None and set(ranks) <= set(group.ranks_by_node.get(node, [])):
                group.receive(message)

    def exclude_ranks(self, worker_group: WorkerGroup, ranks: list[int]) -> None:
        """Removes the slots of these ranks from the pool."""
        for node in self.nodes:
            node_ranks = worker_group.ranks_by_node.get(node.index, [])
            excluded = {node.slots[node_ranks.index(rank)] for rank in ranks if rank in node_ranks}
            node.slots = [slot for slot in node.slots if slot not in excluded]

    def kill_and_wait(self, worker_group: WorkerGroup | None, timeout: float = 10.0) -> None:
        if worker_group is None:
            return
        self.kill(worker_group, signal.SIGKILL)
        self.wait_for_exit(worker_group, timeout)
        self._worker_groups.pop(worker_group.name, None)

    def wait_for_exit(self, worker_group: WorkerGroup, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (worker_group.alive_ranks or not worker_group.all_started) and time.monotonic() < deadline:
            self.receive(min(0.1, timeout))

    def close(self) -> None:
        self._folder.cleanup()
