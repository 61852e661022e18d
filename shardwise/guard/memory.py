"""Snapshots in memory that outlives a worker, on its machine and on another.

    /dev/shm/shardwise-<run>-<node>/
        rank-3.0, rank-3.1              the bytes of a rank's tensors, of its last two snapshots in turn
        rank-3.0.json, rank-3.1.json    step, names, shapes and a sum over the bytes; written last

A rank copies its tensors there; a thread sums the bytes up, then the snapshot counts. Where a run has several machines
the thread also sends them to the rank's keeper on the next one, which keeps them like its own: a machine that comes
back with empty memory gets them from there. A snapshot is loaded where all ranks have one of that step and layout.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.files import write_text

SHARED = Path("/dev/shm")
SLOTS = 2
ALIGN = 64
SHARE = 0.01  # of the time, for snapshots
Gather = Callable[[Any], list[Any]]
"""The values of all ranks, on every rank."""


def memory_of(run: Path, node: int) -> str:
    """Where a machine keeps the snapshots of a run; nowhere if it has no such memory."""
    key = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return str(SHARED / f"shardwise-{key}-{node}") if SHARED.is_dir() else ""


class Piece(Protocol):
    """See `shardwise.train.pieces`."""

    @property
    def tensor(self) -> Tensor: ...

    @property
    def shape(self) -> torch.Size: ...


class Memory:
    """What one rank keeps. Every rank makes one, and calls the same methods in the same order."""

    def __init__(self, folder: Path, layout: str, gather: Gather):
        self.folder, self.layout, self.gather = folder, layout, gather
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.shared = here
        self.group: dist.ProcessGroup | None = None
        if self.size > 1 and set(gather(here)) == {here} and here < self.size:  # as many on each machine
            self.group = dist.new_group(backend="gloo", group_desc="snapshot")
        self.keeper = (self.rank + here) % self.size
        self.ward = (self.rank - here) % self.size
        """The ranks that keep our snapshots, and whose we keep: the same place on the next machine, and the last."""
        self._slot, self._taken, self._last, self._spacing = 0, 0, (0, 0.0), 1
        self._thread: threading.Thread | None = None

    def room(self, tensors: Mapping[str, Tensor]) -> str:
        """Empty, or a sentence where this machine has no room for the snapshots of its ranks."""
        copies = SLOTS * (2 if self.group is not None else 1) * self.shared
        need = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            self.folder.mkdir(exist_ok=True)
            held = os.statvfs(self.folder)
            free = min(held.f_bavail * held.f_frsize, psutil.virtual_memory().available // 2)
        except OSError as error:
            return f"no snapshots are taken: {error}."
        if need <= free:
            return ""
        return (
            f"no snapshots are taken: this machine's ranks need {need / 2**30:.3g} GiB for theirs, and "
            f"{free / 2**30:.3g} can be had in {self.folder.parent}; restarts go on from checkpoints on the disk."
        )

    def due(self, step: int, every: int) -> bool:
        return step % max(every, self._spacing) == 0

    @property
    def talks(self) -> bool:
        """Whether ranks talk to each other when the next one is taken."""
        return self._taken in (0, SLOTS)

    def take(self, step: int, pieces: Mapping[str, Piece], state: Mapping[str, Any]) -> str:
        """A snapshot. Gives a sentence, on every rank, where there is no room and never will be.

        Once each slot has its memory it is known how long one takes; more come so late that it is `SHARE` of all time.
        """
        begin = time.perf_counter()
        tensors = {name: piece.tensor for name, piece in pieces.items()}
        problems = [problem for problem in self.gather(self.room(tensors)) if problem] if not self._taken else []
        if problems:
            return str(problems[0])
        kinds = {name: str(piece.tensor.dtype).removeprefix("torch.") for name, piece in pieces.items()}
        index = {name: {"dtype": kinds[name], "shape": list(piece.shape)} for name, piece in pieces.items()}
        self.put(step, tensors, {"index": index, "state": state})
        self._taken += 1
        if self._taken == SLOTS + 1:
            steps, seconds = step - self._last[0], begin - self._last[1]
            stalls = self.gather((time.perf_counter() - begin) * steps / seconds)
            self._spacing = math.ceil(max(stalls) / SHARE)
        self._last = step, begin
        return ""

    @torch.no_grad()
    def fill(self, head: Mapping[str, Any], pieces: Mapping[str, Piece]) -> None:
        tensors = self.tensors(head)
        for name, piece in pieces.items():
            piece.tensor.copy_(tensors[name])

    def put(self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Copies the tensors. They count as a snapshot when the thread behind this has summed them up."""
        self.finish()
        self._slot = (self._slot + 1) % SLOTS
        entries: list[tuple[str, str, list[int], int]] = []
        end = 0
        for name, tensor in tensors.items():
            entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        end = max(end, ALIGN)
        self._head(self.rank, self._slot).unlink(missing_ok=True)  # nobody is to believe what is half overwritten
        held = self._bytes(self.rank, self._slot, end)
        for (_, _, _, start), tensor in zip(entries, tensors.values(), strict=True):
            _part(held, start, tensor.dtype, list(tensor.shape)).copy_(tensor)
        head = {"step": step, "layout": self.layout, "entries": entries, "bytes": end, **about}
        self._thread = threading.Thread(target=self._behind, args=(head, held, self._slot), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def newest(self) -> dict[str, Any] | None:
        """The newest snapshot that all ranks have, brought here where only its keeper has it: what it is about."""
        self.finish()
        own = {rank: self._good(rank) for rank in {self.rank, self.ward}}
        everywhere = self.gather({rank: [head["step"] for head in heads.values()] for rank, heads in own.items()})
        holders: dict[int, dict[int, list[int]]] = {}
        for holder, there in enumerate(everywhere):
            for rank, steps in there.items():
                for step in steps:
                    holders.setdefault(step, {}).setdefault(rank, []).append(holder)
        whole = [step for step, ranks in holders.items() if len(ranks) == self.size]
        if not whole:
            return None
        step = max(whole)
        for rank, there in sorted(holders[step].items()):
            if rank not in there:
                self._bring(step, rank, there[0], own)
        slot, head = next((slot, head) for slot, head in own[self.rank].items() if head["step"] == step)
        self._slot = slot
        self.forget_after(step)  # of an attempt that may have gone another way
        return head

    def tensors(self, head: Mapping[str, Any]) -> dict[str, Tensor]:
        held = self._bytes(self.rank, self._slot, head["bytes"])
        return {name: _part(held, start, getattr(torch, dtype), shape) for name, dtype, shape, start in head["entries"]}

    def forget_after(self, step: int) -> None:
        for rank in {self.rank, self.ward}:
            for slot, head in self._good(rank).items():
                if head["step"] > step:
                    self._head(rank, slot).unlink(missing_ok=True)

    # Behind the scenes

    def _behind(self, head: dict[str, Any], held: Tensor, slot: int) -> None:
        with suppress(OSError, RuntimeError):  # a snapshot that could not be taken does not count
            write_head(self._head(self.rank, slot), head, held)
            if self.group is not None:
                self._swap(head, held, slot)

    def _swap(self, head: dict[str, Any], held: Tensor, slot: int) -> None:
        """Sends ours to the keeper, and takes in our ward's."""
        words = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
        sizes = torch.empty(2, dtype=torch.int64)
        self._exchange(torch.tensor([held.numel(), words.numel()]), sizes)
        heard = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._exchange(words, heard)
        self._head(self.ward, slot).unlink(missing_ok=True)
        kept = self._bytes(self.ward, slot, int(sizes[0]))
        self._exchange(held, kept)
        write_head(self._head(self.ward, slot), json.loads(bytes(heard.numpy())), kept)

    def _exchange(self, out: Tensor, into: Tensor) -> None:
        sent = dist.isend(out, self.keeper, group=self.group)
        dist.recv(into, self.ward, group=self.group)
        assert sent is not None
        sent.wait()

    def _bring(self, step: int, rank: int, holder: int, own: dict[int, dict[int, dict[str, Any]]]) -> None:
        """The snapshot of a rank from its keeper to itself."""
        found = [(s, h) for s, h in own.get(rank, {}).items() if h["step"] == step] if self.rank == holder else []
        slot, head = self.gather(found[0] if found else None)[holder]
        if self.rank == holder:
            dist.send(self._bytes(rank, slot, head["bytes"]), rank, group=self.group)
        elif self.rank == rank:
            self.folder.mkdir(exist_ok=True)
            held = self._bytes(rank, slot, head["bytes"])
            dist.recv(held, holder, group=self.group)
            write_head(self._head(rank, slot), head, held)
            own[rank][slot] = head

    def _good(self, rank: int) -> dict[int, dict[str, Any]]:
        """By slot, what is kept of a rank in this layout, and holds what was written."""
        found = {}
        for slot in range(SLOTS):
            with suppress(OSError, ValueError, KeyError, RuntimeError):
                head = json.loads(self._head(rank, slot).read_text())
                path = self._data(rank, slot)
                fits = head["layout"] == self.layout and path.stat().st_size >= head["bytes"]
                if fits and _sum(self._bytes(rank, slot, head["bytes"])) == head["sum"]:
                    found[slot] = head
        return found

    def _head(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank}.{slot}.json"

    def _data(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank}.{slot}"

    def _bytes(self, rank: int, slot: int, size: int) -> Tensor:
        """The file's memory itself."""
        return torch.from_file(str(self._data(rank, slot)), shared=True, size=size, dtype=torch.uint8)


def write_head(path: Path, head: dict[str, Any], held: Tensor) -> None:
    write_text(path, json.dumps({**head, "sum": _sum(held)}))


def _sum(held: Tensor) -> int:
    """Changes with any bit that flips."""
    return int(held.view(torch.int64).sum())


def _part(held: Tensor, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return held[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
