"""Writes sharded tensors in the format of PyTorch's distributed checkpoint (DCP), and reads them in any layout.

DCP's planner removes duplicates between ranks and checks that the shards cover each tensor. A shard is a tensor with
its offsets instead of a DTensor: a DTensor on a GPU mesh cannot hold the copy in host memory, and DCP ignores empty
ones. We write the files, which are hashed as they are written. DCP's index, a pickle, is written for PyTorch's tools
but never read, since unpickling can run code; we read `tensors.json`, which is ours. DCP's ranks would send each other
pickles too, so each rank plans as a single process, and we exchange what the plans are made of as JSON."""

import json
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _create_file_view
from torch.utils.serialization import config as save_config

from shardwise.errors import CheckpointError, RunError
from shardwise.host_memory import num_threads
from shardwise.train.checkpoint_folder import CheckpointGroup, HashedFileWriter, write_hashed_file

INDEX_FILE, DCP_INDEX_FILE = "tensors.json", ".metadata"
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
    return {name: CheckpointPiece(tensor, (0,) * tensor.dim(), tensor.shape) for name, tensor in tensors.items()}


def write_pieces(folder: Path, pieces: Pieces, group: CheckpointGroup) -> FileDigests:
    """Writes the pieces of all ranks and their index. Returns, on every rank, size and hash of every file."""
    shards = [(name, p, p.tensor) for name, p in pieces.items() if p.tensor.numel()]
    described = [(name, dtype_name(tensor.dtype), p.shape, p.offsets, tensor.shape) for name, p, tensor in shards]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan([_save_plan(part) for part in group.all_gather(described)])

    def write() -> list[tuple[str, list[Any], dict[str, Any]]]:
        """Writes the shards that this rank's plan has, several files at once: hashing is slower than a fast disk."""
        items = plans[group.rank].items  # all ranks have made the same plans
        threads = num_threads(sum(pieces[item.index.fqn].tensor.nbytes for item in items))
        names = [[item.index.fqn for item in part] for part in _split_by_size_and_type(threads, items)]
        parts = [{name: pieces[name] for name in part} for part in names]
        paths = [folder / f"__{group.rank}_{number}.distcp" for number in range(len(parts))]
        with ThreadPoolExecutor(threads) as pool, save_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            return list(pool.map(_write_file, paths, parts))

    written = [file for part in group.on_every_rank(write) for file in part]
    places = {(name, *at): (file, *place) for file, found, _ in written for name, at, *place in found}

    def write_index() -> FileDigests:
        index, saved = Index(), cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        metadata.storage_data = {}
        for name, tensor in saved.items():
            stored = [(chunk, places[name, *chunk.offsets]) for chunk in tensor.chunks]
            metadata.storage_data |= {MetadataIndex(name, chunk.offsets): _StorageInfo(*at) for chunk, at in stored}
            found = [[*at, list(chunk.offsets), list(chunk.sizes)] for chunk, at in stored]
            index[name] = {"dtype": dtype_name(tensor.properties.dtype), "shape": list(tensor.size), "pieces": found}
        contents = {INDEX_FILE: json.dumps(index).encode(), DCP_INDEX_FILE: pickle.dumps(metadata)}
        return {name: write_hashed_file(folder / name, content) for name, content in contents.items()}

    return {file: info for file, _, info in written} | group.on_rank_zero(write_index)


def _write_file(path: Path, pieces: Pieces) -> tuple[str, list[Any], dict[str, Any]]:
    """Writes one tensor after the other. Returns the file's name, where each tensor lies in it, and size and hash."""
    places = []
    with HashedFileWriter(path) as file:
        for name, piece in pieces.items():
            start, tensor = file.tell(), piece.tensor.detach().cpu()
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes  # of a storage that would be written whole
            torch.save(tensor.clone() if is_view else tensor, file)
            places.append((name, piece.offsets, start, file.tell() - start))
    return path.name, places, file.file_info()


def read_index(folder: Path) -> Index:
    return json.loads((folder / INDEX_FILE).read_bytes())


def read_pieces(folder: Path, index: Index, pieces: Pieces, group: CheckpointGroup) -> None:
    """Fills the pieces from the checkpoint, resharding as needed; reads several files at once."""

    def read() -> None:
        wanted: dict[str, list[tuple[int, int, tuple[slice, ...], Tensor]]] = {}  # by file: see `_read_file`
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

    try:
        group.on_every_rank(read)
    except CheckpointError as error:
        raise RunError(f"checkpoint {folder} could not be loaded: {error}.") from None


def _read_file(path: Path, parts: list[tuple[int, int, tuple[slice, ...], Tensor]]) -> None:
    """Copies parts of stored tensors; of each: where in the file it is stored, which slice to copy, and where to."""
    with path.open("rb") as file:
        for offset, length, source, target in parts:
            view: Any = _create_file_view(file, offset, length)
            target.copy_(torch.load(view, map_location="cpu", weights_only=True)[source])


def read_tensor(folder: Path, index: Index, name: str, part: tuple[slice, ...] = ()) -> Tensor:
    """Reads a tensor of a checkpoint, or a part of it, in one process."""
    spans = [(span.start, span.stop) for span in part] or [(0, size) for size in index[name]["shape"]]
    out = torch.empty([stop - start for start, stop in spans], dtype=dtype_of(index[name]))
    piece = CheckpointPiece(out, tuple(start for start, _ in spans), torch.Size(index[name]["shape"]))
    read_pieces(folder, index, {name: piece}, CheckpointGroup())
    return out


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
