"""Fused linear cross-entropy: projects to the vocabulary and computes the loss chunk by chunk, so that the full logits
are never in memory.

The loss is the last operation of the forward, so the gradient of a chunk's logits is known immediately, up to the
factor that the backward provides. The forward therefore also computes both gradient matmuls and frees the chunk; it
saves the gradients of input and weight. In a pipeline, many micro-batches wait for their backward and each would
save a weight gradient, so there the loss runs unchunked and saves the gradient of the logits instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models import fp8
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.preference import Weigh

MAX_LOGITS_PER_CHUNK = 1 << 29
VOCAB_MULTIPLES = {"cuda": 128}  # by device type, see `pad_vocab`

InPlaceAllReduce = Callable[[Tensor], None]


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary, and the all-reduces that its softmax needs."""

    start: int
    all_reduce_max: InPlaceAllReduce
    all_reduce_sum: InPlaceAllReduce


def loss_chunk_size(vocab_size: int) -> int:
    """Returns the number of positions per chunk, a multiple of 128."""
    return max(128, MAX_LOGITS_PER_CHUNK // vocab_size // 128 * 128)


def fused_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_shard: VocabShard | None,
                               chunk_size: int, use_fp8: bool = False,
                               weigh: Weigh | None = None) -> Tensor:  # fmt: skip
    """Returns the cross-entropy of `x @ weight.T`, summed over the targets, in chunks of `chunk_size` positions.
    If `chunk_size` is 0, all logits are computed at once, and the gradient matmuls run in the backward. `use_fp8`: if
    there are chunks and the shapes allow it, the gradient of `x` is computed with an FP8 matmul. `weigh`: what makes
    the loss of the cross-entropies of all positions, if not a sum; the chunks' logits are then computed twice."""
    if chunk_size:
        arguments = x, weight, targets, vocab_shard, chunk_size, use_fp8, weigh
        return FusedLinearCrossEntropy.apply(*arguments)  # type: ignore[no-any-return]
    logits = F.linear(x, pad_vocab(weight))
    return CrossEntropy.apply(logits, targets, vocab_shard, weight.shape[0], weigh)  # type: ignore[no-any-return]


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Chunked linear and cross-entropy; the forward also computes the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_shard: VocabShard | None, chunk_size: int,
                use_fp8: bool, weigh: Weigh | None) -> Tensor:  # fmt: skip
        dtype = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=dtype, device=x.device)
        vocab, weight = weight.shape[0], pad_vocab(weight)
        needs_grad = any(ctx.needs_input_grad)
        grad_x = torch.empty_like(x) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None  # None: frozen
        weight8 = None
        if use_fp8 and needs_grad and fp8.can_use_fp8(x[:chunk_size], weight) and fp8.can_use_fp8(x, weight):
            weight8 = fp8.quantize_columns(weight)
        chunks = [slice(first, first + chunk_size) for first in range(0, x.shape[0], chunk_size)]
        weights: Tensor | None = None
        if weigh is not None:
            parts = ((x[chunk] @ weight.t(), targets[chunk], vocab_shard, vocab) for chunk in chunks)
            loss, weights = weigh(torch.cat([cross_entropy_with_grad(*part)[0] for part in parts]))
        for chunk in chunks:
            logits = x[chunk] @ weight.t()
            losses, grad = cross_entropy_with_grad(logits, targets[chunk], vocab_shard, vocab)
            if weights is None:
                loss += losses.sum()
            else:
                grad *= weights[chunk].unsqueeze(1)
            if grad_x is not None:
                if weight8 is None:
                    torch.mm(grad, weight, out=grad_x[chunk])
                else:
                    grad_x[chunk] = fp8.grad_input_matmul(grad, *weight8)
                if grad_weight is not None:
                    addmm_(grad_weight, grad.t(), x[chunk])
            del logits, grad  # before the next chunk allocates its own
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight[:vocab])
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scaled = scale_to_dtype(grad_x, grads[0], grad_x.dtype)
        scaled_weight = None if grad_weight is None else scale_to_dtype(grad_weight, grads[0], grad_x.dtype)
        return scaled, scaled_weight, None, None, None, None, None


def pad_vocab(weight: Tensor) -> Tensor:
    """Returns the weight with rows of zeros appended, because on a GPU matmuls with an odd vocabulary (50,257) are
    several times slower. The logits of these rows are no part of the softmax, and their gradient is zero."""
    rows = -weight.shape[0] % VOCAB_MULTIPLES.get(weight.device.type, 1)
    return F.pad(weight, (0, 0, 0, rows)) if rows else weight


def scale_to_dtype(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x * scale`, rounded once: casting the scale to a 16-bit dtype first would bias every gradient."""
    if x.is_cuda and x.dtype != torch.float64:  # where PyTorch's kernel for mixed dtypes is not vectorized
        from shardwise.models.kernels import scale_to_dtype_triton

        return scale_to_dtype_triton(x, scale, dtype)
    return torch.mul(x, scale.view(1), out=torch.empty_like(x, dtype=dtype))


def addmm_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, in one kernel if 16-bit matmuls can accumulate into the wider `total`."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class CrossEntropy(torch.autograd.Function):
    """Cross-entropy of existing logits. Overwrites them with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_shard: VocabShard | None, vocab: int,
                weigh: Weigh | None) -> Tensor:  # fmt: skip
        losses, grad = cross_entropy_with_grad(logits.detach(), targets, vocab_shard, vocab)
        loss, weights = (losses.sum(), None) if weigh is None else weigh(losses)
        ctx.save_for_backward(grad if weights is None else grad.mul_(weights.unsqueeze(1)))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return scale_to_dtype(grad, grads[0], grad.dtype), None, None, None, None


def cross_entropy_with_grad(
    padded_logits: Tensor, targets: Tensor, vocab_shard: VocabShard | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each position and its gradient with respect to the logits, computed in place. Only the first
    `vocab` columns count; the gradient of the others is zero."""
    if padded_logits.is_cuda and vocab_shard is None and padded_logits.dtype != torch.float64:
        from shardwise.models.kernels import cross_entropy_with_grad_

        return cross_entropy_with_grad_(padded_logits, targets, IGNORE_INDEX, vocab), padded_logits
    logits = padded_logits[:, :vocab]
    padded_logits[:, vocab:] = 0.0
    # Holds in turn the logits, their exponentials, the probabilities and the gradient.
    work = logits.to(torch.promote_types(logits.dtype, torch.float32))
    row_max = work.max(-1).values
    if vocab_shard is not None:
        vocab_shard.all_reduce_max(row_max)
    work.sub_(row_max.unsqueeze(-1))
    is_counted = targets != IGNORE_INDEX
    local_target = targets - (vocab_shard.start if vocab_shard is not None else 0)
    in_shard = is_counted & (local_target >= 0) & (local_target < logits.shape[-1])
    local_target = local_target.masked_fill(~in_shard, 0).unsqueeze(-1)
    target_logit = work.gather(-1, local_target).squeeze(-1) * in_shard
    work.exp_()
    sums = torch.stack((work.sum(-1), target_logit))
    if vocab_shard is not None:
        vocab_shard.all_reduce_sum(sums)
    losses = (sums[0].log() - sums[1]) * is_counted
    work.mul_((is_counted / sums[0]).unsqueeze(-1))
    work.scatter_add_(-1, local_target, -in_shard.to(work.dtype).unsqueeze(-1))
    logits.copy_(work)
    return losses, padded_logits
