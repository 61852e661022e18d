"""In-memory snapshots of the training state: in shared memory, which outlives the worker, and on a second node.

    /dev/shm/shardwise-<run>-<node>-<random>/
        rank-3.0, rank-3.1              tensor bytes of the last two snapshots of a rank
        rank-3.0.json, rank-3.1.json    step, names, shapes and a checksum; written last

A rank copies its tensors there. A thread adds the checksum that makes a snapshot valid and, in a multi-node run, sends
it to a backup rank on the next node. What a restart loads is in docs/explanation/restarts.md."""

import hashlib
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.files import parse_json, write_text
from shardwise.host_memory import checksum, in_huge_pages, pack, page_lock, unpack

SLOTS = 2
MAX_OVERHEAD = 0.01  # share of training time that snapshots may take
Headers = dict[int, dict[str, Any]]  # the headers of a rank's snapshots, by slot
Gather = Callable[[Any], list[Any]]  # all-gathers a JSON value
Pieces = Mapping[str, Any]  # local shards, with the shapes of their full tensors: those of a checkpoint


def snapshot_key(run: Path, node: int) -> str:
    """Returns the part of a snapshot folder's name that tells the run and the node."""
    return f"{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}-{node}"


class SnapshotStore:
    """The snapshots of one rank. All ranks call the same methods in the same order."""

    def __init__(self, folder: Path, layout: str, gather: Gather):
        self.folder, self.layout, self.gather = folder, layout, gather
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.group: dist.ProcessGroup | None = None
        is_uniform = self.size > 1 and set(gather(self.ranks_per_node)) == {self.ranks_per_node}
        if is_uniform and self.ranks_per_node < self.size:  # several nodes with equally many ranks
            self.group = dist.new_group(backend="gloo", group_desc="snapshot")
        self.backup_rank = (self.rank + self.ranks_per_node) % self.size  # on the next node; keeps copies of ours
        self.backed_up_rank = (self.rank - self.ranks_per_node) % self.size  # on the previous one; we copy its
        self._slot, self._snapshots_taken, self._last_snapshot, self._min_interval = 0, 0, (0, 0.0), 1
        self._thread: threading.Thread | None = None
        self._space_problem: str | None = None
        self._buffers: dict[tuple[int, int], Tensor] = {}  # mapped files by rank and slot

    def check_space(self, tensors: Mapping[str, Tensor]) -> str:
        """Returns an error message if this node has no room for the snapshots of its ranks; otherwise empty."""
        copies = SLOTS * (2 if self.group is not None else 1) * self.ranks_per_node
        need = copies * sum(tensor.nbytes for tensor in tensors.values())
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            disk = os.statvfs(self.folder)
            free = min(disk.f_bavail * disk.f_frsize, psutil.virtual_memory().available // 2)
        except OSError as error:
            return f"snapshots are disabled: {error}."
        if need <= free:
            return ""
        sizes = f"the ranks of this node need {need / 2**30:.3g} GiB, but only {free / 2**30:.3g} GiB are available"
        return f"snapshots are disabled: {sizes} in {self.folder.parent}; restarts load checkpoints from disk."

    def agree_on_space(self, tensors: Mapping[str, Tensor]) -> str:
        """Returns, on every rank, why a node has no room for snapshots; empty if all have. Checked once."""
        if self._space_problem is None:
            self._space_problem = next((str(why) for why in self.gather(self.check_space(tensors)) if why), "")
        return self._space_problem

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Page-locks the memory of all slots, if there is room for them."""
        if not self._space_problem:
            for slot in range(SLOTS):
                page_lock(self._mapped_bytes(self.rank, slot, pack(tensors)[1]))

    def is_due(self, step: int, every: int) -> bool:
        return step % max(every, self._min_interval) == 0

    def take(self, step: int, pieces: Pieces, state: Mapping[str, Any]) -> str:
        """Takes a snapshot. Returns an error message, the same on every rank, if a node has no room for snapshots. The
        first snapshot in each slot also allocates memory. The next one after these is timed, to set the minimum
        interval that keeps the overhead of snapshots below `MAX_OVERHEAD`."""
        begin = time.perf_counter()
        tensors = {name: piece.tensor for name, piece in pieces.items()}
        if problem := self.agree_on_space(tensors):
            return problem
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
    def load_into(self, header: Mapping[str, Any], pieces: Pieces) -> None:
        tensors = unpack(self._mapped_bytes(self.rank, self._slot, header["bytes"]), header["entries"])
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            page_lock(self._mapped_bytes(self.rank, self._slot, header["bytes"]))
        for name, piece in pieces.items():
            piece.tensor.copy_(tensors[name])

    def write(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Copies the tensors. The snapshot is valid once the background thread has written its header."""
        self.finish()
        self._slot = (self._slot + 1) % SLOTS
        entries, size = pack(tensors)
        self._header_path(self.rank, self._slot).unlink(missing_ok=True)  # invalid while it is being overwritten
        buffer = self._mapped_bytes(self.rank, self._slot, size)
        for name, view in unpack(buffer, entries).items():
            view.copy_(tensors[name], non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        header = {"step": step, "layout": self.layout, "entries": entries, "bytes": size, **metadata}
        self._thread = threading.Thread(target=self._finalize, args=(header, buffer, self._slot), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def latest_complete(self) -> dict[str, Any] | None:
        """Returns the header of the newest snapshot that exists for all ranks, or None; restores lost ones."""
        self.finish()
        for count in (1, SLOTS):  # reading a slot takes seconds, and usually all ranks have the newest
            local_headers = {rank: self._valid_headers(rank, count) for rank in {self.rank, self.backed_up_rank}}
            steps_of = {rank: [one["step"] for one in headers.values()] for rank, headers in local_headers.items()}
            holders: dict[int, dict[int, list[int]]] = {}
            for holder, steps_by_rank in enumerate(self.gather(list(steps_of.items()))):
                for rank, steps in steps_by_rank:
                    for step in steps:
                        holders.setdefault(step, {}).setdefault(rank, []).append(holder)
            complete = [step for step, ranks in holders.items() if len(ranks) == self.size]
            if complete:
                break
        else:
            return None
        step = max(complete)
        for rank, rank_holders in sorted(holders[step].items()):
            if rank not in rank_holders:
                self._fetch_backup(step, rank, rank_holders[0], local_headers)
        self._slot, header = next(entry for entry in local_headers[self.rank].items() if entry[1]["step"] == step)
        self.discard_after(step)  # later ones may come from an attempt with other results
        return header

    def discard_after(self, step: int) -> None:
        for rank in {self.rank, self.backed_up_rank}:
            for slot, header in self._headers(rank).items():
                if header["step"] > step:
                    self._header_path(rank, slot).unlink(missing_ok=True)

    def _finalize(self, header: dict[str, Any], buffer: Tensor, slot: int) -> None:
        with suppress(OSError, RuntimeError):  # a snapshot without a header is never loaded
            write_header(self._header_path(self.rank, slot), header, buffer)
            if self.group is not None:
                self._exchange_backups(header, buffer, slot)

    def _exchange_backups(self, header: dict[str, Any], buffer: Tensor, slot: int) -> None:
        """Sends our snapshot to the backup rank, and stores that of the rank that we back up."""
        encoded = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        sizes = torch.empty(2, dtype=torch.int64)
        self._exchange(torch.tensor([buffer.numel(), encoded.numel()]), sizes)
        received = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._exchange(encoded, received)
        self._header_path(self.backed_up_rank, slot).unlink(missing_ok=True)
        backup = self._mapped_bytes(self.backed_up_rank, slot, int(sizes[0]))
        self._exchange(buffer, backup)
        write_header(self._header_path(self.backed_up_rank, slot), json.loads(bytes(received.numpy())), backup)

    def _exchange(self, source: Tensor, destination: Tensor) -> None:
        send = dist.isend(source, self.backup_rank, group=self.group)
        dist.recv(destination, self.backed_up_rank, group=self.group)
        assert send is not None
        send.wait()

    def _fetch_backup(self, step: int, rank: int, holder: int, local_headers: dict[int, Headers]) -> None:
        """Sends the backup of a rank's snapshot from its holder to that rank."""
        headers = local_headers.get(rank, {}) if self.rank == holder else {}
        entry = next((entry for entry in headers.items() if entry[1]["step"] == step), None)
        slot, header = self.gather(entry)[holder]
        if self.rank == holder:
            dist.send(self._mapped_bytes(rank, slot, header["bytes"]), rank, group=self.group)
        elif self.rank == rank:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            buffer = self._mapped_bytes(rank, slot, header["bytes"])
            dist.recv(buffer, holder, group=self.group)
            write_header(self._header_path(rank, slot), header, buffer)
            local_headers[rank][slot] = header

    def _headers(self, rank: int) -> Headers:
        """Returns, by slot, the headers of a rank's snapshots in this layout, newest first."""
        headers = {}
        for slot in range(SLOTS):
            with suppress(OSError, ValueError, KeyError, TypeError):
                header = parse_json(self._header_path(rank, slot).read_bytes())
                size = (self.folder / f"rank-{rank}.{slot}").stat().st_size
                if header["layout"] == self.layout and size >= header["bytes"] and header["step"] >= 0:
                    headers[slot] = header
        return dict(sorted(headers.items(), key=lambda item: -item[1]["step"]))

    def _valid_headers(self, rank: int, count: int) -> Headers:
        """Returns those of the newest `count` snapshots that match their checksum."""
        valid: Headers = {}
        for slot, header in self._headers(rank).items():
            with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
                if len(valid) < count and checksum(self._mapped_bytes(rank, slot, header["bytes"])) == header["sum"]:
                    valid[slot] = header
        return valid

    def _header_path(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank}.{slot}.json"

    def _mapped_bytes(self, rank: int, slot: int, size: int) -> Tensor:
        """Maps a snapshot file into memory, growing it if it is smaller. Does not follow links."""
        buffer = self._buffers.get((rank, slot))
        if buffer is not None and buffer.numel() == size:
            return buffer
        path = self.folder / f"rank-{rank}.{slot}"
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as file:
            if os.fstat(file.fileno()).st_size < size:
                file.truncate(size)
            self._buffers[rank, slot] = in_huge_pages(mmap.mmap(file.fileno(), size))
        return self._buffers[rank, slot]


def write_header(path: Path, header: dict[str, Any], buffer: Tensor) -> None:
    write_text(path, json.dumps({**header, "sum": checksum(buffer)}))
