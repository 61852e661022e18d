"""Pieces of tensors into files and back, through PyTorch's distributed checkpoint (DCP).

DCP knows how to drop what two ranks both have, to check that the rest covers each tensor once, and to fill the pieces
of one layout from those of another. It is given planners of ours, so that a piece is what it is here, a tensor with the
place where it starts, and not a DTensor: one on a mesh of GPUs cannot hold the copy in memory, and an empty one takes
no part. It is given files of ours, which are hashed as they are written. And its index, a pickle, is written for
PyTorch's own tools but never read: reading a pickle can run code. Ours is `tensors.json`.
"""

from __future__ import annotations

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
Index = dict[str, dict[str, Any]]  # by name: dtype, shape, pieces as [file, offset, length, start, size]
FileDigests = dict[str, dict[str, Any]]  # by name: bytes, sha256

# PyTorch says so at each save and load of a world of one, where it is just what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class CheckpointPiece:
    """A part of a whole tensor: where it starts, and the shape of the whole."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: torch.Size

    @property
    def chunk(self) -> Chunk:
        return Chunk(torch.Size(self.offsets), self.tensor.shape)


def write_pieces(folder: Path, pieces: dict[str, CheckpointPiece], peers: CheckpointGroup) -> FileDigests:
    """Writes the pieces of all ranks and the index of them. Returns, on every rank, what every file holds."""
    writer = DCPWriter(folder)
    try:
        dcp.save(pieces, storage_writer=writer, planner=PieceSavePlanner(), **_process_group_args(peers))
    except CheckpointException as error:
        raise _first_failure(error) from error
    files = {name: facts for part in peers.all_gather(writer.fs.files) for name, facts in part.items()}
    files[INDEX_FILE] = peers.on_rank_zero(lambda: write_hashed_file(folder / INDEX_FILE, json.dumps(writer.index)))
    return files


def read_index(folder: Path) -> Index:
    index: Index = json.loads((folder / INDEX_FILE).read_bytes())
    return index


def read_pieces(folder: Path, index: Index, pieces: dict[str, CheckpointPiece], peers: CheckpointGroup) -> None:
    """Fills the pieces, which may be cut in any way."""
    try:
        dcp.load(
            dict(pieces),
            storage_reader=DCPReader(folder, index),
            planner=PieceLoadPlanner(),
            **_process_group_args(peers),
        )
    except CheckpointException as error:
        raise RunError(f"checkpoint {folder} could not be loaded: {_first_failure(error)}.") from error


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return dtype


def _process_group_args(peers: CheckpointGroup) -> dict[str, Any]:
    return {"process_group": peers.group, "no_dist": peers.group is None}


def _first_failure(error: CheckpointException) -> RuntimeError:
    """The error of the first rank that had one. DCP's own is a BaseException, which most handlers miss."""
    rank, (cause, _) = min(error.failures.items())
    return RuntimeError(f"rank {rank}: {cause}")


# Planners


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
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            if piece.tensor.numel():
                entry = self.metadata.state_dict_metadata[name]
                assert isinstance(entry, TensorStorageMetadata)
                found = create_read_items_for_chunk_list(name, entry, [piece.chunk])
                assert sum(prod(item.lengths) for item in found) == piece.tensor.numel(), f"{name} has holes"
                items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


# Files


class HashingFileSystem(FileSystem):
    """DCP's way to files, which keeps by name what was written."""

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
    """Gathers on rank 0 the index that is read instead of DCP's."""

    fs: HashingFileSystem

    def __init__(self, folder: Path):
        # Files sync themselves. With copying ahead every rank would open the first GPU.
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
