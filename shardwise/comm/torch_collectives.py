"""PyTorch's collective internals, in one file.

Functional collectives live in a private module and are the only ones that compile. PyTorch 2.13 renamed some
collectives.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional


def _first_available(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


all_gather_into_tensor = _first_available(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_tensor = _first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather = _first_available(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = _first_available(functional, "reduce_scatter_single", "reduce_scatter_tensor")


def wait(output: Any) -> Tensor:
    """Waits for the result of a functional collective."""
    return output.wait() if isinstance(output, functional.AsyncCollectiveTensor) else output
