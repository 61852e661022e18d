"""Who may talk to a run: nodes that prove its secret. Everybody else is counted, refused and never waited for."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.comm.collectives import all_gather_json, broadcast_json
from shardwise.comm.world import run_world
from shardwise.errors import JobError, RunError
from shardwise.job import make_job
from shardwise.workers import fork_server, node_channel, nodes
from shardwise.workers.node_channel import COMMANDS, REPORTS, Handshake, NodeChannel, connect, parse_message, prove
from shardwise.workers.nodes import Node, NodeAgent, NodeCoordinator
from shardwise.workers.snapshots import SnapshotStore, snapshot_key
from shardwise.workers.worker_pool import WorkerGroup

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import hostile  # noqa: E402

SECRET = b"a secret of this test"


class Fork:
    """A fork server that does nothing."""

    def __init__(self) -> None:
        self.link, self.theirs = socket.socketpair()
        self.sent: list[dict[str, Any]] = []

    def fileno(self) -> int:
        return self.link.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Leader:
    """Node 0 of two, in this process, polled in a thread."""

    def __init__(self, path: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.events: list[str] = []
        self.slowest, self.stop, self.failure = 0.0, False, None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(path,))
        self.thread.start()

    def run(self, path: Path) -> None:
        try:
            node = Node(0, 2, "127.0.0.1", self.port)
            self.pool = NodeCoordinator(path, Fork(), 1, node, lambda kind, message: self.events.append(message))  # type: ignore[arg-type]
            self.ready.set()
            while not self.stop:
                begin = time.monotonic()
                self.pool.receive(0.05)
                self.slowest = max(self.slowest, time.monotonic() - begin)
            self.pool.close()
        except BaseException as error:  # the test reports it
            self.failure = error
            self.ready.set()


def threads_of_this_process() -> dict[str, str]:
    """Returns the names of all threads, those of libraries included, by their numbers."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            found[task.name] = (task / "comm").read_text().strip()
    return found


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    monkeypatch.setenv("SHARDWISE_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.delenv("SHARDWISE_SECRET", raising=False)
    before = threads_of_this_process()
    one = Leader(tmp_path / "run")
    yield one
    one.stop = True
    one.thread.join(10)
    assert one.failure is None and not one.thread.is_alive()
    del one.pool
    gc.collect()  # ends the threads of the store: a test after this one may fork
    deadline = time.monotonic() + 30
    while len(threads_of_this_process()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    after = threads_of_this_process()
    new = {task: name for task, name in after.items() if task not in before}
    stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
    assert len(after) <= len(before), f"{new}\n" + "\n".join(stacks)


def join(leader: Leader, **versions: object) -> NodeChannel:
    """Joins as node 1; `versions`: what it says of itself that is not so."""
    deadline = time.monotonic() + 10
    while True:
        try:
            secret = node_channel.read_secret(Path(os.environ["SHARDWISE_SECRET_FILE"]))
            link, key = connect("127.0.0.1", leader.port, secret, "node 1")
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    channel = NodeChannel(link, key, False, lambda why: None)
    channel.send({**nodes.describe_software(), "clock": time.time(), **versions})
    assert leader.ready.wait(10)
    return channel


def test_hostile_connections_neither_end_nor_delay_a_run(leader: Leader, tmp_path: Path) -> None:
    member = join(leader)
    group = leader.pool._worker_groups["group-1"] = WorkerGroup("group-1", "replicate=2", 2, {0: [0], 1: [1]})
    before = {path.name for path in tmp_path.iterdir()}
    hostile.attack("127.0.0.1", [leader.port, leader.pool._store.port], 100, str(tmp_path / "mark"))
    begin = time.monotonic()
    member.send({"group": "group-1", "rank": 1, "code": -9})
    while not group.exit_codes:
        assert time.monotonic() - begin < 1.0
        time.sleep(0.01)
    assert group.exit_codes == {1: -9} and not group.lost_ranks and leader.pool.size == 2
    assert leader.slowest < 1.0 and {path.name for path in tmp_path.iterdir()} == before
    assert len(leader.events) == 1 and "127.0.0.1" in leader.events[0]
    listening = [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert set(listening) == {"127.0.0.1"}, listening
    dist.TCPStore("127.0.0.1", leader.pool._store.port, None, False).set("still", "there")
    member.close()


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"torch": "2.0.0"}, "node 1 at 127.0.0.1 has torch 2.0.0, but node 0 has "),
        ({"shardwise": "0.1.0 (0123)"}, "node 1 at 127.0.0.1 has shardwise 0.1.0 (0123), but node 0 has "),
        ({"clock": time.time() + 1000}, "the clock of node 1 at 127.0.0.1 is "),
        ({"python": "3.3.1"}, "node 1 at 127.0.0.1 runs Python 3.3.1, node 0 Python "),
    ],
)
def test_nodes_compare_versions_and_clocks_before_the_first_step(
    versions: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET_FILE", str(tmp_path / "secret"))
    leader = Leader(tmp_path / "run")
    member = join(leader, **versions)
    leader.stop = True
    leader.thread.join(10)
    said = [*leader.events, str(leader.failure)]
    assert any(one.startswith(sentence) for one in said), said
    is_refused = "torch" in versions or "shardwise" in versions
    assert isinstance(leader.failure, JobError) == is_refused
    messages = []
    while (received := member.receive()) is not None:
        messages += [message for message in received if "heartbeat" not in message]
    assert any(message.get("is_final") for message in messages) == is_refused
    assert messages[-1] == {"shutdown": False}
    member.close()


@pytest.mark.parametrize("code", [1, 2])
def test_the_other_nodes_of_a_run_that_failed_fail_too(code: int, leader: Leader) -> None:
    """With exit code 75, for a run that wants to be continued, Slurm and Ray would start a run that failed forever."""
    agent = NodeAgent(Node(1, 2, "127.0.0.1", leader.port), Fork())  # type: ignore[arg-type]

    def end() -> None:
        while not any(node.index == 1 and node.slots for node in leader.pool.nodes):
            time.sleep(0.01)
        leader.pool.failure = code
        leader.stop = True

    thread = threading.Thread(target=lambda: leader.ready.wait(10) and end())
    thread.start()
    with pytest.raises(RunError, match="the run has failed; node 0 says why") as failed:
        agent.run()
    thread.join(10)
    assert failed.value.exit_code == code


def test_node_0_says_for_whom_it_waits_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET_FILE", str(tmp_path / "secret"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        RunError, match=rf"did not join within 0.2 s \(run.join_timeout\): 1, 2 of 3 at 127.0.0.1:{port}"
    ):
        NodeCoordinator(tmp_path, Fork(), 1, Node(0, 3, "127.0.0.1", port), print, 0.2)  # type: ignore[arg-type]
    assert f"waiting for nodes 1, 2 of 3 at 127.0.0.1:{port}, for 0 s at most" in capsys.readouterr().out


def test_node_1_says_what_it_waits_for_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setattr(nodes, "EXPLAIN_SECONDS", 0.0)
    agent = NodeAgent(Node(1, 2, "127.0.0.1", 9), Fork(), 0.2)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"could not join node 0 at 127.0.0.1:9 in 0.2 s \(run.join_timeout\)"):
        agent.run()
    assert "still waiting for node 0 at 127.0.0.1:9, for 0 s at most: " in capsys.readouterr().out


def test_messages_of_a_member_that_make_no_sense_are_counted_and_dropped(leader: Leader) -> None:
    member = join(leader)
    group = leader.pool._worker_groups["group-1"] = WorkerGroup("group-1", "replicate=2", 2, {0: [0], 1: [1]})
    member.connection.sendall(
        b"[" * 60_000 + b"\n" + b'{"node": 1e999}\n' + os.urandom(4096) + b"\n" + b"x" * (1 << 20) + b"\n"
    )
    broken: list[Any] = [
        {"node": 1e999}, [], {"group": [], "rank": 1, "code": 1}, {"group": "group-1", "pids": {"x": 1}},
        {"group": "group-1", "rank": 0, "code": -9}, {"group": "group-1", "rank": 1, "code": 10**9},
    ]  # fmt: skip
    for message in broken:
        member.send(message)
    member.send({"group": "group-1", "pids": {"1": 4711}})
    deadline = time.monotonic() + 5
    while not group.pids:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert group.pids == {1: 4711} and not group.exit_codes and leader.pool.size == 2
    assert len(leader.events) == 1 and "a message was dropped" in leader.events[0]
    member.close()


def test_a_proof_can_be_neither_replayed_nor_reflected_nor_used_in_another_role() -> None:
    def served(answer: bytes | None = None, secret: bytes = SECRET) -> tuple[Any, bytes]:
        """Lets an honest member, or `answer`, speak to node 0; returns what node 0 found and what was said to it."""
        ours, theirs = socket.socketpair()
        handshake, said = Handshake(ours, "here"), b""
        challenge = theirs.recv(32)
        said = answer if answer is not None else (nonce := os.urandom(32)) + prove(secret, "node 1", challenge + nonce)
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        try:
            while (found := handshake.proceed(SECRET, ["store", "node 1"])) is None:
                pass
        except ConnectionError as error:
            found = error
        return found, said

    (role, _), recorded = served()
    assert role == "node 1"
    for answer in (recorded, recorded[:63], b"", bytes(64)):
        found, _ = served(answer)
        assert isinstance(found, ConnectionError), answer
    assert isinstance(served(secret=b"another secret")[0], ConnectionError)
    assert len({prove(SECRET, role, bytes(64)) for role in ("coordinator", "node 1", "store", "session")}) == 4


def test_an_agent_obeys_only_a_node_0_that_knows_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as door:
        evil = {"fork": "x", "ranks": [0], "size": 1, "entry": "os:system", "arguments": [f"touch {tmp_path}/mark"]}

        def answer() -> None:
            while True:
                try:
                    link, _ = door.accept()
                except OSError:
                    return
                link.sendall(os.urandom(64) + json.dumps(evil).encode() + b"\n")
                link.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        fork = Fork()
        with pytest.raises(RunError, match="it has another secret than this node"):
            NodeAgent(Node(1, 2, "127.0.0.1", door.getsockname()[1]), fork, 0.5).run()  # type: ignore[arg-type]
        door.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    assert not fork.sent and not (tmp_path / "mark").exists()


def test_only_commands_of_a_known_form_are_obeyed() -> None:
    fork = {"fork": "g", "size": 2, "entry": "shardwise.launch.worker:main", "standby": False, "arguments": ["run"],
            "ranks": [0, 1], "slots": [0, 1], "snapshots": "0123456789ab-1"}  # fmt: skip
    good: list[tuple[dict[str, Any], Any]] = [
        (fork, COMMANDS), ({"kill": "g", "signal": 9, "ranks": [0]}, COMMANDS), ({"kill": "g", "signal": 15}, COMMANDS),
        ({"group": "g", "pids": {"0": 1}}, REPORTS), ({"group": "g", "rank": 0, "code": -6}, REPORTS),
        ({"rejected": "no", "is_final": True}, COMMANDS), ({"stop": 15}, REPORTS),
        ({"shardwise": "0.1", "torch": "2", "python": "3", "clock": 1.5}, REPORTS),
    ]  # fmt: skip
    for message, forms in good:
        assert parse_message(json.dumps(message).encode(), forms) == message
    bad: list[Any] = [
        {**fork, "entry": "os:system"}, {**fork, "snapshots": "../.."}, {**fork, "more": 1}, {"remove_snapshots": "/"},
        {**fork, "ranks": [True]}, {"kill": "g", "signal": 99}, {"heartbeat": 1.5}, [], 7, None, {},
    ]  # fmt: skip
    rng = random.Random(0)
    lines = [json.dumps(message).encode() for message in bad] + [rng.randbytes(100) for _ in range(200)]
    for line in [*lines, b"[" * 60_000, b'{"heartbeat": 1e999}', b"1" * 5000, b'{"heartbeat": NaN}']:
        with pytest.raises(ValueError):
            parse_message(line, COMMANDS)


def test_a_secret_that_others_can_read_or_guess_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "secret"
    monkeypatch.delenv("SHARDWISE_SECRET", raising=False)
    first = node_channel.create_secret(path)
    assert node_channel.create_secret(path) != first and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    with pytest.raises(JobError, match="mode 600"):
        node_channel.read_secret(path)
    monkeypatch.setenv("SHARDWISE_SECRET", "short")
    with pytest.raises(JobError, match="16 or more"):
        node_channel.create_secret(path)


def test_a_busy_node_is_not_lost_and_an_unreachable_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        theirs = socket.create_connection(door.getsockname())  # never answers, but its kernel acknowledges
        ours, _ = door.accept()
    channel = NodeChannel(ours, SECRET, True, lambda why: None)
    try:
        for seconds in (0.0, 0.9):
            monkeypatch.setattr(channel, "_silence", seconds)
            assert not channel.silence_if_lost()
        monkeypatch.setattr(channel, "_is_acknowledged", lambda: False)
        monkeypatch.setattr(channel, "_silence", 0.9)
        assert channel.silence_if_lost() >= 0.9
        channel.patience = make_job({"run": {"node_patience": 5.0}}).run.node_patience
        assert not channel.silence_if_lost()
    finally:
        channel.close()
        theirs.close()


def test_snapshots_follow_no_link_and_lie_in_a_folder_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "SHARED_MEMORY", tmp_path)
    key = snapshot_key(tmp_path / "run", 0)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    (tmp_path / f"shardwise-{key}-planted").symlink_to(victim)
    command = {"snapshots": key, "arguments": [], "ranks": []}
    fork_server._fork_workers(command, None)  # type: ignore[arg-type]
    (folder,) = fork_server.snapshot_folders(key)
    assert folder.name != f"shardwise-{key}-planted" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    store = SnapshotStore(folder, "shard=1", lambda one: [one])
    (folder / "rank-0.1").symlink_to(victim / "file")
    with pytest.raises(OSError):
        store.write(1, {"weights.a": torch.ones(64)}, {})
    fork_server.remove_snapshots(key)
    assert (victim / "file").read_text() == "precious" and not folder.exists()


def _exchange() -> Any:
    listening = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    rank = dist.get_rank()
    values = all_gather_json({"rank": rank, "text": "x" * (10 * rank), "numbers": [1e300, float("inf"), 2**62]})
    try:
        dist.all_gather_object([None, None], rank)
    except RuntimeError as error:
        return listening, values, broadcast_json([rank, "first"]), str(error)


def test_ranks_exchange_json_over_loopback_and_never_a_pickle() -> None:
    for rank, (listening, values, first, refusal) in enumerate(run_world(_exchange, 2)):
        assert listening and all(address.startswith("127.") or address == "::1" for address in listening), listening
        assert [value["rank"] for value in values] == [0, 1] and values[1]["text"] == "x" * 10, rank
        assert values[0]["numbers"] == [1e300, float("inf"), 2**62] and first == [0, "first"]
        assert "pickle" in refusal
