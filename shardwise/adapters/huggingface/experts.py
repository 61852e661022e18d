"""Experts of transformers' models on the ranks of the expert axis.

A rank keeps some of the experts that a module of transformers has stacked. Tokens are sorted by expert, sent to the
ranks that have them, go through the module's own forward with one expert each, and come back to be weighted and summed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.moe import SortByExpert, WeightedSum, tokens_per_expert


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
