"""The full fault-injection suite: 1,000 real faults in ten layouts, each run compared bitwise with an undisturbed one.

    python benchmarks/faults.py                          every run that the results file lacks, then the tables
    python benchmarks/faults.py locks "processes tensor" the runs whose names contain one of these words
    python benchmarks/faults.py --table                  the tables of the results so far

A result is a line of the results file, so the suite can be stopped and continued. The parts:

processes   a rank is killed, aborts (in Python and in a native thread), crashes or is stopped, in every phase; a bit
            flips in a checkpoint, snapshot, weight, optimizer state or gradient; a gradient is NaN
standby     the same after two seconds of training each, so that standby workers take over
locks       the launcher is killed and resumed at once by two launchers; a third tries to resume the live run
data        the corpus grows, is replaced, overwritten in place or cut while the run trains, then a rank is killed
disk        a small disk fills up; checkpoints, or the whole run folder, become read-only
nodes       two node agents in separate network namespaces: a slow link, a cut link, a lost node, a killed rank

A fault counts as named if the first event after it blames the right rank or node and no other (for a NaN: the step, or
the ranks that hold it), or if the refusal names the right file or process. Disk and nodes
need root (`mount`, `ip`, `tc`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise import cli
from shardwise.chaos.faulty_worker import Fault, inject_faults, samples_used, trigger_times
from shardwise.chaos.run import BIT_FLIP_KINDS, FAILURE_EVENTS, FAULTY_WORKER
from shardwise.job import Job, make_job
from shardwise.launch import start as starting
from shardwise.launch.start import launch
from shardwise.layout import Layout
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.workers import diagnosis
from shardwise.workers.diagnosis import read_heartbeats
from shardwise.workers.fork_server import remove_snapshots
from shardwise.workers.snapshots import snapshot_key

LAYOUTS = [
    "replicate=2", "shard=2", "shard=2 zero=3", "tensor=2", "context=2", "pipeline=2", "pipeline=2 replicate=2",
    "replicate=2 tensor=2", "shard=2 tensor=2 zero=2", "pipeline=2 tensor=2",
]  # fmt: skip
EVENTS = dict.fromkeys(("kill", "abort", "native abort", "segfault", "flip", "flip memory"), "killed")
EVENTS |= {"stop": "suspended", "nan": "rollback"} | dict.fromkeys(BIT_FLIP_KINDS, "corruption")
PHASES = ("data", "forward", "backward", "optimizer", "save", "load")
DATA_KINDS = ("data grown", "data replaced", "data changed in place", "data cut", "data deleted")
LOCK_KINDS = ("launcher killed", "two resumes at once", "resumed twice")
EVERY = 6  # steps between checkpoints
NAME, PORT = f"swfault{os.getpid()}", 29473
Record = dict[str, Any]


def job_of(folder: Path, steps: int, **changes: Any) -> Job:
    run = {"folder": str(folder), "device": "cpu", "max_restarts": 1000, "rejoin_timeout": 120} | changes.pop("run", {})
    model = {"layers": 2, "width": 32, "heads": 2, "vocab": 61, "sequence": 16} | changes.pop("model", {})
    settings = {
        "precision": "float64", "steps": steps, "model": model, "data": {"source": "synthetic"},
        "batch": {"samples": 8}, "validation": {"samples": 4}, "checkpoint": {"every": EVERY, "snapshot_every": 2},
    }  # fmt: skip
    return make_job(settings | changes | {"run": run})


def curve(run: RunFolder) -> list[Any]:
    return [(r["step"], r["samples"], r["loss"], r["grad_norm"]) for r in run.metrics()]


# Launchers


class Launcher:
    """`shardwise train` in a process of its own, forked from this one, which has imported everything already."""

    def __init__(self, log: Path, *arguments: str, faults: list[Fault] | None = None, pace: float = 0.0, net: str = ""):
        """`pace`: seconds that each step takes longer. `net`: the network namespace."""
        self.log, self.code = log, None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            os.setsid()
            output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            for number in (1, 2):
                os.dup2(output, number)
            if net and ctypes.CDLL(None).setns(os.open(f"/var/run/netns/{net}", os.O_RDONLY), 0):
                sys.exit(f"cannot enter the network namespace {net}")
            _inject(faults or [], pace)
            sys.argv = ["shardwise", "train", *arguments]
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float = 600.0) -> int:
        wait_until(lambda: self.poll() is not None, timeout)
        return self.code if self.code is not None else -1

    def kill(self, group: bool = False) -> None:
        """Kills the launcher alone, or all its processes as when a machine goes dark."""
        if self.poll() is None:
            (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
            self.wait()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _inject(faults: list[Fault], pace: float) -> None:
    """Makes the launcher of this process start workers with fault injection, and take its time for each step."""

    def launch_faulty(folder: RunFolder, layout: Layout, **options: Any) -> None:
        if not (folder.path / "faults.json").exists():
            inject_faults(folder.path, faults)
        launch(folder, layout, entry=f"{FAULTY_WORKER}:main", **options)

    set_phase = TrainingLoop._set_phase

    def set_phase_slowly(loop: TrainingLoop, phase: str, step: int, overlapped: bool = False) -> None:
        set_phase(loop, phase, step, overlapped)
        if phase == "data":
            time.sleep(pace)

    diagnosis.MAX_DIAGNOSES = 1000  # for runs that are kept
    starting.launch = launch_faulty  # type: ignore[assignment]
    TrainingLoop._set_phase = set_phase_slowly  # type: ignore[method-assign]


def wait_until(condition: Callable[[], object], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {timeout:g} s")
        time.sleep(0.01)


class World:
    """A run under test beside its undisturbed twin."""

    def __init__(self, folder: Path, layout: str, steps: int, pace: float = 0.0, **job: Any):
        self.folder, self.layout, self.steps, self.pace = folder, layout, steps, pace
        self.run, self.twin = RunFolder(folder / "run"), RunFolder(folder / "twin")
        self.records: list[Record] = []
        self.starts = 0
        for one in (self.run, self.twin):
            one.path.parent.mkdir(parents=True, exist_ok=True)
            text = job_of(one.path, steps, layout=layout, **job).to_toml()
            (folder / f"{one.path.name}.toml").write_text(text)

    def start(self, *arguments: str, **options: Any) -> Launcher:
        self.starts += 1
        words = arguments or (str(self.folder / "run.toml"),)
        return Launcher(self.folder / f"log-{self.starts}.txt", *words, **{"pace": self.pace, **options})

    def resume(self) -> Launcher:
        return self.start("--resume", str(self.run.path))

    def train_twin(self) -> None:
        launcher = Launcher(self.folder / "log-twin.txt", str(self.folder / "twin.toml"))
        if launcher.wait():
            raise RuntimeError(f"the undisturbed run failed: {launcher.said}")

    def done(self) -> int:
        return len(curve(self.run))

    def wait_steps(self, launchers: list[Launcher], steps: int = 3) -> None:
        """Waits until the run has taken some more steps under one of these launchers."""
        target = min(self.done() + steps, self.steps)

        def reached() -> bool:
            if all(launcher.poll() is not None for launcher in launchers) and self.done() < target:
                raise RuntimeError(f"the run ended with {[one.code for one in launchers]}: {launchers[0].said[-2000:]}")
            return self.done() >= target

        wait_until(reached)

    def events(self, since: float = 0.0, kinds: tuple[str, ...] = (*FAILURE_EVENTS, "node_lost")) -> list[Record]:
        return [event for event in self.run.events() if event["time"] >= since and event["event"] in kinds]

    def record(self, kind: str, named: bool, since: float, event: Record | None = None, said: str = "") -> None:
        seconds = event["time"] - since if event is not None else None
        wrong = {} if named else {"said": said or (event or {}).get("message", "")}
        self.records.append({"kind": kind, "named": named, "seconds": seconds, **wrong})

    def expect(self, kind: str, event_kind: str, ranks: list[int], since: float, launcher: Launcher) -> None:
        """Waits for the first failure event since a fault, which must blame these ranks."""
        wait_until(lambda: self.events(since) or launcher.poll() is not None)
        event = next(iter(self.events(since)), None)
        named = event is not None and (event["event"], event.get("ranks")) == (event_kind, ranks)
        self.record(kind, named, since, event, launcher.said[-500:])

    def pid(self, rank: int) -> int:
        return int(read_heartbeats(self.run.path)[rank]["pid"])

    def result(self) -> Record:
        """Compares the finished run with its twin."""
        expected, used = samples_used(self.twin.path), samples_used(self.run.path)
        return {
            "layout": self.layout, "faults": self.records, "steps": self.steps,
            "equal": len(curve(self.twin)) == self.steps and curve(self.run) == curve(self.twin),
            "lost": len(set(expected) - set(used)), "repeated": len(used) - len(set(used)),
        }  # fmt: skip


# Parts


def draw_faults(layout: Layout, count: int, gap: int, rng: random.Random) -> list[Fault]:
    """Draws faults `gap` steps or more apart, so that each is alone in its attempt."""
    kinds = ["kill", *EVENTS] + [kind for kind in EVENTS if "abort" in kind]
    if layout.replicate == 1:
        kinds.remove("gradient")  # no replica has the same gradient to compare with
    drawn, faults, step = list[str](), list[Fault](), 0
    for number in range(count):
        if not drawn:
            drawn = rng.sample(kinds, len(kinds))
        in_background = bool(faults) and faults[-1].phase == "save"  # checkpoints are written while training goes on
        step += gap + rng.randrange(3) + in_background * EVERY
        early = step < 2 * EVERY + 3  # no two checkpoints yet
        kind = next(
            (kind for kind in drawn if not early or kind in ("kill", "stop", "segfault") or "abort" in kind), "kill"
        )
        if kind in drawn:
            drawn.remove(kind)
        phase = rng.choice(PHASES)
        after_restart = bool(faults) and EVENTS[faults[-1].kind] == "killed" and faults[-1].phase != "load"
        if kind in ("flip", "flip memory", "nan", "gradient") or (phase == "load" and not after_restart):
            phase = "data"
        if kind in BIT_FLIP_KINDS:
            phase = rng.choice(PHASES[:3]) if kind != "gradient" else "gradient"
        if phase == "save":
            step = -(-step // EVERY) * EVERY
        if phase == "load":
            step -= gap
        faults.append(Fault(kind, rng.randrange(layout.world), step, phase, number))
    return faults


def processes(world: World, count: int, gap: int, seed: int) -> Iterator[None]:
    faults = draw_faults(Layout.parse(world.layout), count, gap, random.Random(seed))
    launcher = world.start(faults=faults)
    code = launcher.wait(1200)
    if code:
        raise RuntimeError(f"the run ended with {code}: {launcher.said[-3000:]}")
    times = trigger_times(world.run.path)
    hit = sorted((fault for fault in faults if fault.number in times), key=lambda fault: times[fault.number])
    for fault, following in zip(hit, [*hit[1:], None], strict=True):
        begin, end = times[fault.number], times[following.number] if following else float("inf")
        events = [event for event in world.events(begin) if event["time"] < end]
        event = next(iter(events), None)
        settled = next((event["ranks"] for event in events if "settled" in event), None)
        expected = EVENTS[fault.kind]
        if fault.kind == "nan" and event is not None and event["event"] == "corruption":
            expected = "corruption"  # on one replica only: its copies differ
        named = event is not None and event["event"] == expected
        if named and event is not None and expected == "rollback":
            named = event["step"] >= fault.step
        elif named and event is not None:
            blamed = settled or event["ranks"]  # a NaN in a tied weight reaches the rank that shares it
            named = fault.rank in blamed if fault.kind == "nan" else blamed == [fault.rank]
        said = "; ".join([f"{fault}", *(str(event["message"]) for event in events)])
        world.record(fault.kind, named, begin, event, said)
    yield


def locks(world: World, rounds: int) -> Iterator[None]:
    launcher = world.start()
    for _ in range(rounds):
        world.wait_steps([launcher])
        begin = time.time()
        second = world.resume()
        refused = second.wait() == 2 and f"is being trained by process {launcher.pid} on" in second.said
        world.record("resumed twice", refused, begin, said=second.said)
        os.kill(launcher.pid, signal.SIGKILL)
        begin, rivals = time.time(), [world.resume(), world.resume()]
        launcher.wait()
        world.wait_steps(rivals)
        wait_until(lambda rivals=rivals: any(rival.poll() is not None for rival in rivals))
        loser, launcher = sorted(rivals, key=lambda rival: rival.poll() is None)
        resumed = world.events(begin, ("resumed",))
        world.record("launcher killed", len(resumed) == 1, begin, next(iter(resumed), None), launcher.said)
        refused = loser.code == 2 and f"is being trained by process {launcher.pid} on" in loser.said
        world.record("two resumes at once", refused, begin, said=loser.said)
        yield
    assert launcher.wait() == 0, launcher.said


def data(world: World, rounds: int) -> Iterator[None]:
    corpus, launcher = world.folder / "corpus.txt", world.start()
    original, rng = corpus.read_bytes(), random.Random(rounds)
    for number in range(rounds):
        world.wait_steps([launcher])
        kind = DATA_KINDS[number % 5]
        stat = corpus.stat()
        if kind == "data grown":
            with corpus.open("ab") as file:
                file.write(b"what came later " * 50)
        elif kind == "data replaced":
            other = corpus.with_suffix(".new")
            other.write_bytes(bytes(reversed(original)))
            other.replace(corpus)
        elif kind == "data changed in place":
            with corpus.open("r+b") as file:
                file.seek(rng.randrange(len(original) - 20))
                file.write(b"something else here")
            os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        elif kind == "data cut":
            os.truncate(corpus, len(original) // 2)
        else:
            corpus.unlink()
        begin, rank = time.time(), rng.randrange(2)
        os.kill(world.pid(rank), signal.SIGKILL)
        world.expect("kill", "killed", [rank], begin, launcher)
        if kind == "data grown":
            world.wait_steps([launcher])
            world.record(kind, world.events(begin)[1:] == [], begin, said=launcher.said[-500:])
        else:
            refused = launcher.wait() == 2 and str(corpus) in launcher.said and "Traceback" not in launcher.said
            if kind != "data deleted":  # a missing file may be noticed before the record of the data is read
                refused &= "the data has changed since the run began" in launcher.said
            world.record(kind, refused, begin, said=launcher.said[-500:])
            corpus.write_bytes(original)
            launcher = world.resume()
        yield
    assert launcher.wait() == 0, launcher.said


def disk(world: World, rounds: int) -> Iterator[None]:
    """The run folder lies on a disk of 8 MB, and its checkpoints on a mount of their own."""
    for path in (world.run.path, world.run.path / "checkpoints"):
        path.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", world.run.path)
    saved, ballast = world.run.path / "checkpoints", world.run.path / "ballast"
    saved.mkdir()
    mount("--bind", saved, saved)
    rng = random.Random(rounds)
    try:
        launcher = world.start()
        for _ in range(rounds):
            for kind in ("checkpoints read-only", "disk full"):
                world.wait_steps([launcher], EVERY)
                begin, rank = time.time(), rng.randrange(2)
                if kind == "disk full":
                    room = os.statvfs(world.run.path)
                    ballast.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - (256 << 10))))
                else:
                    remount(saved, "bind,ro")
                wait_until(lambda begin=begin: world.events(begin, ("checkpoint_failed",)))
                failed = world.events(begin, ("checkpoint_failed",))[0]
                reason = "No space left on device" if kind == "disk full" else "Read-only file system"
                world.record(kind, reason in failed["message"], begin, failed)
                begin = time.time()
                os.kill(world.pid(rank), signal.SIGKILL)
                world.expect("kill", "killed", [rank], begin, launcher)
                world.wait_steps([launcher], 2)
                ballast.unlink(missing_ok=True)
                remount(saved, "bind,rw")
            world.wait_steps([launcher], EVERY)
            launcher.kill()
            begin = time.time()
            remount(world.run.path, "ro")
            launcher = world.resume()
            named = launcher.wait() == 2 and "Read-only file system" in launcher.said
            world.record("run folder read-only", named, begin, said=launcher.said)
            remount(world.run.path, "rw")
            launcher = world.resume()
            yield
        assert launcher.wait() == 0, launcher.said
        shutil.copytree(world.run.path, world.folder / "copy")
    finally:
        for path in (saved, world.run.path):
            subprocess.run(["umount", "-l", path], capture_output=True)
    world.run = RunFolder(world.folder / "copy")


def mount(*arguments: Any) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def remount(path: Path, how: str) -> None:
    """Remounts a file system, as soon as no file on it is open for writing."""
    command = ["mount", "-o", f"remount,{how}", path]
    wait_until(lambda: not subprocess.run(command, capture_output=True).returncode)


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


@contextmanager
def two_networks() -> Iterator[None]:
    try:
        for number in range(2):
            sh(f"ip netns add {NAME}{number}")
        sh(f"ip -n {NAME}0 link add wire type veth peer name wire netns {NAME}1")
        for number in range(2):
            sh(f"ip -n {NAME}{number} addr add 10.79.0.{number + 1}/24 dev wire")
            sh(f"ip -n {NAME}{number} link set dev wire up")
            sh(f"ip -n {NAME}{number} link set dev lo up")
        yield
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"{NAME}{number}"], capture_output=True)


def nodes(world: World, rounds: int) -> Iterator[None]:
    address, size = ["--address", f"10.79.0.1:{PORT}"], Layout.parse(world.layout).world
    remote, rng = list(range(size // 2, size)), random.Random(rounds)

    def start_member() -> Launcher:
        return world.start("--node", "1/2", *address, net=f"{NAME}1")

    with two_networks():
        leader = world.start(str(world.folder / "run.toml"), "--node", "0/2", *address, net=f"{NAME}0")
        member = start_member()
        try:
            for _ in range(rounds):
                world.wait_steps([leader])
                begin = time.time()
                for number in range(2):
                    sh(f"tc -n {NAME}{number} qdisc add dev wire root tbf rate 10mbit burst 16kb limit 1mb")
                world.wait_steps([leader])
                world.record("link slowed", not world.events(begin), begin, said=str(world.events(begin)))
                for kind, number in (("kill", signal.SIGKILL), ("abort", signal.SIGABRT), ("segfault", signal.SIGSEGV)):
                    begin, rank = time.time(), rng.randrange(size)
                    os.kill(world.pid(rank), number)
                    world.expect(kind, "killed", [rank], begin, leader)
                    world.wait_steps([leader])
                begin = time.time()
                sh(f"ip -n {NAME}1 link set dev wire down")
                world.expect("link cut", "node_lost", remote, begin, leader)
                sh(f"ip -n {NAME}1 link set dev wire up")
                for number in range(2):
                    sh(f"tc -n {NAME}{number} qdisc del dev wire root")
                world.wait_steps([leader])
                begin = time.time()
                member.kill(group=True)
                remove_snapshots(snapshot_key(world.run.path, 1))
                world.expect("node lost", "node_lost", remote, begin, leader)
                member = start_member()
                yield
            assert leader.wait() == 0, leader.said
            assert member.wait() == 0, member.said
        finally:
            for launcher in (leader, member):
                launcher.kill(group=True)


# Results


def units() -> dict[str, Callable[[Path], Record]]:
    """Returns the runs by name; each returns its result."""
    found: dict[str, Callable[[Path], Record]] = {}

    def add(
        name: str, part: Callable[..., Iterator[None]], layout: str, steps: int, *arguments: int, **job: Any
    ) -> None:
        def test(folder: Path) -> Record:
            if "data" in job:
                words = random.Random(0).choices(["one", "two", "three", "four"], k=4000)
                (folder / "corpus.txt").write_text(" ".join(words))
            text = {"data": job["data"] | {"path": str(folder / "corpus.txt")}} if "data" in job else {}
            world = World(folder, layout, steps, **job | text)
            world.train_twin()
            for _ in part(world, *arguments):
                print(f"{name}: {len(world.records)} faults", flush=True)
            return world.result()

        found[name] = test

    checks = {"checksum_every": 1, "max_corruptions": 1000, "on_nan": "rollback"}
    for seed, layout in enumerate(LAYOUTS):
        for half in range(2):
            saved = {"every": EVERY, "snapshot_every": 2 if half == 0 or seed % 2 else 0, "keep": 4}
            steps = 41 * 6
            add(
                f"processes {layout} {half + 1}",
                processes,
                layout,
                steps,
                41,
                3,
                2 * seed + half,
                run=checks,
                checkpoint=saved,
            )
    for seed, layout in enumerate(LAYOUTS[:4]):
        add(f"standby {layout}", processes, layout, 6 * 300 + 100, 6, 300, 100 + seed, run=checks)
    for layout in ("shard=2", "pipeline=2", "tensor=2"):
        add(f"locks {layout}", locks, layout, 300, 9, pace=0.1)
    text = {"source": "text"}
    for layout in ("replicate=2", "context=2", "shard=2 zero=3"):
        add(f"data {layout}", data, layout, 200, 10, pace=0.1, data=text, model={"vocab": 256})
    for layout in ("shard=2", "pipeline=2"):
        add(
            f"disk {layout}",
            disk,
            layout,
            250,
            4,
            pace=0.05,
            checkpoint={"every": EVERY, "snapshot_every": 0, "asynchronous": False},
        )
    for layout in ("replicate=2 tensor=2", "replicate=2"):
        add(f"nodes {layout}", nodes, layout, 300, 5, pace=0.05)
    return found


GROUPS = {
    "SIGKILL": ("kill",),
    "SIGABRT, half of them in a native thread; SIGSEGV": ("abort", "native abort", "segfault"),
    "SIGSTOP": ("stop",),
    "bit flipped in a checkpoint or snapshot, then SIGKILL": ("flip", "flip memory"),
    "NaN in a gradient; bit flipped in a weight, optimizer state or gradient": ("nan", *BIT_FLIP_KINDS),
    "launcher killed; two resumes at once; resume of a live run": LOCK_KINDS,
    "data grown, replaced, changed in place, cut, deleted": DATA_KINDS,
    "disk full; checkpoints or run folder read-only": ("disk full", "checkpoints read-only", "run folder read-only"),
    "two nodes: link slowed, link cut, node lost": ("link slowed", "link cut", "node lost"),
}  # fmt: skip


def print_tables(results: list[Record]) -> None:
    """Prints what happened by layout, and by kind of fault."""
    header = ("layout", "runs", "faults", "named", "time to name: median, max", "losses", "samples lost, repeated")
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for layout in LAYOUTS:
        group = [result for result in results if result["layout"] == layout]
        faults = [fault for result in group for fault in result["faults"]]
        equal = "bitwise equal" if all(result["equal"] for result in group) else "DIFFER"
        lost, repeated = (sum(result[key] for result in group) for key in ("lost", "repeated"))
        cells = (len(group), len(faults), sum(fault["named"] for fault in faults), delays(faults), equal)
        print(f"| `{layout}` | {' | '.join(map(str, cells))} | {lost}, {repeated} |")
    faults = [fault for result in results for fault in result["faults"]]
    print(f"\n| fault | faults | named | time to name: median, max |\n|{' --- |' * 4}")
    for name, kinds in GROUPS.items():
        same = [fault for fault in faults if fault["kind"] in kinds]
        print(f"| {name} | {len(same)} | {sum(fault['named'] for fault in same)} | {delays(same)} |")
    named, equal = sum(fault["named"] for fault in faults), sum(result["equal"] for result in results)
    print(f"\n{len(faults)} faults, {named} named rightly; {equal} of {len(results)} loss curves bitwise equal")


def delays(faults: list[Record]) -> str:
    seconds = sorted(fault["seconds"] for fault in faults if fault["named"] and fault["seconds"] is not None)
    return f"{seconds[len(seconds) // 2]:.2f} s, {seconds[-1]:.2f} s" if seconds else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run only those whose name contains one of these; all without")
    parser.add_argument("--results", type=Path, default=Path("runs/faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print the tables of the results")
    parser.add_argument("--keep", type=Path, help="folder in which to keep runs with a fault that was not named")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    results = [json.loads(line) for line in options.results.read_text().splitlines()]
    done = {result["unit"] for result in results}
    for name, test in units().items():
        wanted = not options.names or any(word in name for word in options.names)
        if options.table or name in done or not wanted:
            continue
        begin, folder = time.time(), Path(tempfile.mkdtemp(prefix="shardwise-faults-"))
        result = test(folder) | {"unit": name, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.time() - begin)}
        with options.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        results.append(result)
        wrong = [fault for fault in result["faults"] if not fault["named"]]
        losses = "equal" if result["equal"] else "DIFFER"
        summary = f"{len(result['faults'])} faults in {result['seconds']} s, losses {losses}"
        print(f"{name}: {summary}; not named: {json.dumps(wrong, indent=1)}", flush=True)
        if options.keep and (wrong or not result["equal"]):
            shutil.copytree(folder, options.keep / name.replace(" ", "-"), dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    print_tables(results)
    good = all(result["equal"] and all(fault["named"] for fault in result["faults"]) for result in results)
    sys.exit(not good)


if __name__ == "__main__":
    main()
