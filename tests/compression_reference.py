"""Single-process reference for compressed gradient reduction: loops over the ranks with plain tensors.

It shares one definition with `shardwise/parallel/gradient_reduction.py`: the unit of compression. With shards only, a
unit is the rows of a tensor shard that one shard rank receives; across replicas, it is the slice that one replica
reduces.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import Samples
from shardwise.job import Job
from shardwise.layout import Layout, solve_batch
from shardwise.models.chain import IGNORE_INDEX, Chain
from shardwise.random import hash_key, normal_
from shardwise.verify.parity import VerifyResult, _compare_layout, _run_reference
from shardwise.verify.reference import GradientHook, loss_sum

RoundTrip = Callable[[Tensor], Tensor]


def verify_compressed(job: Job, layout: Layout, steps: int = 3) -> VerifyResult:
    """Compares a layout with one process that compresses gradients alike."""
    reference = run_world(_run_reference, 1, job, steps, None, partial(emulate_compression, job, layout, steps))[0]
    return run_world(_compare_layout, layout.world, job, layout, reference, steps)[0]


def emulate_compression(job: Job, layout: Layout, steps: int, model: Any) -> GradientHook:
    """Returns a hook that replaces the gradients of the reference by their compressed sum over the layout's ranks."""
    # ZeRO 2 and 3 reduce gradients after each micro-batch.
    fully_sharded = layout.shard > 1 and layout.zero > 1
    micro_batches = solve_batch(layout, job.samples).micro_batches if fully_sharded else 1
    compressed_sum = CompressedSumReference(job, layout, model)

    def hook(step_index: int, samples: Samples) -> None:
        if step_index >= job.gradient.uncompressed_steps(steps):
            sum_per_rank_gradients(job, model, samples, (layout.data, micro_batches), compressed_sum)

    return hook


def sum_per_rank_gradients(
    job: Job, model: nn.Module, samples: Samples, ranks_and_micro_batches: tuple[int, int],
    sum_gradients: Callable[[str, list[Tensor]], Tensor],
) -> None:  # fmt: skip
    """Recomputes the gradients of each emulated rank and micro-batch and adds them up with `sum_gradients`."""
    weights, count = dict(model.named_parameters()), (samples.targets != IGNORE_INDEX).sum()
    rank_micro_batches = [
        list(rank_samples.split(rank_samples.ids.numel() // ranks_and_micro_batches[1]))
        for rank_samples in samples.split(job.samples // ranks_and_micro_batches[0])
    ]
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    for micro_batches in zip(*rank_micro_batches, strict=True):
        rank_gradients: list[tuple[Tensor, ...]] = []
        for micro_batch in micro_batches:
            logits = model(micro_batch.tokens, ids=micro_batch.ids)
            targets = micro_batch.targets[:, -logits.shape[1] :]
            loss = loss_sum(logits.flatten(0, 1), targets.flatten())
            aux_losses: list[Any] = [getattr(module, "aux_loss", None) for module in model.modules()]
            total_loss = loss / count + sum(aux_loss for aux_loss in aux_losses if aux_loss is not None) / job.samples
            rank_gradients.append(torch.autograd.grad(total_loss, list(weights.values())))
        for (name, weight), gradients in zip(weights.items(), zip(*rank_gradients, strict=True), strict=True):
            assert weight.grad is not None
            weight.grad += sum_gradients(name, list(gradients))


class CompressedSumReference:
    """Reduces gradients as the compressed collectives do. Keeps error feedback and PowerSGD state between steps."""

    def __init__(self, job: Job, layout: Layout, chain: Chain):
        self.layout, self.sharding_plan, self.seed = layout, chain.sharding_plan, job.seed
        kind, _, argument = job.gradient.compress.partition(":")
        self.rank = int(argument.removeprefix("rank=") or 4) if kind == "powersgd" else 0
        self.uses_all_gather = kind in ("topk", "onebit")
        self.round_trip: RoundTrip = {
            "fp16": lambda x: x.half().to(x.dtype), "bf16": lambda x: x.bfloat16().to(x.dtype), "int8": int8_round_trip,
            "onebit": onebit_round_trip, "topk": lambda x: topk_round_trip(x, float(argument)), "powersgd": lambda x: x,
        }[kind]  # fmt: skip
        self.error_feedback: dict[tuple[str, int, int, int], Tensor] = {}
        self.powersgd_q: dict[tuple[str, int, int], Tensor] = {}

    def __call__(self, name: str, gradients: list[Tensor]) -> Tensor:
        """Returns the compressed sum of a weight's gradients, given one per data-parallel rank."""
        shape, total = gradients[0].shape, torch.zeros_like(gradients[0])
        tensor_shard = self.sharding_plan.shard_dim_of(name)
        tensor = self.layout.tensor
        is_tied_across_stages = self.layout.pipeline > 1 and name in self.sharding_plan.tied_parameters
        is_replicated = tensor > 1 and tensor_shard is None
        if tensor_shard is not None and tensor_shard.head_rows:
            is_replicated = shape[tensor_shard.dim] // tensor_shard.unit % tensor != 0
        if len(shape) < 2 or is_tied_across_stages or is_replicated:
            return torch.stack(gradients).sum(0)
        dim = tensor_shard.dim if tensor_shard is not None else 0
        shards = zip(*(gradient.chunk(tensor, dim) for gradient in [*gradients, total]), strict=True)
        for index, (*rank_shards, out) in enumerate(shards):
            out.copy_(self._sum_tensor_shard(name, index, [shard.contiguous() for shard in rank_shards]))
        return total

    def _sum_tensor_shard(self, name: str, index: int, parts: list[Tensor]) -> Tensor:
        shard, replicate = self.layout.shard, self.layout.replicate
        if replicate == 1:
            if self.rank:
                return self._powersgd_sum(name, index, 0, parts)
            size = -(-parts[0].shape[0] // shard) * parts[0][0].numel()
            return torch.cat([self._sum_with_feedback(name, index, number, rows, size)
                              for number, rows in enumerate(_rows_by_rank(parts, shard))])  # fmt: skip
        replica_sums = [torch.stack(parts[n * shard : (n + 1) * shard]).sum(0) for n in range(replicate)]
        return torch.cat([self._sum_over_replicas(name, index, number, list(rows))
                          for number, rows in enumerate(_rows_by_rank(replica_sums, shard))])  # fmt: skip

    def _sum_over_replicas(self, name: str, index: int, number: int, rows: list[Tensor]) -> Tensor:
        """Returns the sum over replicas of the rows that shard rank `number` holds."""
        if not rows[0].numel():
            return rows[0]
        if self.rank:
            return self._powersgd_sum(name, index, number, rows)
        size = rows[0].numel() if self.uses_all_gather else -(-rows[0].numel() // len(rows))
        sums = []
        for unit_index, units in enumerate(zip(*(row.flatten().split(size) for row in rows), strict=True)):
            summed = self._sum_with_feedback(name, index, 1000 * number + unit_index, units, size)
            sums.append(summed if self.uses_all_gather else self._round_trip_padded(summed, size))
        return torch.cat(sums).view(rows[0].shape)

    def _round_trip_padded(self, x: Tensor, size: int) -> Tensor:
        """Compresses and decompresses a unit, zero-padded to `size` elements."""
        padded = torch.nn.functional.pad(x.flatten(), (0, size - x.numel()))
        return self.round_trip(padded)[: x.numel()].view(x.shape)

    def _sum_with_feedback(self, name: str, index: int, number: int, units: tuple[Tensor, ...], size: int) -> Tensor:
        total = torch.zeros_like(units[0])
        for rank, gradient in enumerate(units):
            compensated = gradient + self.error_feedback.get((name, index, number, rank), torch.zeros_like(gradient))
            sent = self._round_trip_padded(compensated, size)
            self.error_feedback[name, index, number, rank] = compensated - sent
            total += sent
        return total

    def _powersgd_sum(self, name: str, index: int, number: int, parts: list[Tensor]) -> Tensor:
        """One PowerSGD power iteration (Vogels et al. 2019), warm-started from the previous step."""
        height, width = parts[0].shape[0], parts[0].flatten(1).shape[1]
        errors = [self.error_feedback.get((name, index, number, rank), 0.0) for rank in range(len(parts))]
        compensated = [part.flatten(1) + error for part, error in zip(parts, errors, strict=True)]
        rows = -(-height // self.layout.shard) * (self.layout.shard if self.layout.replicate == 1 else 1)
        size = torch.Size((width, min(self.rank, rows, width)))
        if (name, index, number) not in self.powersgd_q:
            self.powersgd_q[name, index, number] = torch.empty(size, dtype=parts[0].dtype)
            normal_(self.powersgd_q[name, index, number], hash_key("powersgd", self.seed, name), size, (0, 0), 1.0)
        q = self.powersgd_q[name, index, number]
        p = torch.stack([gradient @ q for gradient in compensated]).sum(0)
        p = torch.linalg.qr(torch.nn.functional.pad(p, (0, 0, 0, max(0, size[1] - height))))[0][:height]
        rank_qs = [gradient.mT @ p for gradient in compensated]
        for rank, (gradient, rank_q) in enumerate(zip(compensated, rank_qs, strict=True)):
            self.error_feedback[name, index, number, rank] = gradient - p @ rank_q.mT
        self.powersgd_q[name, index, number] = torch.stack(rank_qs).sum(0)
        return (p @ self.powersgd_q[name, index, number].mT).view(parts[0].shape)


def _rows_by_rank(parts: list[Tensor], ranks: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields each rank's rows of every tensor; the last ranks may have none."""
    size = -(-parts[0].shape[0] // ranks)
    for rank in range(ranks):
        yield tuple(part[rank * size : (rank + 1) * size] for part in parts)


def int8_round_trip(x: Tensor) -> Tensor:
    blocks = x.split(1024)
    scales = [(block.abs().max() / 127).float().to(x.dtype) for block in blocks]
    return torch.cat([(b / s).round() * s if s > 0 else torch.zeros_like(b) for b, s in zip(blocks, scales)])


def onebit_round_trip(x: Tensor) -> Tensor:
    blocks = x.split(64)
    sizes = [(block.abs().sum() / 64).float().to(x.dtype) for block in blocks]  # the last block is zero-padded
    return torch.cat([torch.where(block >= 0, size, -size) for block, size in zip(blocks, sizes)])


def topk_round_trip(x: Tensor, fraction: float) -> Tensor:
    out = torch.zeros_like(x)
    for first in range(0, len(x), 256):
        order = x[first : first + 256].abs().argsort(descending=True, stable=True)
        for place in first + order[: math.ceil(fraction * 256)]:
            out[place] = x[place]
    return out
