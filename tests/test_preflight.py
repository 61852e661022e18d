"""Checks before a run: a world with one slow link is measured, and the slow link is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_nodes import NAME, link, sh

from shardwise.cluster import read_cluster
from shardwise.job import make_job
from shardwise.launch.where import find_problems
from shardwise.planner.plan import make_plan

pytestmark = pytest.mark.cluster

__all__ = ["link"]
PORT = 29473


def run_ranks(count: int, per_node: int, mbit: int, world: dict[str, str], *words: str) -> tuple[str, list[int]]:
    """Runs a command as ranks on two machines with a slow link between them; returns what the first one printed, and
    all exit codes."""
    for number in range(2):
        sh(f"tc -n {NAME}{number} qdisc add dev wire root tbf rate {mbit}mbit burst 64kb limit 10mb")
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "wire", **world}
    ranks = []
    try:
        for rank in range(count):
            where = ["ip", "netns", "exec", f"{NAME}{rank // per_node}", sys.executable, "-m", "shardwise", *words]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "OMP_NUM_THREADS": "1"}
            own = own if "LOCAL_WORLD_SIZE" in world else {k: v for k, v in own.items() if k != "LOCAL_RANK"}
            ranks.append(subprocess.Popen(where, env={**os.environ, **world, **own}, stdout=subprocess.PIPE, text=True))
        told = ranks[0].communicate(timeout=250)[0]
        return told, [one.wait(60) for one in ranks]
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
        for number in range(2):
            sh(f"tc -n {NAME}{number} qdisc del dev wire root")


def test_the_rank_behind_a_slow_link_is_named(link: None, tmp_path: Path) -> None:  # noqa: F811
    """Ranks 0 to 3 on one machine, rank 4 on another, behind 100 Mbit/s."""
    world = {"MASTER_PORT": str(PORT)}
    said, codes = run_ranks(5, 4, 100, world, "doctor", "--preflight", "--json", str(tmp_path))
    told = json.loads(said)
    assert codes == [1, 0, 0, 0, 0]
    assert len([text for text in told["problems"] if text.startswith("the link between") and "and rank 4" in text]) == 4
    assert [sorted(one["links"]) for one in told["ranks"]] == [[str(p) for p in range(r + 1, 5)] for r in range(5)]


def test_links_within_nodes_and_between_them_are_measured(link: None, tmp_path: Path) -> None:  # noqa: F811
    """Two machines of two ranks, 200 Mbit/s apart: each rank has half of that, 12.5 MB/s."""
    world = {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(PORT + 1)}
    told, codes = run_ranks(4, 2, 200, world, "calibrate", "--out", str(tmp_path / "both.toml"))
    assert codes == [0, 0, 0, 0]
    cluster = read_cluster(tmp_path / "both.toml")
    assert "between nodes" in told and cluster.domain_size == 2
    assert 4e6 < cluster.outer.bandwidth < 26e6 and cluster.inner.bandwidth > 3 * cluster.outer.bandwidth
    job = make_job({"model": {"layers": 2, "width": 64, "heads": 4}, "batch": {"samples": 8}})
    assert make_plan(job, cluster, 4).best.seconds > 0


def test_what_is_slow_or_wrong_is_a_sentence() -> None:
    good = {"host": "a", "matmul": 100.0, "memory": 80.0, "disk": 900.0, "clock": 1e9}
    found = [{**good, "host": name, "links": {str(other): 10.0 for other in range(index + 1, 4)}}
             for index, name in enumerate("abcd")]  # fmt: skip
    assert find_problems(found) == []
    found[2] |= {"matmul": 60.0, "clock": 1e9 - 5, "links": {"3": 2.0}}
    assert find_problems(found) == [
        "rank 2 on c has 60 TFLOP/s, median: 100.",
        "the link between rank 2 on c and rank 3 on d has 2 GB/s, the median is 10.",
        "the clock of rank 2 on c is -5.0 s off that of rank 0.",
    ]
