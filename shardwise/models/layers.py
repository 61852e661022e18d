"""What models of several kinds are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import fp8


class Linear(nn.Linear):
    """PyTorch's linear map, or one in 8 bits."""

    use_fp8 = False
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return fp8.linear(x, self.weight, self.bias) if self.use_fp8 else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """PyTorch's, but spelled out where a compiler can join it with its neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + (self.eps or 0.0))
        return (wide * self.weight).to(x.dtype)


def rope_angles(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, H/2) in float64: angles of long sequences lose their digits in less."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, rope_cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + H/2) of features of (..., S, heads, H) by their position's angles."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t[: x.shape[-3], None].to(wide) for t in rope_cos_sin)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, document_ids: Tensor | None = None) -> Tensor:
    """Attention of (B, heads, S, H), within documents; keys and values may have fewer heads."""
    mask = None
    if document_ids is not None:
        mask = (document_ids.unsqueeze(1) == document_ids.unsqueeze(2)).unsqueeze(1)
        mask, causal = mask.tril() if causal else mask, False
    is_gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=is_gqa)
