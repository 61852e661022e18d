"""Collectives under one name for all PyTorch versions that we run on (2.13 renamed some of them)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional


def _either(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


all_reduce = dist.all_reduce
all_gather = _either(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter = _either(dist, "reduce_scatter_single", "reduce_scatter_tensor")

all_to_all = dist.all_to_all_single


def _waited(collective: Any) -> Any:
    """PyTorch hands out what is still on its way as a tensor that waits when it is used. One that is dropped before
    anyone used it is written to after its memory was freed (gloo), so we wait at once; a GPU's stream does anyway."""

    def wait(*args: Any) -> Tensor:
        found: Any = collective(*args)
        if isinstance(found, functional.AsyncCollectiveTensor):
            found.trigger_wait()
        return found

    return wait


# With a gradient: each of the first two is the other's backward, the third its own, with sizes the other way round.
all_gather_with_grad = _waited(_either(functional, "all_gather_single_autograd", "all_gather_tensor_autograd"))
reduce_scatter_with_grad = _waited(
    _either(functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
)
all_to_all_with_grad = _waited(functional.all_to_all_single_autograd)

__all__ = [
    "all_gather", "all_gather_with_grad", "all_reduce", "all_to_all", "all_to_all_with_grad", "reduce_scatter",
    "reduce_scatter_with_grad",
]  # fmt: skip
