"""Writes and reads sharded tensors with PyTorch's distributed checkpoint (DCP).

DCP removes duplicates between ranks, checks that the shards cover each tensor, and reshards on load. We give it our own
planners, in which a shard is a tensor with its offsets instead of a DTensor: a DTensor on a GPU mesh cannot hold the
copy in host memory, and DCP ignores empty ones. We give it our own files, which are hashed as they are written. Its
index, a pickle, is written for PyTorch's tools but never read, since unpickling can run code; ours is `tensors.json`.
DCP's ranks would send each other pickles too, so each rank runs it as a single process, and we exchange plans as JSON.
"""

import io
import json
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _split_by_size_and_type, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
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

    @property
    def chunk(self) -> Chunk:
        return Chunk(torch.Size(self.offsets), self.tensor.shape)


Pieces = dict[str, CheckpointPiece]  # by tensor name


def write_pieces(folder: Path, pieces: Pieces, group: CheckpointGroup) -> FileDigests:
    """Writes the pieces of all ranks and their index. Returns, on every rank, size and hash of every file."""
    planner, writer, written, problem = PieceSavePlanner(), DCPWriter(folder), list[Any](), ""
    planner.set_up_planner(pieces)
    plans = [_save_plan(part) for part in group.all_gather(_describe_shards(pieces))]
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
    """Fills the pieces from the checkpoint, resharding as needed."""
    problem = ""
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns that it loads in a single process
            dcp.load(dict(pieces), storage_reader=DCPReader(folder, index), planner=PieceLoadPlanner(), no_dist=True)
    except CheckpointException as error:  # a BaseException, which most handlers miss
        problem = f"rank {group.rank}: {error.failures[0][0]}"
    if problems := [found for found in group.all_gather(problem) if found]:
        raise RunError(f"checkpoint {folder} could not be loaded: {problems[0]}.")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    return getattr(torch, entry["dtype"])


def _describe_shards(pieces: dict[str, CheckpointPiece]) -> list[Any]:
    shards = [(name, piece) for name, piece in pieces.items() if piece.tensor.numel()]
    return [(name, dtype_name(p.tensor.dtype), p.shape, p.offsets, p.tensor.shape) for name, p in shards]


def _save_plan(shards: list[Any]) -> SavePlan:
    items = []
    for name, dtype, shape, offsets, sizes in shards:
        chunk = Chunk(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


class PieceSavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            if piece.tensor.numel():
                entry = self.metadata.state_dict_metadata[name]
                assert isinstance(entry, TensorStorageMetadata)
                read_items = create_read_items_for_chunk_list(name, entry, [piece.chunk])
                assert sum(prod(item.lengths) for item in read_items) == piece.tensor.numel(), f"{name} is incomplete"
                items += read_items
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
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
            self.index[name] = {
                "dtype": dtype_name(tensor.properties.dtype), "shape": list(tensor.size), "pieces": pieces,
            }  # fmt: skip


class DCPReader(dcp.FileSystemReader):
    def __init__(self, folder: Path, index: Index):
        super().__init__(folder)
        self.index = index

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Reads several files at once."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        plans = [replace(plan, items=items) for items in by_file.values()]
        size = sum(self.storage_data[item.storage_index].length for item in plan.items)
        with ThreadPoolExecutor(num_threads(size)) as pool:
            done = [pool.submit(super(DCPReader, self).read_data, plan, planner) for plan in plans]
        return [future.result() for future in done][-1] if done else super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        storage_by_index = {}
        for name, entry in self.index.items():
            chunks = []
            for file, offset, length, start, size in entry["pieces"]:
                chunks.append(Chunk(torch.Size(start), torch.Size(size)))
                storage_by_index[MetadataIndex(name, start)] = _StorageInfo(file, offset, length)
            properties = TensorProperties(dtype=dtype_of(entry))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors, storage_data=storage_by_index)
