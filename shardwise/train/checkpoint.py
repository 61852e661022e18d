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
from shardwise.files import put_in_place
from shardwise.guard.memory import Memory
from shardwise.optim.pieces import Pieced
from shardwise.parallel.engine import Engine
from shardwise.parallel.holding import Holding, place
from shardwise.train import owed
from shardwise.train.pieces import Index, Piece, dtype_of, read_index, read_pieces, write_pieces
from shardwise.train.stored import (
    Peers,
    free_name,
    good_checkpoints,
    make_partial,
    newest_good,
    remove,
    remove_leftovers,
    saved,
    write_manifest,
)

__all__ = ["Checkpoints", "good_checkpoints", "load_weights"]


class Checkpoints:
    """The checkpoints of one run. Every rank makes one, and calls the same methods in the same order."""

    def __init__(
        self, folder: Path, keep: int, asynchronous: bool, memory: Path | None = None, layout: str = ""
    ):  # fmt: skip
        assert keep >= 1, "the newest good checkpoint is never removed"
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self.damaged: list[str] = []
        """What was wrong with the checkpoints that the last `load` passed over, a sentence each."""
        self.source = ""
        """Where the last `load` took it from: memory, disk or, where there was none, nowhere."""
        self._peers = Peers.of_the_world()
        self.memory = None if memory is None else Memory(memory, layout, self._peers.all)
        """Snapshots, where there is room for them."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._memory: dict[str, Tensor] = {}
        self._bad: set[Path] = set()
        self._peers.first(self._start)

    def save(self, step: int, engine: Engine, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Saves everything that training goes on from. `state` is small and fit for JSON; that of rank 0 counts.

        Waits for the save before this one and, if it failed, raises and begins nothing.
        """
        self.finish()
        pieces = owned(pieces_of(engine, optimizer), engine.mesh["apart"].index)
        about = json.dumps({"step": step, "layout": str(engine.mesh.layout), "state": {"step": step, **state}})
        if not self.asynchronous:
            self._write(step, pieces, about)
            return
        pieces, ready = self._copy(pieces, engine.mesh.device)
        self._thread = threading.Thread(target=self._write_behind, args=(step, pieces, about, ready), daemon=True)
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
        kept = self.memory.newest() if self.memory is not None and step is None else None
        if kept is not None and all(
            number <= kept["step"] for number, _ in self._peers.first(lambda: saved(self.folder))
        ):
            return self._recall(kept, engine, optimizer)
        choice = newest_good(self.folder, self._peers, step)
        self.damaged = [sentence for _, sentence in choice.damaged]
        self._bad.update(path for path, _ in choice.damaged)
        if kept is not None and (choice.path is None or choice.manifest["step"] < kept["step"]):
            return self._recall(kept, engine, optimizer)
        self.source = "disk" if choice.path is not None else ""
        if choice.path is None:
            return None
        path, peers, index = choice.path, self._peers, read_index(choice.path)
        demand_fit(path, index, {f"weights.{holding.name}": holding.shape for holding in engine.holdings}, peers)
        restore(index, engine, optimizer, lambda pieces: read_pieces(path, index, pieces, peers))
        state: dict[str, Any] = choice.manifest["state"]
        return state

    def snapshot(self, step: int, engine: Engine, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
        """Copies everything to memory. Gives a sentence, on every rank, where there is no room and never will be."""
        assert self.memory is not None
        if self.memory.talks:
            self._wait()  # it talks over the group that writes use
        problem = self.memory.take(step, pieces_of(engine, optimizer), {"step": step, **state})
        if problem:
            self.memory = None
        return problem

    def rewind(self, step: int) -> None:
        """Removes every checkpoint newer than `step`, for a run that goes back to take another way."""
        self._wait()
        if self.memory is not None:
            self.memory.forget_after(step)
        self._peers.first(lambda: self._remove_after(step))

    # Behind the scenes, on rank 0 where it is about the folder

    def _recall(self, kept: dict[str, Any], engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        assert self.memory is not None
        restore(kept["index"], engine, optimizer, partial(self.memory.fill, kept))
        self.source = "memory"
        state: dict[str, Any] = kept["state"]
        return state

    def _start(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoints can be kept in {self.folder}: {error.strerror}.") from None
        remove_leftovers(self.folder)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, pieces: dict[str, Piece], device: torch.device) -> tuple[dict[str, Piece], torch.cuda.Event | None]:
        """The pieces in memory of our own, which is kept for the next time: fresh pages cost more than the copy."""
        on_gpu = device.type == "cuda"
        for name, piece in pieces.items():
            held = self._memory.get(name)
            if held is None or held.shape != piece.tensor.shape or held.dtype != piece.tensor.dtype:
                held = torch.empty_like(piece.tensor, device="cpu", pin_memory=on_gpu)
                self._memory[name] = held
            held.copy_(piece.tensor, non_blocking=True)
        copies = {name: replace(piece, tensor=self._memory[name]) for name, piece in pieces.items()}
        if not on_gpu:
            return copies, None
        ready = torch.cuda.Event()  # later kernels run after the copies by themselves; only the writer has to wait
        ready.record()
        return copies, ready

    def _write_behind(self, step: int, pieces: dict[str, Piece], about: str, ready: torch.cuda.Event | None) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            self._write(step, pieces, about)
        except BaseException as error:  # raised by `finish`, in the thread that can act on it
            self._failure = error

    def _write(self, step: int, pieces: dict[str, Piece], about: str) -> None:
        partial: Path | None = None
        try:
            partial = self._peers.first(lambda: make_partial(self.folder, step))
            files = write_pieces(partial, pieces, self._peers)
            facts = {**json.loads(about), "torch": torch.__version__, "world": self._peers.size, "files": files}
            self._peers.first(lambda: self._commit(step, partial, facts))
        except Exception as error:
            if partial is not None and self._peers.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}. "
                "The ones before it are whole; give the folder room and write access."
            ) from error

    def _commit(self, step: int, partial: Path, facts: dict[str, Any]) -> None:
        write_manifest(partial, facts)
        put_in_place(partial, free_name(self.folder, step))
        self._retire()

    def _retire(self) -> None:
        """Removes what is older than the newest `keep` good ones, and what else there is of their steps."""
        kept: dict[int, Path] = {}
        for step, path in good_checkpoints(self.folder):
            if path not in self._bad and len(kept) < self.keep:
                kept.setdefault(step, path)
        for step, path in saved(self.folder):
            if kept and (step < min(kept) or kept.get(step, path) != path):
                remove(path)
        remove_leftovers(self.folder)

    def _remove_after(self, step: int) -> None:
        for number, path in saved(self.folder):
            if number > step:
                remove(path)


def load_weights(folder: Path, tensors: Mapping[str, Tensor], step: int | None = None) -> dict[str, Any] | None:
    """Fills whole tensors, by parameter name, from the newest good checkpoint or that of `step`, in one process.

    Returns its state, or None where there is no checkpoint.
    """
    alone = Peers()
    choice = newest_good(folder, alone, step)
    if choice.path is None:
        return None
    index = read_index(choice.path)
    weights = {f"weights.{name}": tensor.detach() for name, tensor in tensors.items()}
    demand_fit(choice.path, index, {name: tensor.shape for name, tensor in weights.items()}, alone)
    pieces = {name: Piece(tensor, (0,) * tensor.dim(), tensor.shape) for name, tensor in weights.items()}
    read_pieces(choice.path, index, pieces, alone)
    state: dict[str, Any] = choice.manifest["state"]
    return state


# What is saved of an engine


def pieces_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Piece]:
    """What this rank has of everything, each name once: of a weight that is tied in a V it holds two copies."""
    pieces: dict[str, Piece] = {}
    for holding in engine.holdings:
        if f"weights.{holding.name}" in pieces:
            continue
        start, size = place(holding, engine.mesh)
        values = {f"weights.{holding.name}": holding.tensor.detach()}
        ours = pieced(optimizer)
        state = optimizer.state.get(holding.tensor, {}) if ours is None else ours.saved(holding.tensor)
        for key, value in state.items():
            assert isinstance(value, Tensor), f"the optimizer keeps {key} of {holding.name} as {value!r}, no tensor"
            values[f"optimizer.{holding.name}.{key}"] = value
        for name, value in values.items():
            if value.dim() == 0:
                pieces[name] = Piece(value, (), value.shape)
                continue
            dims = value.dim()  # a table's state may have one number for a row
            begin, part, whole = list(start[:dims]), size[:dims], list(holding.shape[:dims])
            side = collapsed(optimizer, name)
            if side is not None:
                begin[side], part[side], whole[side] = 0, 1, 1
            assert list(value.shape) == part, f"{name}: {list(value.shape)} does not lie as its weight, {size}"
            pieces[name] = Piece(value, tuple(begin), torch.Size(whole))
    for chain in engine.chains:
        for name, value in chain.named_buffers():  # every rank has the same
            pieces[f"buffers.{name}"] = Piece(value, (0,) * value.dim(), value.shape)
    if engine.scale.dynamic:
        for key, value in engine.scale.state().items():
            pieces[f"scale.{key}"] = Piece(value, (), value.shape)
    if engine.meeting is not None:
        for number, holding in enumerate(engine.holdings):
            for key, value in engine.meeting.kept(number).items():
                pieces[f"outer.{holding.name}.{key}"] = Piece(value, place(holding, engine.mesh)[0], holding.shape)
    return pieces | owed.owed(engine)


def owned(pieces: dict[str, Piece], replica: int) -> dict[str, Piece]:
    """What a replica that trains apart saves: the first under plain names, others what differs from it under theirs."""
    if not replica:
        return pieces
    return {f"replica{replica}.{name}": piece for name, piece in pieces.items() if not name.startswith("outer.")}


def collapsed(optimizer: torch.optim.Optimizer, name: str) -> int | None:
    """The side of a weight along which this state of its optimizer has a single number, if there is one."""
    ours = pieced(optimizer)
    return ours.collapsed.get(name.rpartition(".")[2]) if ours is not None and name.startswith("optimizer.") else None


def pieced(optimizer: torch.optim.Optimizer) -> Pieced | None:
    """The optimizer of dense weights, where it is one of ours."""
    dense = getattr(optimizer, "dense", optimizer)
    return dense if isinstance(dense, Pieced) else None


@torch.no_grad()
def restore(
    index: Index, engine: Engine, optimizer: torch.optim.Optimizer, read: Callable[[dict[str, Piece]], None]
) -> None:
    """Fills an engine and its optimizer from a checkpoint that was examined. `read` fills pieces."""
    make_state(index, optimizer, engine.holdings)
    debts = owed.wanted(engine, index)
    # A replica that was not there before goes on from the first.
    own = f"replica{engine.mesh['apart'].index}."
    named = {own + name if own + name in index else name: piece for name, piece in pieces_of(engine, optimizer).items()}
    pieces = {name: piece for name, piece in named.items() if name in index}
    read(pieces | debts)
    owed.take(engine, debts)
    first: dict[str, Tensor] = {}
    for holding in engine.holdings:
        source = first.setdefault(holding.name, holding.tensor)
        if source is not holding.tensor:
            holding.tensor.detach().copy_(source)
            for key, value in optimizer.state[source].items():
                optimizer.state[holding.tensor][key].copy_(value)
    ours = pieced(optimizer)
    if ours is not None:
        ours.loaded()
    engine.data.publish()


def make_state(index: Index, optimizer: torch.optim.Optimizer, holdings: list[Holding]) -> None:
    """Gives the optimizer, which makes its state only in its first step, the very state that was saved, as zeros."""
    entries: dict[str, Index] = {}
    for name, entry in index.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            owner, _, key = rest.rpartition(".")
            entries.setdefault(owner, {})[key] = entry
    beside = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    for holding in holdings:
        if holding.where is not None:
            continue  # a table's state is there from the start
        weight, state = holding.tensor, optimizer.state[holding.tensor]
        state.clear()
        for key, entry in entries.get(holding.name, {}).items():
            if not entry["shape"]:
                # A count of steps: only fused and capturable optimizers want it on the weight's device.
                device = weight.device if beside.get(id(weight)) else torch.device("cpu")
                state[key] = torch.zeros((), dtype=dtype_of(entry), device=device)
            else:
                same = entry["dtype"] == index[f"weights.{holding.name}"]["dtype"]
                size, side = list(weight.shape), collapsed(optimizer, f"optimizer.{holding.name}.{key}")
                if side is not None:
                    size[side] = 1
                state[key] = weight.new_zeros(size, dtype=weight.dtype if same else dtype_of(entry))


def demand_fit(path: Path, index: Index, needed: dict[str, torch.Size], peers: Peers) -> None:
    """Raises, on every rank and before anything is loaded, if a checkpoint is of another model."""
    everything: dict[str, torch.Size] = {}
    for part in peers.all(needed):
        everything.update(part)
    for name in sorted(everything.keys() | {name for name in index if name.startswith("weights.")}):
        here = list(everything[name]) if name in everything else "nothing"
        there = index[name]["shape"] if name in index else "nothing"
        if here != there:
            raise CheckpointError(
                f"checkpoint {path} is of another model: for {name.removeprefix('weights.')} it has {there}, this one "
                f"needs {here}. Load it with the model that it was saved from."
            )
