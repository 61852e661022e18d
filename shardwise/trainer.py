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

from shardwise.adapters.module_family import meta_chain, register_task, stop_if_collecting
from shardwise.adapters.task import Callback, DatasetSource, NumberedStream, Task
from shardwise.cluster import find_cluster
from shardwise.console import print_line
from shardwise.data.input_files import MAX_SHOWN
from shardwise.errors import JobError, ShardwiseError
from shardwise.job import Job, make_job
from shardwise.launch.start import start_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import meta_model, prepare
from shardwise.planner.plan import Plan, make_plan
from shardwise.train.checkpoint_folder import CheckpointGroup, valid_checkpoints
from shardwise.train.export import Export, open_checkpoint
from shardwise.train.loop import make_engine
from shardwise.train.run_folder import RunFolder
from shardwise.train.task_record import changes_of_data, changes_of_task, describe_task, load_record
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
        `validation`: a dataset, all of which is validated on unless `settings` give `validation.samples`.
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
        values["validation"] = self._validation_section(values.get("validation", {}))
        self.job: Job = make_job(values, "Trainer")
        self.run: Run | None = None

    def _validation_section(self, given: Any) -> Any:
        """Returns the `[validation]` section: where it has no number of samples, the whole validation dataset counts.

        The default of a job is meant for what it holds out of its `[data]`; a dataset was chosen to be validated on. Of
        a stream, whose length nobody knows, the default remains."""
        dataset = self.task.validation
        if dataset is None or self.task.reads_tokens or isinstance(dataset, NumberedStream):
            return given
        if not isinstance(given, Mapping) or "samples" in given or not len(dataset):
            return given
        return {**given, "samples": len(dataset)}

    def fit(self, resume: str | Path | None = None, proof: bool = True, accept_changes: bool = False) -> Run:
        """Trains to the end and returns the run. `resume` continues the run in that folder, in any layout; its module,
        loss, optimizer, schedule and data must be those that it began with, unless `accept_changes`: then they may have
        changed in the script that began it. Without `proof`, the layout is not compared with one process first."""
        stop_if_collecting()
        job = self.job
        path = None if resume is None else Path(resume)
        if path is not None:
            folder = RunFolder.open(path)
            model = folder.job().model  # the command line may differ
            if model.name != self.job.model.name:
                self._check_own_task(folder)
            job = job.model_copy(update={"model": model})

        folder = start_job(
            job,
            print_line,
            path,
            check=prove if proof else None,
            accept_data_change=accept_changes,
            accept_task_change=accept_changes,
        )
        self.run = Run(folder.path)
        return self.run

    def _check_own_task(self, folder: RunFolder) -> None:
        """Raises JobError if this trainer has another task than a run which another script, or another trainer of this
        one, has started: going on with that run would train its task, not this one, whatever changes are accepted."""
        recorded = load_record(folder)
        if recorded is None:
            return
        own = describe_task(self.job, meta_model(self.job.model, self.job.seed))
        changes = [*changes_of_task(recorded, own, steps_changed=True), *changes_of_data(recorded, own)]
        if changes:
            raise JobError(
                f"{folder.place} was started by {folder.job().model.name} with another task than this trainer has: "
                f"{'; '.join(changes[:MAX_SHOWN])}. Resume it there, or give this trainer the same."
            )

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
        saved = self._saved()
        model = self.job.model.model_copy(update={"lora": saved.lora})
        values = self.job.model_copy(update={"model": model}).model_dump(exclude_none=True)
        batch = {"samples": min(len(data), self.job.samples)}
        job = make_job({**values, "seed": saved.job.seed, "precision": "float32", "layout": "auto", "batch": batch,
                        "validation": {"samples": len(data)}, "compile": False})  # fmt: skip
        engine = make_engine(prepare(job, Layout()), torch.device("cpu"))
        load_into(saved.checkpoint, engine, engine.make_optimizer(job), CheckpointGroup())
        return validate(engine, job, DatasetSource(self.task, data, meta_chain(job.model).spec), None) or {}

    def module(self) -> nn.Module:
        """Returns the module with the weights of the newest checkpoint, on the CPU."""
        return self._saved().load(torch.float32)

    def save(self, path: str | Path) -> None:
        """Saves the trained weights as a PyTorch state dict."""
        torch.save(self.module().state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Takes the run in this folder, for `module`, `evaluate`, `save` and `fit(resume=...)`. Raises CheckpointError
        if it has trained another module than this trainer's."""
        stop_if_collecting()
        folder = RunFolder.open(Path(path), weights=True)
        if valid_checkpoints(folder.checkpoints):
            self._open(folder)
        self.run = Run(folder.path)

    def _saved(self) -> Export:
        """Returns the newest checkpoint of the run, to be loaded into the module of this trainer."""
        stop_if_collecting()
        if self.run is None:
            raise JobError("there are no trained weights yet; call fit(), or load(FOLDER) for an earlier run.")
        return self._open(RunFolder.open(self.run.folder))

    def _open(self, folder: RunFolder) -> Export:
        """Opens the newest checkpoint of a run, whose script may have made another module."""
        lora = folder.job().model.lora
        return open_checkpoint(folder, model=self.job.model.model_copy(update={"lora": lora}))


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
