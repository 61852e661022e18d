"""Worlds of processes: how they end."""

import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from shardwise.comm.collectives import leave_world
from shardwise.comm.world import run_world


def leave_late(marker: Path) -> bool:
    """Rank 1 leaves after a while; returns whether it had come to leave when this rank was free to go."""
    if dist.get_rank() == 1:
        time.sleep(0.5)
        marker.touch()
    leave_world()
    return marker.exists() and not dist.is_initialized()


def test_no_rank_leaves_before_the_last_one_is_ready_to(tmp_path: Path) -> None:
    assert run_world(leave_late, 3, tmp_path / "ready") == [True, True, True]


def test_a_single_process_has_no_world_to_leave() -> None:
    leave_world()


def test_workers_that_are_forked_after_fake_tensors_compute_gradients(tmp_path: Path) -> None:
    """In a process that has computed nothing before, whose first backward comes after a fake tensor. On a machine
    without a GPU, a CUDA build of PyTorch would start threads for devices that are not there, and workers forked from
    it would refuse to go on."""
    script = """
import torch
from shardwise.comm.world import run_world
from shardwise.models.trace import with_fake_tensors

def gradient() -> float:
    weight = torch.tensor(3.0, requires_grad=True)
    (weight * weight).backward()
    return float(weight.grad)

with with_fake_tensors(torch.nn.Linear(2, 2)):
    torch.empty(3)
gradient()
print(run_world(gradient, 2, timeout=60))
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], text=True, capture_output=True, timeout=120)
    assert done.stdout.split("\n")[:-1] == ["[6.0, 6.0]"], done.stderr


def test_a_process_with_triton_leaves_nothing_frozen() -> None:
    """Triton 3.9 reports on stderr what outlives the interpreter, and frozen objects do."""
    script = """
import atexit, gc, sys, types
atexit.register(lambda: print(gc.get_freeze_count()))  # called last
import shardwise
sys.modules["triton"] = types.ModuleType("triton")
gc.freeze()
"""
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert done.stdout == "0\n", done.stderr
