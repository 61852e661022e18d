"""AdamW with its two averages in 8 bits: blockwise, in the dynamic code of Dettmers et al. (2022).

A block is a run of 256 numbers in a row of the piece, with one scale in 32 bits. Pieces that are cut by rows have the
blocks of the whole weight; a cut across rows begins new ones, so what is rounded then depends a little on the layout.
Vectors and small weights stay wide. Checkpoints hold the averages wide: read back into the same blocks they become the
same codes, and any layout, or another kind of states, can go on from them.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.optim.adamw import plain_
from shardwise.optim.pieces import Piece, Pieced

BLOCK = 256
SMALL = 4096  # weights with fewer numbers stay wide
AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


class AdamW8(Pieced):
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
            state[key], state[f"{key}_scale"] = narrow(wide, AVERAGES[key])

    def _wide(self, piece: Piece, key: str, device: torch.device | None = None) -> Tensor:
        state = self.state[piece.tensor]
        if f"{key}_scale" not in state:
            return state[key]
        codes, scale = (state[name].to(device or piece.tensor.device) for name in (key, f"{key}_scale"))
        return widen(codes, scale, AVERAGES[key]).to(piece.tensor.dtype)


@cache
def code(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values, and what lies between them: finer where they are larger, over seven powers of ten."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1.0, 2**power + 1 if signed else 2 ** (power + 1) + 1, dtype=torch.float64)
        middles = (10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    table = torch.tensor(sorted(values), dtype=torch.float32)
    if signed:
        table[0] = -1.0  # the largest of a block is kept as it is, whatever its sign
    return table.to(device), ((table[1:] + table[:-1]) / 2).to(device)


def narrow(wide: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes, of the same shape, and the scale of each block."""
    rows = wide.float().flatten(0, -2)
    runs = F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = runs.abs().amax(2)
    tiny = torch.finfo(torch.float32).tiny
    codes = torch.bucketize(runs / scale.clamp(min=tiny)[..., None], code(signed, wide.device)[1], out_int32=True)
    return codes.to(torch.uint8).flatten(1)[:, : rows.shape[1]].reshape(wide.shape), scale


def widen(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    values = code(signed, codes.device)[0][codes.flatten(0, -2).int()]
    spread = scale.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return (values * spread).view(codes.shape)
