"""The rooms of ARCHITECTURE.md: each imports only rooms below it, and every file is in one of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rooms() -> dict[str, int]:
    """Room and floor, counted from the ground."""
    table = re.findall(r"^\| (`shardwise/.*?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {room.rstrip("/"): floor for floor, cell in enumerate(table) for room in re.findall(r"`(.*?)`", cell)}


def floor_of(path: str, house: dict[str, int]) -> int | None:
    return next((floor for room, floor in house.items() if path == room or path.startswith(room + "/")), None)


def imported(path: Path) -> set[str]:
    """Files and folders of ours that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    places = {name.replace(".", "/") for name in names if name.startswith("shardwise.")}
    return {place + ".py" if (ROOT / f"{place}.py").exists() else place for place in places if (ROOT / place).exists()
            or (ROOT / f"{place}.py").exists()}  # fmt: skip


def test_no_room_imports_one_above_it() -> None:
    house = rooms()
    assert len(house) > 15
    for path in sorted((ROOT / "shardwise").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if path.parent == ROOT / "shardwise" and path.name.startswith("__"):
            continue
        own = floor_of(name, house)
        assert own is not None, f"{name} is in no room of ARCHITECTURE.md"
        for other in imported(path):
            floor = floor_of(other, house)
            assert floor is None or floor <= own, f"{name} imports {other}, which lies above it"


UNPATCHED = """
import importlib, logging, pkgutil, sys, types
import torch, torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fully_shard_package, torch.distributed.pipelining as pipelining_package
import torch.distributed.tensor, torch.nn.parallel, torch._functorch.config

def modules(*packages):
    for package in packages:
        yield package
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield importlib.import_module(info.name)

watched = [torch, torch.nn.functional, dist, dist.distributed_c10d, torch.nn.parallel.distributed,
           torch._functorch.config, *modules(fully_shard_package, pipelining_package)]

def snapshot():
    found = {f"level of {name}": logging.getLogger(name).level for name in
              [name for name in logging.root.manager.loggerDict if name.startswith("torch")]}
    for module in watched:
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = id(value)
            if isinstance(value, type) and value.__module__.startswith("torch"):
                found |= {f"{module.__name__}.{name}.{key}": id(each) for key, each in vars(value).items()
                          if isinstance(each, (types.FunctionType, classmethod, staticmethod, property))}
    return found

before = snapshot()
import shardwise
for info in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
    if info.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(info.name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # which PyTorch brings for GPUs only
            raise
after = snapshot()
changed = [name for name, value in before.items() if after.get(name) != value]
assert not changed, changed
from shardwise.comm.step_timer import StepTimer
timers = [f"{name}.{key}" for name, module in list(sys.modules.items()) if name.startswith("shardwise")
          for key, value in vars(module).items() if isinstance(value, StepTimer)]
assert not timers, timers
"""


def test_importing_shardwise_patches_nothing_in_torch_and_makes_no_timer() -> None:
    done = subprocess.run([sys.executable, "-c", UNPATCHED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
