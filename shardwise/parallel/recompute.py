"""Activation checkpointing: which activations are saved for the backward and which are recomputed.

docs/how-to/save-memory.md lists the choices; `selective` is `full` for blocks with in-place operators. Our dropout is a
hash of seed and position, so the state of a generator is saved and restored only for modules that draw from one.

PyTorch's `checkpoint` recomputes a block in every traversal of its graph. Under a split backward that is once for the
input gradient and once per matmul and norm, 9 forwards instead of 2, and selective checkpointing refuses the second
traversal. `CheckpointOnce` recomputes a block once and keeps the activations until the weight gradients are done."""

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode as CachedMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from shardwise.layout import Layout, kept_activation_fraction
from shardwise.models.chain import Chain

_SAVED_OPS = [
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor_out.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]  # fmt: skip


def apply(chain: Chain, layout: Layout) -> None:
    """Wraps the forward of each block of a chain."""
    if layout.recompute == "none":
        return
    keep_fraction = kept_activation_fraction(layout.recompute) or 0.0
    in_place_blocks = chain.in_place_blocks()
    strict = partial(create_selective_checkpoint_contexts, _SAVED_OPS)
    experts = set(chain.stacked_experts().values() if layout.expert > 1 else ())
    # It would warn of operators in place under a compiler; such blocks are `full`.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for number, block in enumerate(chain.blocks()):
        # Spreads the blocks that save everything evenly over the stage.
        if int((number + 1) * keep_fraction) > int(number * keep_fraction):
            continue
        # Replaces the instance's forward, not the module, so parameter names and hooks stay.
        forward = chain.recomputable(block.forward)
        selective = strict if experts.isdisjoint(block.modules()) else _lenient_contexts
        is_selective = layout.recompute == "selective" and block not in in_place_blocks
        if layout.has_split_backward:
            block.forward = CheckpointOnce(forward, selective if is_selective else noop_context_fn)
        else:
            options: dict[str, Any] = {"preserve_rng_state": chain.differs_between_calls}
            if is_selective:
                options["context_fn"] = selective
            block.forward = _checkpointed(forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Returns the forward under PyTorch's `checkpoint`, as a function: the compiler traces no `partial` of it."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return checkpointed


class _LenientRecomputation(CachedMode):
    """Runs other operators than the forward did, which PyTorch refuses: around experts inside of a block, FSDP gathers
    weights only if they are not gathered already."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(op, types, args, kwargs) if op in _SAVED_OPS else op(*args, **kwargs or {})


def _lenient_contexts() -> tuple[Any, Any]:
    forward, recomputation = create_selective_checkpoint_contexts(_SAVED_OPS)
    recomputation.__class__ = _LenientRecomputation
    return forward, recomputation


class CheckpointOnce:
    """A forward that saves only its arguments and is recomputed at most once, however often the backward runs."""

    def __init__(self, forward: Callable[..., Any], contexts: Callable[[], Any]):
        self.forward, self.contexts = forward, contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward_context, recompute_context = self.contexts()
        count = itertools.count()
        saved: list[Tensor] = []  # in the order in which the forward saves them

        def unpack(number: int) -> Tensor:
            if not saved:
                detach = lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)  # noqa: E731
                detached_args, detached_kwargs = tree_map_only(Tensor, detach, (args, kwargs))
                hooks = saved_tensors_hooks(lambda t: saved.append(t.detach()), _forbid_unpack)
                with torch.enable_grad(), recompute_context, hooks:
                    self.forward(*detached_args, **detached_kwargs)
            return saved[number]

        # The graph references `unpack`, which references `saved`: both are freed with the last gradient.
        with saved_tensors_hooks(lambda tensor: next(count), unpack), forward_context:
            return self.forward(*args, **kwargs)


def _forbid_unpack(packed: Any) -> Tensor:
    raise AssertionError("the graph of a recomputed block is never traversed")
