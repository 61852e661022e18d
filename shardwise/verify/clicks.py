"""Verify for a DLRM: the truth, and the comparison of tables that lie on many ranks.

The truth is one process: PyTorch's EmbeddingBag, `torch.optim`, and row-wise AdaGrad written out. Of ours it imports
the dense model, the samples and the initial numbers, and nothing that knows of ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data.criteo import Clicks, Generated
from shardwise.data.stream import Stream
from shardwise.job import Job
from shardwise.kinds import DLRM
from shardwise.models.chain import reset
from shardwise.models.dlrm import dlrm, table_std
from shardwise.random import key_of, normal_
from shardwise.verify.plain import optimizers_of

LAYOUTS = (
    "replicate=2", "shard=2 zero=1", "shard=2 zero=2", "shard=3 zero=3", "replicate=2 shard=2 zero=2",
    "replicate=4 micro_batch=2", "shard=8 zero=1",
)  # fmt: skip


def make_stream(job: Job) -> Stream:
    """Short enough that three steps see more than one epoch."""
    assert isinstance(job.model, DLRM)
    return Stream(Generated(job.model, 0, max(1, 2 * job.samples - 1), job.seed), job.seed)


def truth(job: Job, stream: Stream, rates: list[float], watch: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One record per step: loss, norm, gradients before clipping, and weights after the update."""
    model, settings = job.model, job.optimizer
    assert isinstance(model, DLRM)
    dense = dlrm(model).to(dtype)
    reset(dense, job.seed)
    bags = []
    for number, rows in enumerate(model.sizes):
        bag = nn.EmbeddingBag(rows, model.width, mode="sum", sparse=True, dtype=dtype)
        key = key_of("init", job.seed, f"table{number}")
        normal_(bag.weight.data, key, bag.weight.shape, (0, 0), table_std(rows))
        bags.append(bag)
    weights: dict[str, Any] = dict(dense.named_parameters())
    tables: dict[str, Any] = {f"table{number}": bag.weight for number, bag in enumerate(bags)}
    (optimizer,) = optimizers_of(job, weights)
    sparse = torch.optim.SparseAdam(list(tables.values()), betas=settings.betas, eps=settings.eps)
    sums = {name: torch.zeros(table.shape[0], dtype=dtype) for name, table in tables.items()}
    records = []
    for step, rate in enumerate(rates):
        samples = stream.read((torch.arange(job.samples) + step * job.samples).numpy())
        clicks = Clicks.of(samples, model)
        seen: dict[str, list[Tensor]] = {}
        handles = watch(dense, seen)
        vectors = torch.stack([_look_up(bag, clicks, number) for number, bag in enumerate(bags)], dim=1)
        logits = dense(clicks.numbers.to(dtype), vectors)
        loss = F.binary_cross_entropy_with_logits(logits, clicks.labels.to(dtype))
        loss.backward()
        for handle in handles:
            handle.remove()
        for table in tables.values():
            table.grad = table.grad.coalesce()
        gradients = {name: weight.grad.to_dense().clone() for name, weight in (weights | tables).items()}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        factor = settings.clip / norm if settings.clip and norm > settings.clip else torch.ones_like(norm)
        for weight in (weights | tables).values():
            weight.grad = weight.grad * factor
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for group in sparse.param_groups:
            group["lr"] = rate * job.embedding.rate
        if job.embedding.optimizer == "adam":
            sparse.step()
        else:
            for name, table in tables.items():
                gradient = table.grad.to_dense()
                sums[name] += gradient.square().mean(dim=1)
                table.data -= rate * job.embedding.rate * gradient / (sums[name].sqrt() + settings.eps)[:, None]
        after = {name: weight.detach().clone() for name, weight in (weights | tables).items()}
        for weight in (weights | tables).values():
            weight.grad = None
        records.append({"loss": loss.detach(), "norm": norm, "seen": seen, "gradients": gradients, "weights": after})
    return records


def _look_up(bag: nn.EmbeddingBag, clicks: Clicks, number: int) -> Tensor:
    """A table's vector of each sample."""
    ids: list[int] = []
    weights: list[float] = []
    offsets = []
    for categories, factors in zip(clicks.categories[:, number].tolist(), clicks.weights[:, number].tolist()):
        offsets.append(len(ids))
        for category, factor in zip(categories, factors):
            if category >= 0:
                ids.append(category)
                weights.append(factor)
    dtype = bag.weight.dtype
    found: Tensor = bag(torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets), torch.tensor(weights, dtype=dtype))
    return found


# Comparison, in the layout's own world


def compare_tables(comparison: Any, number: int, kind: str, engine: Any, expected: dict[str, Tensor]) -> None:
    """Compares each rank's pieces of tables, their `gradient` or their `weight`, with the same pieces of the truth."""
    names = [table.name for table in engine.tables.tables]
    squares = torch.zeros(len(names), dtype=torch.float64)
    covered = torch.zeros(len(names), dtype=torch.float64)
    scale = float(engine.scale.value)
    for held in engine.tables.held:
        (top, bottom), (left, right) = held.shard.rows, held.shard.columns
        piece = expected[names[held.shard.table]][top:bottom, left:right]
        value = held.rows
        if kind == "gradient":
            rows, gradient = engine.tables.gradient_of(held.shard)
            value = torch.zeros_like(held.rows).index_copy_(0, rows, gradient / scale)
        squares[held.shard.table] += (value - piece).double().square().sum()
        covered[held.shard.table] += value.numel()
    if engine.mesh["world"].size > 1:
        dist.all_reduce(squares)
        dist.all_reduce(covered)
    typical = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in expected.values()) / len(expected))
    for place, name in enumerate(names):
        error = math.sqrt(float(squares[place])) / max(float(expected[name].norm()), comparison.floor * typical)
        whole = covered[place] == expected[name].numel()  # every number is held once
        comparison.add(number, kind, len(expected) + place, name, error if whole else math.inf)


def without_tables(engine: Any) -> Any:
    return replace(engine, holdings=[holding for holding in engine.holdings if holding.where is None])
