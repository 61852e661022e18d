"""Exchanges small values between ranks as JSON.

PyTorch's `all_gather_object` and `broadcast_object_list` unpickle what they receive, so whoever can send to a rank can
run code on it. JSON is only data. Tuples arrive as lists, and dictionaries must have strings as keys.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    encoded = _encode(value, group)
    size = torch.tensor([len(encoded)], device=encoded.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.nn.functional.pad(encoded, (0, int(max(sizes)) - len(encoded)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the value of the group's first rank, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return json.loads(json.dumps(value))
    encoded = _encode(value if dist.get_rank(group) == 0 else None, group)
    size = torch.tensor([len(encoded)], device=encoded.device)
    dist.broadcast(size, group=group, group_src=0)
    encoded = encoded if dist.get_rank(group) == 0 else encoded.new_empty(int(size))
    dist.broadcast(encoded, group=group, group_src=0)
    return _decode(encoded)


def forbid_pickles() -> None:
    """Makes PyTorch's object collectives fail in this process instead of unpickling what other ranks send."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("collectives of Python objects are disabled: they would unpickle what other ranks send.")

    dist.distributed_c10d._tensor_to_object = refuse


def _encode(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = "cuda" if dist.get_backend(group) != "gloo" and torch.cuda.is_available() else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(encoded: Tensor) -> Any:
    return json.loads(bytes(encoded.cpu().numpy()))
