"""Starting a run from the weights of another one (`model.weights = RUN` or `RUN@STEP`), in any layout.

Weights and buffers are read; optimizer, data and learning rate schedule are new. If the vocabulary or a table of
positions has more rows than before, the new rows keep their random values."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from shardwise.errors import CheckpointError
from shardwise.files import user_path
from shardwise.job import Job
from shardwise.models.chain import InitialValues
from shardwise.models.config import split_step
from shardwise.object_store import parse_url
from shardwise.parallel.engine import Engine
from shardwise.parallel.prepare import Prepared
from shardwise.train.checkpoint import collect_pieces, share_tied_weights
from shardwise.train.checkpoint_folder import CheckpointGroup, find_newest_valid, valid_checkpoints
from shardwise.train.dcp_storage import CheckpointPiece, Index, Pieces, read_index, read_pieces, read_tensor
from shardwise.train.run_folder import RunFolder


def parse_start(job: Job) -> tuple[Path, int | None] | None:
    """Returns the run that the job starts from and the step, if it names one."""
    if job.model.weights in ("", "random") or job.model.weights_folder is not None:
        return None
    path, step = split_step(job.model.weights)
    if parse_url(path):
        raise CheckpointError(f"model.weights = {str(path)!r}: give a local run, or `shardwise export` this one.")
    if step and not (step.isdecimal() and len(step) < 16):
        raise CheckpointError(f"model.weights = {job.model.weights!r}: {step!r} is no step; write RUN@200.")
    return path, int(step) if step else None


def name_step(job: Job, previous: Job | None = None) -> Job:
    """Returns the job with the step that it starts from; a run that goes on takes the step of its `previous` job.
    What it starts from has an absolute path, so that it is found from any working folder."""
    job = _with_absolute_paths(job, previous)
    if (start := parse_start(job)) is None:
        return job
    run, step = str(start[0].resolve()), start[1]
    if previous is not None and previous.model.weights.rpartition("@")[0] == run and step is None:
        step = int(previous.model.weights.rpartition("@")[2])
    elif step is None:
        if not (saved := valid_checkpoints(RunFolder.open(start[0]).checkpoints)):
            raise CheckpointError(f"model.weights: {run} has no checkpoint to start from.")
        step = saved[0][0]
    return job.model_copy(update={"model": job.model.model_copy(update={"weights": f"{run}@{step}"})})


def _with_absolute_paths(job: Job, previous: Job | None) -> Job:
    """Returns the job with absolute paths of the folders that its model starts from. Where the `previous` job of a run
    names the same place, its spelling stays: the checkpoints of the run have recorded it."""
    before = None if previous is None else previous.model
    model = job.model
    changes: dict[str, object] = {}

    if model.name.startswith("hf:") and Path(model.name[3:]).is_dir():
        old_name = "" if before is None else before.name
        changes["name"] = "hf:" + _absolute(model.name[3:], old_name.removeprefix("hf:"))

    if model.weights_folder is not None and model.weights:
        changes["weights"] = _absolute(model.weights, "" if before is None else before.weights)

    if model.lora is not None and model.lora.adapter:
        old_lora = None if before is None else before.lora
        adapter = _absolute(model.lora.adapter, "" if old_lora is None else old_lora.adapter)
        changes["lora"] = model.lora.model_copy(update={"adapter": adapter})

    job = job.model_copy(update={"model": model.model_copy(update=changes)})
    tokenizer = job.data.tokenizer
    if tokenizer != "bytes" and os.path.exists(user_path(tokenizer)):  # also where it is too long for any file
        path = _absolute(tokenizer, "" if previous is None else previous.data.tokenizer)
        job = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": path})})
    return job


def _absolute(path: str, spelling: str) -> str:
    """Returns an absolute path, in which links stay; or the `spelling`, if that is the same place."""
    whole = os.path.abspath(user_path(path))
    is_same = spelling and os.path.abspath(user_path(spelling)) == whole
    return spelling if is_same else whole


class RunWeights(InitialValues):
    """The weights of a checkpoint, for a model that keeps them frozen."""

    def __init__(self, checkpoint: Path):
        self.checkpoint, self.index = checkpoint, read_index(checkpoint)

    def value(self, name: str) -> "StoredWeight":
        return StoredWeight(self, f"weights.{name}")


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a checkpoint, of which the slices that are asked for are read."""

    weights: RunWeights
    name: str

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return read_tensor(self.weights.checkpoint, self.weights.index, self.name, index)


def run_weights(job: Job) -> RunWeights | None:
    """Returns the weights of the run that a job starts from, if it starts from a run."""
    checkpoint = start_checkpoint(job)
    return None if checkpoint is None else RunWeights(checkpoint)


def start_checkpoint(job: Job) -> Path | None:
    """Returns the checkpoint that a job starts from, if it starts from a run. Its files have the right sizes; what is
    in them, `shardwise.train.base_weights` compares."""
    start = parse_start(job)
    if start is None:
        return None
    run, step = start
    paths = dict(reversed(valid_checkpoints(RunFolder.open(run).checkpoints)))
    if step not in paths:
        raise CheckpointError(f"model.weights: {run} has no intact checkpoint of step {step}.")
    return paths[step]


def check_start(prepared: Prepared) -> str:
    """Returns, as a sentence, what the run starts from; raises CheckpointError if the model does not fit."""
    job = prepared.job
    if job.model.weights_folder is not None:
        prepared.model.initial.check(prepared.model)  # type: ignore[union-attr]
        return f"starts from the weights of {job.model.weights_folder}"
    if (start := parse_start(job)) is None:
        return ""
    choice = find_newest_valid(RunFolder.open(start[0]).checkpoints, CheckpointGroup(), start[1])
    assert choice.path is not None, "name_step found it"
    weights, seed = dict(prepared.model.named_unique_parameters()), choice.manifest["state"]["seed"]
    if job.seed != seed and job.model.lora is None and not all(weight.requires_grad for weight in weights.values()):
        raise CheckpointError(f"frozen parameters follow from the seed, which was {seed} in {start[0]}; set it again.")
    has_adapters = job.model.lora is not None
    shapes = {name: weight.shape for name, weight in weights.items() if weight.requires_grad != has_adapters}
    shapes |= {table.name: torch.Size((table.rows, table.width)) for table in prepared.tables}
    grown = _grown_rows(job, choice.path, read_index(choice.path), shapes)
    rows = "".join(f"; {name} has {shapes[name][0] - rows} new rows" for name, rows in grown.items())
    return f"starts from the weights of {job.model.weights}{rows}"


def _grown_rows(job: Job, path: Path, index: Index, shapes: dict[str, torch.Size]) -> dict[str, int]:
    """Returns the stored rows of each parameter that has more of them now."""
    grown = {}
    growing = {job.model.vocab_size, job.model.sequence_length}
    for name, shape in shapes.items():
        old, new = index.get(f"weights.{name}", {}).get("shape"), list(shape)
        if old == new:
            continue
        if not old or old[1:] != new[1:] or old[0] > new[0] or new[0] not in growing:
            problem = f"model.weights: for {name}, {path} has {old or 'nothing'}, but this model needs {new}"
            raise CheckpointError(f"{problem}; only the vocabulary and a table of positions may grow.")
        grown[name] = old[0]
    return grown


def load_start(job: Job, engine: Engine, optimizer: Optimizer, group: CheckpointGroup) -> None:
    """Loads the weights that the job starts from into this rank's shards, if it starts from a run."""
    if start := parse_start(job):
        choice = find_newest_valid(RunFolder.open(start[0]).checkpoints, group, start[1])
        assert choice.path is not None, "the launcher found it"
        load_into(choice.path, engine, optimizer, group)


@torch.no_grad()
def load_into(checkpoint: Path, engine: Engine, optimizer: Optimizer, group: CheckpointGroup) -> None:
    """Loads the weights and buffers of a checkpoint into this rank's shards."""
    index, pieces = read_index(checkpoint), Pieces()
    for name, piece in collect_pieces(engine, optimizer).items():
        if name in index and name.startswith(("weights.", "buffers.")):
            shape, tensor = index[name]["shape"], piece.tensor
            if shape != list(piece.shape):
                tensor = tensor[: max(0, shape[0] - piece.offsets[0])]
            pieces[name] = CheckpointPiece(tensor, piece.offsets, torch.Size(shape))
    read_pieces(checkpoint, index, pieces, group)
    share_tied_weights(engine)
    engine.data.sync_weights()
