"""Mixed precision: master and compute dtypes, and the loss scale of fp16.

Weights, reduced gradients and optimizer state are in the master dtype. Modules see weights cast to the compute dtype in
every layout: by FSDP's mixed-precision policy if FSDP shards the weights, by a parametrization otherwise."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.models.chain import Chain
from shardwise.models.layers import parametrize

COMPUTE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
                  "fp8": torch.bfloat16}  # fmt: skip


class Precision:
    def __init__(self, name: str):
        self.name, self.compute_dtype = name, COMPUTE_DTYPES[name]
        self.master_dtype = torch.float64 if name == "float64" else torch.float32
        self.is_mixed = self.compute_dtype != self.master_dtype
        self.use_fp8 = name == "fp8"  # whether the linear layers of the blocks run in fp8 (`shardwise.models.fp8`)

    def apply(self, chain: Chain, applies_to: Callable[[Tensor], bool] | None = None) -> None:
        """Makes every module read its parameters, or those of a kind, in the compute dtype."""
        if self.is_mixed:
            # One object for all modules: the compiler guards on it, so another would recompile every block.
            cast = partial(torch.Tensor.to, dtype=self.compute_dtype)
            for part in chain.computing_modules():
                for name, parameter in part._parameters.items():
                    is_meant = applies_to is None or (parameter is not None and applies_to(parameter))
                    if is_meant:
                        parametrize(part, name, cast)


class LossScale:
    """Dynamic loss scaling for fp16: one scale for all ranks, kept on the device. It follows the global gradient norm,
    the same on every rank, so that ranks cannot disagree about an overflow (with PyTorch's GradScaler they can). Halves
    after an overflow, doubles after `growth_interval` steps without one."""

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
