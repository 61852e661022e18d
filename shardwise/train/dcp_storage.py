"""Writes sharded tensors with PyTorch's distributed checkpoint (DCP), and reads them in any layout.

DCP removes duplicates between ranks and checks that the shards cover each tensor. We give it our own planner, in which
a shard is a tensor with its offsets instead of a DTensor: a DTensor on a GPU mesh cannot hold the copy in host memory,
and DCP ignores empty ones. We give it our own files, which are hashed as they are written. Its index, a pickle, is
written for PyTorch's tools but never read, since unpickling can run code; we read `tensors.json`, which is ours. DCP's
ranks would send each other pickles too, so each rank runs it as a single process, and we exchange plans as JSON.
"""

import io
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _split_by_size_and_type, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.utils.serialization import config as save_config

from shardwise.errors import RunError
from shardwise.host_memory import num_threads
from shardwise.train.checkpoint_folder import CheckpointGroup, HashedFileWriter, write_hashed_file

INDEX_FILE = "tensors.json"
Index = dict[str, dict[str, Any]]  # by tensor name: dtype, shape, pieces as [file, offset, length, offsets, sizes]
FileDigests = dict[str, dict[str, Any]]  # by file name: bytes, sha256


@dataclass(frozen=True)
class CheckpointPiece:
    """A shard of a tensor, with its offsets and the shape of the full tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: torch.Size


Pieces = dict[str, CheckpointPiece]  # by tensor name


def weight_pieces(tensors: Mapping[str, Tensor]) -> Pieces:
    """Returns whole tensors as pieces."""
    return {name: CheckpointPiece(tensor, (0,) * tensor.dim(), tensor.shape) for name, tensor in tensors.items()}


def write_pieces(folder: Path, pieces: Pieces, group: CheckpointGroup) -> FileDigests:
    """Writes the pieces of all ranks and their index. Returns, on every rank, size and hash of every file."""
    planner, writer = PieceSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False), DCPWriter(folder)
    written, problem = list[Any](), ""
    planner.set_up_planner(pieces)
    shards = [(name, p, p.tensor) for name, p in pieces.items() if p.tensor.numel()]
    described = [(name, dtype_name(tensor.dtype), p.shape, p.offsets, tensor.shape) for name, p, tensor in shards]
    plans = [_save_plan(part) for part in group.all_gather(described)]
    plans, metadata = planner.create_global_plan(plans)  # the same on all ranks
    try:
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[group.rank])
        for one in writer.write_in_threads(plan, planner):
            written.append((one.index.fqn, one.index.offset, one.size_in_bytes, vars(one.storage_data)))
    except Exception as error:
        problem = f"rank {group.rank}: {error}"
    parts = group.all_gather((problem, written, writer.fs.files))
    if problems := [found for found, _, _ in parts if found]:
        raise RuntimeError(problems[0])

    def finish() -> FileDigests:
        results = [one for _, written, _ in parts for one in written]
        items = [WriteResult(MetadataIndex(name, at), size, _StorageInfo(**info)) for name, at, size, info in results]
        writer.finish(metadata, [items])
        return writer.fs.files | {INDEX_FILE: write_hashed_file(folder / INDEX_FILE, json.dumps(writer.index))}

    files = [files for _, _, files in parts] + [group.on_rank_zero(finish)]
    return {name: info for part in files for name, info in part.items()}


def read_index(folder: Path) -> Index:
    return json.loads((folder / INDEX_FILE).read_bytes())


def read_pieces(folder: Path, index: Index, pieces: Pieces, group: CheckpointGroup) -> None:
    """Fills the pieces from the checkpoint, resharding as needed; reads several files at once."""
    wanted: dict[str, list[tuple[int, int, tuple[slice, ...], Tensor]]] = {}  # by file: see `_read_file`
    problem = ""
    try:
        for name, piece in pieces.items():
            target, missing = piece.tensor.detach(), piece.tensor.numel()
            for file, offset, length, start, sizes in index[name]["pieces"] if missing else ():
                stored, local = zip(start, sizes), zip(piece.offsets, target.shape)
                spans = [(max(a, b), min(a + n, b + m)) for (a, n), (b, m) in zip(stored, local, strict=True)]
                if all(first < last for first, last in spans):
                    source = tuple(slice(first - a, last - a) for (first, last), a in zip(spans, start))
                    part = target[tuple(slice(first - b, last - b) for (first, last), b in zip(spans, piece.offsets))]
                    wanted.setdefault(file, []).append((offset, length, source, part))
                    missing -= part.numel()
            assert not missing, f"{name} is incomplete"
        threads = num_threads(sum(length for parts in wanted.values() for _, length, _, _ in parts))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda file: _read_file(folder / file, wanted[file]), wanted))
    except Exception as error:
        problem = f"rank {group.rank}: {error}"
    if problems := [found for found in group.all_gather(problem) if found]:
        raise RunError(f"checkpoint {folder} could not be loaded: {problems[0]}.")


def _read_file(path: Path, parts: list[tuple[int, int, tuple[slice, ...], Tensor]]) -> None:
    """Copies parts of stored tensors; of each: where in the file it is stored, which slice to copy, and where to."""
    with path.open("rb") as file:
        for offset, length, source, target in parts:
            view: Any = _create_file_view(file, offset, length)
            target.copy_(torch.load(view, map_location="cpu", weights_only=True)[source])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    return getattr(torch, entry["dtype"])


def _save_plan(shards: list[Any]) -> SavePlan:
    items = []
    for name, dtype, shape, offsets, sizes in shards:
        chunk = Chunk(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


class PieceSavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class HashingFileSystem(FileSystem):
    """DCP's file system, recording size and hash of every file written."""

    def __init__(self) -> None:
        self.files: FileDigests = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        assert mode == "wb"
        stream = HashedFileWriter(path)
        try:
            with stream:
                yield stream
        except Exception as error:
            if stream.os_error is None:
                raise
            raise stream.os_error from error  # torch.save turns a full disk into "unexpected pos"
        self.files[os.path.basename(path)] = stream.file_info()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[os.path.basename(new_path)] = self.files.pop(os.path.basename(path))


class DCPWriter(dcp.FileSystemWriter):
    """DCP's writer; on rank 0 it also builds our index, which is read instead of DCP's."""

    fs: HashingFileSystem

    def __init__(self, folder: Path):
        # HashedFileWriter calls fsync. Copy-ahead would make every rank create a context on GPU 0.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = HashingFileSystem()
        self.index: Index = {}

    def write_in_threads(self, plan: SavePlan, planner: PieceSavePlanner) -> list[WriteResult]:
        """Writes the items of a plan, several files at once if they are large: hashing is slower than a fast disk.
        DCP's own threads would lose an error."""
        threads = num_threads(sum(planner.state_dict[item.index.fqn].tensor.nbytes for item in plan.items))
        if threads == 1:
            return self.write_data(plan, planner).wait()
        parts = _split_by_size_and_type(threads, plan.items)
        plans = [replace(plan, items=part, storage_data=_StoragePrefix(f"{plan.storage_data.prefix}{number}_"))
                 for number, part in enumerate(parts)]  # fmt: skip
        with ThreadPoolExecutor(threads) as pool, save_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            return [one for results in pool.map(lambda p: self.write_data(p, planner).wait(), plans) for one in results]

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        storage_by_index = {result.index: result.storage_data for part in results for result in part}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = []
            for chunk in tensor.chunks:
                storage = storage_by_index[MetadataIndex(name, chunk.offsets)]
                file = (storage.relative_path, storage.offset, storage.length)
                pieces.append([*file, list(chunk.offsets), list(chunk.sizes)])
            dtype = dtype_name(tensor.properties.dtype)
            self.index[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
