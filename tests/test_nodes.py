"""A run on two machines: real agents, each in a network of its own, whose link is slowed and cut, and whose processes
are killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.job import Job, make_job
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import snapshot_folders
from shardwise.workers.nodes import Node
from shardwise.workers.snapshots import snapshot_key

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import hostile  # noqa: E402

pytestmark = pytest.mark.cluster

NAME = f"swnode{os.getpid()}"
PORT = 29471
STEPS = 40


def job_of(folder: Path | str, saved: int = 10, **run: object) -> Job:
    return make_job(
        {
            "precision": "float64", "steps": STEPS, "layout": "replicate=2 tensor=2",
            "model": {"layers": 2, "width": 16, "heads": 2, "vocab": 61, "sequence": 8}, "batch": {"samples": 4},
            "data": {"source": "synthetic"}, "validation": {"samples": 4},
            "checkpoint": {"every": saved, "snapshot_every": 2},
            "run": {"folder": str(folder), "device": "cpu", "rejoin_timeout": 60, "standby": False, **run},
        }
    )  # fmt: skip


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def link() -> Iterator[None]:
    """Two namespaces joined by a pair of interfaces, both named `wire`."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("networks of one's own need root, `ip` and `tc`")
    try:
        for number in range(2):
            sh(f"ip netns add {NAME}{number}")
        sh(f"ip -n {NAME}0 link add wire type veth peer name wire netns {NAME}1")
        for number in range(2):
            sh(f"ip -n {NAME}{number} addr add 10.78.0.{number + 1}/24 dev wire")
            sh(f"ip -n {NAME}{number} link set dev wire up")
            sh(f"ip -n {NAME}{number} link set dev lo up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no networks of one's own can be had here: {error.stderr}")
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"{NAME}{number}"], capture_output=True)


def agent(number: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shardwise", "train", *words]
    where = ["ip", "netns", "exec", f"{NAME}{number}"]
    return subprocess.Popen(
        [*where, *command, "--node", f"{number}/2", "--address", f"10.78.0.1:{PORT}"], start_new_session=True
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """All processes of an agent at once, as when a machine goes dark."""
    for pid in [process.pid]:
        os.killpg(pid, signal.SIGKILL)
    process.wait()


def wait(what: Callable[[], object], lead: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 150
    while not what():
        assert lead.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def curve(folder: RunFolder) -> list[tuple[int, int, float, float]]:
    return [(r["step"], r["samples"], r["loss"], r["grad_norm"]) for r in folder.metrics()]


def kinds(run: RunFolder) -> list[str]:
    return [event["event"] for event in run.events()]


def test_a_slow_link_a_cut_link_and_a_lost_node(link: None, tmp_path: Path) -> None:
    run, plain = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "plain")
    for folder in (run, plain):
        text = job_of(folder.path, saved=STEPS).to_toml()  # memory is all there is
        (tmp_path / f"{folder.path.name}.toml").write_text(text)
    begin = [sys.executable, "-m", "shardwise", "train", str(tmp_path / "plain.toml")]
    undisturbed = subprocess.Popen(begin, stdout=subprocess.DEVNULL)
    for number in range(2):
        sh(f"tc -n {NAME}{number} qdisc add dev wire root tbf rate 10mbit burst 16kb limit 1mb")
    member, lead = agent(1), agent(0, str(tmp_path / "run.toml"))
    try:
        wait(lambda: len(list(run.metrics())) >= 5, lead)
        cut = time.time()
        sh(f"ip -n {NAME}1 link set dev wire down")
        wait(lambda: "node_lost" in kinds(run), lead)
        sh(f"ip -n {NAME}1 link set dev wire up")
        wait(lambda: "resumed" in kinds(run) and len(list(run.metrics())) >= 15, lead)
        end(member)
        shutil.rmtree(*snapshot_folders(snapshot_key(run.path, 1)))  # as after a new start of that machine
        for number in range(2):
            sh(f"tc -n {NAME}{number} qdisc del dev wire root")
        wait(lambda: kinds(run).count("node_lost") == 2, lead)
        ports = {port for host, port in hostile.open_ports(f"{NAME}0") if not host.startswith("127.")}
        target = f"10.78.0.1 {','.join(map(str, sorted(ports, key=lambda port: port != PORT)))} {tmp_path / 'mark'}"
        attack = [sys.executable, hostile.__file__, "--count", "100", "--attack", target]
        attacker = subprocess.Popen(["ip", "netns", "exec", f"{NAME}1", *attack])
        member = agent(1)
        assert lead.wait(150) == 0 and member.wait(20) == 0 and undisturbed.wait(100) == 0
        assert attacker.wait(60) == 0
    finally:
        for process in (member, lead):
            if process.poll() is None:
                end(process)
    lost = [event for event in run.events() if event["event"] == "node_lost"]
    assert [event["ranks"] for event in lost] == [[2, 3], [2, 3]]
    assert "ranks 2 and 3 are unreachable (node 1 at 10.78.0.2 sent no heartbeat for 0." in lost[0]["message"]
    assert 0 < lost[0]["time"] - cut < 5
    assert [event["source"] for event in run.events() if event["event"] == "resumed"] == ["memory", "memory"]
    assert curve(run) == curve(plain) and len(curve(run)) == STEPS
    assert "refused" in kinds(run) and not (tmp_path / "mark").exists()
    assert not any(snapshot_folders(snapshot_key(run.path, node)) for node in range(2))


def test_without_a_lost_node_a_run_goes_on_with_fewer_and_then_with_all(link: None, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (tmp_path / "run.toml").write_text(job_of(run.path, rejoin_timeout=0.5, elastic=True).to_toml())
    member, lead = agent(1), agent(0, str(tmp_path / "run.toml"), "--set", "steps=1000000")
    try:
        wait(lambda: len(list(run.metrics())) >= 3, lead)
        member.send_signal(signal.SIGSTOP)  # as if it got no CPU time: its workers and its kernel go on
        time.sleep(2.0)
        member.send_signal(signal.SIGCONT)
        wait(lambda: len(list(run.metrics())) >= 6, lead)
        assert "node_lost" not in kinds(run)
        end(member)
        wait(lambda: "resumed" in kinds(run), lead)
        member = agent(1)
        wait(lambda: "scaled_up" in kinds(run) and "resumed" in kinds(run)[kinds(run).index("scaled_up") :], lead)
        lead.send_signal(signal.SIGTERM)
        assert lead.wait(60) == 0 and member.wait(20) == 0
    finally:
        for process in (member, lead):
            if process.poll() is None:
                end(process)
    layouts = [event["layout"] for event in run.events() if event["event"] == "resumed"]
    assert layouts[0] != layouts[1] == "replicate=2 tensor=2"
    assert [record["samples"] for record in run.metrics()] == [4 * (n + 1) for n in range(len(curve(run)))]


@pytest.fixture
def names(link: None) -> Iterator[list[Path]]:
    """The files that are /etc/hosts in the two networks; a pod's name appears there a while after it has started."""
    files = [Path(f"/etc/netns/{NAME}{number}/hosts") for number in range(2)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("127.0.0.1 localhost\n")
    yield files
    for file in files:
        shutil.rmtree(file.parent)


def test_pods_of_an_indexed_job_are_drained_lost_and_replaced(names: list[Path], tmp_path: Path) -> None:
    """What `shardwise submit --k8s` wrote, in networks that play the pods: own addresses, names by a hosts file."""
    run, plain = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "plain")
    for folder in (run, plain):
        (tmp_path / f"{folder.path.name}.toml").write_text(job_of(folder.path).to_toml())
    shardwise = [sys.executable, "-m", "shardwise"]
    submit = ["submit", "run.toml", "--k8s", "--image", "i", "--nodes", "2", "--python", sys.executable, "--dry-run"]
    shown = subprocess.run([*shardwise, *submit], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    text = (tmp_path / "run.yaml").read_text()
    command, *_ = map(json.loads, re.findall(r"command: (\[.*\])", text))
    arguments = re.findall(r"args: \[(.*)\]", text)[0].replace('"', "").split(", ")
    (secret,) = re.findall("secret: ([0-9a-f]{64})", text)
    assert secret not in shown
    command = [word.replace("/etc/shardwise/job.toml", str(tmp_path / "run.toml")) for word in command]

    def pod(index: int) -> subprocess.Popen[bytes]:
        variables = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in arguments]
        where = ["ip", "netns", "exec", f"{NAME}{index}"]
        environment = {**os.environ, **variables, "SHARDWISE_SECRET": secret}
        return subprocess.Popen([*where, *command, *words], env=environment, cwd=tmp_path, start_new_session=True)

    pods = [pod(0), pod(1)]
    try:
        time.sleep(5)
        for file in names:
            with file.open("a") as hosts:
                hosts.write("10.78.0.1 run-0.run\n")
        wait(lambda: len(curve(run)) >= 5, pods[0])
        pods[1].send_signal(signal.SIGTERM)  # its machine is drained
        assert [one.wait(60) for one in pods] == [75, 75]
        pods, steps = [pod(0), pod(1)], len(curve(run))
        wait(lambda: len(curve(run)) >= steps + 5, pods[0])
        end(pods[1])
        wait(lambda: "node_lost" in kinds(run), pods[0])
        pods[1] = pod(1)
        assert [one.wait(150) for one in pods] == [0, 0]
    finally:
        for one in pods:
            if one.poll() is None:
                end(one)
    subprocess.run([*shardwise, "train", "plain.toml"], cwd=tmp_path, check=True, capture_output=True)
    assert curve(run) == curve(plain) and len(curve(run)) == STEPS
    assert [event["source"] for event in run.events() if event["event"] == "resumed"] == ["disk", "memory"]


def test_nodes_with_disks_of_their_own_and_an_object_store(link: None, tmp_path: Path) -> None:
    """Own networks, own file systems: the nodes share nothing but an S3 server. Each is lost once, with its disk."""
    for package in ("moto.server", "boto3", "s3fs"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    place, disk, plain = "http://10.78.0.1:5000", tmp_path / "disk", RunFolder(tmp_path / "plain")
    keys = {
        "AWS_ENDPOINT_URL": place,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    folders = {"HOME": disk, "TMPDIR": disk, "SHARDWISE_CACHE": disk / "cache"}
    environment = {
        **os.environ,
        **keys,
        **{name: str(path) for name, path in folders.items()},
        "SHARDWISE_SECRET": "x" * 16,
    }
    inside, url = ["ip", "netns", "exec"], "s3://runs/run"
    disk.mkdir()
    for name, folder in (("run", url), ("plain", str(plain.path))):
        job = job_of(folder, saved=20).model_copy(update={"steps": 400})  # long enough to lose both nodes in the middle
        (tmp_path / f"{name}.toml").write_text(job.to_toml())

    def node(index: int, *words: str) -> subprocess.Popen[bytes]:
        mounts = f"mount -t tmpfs none {disk} && mount -t tmpfs none /dev/shm && cd {disk} && exec "
        command = [sys.executable, "-m", "shardwise", "train", *words]
        command += ["--node", f"{index}/2", "--address", f"10.78.0.1:{PORT}"]
        where = [*inside, f"{NAME}{index}", "unshare", "--mount", "sh", "-c", mounts + shlex.join(command)]
        return subprocess.Popen(where, env=environment, start_new_session=True)

    def on_disk(process: subprocess.Popen[bytes]) -> RunFolder:
        """The folder of node 0, which nobody else sees."""
        cache = Path(f"/proc/{process.pid}/root{disk}/cache/runs")
        wait(lambda: list(cache.glob("*/metrics.jsonl")), process)
        return RunFolder(next(cache.glob("*/metrics.jsonl")).parent)

    def ask(code: str) -> str:
        command = [*inside, f"{NAME}0", sys.executable, "-c", code]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    moto = [*inside, f"{NAME}0", sys.executable, "-m", "moto.server", "-H", "10.78.0.1"]
    server = subprocess.Popen(moto, env=environment, stderr=subprocess.DEVNULL)
    undisturbed = subprocess.Popen([sys.executable, "-m", "shardwise", "train", str(tmp_path / "plain.toml")])
    nodes = [server]
    try:
        time.sleep(3)
        ask("import boto3; boto3.client('s3').create_bucket(Bucket='runs')")
        nodes += [node(0, str(tmp_path / "run.toml")), node(1)]
        run = on_disk(nodes[1])
        wait(lambda: len(curve(run)) >= 50, nodes[1])
        end(nodes[2])
        wait(lambda: "node_lost" in kinds(run), nodes[1])
        nodes[2] = node(1)
        wait(lambda: "resumed" in kinds(run), nodes[1])
        steps = len(curve(run))
        wait(lambda: len(curve(run)) >= steps + 20, nodes[1])
        time.sleep(2)  # for the store
        end(nodes[1])
        nodes[1] = node(0, "--resume", url)
        assert [one.wait(150) for one in nodes[1:]] == [0, 0] and undisturbed.wait(150) == 0
        code = f"from shardwise.train.run_folder import RunFolder; print(RunFolder.open('{url}').path)"
        stored = RunFolder(Path(ask(code).split()[-1]))
    finally:
        for process in (*nodes, undisturbed):
            if process.poll() is None:
                end(process) if process in nodes[1:] else process.kill()
    assert curve(stored) == curve(plain) and len(curve(stored)) == 400
    resumed = [(event["step"], event["source"]) for event in stored.events() if event["event"] == "resumed"]
    assert resumed[-1][0] >= 20 and resumed[-1][1] == "disk", resumed
    assert not list(Path(f"{disk}/cache").glob("runs/*/checkpoints/*"))  # the host has seen no disk of a node


def test_a_node_that_is_none_is_refused_in_a_sentence() -> None:
    assert Node.parse("1/2", "10.0.0.1:29400") == Node(1, 2, "10.0.0.1", 29400)
    for text, address in (("2/2", "a:1"), ("one", "a:1"), ("0/2", None), ("0/2", "a")):
        with pytest.raises(JobError, match="use --node 0/2 --address HOST:PORT"):
            Node.parse(text, address)
