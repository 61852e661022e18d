"""A run on Ray's own processes: submitted, its second node lost and replaced, and the same to the last bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_nodes import STEPS, curve, job_of

from shardwise.train.run_folder import RunFolder

pytestmark = pytest.mark.cluster

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install ray")
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of Ray on this machine, each with its own raylet."""
    one = ray_cluster.Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        one.add_node(**NODE)
        yield one
    finally:
        one.shutdown()


def wait(what: Callable[[], object], driver: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 200
    while not what():
        assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_run_on_two_nodes_loses_one_and_ends_as_if_it_had_not(cluster: Any, tmp_path: Path) -> None:
    run, plain, log = RunFolder(tmp_path / "runs" / "first"), RunFolder(tmp_path / "plain"), tmp_path / "log"
    (tmp_path / "first.toml").write_text(job_of(Path("runs/first"), saved=5).to_toml())
    (tmp_path / "plain.toml").write_text(job_of(plain.path, saved=5).to_toml())
    submit = [sys.executable, "-m", "shardwise", "submit", "first.toml", "--ray", "--nodes", "2"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    with log.open("wb") as output:
        driver = subprocess.Popen(submit, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    try:
        wait(lambda: len(curve(run)) >= 8, driver, log)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        wait(lambda: "starting all agents again" in log.read_text(), driver, log)
        cluster.add_node(**NODE)
        steps = len(curve(run))
        wait(lambda: len(curve(run)) >= steps + 5, driver, log)
        driver.send_signal(signal.SIGTERM)  # saves and stops
        assert driver.wait(100) == 75, log.read_text()
        assert "stopping: the run is saved" in log.read_text()
        again = subprocess.run(submit, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert again.returncode == 0 and "it has a run, which is continued" in again.stdout, again.stdout + again.stderr
    finally:
        if driver.poll() is None:
            driver.kill()
    subprocess.run([*submit[:3], "train", "plain.toml"], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    assert curve(run) == curve(plain) and len(curve(run)) == STEPS
    assert [event["event"] for event in run.events()].count("resumed") == 2
