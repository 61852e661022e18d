"""In which precision numbers are kept and computed with.

Weights, gradients' sums and optimizer states are kept in the master type. Modules see their weights rounded to the
compute type, in every layout alike: through FSDP's own policy where it holds the weights, through a view elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.parallel.parametrize import parametrize

COMPUTE_DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    name: str

    @property
    def compute_dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.name]

    @property
    def master_dtype(self) -> torch.dtype:
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def is_mixed(self) -> bool:
        return self.compute_dtype != self.master_dtype

    @property
    def use_fp8(self) -> bool:
        """Whether the products of the blocks are in 8 bits (`shardwise.models.fp8`)."""
        return self.name == "fp8"

    def fsdp_policy(self) -> MixedPrecisionPolicy:
        if not self.is_mixed:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=self.master_dtype)

    def apply(self, module: nn.Module) -> None:
        """Lets every module see its own parameters in the compute type."""
        if self.is_mixed:
            cast = partial(
                torch.Tensor.to, dtype=self.compute_dtype
            )  # one for all: compiled blocks are told apart by it
            for part in module.modules():
                for name in part._parameters:
                    parametrize(part, name, cast)


class LossScale:
    """Dynamic loss scaling for fp16: one scale and one decision for the whole world, kept on the device.

    The decision comes from the global gradient norm, which is the same number on every rank, so no two ranks of any
    mesh can decide differently (PyTorch's GradScaler lets them). Halves after an overflow, doubles after `patience`
    steps without one.
    """

    def __init__(self, precision: Precision, device: torch.device, growth_interval: int = 1000):
        self.dynamic = precision.name == "fp16"
        self.growth_interval = growth_interval
        self.value = torch.tensor(2.0**16 if self.dynamic else 1.0, dtype=precision.master_dtype, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, overflow: Tensor) -> None:
        if not self.dynamic:
            return
        self.growth_tracker = torch.where(overflow, 0, self.growth_tracker + 1)
        grow = self.growth_tracker >= self.growth_interval
        factor = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0)).to(self.value.dtype)
        self.value = (self.value * factor).clamp(min=1.0)
        self.growth_tracker = torch.where(grow, 0, self.growth_tracker)

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value, "growth_tracker": self.growth_tracker}
