"""Multi-node runs: the process on node 0 coordinates, the other nodes run agents.

    shardwise train job.toml --node 0/2 --address 10.0.0.1:29400     coordinator: plans, supervises, reports
    shardwise train --node 1/2 --address 10.0.0.1:29400              agent: forks workers on request

When an agent falls silent, its node is lost: the coordinator names the lost ranks and restarts all ranks once the node
rejoins, or without it (`run.elastic`). An agent that loses the coordinator kills its workers, so that no old attempt
survives, and reconnects. All nodes run the same versions and share the run folder, unless the run is in an object
store: then an agent gets a local folder for each run (`NodeAgent.prepare`), and sends node 0 what its workers write
about themselves. More is in docs/explanation/restarts.md."""

import base64
import errno
import hashlib
import os
import platform
import select
import signal
import socket
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise import __version__
from shardwise.comm.world import interface_environment
from shardwise.console import pluralize, print_line
from shardwise.errors import JobError, RunError, ShardwiseError
from shardwise.object_store import parse_url
from shardwise.workers import node_channel
from shardwise.workers.fork_server import ForkServer, Message
from shardwise.workers.node_channel import HEARTBEAT_INTERVAL, PATIENCE, SECRET_HELP, Handshake, NodeChannel
from shardwise.workers.worker_pool import FORK_SERVER_LOST, NodeSlots, WorkerPool

JOIN_TIMEOUT = 300.0  # default of `run.join_timeout`
WAITING_INTERVAL = 30.0  # seconds between lines that say for which nodes node 0 waits
MAX_CLOCK_SKEW = 2.0  # seconds between the clocks of two nodes, beyond which the order of events cannot be trusted
MAX_REJECTIONS = 5  # consecutive rejections after which an agent gives up
MAX_HANDSHAKES = 128  # connections that have not proved the secret; a newer one replaces the oldest
REPORT_INTERVAL = 10.0  # seconds between reports of rejected connections
EXPLAIN_SECONDS = 5.0  # after which an agent says why it still waits for node 0
MAX_FILE_BYTES = 1 << 23  # of what an agent sends
LogEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class Node:
    """The index of this node, the number of nodes, and the address that node 0 listens on."""

    index: int
    count: int
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, address: str | None) -> "Node":
        try:
            index, count = map(int, text.split("/"))
            host, _, port = (address or "").rpartition(":")
            if not 0 <= index < count or not host or not 0 < int(port) < 65536:
                raise ValueError
            return cls(index, count, host, int(port))
        except ValueError:
            remedy = "use --node 0/2 --address HOST:PORT on the first of two nodes, and --node 1/2 on the second"
            raise JobError(f"--node {text} --address {address} is not valid; {remedy}.") from None


class NodeCoordinator(WorkerPool):
    """The worker pool of node 0: its own slots and those of all agents that joined."""

    def __init__(self, run_path: Path, fork_server: ForkServer, slots: int, node: Node, log_event: LogEvent,
                 join_timeout: float = JOIN_TIMEOUT, patience: float = PATIENCE):  # fmt: skip
        super().__init__(run_path.resolve(), fork_server, slots)
        self.node, self.slots_per_node, self.log_event, self.patience = node, slots, log_event, patience
        self._handshakes: list[Handshake] = []
        self._rejected, self._next_report, self._software = 0, 0.0, describe_software()
        self._is_starting, deadline = True, time.monotonic() + join_timeout
        self._listener = self._listen(deadline)
        self._secret_file = node_channel.secret_file(node.host, node.port)
        self._secret = node_channel.create_secret(self._secret_file)
        door = socket.create_server((node.host, 0))  # PyTorch's own listens on all interfaces
        port, timeout = door.getsockname()[1], timedelta(seconds=join_timeout)
        self._store = dist.TCPStore(node.host, port, None, True, timeout, False, False, door.detach())
        try:
            self._wait_for_nodes(deadline, join_timeout)
        except ShardwiseError:
            self.close()
            raise
        self._is_starting = False

    def _listen(self, deadline: float) -> socket.socket:
        """In Kubernetes, waits until the name of this pod has become known, and is no more that of an earlier pod."""
        while True:
            try:
                return socket.create_server((self.node.host, self.node.port), backlog=MAX_HANDSHAKES)
            except OSError as error:
                is_early = error.errno in (errno.EADDRNOTAVAIL, socket.EAI_AGAIN, socket.EAI_NONAME)
                if not is_early or "KUBERNETES_SERVICE_HOST" not in os.environ or time.monotonic() > deadline:
                    raise JobError(f"cannot listen on --address {self.node.endpoint}: {error.strerror}.") from None
                time.sleep(1.0)

    def _wait_for_nodes(self, deadline: float, join_timeout: float) -> None:
        next_line = time.monotonic()
        while missing := set(range(self.node.count)) - {node.index for node in self.nodes if node.slots}:
            names = f"{', '.join(map(str, sorted(missing)))} of {self.node.count} at {self.node.endpoint}"
            if time.monotonic() > deadline:
                problem = f"these nodes did not join within {join_timeout:g} s (run.join_timeout): {names}"
                raise RunError(f"{problem}; see what they print, and start all nodes again.")
            if time.monotonic() >= next_line:
                print_line(f"waiting for nodes {names}, for {deadline - time.monotonic():.0f} s at most")
                next_line += WAITING_INTERVAL
            self.receive(HEARTBEAT_INTERVAL)

    def store_address(self, name: str) -> str:
        return f"tcp:{self.node.host}:{self._store.port}:{name}"

    def environment(self) -> dict[str, str]:
        return interface_environment(self.node.host)

    def pollables(self) -> list[Any]:
        return [*super().pollables(), *self._handshakes, self._listener]

    def receive(self, timeout: float) -> None:
        super().receive(timeout)
        for late in [one for one in self._handshakes if one.deadline < time.monotonic()]:
            self._drop(late, "it did not prove the secret of the run in time")
        for node in list(self.nodes):
            silence = node.channel.silence_if_lost() if isinstance(node.channel, NodeChannel) else 0.0
            if silence:
                self._mark_lost(node, f"sent no heartbeat for {silence:.1f} s")

    def receive_from(self, channel: Any) -> None:
        if channel is self._listener:
            self._accept()
        elif channel in self._handshakes:
            self._proceed(channel)
        elif not isinstance(channel, NodeChannel | Handshake):
            super().receive_from(channel)
        if not isinstance(channel, NodeChannel):
            return
        messages = channel.receive()
        for node in [one for one in self.nodes if one.channel is channel]:
            if messages is None:
                self._mark_lost(node, "closed the connection")
                continue
            for message in messages:
                if "clock" in message:
                    self._admit(node, message)
                elif "stop" in message:
                    signal.raise_signal(message["stop"])  # as if this process had been asked
                elif "file" in message and self.url:
                    with suppress(ValueError, zlib.error):
                        content = base64.b85decode(message["content"])
                        path = self.run_path / message["file"]
                        path.parent.mkdir(exist_ok=True)
                        path.write_bytes(zlib.decompressobj().decompress(content, MAX_FILE_BYTES))
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
            self.log_event("refused", f"{why} ({pluralize(self._rejected, 'time')} so far, the last time from {host}).")
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
        channel = NodeChannel(handshake.connection, key, True, partial(self._reject, handshake.host), self.patience)
        if any(node.index == index for node in self.nodes):
            channel.send({"rejected": f"node {index} has joined already.", "is_final": False})
            channel.close()
            return
        self.nodes.append(NodeSlots(index, channel, [], handshake.host))  # it gets slots when its versions are known
        self.nodes.sort(key=lambda node: node.index)

    def _admit(self, node: NodeSlots, versions: Message) -> None:
        """Gives a node its slots if it runs what this node runs; otherwise rejects it, and ends a run that begins."""
        name = f"node {node.index} at {node.host}"
        differing = [what for what in ("shardwise", "torch") if versions[what] != self._software[what]]
        if differing:
            text = "; ".join(f"{what} {versions[what]}, but node 0 has {self._software[what]}" for what in differing)
            sentence = f"{name} has {text}. All nodes need the same versions: install them, and start it again."
            node.channel.send({"rejected": sentence, "is_final": True})
            if self._is_starting:
                raise JobError(sentence)
            self._mark_lost(node, "has other versions")
            return
        skew = versions["clock"] - time.time()
        if abs(skew) > MAX_CLOCK_SKEW and self._is_starting:  # later, this process may have been too busy to read it
            which = "ahead of" if skew > 0 else "behind"
            self.log_event("warning", f"the clock of {name} is {abs(skew):.1f} s {which} that of node 0; start ntpd.")
        if versions["python"].split(".")[:2] != self._software["python"].split(".")[:2]:
            text = f"{name} runs Python {versions['python']}, node 0 Python {self._software['python']}."
            self.log_event("warning", text)
        node.channel.send({"patience": float(self.patience)})
        node.slots = list(range(self.slots_per_node))

    def _mark_lost(self, node: NodeSlots, why: str) -> None:
        self.nodes.remove(node)
        assert isinstance(node.channel, NodeChannel)
        node.channel.close()
        for worker_group in self._worker_groups.values():
            for rank in worker_group.ranks_by_node.get(node.index, []):
                worker_group.lost_ranks[rank] = f"is unreachable (node {node.index} at {node.host} {why})"
                worker_group.exit_codes.setdefault(rank, -signal.SIGKILL)

    def close(self) -> None:
        for node in self.nodes:
            if isinstance(node.channel, NodeChannel):
                if self.failure:
                    node.channel.send({"failure": self.failure})
                node.channel.send({"shutdown": self.is_finished})
                node.channel.close()
        if self._rejected:
            print_line(f"refused: {self._rejected:,} connections or messages in all.")
        self._listener.close()
        self._secret_file.unlink(missing_ok=True)
        super().close()


def describe_software() -> dict[str, str]:
    """Returns the versions that nodes compare; that of Shardwise includes a checksum of its code."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py")))
    version = f"{__version__} ({hashlib.sha256(code).hexdigest()[:12]})"
    return {"shardwise": version, "torch": str(torch.__version__), "python": platform.python_version()}


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
    join_timeout: float = JOIN_TIMEOUT
    prepare: Callable[[str], Path] = Path  # makes the local folder of a URL's run; it may take long, so in a thread
    worker_groups: set[str] = field(default_factory=set)
    rejections: int = 0
    is_stopping: bool = False
    folder: Path | None = None
    sent: dict[str, int] = field(default_factory=dict)  # files that node 0 has, with their times
    commands: list[Message] = field(default_factory=list)  # for the fork server
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    preparing: Future[Path] | None = None

    def run(self) -> bool:
        """Serves until the coordinator shuts down; returns whether the run finished. Raises RunError if it is lost."""
        previous = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_stopping", True))
        try:
            while (channel := self._join()) is not None:
                self.commands, self.preparing = [], None
                with closing(channel):  # else its thread would send heartbeats for ever
                    is_finished = self._relay_messages(channel)
                if is_finished is not None:
                    return is_finished
                for name in self.worker_groups:
                    self.fork_server.send({"kill": name, "signal": signal.SIGKILL})
            return False
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _join(self) -> NodeChannel | None:
        """Connects to node 0; returns None if the agent was told to stop before it could."""
        begin, is_explained, address = time.monotonic(), False, (self.node.host, self.node.port)
        while True:
            try:
                secret = node_channel.read_secret(node_channel.secret_file(*address))
                connection, key = node_channel.connect(*address, secret, f"node {self.node.index}")
                channel = NodeChannel(connection, key, False, print_line)
                channel.send({**describe_software(), "clock": time.time()})
                return channel
            except OSError as error:
                seconds, problem = time.monotonic() - begin, error.strerror or str(error)
                if isinstance(error, FileNotFoundError):
                    problem = f"it has not written its secret to {error.filename}; if it runs elsewhere, {SECRET_HELP}"
                if self.is_stopping:
                    return None
                if seconds > self.join_timeout:
                    place = f"node 0 at {self.node.endpoint} in {self.join_timeout:g} s (run.join_timeout)"
                    remedy = "If its run has ended, restart all nodes, node 0 with --resume."
                    raise RunError(f"could not join {place}: {problem}. {remedy}") from None
                if seconds > EXPLAIN_SECONDS and not is_explained:
                    rest = f"for {self.join_timeout - seconds:.0f} s at most"
                    print_line(f"still waiting for node 0 at {self.node.endpoint}, {rest}: {problem}.")
                    is_explained = True
                time.sleep(HEARTBEAT_INTERVAL)

    def _relay_messages(self, channel: NodeChannel) -> bool | None:
        """Relays messages until the run ends; returns None when the connection is lost or rejected."""
        environment, has_asked = interface_environment(channel.connection.getsockname()[0]), False
        while True:
            if self.is_stopping and not has_asked:
                channel.send({"stop": int(signal.SIGTERM)})
                has_asked = True
            ready = select.select([channel, self.fork_server], [], [], HEARTBEAT_INTERVAL)[0]
            if self.fork_server in ready:
                if (messages := self.fork_server.receive()) is None:
                    raise RunError(FORK_SERVER_LOST)
                self._send_files(channel)  # before node 0 learns that a worker has ended
                for message in messages:
                    channel.send(message)
            self._send_files(channel)
            while self.commands and self._is_ready(self.commands[0]):
                self.fork_server.send(self.commands.pop(0))
            if channel in ready:
                if (commands := channel.receive()) is None:
                    return None
                for command in commands:
                    if "failure" in command:
                        error = RunError("the run has failed; node 0 says why.")
                        error.exit_code = command["failure"]
                        raise error
                    if "shutdown" in command:
                        return bool(command["shutdown"])
                    if "rejected" in command:
                        self.rejections += 1  # a node may rejoin before the coordinator has noticed its loss
                        if self.rejections > MAX_REJECTIONS or command["is_final"]:
                            raise RunError(f"node 0 rejected this node: {command['rejected']}")
                        time.sleep(1.0)
                        return None
                    if "fork" in command:
                        self.worker_groups.add(command["fork"])
                        self.rejections = 0
                        command["environment"] = environment
                    if "patience" in command:
                        channel.patience = command["patience"]
                    elif "heartbeat" not in command:
                        self.commands.append(command)
            elif channel.silence_if_lost():
                return None

    def _is_ready(self, command: Message) -> bool:
        """Whether a command can go to the fork server: before it forks, a run in an object store gets its folder."""
        if "fork" not in command or not parse_url(command["arguments"][0]):
            return True
        if self.preparing is None:
            self.preparing = self.threads.submit(self.prepare, command["arguments"][0])
        if not self.preparing.done():
            return False
        self.folder, self.preparing = self.preparing.result(), None
        command["arguments"][0] = str(self.folder)
        return True

    def _send_files(self, channel: NodeChannel) -> None:
        """Sends node 0, which has no other way to read them, what the workers of this node write about themselves."""
        for path in self.folder.glob("*/rank-*") if self.folder is not None else ():
            name = f"{path.parent.name}/{path.name}"
            with suppress(FileNotFoundError):
                changed = path.stat().st_mtime_ns
                if node_channel.STATUS_FILE.fullmatch(name) and self.sent.get(name) != changed:
                    content = base64.b85encode(zlib.compress(path.read_bytes())).decode()
                    if len(content) < node_channel.MAX_MESSAGE_BYTES // 2:
                        channel.send({"file": name, "content": content})
                    self.sent[name] = changed
