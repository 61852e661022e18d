"""Layers that several families share: linear, RMSNorm, RoPE and attention; parameters that a module reads through a
function: a cast, some of the rows, a sum."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.models import fp8
from shardwise.models.gpt_family import RopeScaling


class Linear(nn.Linear):
    """`nn.Linear`, optionally in FP8 and with a scaled input (muP)."""

    use_fp8 = False
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return fp8.linear(x, self.weight, self.bias) if self.use_fp8 else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, written out under `torch.compile` so that the compiler fuses it with its neighbors."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + (self.eps or 0.0))
        return (y * self.weight).to(x.dtype)


def rope_angles(
    length: int, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (S, H/2), in float64 because angles of long sequences lose precision in float32."""
    frequency = rope_frequencies(head_dim, theta, scaling).to(device)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Returns the angle by which each feature pair turns from one position to the next."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None or scaling.factor == 1.0:
        return frequency
    kept = torch.zeros_like(frequency)  # share of the original frequency
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def apply_rope(x: Tensor, rope_cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the feature pairs (i, i + H/2) of x (..., S, heads, H) by the angles of their positions."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t[: x.shape[-3], None].to(dtype) for t in rope_cos_sin)
    a, b = x.to(dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Returns the position of each token (B, S) in its document."""
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_first = document_ids.diff(prepend=document_ids[:, :1] - 1) != 0
    return places - torch.where(is_first, places, 0).cummax(1).values


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, document_ids: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of (B, heads, S, H), masked across documents if `document_ids` is given."""
    if not q.is_cuda and (excess := q.shape[-1] - v.shape[-1]) > 0:  # CPUs' fused kernel wants equal sizes
        return sdpa(q, k, F.pad(v, (0, excess)), causal, document_ids)[..., :-excess]
    mask = None
    if document_ids is not None:
        mask = (document_ids.unsqueeze(1) == document_ids.unsqueeze(2)).unsqueeze(1)
        mask, causal = mask.tril() if causal else mask, False
    is_gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=is_gqa)


Parametrization = Callable[[Tensor], Tensor | None]


def parametrize(module: nn.Module, name: str, parametrization: Parametrization) -> None:
    """Makes `module.name` read as `parametrization(parameter)`. Several apply in order, until one returns None.

    Gradients flow through the function to the parameter. The parameter itself stays in `_parameters`, where FSDP swaps
    it; a property of the module's class reads it from there. Hooks could do the same, but the compiler cannot trace
    hooks that must also run after an error, and `torch.nn.utils.parametrize` moves and renames the parameter."""
    parametrizations: dict[str, list[Parametrization]] = module.__dict__.setdefault("_parametrizations", {})
    if name not in parametrizations:
        module.__class__ = subclass(type(module), **{name: _parameter_reader(name)})  # type: ignore[assignment,arg-type]
    parametrizations.setdefault(name, []).append(parametrization)


def is_standard_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm that computes as PyTorch's: a subclass may have a forward of its own."""
    room = type(module).forward.__module__.partition(".")[0]
    return isinstance(module, _BatchNorm) and room in ("torch", "shardwise")


@cache
def subclass(base: type, **attributes: Any) -> type:
    """Returns one class for all modules of a type, so that code compiled for one block serves the next."""
    return type(base.__name__, (base,), attributes)


@cache
def _parameter_reader(name: str) -> property:
    def get_parameter(module: nn.Module) -> Tensor | None:
        value: Tensor | None = module._parameters.get(name)
        if isinstance(value, DTensor):
            return value  # outside of forward and backward the parameter is FSDP's sharded DTensor
        for parametrization in module.__dict__["_parametrizations"][name]:
            value = None if value is None else parametrization(value)
        return value

    return property(get_parameter)
