"""Context parallelism: each rank holds a part of every sequence and attends to all of it.

docs/explanation/context.md describes both methods. In a ring, rank n holds the n-th chunk from the front and the n-th
from the back, which balances the work under a causal mask.

PyTorch's own `context_parallel` supports neither CPUs nor float64 and prescribes its own sharding. Attention over one
chunk and its backward use PyTorch's flash kernels, which only private ATen operators expose with their log-sum-exp, or
plain operators for dtypes and masks that have no flash kernel."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import Axis, all_reduce, all_to_all, all_to_all_with_grad
from shardwise.data.sample_stream import Samples
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.models.chain import Chain
from shardwise.models.gpt import LMHead, SelfAttention
from shardwise.models.layers import sdpa
from shardwise.models.moe import MoE
from shardwise.parallel.mesh import Mesh


def check(model: Any, layout: Layout) -> None:
    """Raises LayoutError if the context degree does not divide the sequence or the heads."""
    degree, tensor = layout.context, layout.tensor
    if degree == 1:
        return
    ring = layout.context_method == "ring"
    unit = math.lcm((2 if ring else 1) * degree, degree * tensor)
    if model.length % unit:
        nearest = max(unit, round(model.length / unit) * unit)
        chunks = "two chunks" if ring else "one chunk"
        combined = f" with tensor={tensor}" if tensor > 1 else ""
        why = f"the sequence length {model.length} is not divisible by {unit}; the nearest valid length is {nearest}"
        raise LayoutError(f"context={degree}{combined} splits each sequence into {chunks} per rank, but {why}.")
    heads_per_rank = [len(part) for part in torch.arange(model.heads).tensor_split(tensor)]
    if not ring and any(heads % degree for heads in heads_per_rank):
        splits = f"context={degree} context_method=ulysses splits the {model.heads // tensor} heads of a rank"
        raise LayoutError(f"{splits}, which are not divisible by {degree}; use context_method=ring or another degree.")


def local_positions(length: int, axis: Axis, method: str) -> Tensor:
    """Returns the sequence positions of this rank, in its order."""
    all_positions = torch.arange(length)
    if method == "ulysses":
        return all_positions.chunk(axis.size)[axis.index]
    chunks = all_positions.chunk(2 * axis.size)
    return torch.cat((chunks[axis.index], chunks[-1 - axis.index])) if axis.size > 1 else all_positions


def apply(chain: Chain, layout: Layout, mesh: Mesh, length: int, device: torch.device) -> None:
    """Sets position ids, rotary embeddings and the attention function of a chain's modules for this rank."""
    context, tensor, method = mesh["context"], mesh["tensor"], layout.context_method
    splits_sequence = chain.sharding_plan.splits_sequence
    if context.size == 1 and (tensor.size == 1 or not splits_sequence):
        return
    context_positions = local_positions(length, context, method)
    sequence_positions = context_positions.chunk(tensor.size)[tensor.index] if splits_sequence else context_positions
    attention_fn = partial(ring_attention if method == "ring" else ulysses_attention, context)
    if context.size > 1:
        ranks = [replace(context, index=index) for index in range(context.size)]
        positions = torch.cat([local_positions(length, rank, method) for rank in ranks])
        chain.split_sequence(context, positions.to(device), attention_fn)
    rope_cos_sin: tuple[Tensor, Tensor] | None = None  # shared by all layers
    for module in chain.modules():
        if hasattr(module, "position_ids"):  # a module whose output depends on where its inputs are in the sequence
            module.position_ids = sequence_positions.to(device)
        if context.size == 1:
            continue
        if isinstance(module, SelfAttention):
            if module.rope_cos_sin is not None:
                cos, sin = module.rope_cos_sin
                rows = context_positions.to(device)
                rope_cos_sin = rope_cos_sin or (cos[rows], sin[rows])
                module.rope_cos_sin = rope_cos_sin
            module.attention_fn = attention_fn
        if isinstance(module, MoE | LMHead):
            module.sequence_shards = context.size
            module.all_reduce_sum = lambda counts: all_reduce(counts, axis=context)


def shard_samples(samples: Samples, positions: Tensor | None) -> Samples:
    """Returns the tokens and targets at this rank's positions; document ids stay complete."""
    if positions is None:
        return samples
    if samples.inputs and samples.counts is not None:
        inputs = tuple(tensor[:, positions].contiguous() for tensor in samples.inputs)
        share = positions.numel() / samples.tokens.shape[1]
        return replace(samples, tokens=inputs[0], inputs=inputs, counts=samples.counts * share)
    tokens, targets = (tensor[:, positions].contiguous() for tensor in (samples.tokens, samples.targets))
    return replace(samples, tokens=tokens, targets=targets)


@torch.compiler.disable
def ulysses_attention(axis: Axis, q: Tensor, k: Tensor, v: Tensor, causal: bool,
                      document_ids: Tensor | None = None) -> Tensor:  # fmt: skip
    """Attention over some heads of the full sequence. Takes and returns (B, heads, local positions, H)."""
    if k.shape[1] % axis.size:  # too few KV heads to distribute: repeats them for each query head
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sizes, even = [x.shape[1] // axis.size for x in (q, k, v)], [1] * axis.size
    parts = [torch.cat(part, 1) for part in zip(*(x.chunk(axis.size, 1) for x in (q, k, v)), strict=True)]
    exchanged = all_to_all_with_grad(torch.stack(parts).contiguous(), even, even, axis)
    q, k, v = torch.cat(exchanged.unbind(), 2).split(sizes, 1)
    y = sdpa(q, k, v, causal, document_ids)
    by_heads = all_to_all_with_grad(torch.stack(y.chunk(axis.size, 2)).contiguous(), even, even, axis)
    return torch.cat(by_heads.unbind(), 1)


@torch.compiler.disable
def ring_attention(axis: Axis, q: Tensor, k: Tensor, v: Tensor, causal: bool,
                   document_ids: Tensor | None = None) -> Tensor:  # fmt: skip
    """Attention with keys and values circulating around the ring. Takes and returns (B, heads, local positions, H)."""
    return RingAttention.apply(q, k, v, axis, causal, document_ids)  # type: ignore[no-any-return]


def other_document_mask(document_ids: Tensor | None, axis: Axis, ring_step: int, query_slice: slice,
                        key_slice: slice) -> Tensor | None:  # fmt: skip
    """Returns where key and query are in different documents (B, queries, keys); None without document ids."""
    if document_ids is None:
        return None
    source = replace(axis, index=(axis.index - ring_step) % axis.size)
    positions = [local_positions(document_ids.shape[1], rank, "ring") for rank in (axis, source)]
    of_queries, of_keys = (document_ids[:, rank_positions] for rank_positions in positions)
    return of_queries[:, query_slice].unsqueeze(2) != of_keys[:, key_slice].unsqueeze(1)


def visible_slices(axis: Axis, ring_step: int, length: int, causal: bool) -> tuple[slice, slice, bool]:
    """Returns the query and key slices visible at this ring step, and whether a causal mask applies. At step n the keys
    come from the n-th rank before this one. If that rank's index is lower, its front chunk precedes all our positions
    and its back chunk follows them."""
    full, half = slice(None), length // 2
    if ring_step == 0 or not causal:
        return full, full, causal
    return (full, slice(half), False) if ring_step <= axis.index else (slice(half, None), full, False)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, masked: bool,
                document_ids: Tensor | None) -> Tensor:  # fmt: skip
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty(0), torch.empty(0)
        kv = torch.stack((k, v))
        for ring_step in range(axis.size):
            next_kv = RingSendRecv(kv, axis) if ring_step + 1 < axis.size else None
            query_slice, key_slice, causal = visible_slices(axis, ring_step, length, masked)
            hidden = other_document_mask(document_ids, axis, ring_step, query_slice, key_slice)
            part, part_lse = attend(q[:, :, query_slice], *_repeat_kv(kv[:, :, :, key_slice], group), causal, hidden)
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
        axis, masked, grad = ctx.axis, ctx.masked, grads[0]
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        dq, kv = torch.zeros_like(q), torch.stack((k, v))
        # The gradient of keys and values follows them around the ring, one step later, back to their rank.
        kv_grad_transfer: RingSendRecv | None = None
        for ring_step in range(axis.size):
            next_kv = RingSendRecv(kv, axis) if ring_step + 1 < axis.size else None
            query_slice, key_slice, causal = visible_slices(axis, ring_step, length, masked)
            key, value = _repeat_kv(kv[:, :, :, key_slice], group)
            hidden = other_document_mask(ctx.document_ids, axis, ring_step, query_slice, key_slice)
            local_grad, local_q, local_out, local_lse = (x[:, :, query_slice] for x in (grad, q, out, lse))
            parts = attend_backward(local_grad, local_q, key, value, local_out, local_lse, causal, hidden)
            dq[:, :, query_slice] += parts[0]
            kv_grad = kv_grad_transfer.wait() if kv_grad_transfer else torch.zeros_like(kv)
            kv_grad[:, :, :, key_slice] += torch.stack([part.unflatten(1, (-1, group)).sum(2) for part in parts[1:]])
            kv_grad_transfer = RingSendRecv(kv_grad, axis)
            kv = next_kv.wait() if next_kv else kv
        assert kv_grad_transfer is not None
        dk, dv = kv_grad_transfer.wait()
        return dq, dk, dv, None, None, None


def _repeat_kv(kv: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns keys and values, repeated to one head per query head."""
    k, v = kv.repeat_interleave(group, 2) if group > 1 else kv
    return k, v


class RingSendRecv:
    """Asynchronously sends a tensor to the next rank of the ring and receives one from the previous rank."""

    def __init__(self, x: Tensor, axis: Axis):
        self.sent, self.received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        send_sizes, recv_sizes = [0] * axis.size, [0] * axis.size
        send_sizes[(axis.index + 1) % axis.size] = recv_sizes[(axis.index - 1) % axis.size] = x.numel()
        self.axis = axis
        flat = self.received.view(-1), self.sent.view(-1)
        self.work = all_to_all(*flat, recv_sizes, send_sizes, axis=axis, async_op=True)

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.axis.waiting(self.received.device):
                self.work.wait()
        return self.received


def _has_flash_kernel(q: Tensor, hidden: Tensor | None) -> bool:
    on_gpu = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    return hidden is None and (q.device.type == "cpu" or on_gpu)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over some keys, with the log-sum-exp of their scores. `hidden`: what a query does not see (B, q, k)."""
    if not _has_flash_kernel(q, hidden):
        scores = _scores(q, k, causal, hidden)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp() @ v, lse
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
                    hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of queries, keys and values. `out` and `lse` are those over all keys."""
    if not _has_flash_kernel(q, hidden):
        probs = (_scores(q, k, causal, hidden) - lse.unsqueeze(-1)).exp()
        grad_scores = probs * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return grad_scores @ k, grad_scores.mT @ q, probs.mT @ grad
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # RNG state of dropout, which is off
    tensors = grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None
    lengths = q.shape[2], k.shape[2], 0.0, causal
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*tensors, *lengths, state, state[0])


def _scores(q: Tensor, k: Tensor, causal: bool, hidden: Tensor | None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if hidden is not None:
        # Finite, because -inf gives NaN for a query that sees none of these keys; its own key outweighs them.
        scores = scores.masked_fill(hidden.unsqueeze(1), torch.finfo(scores.dtype).min / 4)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) if causal else scores
