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
from shardwise.train.stored import Hashed, Peers, write_file

INDEX = "tensors.json"
Index = dict[str, dict[str, Any]]  # by name: dtype, shape, pieces as [file, offset, length, start, size]
Files = dict[str, dict[str, Any]]  # by name: bytes, sha256

# PyTorch says so at each save and load of a world of one, where it is just what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Piece:
    """A part of a whole tensor: where it starts, and the shape of the whole."""

    tensor: Tensor
    start: tuple[int, ...]
    shape: torch.Size

    @property
    def chunk(self) -> Chunk:
        return Chunk(torch.Size(self.start), self.tensor.shape)


def write_pieces(folder: Path, pieces: dict[str, Piece], peers: Peers) -> Files:
    """Writes the pieces of all ranks and the index of them. Returns, on every rank, what every file holds."""
    writer = Writer(folder)
    try:
        dcp.save(pieces, storage_writer=writer, planner=SavePlanner(), **_world(peers))
    except CheckpointException as error:
        raise _plain(error) from error
    files = {name: facts for part in peers.all(writer.fs.files) for name, facts in part.items()}
    files[INDEX] = peers.first(lambda: write_file(folder / INDEX, json.dumps(writer.index)))
    return files


def read_index(folder: Path) -> Index:
    index: Index = json.loads((folder / INDEX).read_bytes())
    return index


def read_pieces(folder: Path, index: Index, pieces: dict[str, Piece], peers: Peers) -> None:
    """Fills the pieces, which may be cut in any way."""
    try:
        dcp.load(dict(pieces), storage_reader=Reader(folder, index), planner=LoadPlanner(), **_world(peers))
    except CheckpointException as error:
        raise RunError(f"checkpoint {folder} could not be loaded: {_plain(error)}.") from error


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return dtype


def _world(peers: Peers) -> dict[str, Any]:
    return {"process_group": peers.group, "no_dist": peers.group is None}


def _plain(error: CheckpointException) -> RuntimeError:
    """The error of the first rank that had one. DCP's own is a BaseException, which most handlers miss."""
    rank, (cause, _) = min(error.failures.items())
    return RuntimeError(f"rank {rank}: {cause}")


# Planners


class SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, piece in self.state_dict.items():
            if piece.tensor.numel():
                data = TensorWriteData(piece.chunk, TensorProperties(dtype=piece.tensor.dtype), piece.shape)
                items.append(WriteItem(MetadataIndex(name, piece.start), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


class LoadPlanner(DefaultLoadPlanner):
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


class HashedFiles(FileSystem):
    """DCP's way to files, which keeps by name what was written."""

    def __init__(self) -> None:
        self.files: Files = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        assert mode == "wb"
        stream = Hashed(path)
        try:
            with stream:
                yield stream
        except Exception as error:
            if stream.problem is None:
                raise
            raise stream.problem from error  # torch.save turns a full disk into "unexpected pos"
        self.files[os.path.basename(path)] = stream.facts()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[os.path.basename(new_path)] = self.files.pop(os.path.basename(path))


class Writer(dcp.FileSystemWriter):
    """Gathers on rank 0 the index that is read instead of DCP's."""

    fs: HashedFiles

    def __init__(self, folder: Path):
        # Files sync themselves. With copying ahead every rank would open the first GPU.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = HashedFiles()
        self.index: Index = {}

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for part in results for result in part}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = []
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                file = (place.relative_path, place.offset, place.length)
                pieces.append([*file, list(chunk.offsets), list(chunk.sizes)])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            self.index[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}


class Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, index: Index):
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places = {}
        for name, entry in self.index.items():
            chunks = []
            for file, offset, length, start, size in entry["pieces"]:
                chunks.append(Chunk(torch.Size(start), torch.Size(size)))
                places[MetadataIndex(name, start)] = _StorageInfo(file, offset, length)
            properties = TensorProperties(dtype=dtype_of(entry))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors, storage_data=places)
