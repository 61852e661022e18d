"""What compressed sums of gradients owe, in checkpoints: by weight, the debt of each rank that takes part in its sum.

Row n of `owed.NAME` is that of the n-th rank. In a layout with as many the debts are what they were; in others each
rank takes an even share of their sum, so nothing is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.parallel.data import DataParallel
from shardwise.parallel.engine import Engine
from shardwise.parallel.holding import Holding, place
from shardwise.parallel.mesh import Axis
from shardwise.train.pieces import Index, Piece, dtype_of


def _axis(data: DataParallel) -> Axis:
    """The ranks that sum compressed."""
    return data.mesh["replicate"] if data.mesh["replicate"].size > 1 else data.mesh["shard"]


def _place(data: DataParallel, holding: Holding) -> tuple[tuple[int, ...], list[int]]:
    """Where in a weight the debt of this rank lies: over `shard` it sends all rows that a tensor rank has."""
    if data.mesh["replicate"].size > 1:
        return place(holding, data.mesh)
    start, size = [0] * len(holding.shape), list(holding.shape)
    if holding.tensor_dim is not None:
        start[holding.tensor_dim], size[holding.tensor_dim] = data.mesh["tensor"].span(size[holding.tensor_dim])
    return tuple(start), size


def _thin(data: DataParallel, name: str) -> str:
    """What a thin matrix of powersgd is saved as: ranks of one sum share it."""
    far = data.mesh["replicate"].size > 1
    return f"thin.{name}.{data.mesh['tensor'].index}.{data.mesh['shard'].index if far else 0}"


def owed(engine: Engine) -> dict[str, Piece]:
    """This rank's debts."""
    data, found = engine.data, {}
    if data.compressor is None:
        return {}
    axis = _axis(data)
    for holding in engine.holdings:
        value = data.compressor.residual.get(holding.name)
        if value is not None:
            start, size = _place(data, holding)
            row = value.reshape(-1)[: math.prod(size)].view(1, *size)
            found[f"owed.{holding.name}"] = Piece(row, (axis.index, *start), torch.Size((axis.size, *holding.shape)))
    for name, thin in data.compressor.thin.items():
        found[_thin(data, name)] = Piece(thin, (0, 0), thin.shape)
    return found


def wanted(engine: Engine, index: Index) -> dict[str, Piece]:
    """Memory for what a checkpoint has of this rank's debts, or of all of which it takes a share."""
    data, found = engine.data, {}
    if data.compressor is None:
        return {}
    axis = _axis(data)
    for holding in engine.holdings:
        entry = index.get(f"owed.{holding.name}")
        if entry is not None and data.compresses(holding):
            start, size = _place(data, holding)
            rows, first = (1, axis.index) if entry["shape"][0] == axis.size else (entry["shape"][0], 0)
            memory = _zeros(entry, (rows, *size), engine)
            found[f"owed.{holding.name}"] = Piece(memory, (first, *start), torch.Size(entry["shape"]))
        entry = index.get(_thin(data, holding.name))
        if entry is not None:
            found[_thin(data, holding.name)] = Piece(
                _zeros(entry, entry["shape"], engine), (0, 0), torch.Size(entry["shape"])
            )
    return found


def take(engine: Engine, pieces: dict[str, Piece]) -> None:
    """Owes from now on what was read into `wanted`."""
    data = engine.data
    if data.compressor is None:
        return
    data.compressor.residual.clear()  # of a run that goes back to before its first debt
    data.compressor.thin.clear()
    for holding in engine.holdings:
        piece = pieces.get(f"owed.{holding.name}")
        if piece is not None:
            share = 1 if piece.tensor.shape[0] == 1 else _axis(data).size
            data.compressor.residual[holding.name] = piece.tensor.sum(0) / share
        thin = pieces.get(_thin(data, holding.name))
        if thin is not None:
            data.compressor.thin[holding.name] = thin.tensor


def _zeros(entry: dict[str, object], size: tuple[int, ...], engine: Engine) -> Tensor:
    return torch.zeros(tuple(size), dtype=dtype_of(entry), device=engine.mesh.device)
