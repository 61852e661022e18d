"""`Trainer`: trains, verifies and plans a module from a Python script.

    trainer = shardwise.Trainer(model=MyNet, loss=nn.CrossEntropyLoss(), data=dataset, layout="shard=2", steps=1000)
    trainer.fit()

Start it with `python train.py`, which starts the layout's processes itself, or with `torchrun train.py`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.adapters.module_family import register_task, stop_if_collecting
from shardwise.adapters.task import Callback, DatasetSource, Task
from shardwise.cluster import find_cluster
from shardwise.console import print_line
from shardwise.errors import JobError, ShardwiseError
from shardwise.job import Job, make_job
from shardwise.launch.start import start_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.planner.plan import Plan, make_plan
from shardwise.train.checkpoint_folder import CheckpointGroup
from shardwise.train.export import open_checkpoint
from shardwise.train.loop import make_engine
from shardwise.train.run_folder import RunFolder
from shardwise.train.validate import validate
from shardwise.train.warm_start import load_into
from shardwise.verify.command import prove
from shardwise.verify.parity import VerifyResult, verify


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step: step, loss, grad_norm, lr, ..."""
        return list(RunFolder(self.folder).metrics())

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return float(self.metrics[-1]["loss"])


class Trainer:
    """A module, its loss and its data, and how to train them."""

    def __init__(self, model: Callable[[], nn.Module] | nn.Module, loss: Callable[..., Tensor] | None = None,
                 data: Any = None, *, validation: Any = None, collate: Callable[[list[Any]], Any] | None = None,
                 count: Callable[[Any], Any] | None = None, inputs: Callable[[Any], Any] | None = None,
                 layout: str = "auto", steps: int | None = None, batch: int = 32, precision: str = "float32",
                 seed: int = 0, optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
                 lr: float | Callable[[int], float] = 3e-4, callbacks: Sequence[Callback] = (),
                 metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None, trunk: str = "",
                 plan: Mapping[str, str] | None = None, folder: str = "",
                 settings: Mapping[str, Any] | None = None):  # fmt: skip
        """`model`: a class or function that builds the module, or a module, whose weights are kept. `loss`, `data`,
        `collate`, `count` and `inputs`: see `shardwise.Task`. `batch`: samples per step over all processes.
        `optimizer`: a name, or a class like those of `torch.optim`. `lr`: the peak learning rate, or a function of the
        step. `metrics`: functions of output and target for validation. `trunk` and `plan`: the list of blocks and the
        tensor plan, if they are not found. `settings`: any other keys of a job, such as `{"checkpoint": {"every": 9}}`.
        """
        _report_user_errors()
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise JobError(f"a callback must be a shardwise.Callback, not a {type(callback).__name__}.")
        if not callable(model):
            raise JobError(f"model must be an nn.Module, a class or a function, not a {type(model).__name__}.")
        self.task = Task(model, loss, data, validation, collate, count, inputs, trunk=trunk, plan=dict(plan or {}),
                         callbacks=tuple(callbacks), metrics=dict(metrics or {}),
                         optimizer=None if isinstance(optimizer, str) else optimizer,
                         learning_rate=lr if callable(lr) else None)  # fmt: skip
        name, arguments = register_task(self.task)
        values: dict[str, Any] = {"seed": seed, "layout": str(layout), "precision": precision,
                                  "batch": {"samples": batch}, "model": {"name": name, "args": {"argv": arguments}},
                                  "run": {"folder": folder},
                                  "optimizer": {"lr": 3e-4 if callable(lr) else lr}}  # fmt: skip
        if isinstance(optimizer, str):
            values["optimizer"]["name"] = optimizer
        if steps is not None:
            values["steps"] = steps
        for key, value in (settings or {}).items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
        self.job: Job = make_job(values, "Trainer")
        self.run: Run | None = None

    def fit(self, resume: str | Path | None = None, proof: bool = True) -> Run:
        """Trains to the end and returns the run. `resume` continues the run in that folder, in any layout. Without
        `proof`, the layout is not compared with one process first."""
        stop_if_collecting()
        job, path = self.job, None if resume is None else Path(resume)
        if path is not None:
            job = job.model_copy(update={"model": RunFolder.open(path).job().model})  # the command line may differ
        self.run = Run(start_job(job, print_line, path, check=prove if proof else None).path)
        return self.run

    def verify(self, layout: str | Sequence[str], steps: int = 3) -> list[VerifyResult]:
        """Compares layouts with the unmodified module in one process, in float64."""
        stop_if_collecting()
        layouts = [Layout.parse(text) for text in ([layout] if isinstance(layout, str) else layout)]
        return verify(self.job.model_copy(update={"precision": "float64"}), layouts, steps)

    def plan(self, cluster: str = "cpu", devices: int | None = None) -> Plan:
        """Returns the fastest layout on a cluster, with predicted step time and memory."""
        stop_if_collecting()
        devices = devices or (os.cpu_count() if cluster == "cpu" else None)
        return make_plan(self.job, find_cluster(cluster), devices)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Returns the mean loss, and the metrics, of the trained weights on a dataset, in one process."""
        folder = self._folder()
        job = make_job(self.job.model_dump(exclude_none=True) | {
            "precision": "float32", "layout": "auto", "batch": {"samples": min(len(data), self.job.samples)},
            "validation": {"samples": len(data)}, "compile": False})  # fmt: skip
        engine, saved = make_engine(prepare(job, Layout()), torch.device("cpu")), open_checkpoint(folder)
        load_into(saved.checkpoint, engine, engine.make_optimizer(job), CheckpointGroup())
        return validate(engine, job, DatasetSource(self.task, data), None) or {}

    def module(self) -> nn.Module:
        """Returns the module with the weights of the newest checkpoint, on the CPU."""
        return open_checkpoint(self._folder()).load(torch.float32)

    def save(self, path: str | Path) -> None:
        """Saves the trained weights as a PyTorch state dict."""
        torch.save(self.module().state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Takes the run in this folder, for `module`, `evaluate`, `save` and `fit(resume=...)`."""
        self.run = Run(RunFolder.open(Path(path), weights=True).path)

    def _folder(self) -> RunFolder:
        stop_if_collecting()
        if self.run is None:
            raise JobError("there are no trained weights yet; call fit(), or load(FOLDER) for an earlier run.")
        return RunFolder.open(self.run.folder)


def _report_user_errors() -> None:
    """Makes this process print an expected error as a sentence, as the command line does, and exit with its code."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShardwiseError):
            return previous(kind, error, trace)
        if os.environ.get("RANK", "0") == "0":
            print(f"shardwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

    if getattr(previous, "__name__", "") != "report":
        sys.excepthook = report
