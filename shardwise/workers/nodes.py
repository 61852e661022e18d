"""Multi-node runs: the process on node 0 coordinates, the other nodes run agents.

    shardwise train job.toml --node 0/2 --address 10.0.0.1:29400     coordinator: plans, supervises, reports
    shardwise train --node 1/2 --address 10.0.0.1:29400              agent: forks workers on request

Coordinator and agents exchange heartbeats ten times a second, independent of collectives. When an agent falls silent,
its node is lost: the coordinator names the lost ranks and restarts all ranks once the node rejoins, or without it
(`run.elastic`). An agent that loses the coordinator kills its workers, so that no old attempt survives, and reconnects.
All nodes share the run folder. Losing node 0 ends the run; `--resume` continues it.
"""

import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.comm.world import interface_environment
from shardwise.console import pluralize, print_line
from shardwise.errors import JobError, RunError
from shardwise.workers import node_channel
from shardwise.workers.fork_server import ForkServer, MessageChannel
from shardwise.workers.node_channel import HEARTBEAT_INTERVAL, SECRET_HELP, Handshake, NodeChannel
from shardwise.workers.worker_pool import FORK_SERVER_LOST, NodeSlots, WorkerPool

JOIN_TIMEOUT = 300.0  # seconds that nodes wait for each other at startup
MAX_REJECTIONS = 5  # consecutive rejections after which an agent gives up
MAX_HANDSHAKES = 128  # connections that have not proved the secret; a newer one replaces the oldest
REPORT_INTERVAL = 10.0  # seconds between reports of rejected connections
EXPLAIN_SECONDS = 5.0  # after which an agent says why it still waits for node 0
LogEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class Node:
    """The index of this node, the number of nodes, and the address that node 0 listens on."""

    index: int
    count: int
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, address: str | None) -> "Node":
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


class NodeCoordinator(WorkerPool):
    """The worker pool of node 0: its own slots and those of all agents that joined."""

    def __init__(self, run_path: Path, fork_server: ForkServer, slots: int, node: Node, log_event: LogEvent):
        super().__init__(run_path.resolve(), fork_server, slots)
        self.node, self.slots_per_node, self.log_event = node, slots, log_event
        self._handshakes: list[Handshake] = []
        self._rejected, self._next_report = 0, 0.0
        try:
            self._listener = socket.create_server((node.host, node.port), backlog=MAX_HANDSHAKES)
        except OSError as error:
            endpoint = f"{node.host}:{node.port}"
            raise JobError(f"cannot listen on --address {endpoint}: {error.strerror}.") from None
        self._secret_file = node_channel.secret_file(node.host, node.port)
        self._secret = node_channel.create_secret(self._secret_file)
        door = socket.create_server((node.host, 0))  # PyTorch's own listens on all interfaces
        port, timeout = door.getsockname()[1], timedelta(seconds=JOIN_TIMEOUT)
        self._store = dist.TCPStore(node.host, port, None, True, timeout, False, False, door.detach())
        self.wait_for_slots(slots * node.count, JOIN_TIMEOUT)
        if self.size < slots * node.count:
            joined = ", ".join(str(one.index) for one in self.nodes)
            raise RunError(
                f"{node.count} nodes were expected at {node.host}:{node.port} within {JOIN_TIMEOUT:g} s, but only "
                f"these joined: {joined}."
            )

    def store_address(self, name: str) -> str:
        return f"tcp:{self.node.host}:{self._store.port}:{name}"

    def environment(self) -> dict[str, str]:
        return interface_environment(self.node.host)

    def pollables(self) -> list[Any]:
        return [*super().pollables(), *self._handshakes, self._listener]

    def receive(self, timeout: float) -> None:
        for ready in select.select(self.pollables(), [], [], timeout)[0]:
            if ready is self._listener:
                self._accept()
            elif isinstance(ready, Handshake):
                if ready in self._handshakes:
                    self._proceed(ready)
            else:
                self.receive_from(ready)
        for late in [one for one in self._handshakes if one.deadline < time.monotonic()]:
            self._drop(late, "it did not prove the secret of the run in time")
        for node in list(self.nodes):
            silence = node.channel.silence_if_lost() if isinstance(node.channel, NodeChannel) else 0.0
            if silence:
                self._mark_lost(node, f"sent no heartbeat for {silence:.1f} s")

    def receive_from(self, channel: MessageChannel) -> None:
        if not isinstance(channel, NodeChannel):
            super().receive_from(channel)
            return
        messages = channel.receive()
        for node in [one for one in self.nodes if one.channel is channel]:
            if messages is None:
                self._mark_lost(node, "closed the connection")
            else:
                self.dispatch(messages, node.index)

    def wait_for_slots(self, size: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.size < size and time.monotonic() < deadline:
            self.receive(HEARTBEAT_INTERVAL)

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone already, or we have no file descriptor left
            connection, (host, *_) = self._listener.accept()
            self._handshakes.append(Handshake(connection, host))
        if len(self._handshakes) > MAX_HANDSHAKES:
            self._drop(self._handshakes[0], "too many connections that have not proved the secret of the run")

    def _drop(self, handshake: Handshake, why: str) -> None:
        self._handshakes.remove(handshake)
        handshake.connection.close()
        self._reject(handshake.host, f"a connection was refused: {why}")

    def _reject(self, host: str, why: str) -> None:
        """Counts what was refused, and reports it every ten seconds at most."""
        self._rejected += 1
        if time.monotonic() >= self._next_report:
            total = f"{pluralize(self._rejected, 'time')} so far, the last time from {host}"
            self.log_event("refused", f"{why} ({total}).")
            self._next_report = time.monotonic() + REPORT_INTERVAL

    def _proceed(self, handshake: Handshake) -> None:
        try:
            proved = handshake.proceed(self._secret, [f"node {n}" for n in range(1, self.node.count)])
        except OSError as error:
            self._drop(handshake, error.strerror or str(error))
            return
        if proved is None:
            return
        self._handshakes.remove(handshake)
        role, key = proved
        index = int(role.removeprefix("node "))
        channel = NodeChannel(handshake.connection, key, True, partial(self._reject, handshake.host))
        if any(node.index == index for node in self.nodes):
            channel.send({"rejected": f"node {index} has joined already."})
            channel.close()
            return
        self.nodes.append(NodeSlots(index, channel, list(range(self.slots_per_node)), handshake.host))
        self.nodes.sort(key=lambda node: node.index)

    def _mark_lost(self, node: NodeSlots, why: str) -> None:
        self.nodes.remove(node)
        assert isinstance(node.channel, NodeChannel)
        node.channel.close()
        for worker_group in self.worker_groups():
            for rank in worker_group.ranks_by_node.get(node.index, []):
                worker_group.lost_ranks[rank] = f"is unreachable (node {node.index} at {node.host} {why})"
                worker_group.exit_codes.setdefault(rank, -signal.SIGKILL)

    def close(self) -> None:
        for node in self.nodes:
            if isinstance(node.channel, NodeChannel):
                node.channel.send({"shutdown": True})
                node.channel.close()
        if self._rejected:
            print_line(f"refused: {self._rejected:,} connections or messages in all.")
        self._listener.close()
        self._secret_file.unlink(missing_ok=True)
        super().close()


def open_store(address: str, world_size: int) -> dist.Store:
    """Opens the rendezvous store at the address that `WorkerPool.store_address` returned."""
    if not address.startswith("tcp:"):
        return dist.FileStore(address, world_size)
    _, host, port, name = address.split(":")  # the name is unique per attempt, so no rank reads stale addresses
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), None, False))


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
            channel = self._join()
            if self._relay_messages(channel):
                return
            for name in self.worker_groups:
                self.fork_server.send({"kill": name, "signal": signal.SIGKILL})
            channel.close()

    def _join(self) -> NodeChannel:
        begin, is_explained, address = time.monotonic(), False, (self.node.host, self.node.port)
        while True:
            try:
                secret = node_channel.read_secret(node_channel.secret_file(*address))
                connection, key = node_channel.connect(*address, secret, f"node {self.node.index}")
                return NodeChannel(connection, key, False, print_line)
            except OSError as error:
                seconds, problem = time.monotonic() - begin, error.strerror or str(error)
                if isinstance(error, FileNotFoundError):
                    problem = f"it has not written its secret to {error.filename}; if it runs elsewhere, {SECRET_HELP}"
                if seconds > JOIN_TIMEOUT:
                    raise RunError(
                        f"could not join node 0 at {self.node.host}:{self.node.port} in {JOIN_TIMEOUT:g} s: {problem}. "
                        "If its run has ended, restart all nodes, node 0 with --resume."
                    ) from None
                if seconds > EXPLAIN_SECONDS and not is_explained:
                    print_line(f"still waiting for node 0 at {self.node.host}:{self.node.port}: {problem}.")
                    is_explained = True
                time.sleep(HEARTBEAT_INTERVAL)

    def _relay_messages(self, channel: NodeChannel) -> bool:
        """Relays messages; returns True when the run is done, False when the connection is lost or rejected."""
        environment = interface_environment(channel.connection.getsockname()[0])
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
                        command["environment"] = environment
                    if "heartbeat" not in command:
                        self.fork_server.send(command)
            elif channel.silence_if_lost():
                return False
