"""Multi-node runs: the process on node 0 coordinates, the other nodes run agents.

    shardwise train job.toml --node 0/2 --address 10.0.0.1:29400     coordinator: plans, supervises, reports
    shardwise train --node 1/2 --address 10.0.0.1:29400              agent: forks workers on request

Coordinator and agents exchange heartbeats ten times a second, independent of collectives. When an agent falls silent,
its node is lost: the coordinator names the lost ranks and restarts all ranks once the node rejoins, or without it
(`run.elastic`). An agent that loses the coordinator kills its workers, so that no old attempt survives, and reconnects.
All nodes share the run folder. Losing node 0 ends the run; `--resume` continues it.
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
from shardwise.workers.worker_pool import FORK_SERVER_LOST, NodeSlots, WorkerPool

HEARTBEAT_INTERVAL = 0.1
HEARTBEAT_TIMEOUT = 0.7  # seconds of silence after which a node counts as lost
JOIN_TIMEOUT = 300.0  # seconds that nodes wait for each other at startup
MAX_REJECTIONS = 5  # consecutive rejections after which an agent gives up


@dataclass(frozen=True)
class Node:
    """The index of this node, the number of nodes, and the address that node 0 listens on."""

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
                f"--node {text} --address {address} is not valid: with two nodes, use --node 0/2 --address "
                "HOST:PORT on the first one and --node 1/2 with the same endpoint on the second."
            ) from None


class HeartbeatChannel(MessageChannel):
    """A message channel between nodes that sends heartbeats and measures how long the peer has been silent."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)  # low delay: ahead of bulk data
        super().__init__(connection)
        self._silence, self._last_check = 0.0, time.monotonic()
        self._lock, self.closed = threading.Lock(), False
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, message: Message) -> None:
        with self._lock:
            super().send(message)

    def receive(self) -> list[Message] | None:
        messages = super().receive()
        self._silence = 0.0
        return messages

    def silence_seconds(self) -> float:
        """Returns how long the peer has been silent, not counting long gaps in which we did not poll."""
        now = time.monotonic()
        self._silence += min(now - self._last_check, 2 * HEARTBEAT_INTERVAL)
        self._last_check = now
        return self._silence

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    def _send_heartbeats(self) -> None:
        while not self.closed:
            self.send({"heartbeat": 1})
            time.sleep(HEARTBEAT_INTERVAL)


class NodeCoordinator(WorkerPool):
    """The worker pool of node 0: its own slots and those of all agents that joined."""

    def __init__(self, run_path: Path, fork_server: ForkServer, slots: int, node: Node):
        super().__init__(run_path.resolve(), fork_server, slots)
        self.node, self.slots_per_node = node, slots
        try:
            self._listener = socket.create_server((node.host, node.port), reuse_port=False)
        except OSError as error:
            endpoint = f"{node.host}:{node.port}"
            raise JobError(f"cannot listen on --address {endpoint}: {error.strerror}.") from None
        self._store = dist.TCPStore(node.host, 0, None, True, wait_for_workers=False)
        self.wait_for_slots(slots * node.count, JOIN_TIMEOUT)
        if self.size < slots * node.count:
            joined = ", ".join(str(one.index) for one in self.nodes)
            raise RunError(
                f"{node.count} nodes were expected at {node.host}:{node.port} within {JOIN_TIMEOUT:g} s, but only "
                f"these joined: {joined}."
            )

    def store_address(self, name: str) -> str:
        return f"tcp:{self.node.host}:{self._store.port}:{name}"

    def environment(self, node: NodeSlots) -> dict[str, str]:
        return gloo_interface_env(self.node.host) if node.index == 0 else {}

    def pollables(self) -> list[Any]:
        return [*super().pollables(), self._listener]

    def receive(self, timeout: float) -> None:
        for ready in select.select(self.pollables(), [], [], timeout)[0]:
            if ready is self._listener:
                self._accept_node()
            else:
                self.receive_from(ready)
        for node in list(self.nodes):
            silence = node.channel.silence_seconds() if isinstance(node.channel, HeartbeatChannel) else 0.0
            if silence > HEARTBEAT_TIMEOUT:
                self._mark_lost(node, f"sent no heartbeat for {silence:.1f} s")

    def receive_from(self, channel: MessageChannel) -> None:
        if not isinstance(channel, HeartbeatChannel):
            super().receive_from(channel)
            return
        messages = channel.receive()
        if messages is None:
            for node in list(self.nodes):
                if node.channel is channel:
                    self._mark_lost(node, "closed the connection")
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
        if not 0 < index < self.node.count or any(node.index == index for node in self.nodes):
            reason = f"node {index} has joined already, or is not one of nodes 1 to {self.node.count - 1}."
            channel.send({"rejected": reason})
            channel.close()
            return
        self.nodes.append(NodeSlots(index, channel, list(range(self.slots_per_node)), host))
        self.nodes.sort(key=lambda node: node.index)

    def _mark_lost(self, node: NodeSlots, why: str) -> None:
        self.nodes.remove(node)
        assert isinstance(node.channel, HeartbeatChannel)
        node.channel.close()
        for worker_group in self.worker_groups():
            for rank in worker_group.ranks_by_node.get(node.index, []):
                worker_group.lost_ranks[rank] = f"is unreachable (node {node.index} at {node.host} {why})"
                worker_group.exit_codes.setdefault(rank, -signal.SIGKILL)

    def close(self) -> None:
        for node in self.nodes:
            if isinstance(node.channel, HeartbeatChannel):
                node.channel.send({"shutdown": True})
                node.channel.close()
        self._listener.close()
        super().close()


def _read_node_index(channel: HeartbeatChannel) -> int:
    """Returns the node index that a new connection announces; -1 if it is not one of our agents."""
    deadline = time.monotonic() + 2.0
    with suppress(ValueError, TypeError, AttributeError):
        while time.monotonic() < deadline and (messages := channel.receive()) is not None:
            for message in messages:  # a heartbeat may come first
                if "node" in message:
                    return int(message["node"])
    return -1


def open_store(address: str, world_size: int) -> dist.Store:
    """Opens the rendezvous store at the address that `WorkerPool.store_address` returned."""
    if not address.startswith("tcp:"):
        return dist.FileStore(address, world_size)
    _, host, port, name = address.split(":")  # the name is unique per attempt, so no rank reads stale addresses
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), None, False))


def gloo_interface_env(address: str) -> dict[str, str]:
    """Returns the setting that makes gloo use the interface of this address, not the one of the host name."""
    for name, interface_addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in interface_addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


@dataclass
class NodeAgent:
    """The agent of a node other than 0: relays messages between the coordinator and the local fork server."""

    node: Node
    fork_server: ForkServer
    worker_groups: set[str] = field(default_factory=set)
    rejections: int = 0

    def run(self) -> None:
        """Serves until the coordinator shuts down. Raises RunError if it cannot be reached."""
        while True:
            channel = self._connect()
            if self._relay(channel):
                return
            for name in self.worker_groups:
                self.fork_server.send({"kill": name, "signal": signal.SIGKILL})
            channel.close()

    def _connect(self) -> HeartbeatChannel:
        deadline = time.monotonic() + JOIN_TIMEOUT
        while True:
            try:
                channel = HeartbeatChannel(socket.create_connection((self.node.host, self.node.port), timeout=2.0))
                channel.connection.settimeout(None)
                channel.send({"node": self.node.index})
                return channel
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"could not reach node 0 at {self.node.host}:{self.node.port} for {JOIN_TIMEOUT:g} s: {error}. "
                        "If its run has ended, restart all nodes, node 0 with --resume."
                    ) from None
                time.sleep(HEARTBEAT_INTERVAL)

    def _relay(self, channel: HeartbeatChannel) -> bool:
        """Relays messages; returns True when the run is done, False when the connection is lost or rejected."""
        interface_env = gloo_interface_env(channel.connection.getsockname()[0])
        while True:
            ready = select.select([channel, self.fork_server], [], [], HEARTBEAT_INTERVAL)[0]
            if self.fork_server in ready:
                messages = self.fork_server.receive()
                if messages is None:
                    raise RunError(FORK_SERVER_LOST)
                for message in messages:
                    channel.send(message)
            if channel in ready:
                commands = channel.receive()
                if commands is None:
                    return False
                for command in commands:
                    if "shutdown" in command:
                        return True
                    if "rejected" in command:
                        self.rejections += 1  # a node may rejoin before the coordinator has noticed its loss
                        if self.rejections > MAX_REJECTIONS:
                            raise RunError(f"node 0 rejected this node: {command['rejected']}")
                        time.sleep(1.0)
                        return False
                    if "fork" in command:
                        self.worker_groups.add(command["fork"])
                        self.rejections = 0
                        command["environment"] = interface_env
                    if "heartbeat" not in command:
                        self.fork_server.send(command)
            elif channel.silence_seconds() > HEARTBEAT_TIMEOUT:
                return False
