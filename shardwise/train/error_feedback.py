"""Saves and loads the error feedback of compressed gradient reduction.

Row n of `residual.NAME` is the residual of the n-th rank of the compressed axis. With the same number of ranks, every
rank gets its own residual back; otherwise each gets an equal share of their sum, so nothing is lost."""

import math
from dataclasses import replace

import torch

from shardwise.comm.collectives import Axis
from shardwise.optim.param_shard import ParamShard
from shardwise.parallel.data_parallel import DataParallel
from shardwise.parallel.engine import Engine
from shardwise.train.dcp_storage import CheckpointPiece, Index, Pieces, dtype_of, weight_pieces


def _compression_axis(data: DataParallel) -> Axis:
    """Returns the axis whose gradient reduction is compressed."""
    return data.mesh["replicate"] if data.mesh["replicate"].size > 1 else data.mesh["shard"]


def _residual_region(data: DataParallel, param_shard: ParamShard) -> tuple[tuple[int, ...], list[int]]:
    """Returns offsets and shape of this rank's residual: its shard across replicas, else its tensor-parallel shard."""
    is_replicated, tensor = data.mesh["replicate"].size > 1, data.mesh["tensor"]
    splits = tuple((dim, axis) for dim, axis in param_shard.sharded_dims if is_replicated or axis is tensor)
    return replace(param_shard, sharded_dims=splits).offset_and_shape


def _low_rank_key(data: DataParallel, name: str) -> str:
    """Returns the name of a PowerSGD Q matrix, which all ranks of a reduction share."""
    across_replicas = data.mesh["replicate"].size > 1
    return f"q_matrix.{name}.{data.mesh['tensor'].index}.{data.mesh['shard'].index if across_replicas else 0}"


def error_feedback_pieces(engine: Engine) -> Pieces:
    """Returns this rank's residuals and Q matrices."""
    data, pieces = engine.data, Pieces()
    if data.compressor is None:
        return pieces
    axis = _compression_axis(data)
    for param_shard in engine.param_shards:
        if (value := data.compressor.residual.get(param_shard.name)) is not None:
            start, size = _residual_region(data, param_shard)
            row = value.reshape(-1)[: math.prod(size)].view(1, *size)
            full_shape = torch.Size((axis.size, *param_shard.shape))
            pieces[f"residual.{param_shard.name}"] = CheckpointPiece(row, (axis.index, *start), full_shape)
    return pieces | weight_pieces({_low_rank_key(data, name): q for name, q in data.compressor.q_matrices.items()})


def error_feedback_targets(engine: Engine, index: Index) -> Pieces:
    """Allocates tensors to load Q matrices and residuals into: this rank's, or all if the number of ranks changed."""
    data, pieces = engine.data, Pieces()
    if data.compressor is None:
        return pieces
    axis, device = _compression_axis(data), engine.mesh.device
    for param_shard in engine.param_shards:
        name = f"residual.{param_shard.name}"
        if (entry := index.get(name)) is not None and data.should_compress(param_shard):
            start, size = _residual_region(data, param_shard)
            rows, first_row = (1, axis.index) if entry["shape"][0] == axis.size else (entry["shape"][0], 0)
            target = torch.zeros((rows, *size), dtype=dtype_of(entry), device=device)
            pieces[name] = CheckpointPiece(target, (first_row, *start), torch.Size(entry["shape"]))
        name = _low_rank_key(data, param_shard.name)
        if (entry := index.get(name)) is not None:
            pieces |= weight_pieces({name: torch.zeros(entry["shape"], dtype=dtype_of(entry), device=device)})
    return pieces


def load_error_feedback(engine: Engine, pieces: Pieces) -> None:
    """Replaces the compressor's residuals and Q matrices with the loaded `pieces`."""
    data = engine.data
    if data.compressor is None:
        return
    data.compressor.residual.clear()  # a rollback may go back to a step without residuals
    data.compressor.q_matrices.clear()
    for param_shard in engine.param_shards:
        if (residual := pieces.get(f"residual.{param_shard.name}")) is not None:
            num_shares = 1 if residual.tensor.shape[0] == 1 else _compression_axis(data).size
            data.compressor.residual[param_shard.name] = residual.tensor.sum(0) / num_shares
        if (q_matrix := pieces.get(_low_rank_key(data, param_shard.name))) is not None:
            data.compressor.q_matrices[param_shard.name] = q_matrix.tensor
