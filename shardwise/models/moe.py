"""Mixture of experts: each token goes through its top-k experts instead of one MLP.

No token is dropped unless `capacity_factor` is set. Rows are sorted by expert, so that one grouped matmul runs all
experts, and then sorted back. Both are permutations, so gradients are summed in the same order in every layout.

Shape letters: T tokens, E experts, F hidden features of an expert, D width."""

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.models.gpt_family import MoEConfig


class MoE(nn.Module):
    def __init__(self, config: MoEConfig, shared: nn.Module | None):
        super().__init__()
        self.router = nn.Parameter(torch.empty(config.experts, config.width))
        self.bank = ExpertWeights(config)
        self.shared = shared
        self.top_k, self.sigmoid = config.experts_per_token, config.scoring_func == "sigmoid"
        self.router_aux_loss_coef, self.router_z_loss_coef = config.router_aux_loss_coef, config.router_z_loss_coef
        self.routed_scaling_factor, self.capacity_factor = config.routed_scaling_factor, config.capacity_factor
        self.bias_update_rate = config.router_bias_update_rate
        self.register_buffer("expert_bias", torch.zeros(config.experts) if self.bias_update_rate else None)
        """Added to the probabilities for the top-k choice only; the routing weights do not include it."""
        self.tokens_per_expert: Tensor | None = torch.zeros(config.experts) if self.bias_update_rate else None
        """Tokens routed to each expert since the last optimizer step, for `update_expert_bias`."""
        self.aux_loss_scale: Callable[[], Tensor] | None = None
        """Returns the factor of the auxiliary loss in the gradient. None: the loss is stored in `aux_loss` instead."""
        self.aux_loss: Tensor | None = None
        self.expert_load: Tensor | None = None  # tokens per expert since the last reset, without recomputation
        self.dropped_tokens: Tensor | None = None  # choices beyond capacity since the last reset, likewise
        self.sequence_shards = 1  # number of ranks that split each sequence; `all_reduce_sum` sums over them
        self.all_reduce_sum: Callable[[Tensor], Any] | None = None
        self.local_experts: tuple[int, int] | None = None
        """(first, count) of the experts that this rank computes; other experts give zeros. None: all."""
        self.dispatcher: Any = None
        """Sends rows to experts on other ranks (`shardwise.parallel.expert`); None: all experts are local."""

    @torch.compiler.disable  # the number of rows per expert depends on the data
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(tokens.to(dtype), self.router.to(dtype))  # T E
        probs = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        expert_ids = (probs if self.expert_bias is None else probs.detach() + self.expert_bias).topk(self.top_k).indices
        weights = probs.gather(1, expert_ids)
        weights = self.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        y = self.apply_experts(tokens, weights.to(x.dtype), expert_ids, x.shape[0])
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = y.unflatten(0, x.shape[:2])
        if not self.router_aux_loss_coef and not self.router_z_loss_coef:
            return y
        # Both losses are sums over samples, so they do not depend on the layout or the micro-batch size.
        if self.sigmoid:
            probs = probs / probs.sum(-1, keepdim=True)
        shards = self.sequence_shards, self.all_reduce_sum
        aux_loss = self.router_aux_loss_coef * load_balancing_loss(probs, expert_ids, x.shape[0], *shards)
        if self.router_z_loss_coef:
            length = self.sequence_shards * x.shape[1]
            aux_loss = aux_loss + self.router_z_loss_coef * logits.logsumexp(-1).square().sum() / length
        if self.aux_loss_scale is None:
            self.aux_loss = aux_loss
            return y
        return AddAuxiliaryLoss.apply(y, aux_loss, self.aux_loss_scale())  # type: ignore[no-any-return]

    def reset_buffers(self) -> None:
        """Initializes the buffers on the device of the weights."""
        if self.bias_update_rate:
            dtype = torch.promote_types(self.router.dtype, torch.float32)
            zeros = torch.zeros(self.router.shape[0], dtype=dtype, device=self.router.device)
            self.expert_bias, self.tokens_per_expert = zeros, zeros.clone()

    @torch.no_grad()
    def update_expert_bias(self, counts: Tensor) -> None:
        """Raises the bias of underloaded experts and lowers that of others (Wang et al. 2024)."""
        assert self.expert_bias is not None and self.tokens_per_expert is not None
        self.expert_bias.add_((counts.mean() - counts).sign(), alpha=self.bias_update_rate)
        self.tokens_per_expert.zero_()

    def apply_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor, samples: int) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts."""
        order = expert_ids.flatten().argsort(stable=True)
        counts = tokens_per_expert(expert_ids.flatten(), self.router.shape[0])
        # Count each token once: activation checkpointing recomputes the forward inside the backward.
        first_time = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if first_time:
            self.expert_load = counts.clone() if self.expert_load is None else self.expert_load.add_(counts)
            if self.tokens_per_expert is not None:
                self.tokens_per_expert.add_(counts)
        kept = self._kept_mask(expert_ids, samples, first_time)
        if kept is not None:
            rows = tokens.repeat_interleave(self.top_k, 0)
            first, count = self.local_experts or (0, self.router.shape[0])
            has_data = not isinstance(expert_ids, FakeTensor)
            order = order[kept[order]] if has_data else order[: len(order) * count // len(counts)]
            kept_counts = tokens_per_expert(expert_ids.flatten()[order] - first, count)
            expert_out = self._run_experts(rows.index_select(0, order), kept_counts)
            rows = torch.zeros_like(rows).index_copy(0, order, expert_out)
            return (rows.unflatten(0, expert_ids.shape) * weights.unsqueeze(-1)).sum(1)
        inverse = order.argsort()
        rows = self._run_experts(SortByExpert.apply(tokens, order, inverse), counts)
        return WeightedSum.apply(rows, weights, order, inverse)  # type: ignore[no-any-return]

    def _kept_mask(self, expert_ids: Tensor, samples: int, first_time: bool) -> Tensor | None:
        """Returns which routing choices this rank computes; None: all."""
        kept = None
        if self.capacity_factor and not isinstance(expert_ids, FakeTensor):  # a dry run has no data
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
        """Runs rows, sorted by expert, through their experts on this or other ranks."""
        if self.dispatcher is None:
            return self.bank(rows, counts)  # type: ignore[no-any-return]
        rows, counts, state = self.dispatcher.dispatch(rows, counts)
        return self.dispatcher.combine(self.bank(rows, counts), state)  # type: ignore[no-any-return]


class ExpertWeights(nn.Module):
    """The weights of all experts, stacked to (E, out, in)."""

    stacks_experts = True

    def __init__(self, config: MoEConfig):
        super().__init__()
        count, width, hidden = config.experts, config.width, config.expert_ffn
        self.gate = nn.Parameter(torch.empty(count, hidden, width)) if config.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(count, hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Runs rows, sorted by expert, through their experts; `counts`: rows per expert."""
        hidden = grouped_linear(rows, self.up, counts)
        if self.gate is None:
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = swiglu(grouped_linear(rows, self.gate, counts), hidden)
        return grouped_linear(hidden, self.down, counts)


def within_capacity(expert_ids: Tensor, experts: int, capacity: float) -> Tensor:
    """Returns a flat mask of the routing choices (samples, choices in order) that are within capacity: per sample, an
    expert takes the first `capacity` x choices / experts, rounded up."""
    capacity_rows = math.ceil(capacity * expert_ids.shape[1] / experts)
    order = expert_ids.argsort(dim=1, stable=True)
    by_expert = expert_ids.gather(1, order)
    counts = tokens_per_expert(expert_ids, experts)
    first = counts.cumsum(1) - counts  # offset of each expert's rows
    position_in_expert = torch.arange(expert_ids.shape[1], device=expert_ids.device) - first.gather(1, by_expert)
    return torch.empty_like(order).scatter_(1, order, position_in_expert).flatten() < capacity_rows


def load_balancing_loss(probs: Tensor, expert_ids: Tensor, samples: int, num_shards: int = 1,
                        all_reduce_sum: Callable[[Tensor], Any] | None = None) -> Tensor:  # fmt: skip
    """Returns the sum over samples of E x sum over experts of (fraction of the choices) x (mean probability), which is
    1 per balanced sample (DeepSeek-AI 2024, equation 17). If `num_shards` ranks split each sequence, `all_reduce_sum`
    sums their counts, and the sum of their results is the full loss."""
    experts = probs.shape[1]
    choices = expert_ids.reshape(samples, -1)
    counts = tokens_per_expert(choices, experts).to(probs.dtype)
    if all_reduce_sum is not None:
        all_reduce_sum(counts)
    mean_probs = probs.unflatten(0, (samples, -1)).mean(1)
    return experts * (counts / (num_shards * choices.shape[1]) * mean_probs / num_shards).sum()


def tokens_per_expert(expert_ids: Tensor, experts: int) -> Tensor:
    """Counts the tokens (..., T) of each expert."""
    counts = torch.zeros(*expert_ids.shape[:-1], experts, dtype=torch.int64, device=expert_ids.device)
    return counts.scatter_add_(-1, expert_ids, torch.ones_like(expert_ids))


class AddAuxiliaryLoss(torch.autograd.Function):
    """Returns `y` unchanged; the backward adds the gradient of `factor` x `aux_loss`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, aux_loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = aux_loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0].to(ctx.dtype), None


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes one kernel of a function on a GPU."""
    compiled = cache(lambda: torch.compile(function))  # on first use: it looks for GPUs, which no parent of ranks may

    @wraps(function)
    def run(x: Tensor, *args: Any) -> Tensor:
        return (compiled() if x.is_cuda and not isinstance(x, FakeTensor) else function)(x, *args)

    return run


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@fused
def sum_choices(rows: Tensor, inverse: Tensor, top_k: int, weights: Tensor | None = None) -> Tensor:
    """Sorts rows back and adds up the choices of each token, weighted if weights (T, top_k) are given."""
    # Explicit additions: the compiler's reduction over so few rows takes four times as long as its memory traffic.
    wide = torch.promote_types(rows.dtype, torch.float32)
    terms = [rows.index_select(0, choice).to(wide) for choice in inverse.unflatten(0, (-1, top_k)).unbind(1)]
    if weights is not None:
        terms = [term * weight for term, weight in zip(terms, weights.split(1, dim=1), strict=True)]
    return sum(terms[1:], terms[0]).to(rows.dtype)


@fused
def weighted_sum_grad_rows(grad: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    return grad.index_select(0, order // weights.shape[1]) * weights.flatten()[order].unsqueeze(-1)


@fused
def weighted_sum_grad_weights(grad: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    return (rows.index_select(0, inverse).unflatten(0, (len(grad), -1)) * grad.unsqueeze(1)).sum(-1)


class SortByExpert(torch.autograd.Function):
    """Repeats each token for its choices, sorted by expert; the backward adds them up, without a scatter-add."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = len(order) // len(tokens)
        return tokens.index_select(0, order // ctx.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_choices(grads[0], ctx.saved_tensors[0], ctx.top_k), None, None


class WeightedSum(torch.autograd.Function):
    """Sorts rows back and adds up the choices of each token, weighted."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return sum_choices(rows, inverse, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        grad_rows = weighted_sum_grad_rows(grads[0], weights, order)
        return grad_rows, weighted_sum_grad_weights(grads[0], rows, inverse), None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`x @ weight.T` with one weight (E, out, in) per group of rows; a group may be empty."""
    if x.is_cuda and x.dtype == torch.bfloat16:  # one kernel, which also needs no group sizes on the host
        return torch._grouped_mm(x, weight.transpose(1, 2), counts.cumsum(0).to(torch.int32))
    groups = zip(x.split(group_sizes(counts, x)), weight, strict=True)
    return torch.cat([rows @ matrix.t() for rows, matrix in groups])


def group_sizes(counts: Tensor, x: Tensor) -> list[int]:
    """Returns the number of rows of `x` in each group, on the host; a dry run assumes an even split."""
    if isinstance(counts, FakeTensor):
        rows, groups = x.shape[0], counts.shape[0]
        return [rows // groups + (group < rows % groups) for group in range(groups)]
    return [int(count) for count in counts.tolist()]
