"""Verification of a DLRM: the single-process reference, and the comparison of sharded embedding tables with it.

The reference uses PyTorch's EmbeddingBag, `torch.optim`, and row-wise AdaGrad written out. It shares only the dense
model, the samples and the initial weights with the rest of the package, and no code that knows about ranks.
"""

import math
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data.criteo import ClickBatch
from shardwise.data.sample_stream import SampleStream
from shardwise.job import Job
from shardwise.models.chain import init_weights
from shardwise.random import hash_key, normal_
from shardwise.verify.reference import make_reference_optimizers


def run_dlrm_reference(
    job: Job, stream: SampleStream, learning_rates: list[float], record_outputs: Any, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Returns one record per step: loss, gradient norm, gradients before clipping, weights after the update."""
    model: Any = job.model
    settings = job.optimizer
    dense = job.family.build(model, job.seed).to(dtype)
    init_weights(dense, job.seed)
    bags = []
    for number, table in enumerate(job.family.tables(model)):
        bag = nn.EmbeddingBag(table.rows, table.width, mode="sum", sparse=True, dtype=dtype)
        key = hash_key("init", job.seed, f"table{number}")
        normal_(bag.weight.data, key, bag.weight.shape, (0, 0), table.init_std)
        bags.append(bag)
    weights: dict[str, Any] = dict(dense.named_parameters())
    tables: dict[str, Any] = {f"table{number}": bag.weight for number, bag in enumerate(bags)}
    (optimizer,) = make_reference_optimizers(job, weights)
    sparse_optimizer = torch.optim.SparseAdam(list(tables.values()), betas=settings.betas, eps=settings.eps)
    squared_grad_sums = {name: torch.zeros(table.shape[0], dtype=dtype) for name, table in tables.items()}
    records = []
    for step, lr in enumerate(learning_rates):
        samples = stream.read((torch.arange(job.samples) + step * job.samples).numpy())
        batch = ClickBatch.unpack(samples, model)
        outputs: dict[str, list[Tensor]] = {}
        handles = record_outputs(dense, outputs)
        pooled = torch.stack([_pool_embeddings(bag, batch, number) for number, bag in enumerate(bags)], dim=1)
        logits = dense(batch.dense_features.to(dtype), pooled)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.to(dtype))
        loss.backward()
        for handle in handles:
            handle.remove()
        for table in tables.values():
            table.grad = table.grad.coalesce()
        gradients = {name: weight.grad.to_dense().clone() for name, weight in (weights | tables).items()}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        clip_factor = settings.clip / norm if settings.clip and norm > settings.clip else torch.ones_like(norm)
        for weight in (weights | tables).values():
            weight.grad = weight.grad * clip_factor
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for group in sparse_optimizer.param_groups:
            group["lr"] = lr * job.embedding_tables.lr_multiplier
        if job.embedding_tables.optimizer == "adam":
            sparse_optimizer.step()
        else:
            for name, table in tables.items():
                gradient = table.grad.to_dense()
                squared_grad_sums[name] += gradient.square().mean(dim=1)
                denominator = (squared_grad_sums[name].sqrt() + settings.eps)[:, None]
                table.data -= lr * job.embedding_tables.lr_multiplier * gradient / denominator
        updated_weights = {name: weight.detach().clone() for name, weight in (weights | tables).items()}
        for weight in (weights | tables).values():
            weight.grad = None
        record = {"loss": loss.detach(), "norm": norm, "outputs": outputs, "gradients": gradients}
        records.append(record | {"weights": updated_weights})
    return records


def _pool_embeddings(bag: nn.EmbeddingBag, batch: ClickBatch, table: int) -> Tensor:
    """Returns the pooled embedding of each sample from one table."""
    samples = zip(batch.sparse_ids[:, table].tolist(), batch.weights[:, table].tolist())
    pairs = [[(id, weight) for id, weight in zip(*sample) if id >= 0] for sample in samples]
    ids = torch.tensor([id for sample in pairs for id, _ in sample], dtype=torch.int64)
    weights = torch.tensor([weight for sample in pairs for _, weight in sample], dtype=bag.weight.dtype)
    return bag(ids, torch.tensor([0, *accumulate(map(len, pairs[:-1]))]), weights)


# Comparison, on the ranks of the layout


def compare_embedding_tables(comparison: Any, step: int, kind: str, engine: Any, expected: dict[str, Tensor]) -> None:
    """Compares the gradient or weight (`kind`) of each rank's table shards with the same shards of the reference."""
    names = [table.name for table in engine.tables.tables]
    squared_errors = torch.zeros(len(names), dtype=torch.float64)
    num_compared = torch.zeros(len(names), dtype=torch.float64)
    scale = float(engine.scale.value)
    for table_shard in engine.tables.local_shards:
        (top, bottom), (left, right) = table_shard.shard.rows, table_shard.shard.columns
        expected_shard = expected[names[table_shard.shard.table]][top:bottom, left:right]
        value = table_shard.rows
        if kind == "gradient":
            rows, gradient = engine.tables.gradient_of(table_shard.shard)
            value = torch.zeros_like(table_shard.rows).index_copy_(0, rows, gradient / scale)
        squared_errors[table_shard.shard.table] += (value - expected_shard).double().square().sum()
        num_compared[table_shard.shard.table] += value.numel()
    if engine.mesh["world"].size > 1:
        dist.all_reduce(squared_errors)
        dist.all_reduce(num_compared)
    rms_norm = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in expected.values()) / len(expected))
    for index, name in enumerate(names):
        error = math.sqrt(float(squared_errors[index])) / max(float(expected[name].norm()), comparison.floor * rms_norm)
        is_complete = num_compared[index] == expected[name].numel()  # every element is on exactly one rank
        comparison.add(step, kind, len(expected) + index, name, error if is_complete else math.inf)
