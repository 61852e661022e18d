"""The whole chaos suite: real faults of every kind, each run held against an undisturbed one bit by bit.

    python benchmarks/faults.py                            all: over 200 faults, some ten minutes on two cores
    python benchmarks/faults.py --faults 10 --rounds 1     in short
    python benchmarks/faults.py disk links                 some of: processes, disk, links

Processes: what `shardwise chaos` draws (kill -9, SIGSTOP, NaN, flipped bits of checkpoints, weights, states and summed
gradients), in five layouts and once without snapshots in memory. Disk: a small one fills up and a rank is killed, again
and again. Links: two agents, each in a network of its own; their link is slowed, cut, and one machine's processes are
all killed and its memory emptied. The last two need root (`mount`, `ip`, `tc`).
"""

from __future__ import annotations

import argparse
import os
import shutil
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
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.snapshots import snapshot_folder

# And steps between snapshots in memory; without them a restart loads from the disk.
LAYOUTS = [
    ("shard=2", 2), ("pipeline=2", 2), ("replicate=2 tensor=2", 2), ("shard=2 zero=3", 2),
    ("pipeline=2 replicate=2", 2), ("shard=2", 0),
]  # fmt: skip
NAME, PORT = f"swfault{os.getpid()}", 29473
HEAD = (
    "layout", "faults", "attributed", "masked", "time to detect: median, max", "killed or stopped, later than 1 s",
    "losses", "samples lost, repeated", "checkpoints corrupted, rejected on load",
)  # fmt: skip


def job_of(folder: Path, steps: int, **changes: Any) -> Job:
    run = {"folder": str(folder), "device": "cpu", "max_restarts": 1000, "rejoin_timeout": 120} | changes.pop("run", {})
    model = {"layers": 2, "width": 32, "heads": 2, "vocab": 61, "sequence": 16}
    given = {
        "precision": "float64", "steps": steps, "model": model, "data": {"source": "synthetic"},
        "batch": {"samples": 8}, "validation": {"samples": 4}, "checkpoint": {"every": 6, "snapshot_every": 2},
    }  # fmt: skip
    return make_job(given | changes | {"run": run})


def curve(run: RunFolder) -> list[Any]:
    return [(r["step"], r["samples"], r["loss"], r["grad_norm"]) for r in run.metrics()]


def processes(folder: Path, count: int) -> bool:
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    fine = True
    for seed, (layout, snapshot) in enumerate(LAYOUTS, 1):
        path, checkpoint = folder / f"{seed}.toml", {"every": 6, "snapshot_every": snapshot}
        path.write_text(job_of(folder / f"run-{seed}", 2 * count, layout=layout, checkpoint=checkpoint).to_toml())
        report = run_chaos(path, [], count, seed, lambda _: None)
        named = [outcome for outcome in report.outcomes if outcome.is_attributed]
        seconds = sorted(outcome.seconds for outcome in named) or [0.0]
        dead = [outcome.seconds for outcome in named if outcome.fault.kind in ("kill", "stop", "flip")]
        cells = (
            f"`{layout}`{'' if snapshot else ', no snapshots'}",
            len(report.outcomes),
            len(named),
            sum(outcome.detected_as == "masked" for outcome in report.outcomes),
            f"{seconds[len(seconds) // 2]:.2f} s, {seconds[-1]:.2f} s",
            f"{len(dead)}, {sum(one > 1 for one in dead)}",
            "same bits" if report.matches_baseline and report.finished else "DIFFERS",
            f"{report.lost_samples}, {report.repeated_samples}",
            f"{report.corrupted_checkpoints}, {report.rejected_checkpoints}",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        fine &= report.ok
    return fine


def disk(folder: Path, rounds: int) -> bool:
    """Full at one step, a kill at the next one, room again some steps later."""
    steps, fork_server = 8 * rounds + 8, ForkServer(FAULTY_WORKER)
    given: dict[str, Any] = {
        "checkpoint": {"every": 4, "snapshot_every": 0, "asynchronous": False},
        "layout": "shard=2",
    }
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], check=True)
    try:
        runs = []
        for name, faults in ((folder / "large", []), (small, _full(rounds))):
            run = RunFolder.create(job_of(name, steps, **given))
            inject_faults(run.path, faults)
            launch(run, Layout.parse("shard=2"), resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
            runs.append(run)
        told = [event["event"] for event in runs[1].events()]
        same = curve(runs[0]) == curve(runs[1]) and len(curve(runs[1])) == steps
        print(
            f"disk full: {rounds} times, and {told.count('killed')} kills; checkpoints that found no room: "
            f"{told.count('checkpoint_failed')}; curve: {'same bits' if same else 'DIFFERS'}",
            flush=True,
        )
        return same and told.count("checkpoint_failed") >= rounds
    finally:
        fork_server.close()
        subprocess.run(["umount", small], check=True)


def _full(rounds: int) -> list[Fault]:
    faults = []
    for n in range(rounds):
        first = 8 * n + 7
        faults += [Fault("fill", 0, first, number=3 * n), Fault("kill", n % 2, first + 1, "optimizer", 3 * n + 1),
                   Fault("free", 0, first + 4, number=3 * n + 2)]  # fmt: skip
    return faults


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def agent(number: int, *words: str) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", f"{NAME}{number}", sys.executable, "-m", "shardwise", "train", *words]
    place = ["--node", f"{number}/2", "--rdzv-endpoint", f"10.79.0.1:{PORT}"]
    return subprocess.Popen([*command, *place], start_new_session=True, stdout=subprocess.DEVNULL)


def wait(what: Callable[[], object], lead: subprocess.Popen[bytes]) -> None:
    while not what():
        if lead.poll() is not None:
            sys.exit("the first agent ended")
        time.sleep(0.02)


def links(folder: Path, rounds: int) -> bool:
    steps, layout = 14 * rounds + 20, "replicate=2 tensor=2"
    run, plain = RunFolder(folder / "two"), RunFolder(folder / "plain")
    for one in (run, plain):
        (folder / f"{one.path.name}.toml").write_text(job_of(one.path, steps, layout=layout).to_toml())
    subprocess.run(
        [sys.executable, "-m", "shardwise", "train", folder / "plain.toml"], check=True, stdout=subprocess.DEVNULL
    )
    try:
        for number in range(2):
            sh(f"ip netns add {NAME}{number}")
        sh(f"ip -n {NAME}0 link add wire type veth peer name wire netns {NAME}1")
        for number in range(2):
            sh(f"ip -n {NAME}{number} addr add 10.79.0.{number + 1}/24 dev wire")
            sh(f"ip -n {NAME}{number} link set dev wire up")
            sh(f"ip -n {NAME}{number} link set dev lo up")
        named = _harm(run, folder / "two.toml", rounds)
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"{NAME}{number}"], capture_output=True)
    same = curve(run) == curve(plain) and len(curve(run)) == steps
    named.sort()
    sources = [event["source"] for event in run.events() if event["event"] == "resumed"]
    print(
        f"links: {rounds} times each slowed to 10 Mbit/s, cut, a machine lost: {len(named)} of {2 * rounds} losses"
        f" named with ranks, after {named[len(named) // 2]:.2f} s in the median, {named[-1]:.2f} s at most; memory "
        f"{sources.count('memory')} of {len(sources)} times; curve: {'same bits' if same else 'DIFFERS'}",
        flush=True,
    )
    return same and len(named) == 2 * rounds


def _harm(run: RunFolder, job: Path, rounds: int) -> list[float]:
    """Seconds until each loss was named."""
    member, lead = agent(1), agent(0, str(job))
    seconds = []

    def lost() -> list[dict[str, Any]]:
        return [event for event in run.events() if event["event"] == "node_lost"]

    def on(steps: int) -> None:
        reached = len(curve(run)) + steps
        wait(lambda: len(curve(run)) >= reached, lead)

    try:
        wait(lambda: len(curve(run)) >= 3, lead)
        for _ in range(rounds):
            for number in range(2):
                sh(f"tc -n {NAME}{number} qdisc add dev wire root tbf rate 10mbit burst 16kb limit 1mb")
            on(3)
            for way in ("cut", "kill"):
                before, begin = len(lost()), time.time()
                if way == "cut":
                    sh(f"ip -n {NAME}1 link set dev wire down")
                else:
                    os.killpg(member.pid, signal.SIGKILL)
                    member.wait()
                    shutil.rmtree(snapshot_folder(run.path, 1), ignore_errors=True)
                wait(lambda before=before: len(lost()) > before, lead)
                if lost()[-1]["ranks"] == [2, 3]:
                    seconds.append(lost()[-1]["time"] - begin)
                if way == "cut":
                    sh(f"ip -n {NAME}1 link set dev wire up")
                    for number in range(2):
                        sh(f"tc -n {NAME}{number} qdisc del dev wire root")
                else:
                    member = agent(1)
                on(3)
        lead.wait()
        member.wait(30)
    finally:
        for process in (member, lead):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["processes", "disk", "links"])
    parser.add_argument("--faults", type=int, default=40, help="in each layout")
    parser.add_argument("--rounds", type=int, default=5, help="of a full disk, and of harmed links")
    options = parser.parse_args()
    ways = {"processes": (processes, options.faults), "disk": (disk, options.rounds), "links": (links, options.rounds)}
    fine = True
    for part in options.parts:
        way, count = ways[part]
        with tempfile.TemporaryDirectory(prefix="shardwise-faults-") as folder:
            fine &= way(Path(folder), count)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
