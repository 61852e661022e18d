"""Writes and reads sharded tensors with PyTorch's distributed checkpoint (DCP).

DCP removes duplicates between ranks, checks that the shards cover each tensor, and reshards on load. We give it our own
planners, in which a shard is a tensor with its offsets instead of a DTensor: a DTensor on a GPU mesh cannot hold the
copy in host memory, and DCP ignores empty ones. We give it our own files, which are hashed as they are written. Its
index, a pickle, is written for PyTorch's tools but never read, since unpickling can run code; ours is `tensors.json`.
"""

import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.errors import RunError
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
    writer = DCPWriter(folder)
    try:
        dcp.save(pieces, storage_writer=writer, planner=PieceSavePlanner(), **_process_group_args(group))
    except CheckpointException as error:
        raise _first_failure(error) from error
    files = {name: info for part in group.all_gather(writer.fs.files) for name, info in part.items()}
    files[INDEX_FILE] = group.on_rank_zero(lambda: write_hashed_file(folder / INDEX_FILE, json.dumps(writer.index)))
    return files


def read_index(folder: Path) -> Index:
    return json.loads((folder / INDEX_FILE).read_bytes())


def read_pieces(folder: Path, index: Index, pieces: Pieces, group: CheckpointGroup) -> None:
    """Fills the pieces from the checkpoint, resharding as needed."""
    try:
        reader = DCPReader(folder, index)
        dcp.load(dict(pieces), storage_reader=reader, planner=PieceLoadPlanner(), **_process_group_args(group))
    except CheckpointException as error:
        raise RunError(f"checkpoint {folder} could not be loaded: {_first_failure(error)}.") from error


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    return getattr(torch, entry["dtype"])


def _process_group_args(group: CheckpointGroup) -> dict[str, Any]:
    if group.group is None:  # PyTorch would warn at each save and load of a single process, which is intended here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return {"process_group": group.group, "no_dist": group.group is None}


def _first_failure(error: CheckpointException) -> RuntimeError:
    """Returns the error of the lowest failed rank. DCP's own is a BaseException, which most handlers miss."""
    rank, (cause, _) = min(error.failures.items())
    return RuntimeError(f"rank {rank}: {cause}")


class PieceSavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, piece in self.state_dict.items():
            if piece.tensor.numel():
                data = TensorWriteData(piece.chunk, TensorProperties(dtype=piece.tensor.dtype), piece.shape)
                items.append(WriteItem(MetadataIndex(name, piece.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

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
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            self.index[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}


class DCPReader(dcp.FileSystemReader):
    def __init__(self, folder: Path, index: Index):
        super().__init__(folder)
        self.index = index

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
