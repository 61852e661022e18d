"""Context parallelism: each rank holds a part of every sequence, and attends to the rest of it.

    ring    keys and values go round from rank to rank; each adds its part of the softmax. A rank holds the n-th chunk
            from the front and the n-th from the back: under a causal mask all have as much to do in every round.
    heads   queries, keys and values are exchanged for some heads of the whole sequence, attended to as on one device,
            and exchanged back (DeepSpeed's Ulysses).

PyTorch's own `context_parallel` knows neither CPUs nor float64, and wants its own cut of heads and tensors. A part of
the softmax and its backward are PyTorch's flash kernels where there is one for the type; `Plain` is what they compute.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce, all_to_all, all_to_all_with_grad
from shardwise.comm.meter import METER
from shardwise.data.stream import Samples
from shardwise.errors import LayoutError
from shardwise.kinds import Model, MoE, Named
from shardwise.layout import Layout
from shardwise.models.chain import Chain, Placed
from shardwise.models.experts import Experts
from shardwise.models.gpt import Attention
from shardwise.models.parts import attend
from shardwise.parallel.mesh import Axis, Mesh


def check(model: Named, layout: Layout) -> None:
    """Raises for a degree that the sequence or the heads do not allow."""
    degree, tensor = layout.context, layout.tensor
    if degree == 1:
        return
    if not isinstance(model, Model):
        raise LayoutError(f"context={degree}: {model.what} is not cut along its sequence; leave context at 1.")
    if isinstance(model, MoE) and (model.kv_rank or model.capacity):
        what = "latent attention" if model.kv_rank else "model.capacity, which counts along a whole sample,"
        raise LayoutError(f"context={degree}: {what} is not cut along the sequence; leave context at 1.")
    ring = layout.context_by == "ring"
    unit = math.lcm((2 if ring else 1) * degree, degree * tensor)
    if model.sequence % unit:
        near = max(unit, round(model.sequence / unit) * unit)
        why = "cuts sequences into two chunks a rank" if ring else "cuts sequences into one chunk a rank"
        beside = f" beside tensor={tensor}" if tensor > 1 else ""
        raise LayoutError(
            f"context={degree} {why}{beside}, but a sequence of {model.sequence} does not divide by {unit}; "
            f"the nearest that does: {near}."
        )
    if not ring and any(heads % degree for heads in _heads(model, tensor)):
        raise LayoutError(
            f"context={degree} context_by=heads deals out the {model.heads // tensor} heads of a rank, which do not "
            f"divide by {degree}; use context_by=ring or another degree."
        )


def _heads(model: Model, tensor: int) -> list[int]:
    """Queries' heads of each tensor rank."""
    return [len(part) for part in torch.arange(model.heads).tensor_split(tensor)]


def positions(length: int, axis: Axis, by: str) -> Tensor:
    """Where in the sequence the positions lie that this rank holds, in its order."""
    everywhere = torch.arange(length)
    if by == "heads":
        return everywhere.chunk(axis.size)[axis.index]
    chunks = everywhere.chunk(2 * axis.size)
    return torch.cat((chunks[axis.index], chunks[-1 - axis.index])) if axis.size > 1 else everywhere


def apply(chain: Chain, layout: Layout, mesh: Mesh, length: int, device: torch.device) -> None:
    """Tells the modules of a chain where their positions lie, and how to attend to those that lie elsewhere."""
    context, tensor = mesh["context"], mesh["tensor"]
    if context.size == tensor.size == 1:
        return
    whole = positions(length, context, layout.context_by)
    own = whole.chunk(tensor.size)[tensor.index].to(device)
    turn: tuple[Tensor, Tensor] | None = None  # one for all
    for module in chain.modules():
        if isinstance(module, Placed):
            module.places = own
        if context.size == 1:
            continue
        if isinstance(module, Attention):
            if module.turn is not None:
                turn = turn or (module.turn[0][whole.to(device)], module.turn[1][whole.to(device)])
                module.turn = turn
            module.attend = Ring(context) if layout.context_by == "ring" else Heads(context)
        if isinstance(module, Experts):
            module.parts, module.total = context.size, lambda counts: all_reduce(counts, group=context.group)


def cut(samples: Samples, where: Tensor | None) -> Samples:
    """This rank's positions of some samples; the documents of all of them."""
    if where is None:
        return samples
    return replace(
        samples, tokens=samples.tokens[:, where].contiguous(), targets=samples.targets[:, where].contiguous()
    )  # fmt: skip


class Heads:
    """Some heads of the whole sequence instead of all heads of a part."""

    def __init__(self, axis: Axis):
        self.axis = axis

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None = None) -> Tensor:
        """(B, heads, own positions, H), as many out."""
        ranks = self.axis.size
        if k.shape[1] % ranks:  # too few heads of keys and values to deal out: each query's head with its own
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        sizes = [x.shape[1] // ranks for x in (q, k, v)]
        parts = [torch.cat(part, 1) for part in zip(*(x.chunk(ranks, 1) for x in (q, k, v)), strict=True)]
        both = self._exchange(torch.stack(parts))
        q, k, v = torch.cat(both.unbind(), 2).split(sizes, 1)
        y = attend(q, k, v, causal, documents)
        back = self._exchange(torch.stack(y.chunk(ranks, 2)))
        return torch.cat(back.unbind(), 1)

    def _exchange(self, x: Tensor) -> Tensor:
        """The n-th of what each rank has, to rank n."""
        even = [1] * self.axis.size
        return all_to_all_with_grad(x.contiguous(), even, even, self.axis.group)  # type: ignore[no-any-return]


class Ring:
    """Keys and values go round."""

    def __init__(self, axis: Axis):
        self.axis = axis

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None = None) -> Tensor:
        """(B, heads, own positions, H), as many out."""
        return Round.apply(q, k, v, self.axis, causal, documents)  # type: ignore[no-any-return]


def strangers(documents: Tensor | None, axis: Axis, turn: int, own: slice, keys: slice) -> Tensor | None:
    """Which keys of a turn lie in another document than a query (B, queries, keys); None: there is only one."""
    if documents is None:
        return None
    before = Axis(axis.size, (axis.index - turn) % axis.size, axis.group)
    mine, theirs = (documents[:, positions(documents.shape[1], one, "ring")] for one in (axis, before))
    return mine[:, own].unsqueeze(2) != theirs[:, keys].unsqueeze(1)


def seen(axis: Axis, turn: int, length: int, causal: bool) -> tuple[slice, slice, bool]:
    """In which turn this rank's queries, of which of them, see which of the keys that are there; and whether masked.

    The keys of turn n come from the n-th rank before this one. Its front chunk lies before ours where its number is
    lower, and its back chunk then behind ours."""
    everything, half = slice(None), length // 2
    if turn == 0 or not causal:
        return everything, everything, causal
    if turn <= axis.index:
        return everything, slice(half), False
    return slice(half, None), everything, False


class Round(torch.autograd.Function):
    """Attention over all keys and values of the ring."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, masked: bool, documents: Tensor | None
    ) -> Tensor:  # fmt: skip
        kernel = kernel_of(q, documents)
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        out, total = torch.empty(0), torch.empty(0)
        there = torch.stack((k, v))
        for turn in range(axis.size):
            coming = Passing(there, axis) if turn + 1 < axis.size else None
            own, keys, causal = seen(axis, turn, length, masked)
            kernel.strangers = strangers(documents, axis, turn, own, keys)
            part, logs = kernel.forward(q[:, :, own], *_spread(there[:, :, :, keys], group), causal)
            if turn == 0:
                out, total = part.to(wide, copy=True), logs.to(wide, copy=True)
            else:
                both = torch.logaddexp(total[:, :, own], logs.to(wide))
                old, new = (total[:, :, own] - both).exp(), (logs - both).exp()
                out[:, :, own] = out[:, :, own] * old.unsqueeze(-1) + part * new.unsqueeze(-1)
                total[:, :, own] = both
            there = coming.arrived() if coming else there
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.axis, ctx.masked, ctx.documents = axis, masked, documents
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, total = ctx.saved_tensors
        axis, masked, kernel, grad = ctx.axis, ctx.masked, kernel_of(q, ctx.documents), grads[0]
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        dq, there = torch.zeros_like(q), torch.stack((k, v))
        behind: Passing | None = None  # the gradient of keys and values follows them round, one turn later, and home
        for turn in range(axis.size):
            coming = Passing(there, axis) if turn + 1 < axis.size else None
            own, keys, causal = seen(axis, turn, length, masked)
            key, value = _spread(there[:, :, :, keys], group)
            kernel.strangers = strangers(ctx.documents, axis, turn, own, keys)
            parts = kernel.backward(grad[:, :, own], q[:, :, own], key, value, out[:, :, own], total[:, :, own], causal)
            dq[:, :, own] += parts[0]
            given = behind.arrived() if behind else torch.zeros_like(there)
            given[:, :, :, keys] += torch.stack([part.unflatten(1, (-1, group)).sum(2) for part in parts[1:]])
            behind = Passing(given, axis)
            there = coming.arrived() if coming else there
        assert behind is not None
        dk, dv = behind.arrived()
        return dq, dk, dv, None, None, None


def _spread(both: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Keys and values, one head for each of the queries'."""
    k, v = both.repeat_interleave(group, 2) if group > 1 else both
    return k, v


class Passing:
    """A tensor on its way to the next rank of the ring, and what comes from the one before."""

    def __init__(self, x: Tensor, axis: Axis):
        self.sent, self.found = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        size = self.sent.numel()
        to, source = [0] * axis.size, [0] * axis.size
        to[(axis.index + 1) % axis.size] = source[(axis.index - 1) % axis.size] = size
        self.group = axis.group
        self.work = all_to_all(self.found.view(-1), self.sent.view(-1), source, to, group=axis.group, async_op=True)

    def arrived(self) -> Tensor:
        if self.work is not None:
            with METER.waiting(self.group, self.found.device):
                self.work.wait()
        return self.found


class Kernel(Protocol):
    """A part of attention: the softmax over some keys only, with the logarithm of its sum (B, heads, queries)."""

    strangers: Tensor | None
    """Keys that a query does not see (B, queries, keys)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Given output and logarithm of the sum over all keys: the gradients of queries, keys and values."""


def kernel_of(q: Tensor, documents: Tensor | None) -> Kernel:
    if documents is not None:
        return Plain()
    if q.device.type == "cpu":
        return OnCPU()
    return Flash() if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 else Plain()


class Plain:
    """By the definition."""

    strangers: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, causal)
        total = scores.logsumexp(-1)
        return (scores - total.unsqueeze(-1)).exp() @ v, total

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        likely = (self._scores(q, k, causal) - total.unsqueeze(-1)).exp()
        inner = likely * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return inner @ k, inner.mT @ q, likely.mT @ grad

    def _scores(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.strangers is not None:
            # Not infinite: a query may see none of these keys. It always sees itself, so these count for nothing.
            scores = scores.masked_fill(self.strangers.unsqueeze(1), torch.finfo(scores.dtype).min / 4)
        if not causal:
            return scores
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


class OnCPU:
    """PyTorch's flash attention for CPUs."""

    strangers: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, total

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = grad, q, k, v, out, total
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)


class Flash:
    """PyTorch's flash attention for GPUs, in 16 bits."""

    strangers: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        given = grad.contiguous(), q, k, v, out.contiguous(), total.contiguous(), None, None
        lengths = q.shape[2], k.shape[2], 0.0, causal
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *lengths, state, state[0])
