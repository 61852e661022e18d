"""What is not kept for the backward but computed again.

    none       everything is kept
    selective  products and attention are kept, the rest of each block is computed again
    full       only what enters a block is kept
    0.4        at most this share of the blocks keeps everything, the others are `full`

Dropout is a hash and not a stream, so nothing of the random state is to be saved or restored.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.layout import Layout, keep_share
from shardwise.models.chain import Chain

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply(chain: Chain, layout: Layout) -> None:
    """Wraps the blocks of a chain."""
    if layout.recompute == "none":
        return
    share = keep_share(layout.recompute) or 0.0
    for number, block in enumerate(chain.blocks()):
        # Spread the kept blocks evenly: block n is kept when the running count of kept ones rises there.
        if int((number + 1) * share) > int(number * share):
            continue
        _wrap(block, selective=layout.recompute == "selective")


def _wrap(block: nn.Module, selective: bool) -> None:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # The instance's forward is replaced, not the module: names and hooks stay as they are.
    block.forward = partial(checkpoint, block.forward, **options)
