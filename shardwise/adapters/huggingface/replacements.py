"""What replaces parts of transformers' models: attention, experts and the head.

Attention over a split sequence: each rank has the queries of its own positions. Plain attention, causal or not, is our
ring or Ulysses attention. With a sliding window, softcap or sinks, keys and values are all-gathered, and transformers'
own mask function is evaluated at this rank's positions. Both are registered with transformers as "shardwise". Experts
on the ranks of the expert axis: a rank keeps some of the experts that a module of transformers has stacked. Tokens are
sorted by expert, sent to the ranks that have them, go through the module's own forward with one expert each, and come
back to be weighted and summed. With the fused loss, the head of a causal language model never has all logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters import split_attention
from shardwise.adapters.split_attention import SPLIT, positions
from shardwise.comm.collectives import all_gather_with_grad, all_reduce
from shardwise.errors import LayoutError
from shardwise.models.loss import fused_linear_cross_entropy, loss_chunk_size
from shardwise.models.moe import SortByExpert, WeightedSum, tokens_per_expert
from shardwise.models.preference import Weigh, plain_targets, preference_weights
from shardwise.models.trace import with_fake_tensors

NAME = "shardwise"


def attend_through_shardwise(module: nn.Module) -> None:
    register()
    for config in _configs(module):
        config._attn_implementation = NAME


@contextmanager
def trial(module: nn.Module) -> Iterator[None]:
    """Within it, a module attends through our function."""
    before = [(config, config._attn_implementation) for config in _configs(module)]
    try:
        attend_through_shardwise(module)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _configs(module: nn.Module) -> list[Any]:
    found = [getattr(part, "config", None) for part in module.modules()]
    return [config for config in {id(c): c for c in found}.values() if hasattr(config, "_attn_implementation")]


def register() -> None:
    """Adds our attention to transformers' tables."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if NAME in AttentionInterface._global_mapping:
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    masking: Any = masking_utils
    # transformers takes positions that jump for several sequences, and those of a CUDA graph, which it cannot read.
    masking.find_packed_sequence_indices = lambda position_ids: SPLIT.document_ids
    # Since 5.23 it also counts from each document's start, by this rank's positions; distances are the same without.
    masking.packed_sequence_compatibility_function = lambda function, position_ids, documents: masking.and_masks(
        masking.packed_sequence_mask_function(documents), function
    )


def attention_mask(batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor],
                   attention_mask: Tensor | None = None, use_vmap: bool = False, device: Any = "cpu",
                   **kwargs: Any) -> Tensor | None:  # fmt: skip
    """Returns which keys of the sequence this rank's queries see (B, 1, queries, keys); None: all, or all before."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if attention_mask is not None or use_vmap:
        raise LayoutError("this model builds a mask of its own, which cannot be split over context ranks.")
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return None
    queries, keys = _positions(q_length, device)
    batch = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    mask = mask_function(batch, torch.zeros_like(batch[:1]), queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    return mask.expand(batch_size, 1, -1, -1)


def _positions(length: int, device: Any) -> tuple[Tensor, Tensor]:
    """Returns the positions of this rank's queries and of the gathered keys."""
    queries = positions(length, device)
    return queries, queries if SPLIT.all_positions is None else SPLIT.all_positions.to(device)


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
              softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
              **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention (B, H, S, D) as transformers' own implementations do; returns (B, S, H, D)."""
    split_attention.count_call(query)
    if position_bias is not None:
        raise LayoutError("this model adds a bias to attention, which cannot be split over context ranks.")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None and softcap is None and s_aux is None:
        out = split_attention.attention(query, key, value, causal=causal, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if SPLIT.axis is not None:
        key, value = (all_gather_with_grad(x.contiguous(), 2, SPLIT.axis) for x in (key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attention_mask is None and causal:
        queries, keys = _positions(query.shape[2], query.device)
        attention_mask = keys <= queries[:, None]
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale)
        return out.transpose(1, 2).contiguous(), None
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1).to(scores.dtype)
        scores = torch.cat((scores, sinks), -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


def expert_count(module: nn.Module) -> int:
    """Returns how many experts the layers of a module have; 0 if there are none, or they cannot be split."""
    layers = [part for part in module.modules() if hasattr(part, "_is_expert_parallel")]
    counts = {weight.shape[0] for part in layers for weight in part.parameters()}
    counts |= {getattr(part, "num_experts", 0) for part in layers}
    return int(counts.pop()) if len(counts) == 1 else 0


def dispatch_tokens(experts: Any, dispatcher: Any) -> None:
    """Makes an experts module, which keeps this rank's experts, exchange tokens with the other ranks."""
    count, ranks, forward = experts.num_experts, dispatcher.axis.size, experts.forward
    experts.num_experts = count // ranks

    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        choices = top_k_index.flatten()
        order = choices.argsort(stable=True)
        inverse = order.argsort()
        rows = SortByExpert.apply(hidden_states, order, inverse)
        rows, counts, state = dispatcher.dispatch(rows, tokens_per_expert(choices, count))
        local = torch.arange(count // ranks, device=rows.device).repeat_interleave(counts, output_size=rows.shape[0])
        rows = forward(rows, local[:, None], torch.ones_like(local[:, None], dtype=top_k_weights.dtype))
        rows = WeightedSum.apply(dispatcher.combine(rows, state), top_k_weights, order, inverse)
        return rows.to(hidden_states.dtype)

    experts.forward = torch.compiler.disable(run)


def can_fuse_loss(module: Any, whole: Any, sequence: int) -> bool:
    """Whether a module has its head whole and returns what it computes. `whole`: the same on meta, before the split."""
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
