"""Checks before a run: a world with one slow link is measured, and the slow link is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from test_nodes import NAME, link, sh

from shardwise.launch.where import find_problems

__all__ = ["link"]
PORT = 29473


def test_the_rank_behind_a_slow_link_is_named(link: None, tmp_path: Path) -> None:  # noqa: F811
    """Ranks 0 to 3 on one machine, rank 4 on another, behind 100 Mbit/s."""
    for number in range(2):
        sh(f"tc -n {NAME}{number} qdisc add dev wire root tbf rate 100mbit burst 64kb limit 10mb")
    world = {"WORLD_SIZE": "5", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "wire"}
    command = [sys.executable, "-m", "shardwise", "doctor", "--preflight", "--json", str(tmp_path)]
    ranks = []
    try:
        for rank in range(5):
            where = ["ip", "netns", "exec", f"{NAME}{rank // 4}"]
            variables = {**os.environ, **world, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen([*where, *command], env=variables, stdout=subprocess.PIPE, text=True))
        told = json.loads(ranks[0].communicate(timeout=250)[0])
        assert [one.wait(60) for one in ranks] == [1, 0, 0, 0, 0]
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
        for number in range(2):
            sh(f"tc -n {NAME}{number} qdisc del dev wire root")
    assert len([text for text in told["problems"] if text.startswith("the link between") and "and rank 4" in text]) == 4
    assert [sorted(one["links"]) for one in told["ranks"]] == [[str(p) for p in range(r + 1, 5)] for r in range(5)]


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
