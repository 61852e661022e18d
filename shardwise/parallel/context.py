"""Context parallelism: each rank holds a part of every sequence, and attends to the rest of it.

    ring    keys and values go round from rank to rank; each adds its part of the softmax. A rank holds the n-th chunk
            from the front and the n-th from the back: under a causal mask all have as much to do in every round.
    heads   queries, keys and values are exchanged for some heads of the whole sequence, attended to as on one device,
            and exchanged back (DeepSpeed's Ulysses).

PyTorch's own `context_parallel` knows neither CPUs nor float64, and wants its own cut of heads and tensors. A part of
the softmax and its backward are PyTorch's flash kernels where there is one for the type; `MathAttention` is what they compute.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce, all_to_all, all_to_all_with_grad
from shardwise.comm.step_timer import STEP_TIMER
from shardwise.data.sample_stream import Samples
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.models.chain import Chain, PositionAware
from shardwise.models.gpt import SelfAttention
from shardwise.models.layers import sdpa
from shardwise.models.moe import MoE
from shardwise.parallel.mesh import Axis, Mesh


def check(model: Any, layout: Layout) -> None:
    """Raises for a degree that the sequence or the heads do not allow."""
    degree, tensor = layout.context, layout.tensor
    if degree == 1:
        return
    ring = layout.context_method == "ring"
    unit = math.lcm((2 if ring else 1) * degree, degree * tensor)
    if model.sequence % unit:
        nearest = max(unit, round(model.sequence / unit) * unit)
        why = "cuts sequences into two chunks a rank" if ring else "cuts sequences into one chunk a rank"
        beside = f" beside tensor={tensor}" if tensor > 1 else ""
        raise LayoutError(
            f"context={degree} {why}{beside}, but a sequence of {model.sequence} does not divide by {unit}; "
            f"the nearest that does: {nearest}."
        )
    if not ring and any(heads % degree for heads in _heads_per_rank(model, tensor)):
        raise LayoutError(
            f"context={degree} context_method=ulysses deals out the {model.heads // tensor} heads of a rank, which do not "
            f"divide by {degree}; use context_method=ring or another degree."
        )


def _heads_per_rank(model: Any, tensor: int) -> list[int]:
    """Queries' heads of each tensor rank."""
    return [len(part) for part in torch.arange(model.heads).tensor_split(tensor)]


def local_positions(length: int, axis: Axis, by: str) -> Tensor:
    """Where in the sequence the positions lie that this rank holds, in its order."""
    all_positions = torch.arange(length)
    if by == "ulysses":
        return all_positions.chunk(axis.size)[axis.index]
    chunks = all_positions.chunk(2 * axis.size)
    return torch.cat((chunks[axis.index], chunks[-1 - axis.index])) if axis.size > 1 else all_positions


def apply(chain: Chain, layout: Layout, mesh: Mesh, length: int, device: torch.device) -> None:
    """Tells the modules of a chain where their positions lie, and how to attend to those that lie elsewhere."""
    context, tensor = mesh["context"], mesh["tensor"]
    if context.size == tensor.size == 1:
        return
    context_positions = local_positions(length, context, layout.context_method)
    sequence_positions = context_positions.chunk(tensor.size)[tensor.index].to(device)
    rope_cos_sin: tuple[Tensor, Tensor] | None = None  # one for all
    for module in chain.modules():
        if isinstance(module, PositionAware):
            module.position_ids = sequence_positions
        if context.size == 1:
            continue
        if isinstance(module, SelfAttention):
            if module.rope_cos_sin is not None:
                rope_cos_sin = rope_cos_sin or (
                    module.rope_cos_sin[0][context_positions.to(device)],
                    module.rope_cos_sin[1][context_positions.to(device)],
                )
                module.rope_cos_sin = rope_cos_sin
            module.attention_fn = (
                RingAttention(context) if layout.context_method == "ring" else UlyssesAttention(context)
            )
        if isinstance(module, MoE):
            module.sequence_shards, module.all_reduce_sum = (
                context.size,
                lambda counts: all_reduce(counts, group=context.group),
            )


def shard_samples(samples: Samples, positions: Tensor | None) -> Samples:
    """This rank's positions of some samples; the documents of all of them."""
    if positions is None:
        return samples
    return replace(
        samples, tokens=samples.tokens[:, positions].contiguous(), targets=samples.targets[:, positions].contiguous()
    )  # fmt: skip


class UlyssesAttention:
    """Some heads of the whole sequence instead of all heads of a part."""

    def __init__(self, axis: Axis):
        self.axis = axis

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, document_ids: Tensor | None = None) -> Tensor:
        """(B, heads, own positions, H), as many out."""
        ranks = self.axis.size
        if k.shape[1] % ranks:  # too few heads of keys and values to deal out: each query's head with its own
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        sizes = [x.shape[1] // ranks for x in (q, k, v)]
        parts = [torch.cat(part, 1) for part in zip(*(x.chunk(ranks, 1) for x in (q, k, v)), strict=True)]
        exchanged = self._all_to_all(torch.stack(parts))
        q, k, v = torch.cat(exchanged.unbind(), 2).split(sizes, 1)
        y = sdpa(q, k, v, causal, document_ids)
        back = self._all_to_all(torch.stack(y.chunk(ranks, 2)))
        return torch.cat(back.unbind(), 1)

    def _all_to_all(self, x: Tensor) -> Tensor:
        """The n-th of what each rank has, to rank n."""
        even = [1] * self.axis.size
        return all_to_all_with_grad(x.contiguous(), even, even, self.axis.group)  # type: ignore[no-any-return]


class RingAttention:
    """Keys and values go round."""

    def __init__(self, axis: Axis):
        self.axis = axis

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, document_ids: Tensor | None = None) -> Tensor:
        """(B, heads, own positions, H), as many out."""
        return RingAttentionFunction.apply(q, k, v, self.axis, causal, document_ids)  # type: ignore[no-any-return]


def other_document_mask(
    document_ids: Tensor | None, axis: Axis, ring_step: int, query_slice: slice, key_slice: slice
) -> Tensor | None:
    """Which keys of a turn lie in another document than a query (B, queries, keys); None: there is only one."""
    if document_ids is None:
        return None
    source = Axis(axis.size, (axis.index - ring_step) % axis.size, axis.group)
    mine, theirs = (document_ids[:, local_positions(document_ids.shape[1], one, "ring")] for one in (axis, source))
    return mine[:, query_slice].unsqueeze(2) != theirs[:, key_slice].unsqueeze(1)


def visible_slices(axis: Axis, ring_step: int, length: int, causal: bool) -> tuple[slice, slice, bool]:
    """In which turn this rank's queries, of which of them, see which of the keys that are there; and whether masked.

    The keys of turn n come from the n-th rank before this one. Its front chunk lies before ours where its number is
    lower, and its back chunk then behind ours."""
    everything, half = slice(None), length // 2
    if ring_step == 0 or not causal:
        return everything, everything, causal
    if ring_step <= axis.index:
        return everything, slice(half), False
    return slice(half, None), everything, False


class RingAttentionFunction(torch.autograd.Function):
    """Attention over all keys and values of the ring."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, masked: bool, document_ids: Tensor | None
    ) -> Tensor:  # fmt: skip
        kernel = select_kernel(q, document_ids)
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty(0), torch.empty(0)
        kv = torch.stack((k, v))
        for ring_step in range(axis.size):
            next_kv = RingSendRecv(kv, axis) if ring_step + 1 < axis.size else None
            query_slice, key_slice, causal = visible_slices(axis, ring_step, length, masked)
            kernel.other_document_mask = other_document_mask(document_ids, axis, ring_step, query_slice, key_slice)
            part, part_lse = kernel.forward(q[:, :, query_slice], *_repeat_kv(kv[:, :, :, key_slice], group), causal)
            if ring_step == 0:
                out, lse = part.to(acc_dtype, copy=True), part_lse.to(acc_dtype, copy=True)
            else:
                new_lse = torch.logaddexp(lse[:, :, query_slice], part_lse.to(acc_dtype))
                old, new = (lse[:, :, query_slice] - new_lse).exp(), (part_lse - new_lse).exp()
                out[:, :, query_slice] = out[:, :, query_slice] * old.unsqueeze(-1) + part * new.unsqueeze(-1)
                lse[:, :, query_slice] = new_lse
            kv = next_kv.wait() if next_kv else kv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.masked, ctx.document_ids = axis, masked, document_ids
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, masked, kernel, grad = ctx.axis, ctx.masked, select_kernel(q, ctx.document_ids), grads[0]
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        dq, kv = torch.zeros_like(q), torch.stack((k, v))
        kv_grad_transfer: RingSendRecv | None = (
            None  # the gradient of keys and values follows them round, one turn later, and home
        )
        for ring_step in range(axis.size):
            next_kv = RingSendRecv(kv, axis) if ring_step + 1 < axis.size else None
            query_slice, key_slice, causal = visible_slices(axis, ring_step, length, masked)
            key, value = _repeat_kv(kv[:, :, :, key_slice], group)
            kernel.other_document_mask = other_document_mask(ctx.document_ids, axis, ring_step, query_slice, key_slice)
            parts = kernel.backward(
                grad[:, :, query_slice],
                q[:, :, query_slice],
                key,
                value,
                out[:, :, query_slice],
                lse[:, :, query_slice],
                causal,
            )
            dq[:, :, query_slice] += parts[0]
            given = kv_grad_transfer.wait() if kv_grad_transfer else torch.zeros_like(kv)
            given[:, :, :, key_slice] += torch.stack([part.unflatten(1, (-1, group)).sum(2) for part in parts[1:]])
            kv_grad_transfer = RingSendRecv(given, axis)
            kv = next_kv.wait() if next_kv else kv
        assert kv_grad_transfer is not None
        dk, dv = kv_grad_transfer.wait()
        return dq, dk, dv, None, None, None


def _repeat_kv(kv: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Keys and values, one head for each of the queries'."""
    k, v = kv.repeat_interleave(group, 2) if group > 1 else kv
    return k, v


class RingSendRecv:
    """A tensor on its way to the next rank of the ring, and what comes from the one before."""

    def __init__(self, x: Tensor, axis: Axis):
        self.sent, self.received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        size = self.sent.numel()
        send_sizes, recv_sizes = [0] * axis.size, [0] * axis.size
        send_sizes[(axis.index + 1) % axis.size] = recv_sizes[(axis.index - 1) % axis.size] = size
        self.group = axis.group
        self.work = all_to_all(
            self.received.view(-1), self.sent.view(-1), recv_sizes, send_sizes, group=axis.group, async_op=True
        )

    def wait(self) -> Tensor:
        if self.work is not None:
            with STEP_TIMER.waiting_for_group(self.group, self.received.device):
                self.work.wait()
        return self.received


class AttentionKernel(Protocol):
    """A part of attention: the softmax over some keys only, with the logarithm of its sum (B, heads, queries)."""

    other_document_mask: Tensor | None
    """Keys that a query does not see (B, queries, keys)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Given output and logarithm of the sum over all keys: the gradients of queries, keys and values."""


def select_kernel(q: Tensor, document_ids: Tensor | None) -> AttentionKernel:
    if document_ids is not None:
        return MathAttention()
    if q.device.type == "cpu":
        return CpuFlashAttention()
    return (
        CudaFlashAttention() if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 else MathAttention()
    )


class MathAttention:
    """By the definition."""

    other_document_mask: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp() @ v, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        probs = (self._scores(q, k, causal) - lse.unsqueeze(-1)).exp()
        grad_scores = probs * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return grad_scores @ k, grad_scores.mT @ q, probs.mT @ grad

    def _scores(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.other_document_mask is not None:
            # Not infinite: a query may see none of these keys. It always sees itself, so these count for nothing.
            scores = scores.masked_fill(self.other_document_mask.unsqueeze(1), torch.finfo(scores.dtype).min / 4)
        if not causal:
            return scores
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


class CpuFlashAttention:
    """PyTorch's flash attention for CPUs."""

    other_document_mask: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = grad, q, k, v, out, lse
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)


class CudaFlashAttention:
    """PyTorch's flash attention for GPUs, in 16 bits."""

    other_document_mask: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        given = grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None
        lengths = q.shape[2], k.shape[2], 0.0, causal
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *lengths, state, state[0])
