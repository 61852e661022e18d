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

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 2
ALIGNMENT = 64
MAX_OVERHEAD = 0.01  # of the time, for snapshots
Gather = Callable[[Any], list[Any]]
"""The values of all ranks, on every rank."""


def snapshot_folder(run: Path, node: int) -> str:
    """Where a machine keeps the snapshots of a run; nowhere if it has no such memory."""
    key = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return str(SHARED_MEMORY / f"shardwise-{key}-{node}") if SHARED_MEMORY.is_dir() else ""


class TensorPiece(Protocol):
    """See `shardwise.train.dcp_storage`."""

    @property
    def tensor(self) -> Tensor: ...

    @property
    def shape(self) -> torch.Size: ...


class SnapshotStore:
    """What one rank keeps. Every rank makes one, and calls the same methods in the same order."""

    def __init__(self, folder: Path, layout: str, gather: Gather):
        self.folder, self.layout, self.gather = folder, layout, gather
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.ranks_per_node = local_world_size
        self.group: dist.ProcessGroup | None = None
        if (
            self.size > 1 and set(gather(local_world_size)) == {local_world_size} and local_world_size < self.size
        ):  # as many on each machine
            self.group = dist.new_group(backend="gloo", group_desc="snapshot")
        self.backup_rank = (self.rank + local_world_size) % self.size
        self.backed_up_rank = (self.rank - local_world_size) % self.size
        """The ranks that keep our snapshots, and whose we keep: the same place on the next machine, and the last."""
        self._slot, self._snapshots_taken, self._last_snapshot, self._min_interval = 0, 0, (0, 0.0), 1
        self._thread: threading.Thread | None = None

    def check_space(self, tensors: Mapping[str, Tensor]) -> str:
        """Empty, or a sentence where this machine has no room for the snapshots of its ranks."""
        copies = SLOTS * (2 if self.group is not None else 1) * self.ranks_per_node
        need = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            self.folder.mkdir(exist_ok=True)
            buffer = os.statvfs(self.folder)
            free = min(buffer.f_bavail * buffer.f_frsize, psutil.virtual_memory().available // 2)
        except OSError as error:
            return f"no snapshots are taken: {error}."
        if need <= free:
            return ""
        return (
            f"no snapshots are taken: this machine's ranks need {need / 2**30:.3g} GiB for theirs, and "
            f"{free / 2**30:.3g} can be had in {self.folder.parent}; restarts go on from checkpoints on the disk."
        )

    def is_due(self, step: int, every: int) -> bool:
        return step % max(every, self._min_interval) == 0

    @property
    def needs_communication(self) -> bool:
        """Whether ranks talk to each other when the next one is taken."""
        return self._snapshots_taken in (0, SLOTS)

    def take(self, step: int, pieces: Mapping[str, TensorPiece], state: Mapping[str, Any]) -> str:
        """A snapshot. Gives a sentence, on every rank, where there is no room and never will be.

        Once each slot has its memory it is known how long one takes; more come so late that it is `SHARE` of all time.
        """
        begin = time.perf_counter()
        tensors = {name: piece.tensor for name, piece in pieces.items()}
        problems = (
            [problem for problem in self.gather(self.check_space(tensors)) if problem]
            if not self._snapshots_taken
            else []
        )
        if problems:
            return str(problems[0])
        dtypes = {name: str(piece.tensor.dtype).removeprefix("torch.") for name, piece in pieces.items()}
        index = {name: {"dtype": dtypes[name], "shape": list(piece.shape)} for name, piece in pieces.items()}
        self.write(step, tensors, {"index": index, "state": state})
        self._snapshots_taken += 1
        if self._snapshots_taken == SLOTS + 1:
            steps, seconds = step - self._last_snapshot[0], begin - self._last_snapshot[1]
            stalls = self.gather((time.perf_counter() - begin) * steps / seconds)
            self._min_interval = math.ceil(max(stalls) / MAX_OVERHEAD)
        self._last_snapshot = step, begin
        return ""

    @torch.no_grad()
    def load_into(self, header: Mapping[str, Any], pieces: Mapping[str, TensorPiece]) -> None:
        tensors = self.tensors(header)
        for name, piece in pieces.items():
            piece.tensor.copy_(tensors[name])

    def write(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Copies the tensors. They count as a snapshot when the thread behind this has summed them up."""
        self.finish()
        self._slot = (self._slot + 1) % SLOTS
        entries: list[tuple[str, str, list[int], int]] = []
        end = 0
        for name, tensor in tensors.items():
            entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        end = max(end, ALIGNMENT)
        self._header_path(self.rank, self._slot).unlink(
            missing_ok=True
        )  # nobody is to believe what is half overwritten
        buffer = self._mapped_bytes(self.rank, self._slot, end)
        for (_, _, _, start), tensor in zip(entries, tensors.values(), strict=True):
            _tensor_view(buffer, start, tensor.dtype, list(tensor.shape)).copy_(tensor)
        header = {"step": step, "layout": self.layout, "entries": entries, "bytes": end, **metadata}
        self._thread = threading.Thread(target=self._finalize, args=(header, buffer, self._slot), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def latest_complete(self) -> dict[str, Any] | None:
        """The newest snapshot that all ranks have, brought here where only its keeper has it: what it is about."""
        self.finish()
        local_headers = {rank: self._valid_headers(rank) for rank in {self.rank, self.backed_up_rank}}
        all_steps = self.gather(
            {rank: [header["step"] for header in headers.values()] for rank, headers in local_headers.items()}
        )
        holders: dict[int, dict[int, list[int]]] = {}
        for holder, there in enumerate(all_steps):
            for rank, steps in there.items():
                for step in steps:
                    holders.setdefault(step, {}).setdefault(rank, []).append(holder)
        complete = [step for step, ranks in holders.items() if len(ranks) == self.size]
        if not complete:
            return None
        step = max(complete)
        for rank, there in sorted(holders[step].items()):
            if rank not in there:
                self._fetch_backup(step, rank, there[0], local_headers)
        slot, header = next(
            (slot, header) for slot, header in local_headers[self.rank].items() if header["step"] == step
        )
        self._slot = slot
        self.discard_after(step)  # of an attempt that may have gone another way
        return header

    def tensors(self, header: Mapping[str, Any]) -> dict[str, Tensor]:
        buffer = self._mapped_bytes(self.rank, self._slot, header["bytes"])
        return {
            name: _tensor_view(buffer, start, getattr(torch, dtype), shape)
            for name, dtype, shape, start in header["entries"]
        }

    def discard_after(self, step: int) -> None:
        for rank in {self.rank, self.backed_up_rank}:
            for slot, header in self._valid_headers(rank).items():
                if header["step"] > step:
                    self._header_path(rank, slot).unlink(missing_ok=True)

    # Behind the scenes

    def _finalize(self, header: dict[str, Any], buffer: Tensor, slot: int) -> None:
        with suppress(OSError, RuntimeError):  # a snapshot that could not be taken does not count
            write_header(self._header_path(self.rank, slot), header, buffer)
            if self.group is not None:
                self._exchange_backups(header, buffer, slot)

    def _exchange_backups(self, header: dict[str, Any], buffer: Tensor, slot: int) -> None:
        """Sends ours to the keeper, and takes in our ward's."""
        encoded = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        sizes = torch.empty(2, dtype=torch.int64)
        self._exchange(torch.tensor([buffer.numel(), encoded.numel()]), sizes)
        received = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._exchange(encoded, received)
        self._header_path(self.backed_up_rank, slot).unlink(missing_ok=True)
        backup = self._mapped_bytes(self.backed_up_rank, slot, int(sizes[0]))
        self._exchange(buffer, backup)
        write_header(self._header_path(self.backed_up_rank, slot), json.loads(bytes(received.numpy())), backup)

    def _exchange(self, out: Tensor, into: Tensor) -> None:
        sent = dist.isend(out, self.backup_rank, group=self.group)
        dist.recv(into, self.backed_up_rank, group=self.group)
        assert sent is not None
        sent.wait()

    def _fetch_backup(
        self, step: int, rank: int, holder: int, local_headers: dict[int, dict[int, dict[str, Any]]]
    ) -> None:
        """The snapshot of a rank from its keeper to itself."""
        found = (
            [(s, h) for s, h in local_headers.get(rank, {}).items() if h["step"] == step] if self.rank == holder else []
        )
        slot, header = self.gather(found[0] if found else None)[holder]
        if self.rank == holder:
            dist.send(self._mapped_bytes(rank, slot, header["bytes"]), rank, group=self.group)
        elif self.rank == rank:
            self.folder.mkdir(exist_ok=True)
            buffer = self._mapped_bytes(rank, slot, header["bytes"])
            dist.recv(buffer, holder, group=self.group)
            write_header(self._header_path(rank, slot), header, buffer)
            local_headers[rank][slot] = header

    def _valid_headers(self, rank: int) -> dict[int, dict[str, Any]]:
        """By slot, what is kept of a rank in this layout, and holds what was written."""
        found = {}
        for slot in range(SLOTS):
            with suppress(OSError, ValueError, KeyError, RuntimeError):
                header = json.loads(self._header_path(rank, slot).read_text())
                path = self._data_path(rank, slot)
                fits = header["layout"] == self.layout and path.stat().st_size >= header["bytes"]
                if fits and _checksum(self._mapped_bytes(rank, slot, header["bytes"])) == header["sum"]:
                    found[slot] = header
        return found

    def _header_path(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank}.{slot}.json"

    def _data_path(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank}.{slot}"

    def _mapped_bytes(self, rank: int, slot: int, size: int) -> Tensor:
        """The file's memory itself."""
        return torch.from_file(str(self._data_path(rank, slot)), shared=True, size=size, dtype=torch.uint8)


def write_header(path: Path, header: dict[str, Any], buffer: Tensor) -> None:
    write_text(path, json.dumps({**header, "sum": _checksum(buffer)}))


def _checksum(buffer: Tensor) -> int:
    """Changes with any bit that flips."""
    return int(buffer.view(torch.int64).sum())


def _tensor_view(buffer: Tensor, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
