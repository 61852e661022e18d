"""A user's own optimizer on parameter shards: any class like those of `torch.optim`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.optim.param_shard import ParamShard

# PyTorch's optimizers in which the update of an element depends on that element's weight, gradient and state alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")


def make_user_optimizer(
    factory: Callable[..., torch.optim.Optimizer], shards: Sequence[ParamShard], lr: float
) -> torch.optim.Optimizer:
    """Builds the optimizer. It also clips, unscales and skips steps, which ours do in their kernels."""
    kind: Any = factory.func if isinstance(factory, partial) else factory
    name = getattr(kind, "__name__", type(kind).__name__)
    is_elementwise = getattr(kind, "elementwise", name in ELEMENTWISE and kind.__module__.startswith("torch."))
    split = next((shard for shard in shards if tuple(shard.tensor.shape) != tuple(shard.shape)), None)
    if split is not None and not is_elementwise:
        raise LayoutError(
            f"the optimizer {name} may use more of a parameter than the part that a rank holds (such as a norm), and "
            f"this layout splits {split.name}; use replicate or pipeline, or set `elementwise = True` on the class if "
            "the update of each element depends on that element alone."
        )
    optimizer = factory([shard.tensor for shard in shards], lr=lr)
    update: Any = optimizer.step

    @torch.no_grad()
    def step(closure: None = None) -> None:
        if bool(optimizer.__dict__.pop("found_inf", 0.0)):
            return
        divisor = optimizer.__dict__.pop("grad_scale", None)
        for shard in shards:
            gradient = shard.tensor.grad
            if gradient is None and shard.compute_copy is not None and shard.compute_copy.grad is not None:
                gradient = shard.tensor.grad = shard.compute_copy.grad.to(shard.tensor.dtype)
            if divisor is not None and gradient is not None:
                gradient.div_(divisor)
        update()

    optimizer.step = step  # type: ignore[method-assign,assignment]
    return optimizer
