"""The rules of `tools/house.py`: the package keeps them, and each rule finds what it is for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def load_tool() -> Any:
    """`tools/house.py` as a module."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


house = load_tool()


@pytest.fixture(scope="module")
def package() -> Any:
    return house.House()


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(package: Any, rule: Any) -> None:
    violations = rule(package)
    assert len(violations) <= house.RULES[rule][1], "\n".join(violations)


def test_the_floors_are_read(package: Any) -> None:
    assert len(package.floors) > 15


KINDS = """
class ModelConfig: ...
class A(ModelConfig): ...
class B(A): ...
isinstance(0, A)
"""
ASKS = """
def f(model, job, x):
    isinstance(model, (int, B))
    type(model) is A
    issubclass(x, B)
    model.name == 'gpt'
    job.model.name in ('t5', 'bert')
    x.name == 'gpt'
    isinstance(x, int)
    isinstance(x, ModelConfig)
    match model:
        case B(): ...
"""
EFFECTS = """
import warnings, logging, os
from torch import nn
TABLE = {}
TABLE.update(a=1)
TABLE['b'] = 2
warnings.filterwarnings('ignore')
logging.getLogger('x').setLevel(3)
os.environ['A'] = '1'
nn.Linear.f = None
for name in ('f', 'g'):
    setattr(nn.Linear, name, None)
def later():
    nn.Linear.f = None
if __name__ == '__main__':
    later()
"""
PLANTED = {  # files, and how many violations the rule finds in them
    "kind_checks": ({"pkg/models/config.py": KINDS, "pkg/ask.py": ASKS}, 6),
    "duplicate_classes": ({"pkg/a.py": "class Same: ...", "pkg/b.py": "class Same: ...\nclass Other: ..."}, 2),
    "duplicate_basenames": ({f"pkg/{room}/{name}.py": "" for room in "xy" for name in ("plan", "command")}, 1),
    "import_effects": ({"pkg/a.py": EFFECTS}, 5),
    "import_circles": (
        {"pkg/a.py": "from pkg import b", "pkg/b.py": "from pkg.c import f", "pkg/c.py": "import pkg.a\ndef f(): ...",
         "pkg/d.py": "def f():\n    from pkg import e", "pkg/e.py": "from pkg import d"}, 1),
    "upward_imports": (
        {"pkg/low.py": "def f():\n    from pkg.high import g", "pkg/high/__init__.py": "from pkg import low",
         "pkg/lost.py": "", "ARCHITECTURE.md": "| `pkg/low.py` | low |\n| `pkg/high/` | high |\n"}, 2),
}  # fmt: skip


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_rule_finds_what_is_planted(rule: Any, tmp_path: Path) -> None:
    files, count = PLANTED[rule.__name__]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    violations = rule(house.House(tmp_path, "pkg"))
    assert len(violations) == count, "\n".join(violations)


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
from shardwise.comm.collectives import StepTimer
timers = [f"{name}.{key}" for name, module in list(sys.modules.items()) if name.startswith("shardwise")
          for key, value in vars(module).items() if isinstance(value, StepTimer)]
assert not timers, timers
"""


def test_importing_shardwise_patches_nothing_in_torch_and_makes_no_timer() -> None:
    done = subprocess.run([sys.executable, "-c", UNPATCHED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
