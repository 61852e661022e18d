"""AdamW with its two averages in 8 bits: blockwise, in the dynamic code of Dettmers et al. (2022).

A block is a run of 256 numbers in a row of the piece, with one scale in 32 bits. Pieces that are cut by rows have the
blocks of the whole weight; a cut across rows begins new ones, so what is rounded then depends a little on the layout.
Vectors and small weights stay wide. Checkpoints hold the averages wide: read back into the same blocks they become the
same codes, and any layout, or another kind of states, can go on from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.optim.adamw import plain_
from shardwise.optim.pieces import Piece, Pieced

BLOCK = 256
SMALL = 4096  # weights with fewer numbers stay wide
AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


class AdamW8(Pieced):
    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], pieces: Sequence[Piece]):
        super().__init__(groups, defaults, pieces)
        self.values: dict[tuple[str, torch.device], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for piece, state, group in self.members():
            for key in AVERAGES:
                if key not in state:
                    self._keep(piece, key, torch.zeros_like(piece.tensor))
            self.count(piece, state)
            wide = {key: state[key] if key == "step" else self._wide(piece, key) for key in ("step", *AVERAGES)}
            plain_(piece, wide, group, self.grad_scale, self.found_inf)
            for key in AVERAGES:
                self._keep(piece, key, wide[key])
            piece.current = piece.rounded is not None

    def saved(self, weight: Tensor) -> dict[str, Tensor]:
        """The state as a checkpoint has it, in host memory: the device may have no room for it."""
        state = self.state.get(weight, {})
        return {
            key: self._wide(self.pieces[weight], key, torch.device("cpu")) if key in AVERAGES else value
            for key, value in state.items() if not key.endswith("_scale")
        }  # fmt: skip

    def loaded(self) -> None:
        """Rounds what a checkpoint has brought."""
        for piece, state, _ in self.members():
            for key in AVERAGES.keys() & state.keys():
                self._keep(piece, key, state[key])

    def _keep(self, piece: Piece, key: str, wide: Tensor) -> None:
        state = self.state[piece.tensor]
        state[key] = wide
        if len(piece.shape) > 1 and piece.shape.numel() >= SMALL:
            state[key], state[f"{key}_scale"] = narrow(wide, self._values(key, wide.device))

    def _values(self, key: str, device: torch.device) -> Tensor:
        if (key, device) not in self.values:
            self.values[key, device] = torch.tensor(values_of(AVERAGES[key]), device=device)
        return self.values[key, device]

    def _wide(self, piece: Piece, key: str, device: torch.device | None = None) -> Tensor:
        state = self.state[piece.tensor]
        if f"{key}_scale" not in state:
            return state[key]
        codes, scale = (state[name].to(device or piece.tensor.device) for name in (key, f"{key}_scale"))
        return widen(codes, scale, self._values(key, codes.device)).to(piece.tensor.dtype)


@cache
def values_of(signed: bool) -> tuple[float, ...]:
    """The 256 values: finer where they are larger, over seven powers of ten."""
    values = [0.0, 1.0]
    for power in range(7):
        steps = 2**power if signed else 2 ** (power + 1)
        middles = [10.0 ** (power - 6) * (0.1 + 0.9 * (number + 0.5) / steps) for number in range(steps)]
        values += middles + ([-middle for middle in middles] if signed else [])
    values.sort()
    # The largest of a block is kept as it is, whatever its sign.
    return (-1.0, *values[1:]) if signed else tuple(values)


def narrow(wide: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, of the same shape, and the scale of each block."""
    rows = wide.float().flatten(0, -2)
    runs = F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = runs.abs().amax(2)
    tiny = torch.finfo(torch.float32).tiny
    between = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(runs / scale.clamp(min=tiny)[..., None], between, out_int32=True)
    return codes.to(torch.uint8).flatten(1)[:, : rows.shape[1]].reshape(wide.shape), scale


def widen(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    found = values[codes.flatten(0, -2).int()]
    spread = scale.repeat_interleave(BLOCK, 1)[:, : found.shape[1]]
    return (found * spread).view(codes.shape)
