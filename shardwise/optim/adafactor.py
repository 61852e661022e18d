"""Adafactor (Shazeer and Stern 2018) in the variant of `torch.optim.Adafactor`.

Of a matrix it keeps a mean square for each row and each column, where Adam keeps two numbers for each weight. PyTorch's
knows no pieces: here means and lengths are those of the whole weight, summed over the ranks that hold the others. The
rate is the weight's length times the smaller of `lr` and 1/sqrt(step); no first moment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.pieces import Piece, Pieced, squares, total

DECAY = -0.8  # the share of the newest square in step t is t^DECAY
LEAST = 1e-3  # weights shorter than this count as so long
SMALLEST = 2.0**-23  # PyTorch's for float32. Its own for float64 would turn the rounding of a zero into a step.

Member = tuple[Piece, dict[str, Tensor], dict[str, Any]]


class Adafactor(Pieced):
    collapsed = {"row_var": -1, "col_var": -2}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = list(self.members())
        pieces = [piece for piece, _, _ in members]
        everything = [range(len(piece.shape)) for piece in pieces]
        counts = [self.count(piece, state) for piece, state, _ in members]
        lengths = total([squares(piece.tensor.detach()) for piece in pieces], pieces, everything)
        means = self._average(members, counts)
        updates = [squares(self._update(member, means)) for member in members]
        updates = total(updates, pieces, everything)
        for member, count, length, update in zip(members, counts, lengths, updates):
            piece, _, group = member
            size = piece.shape.numel()
            rate = (length / size).sqrt().clamp(min=LEAST) * count.rsqrt().clamp(max=group["lr"])
            rate = rate / (update / size).sqrt().clamp(min=1.0)
            kept = piece.tensor.detach() * (1.0 - group["lr"] * group["weight_decay"])
            self.put_weight(piece, kept - self._update(member, means) * rate.to(kept.dtype))

    def _average(self, members: list[Member], counts: list[Tensor]) -> dict[int, Tensor]:
        """Takes the new squares in. Returns, by piece, the mean of its row means, one for each matrix."""
        places = [number for number, (piece, _, _) in enumerate(members) if len(piece.shape) > 1]
        pieces = [members[number][0] for number in places]
        parts, over = [], []
        for piece in pieces:
            grad = self.gradient(piece)
            parts += [squares(grad, dim=-1), squares(grad, dim=-2)]
            over += [[len(piece.shape) - 1], [len(piece.shape) - 2]]
        sums = total(parts, [piece for piece in pieces for _ in range(2)], over)
        for number, (piece, state, _) in enumerate(members):
            share = counts[number] ** DECAY
            if len(piece.shape) == 1:
                self._take(state, "variance", self.gradient(piece).square(), share)
        for place, number in enumerate(places):
            piece, state, _ = members[number]
            share, dtype = counts[number] ** DECAY, piece.tensor.dtype
            for key, side, whole in zip(("row_var", "col_var"), (-1, -2), sums[2 * place : 2 * place + 2]):
                self._take(state, key, (whole / piece.shape[side]).to(dtype), share)
        rows = [members[number][1]["row_var"].sum(-2, keepdim=True, dtype=torch.float64) for number in places]
        rows = total(rows, pieces, [[len(piece.shape) - 2] for piece in pieces])
        return {id(p): (row / p.shape[-2]).to(p.tensor.dtype) for p, row in zip(pieces, rows, strict=True)}

    def _take(self, state: dict[str, Tensor], key: str, new: Tensor, share: Tensor) -> None:
        old = state.setdefault(key, torch.zeros_like(new))
        self.put(old, old.lerp(new, share.to(new.dtype)))

    def _update(self, member: Member, means: dict[int, Tensor]) -> Tensor:
        """Made twice, once for its length, for the sake of memory."""
        piece, state, _ = member
        if id(piece) in means:
            square = state["row_var"] @ state["col_var"] / means[id(piece)].clamp(min=SMALLEST)
        else:
            square = state["variance"]
        return square.clamp(min=SMALLEST**2).rsqrt_() * self.gradient(piece)
