"""The single-process reference of a DLRM: its tables, its loss and the optimizer of its tables.

It uses PyTorch's `embedding_bag` and `SparseAdam`, and row-wise AdaGrad written out. It shares only the dense model,
the samples and the initial weights with the rest of the package, and no code that knows about ranks.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data.criteo import ClickBatch
from shardwise.data.sample_stream import Samples
from shardwise.job import Job
from shardwise.random import hash_key, normal_


def make_tables(job: Job, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the initial embedding tables; none if the model is no DLRM."""
    tables = {}
    for number, table in enumerate(job.family.tables(job.model)):
        weight = torch.empty(table.rows, table.width, dtype=dtype)
        normal_(weight, hash_key("init", job.seed, f"table{number}"), weight.shape, (0, 0), table.init_std)
        tables[f"table{number}"] = weight.requires_grad_()
    return tables


def dlrm_loss(job: Job, dense: nn.Module, tables: list[Tensor], samples: Samples) -> Tensor:
    """Returns the mean loss of a batch."""
    model: Any = job.model
    batch = ClickBatch.unpack(samples, model)
    pooled = torch.stack([_pool_embeddings(table, batch, number) for number, table in enumerate(tables)], dim=1)
    logits: Tensor = dense(batch.dense_features.to(pooled.dtype), pooled)
    return F.binary_cross_entropy_with_logits(logits, batch.labels.to(pooled.dtype))


def _pool_embeddings(table: Tensor, batch: ClickBatch, number: int) -> Tensor:
    """Returns the pooled embedding of each sample from one table."""
    samples = zip(batch.sparse_ids[:, number].tolist(), batch.weights[:, number].tolist())
    pairs = [[(id, weight) for id, weight in zip(*sample) if id >= 0] for sample in samples]
    ids = torch.tensor([id for sample in pairs for id, _ in sample], dtype=torch.int64)
    weights = torch.tensor([weight for sample in pairs for _, weight in sample], dtype=table.dtype)
    offsets = torch.tensor([0, *accumulate(map(len, pairs[:-1]))])
    return F.embedding_bag(ids, table, offsets, mode="sum", sparse=True, per_sample_weights=weights)


def make_table_optimizers(job: Job, tables: dict[str, Any]) -> list[torch.optim.Optimizer]:
    if not tables:
        return []
    group = {"params": list(tables.values()), "lr_multiplier": job.embedding_tables.lr_multiplier}
    if job.embedding_tables.optimizer == "adam":
        return [torch.optim.SparseAdam([group], betas=job.optimizer.betas, eps=job.optimizer.eps)]
    return [RowwiseAdagrad([group], {"eps": job.optimizer.eps})]


class RowwiseAdagrad(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table in group["params"]:
                gradient, state = table.grad.to_dense(), self.state[table]
                state["sum"] = state.get("sum", 0.0) + gradient.square().mean(dim=1)
                table -= group["lr"] * gradient / (state["sum"].sqrt() + group["eps"])[:, None]
