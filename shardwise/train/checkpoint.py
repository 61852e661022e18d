"""Checkpoints: written atomically, verified before they are loaded, and loadable into any layout.

Its files are in docs/reference/run-folder.md. Guarantees:
- A crash never loses a finished checkpoint: files are written to `step-*.partial-*`, which is renamed once everything
  is on disk. The next start removes leftovers.
- Nothing is loaded before every byte has been compared with the manifest. Damaged checkpoints are reported and skipped.
- Loading never runs code: the pickle is not read, and shards are loaded with `weights_only`.
- An asynchronous save blocks training only for the copy to host memory; later steps do not alter the copy.
- Loading is bitwise exact, also into another layout.
- Every rank reaches the same decision. All ranks share one run folder, or the ranks of each node do: then the run is in
  an object store (`shardwise.train.run_store`), each node keeps its own shards, and a load downloads the others.

A checkpoint has `weights.<name>`, `optimizer.<name>.<key>`, `buffers.<name>`, `scale.<key>` (dynamic loss scale),
`outer.<name>.<key>` (local SGD) and the tensors of `shardwise.train.error_feedback`. Replicas that local SGD lets
diverge save theirs under the prefix `replica<n>.`."""

import json
import mmap
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import CheckpointError, RunError
from shardwise.files import fsync_and_rename, os_errors_as
from shardwise.host_memory import in_huge_pages, pack, page_lock, unpack
from shardwise.models.quantize import FROZEN_BUFFERS
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ShardedOptimizer
from shardwise.parallel.engine import Engine
from shardwise.train import checkpoint_folder, dcp_storage, error_feedback
from shardwise.train.checkpoint_folder import CheckpointGroup, list_checkpoints, valid_checkpoints
from shardwise.train.dcp_storage import CheckpointPiece, Index, Pieces, read_pieces, weight_pieces, write_pieces
from shardwise.train.run_store import RunStore, find_newest_valid
from shardwise.workers.snapshots import SnapshotStore


class CheckpointManager:
    """Saves and loads the checkpoints of a run. Every rank must call the same methods in the same order."""

    def __init__(self, folder: Path, keep: int, asynchronous: bool, snapshots: Path | None = None, layout: str = ""):
        assert keep >= 1, "the newest valid checkpoint is never removed"
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self.damaged: list[str] = []  # problems of the checkpoints that the last `load` skipped, as sentences
        self.source = ""  # where the last `load` found its state: "memory", "disk", or "" if there was none
        self.store = RunStore.of(folder.parent)
        self.on_wait: Callable[[], None] = lambda: None  # called while a checkpoint is downloaded, which may take long
        self.group = CheckpointGroup.create("" if self.store is None else self.store.id)
        self.snapshots: SnapshotStore | None = None  # in memory; None if disabled or if memory is too small
        if snapshots is not None:  # in a process group of their own, so that they need not wait for a save
            self.snapshots = SnapshotStore(snapshots, layout, CheckpointGroup.create().all_gather)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._staging: Tensor | None = None  # host memory of asynchronous saves
        self._reserving: threading.Thread | None = None
        self._can_stage = threading.Event()
        self._can_stage.set()
        self._damaged_paths: set[Path] = set()
        self.group.on_leaders(self._prepare_folder)

    def save(self, step: int, engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Saves what training resumes from, after the last save, whose error it raises; `state`: JSON, of rank 0."""
        self.finish()
        pieces = collect_pieces(engine, optimizer)
        if replica := engine.mesh["local_sgd"].index:  # replica 0 saves everything, the others what they have alone
            own = {name: piece for name, piece in pieces.items() if not name.startswith("outer.")}
            pieces = {f"replica{replica}.{name}": piece for name, piece in own.items()}
        metadata = json.dumps({"step": step, "layout": str(engine.mesh.layout), "state": {"step": step, **state}})
        self._can_stage.wait()
        if not self.asynchronous or not self._has_room({name: piece.tensor for name, piece in pieces.items()}):
            self._write(step, pieces, metadata)
            return
        pieces, ready = self._stage_to_host(pieces, engine.mesh.device)
        args = step, pieces, metadata, ready
        self._thread = threading.Thread(target=self._write_in_background, args=args, daemon=True)
        self._thread.start()

    def reserve(self, engine: Engine, optimizer: Optimizer) -> None:
        """Page-locks host memory for the saves and snapshots of a GPU, in the background since it takes seconds."""
        tensors = {name: piece.tensor for name, piece in collect_pieces(engine, optimizer).items()}
        if engine.mesh.device.type == "cuda" and self._reserving is None:
            if self.snapshots is not None:
                self.snapshots.agree_on_space(tensors)  # before any rank of this node takes some
            self._can_stage.clear()
            self._reserving = threading.Thread(target=self._reserve_now, args=(tensors,), daemon=True)
            self._reserving.start()

    def can_snapshot(self, step: int, every: int) -> bool:
        """Whether a snapshot is due, and the memory for it is there."""
        if self.snapshots is None or not self.snapshots.is_due(step, every):
            return False
        if self._reserving is not None and self.group.size > 1:
            self._reserving.join()  # all ranks must agree
        return self._reserving is None or not self._reserving.is_alive()

    def finish(self) -> None:
        """Waits for the pending save; raises RunError, on every rank, if it failed."""
        self._wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def load(self, engine: Engine, optimizer: Optimizer, step: int | None = None) -> dict[str, Any] | None:
        """Loads the newest valid checkpoint or snapshot, or that of `step`; returns its state, or None."""
        self._wait()
        self.damaged = []
        snapshot = self.snapshots.latest_complete() if self.snapshots is not None and step is None else None
        if snapshot is not None:
            saved = checkpoint_folder.shared_list(self.folder, self.group)
            if all(number <= snapshot["step"] for number, _ in saved):
                return self._load_snapshot(snapshot, engine, optimizer)
        choice = find_newest_valid(self.folder, self.group, step, self.store, self.on_wait)
        self.damaged = [sentence for _, sentence in choice.damaged]
        self._damaged_paths.update(path for path, _ in choice.damaged)
        if snapshot is not None and (choice.path is None or choice.manifest["step"] < snapshot["step"]):
            return self._load_snapshot(snapshot, engine, optimizer)
        self.source = "disk" if choice.path is not None else ""
        if choice.path is None:
            return None
        path, group, index = choice.path, self.group, dcp_storage.read_index(choice.path)
        shapes = {f"weights.{param_shard.name}": param_shard.shape for param_shard in engine.param_shards}
        shapes |= {name: piece.shape for name, piece in _written_weights(engine).items()}
        check_matches_model(path, index, shapes, group)
        restore(index, engine, optimizer, lambda pieces: read_pieces(path, index, pieces, group))
        return choice.manifest["state"]

    def snapshot(self, step: int, engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> str:
        """Copies all state to host memory. If it does not fit, disables snapshots and returns why, on every rank."""
        assert self.snapshots is not None
        if problem := self.snapshots.take(step, collect_pieces(engine, optimizer), {"step": step, **state}):
            self.snapshots = None
        return problem

    def rewind(self, step: int) -> None:
        """Removes all checkpoints newer than `step`, for a run that rolls back."""
        self._wait()
        if self.snapshots is not None:
            self.snapshots.discard_after(step)
        self.group.on_leaders(lambda: self._remove_after(step))

    def _load_snapshot(self, snapshot: dict[str, Any], engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
        assert self.snapshots is not None
        restore(snapshot["index"], engine, optimizer, partial(self.snapshots.load_into, snapshot))
        self.source = "memory"
        return snapshot["state"]

    def _prepare_folder(self) -> None:
        with os_errors_as(CheckpointError, f"cannot create the checkpoint folder {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.remove_partials(self.folder)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _reserve_now(self, tensors: dict[str, Tensor]) -> None:
        with suppress(OSError, RuntimeError):  # a save then allocates memory itself
            if self.asynchronous and self._has_room(tensors):
                self._staging = in_huge_pages(mmap.mmap(-1, pack(tensors)[1]))
                page_lock(self._staging)
        self._can_stage.set()
        with suppress(OSError, RuntimeError):
            if self.snapshots is not None:
                self.snapshots.reserve(tensors)

    def _has_room(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the host has memory for a copy of these tensors; if not, saves write them while training waits."""
        return self._staging is not None or pack(tensors)[1] < 0.8 * psutil.virtual_memory().available

    def _stage_to_host(self, pieces: Pieces, device: torch.device) -> tuple[Pieces, torch.cuda.Event | None]:
        """Copies the shards to host memory, which is reused: page faults would cost more than the copy."""
        entries, size = pack({name: piece.tensor for name, piece in pieces.items()})
        if self._staging is None or self._staging.numel() != size:
            self._staging = in_huge_pages(mmap.mmap(-1, size))
        copies = {}
        for name, staged in unpack(self._staging, entries).items():
            staged.copy_(pieces[name].tensor, non_blocking=True)
            copies[name] = replace(pieces[name], tensor=staged)
        # On a GPU, stream order protects the copies from later kernels; only the writer must wait for them.
        return copies, torch.cuda.current_stream().record_event() if device.type == "cuda" else None

    def _write_in_background(self, step: int, pieces: Pieces, metadata: str, ready: torch.cuda.Event | None) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            self._write(step, pieces, metadata)
        except BaseException as error:  # `finish` raises it in the main thread
            self._failure = error

    def _write(self, step: int, pieces: Pieces, metadata: str) -> None:
        temporary: Path | None = None
        try:
            created = self.group.on_rank_zero(lambda: checkpoint_folder.create_partial(self.folder, step).name)
            temporary = self.folder / created
            self.group.on_leaders(lambda: temporary.mkdir(exist_ok=True))
            files = write_pieces(temporary, pieces, self.group)
            manifest = {**json.loads(metadata), "torch": torch.__version__, "world": self.group.size, "files": files}
            name, kept = self.group.on_rank_zero(lambda: self._commit(step, temporary, manifest))
            self.group.on_leaders(lambda: self._follow(temporary, name, kept))
        except Exception as error:
            if temporary is not None and self.group.rank == self.group.sharing[0]:
                shutil.rmtree(temporary, ignore_errors=True)
            problem = f"the checkpoint of step {step} could not be written to {self.folder}: {error}."
            remedy = "Earlier checkpoints are intact; check free space and write permission."
            raise RunError(f"{problem} {remedy}") from error

    def _commit(self, step: int, temporary: Path, manifest: dict[str, Any]) -> tuple[str, list[str]]:
        """Returns the name of the checkpoint, and the names of those that are kept."""
        checkpoint_folder.write_manifest(temporary, manifest)
        path = checkpoint_folder.next_free_path(self.folder, step)
        fsync_and_rename(temporary, path)
        self._remove_old()
        return path.name, [kept.name for _, kept in list_checkpoints(self.folder)]

    def _follow(self, temporary: Path, name: str, kept: list[str]) -> None:
        """Does in the folder of another node what rank 0 did in its own."""
        if self.group.rank == 0:
            return
        for _, path in list_checkpoints(self.folder):
            if path.name not in kept or path.name == name:
                checkpoint_folder.remove_checkpoint(path)
        fsync_and_rename(temporary, self.folder / name)
        checkpoint_folder.remove_partials(self.folder)

    def _remove_old(self) -> None:
        """Removes checkpoints older than the newest `keep` valid ones, and other saves of those same steps."""
        newest: dict[int, Path] = {}
        of_all_nodes = valid_checkpoints if self.group.has_one_folder else list_checkpoints  # else files are elsewhere
        for step, path in of_all_nodes(self.folder):
            if path not in self._damaged_paths and len(newest) < self.keep:
                newest.setdefault(step, path)
        for step, path in list_checkpoints(self.folder):
            if newest and (step < min(newest) or newest.get(step, path) != path):
                checkpoint_folder.remove_checkpoint(path)
        checkpoint_folder.remove_partials(self.folder)

    def _remove_after(self, step: int) -> None:
        store = self.store
        if store is not None and store.checkpoints != self.folder:
            store = None  # `best` is not copied to the store
        for number, path in list_checkpoints(self.folder):
            if number > step:
                if store is not None:
                    store.undone_mark(path.name).touch()
                checkpoint_folder.remove_checkpoint(path)


def collect_pieces(engine: Engine, optimizer: Optimizer) -> Pieces:
    """Returns this rank's shards of all state, by name. A tied weight with two local copies is saved once."""
    pieces: Pieces = {}
    sharded = sharded_optimizer(optimizer)
    collapsed_dims = {} if sharded is None else sharded.collapsed_dims
    for param_shard in engine.param_shards:
        if f"weights.{param_shard.name}" in pieces:
            continue
        start, size = param_shard.offset_and_shape
        tensor = param_shard.tensor
        values: dict[str, tuple[Tensor, int | None]] = {f"weights.{param_shard.name}": (tensor.detach(), None)}
        state = optimizer.state.get(tensor, {}) if sharded is None else sharded.state_for_checkpoint(tensor)
        for key, value in state.items():
            assert isinstance(value, Tensor), f"optimizer state {key} of {param_shard.name} is {value!r}, not a tensor"
            values[f"optimizer.{param_shard.name}.{key}"] = value, collapsed_dims.get(key)
        for name, (value, dim) in values.items():
            dims = value.dim()  # a table's state may have one number per row, and a step count has none
            offsets, sizes, full_shape = list(start[:dims]), size[:dims], list(param_shard.shape[:dims])
            if dim is not None:  # in which this state has size 1
                offsets[dim], sizes[dim], full_shape[dim] = 0, 1, 1
            assert list(value.shape) == sizes, f"{name}: its shape {list(value.shape)} is not its weight's, {size}"
            pieces[name] = CheckpointPiece(value, tuple(offsets), torch.Size(full_shape))
    pieces |= _written_weights(engine)
    buffers = [named for chain in engine.chains for named in chain.named_buffers()]  # identical on every rank
    whole = {f"buffers.{name}": value for name, value in buffers if not name.endswith(FROZEN_BUFFERS)}
    whole |= {f"scale.{key}": value for key, value in engine.scale.state().items()} if engine.scale.dynamic else {}
    pieces |= weight_pieces(whole)
    if engine.outer_optimizer is not None:
        for param_shard, state in zip(engine.param_shards, engine.outer_optimizer.state):
            for key, value in state.items():
                start = param_shard.offset_and_shape[0]
                pieces[f"outer.{param_shard.name}.{key}"] = CheckpointPiece(value, start, param_shard.shape)
    return pieces | error_feedback.error_feedback_pieces(engine)


def _written_weights(engine: Engine) -> Pieces:
    """Returns this rank's shards of frozen weights that the forward changes: others have their initial values."""
    pieces: Pieces = {}
    for chain in engine.chains:
        weights = dict(chain.named_unique_parameters())
        for shard in engine.data.frozen_shards:
            if shard.name in chain.written_weights and shard.name in weights:
                weight = weights[shard.name].detach()  # the forward may have given it another storage
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                pieces[f"weights.{shard.name}"] = CheckpointPiece(local, shard.offset_and_shape[0], shard.shape)
    return pieces


def sharded_optimizer(optimizer: Optimizer) -> ShardedOptimizer | None:
    """Returns the optimizer of the dense weights if it is a ShardedOptimizer."""
    dense = getattr(optimizer, "dense", optimizer)
    return dense if isinstance(dense, ShardedOptimizer) else None


@torch.no_grad()
def restore(index: Index, engine: Engine, optimizer: Optimizer, read: Callable[[Pieces], None]) -> None:
    """Loads a verified checkpoint into an engine and its optimizer; `read` fills the shards passed to it."""
    init_optimizer_state(index, optimizer, engine.dense_shards)  # tables have theirs since they were built
    residuals = error_feedback.error_feedback_targets(engine, index)
    # A local SGD replica that the checkpoint does not have starts from the state of replica 0.
    replica_prefix = f"replica{engine.mesh['local_sgd'].index}."
    pieces = {}
    for name, piece in collect_pieces(engine, optimizer).items():
        own_name = replica_prefix + name if replica_prefix + name in index else name
        if own_name in index:
            pieces[own_name] = piece
    read(pieces | residuals)
    error_feedback.load_error_feedback(engine, residuals)
    for source, copy in share_tied_weights(engine):
        for key, value in optimizer.state[source].items():
            optimizer.state[copy][key].copy_(value)
    if (sharded := sharded_optimizer(optimizer)) is not None:
        sharded.after_load()
    engine.data.sync_weights()


def share_tied_weights(engine: Engine) -> list[tuple[Tensor, Tensor]]:
    """Copies loaded weights to the second local copies of tied ones, and returns the pairs."""
    loaded: dict[str, Tensor] = {}
    shards = [(loaded.setdefault(shard.name, shard.tensor), shard.tensor) for shard in engine.param_shards]
    pairs = [(source, copy) for source, copy in shards if source is not copy]
    for source, copy in pairs:
        copy.detach().copy_(source)
    return pairs


def init_optimizer_state(index: Index, optimizer: Optimizer, param_shards: list[ParamShard]) -> None:
    """Allocates the saved optimizer states as zeros, since optimizers create their state only in the first step."""
    entries: dict[str, Index] = {}
    for name, entry in index.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            owner, _, key = rest.rpartition(".")
            entries.setdefault(owner, {})[key] = entry
    # Such as the step: one number for a whole weight. A scalar's own moments have no dimension either.
    counts = {"step"}
    for param_shard in param_shards:
        if param_shard.shape:
            saved = entries.get(param_shard.name, {})
            counts.update(key for key, entry in saved.items() if not entry["shape"])

    step_on_device = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    sharded = sharded_optimizer(optimizer)
    for param_shard in param_shards:
        weight, state = param_shard.tensor, optimizer.state[param_shard.tensor]
        state.clear()
        for key, entry in entries.get(param_shard.name, {}).items():
            size, dtype, device = list(weight.shape), dcp_storage.dtype_of(entry), weight.device
            if key in counts and not entry["shape"]:  # only fused and capturable optimizers keep it on the device
                state[key] = torch.zeros((), dtype=dtype, device=device if step_on_device.get(id(weight)) else "cpu")
                continue
            if entry["dtype"] == index[f"weights.{param_shard.name}"]["dtype"]:
                dtype = weight.dtype
            if sharded is not None and (dim := sharded.collapsed_dims.get(key)) is not None:
                size[dim] = 1
            zeros = weight.new_zeros if sharded is None else partial(sharded.state_zeros, weight, key)
            state[key] = zeros(size, dtype=dtype)


def check_matches_model(path: Path, index: Index, needed: dict[str, torch.Size], group: CheckpointGroup) -> None:
    """Raises CheckpointError, on every rank, if the checkpoint's parameters are not those of the model."""
    all_shapes = {name: shape for part in group.all_gather(needed) for name, shape in part.items()}
    for name in sorted(all_shapes.keys() | {name for name in index if name.startswith("weights.")}):
        expected = list(all_shapes[name]) if name in all_shapes else "nothing"
        stored = index[name]["shape"] if name in index else "nothing"
        if expected != stored:
            problem = f"for {name.removeprefix('weights.')} it has {stored}, this model needs {expected}"
            raise CheckpointError(f"checkpoint {path} is of another model: {problem}; load it with its own.")
