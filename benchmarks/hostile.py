"""Hostile connections against a training run of two nodes, compared bitwise with an undisturbed run.

    python benchmarks/hostile.py                  1,000 connections of every kind, about four minutes on two cores
    python benchmarks/hostile.py --count 100      fewer

Two node agents run in network namespaces of their own, which needs root and `ip`. An attacker in the second namespace
finds every port that the run opens there or on node 0, and connects to them with garbage, huge and endless messages,
pickles, reflected handshakes, wrong secrets, commands and idle connections. In between, a rank is killed. The run must
lose nothing, run no foreign code, open no port on all interfaces, and name the killed rank within a second.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MARK = "hostile code ran"
IDLE: list[socket.socket] = []  # kept open until the end


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"echo {MARK} > {self.path}",))


def attacks(mark: str) -> dict[str, Callable[[socket.socket, random.Random], None]]:
    """Returns what an attacker without the secret says on a connection, by name."""

    def prove(secret: bytes, role: str, nonces: bytes) -> bytes:
        return hmac.digest(secret, f"shardwise {role}\n".encode() + nonces, hashlib.sha256)

    def wrong_secret(link: socket.socket, rng: random.Random) -> None:
        nonce = rng.randbytes(32)
        link.sendall(nonce + prove(rng.randbytes(32), "node 1", link.recv(32) + nonce))
        link.sendall(b'{"node": 1}\n')

    def reflect(link: socket.socket, rng: random.Random) -> None:
        challenge = link.recv(32)
        link.sendall(challenge + challenge)

    def slow(link: socket.socket, rng: random.Random) -> None:
        for _ in range(3):
            link.sendall(b"{")
            time.sleep(0.05)
        IDLE.append(link.dup())

    def fork_command(link: socket.socket, rng: random.Random) -> None:
        command = {"fork": "x", "ranks": [0], "size": 1, "entry": "os:system", "arguments": [f"echo {MARK} > {mark}"]}
        link.sendall(json.dumps(command).encode() + b"\n" + b'{"remove_snapshots": "/"}\n{"shutdown": true}\n')

    def send(message: bytes) -> Callable[[socket.socket, random.Random], None]:
        return lambda link, rng: link.sendall(message)

    return {
        "garbage": lambda link, rng: link.sendall(rng.randbytes(rng.randrange(1, 4096))),
        "a pickle": send(pickle.dumps(Payload(mark))),
        "an infinite node": send(b'{"node": 1e999}\n'),
        "brackets": send(b"[" * 60_000 + b"\n"),
        "a node without a secret": send(b'{"node": 1}\n{"group": "group-1", "rank": 0, "code": -9}\n'),
        "a huge message": send(b"7" * (1 << 22)),
        "a web browser": send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        "a wrong secret": wrong_secret,
        "a reflected handshake": reflect,
        "commands of node 0": fork_command,
        "a slow connection": slow,
        "an idle connection": lambda link, rng: IDLE.append(link.dup()),
        "a closed connection": lambda link, rng: None,
    }


def attack(host: str, ports: list[int], count: int, mark: str, seed: int = 0) -> None:
    """Makes `count` hostile connections, half of them to the first of these ports."""
    rng, kinds = random.Random(seed), list(attacks(mark).items())
    for number in range(count):
        _, speak = kinds[number // 2 % len(kinds)]
        port = ports[0] if number % 2 else rng.choice(ports)
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0) as link:
            link.settimeout(0.2)
            speak(link, rng)
        while len(IDLE) > 100:
            IDLE.pop(0).close()


def listening(table: str) -> set[tuple[str, int]]:
    """Returns the listening addresses of a /proc/net/tcp table."""
    found = set()
    for line in table.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            address, port = local.split(":")
            words = [bytes.fromhex(address[n : n + 8])[::-1] for n in range(0, len(address), 8)]
            family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
            found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@contextmanager
def two_networks(name: str, subnet: str) -> Iterator[None]:
    """Two namespaces, NAME0 and NAME1, joined by a pair of interfaces: SUBNET.1 and SUBNET.2."""

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    try:
        for number in range(2):
            run(f"ip netns add {name}{number}")
        run(f"ip -n {name}0 link add wire type veth peer name wire netns {name}1")
        for number in range(2):
            run(f"ip -n {name}{number} addr add {subnet}.{number + 1}/24 dev wire")
            run(f"ip -n {name}{number} link set dev wire up")
            run(f"ip -n {name}{number} link set dev lo up")
        yield
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"{name}{number}"], capture_output=True)


def open_ports(name: str) -> set[tuple[str, int]]:
    """Returns the addresses on which anything in a namespace listens."""
    return {address for table in ("tcp", "tcp6") for address in listening(read_table(name, table))}


def read_table(name: str, table: str) -> str:
    command = ["ip", "netns", "exec", name, "cat", f"/proc/net/{table}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="hostile connections")
    parser.add_argument("--attack", help=argparse.SUPPRESS)  # the attacker's own process: HOST PORT,PORT MARK
    options = parser.parse_args()
    if options.attack:
        host, ports, mark = options.attack.split()
        attack(host, [int(port) for port in ports.split(",")], options.count, mark)
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-hostile-") as folder:
        sys.exit(not run(Path(folder), options.count))


def run(folder: Path, count: int) -> bool:
    from faults import curve, job_of

    from shardwise.train.run_folder import RunFolder
    from shardwise.workers.diagnosis import read_heartbeats

    name, port, layout = f"swhost{os.getpid()}", 29479, "replicate=2 tensor=2"
    disturbed, plain = RunFolder(folder / "disturbed"), RunFolder(folder / "plain")
    for one in (disturbed, plain):
        (folder / f"{one.path.name}.toml").write_text(job_of(one.path, max(60, count // 2), layout=layout).to_toml())
    train = [sys.executable, "-m", "shardwise", "train"]
    subprocess.run([*train, folder / "plain.toml"], check=True, stdout=subprocess.DEVNULL)
    mark = folder / "mark"
    with two_networks(name, "10.80.0"):
        nodes = []
        for number, words in ((1, []), (0, [str(folder / "disturbed.toml")])):
            where = ["ip", "netns", "exec", f"{name}{number}"]
            address = ["--node", f"{number}/2", "--address", f"10.80.0.1:{port}"]
            nodes.append(subprocess.Popen([*where, *train, *words, *address], start_new_session=True))
        try:
            while len(curve(disturbed)) < 3:
                assert nodes[1].poll() is None
                time.sleep(0.05)
            opened = {number: open_ports(f"{name}{number}") for number in range(2)}
            print(f"open ports: {opened}", flush=True)
            attackers = []
            for number in range(2):
                found = {at for host, at in opened[number] if not host.startswith("127.")}
                ports = ",".join(map(str, sorted(found, key=lambda at: at != port)))
                target = f"10.80.0.{number + 1} {ports} {mark}"
                words = [sys.executable, __file__, "--count", str(count // 2), "--attack", target]
                attackers.append(subprocess.Popen(["ip", "netns", "exec", f"{name}{1 - number}", *words]))
            time.sleep(1.0)
            killed = time.time()
            os.kill(read_heartbeats(disturbed.path)[2]["pid"], signal.SIGKILL)
            codes = [process.wait(600) for process in (*attackers, nodes[1], nodes[0])]
        finally:
            for process in nodes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    events = [event for event in disturbed.events() if event["event"] in ("killed", "node_lost", "failed", "hung")]
    named = [
        round(event["time"] - killed, 2) for event in events if event["event"] == "killed" and event["ranks"] == [2]
    ]
    equal = curve(disturbed) == curve(plain) and len(curve(plain)) > 0
    wide = [address for ports in opened.values() for address in ports if address[0] in ("0.0.0.0", "::")]
    refused = [event["message"] for event in disturbed.events() if event["event"] == "refused"]
    print("\n".join(refused))
    print(
        f"{count} hostile connections: exit codes {codes}; hostile code ran: {mark.exists()}; ports open on all "
        f"interfaces: {wide}; faults: {[event['event'] for event in events]}; the killed rank was named after "
        f"{named} s; loss curve: {'bitwise equal' if equal else 'DIFFERS'}",
        flush=True,
    )
    return equal and not any(codes) and not mark.exists() and not wide and len(events) == 1 and named[0] < 1.0


if __name__ == "__main__":
    main()
