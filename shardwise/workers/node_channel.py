"""Authenticated channels between the nodes of a run.

All nodes know the run's secret: `SHARDWISE_SECRET`, or a file of mode 600 that node 0 writes when it starts. Both ends
of a connection prove that they know it before anything else they say is read, by HMACs over their roles and two nonces
(docs/explanation/security.md). Each later message is a line of JSON with an HMAC over its number. Messages of the wrong
form are dropped and counted."""

import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.workers.fork_server import ENTRY_POINTS, Message, MessageChannel

HEARTBEAT_INTERVAL = 0.1
PATIENCE = 0.7  # default of `run.node_patience`
AGENT_PATIENCE = 15  # times as long if the node's kernel still acknowledges our data: its agent gets no CPU time
HANDSHAKE_TIMEOUT = 5.0
NONCE_BYTES = PROOF_BYTES = 32
MAX_MESSAGE_BYTES, MAX_BRACKETS = 1 << 18, 64
MIN_SECRET_LENGTH = 16
SECRET_HELP = "set SHARDWISE_SECRET to the same value on every node, or SHARDWISE_SECRET_FILE to a file that they share"

# The form of every message. Of a value: its type, its choices, a pattern, [form of the items], {rank: form}.
SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)))
RANK, HEARTBEAT, SNAPSHOT_KEY = range(1 << 20), {"heartbeat": int}, re.compile("[0-9a-f]{12}-[0-9]{1,7}")
# What a worker writes about itself, which node 0 reads: sent if the nodes share no folder.
STATUS_FILE = re.compile(r"(heartbeats|errors)/rank-[0-9]{1,7}\.(json|stack|collectives)")
COMMANDS: list[dict[str, Any]] = [  # from node 0
    HEARTBEAT, {"shutdown": bool}, {"failure": range(1, 256)}, {"rejected": str, "is_final": bool},
    {"patience": float}, {"release": str}, {"remove_snapshots": SNAPSHOT_KEY},
    {"kill": str, "signal": SIGNALS}, {"kill": str, "signal": SIGNALS, "ranks": [RANK]},
    {"fork": str, "size": RANK, "entry": ENTRY_POINTS, "standby": bool, "arguments": [str], "ranks": [RANK],
     "slots": [RANK], "snapshots": SNAPSHOT_KEY},
]  # fmt: skip
REPORTS: list[dict[str, Any]] = [  # from the other nodes
    HEARTBEAT, {"stop": (int(signal.SIGTERM),)}, {"shardwise": str, "torch": str, "python": str, "clock": float},
    {"group": str, "pids": {"rank": int}}, {"group": str, "rank": RANK, "stopped": bool},
    {"group": str, "rank": RANK, "code": range(-64, 256)}, {"file": STATUS_FILE, "content": str},
]  # fmt: skip


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, re.Pattern):
        return type(value) is str and form.fullmatch(value) is not None
    if isinstance(form, list):
        return type(value) is list and all(_has_form(item, form[0]) for item in value)
    if isinstance(form, dict):
        is_rank = re.compile("[0-9]{1,7}").fullmatch
        return type(value) is dict and all(is_rank(key) and type(value[key]) is int for key in value)
    return type(value) is form if isinstance(form, type) else type(value) in (int, str) and value in form


def parse_message(line: bytes, forms: list[dict[str, Any]]) -> Message:
    """Raises ValueError if the message is too large or too deeply nested, is not JSON, or has none of these forms."""
    if len(line) > MAX_MESSAGE_BYTES or line.count(b"[") + line.count(b"{") > MAX_BRACKETS:
        raise ValueError("it is too large")
    message: Message = json.loads(line)
    if type(message) is dict:
        for form in forms:
            if message.keys() == form.keys() and all(_has_form(message[key], form[key]) for key in form):
                return message
    raise ValueError("it has no known form")


def secret_file(host: str, port: int) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwise"
    return Path(os.environ.get("SHARDWISE_SECRET_FILE", cache / "secrets" / f"{host}-{port}"))


def create_secret(path: Path) -> bytes:
    """Returns the secret from the environment; if there is none, writes a new one to `path` for all nodes to read."""
    if "SHARDWISE_SECRET" not in os.environ:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            temporary.replace(path)
        except OSError as error:
            raise JobError(f"cannot write the secret of this run to {path}: {error.strerror}; {SECRET_HELP}.") from None
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Raises FileNotFoundError if node 0 has not written the secret yet, JobError if others can read or set it."""
    secret = os.environ.get("SHARDWISE_SECRET")
    if secret is None:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            secret, status = file.read(), os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise JobError(f"{path} must be a file of yours with mode 600; delete it and start all nodes again.")
    if len(secret) < MIN_SECRET_LENGTH:
        raise JobError(f"the secret of the run has {len(secret)} characters, but needs {MIN_SECRET_LENGTH} or more.")
    return secret.encode()


def prove(secret: bytes, role: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, f"shardwise {role}\n".encode() + nonces, "sha256")


class Handshake:
    """A new connection to node 0. It is never waited for, so an idle one delays nothing."""

    def __init__(self, connection: socket.socket, host: str):
        self.connection, self.host, self.deadline = connection, host, time.monotonic() + HANDSHAKE_TIMEOUT
        self._nonce, self._received = secrets.token_bytes(NONCE_BYTES), b""
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(self._nonce)

    def fileno(self) -> int:
        return self.connection.fileno()

    def proceed(self, secret: bytes, roles: list[str]) -> tuple[str, bytes] | None:
        """Returns the peer's role and session key once it has proved the secret, None before; OSError if it cannot."""
        chunk = self.connection.recv(NONCE_BYTES + PROOF_BYTES - len(self._received))
        self._received += chunk
        if chunk and len(self._received) < NONCE_BYTES + PROOF_BYTES:
            return None
        nonces, proof = self._nonce + self._received[:NONCE_BYTES], self._received[NONCE_BYTES:]
        for role in roles:
            if hmac.compare_digest(proof, prove(secret, role, nonces)):
                self.connection.send(prove(secret, "coordinator", nonces))
                self.connection.setblocking(True)
                return role, prove(secret, "session", nonces)
        raise ConnectionError("it did not prove the secret of the run")


def connect(host: str, port: int, secret: bytes, role: str) -> tuple[socket.socket, bytes]:
    """Connects to node 0. Returns the connection and the session key once both ends have proved the secret."""
    connection = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT)
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = connection.recv(NONCE_BYTES) + nonce  # so few bytes come at once; if not, the caller tries again
        connection.sendall(nonce + prove(secret, role, nonces))
        if not hmac.compare_digest(connection.recv(PROOF_BYTES), prove(secret, "coordinator", nonces)):
            raise ConnectionError("it has another secret than this node")
        on_failure.pop_all()
    connection.settimeout(None)
    return connection, prove(secret, "session", nonces)


class NodeChannel(MessageChannel):
    """A channel between two nodes that authenticates messages, sends heartbeats and notices when the peer is lost."""

    def __init__(self, connection: socket.socket, key: bytes, is_coordinator: bool, reject: Callable[[str], None],
                 patience: float = PATIENCE):  # fmt: skip
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)  # low delay: ahead of bulk data
        super().__init__(connection)
        self._key, self._is_coordinator, self._reject = key, is_coordinator, reject
        self._sent, self._received, self.patience = 0, 0, patience
        self._silence, self._last_check = 0.0, time.monotonic()
        self._lock, self.closed = threading.Lock(), False
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, message: Message) -> None:
        with self._lock:
            super().send(message)

    def encode(self, message: Message) -> bytes:
        line = super().encode(message)
        self._sent += 1
        return self._tag(self._is_coordinator, self._sent, line) + line

    def decode(self, line: bytes) -> Message | None:
        tag, line = line[: 2 * PROOF_BYTES], line[2 * PROOF_BYTES :]
        try:
            if not hmac.compare_digest(tag, self._tag(not self._is_coordinator, self._received + 1, line)):
                raise ValueError("it is not authentic")
            self._received, self._silence = self._received + 1, 0.0
            return parse_message(line, REPORTS if self._is_coordinator else COMMANDS)
        except ValueError as error:
            self._reject(f"a message was dropped: {error}")
            return None

    def receive(self) -> list[Message] | None:
        messages = super().receive()
        if len(self._buffer) > 2 * MAX_MESSAGE_BYTES:
            self._buffer = b""
            self._reject("a message was dropped: it is too large")
        return messages

    def silence_if_lost(self) -> float:
        """Returns how long the peer has been silent, without gaps in which we did not poll, if it is lost; otherwise 0.
        On a busy machine an agent may get no CPU time for seconds, but its kernel still acknowledges what we send. The
        load of this machine stands for that of its peer."""
        now = time.monotonic()
        self._silence += min(now - self._last_check, 2 * HEARTBEAT_INTERVAL)
        self._last_check = now
        timeout = self.patience
        if self._silence > timeout and self._is_acknowledged():
            timeout *= AGENT_PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        return self._silence if self._silence > timeout else 0.0

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    def _tag(self, from_coordinator: bool, number: int, line: bytes) -> bytes:
        signed = f"{from_coordinator} {number} ".encode() + line
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()

    def _is_acknowledged(self) -> bool:
        """Whether the peer's kernel has acknowledged everything, or anything recently. Only Linux tells."""
        if sys.platform != "linux":
            return True
        info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        unacknowledged, last_milliseconds = struct.unpack("24xI28xI", info)
        return unacknowledged == 0 or last_milliseconds < 1000 * self.patience

    def _send_heartbeats(self) -> None:
        while not self.closed:
            self.send({"heartbeat": 1})
            time.sleep(HEARTBEAT_INTERVAL)
