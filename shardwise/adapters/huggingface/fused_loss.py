"""The fused loss of transformers' causal language models: their head computes the loss, and never all logits."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.adapters.split_attention import SPLIT
from shardwise.comm.collectives import all_reduce
from shardwise.models.loss import fused_linear_cross_entropy, loss_chunk_size
from shardwise.models.preference import Weigh, plain_targets, preference_weights
from shardwise.models.trace import with_fake_tensors


def can_fuse_loss(module: Any, whole: Any, sequence: int) -> bool:
    """Whether a module has its head whole and returns what the head computes, unchanged. `whole` is the same module on
    the meta device, before it was split."""
    head, whole_head = module.get_output_embeddings(), whole.get_output_embeddings()
    if type(whole_head) is not nn.Linear or whole_head.bias is not None or head.weight.shape != whole_head.weight.shape:
        return False
    seen: list[Tensor] = []
    handle = whole_head.register_forward_hook(lambda head, args, logits: seen.append(logits))
    whole.eval()  # nothing is drawn at random
    try:
        with handle, with_fake_tensors(whole), torch.no_grad():
            logits = whole(input_ids=torch.zeros(2, sequence, dtype=torch.int64)).logits
    except Exception:  # noqa: BLE001 - a forward that needs more raises what it likes; its loss is then computed whole
        return False
    finally:
        whole.train()
    return len(seen) == 1 and logits is seen[0]


def weigh_pairs(labels: Tensor) -> Weigh | None:
    """Returns what makes DPO's loss of the losses of all positions; None if the samples are not pairs of answers."""
    if SPLIT.preference is None:
        return None
    axis = SPLIT.axis
    all_reduce_sum = None if axis is None else partial(all_reduce, axis=axis)
    return preference_weights(labels, SPLIT.preference, all_reduce_sum, 1 if axis is None else axis.size)


def fuse_loss(module: Any, labels: dict[str, Tensor]) -> None:
    """Makes the head return the loss instead of logits, summed over the targets in `labels["labels"]`. In a pipeline,
    where many micro-batches wait for their backward, all logits are computed at once."""
    head = module.get_output_embeddings()
    is_pipelined = any("is_passed_over" in part.__dict__ for part in module.modules())
    chunk_size = 0 if is_pipelined else loss_chunk_size(head.weight.shape[0])

    def forward(x: Tensor) -> Tensor:
        targets, weigh = plain_targets(labels["labels"]).flatten(), weigh_pairs(labels["labels"])
        return fused_linear_cross_entropy(x.flatten(0, -2), head.weight, targets, None, chunk_size, weigh=weigh)

    head.forward = forward
