"""`shardwise.Trainer`, the proof before the first step and `shardwise inspect`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.adapters.task import Task
from shardwise.errors import JobError, LayoutError, UserError
from shardwise.job import make_job
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_user_optimizer
from shardwise.parallel.prepare import prepare
from shardwise.verify.command import inspect_job, prove, small_layout
from shardwise.verify.parity import verify

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_model"
SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
import shardwise
from net import Classifier, MostFrequent

class Print(shardwise.Callback):
    def on_step(self, step, metrics):
        print("told", step, flush=True)

trainer = shardwise.Trainer(
    partial(Classifier, layers=2), nn.CrossEntropyLoss(), MostFrequent(), layout=sys.argv[1], folder=sys.argv[2],
    steps=int(sys.argv[3]), batch=8, optimizer=partial(torch.optim.RMSprop, alpha=0.9),
    lr=lambda step: 1e-3 / (1 + step), callbacks=[Print()],
)
if __name__ == "__main__":
    trainer.fit(sys.argv[2] if "resume" in sys.argv else None, proof="script" in sys.argv)
    print("weights", sum(p.numel() for p in trainer.module().parameters()))
"""


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{EXAMPLE}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder),
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, text=True, capture_output=True, timeout=240
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.cluster
def test_every_way_to_start_gives_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "task.py").write_text(
        "from functools import partial\nimport shardwise, torch\nfrom net import Classifier, MostFrequent\n"
        "def build():\n    model = partial(Classifier, layers=2)\n"
        "    return shardwise.Task(model, torch.nn.CrossEntropyLoss(), MostFrequent(), "
        "optimizer=partial(torch.optim.RMSprop, alpha=0.9), learning_rate=lambda step: 1e-3 / (1 + step))\n"
    )
    (tmp_path / "job.toml").write_text(
        'steps = 4\nlayout = "shard=2 zero=3"\n[model]\nname = "python:task:build"\n[batch]\nsamples = 8\n'
    )
    script = run("train.py", "shard=2 zero=3", "script", "4", folder=tmp_path)
    assert script.returncode == 0, script.stderr
    assert script.stdout.count("told") == 4 and "proof:" in script.stdout and "weights 102" in script.stdout
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "shard=2 zero=3", "cut", "2"]
    for words in (torchrun, ["-m", "shardwise", "train", "job.toml", "--set", "run.folder=job", "--no-proof"]):
        done = run(*words, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    expected = losses(tmp_path / "script")
    assert losses(tmp_path / "job") == expected and losses(tmp_path / "cut") == expected[:2] and len(expected) == 4
    done = run("train.py", "pipeline=2", "cut", "4", "resume", folder=tmp_path)  # and resumed elsewhere
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "cut") == pytest.approx(expected, rel=1e-4)


# The proof


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.mix(torch.tanh(self.up(x)))))


VALIDATING = """
import sys
import torch
from torch import nn
import shardwise

class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.ones(2), torch.tensor(float(index))

def loss(output, number):
    return number.mean() + 0.0 * output.sum()

validation = {"samples": int(sys.argv[2])} if len(sys.argv) > 2 else {"every": 1}
trainer = shardwise.Trainer(
    nn.Linear(2, 1), loss, Numbers(64), validation=Numbers(510), layout="replicate=1", batch=32, steps=1,
    folder=sys.argv[1], settings={"validation": validation, "run": {"device": "cpu"}},
)
if __name__ == "__main__":
    run = trainer.fit(proof=False)
    print("validated", run.metrics[-1]["validation"]["loss"], "evaluated", trainer.evaluate(Numbers(45))["loss"])
"""


def test_a_validation_dataset_is_taken_whole_unless_a_number_is_given(tmp_path: Path) -> None:
    """The loss of a sample is its number, so the mean tells which were taken: all 510, or the first 80."""
    (tmp_path / "train.py").write_text(VALIDATING)
    whole = run("train.py", "whole", folder=tmp_path)
    assert "validated 254.5 evaluated 22.0" in whole.stdout, whole.stderr
    assert "validation.samples" not in whole.stdout and "samples = 510" in (tmp_path / "whole/job.toml").read_text()
    part = run("train.py", "part", "80", folder=tmp_path)
    assert "validated 39.5 evaluated 22.0" in part.stdout, part.stderr
    assert "takes 80 samples (validation.samples) of the 510 of the validation dataset" in part.stdout


def build(plan: dict[str, str]) -> Task:
    data = [(torch.randn(8, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 3)) for n in range(32)]
    blocks = [Block() for _ in range(2)]
    return Task(lambda: nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 3)), nn.CrossEntropyLoss(), data, plan=plan)


def job_of(plan: dict[str, str], **values: Any) -> Any:
    model = {"name": "python:test_trainer:build", "args": {"plan": plan}}
    return make_job({"model": model, "batch": {"samples": 8}, "steps": 2, **values})


WRONG = {"0.*.up": "colwise", "0.*.down": "rowwise"}  # `mix` is whole, but gets a part of its input


def test_a_layout_that_computes_something_else_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    right = {"0.*.mix": "colwise", "0.*.down": "rowwise"}
    prove(prepare(job_of(right), Layout.parse("tensor=2")), said.append)
    assert "equals one process: gradients to" in said[0]
    with pytest.raises(UserError, match=r"shapes do not fit in 0.0.mix"):
        prove(prepare(job_of(WRONG), Layout.parse("tensor=2")), said.append)
    wrong_sum = {"0.*.mix": "colwise_gather", "0.*.down": "rowwise"}  # the input of `down` is whole
    with pytest.raises(UserError, match=r"The run was not started.*--no-proof|shapes do not fit in"):
        prove(prepare(job_of(wrong_sum), Layout.parse("tensor=2")), said.append)


def test_a_proof_has_two_ranks_on_every_axis() -> None:
    layout = Layout.parse("pipeline=4 shard=8 tensor=4 schedule=zero-bubble zero=3 micro_batch=4")
    assert str(small_layout(layout)) == "pipeline=2 shard=2 tensor=2 schedule=zero-bubble micro_batch=2 zero=3"


# Own optimizers


class NormSGD(torch.optim.SGD):
    """Divides by the norm of the gradient: not elementwise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.div_(weight.grad.norm() + 1e-6)
        return super().step(closure)


def build_with(optimizer: str) -> Task:
    task = build({})
    kinds = {"rms": partial(torch.optim.RMSprop, alpha=0.9), "norm": NormSGD}
    return Task(task.model, task.loss, task.data, optimizer=kinds[optimizer])


@pytest.mark.parametrize(("optimizer", "layout"), [("rms", "shard=2 zero=3"), ("norm", "pipeline=2 micro_batch=2")])
def test_an_optimizer_of_ones_own(optimizer: str, layout: str) -> None:
    model = {"name": "python:test_trainer:build_with", "args": {"optimizer": optimizer}}
    job = make_job({"model": model, "batch": {"samples": 8}, "precision": "float64", "optimizer": {"clip": 0.1}})
    (result,) = verify(job, [Layout.parse(layout)], steps=3)
    assert result.ok, result.describe()


def test_an_optimizer_that_needs_whole_parameters_is_refused_where_they_are_split() -> None:
    class Shard:
        name, tensor, shape, compute_copy = "weight", torch.zeros(2, 4), torch.Size((4, 4)), None

    with pytest.raises(
        LayoutError, match=r"NormSGD may use more of a parameter .* layout splits weight; use replicate"
    ):
        make_user_optimizer(NormSGD, [Shard()], 1e-3)  # type: ignore[list-item]


# Inspect


def test_what_is_found_in_a_module() -> None:
    found = inspect_job(job_of({}))
    assert found["trunk"] == "0 (2 blocks)" and found["epilogue"] == "1.weight, 1.bias"
    assert found["axes"]["pipeline"] == "works" and found["axes"]["tensor"].startswith("no: the model has no tensor-p")
    assert inspect_job(make_job({}))["axes"]["tensor"] == "works"


@pytest.mark.parametrize(("name", "sentence"), [
    ("python:nowhere", r'must name a function: "python:package.module:function"'),
    ("python:nowhere:build", r"cannot be loaded: No module named 'nowhere'"),
    ("python:math:pi", r"must return an nn.Module or a shardwise.Task|not callable|do not fit"),
])  # fmt: skip
def test_what_cannot_be_loaded(name: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        prepare(make_job({"model": {"name": name}}), Layout())
