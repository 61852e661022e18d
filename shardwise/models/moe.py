"""A feed-forward part of many experts, of which each token uses a few.

A token goes to the `active` experts that its router finds likeliest; none is dropped but by a `capacity`. Rows are
sorted by expert, so that the products of all experts are one grouped product, and sorted back; both are permutations,
in which no two rows meet, so gradients add up in the same order everywhere.

Letters in shapes: T tokens, E experts, F hidden features of one, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.models.moe_family import MoEConfig


class MoE(nn.Module):
    def __init__(self, config: MoEConfig, shared: nn.Module | None):
        super().__init__()
        self.router = nn.Parameter(torch.empty(config.experts, config.width))
        self.bank = ExpertWeights(config)
        self.shared = shared
        self.top_k, self.router_aux_loss_coef, self.router_z_loss_coef = (
            config.experts_per_token,
            config.router_aux_loss_coef,
            config.router_z_loss_coef,
        )
        self.sigmoid, self.routed_scaling_factor, self.capacity_factor = (
            config.scoring_func == "sigmoid",
            config.routed_scaling_factor,
            config.capacity_factor,
        )
        self.bias_update_rate = config.router_bias_update_rate
        self.register_buffer("expert_bias", torch.zeros(config.experts) if self.bias_update_rate else None)
        """What is added to likelihoods where experts are chosen."""
        self.tokens_per_expert: Tensor | None = torch.zeros(config.experts) if self.bias_update_rate else None
        """Rows that each expert was chosen for since the last step."""
        self.aux_loss_scale: Callable[[], Tensor] | None = None
        """The factor of the router's own losses in the gradient; without it they are left in `extra` instead."""
        self.aux_loss: Tensor | None = None
        self.expert_load: Tensor | None = None
        """Rows that each expert got since this was last set to zero; what is computed again counts again."""
        self.dropped_tokens: Tensor | None = None
        """Choices that found no room, counted alike."""
        self.sequence_shards = 1
        """In which sequences are cut over ranks; `total` sums over these."""
        self.all_reduce_sum: Callable[[Tensor], Any] | None = None
        self.local_experts: tuple[int, int] | None = None
        """The first expert and how many, whose rows this rank takes care of; of others it gives zeros. None: all."""
        self.dispatcher: Any = None
        """Takes rows to experts that other ranks hold (`shardwise.parallel.expert`); None: all are here."""

    @torch.compiler.disable  # how many rows an expert has is known only when it runs
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(tokens.to(wide), self.router.to(wide))  # T E
        probs = scores.sigmoid() if self.sigmoid else scores.softmax(-1)
        expert_ids = (probs if self.expert_bias is None else probs.detach() + self.expert_bias).topk(self.top_k).indices
        weights = probs.gather(1, expert_ids)
        weights = self.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        y = self.apply_experts(tokens, weights.to(x.dtype), expert_ids, x.shape[0])
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = y.unflatten(0, x.shape[:2])
        if not self.router_aux_loss_coef and not self.router_z_loss_coef:
            return y
        # Both are sums over samples, so that no layout or micro-batch changes them.
        if self.sigmoid:
            probs = probs / probs.sum(-1, keepdim=True)
        aux_loss = self.router_aux_loss_coef * load_balancing_loss(
            probs, expert_ids, x.shape[0], self.sequence_shards, self.all_reduce_sum
        )
        if self.router_z_loss_coef:
            aux_loss = aux_loss + self.router_z_loss_coef * scores.logsumexp(-1).square().sum() / (
                self.sequence_shards * x.shape[1]
            )
        if self.aux_loss_scale is None:
            self.aux_loss = aux_loss
            return y
        return AddAuxiliaryLoss.apply(y, aux_loss, self.aux_loss_scale())  # type: ignore[no-any-return]

    def reset_buffers(self) -> None:
        """Starts what is remembered, once it has memory."""
        if self.bias_update_rate:
            wide = torch.float64 if self.router.dtype == torch.float64 else torch.float32
            self.expert_bias, self.tokens_per_expert = (
                torch.zeros(self.router.shape[0], dtype=wide, device=self.router.device) for _ in range(2)
            )

    @torch.no_grad()
    def update_expert_bias(self, rows: Tensor) -> None:
        """After a step, given the rows that each expert was chosen for in all of it (Wang et al. 2024)."""
        assert self.expert_bias is not None and self.tokens_per_expert is not None
        self.expert_bias.add_((rows.mean() - rows).sign(), alpha=self.bias_update_rate)
        self.tokens_per_expert.zero_()

    def apply_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor, samples: int) -> Tensor:
        """What each token's experts make of it, weighted."""
        order = expert_ids.flatten().argsort(stable=True)
        counts = _tokens_per_expert(expert_ids.flatten(), self.router.shape[0])
        # Not when a block is computed again in the backward.
        first_time = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if first_time:
            self.expert_load = counts.clone() if self.expert_load is None else self.expert_load.add_(counts)
            if self.tokens_per_expert is not None:
                self.tokens_per_expert.add_(counts)
        rows = tokens.repeat_interleave(self.top_k, 0)
        kept = self._kept_mask(expert_ids, samples, first_time)
        if kept is not None:
            first, count = self.local_experts or (0, self.router.shape[0])
            order = order[: len(order) * count // len(counts)] if is_fake(expert_ids) else order[kept[order]]
            expert_out = self._run_experts(
                rows.index_select(0, order), _tokens_per_expert(expert_ids.flatten()[order] - first, count)
            )
            rows = torch.zeros_like(rows).index_copy(0, order, expert_out)
        else:
            inverse = order.argsort()
            rows = Permute.apply(self._run_experts(Permute.apply(rows, order, inverse), counts), inverse, order)
        return (rows.unflatten(0, expert_ids.shape) * weights.unsqueeze(-1)).sum(1)

    def _kept_mask(self, expert_ids: Tensor, samples: int, first_time: bool) -> Tensor | None:
        """Which of all choices are served here; None: all of them."""
        kept = None
        if self.capacity_factor and not is_fake(expert_ids):
            kept = within_capacity(expert_ids.reshape(samples, -1), self.router.shape[0], self.capacity_factor)
            if first_time:
                dropped = (~kept).sum()
                self.dropped_tokens = dropped if self.dropped_tokens is None else self.dropped_tokens.add_(dropped)
        if self.local_experts is not None:
            first, count = self.local_experts
            is_local = ((expert_ids >= first) & (expert_ids < first + count)).flatten()
            kept = is_local if kept is None else kept & is_local
        return kept

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that lie by expert, through the experts, wherever they are."""
        dispatch_state = None
        if self.dispatcher is not None:
            rows, counts, dispatch_state = self.dispatcher.dispatch(rows, counts)
        rows = self.bank(rows, counts)
        if self.dispatcher is not None:
            rows = self.dispatcher.combine(rows, dispatch_state)
        return rows


class ExpertWeights(nn.Module):
    """The experts themselves, as stacks of matrices."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        count, width, hidden = config.experts, config.width, config.expert_ffn
        self.gate = nn.Parameter(torch.empty(count, hidden, width)) if config.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(count, hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that lie by expert, through theirs."""
        hidden = GroupedLinear.apply(rows, self.up, counts)
        if self.gate is None:
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = F.silu(GroupedLinear.apply(rows, self.gate, counts)) * hidden
        return GroupedLinear.apply(hidden, self.down, counts)  # type: ignore[no-any-return]


def within_capacity(expert_ids: Tensor, experts: int, capacity: float) -> Tensor:
    """Of the choices of each sample (samples, choices in order), which find room: an expert takes `capacity` times its
    even share of a sample. Flat."""
    capacity_rows = math.ceil(capacity * expert_ids.shape[1] / experts)
    order = expert_ids.argsort(dim=1, stable=True)
    by_expert = expert_ids.gather(1, order)
    counts = torch.zeros(expert_ids.shape[0], experts, dtype=torch.int64, device=expert_ids.device)
    counts.scatter_add_(1, expert_ids, torch.ones_like(expert_ids))
    first = counts.cumsum(1) - counts  # where each expert's begin
    position_in_expert = torch.arange(expert_ids.shape[1], device=expert_ids.device) - first.gather(1, by_expert)
    return torch.empty_like(order).scatter_(1, order, position_in_expert).flatten() < capacity_rows


def load_balancing_loss(
    probs: Tensor,
    expert_ids: Tensor,
    samples: int,
    num_shards: int = 1,
    all_reduce_sum: Callable[[Tensor], Any] | None = None,
) -> Tensor:
    """By sample, E x the sum over experts of their share of its tokens and their mean likelihood: 1 where all are used
    alike. Summed over samples. (DeepSeek-AI 2024, equation 17.) Where a sequence is cut into `parts`, `total` sums what
    was used of them, and the sum over parts is the whole."""
    experts = probs.shape[1]
    each = expert_ids.reshape(samples, -1)
    used = torch.zeros(samples, experts, dtype=probs.dtype, device=probs.device)
    used.scatter_add_(1, each, torch.ones_like(each, dtype=probs.dtype))
    if all_reduce_sum is not None:
        all_reduce_sum(used)
    return (
        experts * (used / (num_shards * each.shape[1]) * probs.unflatten(0, (samples, -1)).mean(1) / num_shards).sum()
    )


def _tokens_per_expert(expert_ids: Tensor, experts: int) -> Tensor:
    counts = torch.zeros(experts, dtype=torch.int64, device=expert_ids.device)
    return counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))


class AddAuxiliaryLoss(torch.autograd.Function):
    """A value, and beside it a loss that joins only in the backward, times a factor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, aux_loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = aux_loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0].to(ctx.dtype), None


class Permute(torch.autograd.Function):
    """Rows in another order, of which the other way round is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class GroupedLinear(torch.autograd.Function):
    """`x @ weight.T` with another weight (E, out, in) for each run of rows; a run may be empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return grouped_mm(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0]
        if _has_grouped_mm(grad):
            grad_weight = torch._grouped_mm(grad.t(), x, _group_offsets(counts))
        else:
            runs = zip(grad.split(group_sizes(counts, x)), x.split(group_sizes(counts, x)), strict=True)
            grad_weight = torch.stack([one.t() @ other for one, other in runs])
        return grouped_mm(grad, weight, counts), grad_weight, None


def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Runs of rows, each times its own matrix (E, in, out)."""
    if _has_grouped_mm(x):
        return torch._grouped_mm(x, weight, _group_offsets(counts))
    return torch.cat([run @ matrix for run, matrix in zip(x.split(group_sizes(counts, x)), weight, strict=True)])


def _has_grouped_mm(x: Tensor) -> bool:
    """Whether PyTorch has one kernel for all experts; it also spares the host from knowing how many rows each has."""
    return x.is_cuda and x.dtype == torch.bfloat16


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers."""
    return isinstance(tensor, FakeTensor)


def _group_offsets(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def group_sizes(counts: Tensor, x: Tensor) -> list[int]:
    """How many of the rows of `x` are in each run; the host must know them."""
    if is_fake(counts):  # a dry run knows no numbers: as even as can be
        rows, runs = x.shape[0], counts.shape[0]
        return [rows // runs + (run < rows % runs) for run in range(runs)]
    return [int(count) for count in counts.tolist()]
