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

from shardwise.kinds import MoE


class Experts(nn.Module):
    def __init__(self, model: MoE, shared: nn.Module | None):
        super().__init__()
        self.router = nn.Parameter(torch.empty(model.experts, model.width))
        self.bank = Bank(model)
        self.shared = shared
        self.active, self.balance, self.z_loss = model.experts_per_token, model.balance, model.z_loss
        self.sigmoid, self.scale, self.capacity = model.scores == "sigmoid", model.scale, model.capacity
        self.rate = model.bias_rate
        self.register_buffer("offset", torch.zeros(model.experts) if self.rate else None)
        """What is added to likelihoods where experts are chosen."""
        self.recent: Tensor | None = torch.zeros(model.experts) if self.rate else None
        """Rows that each expert was chosen for since the last step."""
        self.weigh: Callable[[], Tensor] | None = None
        """The factor of the router's own losses in the gradient; without it they are left in `extra` instead."""
        self.extra: Tensor | None = None
        self.load: Tensor | None = None
        """Rows that each expert got since this was last set to zero; what is computed again counts again."""
        self.dropped: Tensor | None = None
        """Choices that found no room, counted alike."""
        self.parts = 1
        """In which sequences are cut over ranks; `total` sums over these."""
        self.total: Callable[[Tensor], Any] | None = None
        self.served: tuple[int, int] | None = None
        """The first expert and how many, whose rows this rank takes care of; of others it gives zeros. None: all."""
        self.travel: Any = None
        """Takes rows to experts that other ranks hold (`shardwise.parallel.expert`); None: all are here."""

    @torch.compiler.disable  # how many rows an expert has is known only when it runs
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(tokens.to(wide), self.router.to(wide))  # T E
        likely = scores.sigmoid() if self.sigmoid else scores.softmax(-1)
        chosen = (likely if self.offset is None else likely.detach() + self.offset).topk(self.active).indices
        weights = likely.gather(1, chosen)
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        y = self.mix(tokens, weights.to(x.dtype), chosen, x.shape[0])
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = y.unflatten(0, x.shape[:2])
        if not self.balance and not self.z_loss:
            return y
        # Both are sums over samples, so that no layout or micro-batch changes them.
        if self.sigmoid:
            likely = likely / likely.sum(-1, keepdim=True)
        extra = self.balance * imbalance(likely, chosen, x.shape[0], self.parts, self.total)
        if self.z_loss:
            extra = extra + self.z_loss * scores.logsumexp(-1).square().sum() / (self.parts * x.shape[1])
        if self.weigh is None:
            self.extra = extra
            return y
        return Beside.apply(y, extra, self.weigh())  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Starts what is remembered, once it has memory."""
        if self.rate:
            wide = torch.float64 if self.router.dtype == torch.float64 else torch.float32
            self.offset, self.recent = (
                torch.zeros(self.router.shape[0], dtype=wide, device=self.router.device) for _ in range(2)
            )

    @torch.no_grad()
    def rebalance(self, rows: Tensor) -> None:
        """After a step, given the rows that each expert was chosen for in all of it (Wang et al. 2024)."""
        assert self.offset is not None and self.recent is not None
        self.offset.add_((rows.mean() - rows).sign(), alpha=self.rate)
        self.recent.zero_()

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor, samples: int) -> Tensor:
        """What each token's experts make of it, weighted."""
        order = chosen.flatten().argsort(stable=True)
        counts = _count(chosen.flatten(), self.router.shape[0])
        # Not when a block is computed again in the backward.
        first_time = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if first_time:
            self.load = counts.clone() if self.load is None else self.load.add_(counts)
            if self.recent is not None:
                self.recent.add_(counts)
        rows = tokens.repeat_interleave(self.active, 0)
        kept = self._kept(chosen, samples, first_time)
        if kept is not None:
            first, count = self.served or (0, self.router.shape[0])
            order = order[: len(order) * count // len(counts)] if is_fake(chosen) else order[kept[order]]
            found = self._through(rows.index_select(0, order), _count(chosen.flatten()[order] - first, count))
            rows = torch.zeros_like(rows).index_copy(0, order, found)
        else:
            back = order.argsort()
            rows = Permuted.apply(self._through(Permuted.apply(rows, order, back), counts), back, order)
        return (rows.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1)

    def _kept(self, chosen: Tensor, samples: int, first_time: bool) -> Tensor | None:
        """Which of all choices are served here; None: all of them."""
        kept = None
        if self.capacity and not is_fake(chosen):
            kept = within(chosen.reshape(samples, -1), self.router.shape[0], self.capacity)
            if first_time:
                dropped = (~kept).sum()
                self.dropped = dropped if self.dropped is None else self.dropped.add_(dropped)
        if self.served is not None:
            first, count = self.served
            own = ((chosen >= first) & (chosen < first + count)).flatten()
            kept = own if kept is None else kept & own
        return kept

    def _through(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that lie by expert, through the experts, wherever they are."""
        journey = None
        if self.travel is not None:
            rows, counts, journey = self.travel.there(rows, counts)
        rows = self.bank(rows, counts)
        if self.travel is not None:
            rows = self.travel.back(rows, journey)
        return rows


class Bank(nn.Module):
    """The experts themselves, as stacks of matrices."""

    def __init__(self, model: MoE):
        super().__init__()
        count, width, hidden = model.experts, model.width, model.expert_ffn
        self.gate = nn.Parameter(torch.empty(count, hidden, width)) if model.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(count, hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that lie by expert, through theirs."""
        hidden = Grouped.apply(rows, self.up, counts)
        if self.gate is None:
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = F.silu(Grouped.apply(rows, self.gate, counts)) * hidden
        return Grouped.apply(hidden, self.down, counts)  # type: ignore[no-any-return]


def within(chosen: Tensor, experts: int, capacity: float) -> Tensor:
    """Of the choices of each sample (samples, choices in order), which find room: an expert takes `capacity` times its
    even share of a sample. Flat."""
    room = math.ceil(capacity * chosen.shape[1] / experts)
    order = chosen.argsort(dim=1, stable=True)
    by_expert = chosen.gather(1, order)
    used = torch.zeros(chosen.shape[0], experts, dtype=torch.int64, device=chosen.device)
    used.scatter_add_(1, chosen, torch.ones_like(chosen))
    first = used.cumsum(1) - used  # where each expert's begin
    place = torch.arange(chosen.shape[1], device=chosen.device) - first.gather(1, by_expert)
    return torch.empty_like(order).scatter_(1, order, place).flatten() < room


def imbalance(
    likely: Tensor, chosen: Tensor, samples: int, parts: int = 1, total: Callable[[Tensor], Any] | None = None
) -> Tensor:
    """By sample, E x the sum over experts of their share of its tokens and their mean likelihood: 1 where all are used
    alike. Summed over samples. (DeepSeek-AI 2024, equation 17.) Where a sequence is cut into `parts`, `total` sums what
    was used of them, and the sum over parts is the whole."""
    experts = likely.shape[1]
    each = chosen.reshape(samples, -1)
    used = torch.zeros(samples, experts, dtype=likely.dtype, device=likely.device)
    used.scatter_add_(1, each, torch.ones_like(each, dtype=likely.dtype))
    if total is not None:
        total(used)
    return experts * (used / (parts * each.shape[1]) * likely.unflatten(0, (samples, -1)).mean(1) / parts).sum()


def _count(chosen: Tensor, experts: int) -> Tensor:
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))


class Beside(torch.autograd.Function):
    """A value, and beside it a loss that joins only in the backward, times a factor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, extra: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = extra.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0].to(ctx.dtype), None


class Permuted(torch.autograd.Function):
    """Rows in another order, of which the other way round is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class Grouped(torch.autograd.Function):
    """`x @ weight.T` with another weight (E, out, in) for each run of rows; a run may be empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return products(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0]
        if _fast(grad):
            grad_weight = torch._grouped_mm(grad.t(), x, _ends(counts))
        else:
            runs = zip(grad.split(sizes_of(counts, x)), x.split(sizes_of(counts, x)), strict=True)
            grad_weight = torch.stack([one.t() @ other for one, other in runs])
        return products(grad, weight, counts), grad_weight, None


def products(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Runs of rows, each times its own matrix (E, in, out)."""
    if _fast(x):
        return torch._grouped_mm(x, weight, _ends(counts))
    return torch.cat([run @ matrix for run, matrix in zip(x.split(sizes_of(counts, x)), weight, strict=True)])


def _fast(x: Tensor) -> bool:
    """Whether PyTorch has one kernel for all experts; it also spares the host from knowing how many rows each has."""
    return x.is_cuda and x.dtype == torch.bfloat16


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers."""
    return isinstance(tensor, FakeTensor)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def sizes_of(counts: Tensor, x: Tensor) -> list[int]:
    """How many of the rows of `x` are in each run; the host must know them."""
    if is_fake(counts):  # a dry run knows no numbers: as even as can be
        rows, runs = x.shape[0], counts.shape[0]
        return [rows // runs + (run < rows % runs) for run in range(runs)]
    return [int(count) for count in counts.tolist()]
