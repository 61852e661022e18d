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
from shardwise.workers.fork_server import ForkServer, Message, MessageChannel
from shardwise.workers.worker_pool import NodeSlots, WorkerPool

HEARTBEAT_INTERVAL = 0.1
HEARTBEAT_TIMEOUT = 0.7  # seconds of silence
JOIN_TIMEOUT = 300.0  # seconds that agents wait for each other at the start
MAX_REJECTIONS = 5  # in a row, after which a member does not ask again


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


class HeartbeatChannel(MessageChannel):
    """A line to another agent, on which a sign of life goes out all the time and silence is counted."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            connection.setsockopt(
                socket.IPPROTO_IP, socket.IP_TOS, 0x10
            )  # before bulk data, where a queue knows the word
        super().__init__(connection)
        self.silent_seconds, self._last_check = 0.0, time.monotonic()
        self._lock, self.closed = threading.Lock(), False
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, message: Message) -> None:
        with self._lock:
            super().send(message)

    def receive(self) -> list[Message] | None:
        messages = super().receive()
        self.silent_seconds = 0.0
        return messages

    def silence_seconds(self) -> float:
        """Seconds of silence; those in which nobody listened count little."""
        now = time.monotonic()
        self.silent_seconds += min(now - self._last_check, 2 * HEARTBEAT_INTERVAL)
        self._last_check = now
        return self.silent_seconds

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    def _send_heartbeats(self) -> None:
        while not self.closed:
            self.send({"heartbeat": 1})
            time.sleep(HEARTBEAT_INTERVAL)


class NodeCoordinator(WorkerPool):
    """The leader's crew: places of its own, and those of members."""

    def __init__(self, run: Path, fork_server: ForkServer, slots: int, node: Node):
        super().__init__(run.resolve(), fork_server, slots)
        self.node, self.slots_per_node = node, slots
        try:
            self._listener = socket.create_server((node.host, node.port), reuse_port=False)
        except OSError as error:
            raise JobError(f"--address {node.host}:{node.port} cannot be listened on: {error.strerror}.") from None
        self._store = dist.TCPStore(node.host, 0, None, True, wait_for_workers=False)
        self.wait_for_slots(slots * node.count, JOIN_TIMEOUT)
        if self.size < slots * node.count:
            here = sorted(node_slots.node for node_slots in self.nodes)
            raise RunError(
                f"of {node.count} nodes only {here} came to {node.host}:{node.port} within {JOIN_TIMEOUT:g} s."
            )

    def store_address(self, name: str) -> str:
        return f"tcp:{self.node.host}:{self._store.port}:{name}"

    def environment(self, node_slots: NodeSlots) -> dict[str, str]:
        return gloo_interface_env(self.node.host) if node_slots.node == 0 else {}

    def pollables(self) -> list[Any]:
        return [*super().pollables(), self._listener]

    def receive(self, timeout: float) -> None:
        for ready in select.select(self.pollables(), [], [], timeout)[0]:
            if ready is self._listener:
                self._accept_node()
            else:
                self.receive_from(ready)
        for node_slots in list(self.nodes):
            if (
                isinstance(node_slots.channel, HeartbeatChannel)
                and node_slots.channel.silence_seconds() > HEARTBEAT_TIMEOUT
            ):
                self._mark_lost(node_slots, f"has not been heard of for {node_slots.channel.silent_seconds:.1f} s")

    def receive_from(self, channel: MessageChannel) -> None:
        if not isinstance(channel, HeartbeatChannel):
            super().receive_from(channel)
            return
        messages = channel.receive()
        if messages is None:
            for node_slots in list(self.nodes):
                if node_slots.channel is channel:
                    self._mark_lost(node_slots, "closed its link")
            return
        self.dispatch(messages)

    def wait_for_slots(self, size: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.size < size and time.monotonic() < deadline:
            self.receive(HEARTBEAT_INTERVAL)

    def _accept_node(self) -> None:
        connection, (host, *_) = self._listener.accept()
        connection.settimeout(2.0)
        channel = HeartbeatChannel(connection)
        index = _read_node_index(channel)
        connection.settimeout(None)
        if not 0 < index < self.node.count or any(node_slots.node == index for node_slots in self.nodes):
            channel.send({"rejected": f"node {index} of {self.node.count} is not wanted here, or here already."})
            channel.close()
            return
        self.nodes.append(NodeSlots(index, channel, list(range(self.slots_per_node)), host))
        self.nodes.sort(key=lambda node_slots: node_slots.node)

    def _mark_lost(self, node_slots: NodeSlots, why: str) -> None:
        self.nodes.remove(node_slots)
        assert isinstance(node_slots.channel, HeartbeatChannel)
        node_slots.channel.close()
        for worker_group in self.worker_groups():
            for rank in worker_group.ranks_by_node.get(node_slots.node, []):
                worker_group.lost_ranks[rank] = f"is cut off: node {node_slots.node} ({node_slots.host}) {why}"
                worker_group.exit_codes.setdefault(rank, -signal.SIGKILL)

    def close(self) -> None:
        for node_slots in self.nodes:
            if isinstance(node_slots.channel, HeartbeatChannel):
                node_slots.channel.send({"shutdown": True})
                node_slots.channel.close()
        self._listener.close()
        super().close()


def _read_node_index(channel: HeartbeatChannel) -> int:
    """Which node a new link says that it is; -1 where it is none of ours."""
    deadline = time.monotonic() + 2.0
    with suppress(ValueError, TypeError, AttributeError):
        while time.monotonic() < deadline and (messages := channel.receive()) is not None:
            for message in messages:  # a sign of life may come first
                if "node" in message:
                    return int(message["node"])
    return -1


def open_store(address: str, world_size: int) -> dist.Store:
    """Where the ranks of a world find each other, as a crew has told it."""
    if not address.startswith("tcp:"):
        return dist.FileStore(address, world_size)
    _, host, port, name = address.split(":")  # a name of its own for each attempt: nobody reads addresses of dead ones
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), None, False))


def gloo_interface_env(address: str) -> dict[str, str]:
    """What tells gloo by which network it reaches the others: by default it takes the one of the host's name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


@dataclass
class NodeAgent:
    """An agent that lends its machine: everything from the leader goes to the nursery, and back."""

    node: Node
    fork_server: ForkServer
    worker_groups: set[str] = field(default_factory=set)
    rejections: int = 0

    def run(self) -> None:
        """Until the leader says that all is done. Raises where it cannot be reached."""
        self.fork_server.send({"grace": 0})  # alone its workers cannot save
        while True:
            link = self._connect()
            if self._relay(link):
                return
            for world in self.worker_groups:
                self.fork_server.send({"kill": world, "signal": signal.SIGKILL})
            link.close()

    def _connect(self) -> HeartbeatChannel:
        deadline = time.monotonic() + JOIN_TIMEOUT
        while True:
            try:
                link = HeartbeatChannel(socket.create_connection((self.node.host, self.node.port), timeout=2.0))
                link.connection.settimeout(None)
                link.send({"node": self.node.index})
                return link
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"the first node was not to be reached at {self.node.host}:{self.node.port} for {JOIN_TIMEOUT:g} s: "
                        f"{error}. If its run has ended, start both again with --resume."
                    ) from None
                time.sleep(HEARTBEAT_INTERVAL)

    def _relay(self, link: HeartbeatChannel) -> bool:
        """Whether the run is done; if not, the leader is lost."""
        interface_env = gloo_interface_env(link.connection.getsockname()[0])
        while True:
            ready = select.select([link, self.fork_server], [], [], HEARTBEAT_INTERVAL)[0]
            if self.fork_server in ready:
                messages = self.fork_server.receive()
                if messages is None:
                    raise RunError("the process that starts workers was killed; the workers ended with it.")
                for message in messages:
                    link.send(message)
            if link in ready:
                commands = link.receive()
                if commands is None:
                    return False
                for command in commands:
                    if "shutdown" in command:
                        return True
                    if "rejected" in command:
                        self.rejections += 1  # one that comes back may be here before it counts as lost
                        if self.rejections > MAX_REJECTIONS:
                            raise RunError(f"the first node says: {command['rejected']}")
                        time.sleep(1.0)
                        return False
                    if "fork" in command:
                        self.worker_groups.add(command["fork"])
                        self.rejections = 0
                        command["environment"] = interface_env
                    if "heartbeat" not in command:
                        self.fork_server.send(command)
            elif link.silence_seconds() > HEARTBEAT_TIMEOUT:
                return False
