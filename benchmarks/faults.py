"""The full fault-injection suite: real faults of every kind, each run compared bitwise with an undisturbed one.

    python benchmarks/faults.py                            all: over 200 faults, about ten minutes on two cores
    python benchmarks/faults.py --faults 10 --rounds 1     a short run
    python benchmarks/faults.py disk links                 some of: processes, disk, links

Processes: the random faults of `shardwise chaos` (kill -9, SIGSTOP, NaN, bit flips in checkpoints, weights, optimizer
state and reduced gradients), in five layouts and once without in-memory snapshots. Disk: a small disk fills up and a
rank is killed, repeatedly. Links: two node agents in separate network namespaces; their link is slowed down and cut,
and one node loses all its processes and snapshots. The last two need root (`mount`, `ip`, `tc`).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.chaos.faulty_worker import Fault, inject_faults
from shardwise.chaos.run import FAULTY_WORKER, run_chaos
from shardwise.job import Job, make_job
from shardwise.launch.launch import launch
from shardwise.layout import Layout
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer, remove_snapshots
from shardwise.workers.snapshots import snapshot_key

# Layout and steps between in-memory snapshots; with 0 a restart loads from disk.
LAYOUTS = [
    ("shard=2", 2), ("pipeline=2", 2), ("replicate=2 tensor=2", 2), ("shard=2 zero=3", 2),
    ("pipeline=2 replicate=2", 2), ("shard=2", 0),
]  # fmt: skip
NAME, PORT = f"swfault{os.getpid()}", 29473
HEADER = (
    "layout", "faults", "attributed correctly", "coincided with another", "detection time: median, max",
    "killed or stopped, detected after 1 s", "loss curve", "samples lost, repeated", "checkpoints damaged, rejected",
)  # fmt: skip


def job_of(folder: Path, steps: int, **changes: Any) -> Job:
    run = {"folder": str(folder), "device": "cpu", "max_restarts": 1000, "rejoin_timeout": 120} | changes.pop("run", {})
    model = {"layers": 2, "width": 32, "heads": 2, "vocab": 61, "sequence": 16}
    settings = {
        "precision": "float64", "steps": steps, "model": model, "data": {"source": "synthetic"},
        "batch": {"samples": 8}, "validation": {"samples": 4}, "checkpoint": {"every": 6, "snapshot_every": 2},
    }  # fmt: skip
    return make_job(settings | changes | {"run": run})


def curve(run: RunFolder) -> list[Any]:
    return [(r["step"], r["samples"], r["loss"], r["grad_norm"]) for r in run.metrics()]


def processes(folder: Path, count: int) -> bool:
    """Runs random process faults in every layout; returns whether all runs recovered exactly."""
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    ok = True
    for seed, (layout, snapshot) in enumerate(LAYOUTS, 1):
        path, checkpoint = folder / f"{seed}.toml", {"every": 6, "snapshot_every": snapshot}
        path.write_text(job_of(folder / f"run-{seed}", 2 * count, layout=layout, checkpoint=checkpoint).to_toml())
        report = run_chaos(path, [], count, seed, lambda _: None)
        attributed = [outcome for outcome in report.outcomes if outcome.is_attributed]
        seconds = sorted(outcome.seconds for outcome in attributed) or [0.0]
        dead = [outcome.seconds for outcome in attributed if outcome.fault.kind in ("kill", "stop", "flip")]
        cells = (
            f"`{layout}`{'' if snapshot else ', no snapshots'}",
            len(report.outcomes),
            len(attributed),
            sum(outcome.detected_as == "together" for outcome in report.outcomes),
            f"{seconds[len(seconds) // 2]:.2f} s, {seconds[-1]:.2f} s",
            f"{len(dead)}, {sum(delay > 1 for delay in dead)}",
            "bitwise equal" if report.matches_baseline and report.finished else "DIFFERS",
            f"{report.lost_samples}, {report.repeated_samples}",
            f"{report.corrupted_checkpoints}, {report.rejected_checkpoints}",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        ok &= report.ok
    return ok


def disk(folder: Path, rounds: int) -> bool:
    """Fills the disk at one step, kills a rank at the next, and frees the disk some steps later; repeatedly."""
    steps, fork_server = 8 * rounds + 8, ForkServer(FAULTY_WORKER)
    checkpoint = {"every": 4, "snapshot_every": 0, "asynchronous": False}
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], check=True)
    try:
        runs = []
        for name, faults in ((folder / "large", []), (small, _disk_faults(rounds))):
            run = RunFolder.create(job_of(name, steps, layout="shard=2", checkpoint=checkpoint))
            inject_faults(run.path, faults)
            launch(run, Layout.parse("shard=2"), resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
            runs.append(run)
        events = [event["event"] for event in runs[1].events()]
        equal = curve(runs[0]) == curve(runs[1]) and len(curve(runs[1])) == steps
        print(
            f"disk full: {rounds} times, and {events.count('killed')} kills; failed checkpoints: "
            f"{events.count('checkpoint_failed')}; loss curve: {'bitwise equal' if equal else 'DIFFERS'}",
            flush=True,
        )
        return equal and events.count("checkpoint_failed") >= rounds
    finally:
        fork_server.close()
        subprocess.run(["umount", small], check=True)


def _disk_faults(rounds: int) -> list[Fault]:
    faults = []
    for n in range(rounds):
        first = 8 * n + 7
        faults += [Fault("fill", 0, first, number=3 * n), Fault("kill", n % 2, first + 1, "optimizer", 3 * n + 1),
                   Fault("free", 0, first + 4, number=3 * n + 2)]  # fmt: skip
    return faults


def run_command(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def start_agent(number: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts the node agent with this number in its network namespace."""
    command = ["ip", "netns", "exec", f"{NAME}{number}", sys.executable, "-m", "shardwise", "train", *arguments]
    node = ["--node", f"{number}/2", "--address", f"10.79.0.1:{PORT}"]
    return subprocess.Popen([*command, *node], start_new_session=True, stdout=subprocess.DEVNULL)


def wait_until(condition: Callable[[], object], coordinator: subprocess.Popen[bytes]) -> None:
    while not condition():
        if coordinator.poll() is not None:
            sys.exit("the agent of node 0 ended")
        time.sleep(0.02)


def links(folder: Path, rounds: int) -> bool:
    """Slows down and cuts the link between two nodes and kills a node, repeatedly; compares with an undisturbed run."""
    steps, layout = 14 * rounds + 20, "replicate=2 tensor=2"
    run, baseline = RunFolder(folder / "two-nodes"), RunFolder(folder / "baseline")
    for run_folder in (run, baseline):
        (folder / f"{run_folder.path.name}.toml").write_text(job_of(run_folder.path, steps, layout=layout).to_toml())
    command = [sys.executable, "-m", "shardwise", "train", folder / "baseline.toml"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    try:
        for number in range(2):
            run_command(f"ip netns add {NAME}{number}")
        run_command(f"ip -n {NAME}0 link add wire type veth peer name wire netns {NAME}1")
        for number in range(2):
            run_command(f"ip -n {NAME}{number} addr add 10.79.0.{number + 1}/24 dev wire")
            run_command(f"ip -n {NAME}{number} link set dev wire up")
            run_command(f"ip -n {NAME}{number} link set dev lo up")
        delays = _inject_node_faults(run, folder / "two-nodes.toml", rounds)
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"{NAME}{number}"], capture_output=True)
    equal = curve(run) == curve(baseline) and len(curve(run)) == steps
    delays.sort()
    sources = [event["source"] for event in run.events() if event["event"] == "resumed"]
    times = f"{delays[len(delays) // 2]:.2f} s (median), {delays[-1]:.2f} s (max)"
    print(
        f"links: {rounds} times each slowed to 10 Mbit/s, cut, node lost: {len(delays)} of {2 * rounds} losses "
        f"reported with the right ranks, after {times}; resumed from memory {sources.count('memory')} of "
        f"{len(sources)} times; loss curve: {'bitwise equal' if equal else 'DIFFERS'}",
        flush=True,
    )
    return equal and len(delays) == 2 * rounds


def _inject_node_faults(run: RunFolder, job: Path, rounds: int) -> list[float]:
    """Returns the seconds until each node loss was reported with the right ranks."""
    member, coordinator = start_agent(1), start_agent(0, str(job))
    delays = []

    def lost() -> list[dict[str, Any]]:
        return [event for event in run.events() if event["event"] == "node_lost"]

    def wait_steps(steps: int) -> None:
        target = len(curve(run)) + steps
        wait_until(lambda: len(curve(run)) >= target, coordinator)

    try:
        wait_until(lambda: len(curve(run)) >= 3, coordinator)
        for _ in range(rounds):
            for number in range(2):
                run_command(f"tc -n {NAME}{number} qdisc add dev wire root tbf rate 10mbit burst 16kb limit 1mb")
            wait_steps(3)
            for fault in ("cut", "kill"):
                before, begin = len(lost()), time.time()
                if fault == "cut":
                    run_command(f"ip -n {NAME}1 link set dev wire down")
                else:
                    os.killpg(member.pid, signal.SIGKILL)
                    member.wait()
                    remove_snapshots(snapshot_key(run.path, 1))
                wait_until(lambda before=before: len(lost()) > before, coordinator)
                if lost()[-1]["ranks"] == [2, 3]:
                    delays.append(lost()[-1]["time"] - begin)
                if fault == "cut":
                    run_command(f"ip -n {NAME}1 link set dev wire up")
                    for number in range(2):
                        run_command(f"tc -n {NAME}{number} qdisc del dev wire root")
                else:
                    member = start_agent(1)
                wait_steps(3)
        coordinator.wait()
        member.wait(30)
    finally:
        for process in (member, coordinator):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["processes", "disk", "links"])
    parser.add_argument("--faults", type=int, default=40, help="faults per layout")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of disk faults and of link faults")
    options = parser.parse_args()
    suites = {
        "processes": (processes, options.faults),
        "disk": (disk, options.rounds),
        "links": (links, options.rounds),
    }
    ok = True
    for part in options.parts:
        suite, count = suites[part]
        with tempfile.TemporaryDirectory(prefix="shardwise-faults-") as folder:
            ok &= suite(Path(folder), count)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
