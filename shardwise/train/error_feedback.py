"""What compressed sums of gradients owe, in checkpoints: by weight, the debt of each rank that takes part in its sum.

Row n of `owed.NAME` is that of the n-th rank. In a layout with as many the debts are what they were; in others each
rank takes an even share of their sum, so nothing is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.comm.axis import Axis
from shardwise.parallel.data_parallel import DataParallel
from shardwise.parallel.engine import Engine
from shardwise.parallel.param_shard import ParamShard, offset_and_shape
from shardwise.train.dcp_storage import CheckpointPiece, Index, dtype_of


def _compression_axis(data: DataParallel) -> Axis:
    """The ranks that sum compressed."""
    return data.mesh["replicate"] if data.mesh["replicate"].size > 1 else data.mesh["shard"]


def _residual_region(data: DataParallel, param_shard: ParamShard) -> tuple[tuple[int, ...], list[int]]:
    """Where in a weight the debt of this rank lies: over `shard` it sends all rows that a tensor rank has."""
    if data.mesh["replicate"].size > 1:
        return offset_and_shape(param_shard, data.mesh)
    start, size = [0] * len(param_shard.shape), list(param_shard.shape)
    if param_shard.tensor_dim is not None:
        start[param_shard.tensor_dim], size[param_shard.tensor_dim] = data.mesh["tensor"].span(
            size[param_shard.tensor_dim]
        )
    return tuple(start), size


def _low_rank_key(data: DataParallel, name: str) -> str:
    """What a thin matrix of powersgd is saved as: ranks of one sum share it."""
    across_replicas = data.mesh["replicate"].size > 1
    return f"thin.{name}.{data.mesh['tensor'].index}.{data.mesh['shard'].index if across_replicas else 0}"


def error_feedback_pieces(engine: Engine) -> dict[str, CheckpointPiece]:
    """This rank's debts."""
    data, found = engine.data, {}
    if data.compressor is None:
        return {}
    axis = _compression_axis(data)
    for param_shard in engine.param_shards:
        value = data.compressor.residual.get(param_shard.name)
        if value is not None:
            start, size = _residual_region(data, param_shard)
            row = value.reshape(-1)[: math.prod(size)].view(1, *size)
            found[f"owed.{param_shard.name}"] = CheckpointPiece(
                row, (axis.index, *start), torch.Size((axis.size, *param_shard.shape))
            )
    for name, thin in data.compressor.q_matrices.items():
        found[_low_rank_key(data, name)] = CheckpointPiece(thin, (0, 0), thin.shape)
    return found


def error_feedback_targets(engine: Engine, index: Index) -> dict[str, CheckpointPiece]:
    """Memory for what a checkpoint has of this rank's debts, or of all of which it takes a share."""
    data, found = engine.data, {}
    if data.compressor is None:
        return {}
    axis = _compression_axis(data)
    for param_shard in engine.param_shards:
        entry = index.get(f"owed.{param_shard.name}")
        if entry is not None and data.should_compress(param_shard):
            start, size = _residual_region(data, param_shard)
            rows, first = (1, axis.index) if entry["shape"][0] == axis.size else (entry["shape"][0], 0)
            memory = _zeros_like_entry(entry, (rows, *size), engine)
            found[f"owed.{param_shard.name}"] = CheckpointPiece(memory, (first, *start), torch.Size(entry["shape"]))
        entry = index.get(_low_rank_key(data, param_shard.name))
        if entry is not None:
            found[_low_rank_key(data, param_shard.name)] = CheckpointPiece(
                _zeros_like_entry(entry, entry["shape"], engine), (0, 0), torch.Size(entry["shape"])
            )
    return found


def load_error_feedback(engine: Engine, pieces: dict[str, CheckpointPiece]) -> None:
    """Owes from now on what was read into `wanted`."""
    data = engine.data
    if data.compressor is None:
        return
    data.compressor.residual.clear()  # of a run that goes back to before its first debt
    data.compressor.q_matrices.clear()
    for param_shard in engine.param_shards:
        piece = pieces.get(f"owed.{param_shard.name}")
        if piece is not None:
            share = 1 if piece.tensor.shape[0] == 1 else _compression_axis(data).size
            data.compressor.residual[param_shard.name] = piece.tensor.sum(0) / share
        thin = pieces.get(_low_rank_key(data, param_shard.name))
        if thin is not None:
            data.compressor.q_matrices[param_shard.name] = thin.tensor


def _zeros_like_entry(entry: dict[str, object], size: tuple[int, ...], engine: Engine) -> Tensor:
    return torch.zeros(tuple(size), dtype=dtype_of(entry), device=engine.mesh.device)
