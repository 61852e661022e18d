"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): learns which of two answers is better.

A sample is a row of two conversations, the chosen and the rejected one. With the answers' log-probabilities:

    loss = -log sigmoid(beta * (log p(chosen) - log p(rejected) - reference))

where `reference` is the same difference under the model that training started from. The loss is a sum over positions
within a nonlinear function, so its gradient is that of the positions' cross-entropies, each times a weight that is the
same for all positions of an answer. The head computes the cross-entropies first, then the weights, then the gradients.

Targets of the rejected answer are stored below `IGNORE_INDEX`, so that a part of a row tells what its positions are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models.chain import IGNORE_INDEX

Weigh = Callable[[Tensor], tuple[Tensor, Tensor]]  # losses of positions -> loss, its gradient with respect to them
_collectors: list[list[Tensor]] = []


def mark_rejected(targets: Any) -> Any:
    """Returns targets, of an array or a tensor, as those of a rejected answer."""
    return IGNORE_INDEX - 1 - targets + (targets == IGNORE_INDEX) * (IGNORE_INDEX + 1)


def plain_targets(targets: Any) -> Any:
    """Returns the token ids of targets, and `IGNORE_INDEX` where none is."""
    return targets + (targets < IGNORE_INDEX) * (IGNORE_INDEX - 1 - 2 * targets)


def preference_weights(targets: Tensor, preference: Tensor, all_reduce: Callable[[Tensor], None] | None,
                       parts: int) -> Weigh:  # fmt: skip
    """Returns what makes DPO's loss, summed over the pairs, of the losses of all positions. `targets` (B, S);
    `preference` (B, 2): reference and beta of each pair. If the positions of a pair are split over `parts` ranks,
    `all_reduce` sums over these, and each has its part of the loss."""
    sides = (targets > IGNORE_INDEX).long() - (targets < IGNORE_INDEX).long()

    def weigh(losses: Tensor) -> tuple[Tensor, Tensor]:
        reference, beta = preference.to(losses.dtype).unbind(1)
        sums = torch.stack(((losses.view_as(sides) * sides).sum(1), sides.abs().sum(1).to(losses.dtype)))
        if all_reduce is not None:
            all_reduce(sums)
        gap, is_pair = sums[0] + reference, sums[1] > 0  # the others pad a batch
        for collector in _collectors:
            collector.append(gap.detach())
        loss = (F.softplus(beta * gap) * is_pair).sum() / parts
        return loss, (sides * (beta * torch.sigmoid(beta * gap)).unsqueeze(1)).flatten()

    return weigh


@contextmanager
def collected_gaps() -> Iterator[list[Tensor]]:
    """Collects by micro-batch how much more likely each rejected answer is than the chosen one, in logarithms, beyond
    the reference; on ranks without the head, nothing."""
    collector: list[Tensor] = []
    _collectors.append(collector)
    try:
        yield collector
    finally:
        _collectors.remove(collector)
