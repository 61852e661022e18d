"""Checkpoints: written whole or not at all, checked before they are believed, loaded into any layout.

    step-00000100/
        __<rank>_0.distcp   the pieces that a rank wrote        tensors.json    which piece lies where
        .metadata           the same as a pickle, for           manifest.json   step, layout, state; size and SHA-256
                            PyTorch's own tools                                 of every file; written last

Promises
- A crash at any moment costs no finished checkpoint: files grow in `step-*.partial-*`, which gets its name once all is
  on the disk. What a crash leaves behind is removed at the next start.
- Nothing is loaded before every byte was compared with the manifest. A damaged checkpoint is named and the next older
  one taken.
- No file is trusted with code: the pickle is never read, pieces are read as bare tensors.
- An asynchronous save stalls training for the copy to memory only, and what is saved is the state at the call.
- Loaded into the layout that it was saved from, everything is the same bit by bit; into another, too, cut otherwise.
- Every rank gets the same verdict. All ranks must see one file system.

Saved are `weights.<name>`, `optimizer.<name>.<key>` and, where the loss scale moves, `scale.<key>`.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, RunError
from shardwise.files import fsync_and_rename
from shardwise.optim.sharded_optimizer import ShardedOptimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.param_shard import ParamShard, offset_and_shape
from shardwise.train import error_feedback
from shardwise.train.checkpoint_folder import (
    CheckpointGroup,
    create_partial,
    find_newest_valid,
    list_checkpoints,
    next_free_path,
    remove_checkpoint,
    remove_partials,
    valid_checkpoints,
    write_manifest,
)
from shardwise.train.dcp_storage import CheckpointPiece, Index, dtype_of, read_index, read_pieces, write_pieces
from shardwise.workers.snapshots import SnapshotStore

__all__ = ["CheckpointManager", "valid_checkpoints", "load_weights"]


class CheckpointManager:
    """The checkpoints of one run. Every rank makes one, and calls the same methods in the same order."""

    def __init__(
        self, folder: Path, keep: int, asynchronous: bool, snapshots: Path | None = None, layout: str = ""
    ):  # fmt: skip
        assert keep >= 1, "the newest good checkpoint is never removed"
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self.damaged: list[str] = []
        """What was wrong with the checkpoints that the last `load` passed over, a sentence each."""
        self.source = ""
        """Where the last `load` took it from: memory, disk or, where there was none, nowhere."""
        self._group = CheckpointGroup.create()
        self.snapshots = None if snapshots is None else SnapshotStore(snapshots, layout, self._group.all_gather)
        """Snapshots, where there is room for them."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._staging: dict[str, Tensor] = {}
        self._damaged_paths: set[Path] = set()
        self._group.on_rank_zero(self._prepare_folder)

    def save(self, step: int, engine: Engine, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Saves everything that training goes on from. `state` is small and fit for JSON; that of rank 0 counts.

        Waits for the save before this one and, if it failed, raises and begins nothing.
        """
        self.finish()
        pieces = replica_pieces(collect_pieces(engine, optimizer), engine.mesh["local_sgd"].index)
        metadata = json.dumps({"step": step, "layout": str(engine.mesh.layout), "state": {"step": step, **state}})
        if not self.asynchronous:
            self._write(step, pieces, metadata)
            return
        pieces, ready = self._stage_to_host(pieces, engine.mesh.device)
        self._thread = threading.Thread(
            target=self._write_in_background, args=(step, pieces, metadata, ready), daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits for the write under way. Raises RunError, on every rank, if it failed."""
        self._wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def load(self, engine: Engine, optimizer: torch.optim.Optimizer, step: int | None = None) -> dict[str, Any] | None:
        """Loads the newest good checkpoint, or that of `step`. Returns its state, or None where there is none."""
        self._wait()
        self.damaged = []
        snapshot = self.snapshots.latest_complete() if self.snapshots is not None and step is None else None
        if snapshot is not None and all(
            number <= snapshot["step"] for number, _ in self._group.on_rank_zero(lambda: list_checkpoints(self.folder))
        ):
            return self._load_snapshot(snapshot, engine, optimizer)
        choice = find_newest_valid(self.folder, self._group, step)
        self.damaged = [sentence for _, sentence in choice.damaged]
        self._damaged_paths.update(path for path, _ in choice.damaged)
        if snapshot is not None and (choice.path is None or choice.manifest["step"] < snapshot["step"]):
            return self._load_snapshot(snapshot, engine, optimizer)
        self.source = "disk" if choice.path is not None else ""
        if choice.path is None:
            return None
        path, group, index = choice.path, self._group, read_index(choice.path)
        check_matches_model(
            path,
            index,
            {f"weights.{param_shard.name}": param_shard.shape for param_shard in engine.param_shards},
            group,
        )
        restore(index, engine, optimizer, lambda pieces: read_pieces(path, index, pieces, group))
        state: dict[str, Any] = choice.manifest["state"]
        return state

    def snapshot(self, step: int, engine: Engine, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
        """Copies everything to memory. Gives a sentence, on every rank, where there is no room and never will be."""
        assert self.snapshots is not None
        if self.snapshots.needs_communication:
            self._wait()  # it talks over the group that writes use
        problem = self.snapshots.take(step, collect_pieces(engine, optimizer), {"step": step, **state})
        if problem:
            self.snapshots = None
        return problem

    def rewind(self, step: int) -> None:
        """Removes every checkpoint newer than `step`, for a run that goes back to take another way."""
        self._wait()
        if self.snapshots is not None:
            self.snapshots.discard_after(step)
        self._group.on_rank_zero(lambda: self._remove_after(step))

    # Behind the scenes, on rank 0 where it is about the folder

    def _load_snapshot(
        self, snapshot: dict[str, Any], engine: Engine, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        assert self.snapshots is not None
        restore(snapshot["index"], engine, optimizer, partial(self.snapshots.load_into, snapshot))
        self.source = "memory"
        state: dict[str, Any] = snapshot["state"]
        return state

    def _prepare_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoints can be kept in {self.folder}: {error.strerror}.") from None
        remove_partials(self.folder)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage_to_host(
        self, pieces: dict[str, CheckpointPiece], device: torch.device
    ) -> tuple[dict[str, CheckpointPiece], torch.cuda.Event | None]:
        """The pieces in memory of our own, which is kept for the next time: fresh pages cost more than the copy."""
        on_gpu = device.type == "cuda"
        for name, piece in pieces.items():
            staged = self._staging.get(name)
            if staged is None or staged.shape != piece.tensor.shape or staged.dtype != piece.tensor.dtype:
                staged = torch.empty_like(piece.tensor, device="cpu", pin_memory=on_gpu)
                self._staging[name] = staged
            staged.copy_(piece.tensor, non_blocking=True)
        copies = {name: replace(piece, tensor=self._staging[name]) for name, piece in pieces.items()}
        if not on_gpu:
            return copies, None
        ready = torch.cuda.Event()  # later kernels run after the copies by themselves; only the writer has to wait
        ready.record()
        return copies, ready

    def _write_in_background(
        self, step: int, pieces: dict[str, CheckpointPiece], metadata: str, ready: torch.cuda.Event | None
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            self._write(step, pieces, metadata)
        except BaseException as error:  # raised by `finish`, in the thread that can act on it
            self._failure = error

    def _write(self, step: int, pieces: dict[str, CheckpointPiece], metadata: str) -> None:
        partial: Path | None = None
        try:
            partial = self._group.on_rank_zero(lambda: create_partial(self.folder, step))
            files = write_pieces(partial, pieces, self._group)
            facts = {**json.loads(metadata), "torch": torch.__version__, "world": self._group.size, "files": files}
            self._group.on_rank_zero(lambda: self._commit(step, partial, facts))
        except Exception as error:
            if partial is not None and self._group.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}. "
                "The ones before it are whole; give the folder room and write access."
            ) from error

    def _commit(self, step: int, partial: Path, facts: dict[str, Any]) -> None:
        write_manifest(partial, facts)
        fsync_and_rename(partial, next_free_path(self.folder, step))
        self._remove_old()

    def _remove_old(self) -> None:
        """Removes what is older than the newest `keep` good ones, and what else there is of their steps."""
        kept: dict[int, Path] = {}
        for step, path in valid_checkpoints(self.folder):
            if path not in self._damaged_paths and len(kept) < self.keep:
                kept.setdefault(step, path)
        for step, path in list_checkpoints(self.folder):
            if kept and (step < min(kept) or kept.get(step, path) != path):
                remove_checkpoint(path)
        remove_partials(self.folder)

    def _remove_after(self, step: int) -> None:
        for number, path in list_checkpoints(self.folder):
            if number > step:
                remove_checkpoint(path)


def load_weights(folder: Path, tensors: Mapping[str, Tensor], step: int | None = None) -> dict[str, Any] | None:
    """Fills whole tensors, by parameter name, from the newest good checkpoint or that of `step`, in one process.

    Returns its state, or None where there is no checkpoint.
    """
    single = CheckpointGroup()
    choice = find_newest_valid(folder, single, step)
    if choice.path is None:
        return None
    index = read_index(choice.path)
    weights = {f"weights.{name}": tensor.detach() for name, tensor in tensors.items()}
    check_matches_model(choice.path, index, {name: tensor.shape for name, tensor in weights.items()}, single)
    pieces = {name: CheckpointPiece(tensor, (0,) * tensor.dim(), tensor.shape) for name, tensor in weights.items()}
    read_pieces(choice.path, index, pieces, single)
    state: dict[str, Any] = choice.manifest["state"]
    return state


# What is saved of an engine


def collect_pieces(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, CheckpointPiece]:
    """What this rank has of everything, each name once: of a weight that is tied in a V it holds two copies."""
    pieces: dict[str, CheckpointPiece] = {}
    for param_shard in engine.param_shards:
        if f"weights.{param_shard.name}" in pieces:
            continue
        start, size = offset_and_shape(param_shard, engine.mesh)
        values = {f"weights.{param_shard.name}": param_shard.tensor.detach()}
        ours = sharded_optimizer(optimizer)
        state = (
            optimizer.state.get(param_shard.tensor, {})
            if ours is None
            else ours.state_for_checkpoint(param_shard.tensor)
        )
        for key, value in state.items():
            assert isinstance(value, Tensor), f"the optimizer keeps {key} of {param_shard.name} as {value!r}, no tensor"
            values[f"optimizer.{param_shard.name}.{key}"] = value
        for name, value in values.items():
            if value.dim() == 0:
                pieces[name] = CheckpointPiece(value, (), value.shape)
                continue
            dims = value.dim()  # a table's state may have one number for a row
            offsets, sizes, full_shape = list(start[:dims]), size[:dims], list(param_shard.shape[:dims])
            dim = collapsed_dim(optimizer, name)
            if dim is not None:
                offsets[dim], sizes[dim], full_shape[dim] = 0, 1, 1
            assert list(value.shape) == sizes, f"{name}: {list(value.shape)} does not lie as its weight, {size}"
            pieces[name] = CheckpointPiece(value, tuple(offsets), torch.Size(full_shape))
    for chain in engine.chains:
        for name, value in chain.named_buffers():  # every rank has the same
            pieces[f"buffers.{name}"] = CheckpointPiece(value, (0,) * value.dim(), value.shape)
    if engine.scale.dynamic:
        for key, value in engine.scale.state().items():
            pieces[f"scale.{key}"] = CheckpointPiece(value, (), value.shape)
    if engine.outer_optimizer is not None:
        for number, param_shard in enumerate(engine.param_shards):
            for key, value in engine.outer_optimizer.state_of(number).items():
                pieces[f"outer.{param_shard.name}.{key}"] = CheckpointPiece(
                    value, offset_and_shape(param_shard, engine.mesh)[0], param_shard.shape
                )
    return pieces | error_feedback.error_feedback_pieces(engine)


def replica_pieces(pieces: dict[str, CheckpointPiece], replica: int) -> dict[str, CheckpointPiece]:
    """What a replica that trains apart saves: the first under plain names, others what differs from it under theirs."""
    if not replica:
        return pieces
    return {f"replica{replica}.{name}": piece for name, piece in pieces.items() if not name.startswith("outer.")}


def collapsed_dim(optimizer: torch.optim.Optimizer, name: str) -> int | None:
    """The side of a weight along which this state of its optimizer has a single number, if there is one."""
    ours = sharded_optimizer(optimizer)
    return (
        ours.collapsed_dims.get(name.rpartition(".")[2]) if ours is not None and name.startswith("optimizer.") else None
    )


def sharded_optimizer(optimizer: torch.optim.Optimizer) -> ShardedOptimizer | None:
    """The optimizer of dense weights, where it is one of ours."""
    dense = getattr(optimizer, "dense", optimizer)
    return dense if isinstance(dense, ShardedOptimizer) else None


@torch.no_grad()
def restore(
    index: Index, engine: Engine, optimizer: torch.optim.Optimizer, read: Callable[[dict[str, CheckpointPiece]], None]
) -> None:
    """Fills an engine and its optimizer from a checkpoint that was examined. `read` fills pieces."""
    init_optimizer_state(index, optimizer, engine.param_shards)
    residuals = error_feedback.error_feedback_targets(engine, index)
    # A replica that was not there before goes on from the first.
    replica_prefix = f"replica{engine.mesh['local_sgd'].index}."
    named = {
        replica_prefix + name if replica_prefix + name in index else name: piece
        for name, piece in collect_pieces(engine, optimizer).items()
    }
    pieces = {name: piece for name, piece in named.items() if name in index}
    read(pieces | residuals)
    error_feedback.load_error_feedback(engine, residuals)
    first: dict[str, Tensor] = {}
    for param_shard in engine.param_shards:
        source = first.setdefault(param_shard.name, param_shard.tensor)
        if source is not param_shard.tensor:
            param_shard.tensor.detach().copy_(source)
            for key, value in optimizer.state[source].items():
                optimizer.state[param_shard.tensor][key].copy_(value)
    ours = sharded_optimizer(optimizer)
    if ours is not None:
        ours.after_load()
    engine.data.sync_weights()


def init_optimizer_state(index: Index, optimizer: torch.optim.Optimizer, param_shards: list[ParamShard]) -> None:
    """Gives the optimizer, which makes its state only in its first step, the very state that was saved, as zeros."""
    entries: dict[str, Index] = {}
    for name, entry in index.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            owner, _, key = rest.rpartition(".")
            entries.setdefault(owner, {})[key] = entry
    step_on_device = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    for param_shard in param_shards:
        if param_shard.fixed_offset_and_shape is not None:
            continue  # a table's state is there from the start
        weight, state = param_shard.tensor, optimizer.state[param_shard.tensor]
        state.clear()
        for key, entry in entries.get(param_shard.name, {}).items():
            if not entry["shape"]:
                # A count of steps: only fused and capturable optimizers want it on the weight's device.
                device = weight.device if step_on_device.get(id(weight)) else torch.device("cpu")
                state[key] = torch.zeros((), dtype=dtype_of(entry), device=device)
            else:
                same = entry["dtype"] == index[f"weights.{param_shard.name}"]["dtype"]
                size, dim = list(weight.shape), collapsed_dim(optimizer, f"optimizer.{param_shard.name}.{key}")
                if dim is not None:
                    size[dim] = 1
                state[key] = weight.new_zeros(size, dtype=weight.dtype if same else dtype_of(entry))


def check_matches_model(path: Path, index: Index, needed: dict[str, torch.Size], group: CheckpointGroup) -> None:
    """Raises, on every rank and before anything is loaded, if a checkpoint is of another model."""
    all_shapes: dict[str, torch.Size] = {}
    for part in group.all_gather(needed):
        all_shapes.update(part)
    for name in sorted(all_shapes.keys() | {name for name in index if name.startswith("weights.")}):
        expected = list(all_shapes[name]) if name in all_shapes else "nothing"
        stored = index[name]["shape"] if name in index else "nothing"
        if expected != stored:
            raise CheckpointError(
                f"checkpoint {path} is of another model: for {name.removeprefix('weights.')} it has {stored}, this one "
                f"needs {expected}. Load it with the model that it was saved from."
            )
